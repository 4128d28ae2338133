"""One shard of a captured target bank: token rows in, a record batch of hidden states out, and its counts beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from arrowbank.bank.floats import Bits, all_finite, nonfinite
from arrowbank.bank.target_shards import ShardSource, filled
from arrowbank.bank.targets import TargetFacts, TargetSample
from arrowbank.errors import BadVector
from arrowbank.plan import BatchRules, Shard, batches, gather
from arrowbank.targets.committing import publish_tally
from arrowbank.targets.rows import PreparedRows

if TYPE_CHECKING:
    from arrowbank.models import ModelConfig, ModelInfo
    from arrowbank.models.taps import HiddenStates

Report = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class CaptureJob:
    """How a process becomes a worker. Everything here pickles; the model is loaded by the worker itself.

    rows      the file of prepared rows
    tallies   the folder for the counts of shards
    """

    model: ModelConfig
    info: ModelInfo
    facts: TargetFacts
    rules: BatchRules
    rows: Path
    tallies: Path
    processes: int = 1

    def __call__(self, number: int) -> ShardCapturer:
        from arrowbank.models import load_taps

        if self.processes > 1:  # they share the cores; the bits of a hidden state do not depend on how many there are
            torch.set_num_threads(max(1, torch.get_num_threads() // self.processes))
        layers = self.facts.target_layer_ids or ()
        states = load_taps(self.model, layers, self.facts.last_hidden_norm, worker=number, info=self.info)
        return ShardCapturer(self, states)


class ShardCapturer:
    """A worker that holds the model and the prepared rows."""

    def __init__(self, job: CaptureJob, states: HiddenStates) -> None:
        self.job, self.states = job, states
        self._rows = PreparedRows(job.rows)

    def __call__(self, shard: Shard, report: Report) -> pa.RecordBatch:
        """The columns of a target bank for the shard's rows, all in memory; its counts are published. Reports tokens.

        Raises BadVector for hidden states that are NaN or Inf.
        """
        rows = self._capture(shard, report)
        source = ShardSource(rows, Shard(shard.index, 0, shard.rows), self.job.facts, keep_nonfinite=False)
        batch = filled(source.batch, source.promises)
        publish_tally(self.job.tallies, shard.index, source.tally)
        return batch

    def _capture(self, shard: Shard, report: Report) -> CapturedRows:
        names, ids, mask, offsets = self._rows.of(shard)
        facts = self.job.facts
        taps = np.empty((len(ids), facts.layers * facts.hidden_size), np.uint16)
        last = np.empty((len(ids), facts.hidden_size), np.uint16)
        plan = list(batches(np.diff(offsets), self.job.rules))
        streamed = self.states.stream(gather(ids, offsets, batch) for batch in plan)
        for batch, states in zip(plan, streamed, strict=True):
            bits = states.view(torch.int16).numpy().view(np.uint16)
            if not all_finite(bits):
                self._refuse([names[row] for row in batch.rows], bits)
            for row, hidden in zip(batch.rows, bits, strict=True):
                tokens = slice(int(offsets[row]), int(offsets[row + 1]))
                taps[tokens] = hidden[:, :-1].reshape(batch.length, -1)
                last[tokens] = hidden[:, -1]
            report(len(batch.rows) * batch.length)
        return CapturedRows(facts, names, ids, mask, offsets, taps, last, place=self.job.info.model)

    def _refuse(self, names: Sequence[str], bits: Bits) -> None:
        row = next(at for at in range(len(bits)) if not all_finite(bits[at]))
        layers = [*self.job.facts.layer_names, "last"]
        counts = nonfinite(bits[row]).sum(axis=(0, 2))
        listed = ", ".join(f"{count} in layer {layer}" for layer, count in zip(layers, counts, strict=True) if count)
        raise BadVector(
            f"sample {names[row]}: model {self.job.info.model!r} gave values that are NaN or Inf ({listed}), computing in "
            f"{self.job.info.dtype}. Nothing of this shard was kept. Such values come from the model or its dtype: try --dtype "
            "bfloat16 or float32, check the weights, or leave the sample out."
        )


@dataclass(frozen=True)
class CapturedRows:
    """The rows of a shard in memory, as `TargetRows`: flat tokens, and hidden states of a token a row of `taps` and `last`."""

    facts: TargetFacts
    names: list[str]
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int32]
    taps: Bits
    last: Bits
    place: str
    digest: str = ""  # they live too briefly to be told from others

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets).astype(np.int64)

    def read(self, row: int) -> TargetSample:
        tokens = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return TargetSample(
            self.names[row], self.input_ids[tokens], self.loss_mask[tokens], self.taps[tokens], self.last[tokens]
        )
