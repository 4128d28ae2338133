"""Where episodes come from: files by split name, what they are, what their bytes are, and reading them as lines.

A file is hashed before it is read, because its hash is part of the plan. That it is the same file afterwards is checked by its
inode, size and time of change, before and after reading.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from arrowbank.bank.manifest import json_in
from arrowbank.bank.names import check_names, check_places
from arrowbank.corpus.extract import Span
from arrowbank.errors import InputError
from arrowbank.progress import Phase, Progress

LINES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = (".gz", ".zst")
TABLES = (".parquet", ".arrow", ".feather")
IN_FOLDERS = (".jsonl", ".ndjson", *TABLES)  # a .json beside the data is most often something about them
KNOWN = f"{', '.join(LINES)} (each also with {' or '.join(COMPRESSIONS)}), {', '.join(TABLES)}"

READ_BYTES = 1 << 20
LINE_BYTES = 1 << 14
BOM = b"\xef\xbb\xbf"
PIECE_BYTES = 1 << 12  # compressed bytes at a time: what comes out of a piece is all in memory, up to 32,768 times as much


@dataclass(frozen=True)
class SourceFile:
    """A file of episodes. `suffix` says what is in it, `compression` what is around that (".gz", ".zst" or nothing)."""

    path: Path
    suffix: str
    compression: str = ""

    @property
    def is_table(self) -> bool:
        return self.suffix in TABLES


@dataclass(frozen=True)
class Source:
    """What was given for a split: its name, the path, the files there in order, and the names of what else is there."""

    name: str
    path: Path
    files: tuple[SourceFile, ...]
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Print:
    """What a file's bytes are, and what tells that they still are."""

    bytes: int
    sha256: str
    identity: tuple[int, ...]


def find_sources(named: Sequence[tuple[str, str]]) -> list[Source]:
    """The files behind (name, path) pairs. Raises InputError for what is not there or not known."""
    return [_source(name, Path(path)) for name, path in named]


def _source(name: str, path: Path) -> Source:
    files = _files_at(name, path)
    return Source(name, path, tuple(files), tuple(_beside(path, files)) if path.is_dir() else ())


def _beside(folder: Path, files: Sequence[SourceFile]) -> list[str]:
    """What else is in a folder of sources; beside a saved dataset, only data files that it does not name."""
    read = {file.path.name for file in files}
    saved = (folder / "state.json").is_file()
    names = sorted(path.name for path in folder.iterdir() if path.name not in read and path.name[0] not in "._")
    return [name for name in names if name.endswith(".arrow") or not saved]


def _files_at(name: str, path: Path) -> list[SourceFile]:
    if path.is_dir():
        return _files_in(name, path)
    file = _classify(path, (*LINES, *TABLES))
    if file is None:
        if path.exists():
            raise InputError(
                f"{path} (source {name!r}): not a kind of file that scan reads. It reads {KNOWN}, and saved datasets."
            )
        raise InputError(f"{path} (source {name!r}): no such file. Give the path of an episode file or folder.")
    return [file]


def _classify(path: Path, suffixes: Sequence[str]) -> SourceFile | None:
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    suffix = Path(name.removesuffix(compression)).suffix
    if suffix not in suffixes or (compression and suffix not in LINES):
        return None
    return SourceFile(path, suffix, compression)


def _files_in(name: str, folder: Path) -> list[SourceFile]:
    if (folder / "state.json").is_file():
        return _saved_dataset(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in folder.iterdir() if (child / "state.json").is_file())
        raise InputError(
            f"{folder} (source {name!r}): a saved dataset of several splits ({', '.join(splits)}). "
            f"Give one of them, such as {folder / (splits or ['train'])[0]}."
        )
    if (folder / "manifest.json").is_file() or (folder / "dataset_info.json").is_file():
        raise InputError(
            f"{folder} (source {name!r}): a dataset that is not whole (no state.json). Finish it, or give another."
        )
    files = [_classify(path, IN_FOLDERS) for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] not in "._"]
    found = [file for file in files if file]
    if not found:
        raise InputError(
            f"{folder} (source {name!r}): no episode files and no saved dataset in it. In folders scan reads "
            f"{', '.join(IN_FOLDERS)}, JSON lines also with {' or '.join(COMPRESSIONS)}."
        )
    return found


