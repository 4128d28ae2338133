"""Files that are either whole or not there: atomic publication, hashes, room on the disk.

A file is written beside its place under a hidden temporary name, flushed, synced, renamed, and the folder is synced. A crash at
any moment leaves the old file or the new one, and at most a `.*.tmp` that the next writer on this host sweeps away.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import xxhash

from arrowbank.bank.processes import is_left_behind, temporary_beside
from arrowbank.bank.refusals import existing, explained, naming
from arrowbank.errors import ArrowbankError, DiskFull, InputError
from arrowbank.secrets import shows_secrets

READ_BYTES = 1 << 22
WORTH_A_THREAD = 1 << 18
SEND_BYTES = 1 << 26

# sha256 names the files of banks; xxh3_128 finds any damage to an export, several times as fast
Hash = Literal["sha256", "xxh3_128"]
HASHES: dict[Hash, Callable[[], Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}


class HashedFile:
    """A write-only file that counts and, unless `hash` is None, hashes what passes through it.

    Large pieces are hashed while they are written, and what is written is sent on to the disk early, both by threads of `helpers`:
    so neither the hash nor the sync at the end is waited for by itself.
    """

    def __init__(self, raw: IO[bytes], helpers: Executor, *, hash: Hash | None) -> None:
        self._raw, self._helpers = raw, helpers
        self._content = HASHES[hash]() if hash else None
        self._syncing: Future[None] | None = None
        self._sent = 0
        self.bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Write `data` (anything with a buffer) whole; the bytes written."""
        view = memoryview(data).cast("B")
        if self._content is None:
            self._write(view)
        elif len(view) < WORTH_A_THREAD:
            self._content.update(view)
            self._write(view)
        else:
            hashing = self._helpers.submit(self._content.update, view)
            try:
                self._write(view)
            finally:
                hashing.result()
        self.bytes += len(view)
        if self.bytes - self._sent >= SEND_BYTES:
            self._send()
        return len(view)

    def _write(self, view: memoryview) -> None:
        written = 0
        while written < len(view):  # an unbuffered write may take less than it is given (2 GiB at most on Linux)
            written += self._raw.write(view[written:])

    def _send(self) -> None:
        """Have what is written so far go to the disk, unless that is being done."""
        if self._syncing and not self._syncing.done():
            return
        if self._syncing:
            self._syncing.result()
        self._syncing, self._sent = self._helpers.submit(os.fdatasync, self._raw.fileno()), self.bytes

    def flush(self) -> None:
        self._raw.flush()

    def flush_all(self) -> None:
        """Flush to the system, and wait for what is being sent to the disk."""
        if self._syncing:
            self._syncing.result()
        self._raw.flush()

    def sync(self) -> None:
        """Flush to the disk itself."""
        self.flush_all()
        os.fsync(self._raw.fileno())

    @property
    def digest(self) -> str:
        """The hash of what was written, in hexadecimal; empty for a file that is not hashed."""
        return str(self._content.hexdigest()) if self._content else ""


@contextmanager
def publishing(path: Path, *, hash: Hash | None = "sha256") -> Iterator[HashedFile]:
    """Write the file `path` through the yielded handle; when the block ends well it appears, whole and synced."""
    temporary = temporary_beside(path)
    with explained(path):
        try:
            with ThreadPoolExecutor(2, thread_name_prefix="file") as helpers, temporary.open("xb", buffering=0) as raw:
                file = HashedFile(raw, helpers, hash=hash)
                yield file
                file.sync()
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


class PublishingGroup:
    """Many small files that appear together: each is written beside its place; `publish` syncs them all at once, by threads, so that the
    disk waits once and not for every file, renames them, and syncs their folders. As a context manager; what was not published is
    removed."""

    THREADS = 8

    def __init__(self) -> None:
        self.bytes = 0
        self._waiting: list[tuple[Path, Path]] = []  # temporary, place
        self._helpers = ThreadPoolExecutor(self.THREADS, thread_name_prefix="files")

    def __len__(self) -> int:
        return len(self._waiting)

    def __enter__(self) -> PublishingGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self._helpers.shutdown()
        for temporary, _path in self._waiting:
            with suppress(FileNotFoundError):
                temporary.unlink()

    @contextmanager
    def file(self, path: Path, *, hash: Hash | None = "sha256") -> Iterator[HashedFile]:
        """Write the file `path` through the yielded handle; it appears with the group."""
        temporary = temporary_beside(path)
        self._waiting.append((temporary, path))
        with explained(path), temporary.open("xb", buffering=0) as raw:
            file = HashedFile(raw, self._helpers, hash=hash)
            yield file
            file.flush_all()
        self.bytes += file.bytes

    def publish(self) -> None:
        """All files written so far appear, whole and synced."""
        if not self._waiting:
            return
        with explained(self._waiting[0][1].parent):
            list(self._helpers.map(_sync_data, [temporary for temporary, _ in self._waiting]))
            for temporary, path in self._waiting:
                temporary.replace(path)
            for folder in sorted({path.parent for _, path in self._waiting}):
                sync_folder(folder)
        self._waiting, self.bytes = [], 0


