"""The nearest vectors of a feature bank, exactly: every row is compared, a block at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from arrowbank.bank.columns import Rows
from arrowbank.bank.features import FeatureBank

BLOCK_ROWS = 8192


def nearest(bank: FeatureBank, queries: npt.NDArray[np.float32], k: int) -> tuple[Rows, npt.NDArray[np.float32]]:
    """For each of the queries [Q, D] the `k` rows with the largest cosine, best first: rows [Q, k] int64, cosines [Q, k] float32.

    Of equal cosines the lower row is first.
    """
    asked = queries / np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), np.float32(1e-30))
    rows = np.zeros((len(asked), 0), np.int64)
    cosines = np.zeros((len(asked), 0), np.float32)
    for start, part in zip(bank.features.starts.tolist(), bank.features.parts, strict=False):
        for first in range(0, len(part), BLOCK_ROWS):
            block = part[first : first + BLOCK_ROWS].astype(np.float32)
            block /= np.maximum(np.linalg.norm(block, axis=1, keepdims=True), np.float32(1e-30))
            here = np.broadcast_to(np.arange(start + first, start + first + len(block)), (len(asked), len(block)))
            rows, cosines = np.hstack([rows, here]), np.hstack([cosines, asked @ block.T])
            best = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
            rows, cosines = np.take_along_axis(rows, best, 1), np.take_along_axis(cosines, best, 1)
    return rows, cosines
