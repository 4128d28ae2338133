"""From the likelihoods of trials to what they say: means by distance, gaps to the controls, and the reach. Pure NumPy.

Gaps are paired by block: trials of a block differ in the needle only. An interval is a percentile bootstrap over blocks, with draws
that are the same each time."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank import Bank, open_bank
from arrowbank.bank.columns import fixed_lists, values_of
from arrowbank.bank.files import json_bytes
from arrowbank.bank.kinds.probes_bank import ProbesBank
from arrowbank.bank.manifest import read_json
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.drawing.frame import svg_file
from arrowbank.drawing.plots import Series, lines
from arrowbank.errors import InputError, NothingChecked
from arrowbank.formats.export_folder import ExportFolder
from arrowbank.in2.probes import ABSENT, NEEDLE, NULL
from arrowbank.models import ModelConfig, ModelInfo, describe, local_model
from arrowbank.progress import SILENT, Phase, Progress
from arrowbank.settings import EXECUTION, Count, Help, Part, Range, Settings, checked

Floats = npt.NDArray[np.float64]

FEW_BLOCKS = 5


@dataclass(frozen=True)
class Trials:
    """What is known of each trial [N]: its condition, block, place of the probe, distance, and the NLL of its answer's tokens
    [N, val_len] in nats."""

    condition: npt.NDArray[Any]
    block: npt.NDArray[np.int64]
    probe_pos: Floats
    distance: npt.NDArray[np.int64]
    nll: Floats

    def of(self, chosen: npt.NDArray[np.bool_]) -> Trials:
        return Trials(*(value[chosen] for value in vars(self).values()))


@dataclass(frozen=True)
class Gap:
    """How much lower the NLL is with the needle than in a control: mean over blocks, and the interval's ends."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """One distance under one place of the probe. NLL in nats a token, of the answer and of its first token."""

    probe_pos: float
    distance: int
    nll: float
    first: float
    to_absent: Gap
    to_null: Gap
    first_to_absent: Gap
    first_to_null: Gap

    @property
    def found(self) -> bool:
        """Whether the needle helps beyond doubt: both intervals lie above zero."""
        return self.to_absent.low > 0 and self.to_null.low > 0


@dataclass(frozen=True)
class Curve:
    """A model's curve: points by place of the probe and distance, the controls' NLL by place, the reach, and what to know of it.

    `reach` is the largest distance at which the needle helps beyond doubt; None where it does at none.
    """

    points: list[Point]
    controls: dict[str, dict[float, tuple[float, float]]]
    reach: int | None
    notes: list[str]


def curve(trials: Trials, *, draws: int, confidence: float, seed: int = 0) -> Curve:
    """The curve of one model's trials."""
    points, controls = [], {name: dict[float, tuple[float, float]]() for name in (ABSENT, NULL)}
    for where in np.unique(trials.probe_pos):
        here = trials.of(trials.probe_pos == where)
        control = {name: _by_block(here.of(here.condition == name)) for name in (ABSENT, NULL)}
        for name, values in control.items():
            controls[name][float(where)] = (float(values.mean()), float(values[:, 0].mean()))
        needles = here.of(here.condition == NEEDLE)
        for distance in np.unique(needles.distance):
            values = _by_block(needles.of(needles.distance == distance))
            rng = np.random.default_rng(seed)  # the same draws everywhere: intervals of a curve can be compared
            resampled = rng.integers(0, len(values), (draws, len(values)))
            gaps = [
                _gap(of(control[name]) - of(values), resampled, confidence)
                for of in (_whole, _first)
                for name in (ABSENT, NULL)
            ]
            points.append(Point(float(where), int(distance), float(values.mean()), float(values[:, 0].mean()), *gaps))
    reach = max((point.distance for point in points if point.found), default=None)
    return Curve(points, controls, reach, _notes(points, len(np.unique(trials.block))))


def _by_block(trials: Trials) -> Floats:
    """The NLL of one trial a block, in the blocks' order."""
    ordered: Floats = trials.nll[np.argsort(trials.block, kind="stable")]
    return ordered


def _whole(nll: Floats) -> Floats:
    mean: Floats = nll.mean(axis=1)
    return mean


def _first(nll: Floats) -> Floats:
    first: Floats = nll[:, 0]
    return first


def _gap(differences: Floats, resampled: npt.NDArray[np.int64], confidence: float) -> Gap:
    means = differences[resampled].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Gap(float(differences.mean()), float(low), float(high))


