"""The verbs of IN2 arms: in2 build, in2 verify, in2 probes and in2 score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arrowbank.cli import options as o
from arrowbank.cli.parameters import Common, Out, Restart
from arrowbank.cli.show import finish, progress_for, show_checks, show_estimate, unfinished
from arrowbank.cli.spread import spread
from arrowbank.errors import InputError
from arrowbank.settings import Help, Old, refuse_unread

if TYPE_CHECKING:
    from arrowbank import ProbesConfig, ScoreConfig

WHAT = "What is planted"

Filler = Annotated[
    list[str] | None,
    typer.Option(
        "--filler",
        metavar="FILE ...",
        help="Token ids (.bin, .npy), a bank of tokens or texts, or records with texts; several, or repeat it.",
        rich_help_panel=WHAT,
    ),
]
MoreFiller = Annotated[list[str] | None, typer.Argument(metavar="[FILE]", hidden=True)]


def _what(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=WHAT, **settings)


@dataclass
class SpanOptions:
    """What keys and values are made of, and where filler comes from."""

    length: Annotated[int, _what("--length", help="Tokens of an example.")]
    key_len: Annotated[int, _what("--key-len", help="Tokens of a key.")] = 4
    val_len: Annotated[int, _what("--val-len", help="Tokens of a value.")] = 8
    alphabet: Annotated[int, _what("--alphabet", help="Keys and values are of ids below it.")] = 512
    vocab: Annotated[int, _what("--vocab", help="All ids lie below it.")] = 50304
    seed: Annotated[int, _what("--seed", help="The same for all arms that are compared.")] = 0
    dtype: Annotated[str, _what("--dtype", metavar="uint16|uint32", help="Of the ids that are written.")] = "uint16"
    tokenizer: Annotated[str | None, _what("--tokenizer", metavar="M", help="For a filler of texts.")] = None


@spread
def build(
    arm: Annotated[str, _what("--arm", metavar="a|b|c", help="a: no needles; b: right before the probe; c: far before it.")],
    examples: Annotated[int, _what("--examples", help="How many.")],
    out: o.Out,
    spans: SpanOptions,
    how: o.RunOptions,
    common: o.Common,
    more: MoreFiller = None,
    filler: Filler = None,
    triples: Annotated[int, _what("--triples", help="Needles, probes and answers an example.")] = 64,
    decoys: Annotated[int | None, _what("--decoys", help="Never asked for. Default: a quarter of the triples.")] = None,
    min_distance: Annotated[int, _what("--min-distance", help="Arm c: tokens between needle and probe, at least.")] = 64,
    split: Annotated[
        str, _what("--split", metavar="train|val", help="In the files' names; train takes no validation file.")
    ] = ("train"),
    raw_shards: Annotated[
        int | None, _what("--raw-shards", show_default="1", help="Raw shards; at most 100,000,000 tokens each.")
    ] = None,
    global_batch: Annotated[
        int | None, _what("--global-batch", help="The loader's batch x ranks: examples must be a multiple."), Old("--align")
    ] = None,
    unique_keys: Annotated[
        bool, _what("--unique-keys", help="A key twice in an example, or in its filler, is an error.")
    ] = False,
    no_mirror: Annotated[bool, _what("--no-mirror", help="Leave out the raw shards and their manifest.")] = False,
) -> None:
    """Build one arm: real filler with keys and values planted in it, as a bank and as raw shards. Exact to the bit.

    Example: arrowbank in2 build --arm c --length 16384 --examples 6000 --filler train_0.bin --out arm_c
    """
    from arrowbank.in2.build import build_in2, estimate_in2
    from arrowbank.in2.config import In2Config

    if no_mirror:
        refuse_unread("--no-mirror, which writes no raw shards", raw_shards=raw_shards)
    config = o.make(
        In2Config,
        spans,
        arm=arm,
        examples=examples,
        triples=triples,
        decoys=decoys,
        min_distance=min_distance,
        split=split,
        raw_shards=raw_shards,
        global_batch=global_batch,
        unique_keys=unique_keys,
        mirror=not no_mirror,
    )
    sources, options, progress = _fillers(filler, more), how.options(), progress_for(common.json)
    if how.dry_run:
        show_estimate(estimate_in2(config, sources, out, options=options, progress=progress), common.json)
        return
    manifest = build_in2(config, sources, out, options=options, progress=progress)
    finish(common.json, manifest, _built(out, manifest))


def probes(
    config: ProbesConfig,
    out: Out,
    common: Common,
    more: MoreFiller = None,
    filler: Filler = None,
    restart: Restart = False,
) -> None:
    """Write trials of one needle and one probe at chosen distances, with controls, to measure a model on.

    Example: arrowbank in2 probes --length 16384 --filler val_0.bin --blocks 20 --out probes
    """
    from arrowbank.in2.probes import build_probes

    manifest = build_probes(config, _fillers(filler, more), out, restart=restart, progress=progress_for(common.json))
    finish(common.json, manifest, f"{out}: {manifest['rows']:,} trials of {config.length:,} tokens in {config.blocks} blocks.")


def verify(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="Arms of the same options, and exports of them.")],
    common: Common,
    filler: Annotated[list[str], Help("The sources, if they were moved; repeat it.", "FILE")] | None = None,
    unique_keys: Annotated[bool, Help("A key that an example or its filler holds twice is an error.")] = False,
) -> None:
    """Prove arms: everything planted can be retrieved, everything else is filler, and arms differ in distance only.

    Example: arrowbank in2 verify arm_a arm_b arm_c
    """
    from arrowbank.in2.verify import verify_in2

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
