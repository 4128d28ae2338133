"""The rows of a feature bank nearest to some queries: exact, and without the whole matrix in memory.

The mapped vectors are widened to float32 a block at a time, a few megabytes that stay in the processor's cache, and multiplied
with all queries. What that gives is only close to a cosine: stored vectors are rounded to float16, so their norms are not quite
1, and a product's last bits depend on its shape. It only decides which rows are worth a second look; those are computed again
in float64, one row at a time, so the answer depends on neither blocks, threads nor the way the bank is stored."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from arrowbank.bank.columns import Rows
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.errors import CorruptBank, InputError

if TYPE_CHECKING:
    import torch


Cosines = npt.NDArray[np.float32]

BLOCK_BYTES = 4 << 20  # of float32
SCORES = 1 << 20  # of a block and some queries, at a time
# How far a quick cosine may be from the true one: by float16's rounding of unit vectors (2^-11), and by float32 sums
# of up to 8,192 products (2^-11 again).
MARGIN = 2.0**-10


def nearest(
    bank: FeatureBank, queries: npt.NDArray[np.float32], k: int, *, among: npt.NDArray[np.bool_] | None = None
) -> tuple[Rows, Cosines]:
    """The k rows of `bank` with the largest cosine to each of `queries` [Q, D], best first, of equals the lower row first.

    Gives rows [Q, k] int64 and cosines [Q, k] float32. `among` [N] says which rows count (None: all); a k larger than their
    number is cut to it. Queries need not be normalised, nor need the bank. Memory is a block of the bank beside queries and
    answers. Raises InputError (k, the queries' shape, one that is zero or not finite), CorruptBank (a vector that is not finite).
    """
    unit = unit_queries(bank, queries)
    if k < 1:
        raise InputError(f"k is {k}, it must be at least 1.")
    found = _Found(unit, min(k, len(bank) if among is None else int(among.sum())))
    normalised = bool(bank.manifest.encoding.normalize)
    for start, half in _blocks(bank) if found.rows.size else []:
        rows = np.arange(start, start + len(half))
        if among is not None:
            rows = rows[among[rows]]
            half = half[rows - start]
        if len(rows):
            found.look_at(half, rows, normalised)
    if (found.rows < 0).any():
        raise CorruptBank(f"{bank.folder}: has vectors that are not finite or all zero. Find them with `arrowbank verify`.")
    return found.rows, found.cosines


def unit_queries(bank: FeatureBank, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """`queries` divided by their norms, [Q, D] float64. InputError for another width, or one that has no direction."""
    wide = np.asarray(queries, np.float64)
    if wide.ndim != 2 or wide.shape[1] != bank.hidden_size:
        raise InputError(
            f"queries have the shape {wide.shape}, expected [Q, {bank.hidden_size}]: vectors as wide as those of {bank.folder}."
        )
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if len(bad):
        raise InputError(f"query {bad[0]} is all zero or not finite: it has no direction. Leave it out.")
    unit: npt.NDArray[np.float64] = wide / norms
    return unit


def _blocks(bank: FeatureBank) -> list[tuple[int, torch.Tensor]]:
    """The mapped vectors in pieces, and the row at which each starts. The shards hold them with and without a mirror."""
    import torch

    rows = max(1, BLOCK_BYTES // (4 * bank.hidden_size))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing here writes to it
        shards = [torch.from_numpy(part) for part in bank.features.parts]
    return [
        (int(first) + at, shard[at : at + rows])
        for first, shard in zip(bank.starts[:-1], shards, strict=True)
        for at in range(0, len(shard), rows)
    ]


class _Found:
    """The best rows so far of each of the queries `unit`, [Q, k]: −1 and −inf where there is none yet."""

    def __init__(self, unit: npt.NDArray[np.float64], k: int) -> None:
        self.rows: Rows = np.full((len(unit), k), -1, np.int64)
        self.cosines: Cosines = np.full((len(unit), k), -np.inf, np.float32)
        self._unit, self._narrow = unit, unit.astype(np.float32)

    def look_at(self, half: torch.Tensor, rows: Rows, normalised: bool) -> None:
        """Take in a block: `half` [B, D] float16, and the rows that these are."""
        import torch

        block = half.float()
        norms = None if normalised else torch.linalg.vector_norm(block, dim=1)
        step = max(1, SCORES // len(block))
        for low in range(0, len(self._unit), step):
            scores = torch.from_numpy(self._narrow[low : low + step]) @ block.T
            if norms is not None:
                scores /= norms
            places, at = self._worth(scores.numpy(), low)
            for piece in range(0, len(places), len(block)):  # rows that are equal by the thousand are all worth a look
                some, where = places[piece : piece + len(block)], at[piece : piece + len(block)]
                cosines = true_cosines(self._unit[some], half[where].numpy())
                self._merge(some, rows[where], cosines)

    def _worth(self, scores: Cosines, low: int) -> tuple[Rows, Rows]:
        """Which (query, place in the block) may be among the best k, by quick scores [q, B] of the queries from `low` on."""
        k = self.rows.shape[1]
        floor = self.cosines[low : low + len(scores), -1] - np.float32(2 * MARGIN)
        # most blocks have nothing for a query, which one pass over its scores tells; where it meets a NaN it does not tell
        concerned = np.flatnonzero(~(scores.max(axis=1) < floor))
        scores, floor = scores[concerned], floor[concerned]
        if np.isinf(floor).any() and scores.shape[1] > k:  # at first nothing is known but what this block itself says
            floor = np.fmax(floor, np.partition(scores, -k, axis=1)[:, -k] - np.float32(2 * MARGIN))
        query, place = np.nonzero(scores >= floor[:, None])
        return concerned[query] + low, place

    def _merge(self, queries: Rows, rows: Rows, cosines: Cosines) -> None:
        """Enter (query, row, cosine) triples, and keep the best k of each query that they concern."""
        k = self.rows.shape[1]
        touched, group = np.unique(queries, return_inverse=True)
        groups = np.concatenate([np.repeat(np.arange(len(touched)), k), group])
        all_rows = np.concatenate([self.rows[touched].ravel(), rows])
        all_cosines = np.concatenate([self.cosines[touched].ravel(), cosines])
        order = np.lexsort((all_rows, -all_cosines, groups))
        first = np.searchsorted(groups[order], np.arange(len(touched)))
        best = order[first[:, None] + np.arange(k)]
        self.rows[touched], self.cosines[touched] = all_rows[best], all_cosines[best]


def true_cosines(unit: npt.NDArray[np.float64], stored: npt.NDArray[np.float16]) -> Cosines:
    """The cosine of each query to the vector beside it, [n, D] and [n, D] → [n] float32: the same however many there are."""
    wide = stored.astype(np.float64)
    cosines: Cosines = ((unit * wide).sum(axis=1) / np.sqrt((wide * wide).sum(axis=1))).astype(np.float32)
    return cosines
