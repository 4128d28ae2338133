"""The soak finds what it is there to find, and its figures add up."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from arrowbank.cli import main
from tests.feature_banks import save_features
from tests.kill import cli, kill_at
from tests.soak.children import Child, run_many, wrong_with
from tests.soak.tally import Tally, Try, load
from tests.target_banks import make_target_bank


def crash() -> int:
    raise ValueError("not today")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)
    raise AssertionError


@pytest.mark.parametrize(
    ("run", "wrong"),
    [
        (lambda: 0, ""),
        (lambda: 2, ""),
        (lambda: 3, "exit code 3"),
        (lambda: 70, "traceback"),
        (crash, "traceback"),
        (die, "died of SIGSEGV"),
    ],
)
def test_how_a_process_ends_is_told(tmp_path: Path, run: object, wrong: str) -> None:
    assert wrong_with(Child(run, tmp_path, tmp_path / "output").wait()) == wrong  # type: ignore[arg-type]


def test_a_process_that_does_not_end_is_hung(tmp_path: Path) -> None:
    ended = Child(lambda: time.sleep(60) or 0, tmp_path, tmp_path / "output").wait(0.2)
    assert (wrong_with(ended), ended.killed) == ("hang", False)


def test_a_worker_that_outlives_its_command_is_found_and_ended(tmp_path: Path) -> None:
    child = Child(lambda: int(os.fork() == 0 and time.sleep(0.3) is None), tmp_path, tmp_path / "output")
    assert wrong_with(child.wait()) == ""
    assert child.family() == []


def test_an_input_that_kills_the_child_costs_that_input_only(tmp_path: Path) -> None:
    def prepare(number: int) -> object:
        return f"kind {number}", die if number == 1 else lambda: ("", "")

    found = list(run_many(4, prepare, tmp_path, tmp_path))  # type: ignore[arg-type]
    assert [(kind, wrong) for kind, wrong, _ in found] == [
        ("kind 0", ""),
        ("kind 1", "died of SIGSEGV"),
        ("kind 2", ""),
        ("kind 3", ""),
    ]


def test_figures_add_up_over_runs(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    for _ in range(2):
        tally = Tally()
        tally.merge(load(state))
        for number in range(10):
            tally.add(Try("kills", "a worker", "hang" if number == 3 else "", "at the end"), "--seed 1 --only kills:0")
        tally.save(state)
    total = load(state)
    assert (total.total("kills: "), total.failed["kills: a worker"], len(total.failures)) == (20, 2, 2)
    assert "| kills: a worker | 20 | 2 |" in total.table()


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["report bank --points 0 --out {}", "audit bank bank --out {}", "targets vocab targets --draft-vocab 9 --out {}"]
)
def test_what_a_killed_run_leaves_of_a_single_file_goes(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_features(tmp_path / "bank", np.eye(4, 8, dtype=np.float16))
    make_target_bank(tmp_path / "targets", vocab_size=50)
    out = tmp_path / "out" / "page.html"
    out.parent.mkdir()
    argv = line.format(out).split()
    assert kill_at(3, in_folder, tmp_path, *argv).killed  # before what was written becomes the file
    assert [path.suffix for path in out.parent.iterdir()] == [".tmp"]
    assert main(argv) == 0
    assert list(out.parent.iterdir()) == [out]


def in_folder(folder: Path, *argv: str) -> None:
    os.chdir(folder)
    cli(*argv)
