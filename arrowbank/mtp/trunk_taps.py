"""The layers of held-out windows as a bank of its own, beside the trunk bank: what each tapped block puts out, before any norm,
with the trunk's own next token a row. It is made from the committed trunk bank, and knows which one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from arrowbank.bank import BankWriter
from arrowbank.bank.columns import fixed_list_column, number_column
from arrowbank.bank.kinds.trunk_bank import TAPS_KIND, TrunkBank, lists_of, row_offsets
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.open import open_bank
from arrowbank.bank.places import Named, beside
from arrowbank.engine.plan import SHARD_BYTES, BatchRules, Shard, batches, cut_shards
from arrowbank.engine.stage import RunOptions, Stage
from arrowbank.errors import BadVector, PlanMismatch
from arrowbank.mtp.trunk_plan import FILES_OVERHEAD, METHOD, SHARD_OVERHEAD, model_recipe
from arrowbank.progress import Progress

if TYPE_CHECKING:
    from arrowbank.models import ModelConfig, ModelInfo
    from arrowbank.models.passes import Passes
    from arrowbank.mtp.trunk_build import TrunkStage


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


def build_taps(trunk_stage: TrunkStage, out: Path, options: RunOptions, progress: Progress) -> Manifest:
    """The taps of the committed trunk bank `out`; the manifest of their bank, complete or not."""
    try:
        return TapsStage(trunk_stage, open_bank(out, kind=TrunkBank)).run(taps_folder(out), options, progress)
    except PlanMismatch as error:  # --restart would make the trunk bank anew, too
        raise PlanMismatch(
            f"{error}\nThe trunk bank {out} is complete and fits: remove {taps_folder(out)} to have these taps beside it.",
            error.fields,
        ) from None


class TapsStage(Stage):
    """The bank of taps beside a committed trunk bank."""

    kind, phase, what = TAPS_KIND, "taps", "the bank of taps"
    remedy = "Give fewer --layers, or"

    def __init__(self, stage: TrunkStage, trunk: TrunkBank) -> None:
        self.config, self.trunk_stage, self.trunk = stage.config, stage, trunk
        self.lengths: list[int] = trunk.lengths[trunk.held_out_rows].tolist()

    @property
    def model(self) -> ModelInfo:
        return self.trunk_stage.model

    @property
    def inputs(self) -> list[Named]:
        return [("the trunk bank", self.trunk)]

    def _row_bytes(self, length: int) -> int:
        return _row_bytes(length, len(self.config.layers), self.model.hidden_size, self.config.window)

    @cached_property
    def shards(self) -> list[Shard]:
        return cut_shards(self.lengths, self._row_bytes, self.model.hidden_size, self.config.max_shard_bytes)

    def shard_bytes(self, shard: Shard) -> int:
        return sum(map(self._row_bytes, self.lengths[shard.start : shard.stop]))

    def tokens(self, shard: Shard) -> int:
        return sum(self.lengths[shard.start : shard.stop])

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return {
            "method": METHOD,
            "trunk": self.trunk.content_digest,
            "model": model_recipe(self.model),
            "layers": list(self.config.layers),
            "batches": self.config.rules.recipe(),
            "shard_bytes": self.config.max_shard_bytes or SHARD_BYTES,
        }

    @property
    def manifest(self) -> dict[str, Any]:
        return {
            "text_count": len(self.lengths),
            "layers": list(self.config.layers),
            "layer_id_convention": "block_output",
            "hidden_size": self.model.hidden_size,
            "window": self.config.window,
            "model_path": self.model.model,
            "model_fingerprint": self.model.fingerprint,
            "trunk": {"name": self.trunk.folder.name, "plan_digest": self.trunk.plan_digest},
            "counts": {"windows": len(self.lengths), "tokens": sum(self.lengths)},
        }

    def workers(self, bank: BankWriter) -> TapsJob:
        return TapsJob(
            model=self.config.model,
            info=replace(self.model, backbone="inner"),
            layers=self.config.layers,
            rules=self.config.rules,
            trunk=self.trunk,
        )

    def finish(self, bank: BankWriter, progress: Progress) -> Manifest:
        return bank.commit(rows=len(self.lengths))


@dataclass(frozen=True, kw_only=True)
class TapsJob:
    """How a process becomes a worker. Everything here pickles."""

    model: ModelConfig
    info: ModelInfo
    layers: tuple[int, ...]
    rules: BatchRules
    trunk: TrunkBank

    def __call__(self, number: int) -> ShardTapper:
        from arrowbank.mtp.trunk_passes import load_layers

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
