"""Where records come from: files by the name of a source, what they are, what their bytes are, and reading them.

A source is a file, a folder of files, a pattern of files, a saved dataset, or a split of one (PATH:SPLIT), on this machine or at an
address. What may be read twice is hashed before it is read, because its hash is part of the plan. That it is the same file afterwards is
checked by its inode, size and time of change, or what its store says of it, before and after reading."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arrowbank.bank.manifest import MAX_JSON_BYTES, json_in, parsed_json
from arrowbank.bank.names import check_names, check_places
from arrowbank.bank.places import Named
from arrowbank.bank.refusals import explain
from arrowbank.bank.remote.addresses import is_address
from arrowbank.errors import InputError
from arrowbank.inputs.bad_lines import BadLine
from arrowbank.inputs.formats import ARRAY, ARROW, BLOCK_BYTES, JSON, KNOWN, InputFormat, Reading, format_of, is_array
from arrowbank.inputs.lines import DamagedData, Span, line_spans, unpacked
from arrowbank.progress import Phase, Progress

if TYPE_CHECKING:
    from arrowbank.inputs.remote import RemotePath
    from arrowbank.inputs.tables import TableRows

READ_BYTES = 1 << 20
_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
_PATTERN = re.compile(r"[*?\[]")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def named_source(value: str) -> tuple[str, str]:
    """The (name, place) that NAME=PATH is, or a path alone, whose name is the file's without its suffixes, the folder's, or the split's.

    What stands ahead of the equals sign is no name where it has a slash: it is a part of the place then.
    """
    name, equals, place = value.partition("=")
    if not value or (equals and not (name and place)):
        raise InputError(f"--source {value!r}: expected NAME=PATH, or a path alone, as in --source train=train.jsonl.")
    if equals and "/" not in name and os.sep not in name:
        return name, place
    return _name_of(value), value


def _name_of(place: str) -> str:
    bare = place.partition("?")[0] if _ADDRESS.match(place) else place
    last = re.split(r"[/\\]", bare.rstrip("/\\"))[-1]
    front, colon, split = last.rpartition(":")
    if colon and front and split and "." not in split:
        return split
    if _PATTERN.search(last):
        last = _PATTERN.split(last)[0].rstrip("-_.") or "data"
    found = format_of(last)
    if found:
        last = last[: len(last) - len(found[1])].rpartition(".")[0]
    return last or "data"


@dataclass(frozen=True)
class SourceFile:
    """A file of records: where, what is in it, and the compression around that (".gz", ".zst" or nothing)."""

    path: Path | RemotePath
    format: InputFormat
    compression: str = ""

    @property
    def is_table(self) -> bool:
        return self.format.batches is not None

    def place(self, number: int, column: int = 0) -> str:
        """Where record `number` is, for messages: 0 is no one record."""
        place = f", {self.format.unit} {number}" if number else ""
        return f"{self.path}{place}{f', column {column}' if column else ''}"

    def complaint(self, error: BadLine, before: int) -> InputError:
        """The error for what is wrong `error.line` lines after the first `before`."""
        number = before + error.line if error.line else 0
        return InputError(f"{self.place(number, error.column)}: {error.what}. {error.remedy}")


@dataclass(frozen=True)
class Source:
    """What was given under a name: the place, the files there in order, and the names of what else is there."""

    name: str
    path: Path | RemotePath
    files: tuple[SourceFile, ...]
    beside: tuple[str, ...] = ()

    @property
    def places(self) -> list[Named]:
        """What is read on this machine."""
        paths = [self.path, *(file.path for file in self.files)]
        return [(f"--source {self.name}=", path) for path in paths if isinstance(path, Path) and path.exists()]


@dataclass(frozen=True)
class Print:
    """What a file's bytes are, and what tells that they still are."""

    bytes: int
    sha256: str
    identity: tuple[Any, ...]


def find_sources(named: Sequence[tuple[str, str]]) -> list[Source]:
    """The files behind (name, place) pairs. Raises InputError for what is not there or not known."""
    return [find_source(name, place) for name, place in named]


