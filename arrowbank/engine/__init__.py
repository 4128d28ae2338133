"""Engines: a shard goes in, a receipt comes out, never tensors. They know nothing of what a worker does with a shard.

    run(shards, make_worker, bank)                     in this process, writing one shard while the next one is made
    run(…, workers=4)                                  in local processes
    run(…, engine="ray", workers=4, ray_address=…)     on Ray, a local one unless an address is given

A worker that dies costs the shards that it had in hand: another takes them over, and a shard that kills its workers three
times ends the run with an error. The bytes on disk are the same on every engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from arrowbank.bank import BankWriter
from arrowbank.engine.plan import Shard
from arrowbank.engine.pool import Job, MakeWorker, Report, Worker, run_crew, run_here
from arrowbank.errors import InputError
from arrowbank.progress import SILENT, Progress

__all__ = ["ENGINES", "MakeWorker", "Report", "Worker", "run"]

ENGINES = ("local", "ray")


def run(
    shards: Sequence[Shard],
    make_worker: MakeWorker,
    bank: BankWriter,
    *,
    engine: str = "local",
    workers: int = 1,
    ray_address: str | None = None,
    gpus: float = 0,
    report: Report = lambda units: None,
    progress: Progress = SILENT,
) -> None:
    """Make `shards` with workers that `make_worker` builds (once each, in their own process) and enter them in `bank`.

    `report` is called with what a worker reports, in its own unit, as it is done. `gpus` is what Ray reserves for each worker.
    Raises WorkerDied when a shard ends its worker too often, and whatever a worker raises; what is finished is kept.
    """
    if workers < 1:
        raise InputError(f"workers is {workers}, it must be at least 1.")
    if not shards:
        return
    job = Job(make_worker, bank.shards)
    if engine == "ray":
        from arrowbank.engine.ray_pool import RayCrew

        with RayCrew(job, address=ray_address, workers=workers, gpus=gpus) as crew:
            run_crew(crew, shards, bank, workers, report, progress)
    elif engine != "local":
        raise InputError(f"engine is {engine!r}, it must be one of {', '.join(ENGINES)}.")
    elif workers == 1:
        run_here(shards, job, bank, report)
    else:
        from arrowbank.engine.pool import ProcessCrew

        with ProcessCrew(job) as crew:
            run_crew(crew, shards, bank, workers, report, progress)
