"""Which texts of a bank none of the banks before it has, found by their sha1, and how far the vectors of the others lie apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import Bank, BankWriter, FeatureBank, open_bank
from arrowbank.bank.columns import ShardedColumn, fixed_bytes, fixed_lists
from arrowbank.bank.keys import KEY_FILE, SHA1_BYTES, Digests, SortedKeys, sorted_keys
from arrowbank.bank.manifest import Manifest, differing_fields, joint_sha256
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.combine.rows import (
    Piece,
    Rows,
    bytes_beside,
    counted,
    has_mirror,
    stated,
    vectors_recipe,
    write_beside,
    write_pieces,
)
from arrowbank.errors import ContractError, InputError
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

BLOCK_ROWS = 8192  # looked at together


@dataclass
class Overlap:
    """Banks against those before them: what becomes the shards of the merged bank, how many rows each bank adds, how many it shares,
    and the largest difference of two components in two vectors of one text (None where there are no vectors)."""

    pieces: list[Piece] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    shared: int = 0
    largest_difference: float | None = None

    @property
    def rows(self) -> int:
        """How many the merged bank has."""
        return sum(self.new)

    def add(self, bank: Bank, shard: int, choose: Callable[[], Rows]) -> int:
        """Enter the rows of a shard that are new; how many."""
        count = len(choose())
        if count:
            self.pieces.append(Piece(bank, shard, count, choose))
        self.shared += bank.shard_rows[shard] - count
        return count


def new_texts(banks: Sequence[Bank], report: Callable[[int], None]) -> Overlap:
    """The texts of banks of texts or features that come first in each of them."""
    overlap = Overlap(largest_difference=0.0 if isinstance(banks[0], FeatureBank) else None)
    earlier: list[Known] = []
    for bank in banks:
        new = 0
        for shard in range(len(bank.shard_names)):
            new += overlap.add(bank, shard, partial(_new_rows, bank, shard, tuple(earlier)))
            if isinstance(bank, FeatureBank) and earlier:
                overlap.largest_difference = max(overlap.largest_difference or 0.0, _difference(bank, shard, earlier))
            report(bank.shard_rows[shard] if earlier else 0)
        overlap.new.append(new)
        if bank is not banks[-1]:
            earlier.append(Known(bank))
    return overlap


class Known:
    """The texts of a bank, to be asked for: a feature bank's by its key file, a texts bank's by 16 bytes a text in memory."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        if isinstance(bank, FeatureBank):
            self.find: Callable[[Digests], Rows] = bank.find
            return
        digests = [digests_of(bank, shard) for shard in range(len(bank.shard_names))]
        keys, stored = SortedKeys(sorted_keys(np.concatenate(digests))), ShardedColumn(digests, bank.starts)
        self.find = lambda asked: keys.find(asked, stored)


def digests_of(bank: Bank, shard: int) -> Digests:
    """The sha1 of a shard's texts, [n, 20] uint8, mapped."""
    return fixed_bytes(bank.shard(shard).column("sha1"), SHA1_BYTES)


def _new_rows(bank: Bank, shard: int, earlier: Sequence[Known]) -> Rows:
    """The rows of a shard whose text is in none of the `earlier` banks."""
    digests = digests_of(bank, shard)
    rows = np.arange(len(digests), dtype=np.int64)
    for known in earlier:
        rows = rows[known.find(digests[rows]) < 0]
    return rows


def _difference(bank: FeatureBank, shard: int, earlier: Sequence[Known]) -> float:
    """The largest difference between vectors of a shard and those that the same texts have in the first bank that has them."""
    digests, vectors = digests_of(bank, shard), fixed_lists(bank.shard(shard).column("features"))
    largest = 0.0
    for start in range(0, len(digests), BLOCK_ROWS):
        rows = np.arange(start, min(start + BLOCK_ROWS, len(digests)), dtype=np.int64)
        for known in earlier:
            there = known.find(digests[rows])
            both = there >= 0
            if both.any() and isinstance(known.bank, FeatureBank):
                largest = max(largest, _apart(vectors[rows[both]], known.bank.take(there[both])))
            rows = rows[~both]
    return largest


def _apart(x: npt.NDArray[np.float16], y: npt.NDArray[np.float16]) -> float:
    return float(np.abs(x.astype(np.float32) - y.astype(np.float32)).max())


Place = tuple[Bank, int, int]  # a bank, a shard of it, a row of that


