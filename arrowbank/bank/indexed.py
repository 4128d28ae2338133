"""The nearest rows through faiss: the same answer as `nearest`, from a copy of the vectors in memory, for many single questions.

The index keeps the float16 values as they are (a scalar quantizer of 16 bits, whose codes they are), so making it is a copy.
What faiss finds is looked at again as `nearest` does it, and more rows are asked for until no other row could be among the best.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.features import FeatureBank
from arrowbank.bank.nearest import MARGIN, Cosines, Rows, nearest, true_cosines, unit_queries
from arrowbank.errors import InputError, MissingDependency

MORE = 32  # rows asked for beside the k, at first
FEW = 4  # queries: faiss takes them one by one, more are quicker together
MOST = 4096  # where so many are as near as the k-th, a plain pass over the bank is quicker


class IndexedRows:
    """The vectors of a normalised feature bank in a faiss index: 2·N·D bytes of memory.

    Raises MissingDependency without faiss, InputError for a bank whose vectors keep their length: faiss knows no cosine.
    """

    def __init__(self, bank: FeatureBank, among: npt.NDArray[np.bool_] | None = None) -> None:
        if not bank.manifest["encoding"]["normalize"]:
            raise InputError(
                f"{bank.folder}: its vectors are not normalised, and faiss has no cosine. Search it without faiss."
            )
        self._bank, self._among = bank, among
        self._rows: Rows = np.arange(len(bank)) if among is None else np.flatnonzero(among)
        faiss = _faiss()
        self._index: Any = faiss.IndexScalarQuantizer(
            bank.hidden_size, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        )
        for first, part in zip(bank.starts[:-1], bank.features.parts, strict=True):
            here = part if among is None else part[among[first : first + len(part)]]
            self._index.add_sa_codes(np.ascontiguousarray(here).view(np.uint8))

    def nearest(self, queries: npt.NDArray[np.float32], k: int) -> tuple[Rows, Cosines]:
        """What `nearest` gives for the same arguments, and raises."""
        unit = unit_queries(self._bank, queries)
        count = len(self._rows)
        asked = min(count, k + MORE)
        while 1 <= k <= asked <= MOST and len(unit) <= FEW:
            scores, places = self._index.search(unit.astype(np.float32), asked)
            if (places < 0).any():  # a vector that is not finite: the plain way says so
                break
            rows, cosines = self._ordered(unit, self._rows[places])
            if asked == count or bool((scores[:, -1] + MARGIN < cosines[:, k - 1]).all()):
                return rows[:, :k], cosines[:, :k]
            asked = min(count, 4 * asked)
        return nearest(self._bank, queries, k, among=self._among)

    def _ordered(self, unit: npt.NDArray[np.float64], rows: Rows) -> tuple[Rows, Cosines]:
        """Each query's rows [Q, n] in the order of their cosines to it, and those."""
        stored = self._bank.take(rows.ravel())
        cosines = true_cosines(np.repeat(unit, rows.shape[1], axis=0), stored).reshape(rows.shape)
        order = np.lexsort((rows, -cosines))
        return np.take_along_axis(rows, order, 1), np.take_along_axis(cosines, order, 1)


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError:
        raise MissingDependency("faiss is not installed: pip install 'arrowbank[search]', or search without it.") from None
