"""How far two feature banks agree on the texts that both have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arrowbank.bank.floats import cosines
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.open import open_bank
from arrowbank.bank.refusals import explains
from arrowbank.errors import InputError, NothingChecked
from arrowbank.settings import checked

BLOCK_ROWS = 8192


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Cosines and differences over the `shared` texts of two banks of `rows` texts each."""

    rows: tuple[int, int]
    shared: int
    min_cosine: float
    mean_cosine: float
    first_percentile_cosine: float
    largest_difference: float


@explains("a", "read")
@checked
def compare(a: str | Path, b: str | Path) -> Comparison:
    """Compare the vectors of texts that both feature banks have, in float64.

    Raises InputError when the widths differ, NothingChecked (an InputError) when no text is shared.
    """
    left, right = open_bank(a, kind=FeatureBank), open_bank(b, kind=FeatureBank)
    if left.hidden_size != right.hidden_size:
        raise InputError(f"{a} has vectors of width {left.hidden_size}, {b} of {right.hidden_size}: they cannot be compared.")
    alike, largest = [], 0.0
    for start in range(0, len(left), BLOCK_ROWS):
        rows = np.arange(start, min(start + BLOCK_ROWS, len(left)))
        others = right.find(left.digests.take(rows))
        both = others >= 0
        x, y = (bank.take(chosen).astype(np.float32) for bank, chosen in ((left, rows[both]), (right, others[both])))
        alike.append(cosines(x, y, of_zeros=0.0))
        largest = max(largest, float(np.abs(x - y).max(initial=0)))
    cosine = np.concatenate(alike)
    if not len(cosine):
        raise NothingChecked(f"{a} and {b} have no text in common. Compare banks that were made from the same texts.")
    return Comparison(
        rows=(len(left), len(right)),
        shared=len(cosine),
        min_cosine=float(cosine.min()),
        mean_cosine=float(cosine.mean()),
        first_percentile_cosine=float(np.percentile(cosine, 1)),
        largest_difference=largest,
    )
