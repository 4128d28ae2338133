"""Which process made a file, and whether that process has ended: for locks and temporaries on disks that several hosts share.

A process id means nothing on another host, in another container or after a reboot, and the system gives it to a new process when the
old one has ended. So a process is named by host, by the place where its id counts (host, boot and namespace of process ids), by its
id, and by its start time."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ABANDONED_S = 24 * 3600.0  # a temporary of a process that cannot be asked about (another host's) is removed after this time

_TEMPORARY = re.compile(
    r".*\.(?P<host>[A-Za-z0-9]*)-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{8}\.tmp", re.DOTALL
)
# of earlier versions, without a host: of any file, and of a shard that was linked; other programs write `.NAME.PID.tmp`, too
_EARLIER = re.compile(r"(?:.*\.(?P<pid>\d+)-[0-9a-f]{8}|\.data-\d+\.arrow\.(?P<linked>\d+))\.tmp", re.DOTALL)


@dataclass(frozen=True)
class Process:
    """A process. `machine`: where `pid` counts, eight hexadecimal digits. `started`: in the system's own unit, 0 where it does not say."""

    host: str
    machine: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    pid = os.getpid()
    return Process(socket.gethostname(), _machine(), pid, _start_time(pid) or 0)


def has_ended(process: Process) -> bool | None:
    """Whether `process` has ended. None where that cannot be known from here."""
    if process.machine != _machine():
        return None
    if not _exists(process.pid):
        return True
    started = _start_time(process.pid)
    if not started or not process.started:
        return None
    return started != process.started


def temporary_beside(path: Path) -> Path:
    """A hidden name beside `path` that says which process writes there: `.NAME.HOST-MACHINE-PID-START-RANDOM.tmp`."""
    me = this_process()
    host = re.sub("[^A-Za-z0-9]", "", me.host)[:20]
    return path.with_name(f".{path.name}.{host}-{me.machine}-{me.pid}-{me.started}-{secrets.token_hex(4)}.tmp")


def is_left_behind(temporary: Path) -> bool:
    """Whether a process that has ended left `temporary` behind. One that cannot be asked about has ended after ABANDONED_S."""
    if found := _TEMPORARY.fullmatch(temporary.name):
        ended = has_ended(Process(found["host"], found["machine"], int(found["pid"]), int(found["started"])))
    elif found := _EARLIER.fullmatch(temporary.name):
        ended = None if _exists(int(found["pid"] or found["linked"])) else True
    else:
        return False  # a name of no writer
    if ended is None:
        return time.time() - temporary.lstat().st_mtime > ABANDONED_S
    return ended


@cache
def _machine() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _exists(pid: int) -> bool:
    """Whether there is a process `pid` here that has not ended (one that only waits for its parent to notice has)."""
    try:
        os.kill(pid, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return _status(pid)[:1] not in (["Z"], ["X"])


def _start_time(pid: int) -> int | None:
    """When the process was started, in clock ticks since the boot. None where the system does not say."""
    fields = _status(pid)
    return int(fields[19]) if len(fields) > 19 else None


def _status(pid: int) -> list[str]:
    """The fields of Linux's status line after the program's name, the first one is the state; empty elsewhere."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return line.rpartition(")")[2].split()


NO_MAIN_GUARD = 71
REMEDY = 'Worker processes import the script that starts them. Put what it runs under `if __name__ == "__main__":`, or use one process.'
KINDS = ("multiprocessing", "multiprocess")  # the standard library's, and the one that `datasets` uses


def leave_while_importing_main() -> None:
    """End this process where it is a worker that imports the main script of its parent: what is about to run is the parent's work."""
    for kind in KINDS:
        module = sys.modules.get(f"{kind}.process")
        if module is not None and getattr(module.current_process(), "_inheriting", False):
            os._exit(NO_MAIN_GUARD)


def main_script() -> str:
    """The script that this process runs, for people."""
    return str(getattr(sys.modules.get("__main__"), "__file__", None) or "the main module")