def _saved_dataset(folder: Path) -> list[SourceFile]:
    state = folder / "state.json"
    try:
        names = check_names((entry["filename"] for entry in json_in(state)["_data_files"]), state)
        check_places(folder, [state.name, *names], state)
        return [SourceFile(folder / name, ".arrow") for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{state}: does not list a saved dataset's files ({error!r}). Save the dataset again.") from None


# what the bytes are


def fingerprint(files: Sequence[SourceFile], progress: Progress) -> dict[Path, Print]:
    """Hash the files, several at a time. Raises InputError for one that is missing, unreadable, or changes meanwhile."""
    paths = list(dict.fromkeys(file.path for file in files))
    sizes = [size_of(path) for path in paths]
    with progress.phase("hash", sum(sizes), unit="bytes") as phase, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(lambda path: _hash(path, phase), paths), strict=True))


def size_of(path: Path) -> int:
    with refused(path):
        return path.stat().st_size


def _hash(path: Path, phase: Phase) -> Print:
    digest = hashlib.sha256()
    with refused(path), path.open("rb", buffering=0) as file:
        identity = identity_of(path, file)
        buffer = memoryview(bytearray(READ_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            phase.advance(count)
        _check_unchanged(path, identity, identity_of(path, file))
    return Print(identity[2], digest.hexdigest(), identity)


def identity_of(path: Path, file: BinaryIO | io.FileIO) -> tuple[int, ...]:
    """Device, inode, bytes and time of change of an open file. InputError if it cannot be read twice."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"{path}: not a regular file. It has to be read twice, for its hash and for its texts: save it as a file."
        )
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_unchanged(path: Path, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    if before != after:
        raise InputError(
            f"{path}: changed while it was read ({before[2]} bytes at first, {after[2]} now). "
            "Wait until whoever writes it is done, then run the same command again."
        )


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn the system's refusal to read `path` into an InputError."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. Restore it, or name another source.") from None
    except OSError as error:
        if error.errno is None:  # not the system's: Arrow raises these for what it finds inside
            raise
        raise InputError(f"{path}: cannot be read ({error.strerror}). Make it readable, or name another source.") from None


@contextmanager
def opened(path: Path, known: Print) -> Iterator[io.FileIO]:
    """The file, open for reading, which has to be the one hashed before, and still to be when the block ends."""
    with refused(path), path.open("rb", buffering=0) as file:
        _check_unchanged(path, known.identity, identity_of(path, file))
        yield file
        _check_unchanged(path, known.identity, identity_of(path, file))


def check_unchanged(prints: Mapping[Path, Print]) -> None:
    """Raise InputError for a file that is not there any more as it was hashed."""
    for path, known in prints.items():
        with opened(path, known):
            pass


# reading it as lines


def line_blocks(file: SourceFile, known: Print, size: int) -> Iterator[tuple[bytes | Span, int]]:
    """Whole lines, about `size` bytes at a time, without a BOM ahead of the first; beside them the bytes of the file that they took.

    Of a file that is not compressed only the places are given. Raises InputError for a file that changed, is cut off, or is not
    compressed as its name says.
    """
    with opened(file.path, known) as raw:
        yield from _spans(file.path, raw, size) if not file.compression else _unpacked_blocks(file, raw, size)


def _spans(path: Path, raw: io.FileIO, size: int) -> Iterator[tuple[Span, int]]:
    name, end = str(path.absolute()), raw.seek(0, os.SEEK_END)
    raw.seek(0)
    start = len(BOM) if raw.read(len(BOM)) == BOM else 0
    while start < end:
        stop = _line_end(raw, start + size, end)
        yield Span(path=name, start=start, stop=stop), stop - start
        start = stop


def _line_end(raw: io.FileIO, start: int, end: int) -> int:
    """Where the line ends that the byte `start` is in, line feed included."""
    raw.seek(start)
    while start < end and (data := raw.read(LINE_BYTES)):
        if at := data.find(b"\n") + 1:
            return start + at
        start += len(data)
    return end


def _unpacked_blocks(file: SourceFile, raw: io.FileIO, size: int) -> Iterator[tuple[bytes, int]]:
    stream = io.BufferedReader(_unpacked(file, raw))
    done = 0
    try:
        while block := stream.read(size):
            block += stream.readline()
            position = raw.tell()
            yield (block.removeprefix(BOM) if done == 0 else block), position - done
            done = position
    except EOFError:
        raise InputError(f"{file.path}: cut off: the compressed data end in the middle. Copy or make the file again.") from None
    except _Damaged as error:
        raise InputError(f"{file.path}: not readable as {file.compression} data ({error}). Copy or make it again.") from None


class _Damaged(Exception):
    """Compressed data that are not what they should be."""


def _unpacked(file: SourceFile, raw: io.FileIO) -> io.RawIOBase:
    if file.compression == ".gz":
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
        except self._failure as error:
            raise _Damaged(str(error)) from None
        if self._unpacker.eof:
            self._rest = self._unpacker.unused_data
            self._unpacker = None
        return data
