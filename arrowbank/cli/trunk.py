"""The verb of trunk banks: trunk build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arrowbank.cli.options import Common, DryRun, Out
from arrowbank.cli.show import finish, progress_for, show_estimate, unfinished

if TYPE_CHECKING:
    from arrowbank import RunOptions, TrunkConfig


def build(out: Out, config: TrunkConfig, options: RunOptions, common: Common, dry_run: DryRun = False) -> None:
    """Run a model over packed windows; keep its hidden states and most likely next tokens. The same command again goes on.

    Example: arrowbank trunk build --model Qwen/Qwen3-Next-80B-A3B-Instruct --source code=tokens --out trunk
    """
    from arrowbank.mtp.trunk_build import build_trunk, estimate_trunk

    progress = progress_for(common.json)
    if dry_run:
        show_estimate(estimate_trunk(config, out, options=options, progress=progress), common.json)
        return
    manifest = build_trunk(config, out, options=options, progress=progress)
    finish(common.json, manifest, _made(out, manifest, taps=bool(config.layers)))


def _made(out: str, manifest: dict[str, Any], *, taps: bool) -> str:
    if not manifest["complete"]:
        return unfinished(out, manifest)
    counts = manifest["counts"]
    beside = f" Taps of the held-out ones: {out}-taps." if taps else ""
    return (
        f"{out}: {counts['windows']:,} windows of {manifest['window']:,} tokens, {counts['held_out']:,} held out, "
        f"{counts['tokens']:,} tokens.{beside}\nProve it: arrowbank verify {out}"
    )
