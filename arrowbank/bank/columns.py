"""Columns as NumPy arrays over the mapped shards, without a copy and without a change of type.

`datasets`' numpy and torch formats widen float16 to float32; these views do not. They are made from the buffers: pyarrow's own
`to_numpy` and `array` import pandas, which takes half a second, and a Ctrl-C that comes in that time is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Rows = npt.NDArray[np.int64]

_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


@dataclass(frozen=True)
class ShardedColumn:
    """A column of fixed width: one [n_i, W] array a shard, and the row at which each shard starts ([shards + 1])."""

    parts: Sequence[npt.NDArray[Any]]
    starts: Rows

    def take(self, rows: npt.ArrayLike) -> npt.NDArray[Any]:
        """The values of `rows` in the order given, [n, W], as a new array. IndexError for a row that is not there."""
        wanted = np.asarray(rows, np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.starts[-1]:
            bad = wanted[(wanted < 0) | (wanted >= self.starts[-1])][0]
            raise IndexError(f"row {bad} of {self.starts[-1]} rows; rows count from 0 (−1 stands for a text that is absent)")
        out = np.empty((len(wanted), self.parts[0].shape[1]), self.parts[0].dtype)
        shard_of = np.searchsorted(self.starts, wanted, side="right") - 1
        for shard in np.unique(shard_of):
            here = np.flatnonzero(shard_of == shard)
            out[here] = self.parts[shard][wanted[here] - self.starts[shard]]
        return out


def values_of(column: pa.Array) -> npt.NDArray[Any]:
    """A column of numbers without nulls as an array, without a copy."""
    dtype = np.dtype(_NUMPY_NAMES.get(str(column.type), str(column.type)))
    return np.frombuffer(column.buffers()[1] or b"", dtype, count=len(column), offset=column.offset * dtype.itemsize)


def fixed_lists(column: pa.Array) -> npt.NDArray[Any]:
    """A FixedSizeList column as an [n, width] array without a copy. (`.values` would ignore the slice.)"""
    return values_of(column.flatten()).reshape(len(column), column.type.list_size)


def fixed_bytes(column: pa.Array, width: int) -> npt.NDArray[np.uint8]:
    """A binary column whose values all have `width` bytes as an [n, width] uint8 array without a copy."""
    offsets = _offsets(column)
    values = np.frombuffer(column.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    return values.reshape(len(column), width)


def list_values(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """A list column's flat values and its n + 1 offsets into them, starting at 0, without a copy of the values."""
    offsets = _offsets(column)
    return values_of(column.flatten()), offsets - offsets[0]


def nested_lists(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """A list of fixed-size lists as [sum of lengths, width] and the n + 1 offsets of its rows, without a copy."""
    offsets = _offsets(column)
    return fixed_lists(column.flatten()), offsets - offsets[0]


def _offsets(column: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32, count=len(column) + 1, offset=4 * column.offset)


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array of its own: a view into a longer one would be written with other bytes than an equal copy."""
    return pa.concat_arrays([column.chunk(0).slice(0, 0), *column.chunks])


def number_column(values: npt.NDArray[Any]) -> pa.Array:
    """A one-dimensional array as an Arrow column without a copy."""
    kept = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(kept.dtype), len(kept), [None, pa.py_buffer(kept)])


def binary_column(values: npt.NDArray[np.uint8]) -> pa.Array:
    """An [n, width] uint8 array as an Arrow binary column without a copy."""
    count, width = values.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))])


def string_column(values: Sequence[str]) -> pa.Array:
    """Strings as an Arrow string column."""
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def list_column(values: npt.NDArray[Any], offsets: npt.NDArray[np.int32]) -> pa.Array:
    """Flat values and n + 1 offsets as an Arrow list column without a copy."""
    return list_column_of(number_column(values), offsets)


def list_column_of(values: pa.Array, offsets: npt.NDArray[np.int32]) -> pa.Array:
    """The values of all rows and n + 1 offsets as an Arrow list column without a copy."""
    return pa.ListArray.from_arrays(number_column(offsets), values)


def fixed_list_column(values: npt.NDArray[Any]) -> pa.Array:
    """An [n, width] array as an Arrow FixedSizeList column without a copy."""
    return pa.FixedSizeListArray.from_arrays(number_column(values.reshape(-1)), values.shape[1])
