"""A crew of local processes, each with a pipe to this one. A closed pipe is a death, on either side."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import pyarrow as pa

from arrowbank.bank.checks import reason
from arrowbank.bank.refusals import explained
from arrowbank.engine.crew import Advanced, Died, Event, Failed, Finished, Job, WorkerFailed
from arrowbank.engine.here import make_and_write
from arrowbank.errors import ArrowbankError, InputError, WorkerDied
from arrowbank.plan import Shard
from arrowbank.spawned import NO_MAIN_GUARD, REMEDY, leave_while_importing_main, main_script

SECONDS_TO_LEAVE = 5


class ProcessCrew:
    """Workers in processes that start fresh (spawn: a fork would inherit threads and GPU state)."""

    def __init__(self, job: Job) -> None:
        self._job = job
        leave_while_importing_main()
        self._context = multiprocessing.get_context("spawn")
        self._members: dict[int, _Member] = {}
        self._hired = itertools.count()
        self._began: set[int] = set()  # those that have reported something

    def __enter__(self) -> ProcessCrew:
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self._members.values():
            member.pipe.close()  # a worker without its pipe ends
        for member in self._members.values():
            member.process.join(SECONDS_TO_LEAVE)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()

    def hire(self) -> int:
        # a successor takes the number of the one that died, and with it its GPU
        taken = {member.number for member in self._members.values()}
        number = next(number for number in itertools.count() if number not in taken)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._job, number), daemon=True)
        process.start()
        theirs.close()
        name = next(self._hired)
        self._members[name] = _Member(process, ours, number)
        return name

    def give(self, member: int, shard: Shard) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died: wait() says so
            self._members[member].pipe.send(shard)

    def wait(self) -> Iterator[tuple[int, Event]]:
        names = {id(member.pipe): name for name, member in self._members.items()}
        for pipe in wait([member.pipe for member in self._members.values()]):
            name = names[id(pipe)]
            try:
                event = self._members[name].pipe.recv()
                self._began.add(name)
                yield name, event
            except (EOFError, ConnectionResetError):
                yield name, self._bury(name)

    def _bury(self, name: int) -> Died | Failed:
        member = self._members.pop(name)
        member.pipe.close()
        member.process.join()
        code = member.process.exitcode or 0
        if code == NO_MAIN_GUARD:
            return Failed(InputError(f"{main_script()}: has no main guard. {REMEDY}"))
        if code == 1 and name not in self._began:  # an exception before it could report one: the main script's own
            return Failed(
                WorkerDied(f"{main_script()}: a worker process failed while it imported this script, as said above. {REMEDY}")
            )
        return Died(f"killed by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}")


@dataclass(frozen=True)
class _Member:
    process: SpawnProcess
    pipe: Connection
    number: int


def _serve(pipe: Connection, job: Job, number: int) -> None:
    """A worker's life: shards come through the pipe, events go back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer: it closes the pipe
    inbox: queue.SimpleQueue[Shard] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, inbox), daemon=True).start()
    sending = threading.Lock()

    def send(event: Event) -> None:
        with sending:
            try:
                pipe.send(event)
            except BrokenPipeError:
                os._exit(1)  # the parent has ended the run: nobody listens any longer

    def write(index: int, batch: pa.RecordBatch) -> None:
        try:
            with explained(job.shards.folder):
                send(Finished(job.shards.write_shard(index, batch)))
        except ArrowbankError as error:
            send(Failed(error))

    try:
        with explained(job.shards.folder):
            worker = job.make_worker(number)
            make_and_write(iter(inbox.get, None), worker, write, lambda shard, units: send(Advanced(shard, units)))
    except ArrowbankError as error:
        send(Failed(error))
    except Exception as error:  # noqa: BLE001  # handed to the parent, which raises it
        send(Failed(WorkerFailed(f"worker {number}: {reason(error)}\n{traceback.format_exc()}")))
        raise SystemExit(1) from None  # the parent says what happened, once


def _receive(pipe: Connection, inbox: queue.SimpleQueue[Shard]) -> None:
    while True:
        try:
            inbox.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone, perhaps killed: nobody waits for what is being made