def source_places(option: str, place: str | Path) -> list[Named]:
    """What is read on this machine of a place that an option names."""
    if is_address(place) or Path(place).exists():
        return [] if is_address(place) else [(option, place)]
    return [(option, path) for _, path in find_source("", place).places]


def find_source(name: str, place: str | Path) -> Source:
    """The files at a place. Raises InputError for what is not there or not known, RemoteError, MissingDependency."""
    path, split = _place(str(place))
    with refused(path):
        if split is None and not path.exists():
            if not (files := _matching(path)):
                raise InputError(
                    f"{_shown(path, name)}: no such file. Give a file of records, a folder, or a pattern of files."
                )
            return Source(name, path, tuple(_file(name, one) for one in files))
        if not path.is_dir():
            return Source(name, path, (_file(name, path),))
        files = _files_of(path)
        names = [file.name for file in files]
        if "dataset_dict.json" in names:
            path, split = path / _split(name, path, split), None
            files = _files_of(path)
            names = [file.name for file in files]
        elif not isinstance(path, Path) and path.is_repository and not any(map(format_of, names)):
            path = path / "data"  # where the hub's own tools put them
            files = _files_of(path)
        if "state.json" in names:
            found = _saved_dataset(path)
        else:
            if "manifest.json" in names or "dataset_info.json" in names:
                raise InputError(
                    f"{_shown(path, name)}: a dataset that is not whole (no state.json). Finish it, or give another."
                )
            found = _data_files(_shown(path, name), name, files)
            if split is not None or not isinstance(path, Path):
                found = _files_of_split(path, found, split)
        return Source(name, path, tuple(found), tuple(_beside(path, names, found)))


def _files_of_split(path: Path | RemotePath, files: list[SourceFile], split: str | None) -> list[SourceFile]:
    """The files whose names begin with the split's. InputError where there is none, or where no split is named and there are several."""
    by_split: dict[str, list[SourceFile]] = {}
    for file in files:
        by_split.setdefault(re.split(r"[-_.]", file.path.name, maxsplit=1)[0], []).append(file)
    if split in by_split:
        return by_split[split]
    several = sorted(_SPLITS & by_split.keys())
    if split is None and len(several) < 2:
        return files
    missing = "" if split is None else f"no files of the split {split!r}, "
    raise InputError(
        f"{path}: {missing}files of {', '.join(several or by_split)}. Give one of them, as in {path}:{(several or list(by_split))[0]}."
    )


def _shown(path: Path | RemotePath, name: str) -> str:
    return f"{path} (source {name!r})" if name else str(path)


def _place(value: str) -> tuple[Path | RemotePath, str | None]:
    """The place, and the split that follows it behind a colon."""
    front, colon, split = value.rpartition(":")
    may_be_split = colon and front and split and not re.search(r"[/\\]", split) and not front.endswith(":/")
    if may_be_split and (is_address(value) or not Path(value).exists()) and (folder := _path(front)).is_dir():
        return folder, split
    return _path(value), None


def _path(value: str) -> Path | RemotePath:
    if not is_address(value):
        return Path(value)
    from arrowbank.inputs.remote import place_of  # the clients of stores, which files of this machine need not pay for

    return place_of(value)


def _matching(path: Path | RemotePath) -> Sequence[Path | RemotePath]:
    if not isinstance(path, Path):
        return path.matching() if _PATTERN.search(path.key) else []
    found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))) if _PATTERN.search(str(path)) else []
    return [one for one in found if one.is_file()]


def _files_of(folder: Path | RemotePath) -> Sequence[Path | RemotePath]:
    """The files of a folder that are not hidden, by name."""
    files = sorted(path for path in folder.iterdir() if path.is_file()) if isinstance(folder, Path) else folder.files()
    return [file for file in files if file.name[0] not in "._"]