def new_samples(banks: Sequence[Bank], report: Callable[[int], None]) -> Overlap:
    """The samples of target banks whose name no earlier bank has. InputError where one has it with other contents."""
    overlap = Overlap()
    places: dict[str, list[Place]] = {}  # names are small beside the hidden states of one token
    for bank in banks:
        new, here = 0, []
        for shard, batch in enumerate(bank.shards()):
            fresh = []
            for row, name in enumerate(batch.column("sample").to_pylist()):
                if name in places:
                    _check_same(name, (bank, shard, row), places[name])
                else:
                    fresh.append(row)
                    here.append((name, (bank, shard, row)))
            new += overlap.add(bank, shard, partial(_rows, np.array(fresh, np.int64)))
            report(batch.num_rows if bank is not banks[0] else 0)
        for name, place in here:  # a name that a bank itself has twice is its own business
            places.setdefault(name, []).append(place)
        overlap.new.append(new)
    return overlap


def _rows(rows: Rows) -> Rows:
    return rows


def _check_same(name: str, place: Place, others: Sequence[Place]) -> None:
    if not any(_row(place).equals(_row(other)) for other in others):
        raise InputError(
            f"{place[0].folder}: sample {name!r} is in {others[0][0].folder}, too, with other contents. Leave it out of one of "
            f"them (arrowbank select keeps --where sample=…), or import one of them again under other names."
        )


def _row(place: Place) -> pa.RecordBatch:
    bank, shard, row = place
    return bank.shard(shard).slice(row, 1)


METHOD = 1  # raise it when the same banks would give other rows

FIND: dict[str, Callable[[Sequence[Bank], Callable[[int], None]], Overlap]] = {
    "texts": new_texts,
    "features": new_texts,
    "targets": new_samples,
}
INSTEAD = {
    "tokens": "Merge their texts banks and tokenize the result: that gives the same ids.",
    "in2": "Build one arm of as many examples (another --seed gives other ones).",
    "trunk": "Build one trunk bank of all sets: --source NAME=FILE may be repeated.",
}

# what must be equal in all banks, beside what `vectors_recipe` says
AGREE = {
    "texts": (),
    "features": ("hidden_size", "max_key_tokens", "tokenizer_fingerprint", "special_tokens", "prompt"),
    "targets": (),
}
FIRST = ("model_path", "tokenizer")  # may be spelled in another way where the fingerprints agree: the first bank's word counts


@explains("out")
@checked
def merge_banks(
    banks: Sequence[str | Path], out: str | Path, *, restart: bool = False, progress: Progress = SILENT
) -> Manifest:
    """Merge committed banks of texts, features or targets into the bank `out`; its manifest. Goes on where it stopped.

    A text that several feature banks have keeps the vector of the first one; how many there are and how far their vectors lie apart is
    in the manifest, under `merged`. Samples of target banks are told apart by their names.

    Raises InputError (banks of another kind; a sample that is there twice with other contents), ContractError (banks made by another
    model or in another way: the first field that differs), PlanMismatch, BankLocked, CorruptBank, DiskFull.
    """
    parts = _open(banks)
    require_separate([("--out", out)], [("BANK", part) for part in parts])
    first = parts[0]
    _check_agreement(parts)
    mirror = all(has_mirror(part) for part in parts)
    recipe = {
        "merge_method": METHOD,
        "merge": [{"content": part.content_digest, "rows": len(part)} for part in parts],
        **vectors_recipe(first),
        **({"mirror": mirror} if first.kind == "features" else {}),
    }
    with BankWriter(out, kind=first.kind, recipe=recipe, restart=restart) as bank:
        if bank.committed:
            progress.message(f"{bank.folder}: already complete, nothing to do")
            return bank.manifest
        for part in parts:
            part.check_hashes([KEY_FILE] if part.kind == "features" else [])
        with progress.phase("compare", sum(map(len, parts[1:])), unit="rows") as phase:
            overlap = FIND[first.kind](parts, phase.advance)
        progress.message(_told(overlap, parts))
        with progress.phase("merge", overlap.rows, unit="rows") as phase:
            write_pieces(bank, overlap.pieces, phase, beside=bytes_beside(overlap.rows, first, mirror=mirror))
        write_beside(bank, mirror=mirror, progress=progress)
        return bank.commit(rows=overlap.rows, manifest=_Merged(parts, overlap, mirror).fields(bank))


def _open(banks: Sequence[str | Path]) -> list[Bank]:
    if len(banks) < 2:
        raise InputError(f"merge: {len(banks)} banks are given, at least two are needed.")
    parts = [open_bank(bank) for bank in banks]
    for part in parts:
        if part.kind not in FIND:
            instead = INSTEAD.get(part.kind, "Build one bank of all the data instead.")
            raise InputError(f"{part.folder}: a bank of {part.kind}; only texts, features and targets can be merged. {instead}")
        if part.kind != parts[0].kind:
            raise InputError(
                f"{part.folder}: a bank of {part.kind}, {parts[0].folder} is one of {parts[0].kind}. Merge banks of one kind."
            )
    return parts


