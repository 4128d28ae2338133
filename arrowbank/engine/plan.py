"""The plan: which rows form which shard, and which rows of a shard form which batch. Pure NumPy, no I/O.

A shard is a contiguous range of rows. Inside a shard, rows are encoded in order of token length in batches of exactly equal
length, so that no padding enters a model. A batch's shape changes the last bits of its result: the plan is fixed before the
first forward pass, and a resumed build replays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from arrowbank.errors import InputError
from arrowbank.settings import Count, Help, Settings

SHARD_ROWS = 65_536
SHARD_BYTES = 1 << 29  # of a shard that is cut by size
VECTOR_BYTES = 1 << 30  # of the vectors of a shard that is cut by rows
MAX_VALUES = 2**31 - 1  # of a column in one record batch


@dataclass(frozen=True)
class Shard:
    """Rows start … stop − 1 of a bank."""

    index: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Batch:
    """Rows of a shard (counted from its start) that all have `length` tokens: one forward pass."""

    rows: npt.NDArray[np.int64]
    length: int


@dataclass(frozen=True, kw_only=True)
class BatchRules(Settings):
    """At most `max_batch` rows and, beyond a single row, at most `token_budget` tokens per batch."""

    max_batch: Annotated[Count, Help("Rows per forward pass.")] = 128
    token_budget: Annotated[Count, Help("Tokens per forward pass.")] = 8192

    def size(self, length: int) -> int:
        """How many rows of `length` tokens a batch takes."""
        return max(1, min(self.max_batch, self.token_budget // length))

    def recipe(self) -> dict[str, Any]:
        """What a plan digest says of batches."""
        return {"max_batch": self.max_batch, "token_budget": self.token_budget, "grouping": "exact_token_length"}


def shard_ranges(generations: Sequence[int], shard_rows: int = SHARD_ROWS) -> list[Shard]:
    """Contiguous shards of at most `shard_rows` rows that never cross the end of a generation.

    `generations` are the cumulative row ends of a bank that has grown ([N] for one that has not): the shards of the old rows
    are the same in the grown bank.
    """
    if shard_rows < 1:
        raise InputError(f"shard_rows is {shard_rows}, it must be at least 1.")
    shards: list[Shard] = []
    low = 0
    for end in generations:
        for start in range(low, end, shard_rows):
            shards.append(Shard(len(shards), start, min(start + shard_rows, end)))
        low = end
    return shards


def cut_shards(
    lengths: Sequence[int], row_bytes: Callable[[int], int], widest: int, shard_bytes: int | None = None
) -> list[Shard]:
    """Contiguous shards of at most `shard_bytes` (None: 512 MiB) and of as many values per column as a record batch holds; at least
    one row each.

    `lengths` are the rows' tokens, `widest` is how many values a token has in the largest column, `row_bytes` tells the bytes of a row
    by its length. InputError for a row that no record batch can hold.
    """
    most = shard_bytes or SHARD_BYTES
    shards: list[Shard] = []
    start, size, tokens = 0, 0, 0
    for row, length in enumerate(lengths):
        if length * widest > MAX_VALUES:
            raise InputError(
                f"row {row} has {length} tokens of {widest} values: more than a record batch holds ({MAX_VALUES} values). Leave it out, "
                f"or shorten it to {MAX_VALUES // widest} tokens."
            )
        more = row_bytes(length)
        if row > start and (size + more > most or (tokens + length) * widest > MAX_VALUES):
            shards.append(Shard(len(shards), start, row))
            start, size, tokens = row, 0, 0
        size, tokens = size + more, tokens + length
    return [*shards, Shard(len(shards), start, len(lengths))]


def rows_a_shard(wanted: int, row_bytes: int) -> int:
    """`wanted` rows a shard, or as many as keep a shard's vectors under 1 GiB."""
    return max(1, min(wanted, VECTOR_BYTES // row_bytes))


def batches(lengths: npt.NDArray[np.int32], rules: BatchRules) -> Iterator[Batch]:
    """The batches of one shard for its rows' token counts ([n] int32, all ≥ 1).

    Longest first: a batch that is too large for a device then fails at once, not after hours.
    """
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=0))
    for start, stop in zip(starts[::-1], [len(ordered), *starts[:0:-1]], strict=True):
        length = int(ordered[start])
        size = rules.size(length)
        for low in range(start, stop, size):
            yield Batch(order[low : min(low + size, stop)], length)


def gather(values: npt.NDArray[np.int32], offsets: npt.NDArray[np.int32], batch: Batch) -> npt.NDArray[np.int32]:
    """The tokens of a batch, [N, T] int32, from a shard's flat tokens and their n + 1 offsets."""
    places = np.add.outer(offsets[batch.rows], np.arange(batch.length, dtype=np.int32))
    tokens: npt.NDArray[np.int32] = values[places]
    return tokens


def batch_counts(lengths: npt.NDArray[np.int32], shards: Sequence[Shard], rules: BatchRules) -> tuple[int, int]:
    """Forward passes of the whole plan, and how many it would take with one sort over all rows."""
    planned = sum(_passes(lengths[shard.start : shard.stop], rules) for shard in shards)
    return planned, _passes(lengths, rules)


def _passes(lengths: npt.NDArray[np.int32], rules: BatchRules) -> int:
    sizes, counts = np.unique(lengths, return_counts=True)
    return sum(-(-int(count) // rules.size(int(length))) for length, count in zip(sizes, counts, strict=True))
