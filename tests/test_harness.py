"""The harness that kills processes really kills them, at every moment, and then lets one live."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.kill import kill_after, kill_at, tree_bytes


def publish(folder: Path, count: int) -> None:
    for i in range(count):
        temporary = folder / f"{i}.tmp"
        with temporary.open("w") as file:
            file.write(str(i))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / f"{i}")


def fail() -> None:
    raise ValueError("not today")


@pytest.mark.slow
def test_every_moment_is_reached_in_order(tmp_path: Path) -> None:
    seen = []
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        folder.mkdir()
        outcome = kill_at(moment, publish, folder, 2)
        assert outcome.error == ""
        if not outcome.killed:
            break
        seen.append(sorted(tree_bytes(folder)))
    assert seen == [["0.tmp"]] * 3 + [["0"]] + [["0", "1.tmp"]] * 3 + [["0", "1"]]
    assert outcome.moments == 8
    assert sorted(tree_bytes(folder)) == ["0", "1"]


def test_killed_from_outside_or_not_at_all() -> None:
    assert kill_after(0.05, time.sleep, 60).killed
    assert not kill_after(60, time.sleep, 0).killed
    assert not kill_at(0, time.sleep, 0).killed


def test_an_error_comes_back() -> None:
    outcome = kill_at(1, fail)
    assert not outcome.killed
    assert "ValueError: not today" in outcome.error
