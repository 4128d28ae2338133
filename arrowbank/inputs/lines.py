"""Files of lines, plain or compressed, read with bounded memory: one line may be long, but not longer than a limit.

A small compressed file may hold a line of any length. So compressed bytes are unpacked a few kilobytes at a time, and a line that is
longer than the limit is an error with file and line number before it is in memory."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arrowbank.errors import InputError

MAX_LINE_BYTES = 1 << 28
COMPRESSIONS = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"
PIECE_BYTES = 1 << 12  # compressed bytes at a time: what comes out of a piece is all in memory, up to 32,768 times as much


class DamagedData(Exception):
    """Compressed data that are not what they should be."""


def too_long(max_line_bytes: int) -> str:
    """What is wrong with a line that is longer than the limit, and what to do: the end of a message that begins with the place."""
    return f"longer than {max_line_bytes:,} bytes (--max-line-bytes). Write one sample per line, or raise --max-line-bytes"


def numbered_lines(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its end) of the lines of a file, plain, .gz or .zst by its name, without a BOM ahead of the first.

    Raises InputError for a file that cannot be read to its end, and for a line longer than `max_line_bytes`.
    """
    try:
        with path.open("rb", buffering=0) as raw, _buffered(path, raw) as stream:
            number, most = 0, max_line_bytes + len(BOM + b"\r\n")
            while line := stream.readline(most):
                number += 1
                bare = (line.removeprefix(BOM) if number == 1 else line).rstrip(b"\r\n")
                if len(bare) > max_line_bytes or (len(line) == most and not line.endswith(b"\n")):
                    raise InputError(f"{path}, line {number}: {too_long(max_line_bytes)}.")
                yield number, bare
    except (EOFError, DamagedData, OSError) as error:
        why = str(error) or "the compressed data end in the middle"
        raise InputError(f"{path}: cannot be read to its end ({why}). Copy or make the file again.") from error


def _buffered(path: Path, raw: io.FileIO) -> io.BufferedReader:
    return io.BufferedReader(unpacked(raw, path.suffix) if path.suffix in COMPRESSIONS else raw)


def unpacked(raw: io.FileIO, compression: str) -> io.RawIOBase:
    """What is in the compressed file `raw`, ".gz" or ".zst". Reading raises EOFError where it is cut off, DamagedData where it is
    not such data."""
    if compression == ".gz":
        return _Decompressed(raw, lambda: zlib.decompressobj(wbits=31), zlib.error)
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return _Decompressed(raw, unpacker.decompressobj, zstandard.ZstdError)


class _Decompressed(io.RawIOBase):
    """What is in a file of one or more gzip members or zstd frames. Raises EOFError where the last one is cut off."""

    def __init__(self, raw: io.FileIO, start: Callable[[], Any], failure: type[Exception]) -> None:
        self._input = raw  # not through a BufferedReader: it would close the file when it is let go of
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
