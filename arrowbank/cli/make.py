"""The verbs that make feature banks: scan, tokenize, encode, build; and demo."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arrowbank.cli.options import WHOLE, Common, DryRun, Out, Texts
from arrowbank.cli.show import done_event, finish, progress_for, show_estimate, unfinished
from arrowbank.settings import Count, Help, Part, refuse_unread

if TYPE_CHECKING:
    from arrowbank import BuildConfig, EncodeConfig, RunOptions, ScanConfig, TokenizeConfig


def scan(config: ScanConfig, out: Out, options: Annotated[RunOptions, WHOLE], common: Common, dry_run: DryRun = False) -> None:
    """Collect the unique texts of episode files, in first-seen order.

    Example: arrowbank scan --source train=train.jsonl --source eval=eval.jsonl --out router/texts
    """
    from arrowbank.features.scan import estimate_scan
    from arrowbank.features.scan import scan as run

    progress = progress_for(common.json)
    if dry_run:
        show_estimate(estimate_scan(config, out, options=options, progress=progress), common.json)
        return
    manifest = run(config, out, options=options, progress=progress)
    said = f"{out}: {manifest['rows']:,} unique texts. Next: arrowbank tokenize {out} --tokenizer M --out DIR"
    finish(common.json, manifest, said)


def tokenize(
    texts: Annotated[str, typer.Argument(metavar="TEXTS", help="A bank that `scan` made.")],
    config: TokenizeConfig,
    out: Out,
    options: RunOptions,
    common: Common,
    dry_run: DryRun = False,
) -> None:
    """Turn a texts bank into a tokens bank of the same rows.

    Example: arrowbank tokenize router/texts --tokenizer Qwen/Qwen3-4B --out router/tokens
    """
    from arrowbank.features.tokenize import estimate_tokenize
    from arrowbank.features.tokenize import tokenize as run

    progress = progress_for(common.json)
    if dry_run:
        show_estimate(estimate_tokenize(config, texts, out, options=options, progress=progress), common.json)
        return
    manifest = run(config, texts, out, options=options, progress=progress)
    finish(common.json, manifest, _tokenized(out, manifest) if manifest["complete"] else unfinished(out, manifest))


def _tokenized(out: str, manifest: dict[str, Any]) -> str:
    counts = manifest["counts"]
    return (
        f"{out}: {counts['tokens']:,} tokens of {manifest['rows']:,} texts, {counts['truncated']:,} truncated. "
        f"Next: arrowbank encode {out} --model M --out DIR"
    )


def encode(
    tokens: Annotated[str, typer.Argument(metavar="TOKENS", help="A bank that `tokenize` made.")],
    out: Out,
    config: EncodeConfig,
    options: RunOptions,
    common: Common,
    texts: Texts | None = None,
    dry_run: DryRun = False,
) -> None:
    """Encode a tokens bank with a frozen model into a feature bank. The same command again goes on after a crash.

    Example: arrowbank encode router/tokens --model Qwen/Qwen3-4B --load-in-4bit --out router/features
    """
    from arrowbank.features.encode import encode as run
    from arrowbank.features.encode import estimate_encode

    progress = progress_for(common.json)
    if dry_run:
        show_estimate(estimate_encode(config, tokens, out, texts=texts, options=options, progress=progress), common.json)
        return
    manifest = run(config, tokens, out, texts=texts, options=options, progress=progress)
    finish(common.json, manifest, _encoded(out, manifest))


EVERY_STAGE = Part(
    hidden=("worker",),
    help={
        "workers": Help("Worker processes of each stage. Default: automatic."),
        "budget_gb": Help("Refuse a stage whose bank takes more (10^9 bytes).", "X"),
    },
)


def build(
    config: BuildConfig, out: Out, options: Annotated[RunOptions, EVERY_STAGE], common: Common, dry_run: DryRun = False
) -> None:
    """Scan, tokenize and encode into DIR/texts, DIR/tokens and DIR/features.

    Example: arrowbank build --source train=train.jsonl --model Qwen/Qwen3-4B --out router
    """
    from arrowbank.features.pipeline import build as run

    refuse_unread("build, whose size is known after tokenize (then run estimate)", dry_run=dry_run)
    manifest = run(config, out, options=options, progress=progress_for(common.json))
    finish(common.json, manifest, _encoded(str(Path(out) / "features"), manifest))


def demo(
    common: Common,
    out: Annotated[str, Help("The demo's folder.", "DIR")] = "demo_bank",
    episodes: Annotated[Count, Help("How many episodes.", default="2400")] | None = None,
) -> None:
    """Build a real bank from the docstrings of this Python with a real sentence encoder, and query it.

    Example: arrowbank demo --out demo_bank
    """
    from arrowbank.cli import demo as module

    progress = progress_for(common.json)
    say = progress.message if common.json else print  # standard output is for events then
    manifest = module.run(Path(out), episodes=module.EPISODES if episodes is None else episodes, progress=progress, say=say)
    if common.json:
        done_event(manifest)


def _encoded(out: str, manifest: dict[str, Any]) -> str:
    if not manifest["complete"]:
        return unfinished(out, manifest)
    return (
        f"{out}: {manifest['rows']:,} vectors of width {manifest['hidden_size']:,}, committed.\n"
        f"Open it:     from arrowbank import open_bank; bank = open_bank({out!r})\n"
        f"Look at it:  arrowbank report {shlex.quote(out)} --out report.html"
    )
