"""Engines: the same bytes on each; real deaths cost the shard in hand and end in a retry or a clear error, never in a hang."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from arrowbank import open_bank
from arrowbank.bank import BankWriter
from arrowbank.engine import run
from arrowbank.engine.plan import Shard, shard_ranges
from arrowbank.engine.pool import WorkerFailed
from arrowbank.errors import BadVector, InputError, WorkerDied
from tests.kill import kill_after, tree_bytes

ROOT = Path(__file__).parents[1]
SHARDS = shard_ranges([50], 8)
RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
ENGINES = [("local", 1), ("local", 2), pytest.param("ray", 2, marks=RAY)]
CREWS = ENGINES[1:]


@dataclass(frozen=True)
class Numbers:
    """A worker that writes its rows' numbers, and may misbehave at shard `at`: `trouble` gets a folder for its notes."""

    notes: Path
    trouble: Callable[[Path], None] | None = None
    at: int = 3

    def __call__(self, number: int) -> Callable[[Shard, Callable[[int], None]], pa.RecordBatch]:
        def work(shard: Shard, report: Callable[[int], None]) -> pa.RecordBatch:
            (self.notes / f"pid-{os.getpid()}").touch()
            report(shard.rows // 2)
            if self.trouble and shard.index == self.at:
                self.trouble(self.notes)
            report(shard.rows - shard.rows // 2)
            return pa.record_batch({"row": np.arange(shard.start, shard.stop)})

        return work


def die_once(notes: Path) -> None:
    try:
        (notes / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def die(notes: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(notes: Path) -> None:
    raise BadVector("shard 3: a vector is all zero")


def stumble(notes: Path) -> None:
    raise KeyError("a mistake of the worker's own")


def sleep(notes: Path) -> None:
    time.sleep(120)


def build(folder: Path, worker: Numbers, engine: str = "local", workers: int = 1) -> int:
    """Make and commit a bank; the rows reported."""
    worker.notes.mkdir(exist_ok=True)
    reported = []
    with BankWriter(folder, kind="things", recipe={}) as bank:
        todo = [shard for shard in SHARDS if shard.index not in bank.done_shards]
        run(todo, worker, bank, engine=engine, workers=workers, report=reported.append)
        bank.commit(rows=50)
    return sum(reported)


@pytest.fixture(scope="module")
def ray_running() -> Iterator[None]:
    """One local Ray for the tests of this file: starting it takes ten seconds."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _ray_where_needed(request: pytest.FixtureRequest) -> None:
    if "[ray" in request.node.name:
        request.getfixturevalue("ray_running")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("whole")
    build(folder / "bank", Numbers(folder / "notes"))
    return tree_bytes(folder / "bank")


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "workers"), ENGINES)
def test_the_bytes_are_the_same_and_every_row_is_reported(
    tmp_path: Path, whole: dict[str, str], engine: str, workers: int
) -> None:
    assert build(tmp_path / "bank", Numbers(tmp_path / "notes"), engine, workers) == 50
    assert tree_bytes(tmp_path / "bank") == whole
    assert open_bank(tmp_path / "bank").dataset["row"][:] == list(range(50))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "workers"), CREWS)
def test_a_killed_worker_costs_its_shard_and_another_takes_over(
    tmp_path: Path, whole: dict[str, str], engine: str, workers: int
) -> None:
    assert build(tmp_path / "bank", Numbers(tmp_path / "notes", die_once), engine, workers) == 50
    assert (tmp_path / "notes" / "died").exists()
    assert tree_bytes(tmp_path / "bank") == whole


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "workers"), CREWS)
def test_a_shard_that_kills_every_worker_ends_in_an_error_and_the_rest_is_kept(
    tmp_path: Path, whole: dict[str, str], engine: str, workers: int
) -> None:
    with pytest.raises(WorkerDied, match=r"shard 3 \(rows 24 to 31\): 3 workers died over it.*run the same command again"):
        build(tmp_path / "bank", Numbers(tmp_path / "notes", die), engine, workers)
    with BankWriter(tmp_path / "bank", kind="things", recipe={}) as bank:
        assert 3 not in bank.done_shards
        assert len(bank.done_shards) >= 1
    build(tmp_path / "bank", Numbers(tmp_path / "notes"))
    assert tree_bytes(tmp_path / "bank") == whole


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "workers"), ENGINES)
def test_an_error_of_ours_arrives_as_itself(tmp_path: Path, engine: str, workers: int) -> None:
    with pytest.raises(BadVector, match="shard 3: a vector is all zero"):
        build(tmp_path / "bank", Numbers(tmp_path / "notes", refuse), engine, workers)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "workers"), CREWS)
def test_any_other_error_arrives_with_its_traceback(tmp_path: Path, engine: str, workers: int) -> None:
    with pytest.raises(WorkerFailed, match=r"(?s)worker.*in stumble.*a mistake of the worker's own"):
        build(tmp_path / "bank", Numbers(tmp_path / "notes", stumble), engine, workers)


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path, whole: dict[str, str]) -> None:
    worker = Numbers(tmp_path / "notes", sleep, at=1)
    outcome = kill_after(6, build, tmp_path / "bank", worker, "local", 2)
    assert outcome.killed
    pids = [int(path.name.removeprefix("pid-")) for path in (tmp_path / "notes").glob("pid-*")]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    build(tmp_path / "bank", Numbers(tmp_path / "notes"))
    assert tree_bytes(tmp_path / "bank") == whole


@pytest.mark.slow
def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    for engine, workers, words in [("slurm", 1, "engine is 'slurm'"), ("local", 0, "workers is 0")]:
        with pytest.raises(InputError, match=words):
            build(tmp_path / "bank", Numbers(tmp_path / "notes"), engine, workers)


RUN_BESIDE_A_CLUSTER = """
import sys
from pathlib import Path
from tests.test_engine import Numbers, build
assert build(Path(sys.argv[1]) / "bank", Numbers(Path(sys.argv[1]) / "notes"), "ray", 2) == 50
"""


@pytest.mark.slow
@RAY
def test_a_cluster_that_already_runs_on_the_machine_is_not_joined(tmp_path: Path, whole: dict[str, str]) -> None:
    # where Ray looks for clusters; short, because a socket's path has at most 107 characters
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": place}
    start = ["start", "--head", "--block", "--port=0", "--num-cpus=1", "--include-dashboard=false"]
    head = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *start]
    with subprocess.Popen(head, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as cluster:
        try:
            assert cluster.stdout is not None
            assert any("Ray runtime started" in line for line in cluster.stdout)
            done = subprocess.run(
                [sys.executable, "-c", RUN_BESIDE_A_CLUSTER, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            assert cluster.poll() is None
        finally:
            os.killpg(cluster.pid, signal.SIGKILL)
    assert tree_bytes(tmp_path / "bank") == whole
    shutil.rmtree(place, ignore_errors=True)
