"""The stage `trunk build`: data sets go in, what a model computes and would say next at each of their tokens comes out.

Windows are packed anew in every run, since their ids are part of the key; forward passes are what is expensive, and a finished
shard of them is kept. A shard is a contiguous range of windows. Windows of one length run together; the short last window of
a set is run at its exact length: no padding enters the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arrowbank import engine
from arrowbank.bank import BankWriter
from arrowbank.bank.files import free_bytes, human_bytes, publishing, require_space
from arrowbank.bank.kinds.trunk import KIND
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explains
from arrowbank.engine.plan import Shard
from arrowbank.errors import DiskFull
from arrowbank.inputs.sources import source_places
from arrowbank.models import local_model
from arrowbank.mtp.taps import build_taps, taps_bytes, taps_folder
from arrowbank.mtp.trunk_plan import FILES_OVERHEAD, SHARD_OVERHEAD, TrunkConfig, TrunkPlan
from arrowbank.mtp.trunk_shard import TrunkJob, WindowRows
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Count, checked


@explains("out")
@checked
def build_trunk(
    config: TrunkConfig,
    out: str | Path,
    *,
    restart: bool = False,
    workers: Count | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Compute the trunk bank `out` of `config.model` for `config.data`, and the bank of its taps, if any; the former's manifest.

    Goes on where an earlier run stopped; a bank of the same weights, window, k and token ids is read back. `workers` processes
    (default: one a GPU, or one) write the same bytes as one.

    Raises InputError (model, data, too few windows), BadVector (NaN or Inf), PlanMismatch, BankLocked, DiskFull, WorkerDied.
    """
    outputs: list[Named] = [("--out", out), *([("--out", taps_folder(out))] if config.layers else [])]
    models = [("--model", local_model(config.model.model)), ("--tokenizer", local_model(config.tokenizer))]
    require_separate(
        outputs, [*(place for one in config.data for place in source_places(f"--source {one.name}=", one.path)), *models]
    )
    plan = TrunkPlan(config)
    require_budget(estimate_trunk(config, out, plan=plan))
    plan.tell_unread(progress)
    processes = plan.info.devices if workers is None else workers
    with BankWriter(out, kind=KIND, recipe=plan.recipe, restart=restart, manifest=plan.manifest) as bank:
        if bank.committed:
            progress.message(f"{bank.folder}: already complete, nothing to do")
        else:
            _make_shards(plan, bank, processes, progress)
            bank.commit(rows=len(plan.windows))
        manifest = bank.manifest
    if config.layers:
        build_taps(plan, Path(out), restart=restart, workers=processes, progress=progress)
    return manifest


def _make_shards(plan: TrunkPlan, bank: BankWriter, workers: int, progress: Progress) -> None:
    todo = [shard for shard in plan.shards if shard.index not in bank.done_shards]
    if len(todo) < len(plan.shards):
        done = len(plan.shards) - len(todo)
        progress.message(f"{bank.folder}: {done} of {len(plan.shards)} shards are there, going on with the rest")
    if not todo:
        return
    for note in plan.info.notes:
        progress.message(note)
    lengths = plan.windows.lengths
    sizes = [_shard_bytes(plan, shard) for shard in todo]
    require_space(bank.folder, sum(sizes), "the trunk bank")
    processes = min(workers, len(todo))
    job = worker_job(plan, bank.work_dir, processes)
    tokens = sum(int(lengths[shard.start : shard.stop].sum()) for shard in todo)
    with progress.phase("trunk", tokens, unit="tokens", texts=sum(shard.rows for shard in todo)) as phase:
        engine.run(todo, job, bank, workers=processes, report=phase.advance, progress=progress)


def _shard_bytes(plan: TrunkPlan, shard: Shard) -> int:
    return sum(plan.row_bytes(int(length)) for length in plan.windows.lengths[shard.start : shard.stop]) + SHARD_OVERHEAD


def worker_job(plan: TrunkPlan, folder: Path, processes: int = 1) -> TrunkJob:
    """What each of so many workers needs; the windows' ids go into a file in `folder` that they map."""
    folder.mkdir(exist_ok=True)
    path, windows = folder / "windows.npy", plan.windows
    with publishing(path, hash=None) as file:
        np.save(file, windows.padded(plan.pad_id))
    return TrunkJob(
        model=plan.config.trunk_model,
        info=plan.info,
        topk=plan.config.topk,
        hidden_norm=plan.config.last_hidden_norm,
        hidden_dtype=plan.hidden_dtype,
        rules=plan.config.rules,
        rows=WindowRows(
            ids=path, lengths=windows.lengths, sets=windows.names, numbers=windows.numbers, held_out=windows.held_out
        ),
        processes=processes,
    )


# sizes


@dataclass(frozen=True)
class TrunkEstimate:
    """What a trunk bank and its taps will take, in bytes. `free_bytes` is what the disk has."""

    windows: int
    held_out: int
    tokens: int
    bytes_a_token: int
    bytes: int
    taps_bytes: int
    free_bytes: int
    budget_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        return self.bytes + self.taps_bytes

    @property
    def fits(self) -> bool:
        """Whether the disk has room for both, and the budget."""
        return self.total_bytes <= self.free_bytes and (self.budget_bytes is None or self.total_bytes <= self.budget_bytes)


@checked
def estimate_trunk(config: TrunkConfig, out: str | Path, *, plan: TrunkPlan | None = None) -> TrunkEstimate:
    """What `build_trunk` with the same arguments will take: the windows are packed, nothing is written, no weight is loaded.

    Raises what `build_trunk` raises for a model or data that cannot be used.
    """
    plan = plan or TrunkPlan(config)
    windows, width = plan.windows, plan.info.hidden_size
    tapped = windows.lengths[windows.held_out].tolist() if config.layers else []
    return TrunkEstimate(
        windows=len(windows),
        held_out=int(windows.held_out.sum()),
        tokens=int(windows.lengths.sum()),
        bytes_a_token=plan.row_bytes(config.window) // config.window,
        bytes=sum(_shard_bytes(plan, shard) for shard in plan.shards) + FILES_OVERHEAD,
        taps_bytes=taps_bytes(tapped, len(config.layers), width, config.window),
        free_bytes=free_bytes(Path(out)),
        budget_bytes=config.budget_bytes,
    )


def require_budget(found: TrunkEstimate) -> None:
    """DiskFull when the banks would be past a budget that the user has set."""
    if found.budget_bytes is not None and found.total_bytes > found.budget_bytes:
        raise DiskFull(
            f"the trunk bank and its taps take {human_bytes(found.total_bytes)}, the budget is {human_bytes(found.budget_bytes)}. "
            "Give fewer --tokens, a smaller --topk, fewer --layers, or a larger --budget-gb."
        )