def _split(name: str, folder: Path | RemotePath, split: str | None) -> str:
    """The folder of a split. InputError where none is named, or there is no such one."""
    try:
        splits = check_names(_json(folder / "dataset_dict.json")["splits"], folder / "dataset_dict.json")
    except (ValueError, KeyError, TypeError, OSError):
        splits = []
    if split in splits:
        return str(split)
    if not splits:
        raise InputError(f"{folder / 'dataset_dict.json'}: does not list the splits. Save the dataset again.")
    missing = "" if split is None else f", none {split!r}"
    raise InputError(
        f"{_shown(folder, name)}: a saved dataset of several splits ({', '.join(splits) or 'none is listed'}){missing}. "
        f"Give one of them, as in {folder}:{splits[0]}."
    )


def _beside(folder: Path | RemotePath, names: Sequence[str], files: Sequence[SourceFile]) -> list[str]:
    """What else is in a folder of sources; beside a saved dataset, only data files that it does not name."""
    if isinstance(folder, Path):  # folders, too
        names = sorted(path.name for path in folder.iterdir() if path.name[0] not in "._")
    read = {file.path.name for file in files}
    return [name for name in names if name not in read and (name.endswith(".arrow") or "state.json" not in names)]


def _file(name: str, path: Path | RemotePath) -> SourceFile:
    found = format_of(path.name)
    if found is None:
        raise InputError(
            f"{_shown(path, name)}: not a known kind of file. Known are {KNOWN}, saved datasets, and folders of these."
        )
    if found[0] is JSON and _is_array(path, found[1]):
        return SourceFile(path, ARRAY, found[1])
    return SourceFile(path, *found)


def _is_array(path: Path | RemotePath, compression: str) -> bool:
    with refused(path), _open(path) as raw:
        identity_of(path, raw)
        try:
            return is_array(unpacked(raw, compression))
        except (EOFError, DamagedData):  # said when it is read
            return False


def _data_files(shown: str, name: str, files: Sequence[Path | RemotePath]) -> list[SourceFile]:
    """Of the files in a folder those that hold its data: a .json or .txt beside others is most often something about them."""
    known = [(file, found[0].rank) for file in files if (found := format_of(file.name))]
    if not known:
        raise InputError(f"{shown}: no files of records and no saved dataset in it. Known are {KNOWN}.")
    least = min(rank for _, rank in known)
    return [_file(name, file) for file, rank in known if rank == least]


def _saved_dataset(folder: Path | RemotePath) -> list[SourceFile]:
    state = folder / "state.json"
    try:
        listed = (entry["filename"] for entry in _json(state)["_data_files"])
        names = check_names(listed, state)
        if isinstance(folder, Path):
            check_places(folder, ["state.json", *names], folder / "state.json")
        return [SourceFile(folder / name, ARROW) for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{state}: does not list a saved dataset's files ({error!r}). Save the dataset again.") from None


# what the bytes are


def fingerprint(files: Sequence[SourceFile], progress: Progress) -> dict[Path | RemotePath, Print]:
    """Hash the files, several at a time. Raises InputError for one that is missing, unreadable, or changes meanwhile."""
    paths = list(dict.fromkeys(file.path for file in files))
    sizes = [size_of(path) for path in paths]
    with progress.phase("hash", sum(sizes), unit="bytes") as phase, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(lambda path: _hash(path, phase), paths), strict=True))


def size_of(path: Path | RemotePath) -> int:
    if not isinstance(path, Path):
        return int(path.identity()[2])
    with refused(path):
        status = path.stat()
    _require_regular(path, status)
    return status.st_size


