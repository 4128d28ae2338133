"""What an encode will take, before it is started: bytes on disk, forward passes, and time from a few real batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from arrowbank.bank import open_bank
from arrowbank.bank.columns import list_values, one_array
from arrowbank.bank.files import free_bytes
from arrowbank.bank.kinds.tokens import TokensBank
from arrowbank.bank.refusals import explains
from arrowbank.engine.plan import Batch, batch_counts, batches, gather
from arrowbank.features.config import EncodeConfig, Encoder
from arrowbank.features.encode import EncodePlan, text_bytes
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

SAMPLED_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The plan in numbers. `seconds` and `texts_per_second` are None where no batch was timed."""

    rows: int
    tokens: int
    hidden_size: int
    shards: int
    forward_passes: int
    forward_passes_with_one_sort: int
    shard_bytes: int
    mirror_bytes: int
    free_bytes: int
    seconds: float | None
    texts_per_second: float | None

    @property
    def total_bytes(self) -> int:
        return self.shard_bytes + self.mirror_bytes

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it."""
        return self.total_bytes <= self.free_bytes


@explains("tokens", "read")
@checked
def estimate(
    config: EncodeConfig,
    tokens: str | Path,
    out: str | Path = ".",
    *,
    texts: str | Path | None = None,
    timed: bool = True,
    progress: Progress = SILENT,
) -> Estimate:
    """Count the plan of `encode` with the same arguments; with `timed`, load the model and time a few of its batches."""
    plan = EncodePlan(config, open_bank(tokens, kind=TokensBank), texts)
    values, offsets = list_values(one_array(plan.tokens.slice(0, plan.rows, ["input_ids"])["input_ids"]))
    lengths = np.diff(offsets)
    passes, ideal = batch_counts(lengths, plan.shards, config.rules)
    vectors = plan.rows * plan.row_bytes
    columns = int(text_bytes(plan.texts) * plan.rows / len(plan.tokens))
    seconds = None
    if timed:
        with progress.phase("estimate", SAMPLED_BATCHES, unit="batches") as phase:
            seconds = _seconds(plan.job().encoder(0), plan, values, offsets, phase.advance)
    return Estimate(
        rows=plan.rows,
        tokens=int(lengths.sum()),
        hidden_size=plan.hidden_size,
        shards=len(plan.shards),
        forward_passes=passes,
        forward_passes_with_one_sort=ideal,
        shard_bytes=vectors + columns,
        mirror_bytes=(vectors + 2 * columns if config.mirror else 0) + 16 * plan.rows,
        free_bytes=free_bytes(Path(out)),
        seconds=seconds,
        texts_per_second=plan.rows / seconds if seconds else None,
    )


def _seconds(
    encoder: Encoder,
    plan: EncodePlan,
    values: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int32],
    report: Callable[[int], None],
) -> float:
    """Seconds for the whole plan, from batches spread evenly over the tokens of its first shard."""
    first = plan.shards[0]
    lengths = np.diff(offsets)
    planned = list(batches(lengths[first.start : first.stop], plan.config.rules))
    sample = _spread(planned)
    encoder.encode(gather(values, offsets, sample[0]))  # the first pass pays for buffers and kernels
    start = time.perf_counter()
    for batch in sample:
        encoder.encode(gather(values, offsets, batch))
        report(1)
    spent = time.perf_counter() - start
    return spent / sum(len(batch.rows) * batch.length for batch in sample) * int(lengths.sum())


def _spread(planned: list[Batch]) -> list[Batch]:
    """Batches at evenly spaced places of the tokens, so that short and long ones have their share."""
    ends = np.cumsum([len(batch.rows) * batch.length for batch in planned])
    places = (np.arange(SAMPLED_BATCHES) + 0.5) / SAMPLED_BATCHES * ends[-1]
    return [planned[index] for index in np.searchsorted(ends, places)]
