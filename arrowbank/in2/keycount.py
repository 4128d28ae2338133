"""Key sequences that occur more often than they were planted: twice in an example, or in its filler by chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]
MIXER = 0x9E3779B97F4A7C15


class KeyCounter:
    """Counts under one vocabulary and key length; made once, used for many examples."""

    def __init__(self, vocab: int, key_len: int) -> None:
        self._wanted = np.zeros(vocab, bool)
        self._offsets = np.arange(key_len)
        powers = [pow(MIXER, j + 1, 1 << 64) for j in range(key_len)]
        self._powers = np.array(powers, np.uint64)

    def count(self, ids: Ids, keys: Ids, starts: Ids) -> tuple[int, int]:
        """Of the keys planted in one example: how many it holds a second time, and how often one stands where none was planted.

        ids [T]; keys [n, key_len], every needle's and decoy's; starts: every start at which a key was planted.
        """
        codes = self._codes(keys)
        distinct = np.unique(codes)
        self._wanted[keys[:, 0]] = True
        begins = ids[: len(ids) - len(self._offsets) + 1]
        places = np.flatnonzero(self._wanted.take(begins, mode="clip"))  # an id past the vocabulary is another check's
        self._wanted[keys[:, 0]] = False
        found = places[np.isin(self._codes(ids[places[:, None] + self._offsets]), distinct)]
        return len(codes) - len(distinct), len(found) - int(np.isin(found, starts).sum())

    def _codes(self, sequences: Ids) -> npt.NDArray[np.uint64]:
        """A 64-bit number a sequence: different sequences share one with a chance of 2^-64."""
        codes: npt.NDArray[np.uint64] = (sequences.astype(np.uint64) + np.uint64(1)) @ self._powers
        return codes
