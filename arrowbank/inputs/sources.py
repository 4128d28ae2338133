"""Where episodes come from: files by split name, what they are, what their bytes are, and reading them as lines.

A file is hashed before it is read, because its hash is part of the plan. That it is the same file afterwards is checked by its
inode, size and time of change, before and after reading."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from arrowbank.bank.manifest import json_in
from arrowbank.bank.names import check_names, check_places
from arrowbank.bank.refusals import explain
from arrowbank.errors import InputError
from arrowbank.inputs.bad_lines import line_too_long
from arrowbank.inputs.extract import Extract, Span, ends_with
from arrowbank.inputs.lines import BOM, COMPRESSIONS, MAX_LINE_BYTES, DamagedData, unpacked
from arrowbank.progress import Phase, Progress

LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".arrow", ".feather")
IN_FOLDERS = (".jsonl", ".ndjson", *TABLES)  # a .json beside the data is most often something about them
KNOWN = f"{', '.join(LINES)} (each also with {' or '.join(COMPRESSIONS)}), {', '.join(TABLES)}"

READ_BYTES = 1 << 20
LINE_BYTES = 1 << 14


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
        status = path.stat()
    _require_regular(path, status)
    return status.st_size


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
    _require_regular(path, status)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _require_regular(path: Path, status: os.stat_result) -> None:
    """InputError for what cannot be read twice, such as a named pipe, which would also be waited for when it is opened."""
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"{path}: not a regular file. It has to be read twice, for its hash and for its texts: save it as a file."
        )


def _check_unchanged(path: Path, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    if before != after:
        raise InputError(
            f"{path}: changed while it was read ({before[2]} bytes at first, {after[2]} now). "
            "Wait until whoever writes it is done, then run the same command again."
        )


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn the system's refusal to read `path` into an error that says what to do. InputError for a file that is not there."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. Restore it, or name another source.") from None
    except OSError as error:
        if (refusal := explain(error, path, "read")) is None:  # not the system's: Arrow raises these for what it finds inside
            raise
        raise refusal from None


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


def line_blocks(
    file: SourceFile, known: Print, size: int, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[bytes | Span | Extract, int]]:
    """Whole lines, about `size` bytes at a time, without a BOM ahead of the first; beside them the bytes of the file that they took.

    Of a file that is not compressed only the places are given. A line that is longer than `max_line_bytes` and than a block ends the
    blocks with an extract that says so; whoever reads a block checks the shorter ones.

    Raises InputError for a file that changed, is cut off, or is not compressed as its name says.
    """
    with opened(file.path, known) as raw:
        if file.compression:
            yield from _unpacked_blocks(file, raw, size, max_line_bytes)
        else:
            yield from _spans(file.path, raw, size, max_line_bytes)


def _spans(path: Path, raw: io.FileIO, size: int, max_line_bytes: int) -> Iterator[tuple[Span | Extract, int]]:
    name, end = str(path.absolute()), raw.seek(0, os.SEEK_END)
    raw.seek(0)
    start = len(BOM) if raw.read(len(BOM)) == BOM else 0
    while start < end:
        stop = _line_end(raw, start + size, end, max_line_bytes)
        if stop is None:  # the line that the block should end with
            begin = _line_begin(raw, start, start + size)
            if begin > start:
                yield Span(path=name, start=start, stop=begin), begin - start
            yield ends_with(line_too_long(1, max_line_bytes)), 0
            return
        yield Span(path=name, start=start, stop=stop), stop - start
        start = stop


def _line_end(raw: io.FileIO, start: int, end: int, most: int) -> int | None:
    """Where the line ends that the byte `start` is in, line feed included; None where that is more than `most` bytes on."""
    raw.seek(start)
    first = start
    while start < end and (data := raw.read(LINE_BYTES)):
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


def _unpacked_blocks(file: SourceFile, raw: io.FileIO, size: int, max_line_bytes: int) -> Iterator[tuple[bytes | Extract, int]]:
    stream = io.BufferedReader(unpacked(raw, file.compression))
    done = 0
    try:
        while block := stream.read(size):
            rest = stream.readline(max_line_bytes + 2)
            long = len(rest.rstrip(b"\n")) > max_line_bytes
            block = block[: block.rfind(b"\n") + 1] if long else block + rest
            position = raw.tell()
            if block:
                yield (block.removeprefix(BOM) if done == 0 else block), position - done
            if long:
                yield ends_with(line_too_long(1, max_line_bytes)), 0
                return
            done = position
    except EOFError:
        raise InputError(f"{file.path}: cut off: the compressed data end in the middle. Copy or make the file again.") from None
    except DamagedData as error:
        raise InputError(f"{file.path}: not readable as {file.compression} data ({error}). Copy or make it again.") from None
