"""The stage `in2 score`: how far a causal model finds a needle, from the likelihood of answers: a table, a plot, one line.

Every model's trials are kept as they are scored, so that a run that was interrupted goes on with the next model.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from arrowbank.bank import Bank, open_bank
from arrowbank.bank.columns import fixed_lists, values_of
from arrowbank.bank.files import json_bytes
from arrowbank.bank.manifest import read_json
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.errors import InputError, NothingChecked
from arrowbank.formats.folder import ExportFolder
from arrowbank.in2.probes import KIND
from arrowbank.in2.reach import Curve, Trials, curve
from arrowbank.models import ModelConfig, ModelInfo, describe, local_model
from arrowbank.progress import SILENT, Phase, Progress
from arrowbank.settings import Count, Flag, Range, Settings, checked

METHOD = 1
TABLE, RESULT = "scores.csv", "scores.json"
OWNS = ("nll-*.json", TABLE, RESULT, "scores.png", "scores.svg")
HEADER = ("model", "condition", "probe_pos", "distance", "nll", "nll_first")
GAPS = ("to_absent", "to_null", "first_to_absent", "first_to_null")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(Settings):
    """The models, in the order of the table, and how intervals are made. `token_budget`: tokens of a forward pass."""

    models: tuple[ModelConfig, ...]
    token_budget: Count = 32768
    draws: Count = 2000
    confidence: Annotated[float, Range(above=0, below=1)] = 0.95
    plot: Annotated[bool, Flag("--no-plot")] = True

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
    """Score the trials in `probes` with every model, and write scores.csv, scores.json and (`plot`) scores.png and .svg to `out`.

    Raises InputError (no probes, a model that cannot score them), MissingDependency (a plot without matplotlib), PlanMismatch
    where `out` holds the scores of others, CorruptBank.
    """
    if config.plot:
        from arrowbank.in2.plot import require_matplotlib

        require_matplotlib()
    bank = open_bank(probes)
    require_separate([("--out", out)], [("PROBES", bank), *(("--model", local_model(model.model)) for model in config.models)])
    if bank.kind != KIND:
        raise InputError(
            f"{probes}: a bank of {bank.kind}, expected {KIND}. Give a folder that `arrowbank in2 probes` has written."
        )
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
        total = len(bank) * int(bank.manifest["length"]) * len(infos)
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
    config: ScoreConfig, model: ModelConfig, info: ModelInfo, bank: Bank, folder: ExportFolder, name: str, phase: Phase
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The NLL of every trial's answer [N, val_len], from the file `name` where that is there already."""
    tokens = len(bank) * int(bank.manifest["length"])
    if not folder.complete and name not in folder.receipts:
        found = _score(config, _with_head(model), info, bank, phase)
        folder.write(name, lambda file: file.write(json_bytes({"model": info.model, "nll": found.tolist()})))
        return found.astype(np.float64)
    phase.advance(tokens)
    return np.array(read_json(folder.folder / name)["nll"], np.float64)


def _score(
    config: ScoreConfig, model: ModelConfig, info: ModelInfo, bank: Bank, phase: Phase
) -> np.ndarray[Any, np.dtype[np.float32]]:
    from arrowbank.models.causal import CausalModel

    scorer = CausalModel(model, info)
    length, val_len = int(bank.manifest["length"]), int(bank.manifest["val_len"])
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
        from arrowbank.in2.plot import figures

        for name, data in figures(curves, confidence=config.confidence).items():
            folder.write(name, lambda file, data=data: file.write(data))  # type: ignore[misc]
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


def lines(scores: Scores) -> Sequence[str]:
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
