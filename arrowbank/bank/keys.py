"""From a text to its row, without reading an index: a sorted key file that is mapped, not parsed.

`keys.npy` is a [2, N] uint64 array: the first eight bytes (big-endian) of every text's sha1 in ascending order, and their
rows. A look-up is a binary search on it, confirmed by all twenty bytes in the bank's own `sha1` column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from arrowbank.bank.columns import ShardedColumn
from arrowbank.errors import CorruptBank

KEY_FILE = "keys.npy"
SHA1_BYTES = 20

Digests = npt.NDArray[np.uint8]  # [N, 20]


def text_key(text: str) -> bytes:
    """The key of a text: sha1 of its UTF-8 bytes after `str.strip()`, a lone surrogate counting as `?`."""
    return hashlib.sha1(text.strip().encode("utf-8", "replace")).digest()


def text_keys(texts: Iterable[str]) -> Digests:
    """The keys of texts, [N, 20] uint8."""
    return np.frombuffer(b"".join(map(text_key, texts)), np.uint8).reshape(-1, SHA1_BYTES)


def prefixes(digests: Digests) -> npt.NDArray[np.uint64]:
    """The first eight bytes of each digest as a number that sorts like the bytes."""
    return np.ascontiguousarray(digests[:, :8]).view(">u8").ravel().astype(np.uint64)


def sorted_keys(digests: Digests) -> npt.NDArray[np.uint64]:
    """The contents of the key file for rows with these digests, [2, N] uint64."""
    keys = prefixes(digests)
    order = np.argsort(keys, kind="stable")
    return np.stack([keys[order], order.astype(np.uint64)])


class SortedKeys:
    """Looks up rows by key in what `sorted_keys` gave; `place` is where that is stored, for errors."""

    def __init__(self, table: npt.NDArray[np.uint64], place: Path | str = "the keys") -> None:
        self._keys, self._rows = table
        self._place = place

    def find(self, digests: Digests, stored: ShardedColumn) -> npt.NDArray[np.int64]:
        """The row of each digest, −1 where it is absent; `stored` has the full digests of all rows, [N, 20] uint8.

        CorruptBank for a row that the bank does not have.
        """
        wanted = prefixes(digests)
        at = np.searchsorted(self._keys, wanted)
        rows = np.full(len(digests), -1, np.int64)
        unsure = np.arange(len(digests))
        while True:  # more than one round only where two texts share eight bytes of sha1
            unsure = unsure[at[unsure] < len(self._keys)]
            unsure = unsure[self._keys[at[unsure]] == wanted[unsure]]
            if not len(unsure):
                return rows
            candidates = self._rows[at[unsure]]
            if (candidates >= stored.starts[-1]).any():
                raise CorruptBank(
                    f"{self._place}: names row {candidates.max()} of a bank of {stored.starts[-1]} rows. Restore it or rebuild the "
                    "bank; `arrowbank verify` finds what else is damaged."
                )
            candidates = candidates.astype(np.int64)
            hit = (stored.take(candidates) == digests[unsure]).all(axis=1)
            rows[unsure[hit]] = candidates[hit]
            unsure = unsure[~hit]
            at[unsure] += 1
