"""The verbs of MTP drafts: trunk build, heal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from arrowbank.cli.options import WHOLE, Common, DryRun, Out
from arrowbank.cli.show import fail_on, finish, progress_for, show_estimate, unfinished
from arrowbank.settings import Group, Help, Part

if TYPE_CHECKING:
    from arrowbank import HealConfig, RunOptions, TrunkConfig


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


WRITE = Group("Output options")
TRAINED = Part(
    hidden=(*WHOLE.hidden, "workers"),
    help={"budget_gb": Help("Refuse to start if copies and training state take more (10^9 bytes).", "X")},
)


def heal(
    trunk: Annotated[str, Help("The bank that `trunk build` made of this model.", "DIR")],
    config: HealConfig,
    out: Annotated[str, Help("The copy of the checkpoint with the healed draft.", "DIR"), WRITE],
    options: Annotated[RunOptions, TRAINED],
    common: Common,
    dump: Annotated[str, Help("The draft's rows before and after, as a bank.", "DIR"), WRITE] | None = None,
    dry_run: DryRun = False,
) -> None:
    """Train a model's MTP draft to agree with its trunk again, and write the checkpoint with it. Goes on after a crash.

    Example: arrowbank heal --trunk trunk --model Qwen/Qwen3.5-4B --out healed --also nf4=healed_nf4
    """
    from arrowbank.mtp.heal import estimate_heal, table
    from arrowbank.mtp.heal import heal_draft as run

    if dry_run:
        show_estimate(estimate_heal(config, trunk, out, dump=dump, options=options), common.json)
        return
    report = run(config, trunk, out, dump=dump, options=options, progress=progress_for(common.json))
    finish(common.json, report, "\n".join([*table(report), f"Trace, picture and report: {out}.heal"]))
    fail_on(report["failed"])