def _hash(path: Path | RemotePath, phase: Phase) -> Print:
    digest = hashlib.sha256()
    with refused(path), _open(path) as file:
        identity = identity_of(path, file)
        size, buffer = 0, memoryview(bytearray(READ_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            phase.advance(count)
        _check_unchanged(path, identity, identity_of(path, file))
    return Print(size, digest.hexdigest(), identity)


def _open(path: Path | RemotePath) -> Any:
    if not isinstance(path, Path):
        return path.open()
    _require_regular(path, path.stat())  # before it is opened, which may wait for ever
    return path.open("rb", buffering=0)


def identity_of(path: Path | RemotePath, file: Any) -> tuple[Any, ...]:
    """Device, inode, bytes and time of change of an open file; what a store says of one at an address. InputError if it cannot be read
    twice."""
    if not isinstance(path, Path):
        return path.identity()
    status = os.fstat(file.fileno())
    _require_regular(path, status)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _require_regular(path: Path, status: os.stat_result) -> None:
    """InputError for what cannot be read twice, such as a named pipe."""
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"{path}: not a regular file. It has to be read twice, for its hash and for its records: save it as a file."
        )


def _check_unchanged(path: object, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    if before != after:
        raise InputError(
            f"{path}: changed while it was read ({before[2]} bytes at first, {after[2]} now). "
            "Wait until whoever writes it is done, then run the same command again."
        )


@contextmanager
def refused(path: Path | RemotePath) -> Iterator[None]:
    """Turn the system's or a store's refusal to read `path` into an error that says what to do. InputError for a file that is not
    there."""
    if not isinstance(path, Path):
        with path.refused():
            yield
        return
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. Restore it, or name another source.") from None
    except OSError as error:
        if (refusal := explain(error, path, "read")) is None:  # not the system's: Arrow raises these for what it finds inside
            raise
        raise refusal from None


@contextmanager
def opened(path: Path | RemotePath, known: Print | None = None) -> Iterator[Any]:
    """The file, open for reading, which has to be the one hashed before, and still to be when the block ends."""
    with refused(path), _open(path) as file:
        identity = identity_of(path, file)
        _check_unchanged(path, known.identity if known else identity, identity)
        yield file
        _check_unchanged(path, identity, identity_of(path, file))


def check_unchanged(prints: Mapping[Path | RemotePath, Print]) -> None:
    """Raise InputError for a file that is not there any more as it was hashed."""
    for path, known in prints.items():
        with opened(path, known):
            pass


def _json(path: Path | RemotePath) -> Any:
    """The JSON value in a small file. OSError, ValueError."""
    if isinstance(path, Path):
        return json_in(path)
    with opened(path) as file:
        return parsed_json(file.read(MAX_JSON_BYTES + 1))


# reading it


def read_blocks(
    file: SourceFile, reading: Reading, known: Print | None = None, columns: Sequence[str] = (), *, spans: bool = False
) -> Iterator[tuple[bytes | Span | BadLine | TableRows, int]]:
    """What is in a file, about a MiB at a time: JSON lines (or, with `spans`, where they are), rows of a table's `columns`, or what is
    wrong with the next line. Beside it the bytes of the file that it took.

    An error's lines count from the end of the block before it, and it stands for that many; the blocks end with one that cannot be
    skipped. Raises InputError for a file that changed, is cut off, or is not what its name says.
    """
    with opened(file.path, known) as raw:
        if file.format.batches is not None:
            from arrowbank.inputs.tables import readable  # pyarrow's Parquet and compute parts: 15 MB that lines need not pay

            size = size_of(file.path)
            with readable(file.path, file.format.name):
                for rows in file.format.batches(file.path if isinstance(file.path, Path) else raw, columns, BLOCK_BYTES):
                    yield rows, int(size * rows.share)
            return
        if spans and file.format.spans and not file.compression and isinstance(file.path, Path):
            blocks: Iterator[bytes | Span | BadLine] = line_spans(file.path, raw, BLOCK_BYTES, reading.max_line_bytes)
        else:
            blocks = file.format.lines(unpacked(raw, file.compression), reading)  # type: ignore[misc]  # without batches it has lines
        done = 0
        with _unpackable(file):
            for block in blocks:
                position = block.stop if isinstance(block, Span) else raw.tell()
                yield block, position - done
                done = position


@contextmanager
def _unpackable(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise InputError(f"{file.path}: cut off: the compressed data end in the middle. Copy or make the file again.") from None
    except DamagedData as error:
        raise InputError(f"{file.path}: not readable as {file.compression} data ({error}). Copy or make it again.") from None
