"""Shards handed out to several workers, whatever kind of process they are.

A crew says what its members report; this module decides who gets which shard, and what a death costs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from arrowbank.bank import BankWriter, Receipt, ShardWriter
from arrowbank.errors import WorkerDied
from arrowbank.plan import Shard
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
