"""The layers of held-out windows as a bank of its own, beside the trunk bank: what each tapped block puts out, before any norm,
with the trunk's own next token a row. It is made from the committed trunk bank, and knows which one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from arrowbank import engine
from arrowbank.bank import BankWriter
from arrowbank.bank.columns import fixed_list_column, number_column
from arrowbank.bank.files import require_space
from arrowbank.bank.kinds.trunk import TAPS_KIND, TrunkBank, lists_of, row_offsets
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.opening import open_bank
from arrowbank.bank.places import beside
from arrowbank.engine.plan import BatchRules, Shard, batches
from arrowbank.errors import BadVector, PlanMismatch
from arrowbank.mtp.trunk_plan import FILES_OVERHEAD, METHOD, SHARD_OVERHEAD, TrunkPlan, batch_recipe, cut_shards, model_recipe
from arrowbank.mtp.trunk_shard import share_cores
from arrowbank.progress import Progress

if TYPE_CHECKING:
    from arrowbank.models import ModelConfig, ModelInfo
    from arrowbank.models.passes import Passes


Report = Callable[[int], None]


def taps_folder(out: str | Path) -> Path:
    """Where the taps of the trunk bank `out` lie: beside it."""
    return beside(out, "-taps")


def taps_bytes(lengths: Sequence[int], layers: int, hidden_size: int, window: int) -> int:
    """Bytes of the taps of windows of these real tokens; none for no windows."""
    rows = sum(_row_bytes(length, layers, hidden_size, window) for length in lengths)
    return rows + SHARD_OVERHEAD + FILES_OVERHEAD if rows else 0


def _row_bytes(length: int, layers: int, hidden_size: int, window: int) -> int:
    return 4 * window + length * (4 + 2 * layers * hidden_size) + 40


def build_taps(plan: TrunkPlan, out: Path, *, restart: bool, workers: int, progress: Progress) -> Manifest:
    """The taps of the committed trunk bank `out`; the manifest of their bank. Goes on where an earlier run stopped."""
    trunk, config, info = open_bank(out, kind=TrunkBank), plan.config, plan.info
    rows, layers = trunk.held_out_rows, config.layers
    lengths = trunk.lengths[rows].tolist()

    def row_bytes(length: int) -> int:
        return _row_bytes(length, len(layers), info.hidden_size, config.window)

    recipe = {
        "method": METHOD,
        "trunk": trunk.content_digest,
        "model": model_recipe(info),
        "layers": list(layers),
        "batches": batch_recipe(config.rules),
        "shard_bytes": plan.shard_bytes,
    }
    fields = {
        "text_count": len(rows),
        "layers": list(layers),
        "layer_id_convention": "block_output",
        "hidden_size": info.hidden_size,
        "window": config.window,
        "model_path": info.model,
        "model_fingerprint": info.fingerprint,
        "trunk": {"name": out.name, "plan_digest": trunk.plan_digest},
        "counts": {"windows": len(rows), "tokens": sum(lengths)},
    }
    with _alone(out), BankWriter(taps_folder(out), kind=TAPS_KIND, recipe=recipe, restart=restart, manifest=fields) as bank:
        if bank.committed:
            return bank.manifest
        shards = cut_shards(lengths, row_bytes, plan.shard_bytes, info.hidden_size)
        todo = [shard for shard in shards if shard.index not in bank.done_shards]
        require_space(
            bank.folder, sum(row_bytes(length) for shard in todo for length in lengths[shard.start : shard.stop]), "taps"
        )
        processes = max(1, min(workers, len(todo)))
        job = TapsJob(
            model=config.model,
            info=replace(info, backbone="inner"),
            layers=layers,
            rules=config.rules,
            trunk=trunk,
            processes=processes,
        )
        tokens = sum(sum(lengths[shard.start : shard.stop]) for shard in todo)
        with progress.phase("taps", tokens, unit="tokens", texts=sum(shard.rows for shard in todo)) as phase:
            engine.run(todo, job, bank, workers=processes, report=phase.advance, progress=progress)
        return bank.commit(rows=len(rows))


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """A PlanMismatch of the taps says how the trunk bank is kept: --restart would make that anew too."""
    try:
        yield
    except PlanMismatch as error:
        raise PlanMismatch(
            f"{error}\nThe trunk bank {out} is complete and fits: remove {taps_folder(out)} to have these taps beside it.",
            error.fields,
        ) from None


@dataclass(frozen=True, kw_only=True)
class TapsJob:
    """How a process becomes a worker. Everything here pickles."""

    model: ModelConfig
    info: ModelInfo
    layers: tuple[int, ...]
    rules: BatchRules
    trunk: TrunkBank
    processes: int = 1

    def __call__(self, number: int) -> ShardTapper:
        from arrowbank.mtp.trunk_passes import load_layers

        share_cores(self.processes)
        return ShardTapper(self, self.trunk, load_layers(self.model, self.layers, worker=number, info=self.info))


class ShardTapper:
    """A worker that holds the model and the trunk bank."""

    def __init__(self, job: TapsJob, trunk: TrunkBank, passes: Passes) -> None:
        self.job, self.trunk, self.passes = job, trunk, passes

    def __call__(self, shard: Shard, report: Report) -> pa.RecordBatch:
        """The columns of a bank of taps for some of the held-out windows, all in memory. Reports tokens.

        Raises BadVector for a value that float16 cannot hold.
        """
        held_out = self.trunk.held_out_rows[shard.start : shard.stop]
        windows = [self.trunk.read(int(row)) for row in held_out]
        lengths = self.trunk.lengths[held_out]
        offsets = row_offsets(lengths)
        shape = (len(self.job.layers), int(offsets[-1]), self.job.info.hidden_size)
        taps = np.empty(shape, np.float16)
        plan = list(batches(lengths, self.job.rules))
        streamed = self.passes.stream(np.stack([windows[row].input_ids[: one.length] for row in one.rows]) for one in plan)
        for batch, states in zip(plan, streamed, strict=True):
            for row, hidden in zip(batch.rows, states, strict=True):
                self._refuse_bad(hidden, f"window {windows[row].window} of {windows[row].set}")
                taps[:, offsets[row] : offsets[row + 1]] = hidden.numpy().swapaxes(0, 1)
            report(len(batch.rows) * batch.length)
        columns: dict[str, Any] = {
            "row": number_column(held_out.astype(np.int32)),
            "input_ids": fixed_list_column(np.stack([window.input_ids for window in windows])),
            "length": number_column(lengths),
            "next_ids": lists_of(offsets, number_column(np.concatenate([window.topk_ids[:, 0] for window in windows]))),
        }
        for layer, values in zip(self.job.layers, taps, strict=True):
            columns[f"layer_{layer}"] = lists_of(offsets, fixed_list_column(values))
        return pa.record_batch(columns)

    def _refuse_bad(self, hidden: torch.Tensor, name: str) -> None:
        """BadVector where a layer's values [S, L, H] are not finite in float16."""
        if torch.isfinite(hidden).all():
            return
        counts = (~torch.isfinite(hidden)).sum(dim=(0, 2)).tolist()
        listed = ", ".join(f"{count} in layer {layer}" for layer, count in zip(self.job.layers, counts, strict=True) if count)
        raise BadVector(
            f"{name}: model {self.job.info.model!r} gave values that float16 cannot hold ({listed}). Nothing of this shard was "
            "kept; the trunk bank is. Leave those layers out of --layers."
        )