def _sync_data(path: Path) -> None:
    with path.open("rb") as file:
        os.fdatasync(file.fileno())


def publish_bytes(path: Path, data: bytes) -> str:
    """Publish `data` as the file `path`; its sha256."""
    with publishing(path) as file:
        file.write(data)
    return file.digest


def publish_json(path: Path, value: object) -> str:
    """Publish `value` as indented JSON with sorted keys; its sha256. InputError where it holds a known secret, which would stay there."""
    return publish_bytes(path, json_without_secrets(path, value))


def json_without_secrets(path: Path, value: object) -> bytes:
    """The bytes of `value` for the file `path`. InputError where they hold a known secret."""
    data = json_bytes(value)
    if shows_secrets(data.decode()):
        raise InputError(
            f"{path}: would hold a password, token or query of an address that was given. Give that name or path without it."
        )
    return data


def publish_alone(path: Path, data: bytes) -> None:
    """Publish a file that belongs to no bank, such as a page: nobody else removes what killed runs left of it."""
    with explained(path):
        sweep_temporaries(path.parent, f"{glob.escape(path.name)}.*")
    publish_bytes(path, data)


def refuse_other_file(path: Path, what: str, reads: Callable[[], object]) -> None:
    """InputError where `path` is a file, and not `what`, which `reads` tells by raising: a file of somebody else's is not replaced."""
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return
    try:
        reads()
    except ArrowbankError as error:
        raise InputError(
            f"--out {path}: holds something else than {what}, and was left as it is ({error}). Give a new name, or remove the file "
            "yourself."
        ) from None


def json_bytes(value: object, *, sort_keys: bool = True) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=False) + "\n").encode()


def open_to_append(path: Path) -> IO[bytes]:
    """A file that arrowbank appends to, made where it does not exist; an OSError (ELOOP) where it is a symbolic link."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644), "ab", buffering=0)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep_temporaries(folder: Path, of: str = "*") -> None:
    """Remove the temporaries in `folder` that ended processes left behind; `of` is a pattern for the names they were to get."""
    for leftover in folder.glob(f".{of}.tmp"):
        with suppress(FileNotFoundError):
            if not is_left_behind(leftover):
                continue
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    return digest_of(path, "sha256")


def digest_of(path: Path, hash: Hash) -> str:
    """The hash of a file's bytes, in hexadecimal."""
    content = HASHES[hash]()
    with naming(path), path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(READ_BYTES))
        while count := file.readinto(buffer):
            content.update(buffer[:count])
    return str(content.hexdigest())


def refuse_address(place: Path) -> None:
    """InputError for an address given as a place to write to: as a path it would name folders such as `s3:` here. Also for a name that
    is no text, which Arrow cannot open."""
    try:
        str(place).encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: its name is not valid UTF-8. Give another name.") from None
    scheme = place.parts[0] if place.parts else ""
    if re.fullmatch(r"[a-z][a-z0-9+.-]+:", scheme) and not Path(scheme).exists():
        raise InputError(
            f"{scheme}//{'/'.join(place.parts[1:])}: an address. What is written goes to a folder of this machine: give one. "
            "`arrowbank push FOLDER ADDRESS` brings a bank from there to an address."
        )


def free_bytes(folder: Path) -> int:
    """The free bytes of the disk under `folder`, which need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def reserve(path: Path, size: int) -> None:
    """Make the file `path` of `size` bytes, with room on the disk for all of them: a map of a file without room ends in a signal."""
    with explained(path), path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            for start in range(0, size, READ_BYTES):
                file.write(bytes(min(READ_BYTES, size - start)))


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise DiskFull when the disk under `folder` has less than `needed` bytes free for `what`."""
    free = free_bytes(folder)
    if free < needed:
        raise DiskFull(
            f"{folder}: {what} takes {human_bytes(needed)}, the disk has {human_bytes(free)} free. "
            "Make room or give a folder on another disk."
        )


def human_bytes(count: float) -> str:
    """A byte count for people: 1.5 GB, in powers of ten."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
