"""The stage `targets vocab`: a draft's smaller vocabulary, the tokens that the target's text uses most, and the maps to it.

d2t   int64 [N]   target id − draft id of each draft token, ids ascending
t2d   bool [V]    whether the draft has the target's token

A map belongs to one bank and two sizes, and says so: another bank's is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.columns import list_values
from arrowbank.bank.files import publish_bytes, refuse_address
from arrowbank.bank.places import require_separate
from arrowbank.bank.targets import TargetBank, open_target_bank
from arrowbank.errors import ContractError, CorruptBank, InputError
from arrowbank.progress import SILENT, Progress

METADATA = ("bank_digest", "draft_vocab_size", "target_vocab_size")


@dataclass(frozen=True)
class VocabMap:
    """d2t [N] int64, t2d [V] bool, and how much of the loss tokens the draft's vocabulary covers (None: read from a file)."""

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    coverage: float | None = None


def token_counts(bank: TargetBank, vocab_size: int, *, progress: Progress = SILENT) -> npt.NDArray[np.int64]:
    """How often each token of the target's vocabulary counts in the loss, [V]."""
    counts = np.zeros(vocab_size, np.int64)
    with progress.phase("count", len(bank), unit="samples") as phase:
        for batch in bank.shards():
            ids, _ = list_values(batch.column("input_ids"))
            mask, _ = list_values(batch.column("loss_mask"))
            if len(ids) and int(ids.max()) >= vocab_size:
                raise InputError(
                    f"{bank.folder}: has token id {ids.max()}, the target's vocabulary is {vocab_size}. Give the model's own "
                    "--vocab-size (vocab_size in its config.json)."
                )
            counts += np.bincount(ids[mask != 0], minlength=vocab_size)
            phase.advance(batch.num_rows)
    return counts


def vocab_map(counts: npt.NDArray[np.int64], draft_vocab: int) -> VocabMap:
    """The maps for the `draft_vocab` most frequent tokens of `counts` [V]; of equally frequent ones the lower ids.

    Raises InputError for a draft vocabulary that is empty or larger than the target's.
    """
    if not 1 <= draft_vocab <= len(counts):
        raise InputError(f"--draft-vocab {draft_vocab}: expected 1 to {len(counts)}, the target's vocabulary.")
    chosen = np.sort(np.argsort(-counts, kind="stable")[:draft_vocab])
    t2d = np.zeros(len(counts), np.bool_)
    t2d[chosen] = True
    coverage = float(counts[chosen].sum() / max(int(counts.sum()), 1))
    return VocabMap((chosen - np.arange(draft_vocab)).astype(np.int64), t2d, coverage)


def map_path(folder: str | Path, draft_vocab: int) -> Path:
    """Where the map of the bank in `folder` lies, unless it is put elsewhere."""
    return Path(folder) / f"vocab-{draft_vocab}.safetensors"


def write_vocab_map(
    folder: str | Path,
    draft_vocab: int,
    *,
    vocab_size: int | None = None,
    out: str | Path | None = None,
    progress: Progress = SILENT,
) -> VocabMap:
    """Make the map of the target bank in `folder` and write it to `out` (default: `map_path`).

    `vocab_size` is the target's, where the bank does not state it. Raises InputError, and what opening a bank raises.
    """
    from safetensors.numpy import save

    path = Path(out) if out else map_path(folder, draft_vocab)
    refuse_address(path)
    bank = open_target_bank(folder)
    require_separate([], [("DIR", bank)], files=[("--out", path)])
    size = vocab_size or bank.facts.vocab_size
    if size is None:
        raise InputError(f"{folder}: does not say how large the target's vocabulary is. Give --vocab-size.")
    made = vocab_map(token_counts(bank, size, progress=progress), draft_vocab)
    publish_bytes(path, save({"d2t": made.d2t, "t2d": made.t2d}, metadata=_metadata(bank, draft_vocab, size)))
    return made


def read_vocab_map(path: str | Path, bank: str | Path | TargetBank) -> VocabMap:
    """The map in `path`, which must be of this bank as it is.

    Raises ContractError for a map of another bank or of one that has changed, CorruptBank for a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    bank = bank if isinstance(bank, TargetBank) else open_target_bank(bank)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, Any] = file.metadata() or {}
            found = VocabMap(file.get_tensor("d2t"), file.get_tensor("t2d"))
    except (OSError, SafetensorError) as error:
        raise CorruptBank(f"{path}: not a vocabulary map ({error}). Make it with `arrowbank targets vocab`.") from None
    wanted = _metadata(bank, len(found.d2t), len(found.t2d))
    for name in METADATA:
        if metadata.get(name) != wanted[name]:
            raise ContractError(
                f"{path}: {name} is {metadata.get(name)}, expected {wanted[name]} ({bank.folder}). The map is stale: make it "
                "again with `arrowbank targets vocab`.",
                name,
            )
    return found


def _metadata(bank: TargetBank, draft_vocab: int, vocab_size: int) -> dict[str, str]:
    return dict(zip(METADATA, (bank.content_digest, str(draft_vocab), str(vocab_size)), strict=True))
