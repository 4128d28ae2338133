"""A crew of Ray actors: a local Ray unless an address is given, as an option or in RAY_ADDRESS.

The folder of the bank must be one that every node sees.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

from arrowbank.bank import Receipt
from arrowbank.bank.checks import reason
from arrowbank.bank.refusals import explained
from arrowbank.engine.plan import Shard
from arrowbank.engine.pool import Advanced, Died, Event, Failed, Finished, Job, Worker, WorkerFailed
from arrowbank.errors import ArrowbankError, MissingDependency

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
except ImportError as error:
    raise MissingDependency(
        "--engine ray needs Ray, which is not installed. Install it with: pip install 'arrowbank[ray]'"
    ) from error


class RayCrew:
    """Workers as actors. Ray itself is started and stopped here, unless the program already runs one."""

    def __init__(self, job: Job, *, address: str | None, workers: int, gpus: float) -> None:
        self._job, self._address, self._workers, self._gpus = job, address, workers, gpus
        self._actors: dict[int, Any] = {}
        self._given: dict[Any, tuple[int, Shard]] = {}
        self._names = itertools.count()
        self._started_here = False

    def __enter__(self) -> RayCrew:
        if not ray.is_initialized():
            # without an address Ray would join any cluster that it finds on this machine
            address = self._address or os.environ.get("RAY_ADDRESS") or "local"
            local = {"num_cpus": self._workers, "include_dashboard": False} if address == "local" else {}
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
            self._started_here = True
        return self

    def __exit__(self, *exc: object) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        if self._started_here:
            ray.shutdown()

    def hire(self) -> int:
        name = next(self._names)
        # two calls at a time: one makes a shard while the other writes
        self._actors[name] = _Actor.options(num_cpus=1, num_gpus=self._gpus, max_concurrency=2).remote(self._job)
        return name

    def give(self, member: int, shard: Shard) -> None:
        self._given[self._actors[member].make.remote(shard)] = (member, shard)

    def wait(self) -> Iterator[tuple[int, Event]]:
        for ref in ray.wait(list(self._given), num_returns=1)[0]:
            member, shard = self._given.pop(ref)
            try:
                receipt, units = ray.get(ref)
            except RayTaskError as error:
                yield member, Failed(_cause(error))
            except RayActorError as error:
                self._forget(member)
                yield member, Died(f"as Ray says: {str(error).strip().splitlines()[0]}")
            else:
                yield member, Advanced(shard.index, units)
                yield member, Finished(receipt)

    def _forget(self, member: int) -> None:
        del self._actors[member]
        self._given = {ref: given for ref, given in self._given.items() if given[0] != member}


def _cause(error: RayTaskError) -> Exception:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, ArrowbankError) else WorkerFailed(f"a worker: {reason(cause or error)}\n{error}")


class _Maker:
    """Built with the job alone: an error in building the worker then comes back with the shard, as itself."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._worker: Worker | None = None
        self._making = threading.Lock()

    def make(self, shard: Shard) -> tuple[Receipt, int]:
        units: list[int] = []
        with explained(self._job.shards.folder):
            with self._making:
                self._worker = self._worker or self._job.make_worker(0)  # Ray shows an actor its own GPU only
                batch = self._worker(shard, units.append)
            return self._job.shards.write_shard(shard.index, batch), sum(units)


_Actor: Any = ray.remote(max_restarts=0, max_task_retries=0)(_Maker)
