"""One writer per folder: locks that the system takes back when their process ends, and what stands in for them where it cannot.

Where `flock` works, a lock is an open file. Some shared file systems (NFS, Lustre, FUSE) refuse `flock`, others accept it and do
nothing. Both are found out by asking for one lock through two descriptors. There a lock is a file `NAME.owner` that is created with
O_EXCL and names its process. A thread touches it every HEARTBEAT_S. It is taken over

- at once where its process ran on this host and has ended,
- STALE_S after the last heartbeat where its process runs elsewhere, by the file server's clock.

All hosts that share a folder must agree on whether `flock` works: a lock of one kind does not exclude one of the other.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Protocol

from arrowbank.bank.processes import Process, has_ended, leave_while_importing_main, temporary_beside, this_process
from arrowbank.bank.refusals import explained
from arrowbank.errors import BankLocked

HEARTBEAT_S = 20.0
# longer than an NFS client may show old attributes (60 s), and than a busy process may forget to touch its file
STALE_S = 300.0
PAUSES_S = (0.01, 0.5)  # between two looks at a lock that is waited for: the first, the longest

OWNER = ".owner"
NO_FLOCK = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_flock_works: dict[int, bool] = {}  # by device


class _Held(Protocol):
    """A lock that is held."""

    def check(self) -> None:
        """BankLocked where another process has taken it over."""

    def release(self) -> None: ...

    def forget(self) -> None:
        """Let go of it in a forked child, whose parent still holds it."""


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _let_go_in_a_fork() -> None:
    """A forked child has the open files too, and would hold the locks of a parent that was killed."""
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_let_go_in_a_fork)


class FolderLock:
    """The right to write a bank whose journal is `folder`. BankLocked where another process has it.

    An exclusive writer holds `lock` alone. Workers of a job array share `lock`, and each holds its own `lock-i` alone. Without
    `flock` a worker shares nothing: it holds `lock-i`, and no exclusive writer may be there, nor come.
    """

    def __init__(self, folder: Path, worker: int | None = None) -> None:
        self._holds: list[_Held] = []
        _held.add(self)
        own = folder / ("lock" if worker is None else f"lock-{worker}")
        try:
            with explained(folder):
                if flock_works(folder):
                    if worker is not None:
                        self._hold(_FileLock.take(folder / "lock", fcntl.LOCK_SH), folder / "lock")
                    self._hold(_FileLock.take(own, fcntl.LOCK_EX), own)
                else:
                    self._hold(_OwnerFile.take(own), own)
                    self._refuse_others(folder, worker)
        except BaseException:
            self.release()
            raise

    def _hold(self, held: _Held | None, path: Path) -> None:
        if held is None:
            raise _locked(path)
        self._holds.append(held)

    def _refuse_others(self, folder: Path, worker: int | None) -> None:
        """BankLocked where a writer of the other kind is there. Each looks after it has made its own file, so one sees the other."""
        for path in folder.glob(f"lock-[0-9]*{OWNER}") if worker is None else [folder / f"lock{OWNER}"]:
            if path.exists() and not _take_away_if_stale(path):
                raise _locked(path.with_name(path.name.removesuffix(OWNER)))

    def check(self) -> None:
        """BankLocked where this process was silent for so long that another one has taken the bank over."""
        for held in self._holds:
            held.check()

    def release(self) -> None:
        """Give the right back."""
        while self._holds:
            self._holds.pop().release()

    def forget(self) -> None:
        while self._holds:
            self._holds.pop().forget()


@contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path` alone, after waiting for whoever holds it."""
    with explained(path):
        held = _wait_for(path)
    try:
        yield
    finally:
        held.release()


def _wait_for(path: Path) -> _Held:
    if flock_works(path.parent):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        return _FileLock(handle)
    pause, longest = PAUSES_S
    while (held := _OwnerFile.take(path)) is None:
        time.sleep(pause)
        pause = min(longest, pause * 2)
    return held


def flock_works(folder: Path) -> bool:
    """Whether `flock` excludes anybody in `folder`: a second descriptor must not get the lock that a first one holds."""
    device = folder.stat().st_dev
    if device not in _flock_works:
        _flock_works[device] = _try_flock(temporary_beside(folder / "lock"))
    return _flock_works[device]


