"""One shard of a captured target bank: token rows in, a record batch of hidden states out, and its counts beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        facts = self.job.facts
        rows = CapturedRows(facts, *self._rows.of(shard), place=self.job.info.model)
        source = ShardSource(rows, Shard(shard.index, 0, shard.rows), facts, keep_nonfinite=False)
        batch, tokens = source.batch, len(rows.input_ids)
        if facts.codec == "bf16" and facts.spans == "all":  # straight into the columns' memory
            rows.taps, rows.last = (promise.reserved.reshape(tokens, -1) for promise in source.promises)
            self._capture(rows, report)
        else:
            rows.taps = np.empty((tokens, facts.layers * facts.hidden_size), np.uint16)
            rows.last = np.empty((tokens, facts.hidden_size), np.uint16)
            self._capture(rows, report)
            filled(batch, source.promises)
        publish_tally(self.job.tallies, shard.index, source.tally)
        return batch

    def _capture(self, rows: CapturedRows, report: Report) -> None:
        """Fill `rows` with their hidden states."""
        plan = list(batches(np.diff(rows.offsets), self.job.rules))
        streamed = self.states.stream(gather(rows.input_ids, rows.offsets, batch) for batch in plan)
        for batch, states in zip(plan, streamed, strict=True):
            bits = states.view(torch.int16).numpy().view(np.uint16)
            if not all_finite(bits):
                self._refuse([rows.names[row] for row in batch.rows], bits)
            for row, hidden in zip(batch.rows, bits, strict=True):
                tokens = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
                rows.taps[tokens] = hidden[:, :-1].reshape(batch.length, -1)
                rows.last[tokens] = hidden[:, -1]
            report(len(batch.rows) * batch.length)

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


@dataclass
class CapturedRows:
    """The rows of a shard in memory, as `TargetRows`: flat tokens, and a token's hidden states as a row of `taps` and of `last`."""

    facts: TargetFacts
    names: list[str]
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int32]
    place: str
    taps: Bits = field(default_factory=lambda: np.empty((0, 0), np.uint16))  # until they are captured
    last: Bits = field(default_factory=lambda: np.empty((0, 0), np.uint16))
    digest: str = ""  # they live too briefly to be told from others

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets).astype(np.int64)

    def read(self, row: int) -> TargetSample:
        tokens = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return TargetSample(
            self.names[row], self.input_ids[tokens], self.loss_mask[tokens], self.taps[tokens], self.last[tokens]
        )
