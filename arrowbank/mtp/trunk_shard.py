"""One shard of a trunk bank: windows in, a record batch out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from arrowbank.bank.kinds.trunk import HIDDEN_TYPES, TrunkColumns, row_offsets
from arrowbank.engine.plan import BatchRules, Shard, batches
from arrowbank.errors import BadVector

if TYPE_CHECKING:
    from arrowbank.models import ModelConfig, ModelInfo
    from arrowbank.mtp.trunk_passes import TrunkPasses, TrunkStates


Report = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class WindowRows:
    """The windows of all shards but for their ids, which lie in a file: `ids` names an .npy of [W, T] int32, mapped by workers."""

    ids: Path
    lengths: npt.NDArray[np.int32]
    sets: list[str]
    numbers: npt.NDArray[np.int32]
    held_out: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class TrunkJob:
    """How a process becomes a worker. Everything here pickles; the model is loaded by the worker itself."""

    model: ModelConfig
    info: ModelInfo
    topk: int
    hidden_norm: str
    hidden_dtype: str
    rules: BatchRules
    rows: WindowRows

    def __call__(self, number: int) -> ShardComputer:
        from arrowbank.mtp.trunk_passes import load_trunk

        return ShardComputer(self, load_trunk(self.model, self.topk, self.hidden_norm, worker=number, info=self.info))


class ShardComputer:
    """A worker that holds the model and the windows."""

    def __init__(self, job: TrunkJob, trunk: TrunkPasses) -> None:
        self.job, self.trunk = job, trunk
        self._ids = np.load(job.rows.ids, mmap_mode="r")

    def __call__(self, shard: Shard, report: Report) -> pa.RecordBatch:
        """The columns of a trunk bank for the shard's windows, all in memory. Reports tokens.

        Raises BadVector for hidden states or probabilities that are NaN or Inf.
        """
        rows, here = self.job.rows, slice(shard.start, shard.stop)
        ids, lengths = np.array(self._ids[here]), rows.lengths[here]
        tokens, offsets = int(lengths.sum()), row_offsets(lengths)
        columns = TrunkColumns(
            input_ids=ids,
            lengths=lengths,
            topk_ids=np.empty((tokens, self.job.topk), np.int32),
            topk_probs=np.empty((tokens, self.job.topk), np.float32),
            tail_mass=np.empty(tokens, np.float32),
            hidden=np.empty((tokens, self.job.info.hidden_size), HIDDEN_TYPES[self.job.hidden_dtype]),
            sets=rows.sets[here],
            windows=rows.numbers[here],
            held_out=rows.held_out[here].tolist(),
        )
        plan = list(batches(lengths, self.job.rules))
        streamed = self.trunk.stream(ids[batch.rows, : batch.length] for batch in plan)
        for batch, states in zip(plan, streamed, strict=True):
            for at, row in enumerate(batch.rows):
                window = slice(int(offsets[row]), int(offsets[row + 1]))
                self._keep(columns, window, states, at, f"window {columns.windows[row]} of {columns.sets[row]}")
            report(len(batch.rows) * batch.length)
        return columns.batch()

    def _keep(self, columns: TrunkColumns, window: slice, states: TrunkStates, at: int, name: str) -> None:
        """Put row `at` of a batch into its place; BadVector where it is not finite."""
        hidden, probs = states.hidden[at], states.topk_probs[at]
        bad = int((~torch.isfinite(hidden)).sum()), int((~torch.isfinite(probs)).sum())
        if any(bad):
            raise BadVector(
                f"{name}: model {self.job.info.model!r} gave values that are NaN or Inf ({bad[0]} in hidden states, {bad[1]} in "
                f"probabilities), computing in {self.job.info.dtype}. Nothing of this shard was kept. Such values come from the "
                "model or its dtype: try --dtype bfloat16 or float32, check the weights, or leave that text out."
            )
        columns.topk_ids[window] = states.topk_ids[at].numpy()
        columns.topk_probs[window] = probs.numpy()
        columns.tail_mass[window] = states.tail_mass[at].numpy()
        columns.hidden[window] = bits_of(hidden)


def bits_of(hidden: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor of bfloat16 as its bits, one of float16 as it is."""
    if hidden.dtype is torch.bfloat16:
        return hidden.view(torch.int16).numpy().view(np.uint16)
    return hidden.numpy()