def _try_flock(path: Path) -> bool:
    handles: list[int] = []
    try:
        for flags in (os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR):
            handles.append(os.open(path, flags, 0o644))
            fcntl.flock(handles[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return len(handles) == 2
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
    finally:
        for handle in handles:
            os.close(handle)
        with suppress(FileNotFoundError):
            path.unlink()
    return False


def _locked(path: Path) -> BankLocked:
    """The error for a lock that another process holds."""
    leave_while_importing_main()  # the other process is then this one's parent
    bank, owner = path.parent.parent, path.with_name(path.name + OWNER)
    if (seen := _look_at(owner)) is not None:
        holder, age = seen
        return BankLocked(
            f"{bank}: another process is writing this bank (holder: {holder or 'unknown'}, last sign of life {max(0, age):.0f} s ago). "
            f"Wait until it has ended, or give another folder. If its host has failed, the same command takes over "
            f"{STALE_S:.0f} s after the last sign of life."
        )
    with suppress(OSError):
        holder_text = path.read_text("utf-8", "replace")[:500].strip()
    return BankLocked(
        f"{bank}: another process is writing this bank (holder: {holder_text or 'unknown'}). "
        "Wait until it has ended, or give another folder."
    )


class _FileLock:
    """A lock of the system's, held by an open file."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, path: Path, how: int) -> _FileLock | None:
        """The lock `path`, for one (LOCK_EX) or several (LOCK_SH). None where another process has it."""
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
            except OSError as error:
                os.close(handle)
                if isinstance(error, BlockingIOError):
                    return None
                raise
            if _is_still(handle, path):  # else its last holder removed it between our open and our lock
                break
            os.close(handle)
        if how == fcntl.LOCK_EX:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{this_process()}\n".encode(), 0)
        return cls(handle)

    def check(self) -> None:
        """The system does not take it away."""

    def release(self) -> None:
        os.close(self._handle)

    forget = release


def _is_still(handle: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


class _OwnerFile:
    """A lock that is a file: created by one process only, and touched by a thread of it."""

    def __init__(self, path: Path, token: str) -> None:
        self._path, self._token = path, token
        self._lost, self._released = False, Event()
        self._touched = time.time()
        Thread(target=self._touch_often, name="lock", daemon=True).start()

    @classmethod
    def take(cls, lock: Path) -> _OwnerFile | None:
        """The lock `lock`. None where a process that has not ended has it."""
        path, token = lock.with_name(lock.name + OWNER), secrets.token_hex(8)
        while True:
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                if not _take_away_if_stale(path):
                    return None
                continue
            try:
                os.write(handle, json.dumps({**asdict(this_process()), "token": token}).encode())
                os.fsync(handle)
            finally:
                os.close(handle)
            return cls(path, token)

    def check(self) -> None:
        if time.time() - self._touched > 2 * HEARTBEAT_S:  # this process was stopped: perhaps for too long
            self._touch()
        if self._lost:
            raise BankLocked(
                f"{self._path.parent.parent}: another process has taken this bank over, because this one gave no sign of life for "
                f"{STALE_S:.0f} s. What it finished is kept; run the same command again when the other has ended."
            )

    def release(self) -> None:
        self._released.set()
        with suppress(OSError):  # gone with the journal, or out of reach: then it is stale soon
            if self._is_mine():
                self._path.unlink()
                self._path.parent.rmdir()  # left by a writer that has committed, else it is not empty

    def forget(self) -> None:
        self._released.set()

    def _is_mine(self) -> bool:
        return self._token in self._path.read_text("utf-8", "replace")

    def _touch_often(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            self._touch()

    def _touch(self) -> None:
        try:
            if self._is_mine():
                os.utime(self._path)  # by the server's clock
                self._touched = time.time()
            else:
                self._lost = True
        except FileNotFoundError:
            self._lost = True
        except OSError:
            pass  # the server does not answer just now; the next time says more


def _look_at(owner: Path) -> tuple[Process | None, float] | None:
    """Who holds a lock that is a file, and the seconds since it was touched. None where there is no such file."""
    try:
        with owner.open("rb") as file:  # opening makes an NFS client ask for the attributes
            data, touched = file.read(10_000), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    try:
        said = json.loads(data)
        process = Process(str(said["host"]), str(said["machine"]), int(said["pid"]), int(said["started"]))
    except (ValueError, KeyError, TypeError):  # its process is just writing it, or was killed right there
        process = None
    return process, _time_of_the_server(owner) - touched


def _time_of_the_server(beside: Path) -> float:
    """What time the file system says it is."""
    probe = temporary_beside(beside)
    with probe.open("xb") as file:
        now = os.fstat(file.fileno()).st_mtime
    probe.unlink()
    return now


def _is_stale(owner: Path) -> bool:
    if (seen := _look_at(owner)) is None:
        return True
    process, age = seen
    ended = None if process is None else has_ended(process)
    return age > STALE_S if ended is None else ended


def _take_away_if_stale(owner: Path) -> bool:
    """Remove the file of a lock whose process has ended. Whether it may be asked for again.

    One process at a time does so, behind a file of its own: a second one would remove the new lock of the first.
    """
    if not _is_stale(owner):
        return False
    guard = owner.with_name(f"{owner.name}.removing")
    try:
        handle = os.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        if _is_stale(guard):  # killed while it removed one
            guard.unlink(missing_ok=True)
        time.sleep(PAUSES_S[0])
        return True
    try:
        os.write(handle, json.dumps(asdict(this_process())).encode())
        if _is_stale(owner):
            owner.unlink(missing_ok=True)
    finally:
        os.close(handle)
        guard.unlink(missing_ok=True)
    return True