def _notes(points: Sequence[Point], blocks: int) -> list[str]:
    """What a reader would otherwise take for granted, where it does not hold."""
    notes = []
    if blocks < FEW_BLOCKS:
        notes.append(f"{blocks} blocks: intervals from so few say little; give in2 probes more --blocks")
    places = sorted({point.probe_pos for point in points})
    for where in places:
        here = [point for point in points if point.probe_pos == where]
        nearest, lowest = min(here, key=lambda point: point.distance), min(here, key=lambda point: point.nll)
        place = f" (probe at {where:g})" if len(places) > 1 else ""
        if nearest is not lowest:
            notes.append(
                f"the nearest needle (distance {nearest.distance}, NLL {nearest.nll:.3f}) is not the easiest: distance "
                f"{lowest.distance} has {lowest.nll:.3f}{place}"
            )
        misleading = [str(point.distance) for point in here if point.to_absent.high < 0]
        if misleading:
            notes.append(f"worse with a needle than without one at distance {', '.join(misleading)}{place}")
        lost = [point.distance for point in here if not point.found]
        found = [point.distance for point in here if point.found]
        if lost and found and min(lost) < max(found):
            notes.append(f"not found at distance {', '.join(str(d) for d in lost if d < max(found))}, but farther away{place}")
    return notes


def figure(curves: Mapping[str, Curve], *, confidence: float) -> bytes:
    """scores.svg: the NLL by distance with the controls' as levels, and the gap to absent with its intervals."""
    levels, gaps = [], []
    for model, curve in curves.items():
        places = sorted({point.probe_pos for point in curve.points})
        for place in places:
            points = [point for point in curve.points if point.probe_pos == place]
            name = model if len(places) == 1 else f"{model}, probe at {place:g}"
            distances, to_absent = [float(point.distance) for point in points], [point.to_absent for point in points]
            controls = [curve.controls[control][place][0] for control in (ABSENT, NULL)]
            levels.append(Series(name, distances, [point.nll for point in points], levels=controls))
            low, high = [gap.low for gap in to_absent], [gap.high for gap in to_absent]
            gaps.append(Series(name, distances, [gap.mean for gap in to_absent], low, high))
    x_label = "distance from needle to probe, tokens"
    return svg_file(
        lines(
            "NLL of the answer",
            levels,
            x_label=x_label,
            y_label="nats per token; controls: absent dotted, null dashed",
            summary="Mean over blocks.",
            log_x=True,
            floor=None,
        ),
        lines(
            "Gap to absent",
            gaps,
            x_label=x_label,
            y_label=f"nats per token, paired by block, {confidence:.0%} intervals",
            summary="How much lower the NLL is with the needle.",
            log_x=True,
        ),
    )


METHOD = 1
TABLE, RESULT = "scores.csv", "scores.json"
PLOT = "scores.svg"
OWNS = ("nll-*.json", TABLE, RESULT, PLOT)
HEADER = ("model", "condition", "probe_pos", "distance", "nll", "nll_first")
GAPS = ("to_absent", "to_null", "first_to_absent", "first_to_null")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(Settings):
    """The models, in the order of the table, and how intervals are made."""

    models: Annotated[
        tuple[ModelConfig, ...],
        Part(
            without=("pooling", "layer", "backbone"),
            help={"model": Help("A causal model or checkpoint; repeat it to compare.", "M")},
        ),
    ]
    token_budget: Annotated[Count, Help("Tokens per forward pass."), EXECUTION] = 32768
    draws: Annotated[Count, Help("Bootstrap draws per interval.")] = 2000
    confidence: Annotated[float, Range(above=0, below=1), Help("Confidence level of the intervals.")] = 0.95
    plot: Annotated[bool, Help("Leave out scores.svg.")] = True

    def check(self) -> None:
        names = [model.model for model in self.models]
        if not names or len(set(names)) < len(names):
            raise InputError(f"--model {', '.join(names) or 'not given'}: expected at least one, each once.")


@dataclass(frozen=True)
class Scores:
    """What was found: model → curve, and the files it was written to."""

    curves: dict[str, Curve]
    folder: Path


@explains("out")
@checked
def score_probes(
    config: ScoreConfig, probes: str | Path, out: str | Path, *, restart: bool = False, progress: Progress = SILENT
) -> Scores:
    """Score the trials in `probes` with every model, and write scores.csv, scores.json and (`plot`) scores.svg to `out`.

    Raises InputError (no probes, a model that cannot score them), PlanMismatch where `out` holds the scores of others, CorruptBank.
    """
    bank = open_bank(probes, kind=ProbesBank)
    require_separate([("--out", out)], [("PROBES", bank), *(("--model", local_model(model.model)) for model in config.models)])
    if not len(bank):
        raise NothingChecked(f"{probes}: holds no trial, so there is nothing to score. Build the probes again.")
    infos = [describe(_with_head(model)) for model in config.models]
    recipe = {
        "method": METHOD,
        "probes": bank.content_digest,
        "models": [{"name": info.model, **info.recipe()} for info in infos],
        **{name: value for name, value in asdict(config).items() if name != "models"},
    }
    with ExportFolder(out, recipe, owns=OWNS, last=RESULT, restart=restart) as folder:
        bank.check_hashes()
        curves = {}
        total = len(bank) * bank.manifest.length * len(infos)
        with progress.phase("score", total, unit="tokens", texts=len(bank) * len(infos)) as phase:
            for number, (model, info) in enumerate(zip(config.models, infos, strict=True)):
                nll = _nll(config, model, info, bank, folder, f"nll-{number:02d}.json", phase)
                curves[info.model] = curve(_trials(bank, nll), draws=config.draws, confidence=config.confidence)
        if not folder.complete:
            _write(config, curves, folder)
    return Scores(curves, folder.folder)


