"""The one skeleton of every stage that makes a bank shard by shard.

    plan (shards, recipe, digest, sizes)  →  Stage.run(options)  →  worker(shard) → RecordBatch  →  BankWriter  →  commit

A stage supplies the plan, a factory of workers, and what follows the last shard. Everything else exists here, once: the check that
no output is an input, the budget, the disk space, resuming, the parts of a job array, engines, the threads of each worker, progress
and messages. So every stage takes the same `RunOptions`, and each option means the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from arrowbank import engine
from arrowbank.bank import BankWriter, open_bank
from arrowbank.bank.files import free_bytes, human_bytes, require_space
from arrowbank.bank.manifest import Manifest, ranges
from arrowbank.bank.places import Named, require_separate
from arrowbank.engine.plan import Shard
from arrowbank.engine.pool import MakeWorker, Report, Worker
from arrowbank.errors import DiskFull, InputError
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import EXECUTION, Count, Help, Old, Positive, Settings, refuse_unread


@dataclass(frozen=True, kw_only=True)
class RunOptions(Settings):
    """How a bank is made and which part of it, never what it contains. Every stage takes these."""

    engine: Annotated[Literal["local", "ray"], Help("Where workers run: on this machine, or on Ray."), EXECUTION] = "local"
    ray_address: Annotated[str, Help("Address of a Ray cluster. Default: a local Ray."), EXECUTION] | None = None
    workers: (
        Annotated[
            Count,
            Help("Number of worker processes. Default: automatic."),
            Old("--num-proc"),
            EXECUTION,
        ]
        | None
    ) = None
    worker: Annotated[tuple[int, int], Help("This job's part in a job array.", "I/N", example="0/4"), EXECUTION] | None = None
    shards: Annotated[tuple[int, ...], Help("Only these shards: 3,7-9.", example="3,7-9"), EXECUTION] | None = None
    rows: (
        Annotated[tuple[int, int], Help("Only the shards that hold these rows.", "A:B", example="0:131072"), EXECUTION] | None
    ) = None
    budget_gb: Annotated[Positive, Help("Refuse to start if the bank takes more (10^9 bytes).", "X"), EXECUTION] | None = None
    restart: Annotated[bool, Help("Throw away what the folder holds and begin again."), EXECUTION] = False

    def check(self) -> None:
        if self.engine == "local":
            refuse_unread("--engine local", self, ["ray_address"])
        if self.worker is not None and not 0 <= self.worker[0] < self.worker[1]:
            raise InputError(f"worker is {self.worker[0]}/{self.worker[1]}: workers of n are numbered 0 to n − 1.")
        if self.worker is not None and self.restart:
            raise InputError("restart cannot be combined with worker i/n: other workers' shards would go. Restart without it.")

    @property
    def budget_bytes(self) -> int | None:
        return None if self.budget_gb is None else round(self.budget_gb * 1e9)

    def chosen(self, shards: Sequence[Shard], hint: str = "") -> list[Shard]:
        """Those of a plan's `shards` that this run is to make. InputError, with a `hint`, for a part that the plan does not have."""
        rows, chosen = shards[-1].stop, list(shards)
        if self.shards is not None:
            if unknown := sorted(set(self.shards) - set(range(len(shards)))):
                raise InputError(
                    f"--shards: there is no shard {unknown[0]}; this plan has shards 0 to {len(shards) - 1}. {hint}".rstrip()
                )
            chosen = [shard for shard in chosen if shard.index in self.shards]
        if self.rows is not None:
            start, stop = self.rows
            if not 0 <= start < stop <= rows:
                raise InputError(f"--rows {start}:{stop}: must lie within 0:{rows}, start before end.")
            chosen = [shard for shard in chosen if shard.start < stop and start < shard.stop]
        if self.worker is not None:
            number, count = self.worker
            chosen = [shard for shard in chosen if shard.index % count == number]
        return chosen


PARTED = ("engine", "ray_address", "worker", "shards", "rows")  # what a stage refuses that one process makes whole


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the chosen shards of a bank take, before any is made. Nothing that is finished is subtracted.

    rows, tokens      of the chosen shards; no tokens where only texts are known
    shards            how many these are
    shard_bytes       what they take on disk
    beside            bytes of everything else that the stage writes, by name, such as the mirror
    free_bytes        what the disk has
    budget_bytes      what the user allows
    seconds           for one worker, where some batches were timed
    counts            what else the plan counts, by name, such as forward passes
    """

    rows: int
    tokens: int | None = None
    shards: int
    shard_bytes: int
    beside: Mapping[str, int] = field(default_factory=dict)
    free_bytes: int
    budget_bytes: int | None = None
    seconds: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.shard_bytes + sum(self.beside.values())

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it, and the budget."""
        return self.total_bytes <= self.free_bytes and (self.budget_bytes is None or self.total_bytes <= self.budget_bytes)


class LoadedModel(Protocol):
    """What a stage's workers load, as far as the skeleton needs to know."""

    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def devices(self) -> int: ...
    @property
    def device(self) -> str: ...


