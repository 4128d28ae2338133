"""The stage `targets vocab`: a draft's smaller vocabulary, the tokens that the target's text uses most, and the maps to it.

d2t   int64 [N]   target id − draft id of each draft token, ids ascending
t2d   bool [V]    whether the draft has the target's token

A map belongs to one bank and two sizes, and says so: another bank's is refused. It is one file, perhaps in the bank's folder, and
has no sidecar: its digest, over maps and metadata, is in its metadata.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from arrowbank.bank.checks import Check, attempt
from arrowbank.bank.columns import list_values
from arrowbank.bank.files import publish_alone, refuse_address, refuse_other_file
from arrowbank.bank.kinds.targets_bank import TargetBank
from arrowbank.bank.manifest import canonical_json
from arrowbank.bank.open import open_bank
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explained
from arrowbank.errors import CorruptBank, InputError
from arrowbank.formats.safetensors import SafetensorsFile, write_safetensors
from arrowbank.formats.sidecar import xxh3_128
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Count, checked

METADATA = ("bank_digest", "draft_vocab_size", "target_vocab_size")
DIGEST = "xxh3_128"
MAPS = "vocab-*.safetensors"  # those in a bank's folder


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
            if len(ids) and int(ids.min()) < 0:
                raise CorruptBank(
                    f"{bank.folder}: has token id {ids.min()}. Find the shard with `arrowbank verify`; restore it."
                )
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


@checked
def write_vocab_map(
    folder: str | Path,
    draft_vocab: int,
    *,
    vocab_size: Count | None = None,
    out: str | Path | None = None,
    progress: Progress = SILENT,
) -> VocabMap:
    """Make the map of the target bank in `folder` and write it to `out` (default: `map_path`).

    `vocab_size` is the target's, where the bank does not state it. Raises InputError, and what opening a bank raises.
    """
    path = Path(out) if out else map_path(folder, draft_vocab)
    refuse_address(path)
    bank = open_bank(folder, kind=TargetBank)
    require_separate([], [("DIR", bank)], files=[("--out", path)])
    if out:
        refuse_other_file(path, "a vocabulary map", lambda: _read(path))
    size = vocab_size or bank.facts.vocab_size
    if size is None:
        raise InputError(f"{folder}: does not say how large the target's vocabulary is. Give --vocab-size.")
    made = vocab_map(token_counts(bank, size, progress=progress), draft_vocab)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    publish_alone(path, _file_bytes(made, _metadata(bank, draft_vocab, size)))
    return made


def _file_bytes(made: VocabMap, metadata: dict[str, str]) -> bytes:
    """The map as a safetensors file whose metadata hold the digest over everything else."""
    content = xxh3_128(canonical_json(metadata) + made.d2t.tobytes() + made.t2d.tobytes())
    file = io.BytesIO()
    write_safetensors(
        file,
        {"d2t": ("I64", made.d2t.shape, made.d2t), "t2d": ("BOOL", made.t2d.shape, made.t2d)},
        {**metadata, DIGEST: content},
    )
    return file.getvalue()


def verify_vocab_map(path: str | Path) -> Check:
    """Whether the file `path` is a vocabulary map with the bytes that `targets vocab` wrote."""
    with attempt(Path(path)) as failures:
        made, metadata = _read(Path(path))
        digest = metadata.pop(DIGEST, None)
        if digest is None:
            failures.append(f"{path}: carries no digest. Make it with `arrowbank targets vocab`.")
        elif Path(path).read_bytes() != _file_bytes(made, metadata):
            failures.append(f"{path}: its bytes are not those of its digest: it was changed. Make it again.")
    if failures:
        return Check("map", False, failures[0])
    return Check(
        "map", True, f"{len(made.d2t):,} of {len(made.t2d):,} tokens, of the bank {metadata.get('bank_digest', '')[:12]}"
    )


def _read(path: Path) -> tuple[VocabMap, dict[str, str]]:
    """Maps and metadata of a file. CorruptBank where it is not such a file."""
    try:
        file = SafetensorsFile(path)
        tensors = {name: file.tensors[name] for name in ("d2t", "t2d")}
    except (InputError, KeyError) as error:
        raise CorruptBank(f"{path}: not a vocabulary map ({error}). Make it with `arrowbank targets vocab`.") from None
    if (tensors["d2t"].dtype, tensors["t2d"].dtype) != ("I64", "BOOL"):
        raise CorruptBank(f"{path}: its maps are not int64 and bool. Make it with `arrowbank targets vocab`.")
    found = VocabMap(file.array(tensors["d2t"]), file.array(tensors["t2d"]).view(np.bool_))
    return found, dict(file.metadata)


def _metadata(bank: TargetBank, draft_vocab: int, vocab_size: int) -> dict[str, str]:
    return dict(zip(METADATA, (bank.content_digest, str(draft_vocab), str(vocab_size)), strict=True))