def _with_head(model: ModelConfig) -> ModelConfig:
    return replace(model, backbone="outer", layer=-1, pooling="mean")


def _nll(
    config: ScoreConfig, model: ModelConfig, info: ModelInfo, bank: ProbesBank, folder: ExportFolder, name: str, phase: Phase
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The NLL of every trial's answer [N, val_len], from the file `name` where that is there already."""
    tokens = len(bank) * bank.manifest.length
    if not folder.complete and name not in folder.receipts:
        found = _score(config, _with_head(model), info, bank, phase)
        folder.write(name, lambda file: file.write(json_bytes({"model": info.model, "nll": found.tolist()})))
        return found.astype(np.float64)
    phase.advance(tokens)
    return np.array(read_json(folder.folder / name)["nll"], np.float64)


def _score(
    config: ScoreConfig, model: ModelConfig, info: ModelInfo, bank: ProbesBank, phase: Phase
) -> np.ndarray[Any, np.dtype[np.float32]]:
    from arrowbank.models.causal import CausalModel

    scorer = CausalModel(model, info)
    length, val_len = bank.manifest.length, bank.manifest.val_len
    out = np.empty((len(bank), val_len), np.float32)
    size = max(1, config.token_budget // length)
    for first, batch in zip(bank.starts, bank.shards(), strict=False):
        ids, starts = fixed_lists(batch.column("input_ids")), values_of(batch.column("answer_start"))
        for start in np.unique(starts):  # the logits of the same positions are kept for a whole batch
            rows = np.flatnonzero(starts == start)
            for low in range(0, len(rows), size):
                chosen = rows[low : low + size]
                out[int(first) + chosen] = scorer.nll(ids[chosen], int(start), int(start) + val_len)
                phase.advance(len(chosen) * length)
    return out


def _trials(bank: Bank, nll: np.ndarray[Any, np.dtype[np.float64]]) -> Trials:
    def column(name: str) -> np.ndarray[Any, Any]:
        return np.concatenate([values_of(batch.column(name)) for batch in bank.shards()])

    conditions = [value for batch in bank.shards() for value in batch.column("condition").to_pylist()]
    return Trials(
        np.array(conditions), column("block").astype(np.int64), column("probe_pos"), column("distance").astype(np.int64), nll
    )


def _write(config: ScoreConfig, curves: dict[str, Curve], folder: ExportFolder) -> None:
    folder.write(TABLE, lambda file: file.write(table(curves).encode()))
    if config.plot:
        folder.write(PLOT, lambda file: file.write(figure(curves, confidence=config.confidence)))
    found = {
        model: {
            "reach": curve.reach,
            "notes": curve.notes,
            "controls": {
                name: [{"probe_pos": where, "nll": nll, "nll_first": first} for where, (nll, first) in values.items()]
                for name, values in curve.controls.items()
            },
            "points": [asdict(point) | {"found": point.found} for point in curve.points],
        }
        for model, curve in curves.items()
    }
    result = {"confidence": config.confidence, "draws": config.draws, "models": found, "plan": folder.mark}
    folder.finish(last=(json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())


def table(curves: dict[str, Curve]) -> str:
    """A line a model and distance, and a line a control, as CSV."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    ends = [f"{name}{end}" for name in GAPS for end in ("", "_low", "_high")]
    write.writerow([*HEADER, *ends, "found"])
    for model, found in curves.items():
        for point in found.points:
            gaps = [value for name in GAPS for value in vars(getattr(point, name)).values()]
            numbers = [f"{value:.6f}" for value in (point.nll, point.first, *gaps)]
            write.writerow(
                [model, "needle", f"{point.probe_pos:g}", point.distance, *numbers[:2], *numbers[2:], int(point.found)]
            )
        for name, values in found.controls.items():
            for where, (nll, first) in values.items():
                write.writerow([model, name, f"{where:g}", "", f"{nll:.6f}", f"{first:.6f}", *[""] * (len(ends) + 1)])
    return out.getvalue()


def score_lines(scores: Scores) -> Sequence[str]:
    """What was found, for a person: a table a model, its reach and what to know of it."""
    said = []
    for model, found in scores.curves.items():
        said.append(f"{model}")
        said.append("  distance      NLL   first   gap to absent            gap to null")
        for point in found.points:
            gaps = "  ".join(f"{gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]" for gap in (point.to_absent, point.to_null))
            mark = "found" if point.found else ""
            said.append(f"  {point.distance:8,}  {point.nll:7.3f} {point.first:7.3f}   {gaps}  {mark}")
        for name, values in found.controls.items():
            said += [f"  {name:>8}  {nll:7.3f} {first:7.3f}" for nll, first in values.values()]
        said.append(f"  reach: {'none' if found.reach is None else format(found.reach, ',')}")
        said += [f"  note: {note}" for note in found.notes]
    return said
