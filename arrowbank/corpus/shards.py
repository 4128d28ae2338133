"""New texts on their way into shards: gathered until a shard is full, then written while the next one fills.

A shard is full when one more text would be more than it may hold, in rows or in bytes. That depends on nothing but the texts in row order.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.columns import binary_column
from arrowbank.plan import SHARD_ROWS

SHARD_TEXT_BYTES = 12 << 20  # one fills while one is written, and the scan may take 150 MB in all

Write = Callable[[int, pa.RecordBatch], object]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class News:
    """New texts in row order: their UTF-8 on end and its lengths ([n]), digests ([n, 20]), numbers of their kinds ([n]) and source."""

    text: bytes
    lengths: npt.NDArray[np.uint32]
    digests: Bytes
    kinds: Bytes
    source: int


class ShardBuilder:
    """Writes rows of `text`, `sha1`, `kind`, `source` through `write` as shards `first`, `first` + 1, … A context manager."""

    def __init__(self, write: Write, *, first: int, kinds: Sequence[str], sources: Sequence[str]) -> None:
        self.rows = 0  # of all shards
        self._write, self._index = write, first
        self._names = {"kind": list(kinds), "source": list(sources)}
        self._writer = ThreadPoolExecutor(1, "shard")
        self._writing: Future[object] | None = None
        self._clear()

    def __enter__(self) -> ShardBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.shutdown()

    def _clear(self) -> None:
        self._text = _reserve(SHARD_TEXT_BYTES)
        self._text_bytes = 0
        self._shard_rows = 0
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._digests: list[Bytes] = []
        self._codes: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in self._names}

    def add(self, news: News) -> None:
        """Add rows behind those there are."""
        text = np.frombuffer(news.text, np.uint8)
        lengths = news.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        row = byte = 0
        while row < len(lengths):
            room = SHARD_TEXT_BYTES - self._text_bytes
            fitting = int(np.searchsorted(ends, byte + room, side="right")) - row
            count = min(fitting, SHARD_ROWS - self._shard_rows)
            if count == 0 and self._shard_rows:
                self._flush()
                continue
            stop = row + max(count, 1)  # a text that is larger than a shard is one
            end = int(ends[stop - 1])
            self._append_text(text[byte:end])
            self._lengths.append(lengths[row:stop])
            self._digests.append(news.digests[row:stop])
            self._codes["kind"].append(news.kinds[row:stop])
            self._codes["source"].append(np.full(stop - row, news.source, np.int32))
            self._shard_rows += stop - row
            row, byte = stop, end

    def _append_text(self, text: Bytes) -> None:
        end = self._text_bytes + len(text)
        if end > len(self._text):
            self._text = _reserve(end)
        self._text[self._text_bytes : end] = text
        self._text_bytes = end

    def finish(self) -> None:
        """Write what is left and wait for it."""
        if self._shard_rows:
            self._flush()
        self._wait()

    def _flush(self) -> None:
        batch = self._batch()
        self._clear()
        self._wait()
        self._writing = self._writer.submit(self._write, self._index, batch)
        self._index += 1
        self.rows += batch.num_rows

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
        self._writing = None

    def _batch(self) -> pa.RecordBatch:
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(self._lengths))]).astype(np.int64)
        text = pa.LargeStringArray.from_buffers(
            self._shard_rows, pa.py_buffer(offsets), pa.py_buffer(self._text[: self._text_bytes])
        )
        columns = {"text": text, "sha1": binary_column(np.concatenate(self._digests))}
        for name, codes in self._codes.items():
            columns[name] = _names_column(self._names[name], np.concatenate(codes))
        return pa.RecordBatch.from_pydict(columns)


def _reserve(size: int) -> Bytes:
    """Memory that is taken only as it fills, and given back to the system at once when dropped.

    Not malloc's: after it has seen a block of this size freed, glibc keeps all that are smaller, and scans grow by 40 MB.
    """
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _names_column(names: Sequence[str], codes: npt.NDArray[Any]) -> pa.Array:
    """A string column of `names[code]`."""
    encoded = [name.encode() for name in names]
    ends = np.cumsum(np.array([len(name) for name in encoded], np.int32)[codes], dtype=np.int32)
    data = b"".join([encoded[code] for code in codes.tolist()])
    return pa.StringArray.from_buffers(
        len(codes), pa.py_buffer(np.concatenate([[0], ends]).astype(np.int32)), pa.py_buffer(data)
    )
