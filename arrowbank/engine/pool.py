"""Shards handed out to several workers, whatever kind of process they are.

A crew says what its members report; this module decides who gets which shard, and what a death costs."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

import pyarrow as pa

from arrowbank.bank import BankWriter, Receipt, ShardWriter
from arrowbank.bank.checks import reason
from arrowbank.bank.processes import NO_MAIN_GUARD, REMEDY, leave_while_importing_main, main_script
from arrowbank.bank.refusals import explained
from arrowbank.engine.plan import Shard
from arrowbank.errors import ArrowbankError, InputError, WorkerDied
from arrowbank.progress import Progress

Report = Callable[[int], None]
Worker = Callable[[Shard, Report], pa.RecordBatch]
MakeWorker = Callable[[int], Worker]

DEATHS_A_SHARD = 3


@dataclass(frozen=True)
class Job:
    """What every worker needs: how to become one (picklable), and where its shards go."""

    make_worker: MakeWorker
    shards: ShardWriter


@dataclass(frozen=True)
class Advanced:
    """Work on a shard that is done, in the worker's own unit."""

    shard: int
    units: int


@dataclass(frozen=True)
class Finished:
    """A shard is on disk."""

    receipt: Receipt


@dataclass(frozen=True)
class Failed:
    """A worker raised; the run ends with this error."""

    error: Exception


@dataclass(frozen=True)
class Died:
    """A worker's process is gone; `how` says what is known."""

    how: str


class WorkerFailed(RuntimeError):
    """An exception of a worker that is none of arrowbank's: a bug. The first line is its text, the rest the worker's traceback."""


Event = Advanced | Finished | Failed | Died


class Crew(Protocol):
    """Workers in processes of their own."""

    def hire(self) -> int:
        """Start a worker; its number."""

    def give(self, member: int, shard: Shard) -> None:
        """Hand a shard to a worker; it takes them in order."""

    def wait(self) -> Iterable[tuple[int, Event]]:
        """Wait until something happened; who and what."""


class _Shift:
    """One run of a crew: the shards still to give, those in each member's hands, and how often each has cost a worker."""

    def __init__(self, crew: Crew, shards: Sequence[Shard], report: Report, progress: Progress) -> None:
        self.crew, self.report, self.progress = crew, report, progress
        self.todo = deque(shards)
        self.hands: dict[int, deque[Shard]] = {}
        self.reported: Counter[int] = Counter()  # by shard: what is taken back if its worker dies
        self.deaths: Counter[int] = Counter()

    def hire(self) -> None:
        member = self.crew.hire()
        self.hands[member] = deque()
        self.supply(member)

    def supply(self, member: int) -> None:
        """Keep a member at work; a second shard in hand lets it write one while it makes the next, but not near the end, where
        it would wait there while another member is idle."""
        hand = self.hands[member]
        while self.todo and (not hand or (len(hand) == 1 and len(self.todo) > len(self.hands))):
            shard = self.todo.popleft()
            hand.append(shard)
            self.crew.give(member, shard)

    def finish(self, member: int, receipt: Receipt) -> None:
        hand = self.hands[member]
        shard = next(shard for shard in hand if shard.index == receipt.shard)
        hand.remove(shard)
        self.reported.pop(shard.index, None)
        self.supply(member)

    def bury(self, member: int, how: str) -> None:
        hand = self.hands.pop(member)
        self.report(-sum(self.reported.pop(shard.index, 0) for shard in hand))
        if not hand:
            return
        shard = hand[0]
        self.deaths[shard.index] += 1
        where = f"shard {shard.index} (rows {shard.start} to {shard.stop - 1})"
        if self.deaths[shard.index] >= DEATHS_A_SHARD:
            raise WorkerDied(
                f"{where}: {DEATHS_A_SHARD} workers died over it, the last one {how}. Finished shards are kept. If memory "
                "ran out, give fewer workers or smaller batches; then run the same command again."
            )
        self.progress.message(f"a worker died over {where}, {how}: another one takes over")
        self.todo.extendleft(reversed(hand))
        self.hire()


def run_crew(crew: Crew, shards: Sequence[Shard], bank: BankWriter, workers: int, report: Report, progress: Progress) -> None:
    """Have `workers` members make `shards`, and enter the receipts in `bank`."""
    shift = _Shift(crew, shards, report, progress)
    for _ in range(min(workers, len(shards))):
        shift.hire()
    while any(shift.hands.values()):
        for member, event in crew.wait():
            match event:
                case Advanced(shard, units):
                    shift.reported[shard] += units
                    report(units)
                case Finished(receipt):
                    bank.accept(receipt)
                    shift.finish(member, receipt)
                case Failed(error):
                    raise error
                case Died(how):
                    shift.bury(member, how)


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
