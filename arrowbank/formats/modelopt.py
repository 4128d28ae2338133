"""Model-Optimizer's offline folder, a file a sample: `{conversation_id}.pt`, `torch.save` of a dict.

input_ids, loss_mask int64 [S] · hidden_states [S, H] and aux_hidden_states [S, L·H] bfloat16 · conversation_id, the file's stem ·
hidden_states_prenorm, which says the norm: so the format holds either.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from arrowbank.bank.files import HashedFile
from arrowbank.bank.kinds.targets_bank import TargetRows, TargetSample
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
