"""Files of lines, plain or compressed, read with bounded memory: one line may be long, but not longer than a limit.

A small compressed file may hold a line of any length. So compressed bytes are unpacked a few kilobytes at a time, and a line that is
longer than the limit is an error with file and line number before it is in memory."""

from __future__ import annotations

import errno
import io
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from arrowbank.inputs.bad_lines import BadLine, line_too_long
from arrowbank.settings import EXECUTION, Count, Help

MAX_LINE_BYTES = 1 << 28
MaxLineBytes = Annotated[Count, Help("A longer line of a source is an error."), EXECUTION]
OnBadLine = Annotated[Literal["error", "skip"], Help("What a line that is no JSON object does.", default="error")]
TextField = Annotated[str, Help("Where texts are in records and datasets.", "NAME", default="text")]
COMPRESSIONS = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"
STEP_BYTES = 1 << 14  # of a long line, as its end is looked for
PIECE_BYTES = 1 << 12  # compressed bytes at a time: what comes out of a piece is all in memory, up to 32,768 times as much


class DamagedData(Exception):
    """Compressed data that are not what they should be."""


def line_blocks(stream: io.BufferedReader, size: int, max_line_bytes: int) -> Iterator[bytes | BadLine]:
    """Whole lines, about `size` bytes at a time, without a BOM ahead of the first.

    A line that is longer than `max_line_bytes` ends them with an error in line 1 of the rest.
    """
    first = True
    while block := stream.read(size):
        rest = stream.readline(max_line_bytes + 2)
        block = block.removeprefix(BOM) if first else block
        if long := len(rest.rstrip(b"\r\n")) > max_line_bytes:
            block = block[: block.rfind(b"\n") + 1]
        else:
            block += rest
        if len(block) > max_line_bytes and (stop := _long_line(block, max_line_bytes)) is not None:
            block, long = block[:stop], True
        if block:
            yield block
        if long:
            yield line_too_long(1, max_line_bytes)
            return
        first = False


def _long_line(block: bytes, most: int) -> int | None:
    """Where the first line begins that has more bytes."""
    start = 0
    for line in block.split(b"\n"):
        if len(line.rstrip(b"\r")) > most:
            return start
        start += len(line) + 1
    return None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A block as a place in a file: bytes start … stop − 1."""

    path: str
    start: int
    stop: int

    def read(self) -> bytes:
        """The bytes. OSError for a file that is gone or has fewer."""
        with io.FileIO(self.path) as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
            while len(data) < self.stop - self.start:  # a read may give less than asked
                more = file.read(self.stop - self.start - len(data))
                if not more:
                    raise OSError(errno.EIO, "it has become shorter")
                data += more
        return data


def line_spans(path: Path, raw: io.FileIO, size: int, max_line_bytes: int) -> Iterator[Span | BadLine]:
    """As `line_blocks`, but only the places of the blocks in a file of this machine, for workers to read and to look for long lines
    in; here only those are found that are longer than a block."""
    name, end = str(path.absolute()), raw.seek(0, os.SEEK_END)
    raw.seek(0)
    start = len(BOM) if raw.read(len(BOM)) == BOM else 0
    while start < end:
        stop = _line_end(raw, start + size, end, max_line_bytes)
        if stop is None:  # the line that the block should end with
            begin = _line_begin(raw, start, start + size)
            if begin > start:
                yield Span(path=name, start=start, stop=begin)
            yield line_too_long(1, max_line_bytes)
            return
        yield Span(path=name, start=start, stop=stop)
        start = stop


def _line_end(raw: io.FileIO, start: int, end: int, most: int) -> int | None:
    """Where the line ends that the byte `start` is in, line feed included; None where that is more than `most` bytes on."""
    raw.seek(start)
    first = start
    while start < end and (data := raw.read(STEP_BYTES)):
        if at := data.find(b"\n") + 1:
            return start + at if start + at - 1 - first <= most else None
        start += len(data)
        if start - first > most:
            return None
    return end


def _line_begin(raw: io.FileIO, low: int, place: int) -> int:
    """Where the line begins that the byte `place` is in, `low` at the least."""
    raw.seek(low)
    return low + (raw.read(place - low).rfind(b"\n") + 1)


def unpacked(raw: Any, compression: str) -> io.BufferedReader:
    """What is in the open file `raw`, which is compressed as ".gz" or ".zst", or not. Reading raises EOFError where it is cut off,
    DamagedData where it is not such data. It does not close `raw`."""
    return io.BufferedReader(_decompressed(raw, compression) if compression else _Plain(raw))


class _Plain(io.RawIOBase):
    def __init__(self, raw: Any) -> None:
        self._input = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return int(self._input.readinto(buffer))


def _decompressed(raw: Any, compression: str) -> io.RawIOBase:
    if compression == ".gz":
        return _Decompressed(raw, lambda: zlib.decompressobj(wbits=31), zlib.error)
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return _Decompressed(raw, unpacker.decompressobj, zstandard.ZstdError)


class _Decompressed(io.RawIOBase):
    """What is in a file of one or more gzip members or zstd frames. Raises EOFError where the last one is cut off."""

    def __init__(self, raw: Any, start: Callable[[], Any], failure: type[Exception]) -> None:
        self._input = raw
        self._start, self._failure = start, failure
        self._unpacker: Any = start()  # a file of no bytes is cut off, too
        self._rest = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            piece = self._rest or self._input.read(PIECE_BYTES)
            self._rest = b""
            if not piece:
                if self._unpacker is not None:
                    raise EOFError
                return 0
            self._ready = memoryview(self._unpack(piece))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, piece: bytes) -> bytes:
        if self._unpacker is None:
            piece = piece.lstrip(b"\0")  # padding between or behind members
            if not piece:
                return b""
            self._unpacker = self._start()
        try:
            data: bytes = self._unpacker.decompress(piece)
        except (self._failure, MemoryError) as error:
            raise DamagedData(str(error) or type(error).__name__) from None
        if self._unpacker.eof:
            self._rest = self._unpacker.unused_data
            self._unpacker = None
        return data
