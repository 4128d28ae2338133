"""The engine of one process: while a shard is being made, the one before it is written by a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pyarrow as pa

from arrowbank.bank import BankWriter
from arrowbank.engine.crew import Job, Report, Worker
from arrowbank.plan import Shard


def run_here(shards: Iterable[Shard], job: Job, bank: BankWriter, report: Report) -> None:
    """Make and enter `shards` one after another."""
    make_and_write(shards, job.make_worker(0), bank.write_shard, lambda shard, units: report(units))


def make_and_write(
    shards: Iterable[Shard],
    worker: Worker,
    write: Callable[[int, pa.RecordBatch], object],
    report: Callable[[int, int], None],
) -> None:
    """Make shards in this thread and `write` each in another. Two are in memory at most. `report` gets shard and units done."""
    with ThreadPoolExecutor(1, thread_name_prefix="shard-writer") as writer:
        pending: Future[object] | None = None
        for shard in shards:
            batch = worker(shard, partial(report, shard.index))
            if pending:
                pending.result()
            pending = writer.submit(write, shard.index, batch)
        if pending:
            pending.result()
