"""The verbs of IN2 arms: in2 build, in2 verify, in2 probes and in2 score."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arrowbank.cli.options import Common, DryRun, Out, Restart
from arrowbank.cli.show import finish, progress_for, show_checks, show_estimate, unfinished
from arrowbank.errors import InputError
from arrowbank.in2.arm_config import PLANTED
from arrowbank.settings import Help

if TYPE_CHECKING:
    from arrowbank import In2Config, ProbesConfig, RunOptions, ScoreConfig

FillerOption = Annotated[
    list[str],
    Help("Token ids (.bin, .npy), a bank of tokens or texts, or records with texts; several, or repeat it.", "FILE ..."),
    PLANTED,
]
MoreFiller = Annotated[list[str] | None, typer.Argument(metavar="[FILE]", hidden=True)]


def build(
    config: In2Config,
    out: Out,
    options: RunOptions,
    common: Common,
    more: MoreFiller = None,
    filler: FillerOption | None = None,
    dry_run: DryRun = False,
) -> None:
    """Build one arm: real filler with keys and values planted in it, as a bank and as raw shards. Exact to the bit.

    Example: arrowbank in2 build --arm c --length 16384 --examples 6000 --filler train_0.bin --out arm_c
    """
    from arrowbank.in2.arm import build_in2, estimate_in2

    sources, progress = _fillers(filler, more), progress_for(common.json)
    if dry_run:
        show_estimate(estimate_in2(config, sources, out, options=options, progress=progress), common.json)
        return
    manifest = build_in2(config, sources, out, options=options, progress=progress)
    finish(common.json, manifest, _built(out, manifest))


def probes(
    config: ProbesConfig,
    out: Out,
    options: RunOptions,
    common: Common,
    more: MoreFiller = None,
    filler: FillerOption | None = None,
    dry_run: DryRun = False,
) -> None:
    """Write trials of one needle and one probe at chosen distances, with controls, to measure a model on.

    Example: arrowbank in2 probes --length 16384 --filler val_0.bin --blocks 20 --out probes
    """
    from arrowbank.in2.probes import build_probes, estimate_probes

    sources, progress = _fillers(filler, more), progress_for(common.json)
    if dry_run:
        show_estimate(estimate_probes(config, sources, out, options=options, progress=progress), common.json)
        return
    manifest = build_probes(config, sources, out, options=options, progress=progress)
    said = f"{out}: {manifest['rows']:,} trials of {config.length:,} tokens in {config.blocks} blocks."
    finish(common.json, manifest, said if manifest["complete"] else unfinished(out, manifest))


def verify(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="Arms of the same options, and exports of them.")],
    common: Common,
    filler: Annotated[list[str], Help("The sources, if they were moved; repeat it.", "FILE")] | None = None,
    unique_keys: Annotated[bool, Help("A key that an example or its filler holds twice is an error.")] = False,
) -> None:
    """Prove arms: everything planted can be retrieved, everything else is filler, and arms differ in distance only.

    Example: arrowbank in2 verify arm_a arm_b arm_c
    """
    from arrowbank.in2.verify_arms import verify_in2

    checks = verify_in2(folders, fillers=filler, unique_keys=unique_keys, progress=progress_for(common.json))
    show_checks(checks, common.json)


def score(
    folder: Annotated[str, typer.Argument(metavar="PROBES", help="A folder that `in2 probes` made.")],
    config: ScoreConfig,
    out: Annotated[str, Help("For table, JSON and plot.", "DIR")],
    common: Common,
    restart: Restart = False,
) -> None:
    """Measure how far models find a needle: NLL of the answer by distance, gaps to the controls, the reach, table and plot.

    Example: arrowbank in2 score probes --model runs/arm_b --model runs/arm_c --out scores
    """
    from arrowbank.in2.score import score_lines
    from arrowbank.in2.score import score_probes as run

    found = run(config, folder, out, restart=restart, progress=progress_for(common.json))
    reach = {name: curve.reach for name, curve in found.curves.items()}
    finish(common.json, {"reach": reach, "folder": out}, "\n".join(score_lines(found)))


def _fillers(named: list[str] | None, more: list[str] | None) -> list[str]:
    """The files behind --filler: `--filler A B` or `--filler A --filler B`. Their order decides the data, so not both at once."""
    if more and len(named or ()) != 1:
        raise InputError(
            f"{more[0]}: stands behind no option. Name all fillers behind one --filler, or give one --filler for each."
        )
    return [*(named or ()), *(more or ())]


def _built(out: str, manifest: dict[str, Any]) -> str:
    if not manifest["complete"]:
        return unfinished(out, manifest)
    return (
        f"{out}: arm {manifest['arm']}, {manifest['examples']:,} examples of {manifest['T']:,} tokens, "
        f"{manifest['triples']:,} triples, {manifest['decoys_placed']:,} decoys.\nProve it: arrowbank in2 verify {out}"
    )


VERBS: dict[str, Callable[..., None]] = {"build": build, "verify": verify, "probes": probes, "score": score}