def _check_agreement(parts: Sequence[Bank]) -> None:
    """ContractError for the first field in which a bank is not like the first one."""
    first = parts[0]
    for part in parts[1:]:
        here, there = (_agreed(bank) for bank in (first, part))
        for name, (found, wanted) in differing_fields(there, here).items():
            raise ContractError(
                f"{part.folder}: {name} is {found!r}, in {first.folder} it is {wanted!r}. Rows of such banks do not belong "
                "together: make one of them again with the options of the other.",
                name,
            )


def _agreed(bank: Bank) -> dict[str, Any]:
    return {**{name: bank.manifest.get(name) for name in AGREE[bank.kind]}, **vectors_recipe(bank)}


def _told(overlap: Overlap, parts: Sequence[Bank]) -> str:
    new = ", ".join(f"{count:,} of {len(part):,} from {part.folder}" for count, part in zip(overlap.new, parts, strict=True))
    told = f"{overlap.rows:,} rows: {new}; {overlap.shared:,} were there already"
    if overlap.largest_difference is not None and overlap.shared:
        told += f", their two vectors at most {overlap.largest_difference:.2g} apart"
    return told


@dataclass(frozen=True)
class _Merged:
    """What the manifest of a merged bank says."""

    parts: Sequence[Bank]
    overlap: Overlap
    mirror: bool

    def fields(self, bank: BankWriter) -> dict[str, Any]:
        """What all parts say alike, what is told by the rows, and what is the sum of all."""
        every = [stated(part) for part in self.parts]
        alike = {name: value for name, value in every[0].items() if all(other.get(name) == value for other in every[1:])}
        alike |= {name: every[0][name] for name in FIRST if name in every[0]}
        left_out = ("selected", "codec_error", "source_duplicates", *(() if self.mirror else ("bank", "index", "texts")))
        alike = {name: value for name, value in alike.items() if name not in left_out}
        before = every[0] | {name: _union(every, name) for name in ("kinds", "source_rows") if name in every[0]}
        if bank.kind == "targets":
            before |= {"nonfinite": _sum([one["nonfinite"] for one in every])}
            alike["source"] = " + ".join(dict.fromkeys(str(one["source"]) for one in every))
        else:
            alike = {name: value for name, value in alike.items() if not name.endswith("_sha256")} | self._sources(every)
        found = counted(bank, before)
        return {**alike, **found, **self._counts(every, found), **self._history()}

    def _sources(self, every: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Files of all parts, and for each split one hash over those that the parts state, unless one does not (a selection)."""
        sources = [entry for one in every for entry in one.get("sources", ())]
        unsaid = {name for one in every for entry in one.get("sources", ()) if (name := f"{entry['name']}_sha256") not in one}
        names = {name: None for one in every for name in one if name.endswith("_sha256") and name not in unsaid}
        hashes = {name: list(dict.fromkeys(one[name] for one in every if name in one)) for name in names}
        return {
            **({"sources": [entry for at, entry in enumerate(sources) if entry not in sources[:at]]} if sources else {}),
            **{name: joint_sha256(found) for name, found in hashes.items()},
        }

    def _counts(self, every: Sequence[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
        """What was counted while the parts were made, where all of them know it."""
        if any("counts" not in one for one in every):
            return {}
        if self.parts[0].kind == "targets":
            dropped = _sum([one["counts"]["dropped"] for one in every])
            return {"counts": found["counts"] | {"dropped": dropped | {"duplicate": self.overlap.shared}}}
        counts = _sum([one["counts"] for one in every])
        return {"counts": counts | {"duplicates": counts.get("duplicates", 0) + self.overlap.shared}}

    def _history(self) -> dict[str, Any]:
        overlap = self.overlap
        parts = [
            {"plan_digest": part.plan_digest, "rows": len(part), "new": new}
            for part, new in zip(self.parts, overlap.new, strict=True)
        ]
        apart = {} if overlap.largest_difference is None else {"largest_difference": overlap.largest_difference}
        ends = [*self.parts[0].manifest.get("generations", [len(self.parts[0])])]
        ends += list(accumulate(overlap.new[1:], initial=overlap.new[0]))[1:]
        generations = {} if self.parts[0].kind == "targets" else {"generations": ends}
        return {"merged": {"parts": parts, "shared": overlap.shared, **apart}, **generations}


def _union(every: Sequence[dict[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(key for one in every for key in one.get(name, ())))


def _sum(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(one.get(name, 0) for one in counts) for name in dict.fromkeys(key for one in counts for key in one)}
