"""SpecForge's offline folders, a file a sample: `rows_{g}-{g+2000}/data_{i}.ckpt`, `torch.save` of a dict of tensors.

eagle3   input_ids, loss_mask int64 [S] · hidden_state [1, S, H] (after the final norm) · aux_hidden_state [1, S, 3H]
dflash   input_ids, loss_mask int64 [S] · hidden_states [S, L·H]
dspark   the same · target_last_hidden_states [S, H] (after the final norm)

Hidden states are bfloat16. Every tensor has its own memory: `torch.save` would write the whole storage behind a view.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from arrowbank.bank.files import HashedFile
from arrowbank.bank.floats import Bits
from arrowbank.bank.kinds.targets_bank import TargetRows, TargetSample
from arrowbank.errors import InputError
from arrowbank.formats.dump import BadSample
from arrowbank.formats.export import (
    ExportFormat,
    as_they_are,
    facts_said,
    hidden_tensors,
    save_torch,
    token_tensors,
    with_norm,
    write_samples,
)
from arrowbank.formats.export_folder import ExportFolder
from arrowbank.formats.sample_files import FoundSample, TorchSample
from arrowbank.progress import Phase

GROUP = 2000  # samples a folder
EAGLE3_LAYERS = 3
Tensors = dict[str, Any]


def sample_file(row: int) -> str:
    group = row // GROUP * GROUP
    return f"rows_{group}-{group + GROUP}/data_{row}.ckpt"


def _eagle3(sample: TargetSample) -> Tensors:
    taps, last = hidden_tensors(sample)
    return {**token_tensors(sample), "hidden_state": last[None], "aux_hidden_state": taps[None]}


def _dflash(sample: TargetSample) -> Tensors:
    taps, _ = hidden_tensors(sample)
    return {**token_tensors(sample), "hidden_states": taps}


def _dspark(sample: TargetSample) -> Tensors:
    taps, last = hidden_tensors(sample)
    return {**token_tensors(sample), "hidden_states": taps, "target_last_hidden_states": last}


def _three_layers(rows: TargetRows) -> TargetRows:
    facts = rows.facts
    if facts.layers != EAGLE3_LAYERS:
        raise InputError(
            f"{rows.place}: holds {facts.layers} layers ({', '.join(facts.layer_names)}); specforge-eagle3 takes exactly "
            f"{EAGLE3_LAYERS}. Capture or import three, as in --layers 1,17,32."
        )
    return with_norm(rows, what="specforge-eagle3", norms=("post",))


def _write(
    rows: TargetRows,
    folder: ExportFolder,
    *,
    tensors: Callable[[TargetSample], Tensors],
    source: str,
    phase: Phase,
) -> dict[str, Any]:
    def write(sample: TargetSample, name: str, file: HashedFile) -> None:
        save_torch(tensors(sample), file)

    names = [sample_file(row) for row in range(len(rows.lengths))]
    token_bytes = 16 + 2 * rows.facts.hidden_size * (rows.facts.layers + 1)
    write_samples(rows, folder, names, write, token_bytes=token_bytes, phase=phase)
    return folder.finish(facts_said(rows, source=source))


def _format(
    name: str, tensors: Callable[[TargetSample], Tensors], fit: Callable[[TargetRows], TargetRows]
) -> dict[str, ExportFormat]:
    return {name: ExportFormat(partial(_write, tensors=tensors), ("rows_*-*/data_*.ckpt",), fit)}


FORMATS = {
    **_format("specforge-eagle3", _eagle3, _three_layers),
    **_format("specforge-dflash", _dflash, as_they_are),  # it holds no last hidden states: either norm will do
    **_format("specforge-dspark", _dspark, partial(with_norm, what="specforge-dspark", norms=("post",))),
}


LAST = "target_last_hidden_states"
DFLASH_ONLY = (
    "holds hidden_states and no last hidden states (SpecForge's dflash layout), which a target bank has. Capture again for eagle3 or "
    "for dspark"
)


def looks_like(folder: Path) -> bool:
    """Whether `folder` holds SpecForge's files of samples."""
    return next(iter(sample_paths(folder)), None) is not None


def sample_paths(folder: Path) -> list[Path]:
    """The files of samples, as SpecForge finds them (any depth, gzip or not), by their numbers."""
    found = [path for pattern in ("*.ckpt", "*.ckpt.gz") for path in folder.rglob(pattern)]
    return sorted(found, key=lambda path: (path.parent, [int(part) for part in re.findall(r"\d+", path.name)], path.name))


def open_sample(folder: Path, path: Path) -> FoundSample:
    """A file of eagle3 or dspark. Their last hidden states are after the final norm. Raises BadSample."""
    sample = TorchSample(path)
    if "aux_hidden_state" in sample.values:
        taps, last = "aux_hidden_state", "hidden_state"
    elif LAST in sample.values or "hidden_states" not in sample.values:
        taps, last = "hidden_states", LAST
    else:
        raise BadSample(DFLASH_ONLY)
    width = sample.width(last)
    if sample.width(taps) % width:
        raise BadSample(f"{taps} have {sample.width(taps)} numbers a token, {last} {width}; expected a multiple")

    def hidden() -> tuple[Bits, Bits]:
        first, second = sample.bits(taps, last)
        return first, second

    return FoundSample(
        name=path.relative_to(folder).as_posix(),
        input_ids=sample.input_ids,
        loss_mask=sample.loss_mask,
        layers=sample.width(taps) // width,
        hidden_size=width,
        norm="post",
        identity=sample.identity,
        hidden=hidden,
    )