class Stage(ABC):
    """One way to make a bank. Properties and methods without a body here are the plan; the others have defaults.

    `kind` is the bank's, `phase` the name under which progress is reported, in `unit`. `what` and `remedy` are the stage's words in
    errors about sizes. `splits_threads`: workers compute with torch, and share this machine's cores. `shards_hint`: what --shards may be
    taken for.
    """

    kind: ClassVar[str]
    phase: ClassVar[str]
    unit: ClassVar[str] = "tokens"
    remedy: ClassVar[str] = "Give"
    splits_threads: ClassVar[bool] = True
    shards_hint: ClassVar[str] = ""
    writer: ClassVar[type[BankWriter]] = BankWriter
    adopted: int = 0  # the first shards, which are taken over from another bank

    # the plan

    @property
    def what(self) -> str:
        return "the bank"

    @property
    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """All shards of the bank, in order. Known once `measure` or `prepare` has run."""

    @property
    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """Everything that decides the bytes; hashed into the plan digest."""

    @property
    @abstractmethod
    def manifest(self) -> dict[str, Any]:
        """The fields of the manifest that are known before the work."""

    @property
    @abstractmethod
    def inputs(self) -> Sequence[Named]:
        """What the stage reads, by the options that name it."""

    @abstractmethod
    def shard_bytes(self, shard: Shard) -> int:
        """What a shard takes on disk."""

    @abstractmethod
    def tokens(self, shard: Shard) -> int:
        """The tokens of a shard."""

    @property
    def beside(self) -> dict[str, int]:
        """Bytes of what the stage writes beside the shards, by name."""
        return {}

    @property
    def counts(self) -> dict[str, int]:
        """What an estimate says beside sizes, by name."""
        return {}

    @property
    def model(self) -> LoadedModel | None:
        """The model that every worker loads, if any."""
        return None

    @property
    def gpus(self) -> int:
        """How many GPUs a worker needs."""
        return 1 if self.model and self.model.device.startswith("cuda") else 0

    def default_workers(self, todo: Sequence[Shard]) -> int:
        """How many workers are used where the user does not say."""
        return self.model.devices if self.model else 1

    def outputs(self, out: str | Path) -> list[Named]:
        """What is written."""
        return [("--out", out)]

    def measure(self, progress: Progress) -> None:  # noqa: B027 - most stages know
        """Find out the shards without writing anything, where that takes work."""

    def seconds(self, progress: Progress) -> float | None:
        """The time that all shards take one worker, from a few real batches; None where that is not measured."""
        return None

    def check(self) -> None:  # noqa: B027 - most stages have nothing to refuse
        """Refuse what the inputs do not allow, before anything is written."""

    # the work

    def prepare(self, bank: BankWriter, options: RunOptions, progress: Progress) -> None:  # noqa: B027 - optional, too
        """Do what precedes the first shard in every run. `bank` is locked and not committed."""

    def so_far(self, bank: BankWriter) -> dict[str, Any]:
        """Fields of the manifest of a bank that is not finished."""
        return {}

    def is_done(self, bank: BankWriter, shard: Shard) -> bool:
        """Whether a shard is finished."""
        return shard.index in bank.done_shards

    @abstractmethod
    def workers(self, bank: BankWriter) -> MakeWorker:
        """The factory of workers; it must pickle. Called where at least one shard is to be made."""

    def around(self, bank: BankWriter, *, last: bool, progress: Progress) -> AbstractContextManager[None]:
        """What goes on while shards are made. `last`: this run makes all that are missing."""
        return nullcontext()

    def make_here(self, todo: Sequence[Shard], bank: BankWriter, options: RunOptions, report: Report) -> bool:
        """Make the shards on this machine in a way of the stage's own; False where it has none."""
        return False

    @abstractmethod
    def finish(self, bank: BankWriter, progress: Progress) -> Manifest:
        """Write what follows the last shard, and commit; the manifest."""

    # the skeleton

    def run(self, out: str | Path, options: RunOptions | None = None, progress: Progress = SILENT) -> Manifest:
        """Make what is missing of the bank `out`; its manifest, complete or not. The run that makes the last shard commits."""
        options = options or RunOptions()
        require_separate(self.outputs(out), self.inputs)
        self.check()
        if options.budget_bytes is not None or options.shards is not None or options.rows is not None:
            self.measure(progress)  # whatever is refused is refused before anything is written
            options.chosen(self.shards, self.shards_hint)
            needed = sum(map(self.shard_bytes, self.shards)) + sum(self.beside.values())
            require_budget(out, needed, options.budget_bytes, self.what, self.remedy)
        with self.writer(
            out,
            kind=self.kind,
            recipe=self.recipe,
            manifest=self.manifest,
            restart=options.restart,
            worker=options.worker[0] if options.worker else None,
            redo=options.shards or (),
        ) as bank:
            if not bank.committed:
                return self._make(bank, options, progress)
            progress.message(f"{bank.folder}: already complete, nothing to do")
            return open_bank(bank.folder).manifest.json

    def estimate(
        self, out: str | Path, options: RunOptions | None = None, *, timed: bool = False, progress: Progress = SILENT
    ) -> Estimate:
        """What `run` with the same arguments makes. Nothing is written; with `timed`, the model is loaded and a few batches are run.

        Without `options` no run is planned: `out` is any place on the disk in question.
        """
        if options is not None:
            require_separate(self.outputs(out), self.inputs)
        options = options or RunOptions()
        self.check()
        self.measure(progress)
        chosen, tokens = (
            options.chosen(self.shards, self.shards_hint),
            {shard.index: self.tokens(shard) for shard in self.shards},
        )
        seconds, here = self.seconds(progress) if timed else None, sum(tokens[shard.index] for shard in chosen)
        return Estimate(
            rows=sum(shard.rows for shard in chosen),
            tokens=here,
            shards=len(chosen),
            shard_bytes=sum(map(self.shard_bytes, chosen)),
            beside=self.beside if len(chosen) == len(self.shards) else {},
            free_bytes=free_bytes(Path(out)),
            budget_bytes=options.budget_bytes,
            seconds=None if seconds is None else seconds * here / sum(tokens.values()),
            counts=self.counts,
        )

    def bytes_to_write(self, bank: BankWriter, todo: Sequence[Shard], *, last: bool) -> int:
        """What the shards `todo` take, and, where these are the last ones, what else `bank` lacks."""
        there = sum(receipt.bytes for receipt in bank.receipts.values() if receipt.shard is None)
        return sum(map(self.shard_bytes, todo)) + (max(0, sum(self.beside.values()) - there) if last else 0)

    def _make(self, bank: BankWriter, options: RunOptions, progress: Progress) -> Manifest:
        self.prepare(bank, options, progress)
        bank.save_progress(**self.so_far(bank))
        chosen = options.chosen(self.shards, self.shards_hint)
        missing = {shard.index for shard in self.shards if not self.is_done(bank, shard)}
        todo = [shard for shard in chosen if shard.index in missing]
        last = len(todo) == len(missing)
        require_space(bank.folder, self.bytes_to_write(bank, todo, last=last), self.what)
        if todo:
            if done := sum(shard.index not in missing and shard.index >= self.adopted for shard in chosen):
                progress.message(f"{bank.folder}: {done} of {len(chosen)} shards are finished; resuming with the rest")
            with self.around(bank, last=last, progress=progress):
                self._make_shards(todo, bank, options, progress)
        return self._finish(bank, options, progress)

    def _make_shards(self, todo: Sequence[Shard], bank: BankWriter, options: RunOptions, progress: Progress) -> None:
        for note in self.model.notes if self.model else ():
            progress.message(note)
        by_tokens = self.unit == "tokens"
        rows = sum(shard.rows for shard in todo)
        total = sum(map(self.tokens, todo)) if by_tokens else rows
        with progress.phase(self.phase, total, unit=self.unit, texts=rows if by_tokens else None) as phase:
            if options.engine == "local" and self.make_here(todo, bank, options, phase.advance):
                return
            workers = min(options.workers or self.default_workers(todo), len(todo))
            make_worker = self.workers(bank)
            if self.splits_threads and workers > 1 and options.engine == "local":
                make_worker = _SharedCores(make_worker, workers)
            engine.run(
                todo,
                make_worker,
                bank,
                engine=options.engine,
                workers=workers,
                ray_address=options.ray_address,
                gpus=self.gpus,
                report=phase.advance,
                progress=progress,
            )

    def _finish(self, bank: BankWriter, options: RunOptions, progress: Progress) -> Manifest:
        """Commit where every shard is there; else say what is missing."""
        if options.worker is None:
            return self._commit(bank, progress)
        with bank.finishing():  # of the workers that see the last receipt, one finishes
            return bank.manifest if bank.committed else self._commit(bank, progress)

    def _commit(self, bank: BankWriter, progress: Progress) -> Manifest:
        missing = [shard.index for shard in self.shards if not self.is_done(bank, shard)]
        if not missing and (why := self.never_committed(bank)) is None:
            return self.finish(bank, progress)
        bank.save_progress(**self.so_far(bank))
        progress.message(
            f"{bank.folder}: {bank.done_rows:,} of {self.shards[-1].stop:,} rows are there; shards {ranges(missing)} of "
            f"{len(self.shards)} are missing. The bank is committed by the run that makes the last one."
            if missing
            else f"{bank.folder}: {why}"
        )
        return bank.manifest

    def never_committed(self, bank: BankWriter) -> str | None:
        """Why a bank whose shards are all there is not committed; None where it is."""
        return None


@dataclass(frozen=True)
class _SharedCores:
    """A factory whose `workers` processes share this machine's cores. The bits of a result do not depend on the number of threads."""

    make_worker: MakeWorker
    workers: int

    def __call__(self, number: int) -> Worker:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // self.workers))
        return self.make_worker(number)


def require_budget(place: str | Path, needed: int, budget: int | None, what: str, remedy: str) -> None:
    """DiskFull where `needed` bytes are more than the budget that the user has set."""
    if budget is not None and needed > budget:
        raise DiskFull(
            f"{place}: {what} takes {human_bytes(needed)}, the budget is {human_bytes(budget)}. {remedy} a larger --budget-gb."
        )
