"""Looking at a part of a bank: rows at a fixed stride, so that a page about millions of rows is made in seconds, and again the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.columns import Rows, nested_lists, number_column
from arrowbank.bank.reader import Bank
from arrowbank.drawing.markup import plural

SOME_ROWS = 200_000  # of numbers and names
TEXT_ROWS = 50_000
FEW_ROWS = 20_000  # of vectors


def spread_rows(total: int, at_most: int) -> Rows:
    """At most `at_most` of `total` rows, evenly spread, ascending; all of them where there are no more."""
    count = min(total, at_most)
    return np.arange(count, dtype=np.int64) * total // max(1, count)


def take(bank: Bank, columns: Sequence[str], rows: Rows) -> pa.Table:
    """`columns` of ascending `rows`, as a table of its own memory."""
    shard_of = np.searchsorted(bank.starts, rows, side="right") - 1
    pieces = []
    for shard in np.unique(shard_of).tolist():
        local = rows[shard_of == shard] - bank.starts[shard]
        pieces.append(bank.shard(shard).select(list(columns)).take(number_column(local)))
    schema = bank.shard(0).select(list(columns)).schema
    return pa.Table.from_batches(pieces, schema)


def sampled_lists(bank: Bank, column: str, rows: Rows, tokens: int) -> Iterator[npt.NDArray[Any]]:
    """For each of `rows` at most `tokens` of the vectors in its list, [n, W]. Nothing but these is read from the disk."""
    for row in rows.tolist():
        (piece,) = bank.slice(row, row + 1, [column]).column(column).chunks
        values, _ = nested_lists(piece)
        yield values[spread_rows(len(values), tokens)]


def sampled_norms(bank: Bank, column: str, rows: Rows, tokens: int) -> npt.NDArray[np.float32]:
    """The L2 norms of these vectors, [all n]."""
    found = [np.linalg.norm(values.astype(np.float32), axis=1) for values in sampled_lists(bank, column, rows, tokens)]
    norms: npt.NDArray[np.float32] = np.concatenate(found)
    return norms


def numbers(table: pa.Table, column: str) -> npt.NDArray[np.float64]:
    """A column of numbers as float64, [n]."""
    return np.array(table.column(column).to_pylist(), np.float64)


def names(table: pa.Table, column: str) -> list[str]:
    """A column of strings."""
    return [str(value) for value in table.column(column).to_pylist()]


def of_sample(rows: Rows, total: int, what: str = "row") -> str:
    """What a figure is of, for its sentence: nothing where it is of all."""
    return "" if len(rows) == total else f" Of {plural(len(rows), what)} evenly spread over {total:,}."
