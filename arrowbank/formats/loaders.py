"""Where the loaders of trainers cut files of token ids: for each loader the starts of all windows of an epoch, by file and rank.

Each rule is the loader's own, read in its source and checked against windows that the loader itself delivered
(tests/golden/loaders.json, recorded by tests/peers/record_loaders.py). A window of `length` tokens is a row of a batch. Most loaders
read one token more, for the label of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Starts = list[npt.NDArray[np.int64]]  # of windows, in a rank's order, by file


class LoaderStops(Exception):
    """The loader ends with an error on such files: it delivers nothing."""


@dataclass(frozen=True)
class Batches:
    """What a loader is run with. `length` is its sequence length, `batch` the rows of a rank's batch."""

    length: int
    batch: int = 1
    ranks: int = 1

    @property
    def rank_tokens(self) -> int:
        return self.batch * self.length

    @property
    def tokens(self) -> int:
        """All ranks move on by so many."""
        return self.ranks * self.rank_tokens

    def rows(self, batches: int, rank: int) -> npt.NDArray[np.int64]:
        """The starts of the rows of a rank's first `batches` batches in a file."""
        begins = np.arange(batches, dtype=np.int64) * self.tokens + rank * self.rank_tokens
        return (begins[:, None] + np.arange(self.batch) * self.length).reshape(-1)


@dataclass(frozen=True)
class Loader:
    """`cut` gives a rank's windows in files of so many tokens; each window reads `ahead` tokens past its length."""

    cut: Callable[[Sequence[int], Batches, int], Starts]
    ahead: int
    source: str  # where its rule stands
    each_rank: bool = True  # ranks read different windows; otherwise `cut` gives those that a sampler deals out to them

    def windows(self, files: Sequence[int], batches: Batches) -> Starts:
        """The windows of all ranks, by file, ascending. Raises LoaderStops."""
        ranks = [self.cut(files, batches, rank) for rank in range(batches.ranks if self.each_rank else 1)]
        return [np.sort(np.concatenate(starts)) for starts in zip(*ranks, strict=True)]


def _llmc(files: Sequence[int], batches: Batches, rank: int) -> Starts:
    """Whole global batches that have a token behind them; a file of less than one is an assertion that fails."""
    if min(files) < batches.tokens + 1:
        raise LoaderStops(f"a file of {min(files):,} tokens, fewer than batch × ranks × T + 1 = {batches.tokens + 1:,}")
    return [batches.rows((tokens - 1) // batches.tokens, rank) for tokens in files]


def _llmc_python(files: Sequence[int], batches: Batches, rank: int) -> Starts:
    _llmc(files, batches, rank)  # the same assertion
    return _lite(files, batches, rank)


def _lite(files: Sequence[int], batches: Batches, rank: int) -> Starts:
    """After each batch, a rank asks whether a whole *global* batch is left behind its own place: the later ranks leave a file earlier."""
    first = rank * batches.rank_tokens
    if min(files) < first + batches.rank_tokens + 1:
        raise LoaderStops(f"a file of {min(files):,} tokens has no batch for rank {rank}")
    return [batches.rows(max(1, (tokens - 1 - first) // batches.tokens), rank) for tokens in files]


def _modded(files: Sequence[int], batches: Batches, rank: int) -> Starts:
    """It moves on where fewer than two tokens would be left behind the batch; to the next file without another look."""
    found: Starts = []
    for number, tokens in enumerate(files):
        count = max(1 if number else 0, -(-(tokens - 1) // batches.tokens) - 1)
        if count and tokens < rank * batches.rank_tokens + batches.rank_tokens + 1:
            raise LoaderStops(f"a file of {tokens:,} tokens has no batch for rank {rank}")
        found.append(batches.rows(count, rank))
    return found


def _windows_of(read: int) -> Callable[[Sequence[int], Batches, int], Starts]:
    """One window after the other, as many as have `read` tokens more than their length in the file."""

    def cut(files: Sequence[int], batches: Batches, rank: int) -> Starts:
        return [np.arange((tokens - read) // batches.length, dtype=np.int64) * batches.length for tokens in files]

    return cut


LOADERS: dict[str, Loader] = {
    "llm.c": Loader(_llmc, 1, "karpathy/llm.c f1e2ace, llmc/dataloader.h"),
    "llm.c-python": Loader(_llmc_python, 1, "karpathy/llm.c f1e2ace, train_gpt2.py: DistributedDataLoader"),
    "modded-nanogpt": Loader(_modded, 1, "KellerJordan/modded-nanogpt f411b3d3, train_gpt.py: align_to_bos=False"),
    "build-nanogpt": Loader(_lite, 1, "karpathy/build-nanogpt, train_gpt2.py: DataLoaderLite"),
    "olmo-core": Loader(_windows_of(0), 0, "ai2-olmo-core 3.0.0, data/numpy_dataset.py: NumpyFSLDataset", each_rank=False),
    # its window is the sequence length and one more: `length` here is both
    "nanotron": Loader(_windows_of(0), 0, "datatrove 0.10.1, utils/dataset.py: DatatroveFileDataset", each_rank=False),
    # documents are shuffled: which of a file it leaves out is chance, that it is one is not
    "megatron-core": Loader(
        _windows_of(1), 1, "megatron-core 0.16.1, datasets/gpt_dataset.py: GPTDataset, one epoch", each_rank=False
    ),
}


RANDOM = "nanoGPT"  # karpathy/nanoGPT, train.py: get_batch draws where its windows start, from one file


def expected_whole(begin: npt.NDArray[Any], end: npt.NDArray[Any], tokens: int, length: int) -> float:
    """How many of the spans a window holds whole on average that starts anywhere in 0 … tokens − length − 1 and reads length + 1 ids."""
    places = tokens - length
    if places < 1:
        raise LoaderStops(f"a file of {tokens:,} tokens, fewer than T + 1 = {length + 1:,}")
    hits = np.minimum(begin, places - 1) - np.maximum(end - length, 0) + 1
    return float(np.maximum(hits, 0).sum()) / places


def whole_in_windows(
    begin: npt.NDArray[Any], end: npt.NDArray[Any], starts: npt.NDArray[np.int64], read: int
) -> npt.NDArray[np.bool_]:
    """For spans from token `begin` to token `end` (both included) of a file: whether one of its windows, ascending, holds each whole."""
    if not len(starts):
        return np.zeros(len(begin), bool)
    window = starts[np.maximum(np.searchsorted(starts, begin, side="right") - 1, 0)]
    whole: npt.NDArray[np.bool_] = (window <= begin) & (end < window + read)
    return whole
