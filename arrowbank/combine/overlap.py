"""Which texts of a bank none of the banks before it has, found by their sha1, and how far the vectors of the others lie apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import Bank, FeatureBank
from arrowbank.bank.columns import ShardedColumn, fixed_bytes, fixed_lists
from arrowbank.bank.keys import SHA1_BYTES, Digests, SortedKeys, sorted_keys
from arrowbank.combine.rows import Piece, Rows
from arrowbank.errors import InputError

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


RowPlace = tuple[Bank, int, int]  # a bank, a shard of it, a row of that


def new_samples(banks: Sequence[Bank], report: Callable[[int], None]) -> Overlap:
    """The samples of target banks whose name no earlier bank has. InputError where one has it with other contents."""
    overlap = Overlap()
    places: dict[str, list[RowPlace]] = {}  # names are small beside the hidden states of one token
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


def _check_same(name: str, place: RowPlace, others: Sequence[RowPlace]) -> None:
    if not any(_row(place).equals(_row(other)) for other in others):
        raise InputError(
            f"{place[0].folder}: sample {name!r} is in {others[0][0].folder}, too, with other contents. Leave it out of one of "
            f"them (arrowbank select keeps --where sample=…), or import one of them again under other names."
        )


def _row(place: RowPlace) -> pa.RecordBatch:
    bank, shard, row = place
    return bank.shard(shard).slice(row, 1)
