"""One writer per folder: where `flock` works, where it is refused, and where it is accepted and does nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arrowbank.bank.locks import HEARTBEAT_S, STALE_S
from tests.kill import tree_bytes
from tests.refusals import ROOT, Machine, Refusal, machine_or_skip

HOLD = """
import sys
from pathlib import Path
from arrowbank.bank.locks import FolderLock
from arrowbank.errors import BankLocked
folder, worker = Path(sys.argv[1]), sys.argv[2]
for line in sys.stdin:
    try:
        if line == "take\\n":
            folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder, int(worker) if worker else None)
        elif line == "check\\n":
            lock.check()
        else:
            lock.release()
        print("done", flush=True)
    except BankLocked as error:
        print(error, flush=True)
"""
COUNT = """
import sys
from pathlib import Path
from arrowbank.bank.locks import waiting_lock
place = Path(sys.argv[1])
for _ in range(20):
    with waiting_lock(place / "lock-commit"):
        count = int((place / "count").read_text())
        (place / "count").write_text(str(count + 1))
"""
# how flock(2) fails, as an errno; "" is a flock that says yes to everybody
KINDS = {"works": None, "refused": "ENOLCK", "not supported": "EOPNOTSUPP", "does nothing": ""}


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    machine = machine_or_skip()
    yield machine
    machine.close()


class Holder:
    """A process that takes, checks and releases a lock as it is told."""

    def __init__(self, machine: Machine, folder: Path, worker: int | None = None) -> None:
        argv = [sys.executable, "-c", HOLD, str(folder), "" if worker is None else str(worker)]
        self.process = subprocess.Popen(
            argv, env=machine.environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self, how: int = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.communicate()


@pytest.fixture
def hold(machine: Machine, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Holder]]:
    """Makes processes on a disk whose flock is of the kind that the test is given."""
    error = KINDS[request.node.callspec.params["kind"]]
    machine.order(None if error is None else Refusal(under=tmp_path, calls=("flock",), error=error))
    holders: list[Holder] = []

    def make(worker: int | None = None) -> Holder:
        holders.append(Holder(machine, tmp_path / "bank" / "journal", worker))
        return holders[-1]

    yield make
    machine.order(None)
    for holder in holders:
        holder.end()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_writers_exclude_each_other_and_a_killed_one_is_succeeded_at_once(hold: Callable[..., Holder], kind: str) -> None:
    first, second = hold(), hold()
    assert first.ask("take") == "done"
    said = second.ask("take")
    assert "another process is writing this bank" in said
    assert f"process {first.process.pid} on {os.uname().nodename}" in said
    assert first.ask("check") == "done"
    assert first.ask("release") == "done"
    assert second.ask("take") == "done"
    assert "another process is writing" in first.ask("take")
    second.process.kill()
    second.process.wait()
    assert first.ask("take") == "done"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_workers_share_a_bank_and_exclude_who_does_not(hold: Callable[..., Holder], kind: str) -> None:
    zero, one, again, alone = hold(0), hold(1), hold(1), hold()
    assert [zero.ask("take"), one.ask("take")] == ["done", "done"]
    assert "another process is writing" in again.ask("take")
    assert "another process is writing" in alone.ask("take")
    assert one.ask("release") == "done"
    assert "another process is writing" in alone.ask("take")
    zero.process.kill()
    zero.process.wait()
    assert alone.ask("take") == "done"
    assert "another process is writing" in one.ask("take")
    assert alone.ask("release") == "done"
    assert one.ask("take") == "done"


@pytest.mark.parametrize("kind", ["refused"])
def test_a_stopped_process_of_this_host_keeps_its_lock(hold: Callable[..., Holder], tmp_path: Path, kind: str) -> None:
    first, second = hold(), hold()
    assert first.ask("take") == "done"
    first.process.send_signal(signal.SIGSTOP)
    owner = tmp_path / "bank" / "journal" / "lock.owner"
    let_time_pass(owner, 10 * STALE_S)
    assert "another process is writing" in second.ask("take")
    first.process.send_signal(signal.SIGCONT)
    assert first.ask("check") == "done"


def let_time_pass(path: Path, seconds: float) -> None:
    """Make `path` as old as if nobody had touched it for so long."""
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def rewrite(owner: Path, **changes: Any) -> None:
    owner.write_text(json.dumps({**json.loads(owner.read_text()), **changes}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refused"])
@pytest.mark.parametrize("content", ["another host", "another boot", "half written"])
def test_a_lock_of_another_host_is_taken_over_when_its_heartbeat_has_stopped(
    hold: Callable[..., Holder], tmp_path: Path, kind: str, content: str
) -> None:
    first, second = hold(), hold()
    assert first.ask("take") == "done"
    owner = tmp_path / "bank" / "journal" / "lock.owner"
    first.end()  # its process has ended, which says nothing of a process elsewhere
    if content == "half written":
        owner.write_text("")
    else:
        rewrite(owner, machine="01234567", **({"host": "elsewhere"} if content == "another host" else {}))
    let_time_pass(owner, STALE_S / 2)
    said = second.ask("take")
    assert re.search(rf"last sign of life 1[45]\d s ago.*the same command takes over {STALE_S:.0f} s after", said)
    assert ("elsewhere" in said) == (content == "another host")
    let_time_pass(owner, STALE_S + 5)
    assert second.ask("take") == "done"


@pytest.mark.parametrize("kind", ["refused"])
def test_the_id_of_a_process_that_another_one_has_now_is_no_sign_of_life(
    hold: Callable[..., Holder], tmp_path: Path, kind: str
) -> None:
    first, second = hold(), hold()
    assert first.ask("take") == "done"
    owner = tmp_path / "bank" / "journal" / "lock.owner"
    rewrite(owner, started=json.loads(owner.read_text())["started"] - 1)
    assert second.ask("take") == "done"
    assert "another process has taken this bank over" not in second.ask("check")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refused"])
def test_who_was_succeeded_is_told(hold: Callable[..., Holder], tmp_path: Path, kind: str) -> None:
    first, second = hold(), hold()
    assert first.ask("take") == "done"
    owner = tmp_path / "bank" / "journal" / "lock.owner"
    rewrite(owner, machine="01234567")
    let_time_pass(owner, STALE_S + 5)
    assert second.ask("take") == "done"
    code = (
        "import sys, time, pathlib; from arrowbank.bank import locks; lock = locks._OwnerFile(pathlib.Path(sys.argv[1]), 'mine');"
        f"lock._touched -= {3 * HEARTBEAT_S}; lock.check()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(owner)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "another process has taken this bank over, because this one gave no sign of life" in done.stderr
    assert second.ask("check") == "done"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refused"])
def test_one_of_many_takes_a_lock_over(hold: Callable[..., Holder], tmp_path: Path, kind: str) -> None:
    many = [hold() for _ in range(6)]
    holder = many.pop()
    for _ in range(5):
        assert holder.ask("take") == "done"
        holder.process.kill()
        holder.process.wait()
        for other in many:  # all at once
            assert other.process.stdin is not None
            other.process.stdin.write("take\n")
            other.process.stdin.flush()
        answers = [other.process.stdout.readline().strip() for other in many if other.process.stdout is not None]
        assert answers.count("done") == 1
        winner = many[answers.index("done")]
        assert winner.ask("check") == "done"
        assert winner.ask("release") == "done"
        holder = hold()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_a_lock_gets_it(machine: Machine, tmp_path: Path, kind: str) -> None:
    error = KINDS[kind]
    machine.order(None if error is None else Refusal(under=tmp_path, calls=("flock",), error=error))
    (tmp_path / "count").write_text("0")
    argv = [sys.executable, "-c", COUNT, str(tmp_path)]
    processes = [subprocess.Popen(argv, env=machine.environment, cwd=ROOT) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    machine.order(None)
    assert (tmp_path / "count").read_text() == "60"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_build_that_is_killed_goes_on_to_the_same_bytes(machine: Machine, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"query": f"text {i}"}) + "\n" for i in range(20_000)))
    argv = ["scan", "--source", f"train={source}", "--out"]
    assert machine.run(*argv, tmp_path / "whole").code == 0
    error = KINDS[kind]
    refusal = None if error is None else Refusal(under=tmp_path, calls=("flock",), error=error)
    machine.order(refusal)
    killed = subprocess.Popen(
        [sys.executable, "-m", "arrowbank", *argv, str(tmp_path / "texts")], env=machine.environment, cwd=ROOT, stderr=-1
    )
    while not (tmp_path / "texts" / "manifest.json").exists() and killed.poll() is None:
        time.sleep(0.001)
    killed.kill()
    killed.communicate()
    assert (tmp_path / "texts" / "journal" / "lock.owner").exists() == (error is not None)
    done = machine.run(*argv, tmp_path / "texts", refusal=refusal)
    assert (done.code, done.err) == (0, done.err)
    assert bool(done.hits) == (error is not None)
    assert tree_bytes(tmp_path / "texts") == tree_bytes(tmp_path / "whole")
