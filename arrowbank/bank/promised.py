"""A record batch whose large columns are produced while they are written, so that a shard is never in memory.

An Arrow stream holds column after column. A promised column enters the batch as an array over memory that is reserved but never
touched, which costs nothing; when the writer hands that buffer to the file, the promise's pieces are written in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.columns import number_column
from arrowbank.bank.files import HashedFile
from arrowbank.errors import CorruptBank


@dataclass
class Promise:
    """`count` values of `dtype` that `pieces()` gives in order, as arrays of any shape, when they are to be written."""

    dtype: npt.DTypeLike
    count: int
    pieces: Callable[[], Iterable[npt.NDArray[Any]]]
    reserved: npt.NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.reserved = np.empty(self.count, self.dtype)

    @property
    def column(self) -> pa.Array:
        """The values as a flat Arrow array, to build a batch with."""
        return number_column(self.reserved)

    def keep(self, file: HashedFile) -> int:
        """Write the pieces; the bytes written."""
        written = sum(file.write(_bytes_of(piece)) for piece in self.pieces())
        if written != self.reserved.nbytes:
            raise CorruptBank(
                f"a column of {self.reserved.nbytes} bytes came out as {written}: its source changed while it was read. "
                "Leave it alone and run the same command again."
            )
        return written

    def fill(self) -> None:
        """Copy the pieces into the reserved memory: the column is an ordinary one then."""
        flat, at = self.reserved.view(np.uint8), 0
        for piece in self.pieces():
            data = _bytes_of(piece)
            flat[at : at + len(data)] = data
            at += len(data)


def _bytes_of(piece: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The array's bytes in order, without a copy where they lie in order (aligned or not)."""
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8)


def write_promised(file: HashedFile, batch: pa.RecordBatch, promises: Sequence[Promise]) -> None:
    """Write `batch` as an IPC stream, with the promised values in place of the memory that was reserved for them."""
    with pa.ipc.new_stream(pa.PythonFile(_Sink(file, promises), mode="w"), batch.schema) as stream:
        stream.write_batch(batch)


class _Sink:
    """The file that pyarrow writes to."""

    closed = False

    def __init__(self, file: HashedFile, promises: Sequence[Promise]) -> None:
        self._file = file
        self._promises = {promise.reserved.ctypes.data: promise for promise in promises if promise.count}

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if isinstance(data, pa.Buffer) and (promise := self._promises.get(data.address)):
            return promise.keep(self._file)
        return self._file.write(view)

    def flush(self) -> None:
        self._file.flush()
