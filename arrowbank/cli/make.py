"""The verbs that make banks: scan, tokenize, encode, build."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from arrowbank.cli import options as o
from arrowbank.cli.show import done_event, finish, progress_for, show_estimate, unfinished
from arrowbank.cli.spread import spread
from arrowbank.errors import InputError
from arrowbank.settings import refuse_unread


@spread
def scan(what: o.ScanOptions, out: o.Out, common: o.Common, onto: o.OntoTexts = None, restart: o.Restart = False) -> None:
    """Collect the unique texts of episode files, in first-seen order.

    Example: arrowbank scan --source train=train.jsonl --source eval=eval.jsonl --out router/texts
    """
    from arrowbank.features.scan import scan as run

    progress = progress_for(common.json)
    manifest = run(what.config(onto), out, restart=restart, progress=progress)
    finish(
        common.json,
        manifest,
        f"{out}: {manifest['rows']:,} unique texts. Next: arrowbank tokenize {out} --tokenizer M --out DIR",
    )


@spread
def tokenize(
    texts: Annotated[str, typer.Argument(metavar="TEXTS", help="A bank that `scan` made.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", metavar="M", help="A folder or hub name; a fast tokenizer.")],
    out: o.Out,
    what: o.TokenizeOptions,
    how: o.TextRunOptions,
    common: o.Common,
    trust_remote_code: o.TrustRemoteCode = False,
) -> None:
    """Turn a texts bank into a tokens bank of the same rows.

    Example: arrowbank tokenize router/texts --tokenizer Qwen/Qwen3-4B --out router/tokens
    """
    from arrowbank.features.tokenize import estimate_tokenize
    from arrowbank.features.tokenize import tokenize as run

    config = what.config(tokenizer, trust_remote_code=trust_remote_code)
    options, progress = how.options(), progress_for(common.json)
    if how.dry_run:
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


@spread
def encode(
    tokens: Annotated[str, typer.Argument(metavar="TOKENS", help="A bank that `tokenize` made.")],
    out: o.Out,
    what: o.EncodeOptions,
    growth: o.GrowthOptions,
    how: o.RunOptions,
    common: o.Common,
    trust_remote_code: o.TrustRemoteCode = False,
    onto: o.OntoFeatures = None,
    texts: o.TextsFolder = None,
) -> None:
    """Encode a tokens bank with a frozen model into a feature bank. The same command again goes on after a crash.

    Example: arrowbank encode router/tokens --model Qwen/Qwen3-4B --load-in-4bit --out router/features
    """
    from arrowbank.features.encode import encode as run
    from arrowbank.features.encode import estimate

    if what.encoder is not None:
        refuse_unread("--encoder", trust_remote_code=trust_remote_code)
    config = what.config(trust_remote_code=trust_remote_code, onto=onto, growth=growth)
    options, progress = how.options(), progress_for(common.json)
    if how.dry_run:
        show_estimate(estimate(config, tokens, out, texts=texts, options=options, progress=progress), common.json)
        return
    manifest = run(config, tokens, out, texts=texts, options=options, progress=progress)
    finish(common.json, manifest, _encoded(out, manifest))


@spread
def build(
    episodes: o.ScanOptions,
    out: o.Out,
    tokens: o.TokenizeOptions,
    vectors: o.EncodeOptions,
    growth: o.GrowthOptions,
    how: o.TextRunOptions,
    common: o.Common,
    tokenizer: o.Tokenizer = None,
    trust_remote_code: o.TrustRemoteCode = False,
    onto: o.OntoBuild = None,
) -> None:
    """Scan, tokenize and encode into DIR/texts, DIR/tokens and DIR/features.

    Example: arrowbank build --source train=train.jsonl --model Qwen/Qwen3-4B --out router
    """
    from arrowbank.features.build import BuildConfig
    from arrowbank.features.build import build as run

    if how.dry_run:
        refuse_unread("build, whose size is known after tokenize (then run estimate)", dry_run=True)
    names = tokenizer or vectors.model
    if names is None and vectors.encoder:
        raise InputError("--encoder needs --tokenizer as well: there is no --model whose tokenizer could be used.")
    encoding = vectors.config(trust_remote_code=trust_remote_code, growth=growth)
    config = BuildConfig(
        scan=episodes.config(),
        tokenize=tokens.config(str(names), trust_remote_code=trust_remote_code),
        encode=encoding,
        onto=onto,
    )
    progress = progress_for(common.json)
    manifest = run(config, out, options=how.options(), progress=progress)
    finish(common.json, manifest, _encoded(str(Path(out) / "features"), manifest))


@spread
def demo(
    common: o.Common,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="The demo's folder.")] = "demo_bank",
    episodes: Annotated[int | None, typer.Option("--episodes", help="How many episodes. Default: 2,400.")] = None,
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
