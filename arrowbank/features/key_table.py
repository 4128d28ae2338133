"""Which texts are new: a hash table of sha1 digests that takes a batch at a time, at 28 to 41 bytes a key.

Digests lie in row order in one growing array. An open-addressed table of uint32 rows points into it; digests are uniform
already, so their first bytes are the hash. A batch probes in step: every key that has not found its place moves on by one
slot. Equal means all 20 bytes equal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint32]  # [n, 5]: 20 bytes each
Rows = npt.NDArray[np.int64]

WORDS = 5
EMPTY = np.uint32(0xFFFF_FFFF)
BATCH = 1 << 16  # bounds what a call needs beside the table
MAX_LOAD = 0.5  # with linear probing, 1.5 probes for a key that is there and 2.5 for one that is not
GROWTH = 1.25
FEW = 1 << 10


class KeyTable:
    """Digest → row, rows counted from 0 in the order in which digests are first seen."""

    def __init__(self) -> None:
        self._count = 0
        self._digests: Digests = np.empty((FEW, WORDS), np.uint32)
        self._slots: npt.NDArray[np.uint32] = np.full(2 * FEW, EMPTY, np.uint32)

    def __len__(self) -> int:
        return self._count

    def add(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Enter digests ([n, 5] uint32) in order; which of them are new, [n]. One that is twice in the batch is new once."""
        fresh = np.zeros(len(digests), np.bool_)
        for start in range(0, len(digests), BATCH):
            stop = start + BATCH
            fresh[start:stop] = self._add(digests[start:stop])
        return fresh

    def _add(self, batch: Digests) -> npt.NDArray[np.bool_]:
        """A batch's digests are all laid behind the table's and claim slots under provisional rows, count + place in the batch."""
        count, n = self._count, len(batch)
        self._make_room(count + n)
        self._digests[count : count + n] = batch
        claimed: Rows = np.full(n, -1)  # the slot of a new digest
        waiting: Rows = np.arange(n)
        slots = self._home(batch)
        while len(waiting):
            held = self._slots.take(slots)
            free = np.flatnonzero(held == EMPTY)
            if len(free):
                # of several that want one slot the first has to win; of equal indices NumPy keeps what is assigned last
                self._slots[slots[free][::-1]] = (count + waiting[free][::-1]).astype(np.uint32)
                held = self._slots.take(slots)
                won = free[held[free] == count + waiting[free]]
                claimed[waiting[won]] = slots[won]
            # who won finds itself there, the others what was there before or the winner: perhaps their own digest
            differs = np.flatnonzero(~_same(self._digests.take(held, axis=0), batch.take(waiting, axis=0)))
            waiting = waiting[differs]
            slots = (slots[differs] + 1) & (len(self._slots) - 1)
        fresh = claimed >= 0
        new = np.flatnonzero(fresh)
        self._digests[count : count + len(new)] = batch.take(new, axis=0)
        self._slots[claimed[new]] = np.arange(count, count + len(new), dtype=np.uint32)
        self._count += len(new)
        return fresh

    def _home(self, digests: Digests) -> Rows:
        """The slot where the search for each digest starts, [n]."""
        low = digests[:, 0].astype(np.int64)
        if len(self._slots) > 1 << 32:
            low |= (digests[:, 1].astype(np.int64) & 0x7FFF_FFFF) << 32
        return low & (len(self._slots) - 1)

    def _make_room(self, needed: int) -> None:
        if needed >= int(EMPTY):
            raise OverflowError(f"{needed} keys: the table's rows are uint32")
        if needed > len(self._digests):
            # realloc: the system moves pages instead of copying them, so that old and new are never both in memory
            self._digests.resize((max(needed, int(len(self._digests) * GROWTH)), WORDS), refcheck=False)
        if needed > len(self._slots) * MAX_LOAD:
            size = len(self._slots)
            while needed > size * MAX_LOAD:
                size *= 2
            self._slots = np.empty(0, np.uint32)  # let go of the old one first
            self._slots = np.full(size, EMPTY, np.uint32)
            for start in range(0, self._count, BATCH):
                self._place(start, min(start + BATCH, self._count))

    def _place(self, start: int, stop: int) -> None:
        """Point slots at rows start … stop − 1, which are known to differ from all others."""
        rows = np.arange(start, stop, dtype=np.uint32)
        slots = self._home(self._digests[start:stop])
        while len(rows):
            free = self._slots[slots] == EMPTY
            self._slots[slots[free]] = rows[free]
            moving = self._slots[slots] != rows
            rows = rows[moving]
            slots = (slots[moving] + 1) & (len(self._slots) - 1)


def _same(some: Digests, others: Digests) -> npt.NDArray[np.bool_]:
    """Where two arrays have the same digest, [n]. By columns: a reduction over rows of five is three times as slow."""
    same: npt.NDArray[np.bool_] = some[:, 0] == others[:, 0]
    for word in range(1, WORDS):
        same &= some[:, word] == others[:, word]
    return same
