"""What the operating system refuses, as errors that say what to do: full and failing disks, lost file servers, limits.

`explained` is for a block that writes or reads a file, `explains` for a whole stage with its threads and workers.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from arrowbank.errors import ArrowbankError, DiskFull, InputError, StorageError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# the last three: a file where a folder has to be, or the reverse
NO_ACCESS = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
NO_NAME = {errno.ENAMETOOLONG, errno.EILSEQ}
NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
# faults of a program, and a reader of its output that has gone: nothing can be done about a file
FAULTS = {errno.EINVAL, errno.EBADF, errno.EFAULT, errno.EPIPE}
AGAIN = "What is finished is kept: run the same command again, and it resumes."
REMEDIES = {
    errno.EROFS: "The file system is read-only; it becomes so when its disk fails. Make it writable again, or give another folder.",
    errno.EIO: "The disk, or the server that holds it, fails. Look at the system's log (dmesg).",
    errno.ESTALE: "The file server no longer knows this file or folder. Mount it again.",
    errno.ENOENT: "It was removed, or its disk was unmounted, while the command was running. Restore it.",
    errno.EMFILE: "This process has as many files open as it may have. Raise the limit (ulimit -n).",
    errno.ENFILE: "The system has as many files open as it may have. End other programs.",
    errno.EAGAIN: "The system has no process, thread or lock left for this user. Give fewer workers, or raise the limit (ulimit -u).",
    errno.ENOMEM: "The system has no memory left. Give fewer workers or smaller batches.",
    errno.ENOLCK: "The file server gives no lock. Look at its lock service.",
}
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def explained(path: Path, doing: str = "written") -> Iterator[None]:
    """Turn the operating system's refusals under `path` into errors that say what to do."""
    try:
        yield
    except OSError as error:
        translated = explain(error, path, doing)
        if translated is None:
            raise
        raise translated from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the operating system's refusals in this block name `path`: those of an open file do not say which one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def explains(place: str, doing: str = "written") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a stage: `explained` for all that it does, in its threads and workers too. `place` is the argument with its folder."""

    def decorate(stage: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(stage)

        @functools.wraps(stage)
        def explained_stage(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return stage(*args, **kwargs)
            except OSError as error:
                doing_what = doing if doing == "read" or error.filename else "finished"  # it may have been an input
                translated = explain(error, Path(str(signature.bind(*args, **kwargs).arguments[place])), doing_what)
                if translated is None:
                    raise
                raise translated from error

        return explained_stage

    return decorate


def explain(error: OSError, path: Path, doing: str = "written") -> ArrowbankError | None:
    """The error for what the operating system refused under `path`, or for the file that it names itself.

    None for what is not the operating system's (no errno), not about a file (the network), or a fault of a program.
    """
    number = error.errno
    own = type(error).__module__ != "builtins"  # a library's own kind, such as ssl's, has numbers of its own
    if number is None or own or number in FAULTS or isinstance(error, ConnectionError | TimeoutError):
        return None
    named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else path
    if found := re.fullmatch(r"\.(.+)\.[^.]+\.tmp", named.name):  # the temporary that was to become this file
        named = named.with_name(found[1])
    if named not in path.parents:  # it may be a folder above that cannot be made
        doing = doing if path in (named, *named.parents) else "used"
        path = named
    refused = f"{path}: cannot be {doing} ({os.strerror(number)})."
    if number in NO_ROOM:
        return DiskFull(
            f"{path}: no room left while writing ({os.strerror(number)}). {_what_is_short(number, path)} What is finished is kept. "
            "Make room and run the same command again: it resumes."
        )
    if number in NO_ACCESS:
        remedy = "Give a folder that this user may write to." if doing == "written" else "Give one that this user may read."
        return InputError(f"{refused} {remedy}")
    if number == errno.ELOOP:
        return InputError(f"{refused} Where a file or folder of its own is expected there is a symbolic link. Remove the link.")
    if number in NO_NAME:
        return InputError(f"{refused} Give a shorter or another name.")
    return StorageError(f"{refused} {REMEDIES.get(number, 'Look at the disk or the server that holds it.')} {AGAIN}")


def refusal_behind(error: BaseException) -> OSError | None:
    """The refusal of the operating system that a library was handling when it failed with `error`, or None: in this process, or
    in one of its workers, whose traceback comes as text."""
    behind = error.__cause__ or error.__context__
    while behind is not None and not isinstance(behind, OSError):
        if found := re.search(r"\bOSError: \[Errno (\d+)\]", str(behind)):
            return OSError(int(found[1]), os.strerror(int(found[1])))
        behind = behind.__cause__ or behind.__context__
    return behind


def raise_refusal(error: BaseException, path: Path) -> None:
    """Raise where the operating system refused to read `path`, which says nothing about what is in it. Else, as for a file that does not
    exist or that a library finds damaged, do nothing."""
    if isinstance(error, OSError) and error.errno not in NOT_THERE and (refusal := explain(error, path, "read")):
        raise refusal from error


def _what_is_short(number: int, path: Path) -> str:
    """Room has several forms: bytes, inodes, the user's share, the size of one file."""
    if number == errno.EFBIG:
        return "The file is larger than the file system, or a limit of this process (ulimit -f), allows."
    if number == errno.EDQUOT:
        return "This user's quota of bytes or files is used up."
    with suppress(OSError):
        room = os.statvfs(existing(path))
        if room.f_files and not room.f_favail:
            return "The file system has no inode left for another file."
    return "The disk is full."


def existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return there
