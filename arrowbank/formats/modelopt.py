"""Model-Optimizer's offline folder, a file a sample: `{conversation_id}.pt`, `torch.save` of a dict.

input_ids, loss_mask int64 [S] · hidden_states [S, H] and aux_hidden_states [S, L·H] bfloat16 · conversation_id, the file's stem ·
hidden_states_prenorm, which says the norm: so the format holds either.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from arrowbank.bank.files import HashedFile
from arrowbank.bank.floats import Bits
from arrowbank.bank.kinds.targets_bank import TargetRows, TargetSample
from arrowbank.errors import CorruptBank
from arrowbank.formats.dump import BadSample
from arrowbank.formats.export import (
    ExportFormat,
    as_they_are,
    facts_said,
    hidden_tensors,
    save_torch,
    token_tensors,
    write_samples,
)
from arrowbank.formats.export_folder import ExportFolder
from arrowbank.formats.sample_files import FoundSample, TorchSample
from arrowbank.progress import Phase

MAX_ID = 200  # characters, of the 255 bytes that a file's name may have
CLASH = "~"  # in no id but before the row's number, where two samples would have the same id


def conversation_ids(names: Sequence[str]) -> list[str]:
    """An id for every sample by its name: a file's stem on any system, and no two alike, whatever case means there."""
    stems = [_stem(name) for name in names]
    seen = Counter(stem.casefold() for stem in stems)
    return [f"{stem}{CLASH}{row}" if seen[stem.casefold()] > 1 else stem for row, stem in enumerate(stems)]


def _stem(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    return re.sub(r"\.\.+", "_", plain)[:MAX_ID].strip(".") or "sample"


def _write(rows: TargetRows, folder: ExportFolder, *, source: str, phase: Phase) -> dict[str, Any]:
    prenorm = rows.facts.last_hidden_norm == "pre"

    def write(sample: TargetSample, name: str, file: HashedFile) -> None:
        taps, last = hidden_tensors(sample)
        save_torch(
            {
                **token_tensors(sample),
                "hidden_states": last,
                "aux_hidden_states": taps,
                "conversation_id": PurePosixPath(name).stem,
                "hidden_states_prenorm": prenorm,
            },
            file,
        )

    ids = conversation_ids([rows.read(row).name for row in range(len(rows.lengths))])
    token_bytes = 16 + 2 * rows.facts.hidden_size * (rows.facts.layers + 1)
    write_samples(rows, folder, [f"{one}.pt" for one in ids], write, token_bytes=token_bytes, phase=phase)
    return folder.finish(facts_said(rows, source=source))


FORMATS = {"modelopt": ExportFormat(_write, ("*.pt",), as_they_are)}


def looks_like(folder: Path) -> bool:
    """Whether `folder` holds Model-Optimizer's files of conversations, by the first one."""
    path = next(iter(sample_paths(folder)), None)
    if path is None or (folder / "config.json").is_file():
        return False
    try:
        values = TorchSample(path).values
    except (BadSample, CorruptBank):
        return False
    return "hidden_states" in values and "aux_hidden_states" in values


def sample_paths(folder: Path) -> list[Path]:
    """The files of conversations, by name."""
    return sorted(folder.glob("*.pt"))


def open_sample(path: Path) -> FoundSample:
    """A conversation's file. Without `hidden_states_prenorm` the last hidden states are after the norm. Raises BadSample."""
    sample = TorchSample(path)
    width, all_taps = sample.width("hidden_states"), sample.width("aux_hidden_states")
    if all_taps % width:
        raise BadSample(f"aux_hidden_states have {all_taps} numbers a token, hidden_states {width}; expected a multiple")

    def hidden() -> tuple[Bits, Bits]:
        taps, last = sample.bits("aux_hidden_states", "hidden_states")
        return taps, last

    given = sample.values.get("conversation_id")
    return FoundSample(
        name=str(given) if isinstance(given, str | int) and str(given).isprintable() else path.stem,
        input_ids=sample.input_ids,
        loss_mask=sample.loss_mask,
        layers=all_taps // width,
        hidden_size=width,
        norm="pre" if sample.values.get("hidden_states_prenorm") is True else "post",
        identity=sample.identity,
        hidden=hidden,
    )
