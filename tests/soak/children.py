"""Processes forked from this one, which has the heavy packages imported and has done nothing else: a run costs milliseconds.

Each child leads a session of its own, so that it and everything it starts can be found, killed and waited for.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

HANG_S = 20  # per input that is tried in a child with many
PATIENCE_S = 120  # per command in a process of its own
FIELD, RECORD = "\x1f", "\x1e"
MEMORY = 16 << 30  # of address space: no fuzzed length may take the machine down
UNEXPECTED = 70  # the exit code of the command line's outer net


@dataclass(frozen=True)
class Ended:
    """How a process ended: an exit code, or minus the number of a signal; what it printed; and whether it was ended as hung."""

    code: int
    output: str
    hung: bool = False

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL and not self.hung


def wrong_with(ended: Ended, allowed: Sequence[int] = (0, 1, 2)) -> str:
    """What is wrong with such an end, "" for nothing: crashes and hangs are, refusals are not."""
    if ended.hung:
        return "hang"
    if ended.code < 0:
        return f"died of {signal.Signals(-ended.code).name}"
    if ended.code == UNEXPECTED or "Traceback (most recent call last)" in ended.output:
        return "traceback"
    return "" if ended.code in allowed else f"exit code {ended.code}"


class Child:
    """`run()` in a process of its own, with its output in the file `output` and `folder` as its current folder."""

    def __init__(self, run: Callable[[], int], folder: Path, output: Path) -> None:
        self.output = output
        self.pid = os.fork()
        if not self.pid:
            _live(run, folder, output)
        self._handle = os.pidfd_open(self.pid)

    def ended(self, within_s: float) -> bool:
        """Wait for the end of the process, not longer than that."""
        return bool(select.select([self._handle], [], [], within_s)[0])

    def family(self) -> list[int]:
        """The processes that it has started, and those that they have started."""
        return [pid for pid, session in _sessions() if session == self.pid and pid != self.pid]

    def wait(self, within_s: float = PATIENCE_S) -> Ended:
        """Wait for the end, kill what hangs, and leave no process behind."""
        hung = not self.ended(within_s)
        if hung:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._handle)
        code = os.waitstatus_to_exitcode(status)
        left = self._wait_for_orphans()
        said = self.output.read_text(errors="replace").partition("\nExtension modules:")[0]  # of a crash: a long list
        return Ended(code, said + ("\na worker process outlived its command" if left else ""), hung or left)

    def _wait_for_orphans(self) -> bool:
        """Workers of a command that died end by themselves; whether some did not."""
        deadline = time.monotonic() + HANG_S
        while orphans := self.family():
            if time.monotonic() > deadline:
                for pid in orphans:
                    kill(pid)
                return True
            time.sleep(0.005)
        return False


def kill(pid: int) -> bool:
    """SIGKILL; whether the process was still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def command_line(argv: Sequence[str]) -> int:
    """The command line in this process: its exit code, 70 for an unexpected exception, whose traceback is printed."""
    from arrowbank import cli

    told = cli.internal_error

    def told_with_traceback(arguments: Sequence[str], error: Exception) -> str:
        traceback.print_exception(error)
        return told(arguments, error)

    cli.internal_error = told_with_traceback
    try:
        return cli.main(list(argv))
    except BaseException:
        traceback.print_exc()
        return UNEXPECTED
    finally:
        cli.internal_error = told


Trial = tuple[str, Callable[[], tuple[str, str]]]


def run_many(inputs: int, prepare: Callable[[int], Trial], folder: Path, cwd: Path) -> Iterator[tuple[str, str, str]]:
    """(kind, what is wrong, details) of inputs 0 … `inputs` - 1, many of them in one child, whose notes go to `folder`.

    `prepare` gives an input's kind and the function that tries it, which gives what is wrong and details. A child that dies or
    hangs is the failure of the input that it was at, and another one takes the rest.
    """
    notes, output = folder / "notes", folder / "output"
    first = 0
    while first < inputs:
        notes.write_text("")
        ended = Child(functools.partial(_run_from, first, inputs, prepare, notes), cwd, output).wait(HANG_S * (inputs + 1))
        *done, at = notes.read_text(errors="replace").split(RECORD)
        for line in done:
            kind, wrong, detail = line.split(FIELD)
            yield kind, wrong, detail
        first += len(done)
        if first < inputs:
            hang = ended.hung or ended.code == -signal.SIGALRM
            yield at.partition(FIELD)[0], "hang" if hang else wrong_with(ended) or "the process left", ended.output
            first += 1


def _run_from(first: int, inputs: int, prepare: Callable[[int], Trial], notes: Path) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    faulthandler.register(signal.SIGALRM, chain=True)  # where it hangs is told before it dies
    plain = str.maketrans(FIELD + RECORD, "  ")
    with notes.open("a", errors="replace") as file:
        for number in range(first, inputs):
            kind, trial = prepare(number)
            file.write(kind + FIELD)
            file.flush()
            os.ftruncate(1, 0)
            signal.alarm(HANG_S)
            wrong, detail = trial()
            signal.alarm(0)
            file.write(f"{wrong.translate(plain)}{FIELD}{detail.translate(plain) if wrong else ''}{RECORD}")
            file.flush()
    return 0


def said() -> str:
    """What this child has printed since its input began."""
    sys.stdout.flush()
    sys.stderr.flush()
    return os.pread(1, 1 << 20, 0).decode(errors="replace")


def empty(folder: Path) -> Path:
    """The folder, with nothing in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _live(run: Callable[[], int], folder: Path, output: Path) -> NoReturn:
    code = UNEXPECTED
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = os.open(output, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        for standard in (1, 2):
            os.dup2(file, standard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        faulthandler.enable(file=2)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _sessions() -> Iterator[tuple[int, int]]:
    """(process, session) of every live process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:  # it has just ended
            continue
        if state != "Z":
            yield int(path.parent.name), int(session)
