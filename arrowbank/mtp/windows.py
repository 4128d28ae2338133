"""The one shuffle of this package's formats: xorshift64 and Fisher-Yates, the same on any machine and for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

SEED = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def xorshift64(state: int = SEED) -> Iterator[int]:
    """The numbers that follow `state`, each of 64 bits."""
    while True:
        state ^= (state << 13) & MASK
        state ^= state >> 7
        state ^= (state << 17) & MASK
        yield state


def shuffled(count: int, numbers: Iterator[int] | None = None) -> list[int]:
    """0 … count − 1 in the order that `numbers` (by default those that follow the seed) give: Fisher-Yates, from the end."""
    order, numbers = list(range(count)), xorshift64() if numbers is None else numbers
    for i in range(count - 1, 0, -1):
        j = next(numbers) % (i + 1)
        order[i], order[j] = order[j], order[i]
    return order


Ids = npt.NDArray[np.int32]

LEAST_REAL = 16  # tokens of a short last window, beside those that the chain looks ahead
HELD_OUT_EVERY = 10


def joined(records: Iterable[Ids], tokens: int) -> Ids:
    """The records end to end, [at most `tokens`]. Reads no more of them than it needs."""
    parts, missing = [np.empty(0, np.int32)], tokens
    for record in records:
        parts.append(record[:missing])
        missing -= len(parts[-1])
        if not missing:
            break
    return np.concatenate(parts)


def window_lengths(tokens: int, window: int, least: int) -> list[int]:
    """How `tokens` tokens are cut: windows of `window`, and a last short one if it has at least `least`."""
    full, rest = divmod(tokens, window)
    return [window] * full + ([rest] if rest >= least else [])


def least_tokens(chain: int) -> int:
    """The tokens that a short last window needs to be kept."""
    return LEAST_REAL + chain


def is_held_out(index: int, *, hold_all: bool = False) -> bool:
    """Whether the window of that index, counted over all sets, is kept from training."""
    return hold_all or index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


@dataclass(frozen=True)
class PackedSet:
    """A set's tokens, [sum of lengths] int32, and how many each of its windows has."""

    name: str
    ids: Ids
    lengths: tuple[int, ...]


def pack(name: str, records: Iterable[Ids], *, tokens: int, window: int, chain: int) -> PackedSet:
    """The windows of a set from its records, which come in their shuffled order."""
    ids = joined(records, tokens)
    lengths = window_lengths(len(ids), window, least_tokens(chain))
    return PackedSet(name, ids[: sum(lengths)], tuple(lengths))


@dataclass(frozen=True)
class PackedWindows:
    """The windows of all sets in the order of the sets: what the rows of a trunk bank are about."""

    sets: Sequence[PackedSet]
    window: int
    hold_all: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Real tokens of every window, [W]."""
        return np.array([length for one in self.sets for length in one.lengths], np.int32)

    @cached_property
    def held_out(self) -> npt.NDArray[np.bool_]:
        """Which windows are kept from training, [W]."""
        return np.array([is_held_out(index, hold_all=self.hold_all) for index in range(len(self))], np.bool_)

    @cached_property
    def names(self) -> list[str]:
        """The set of every window."""
        return [one.name for one in self.sets for _ in one.lengths]

    @cached_property
    def numbers(self) -> npt.NDArray[np.int32]:
        """The index of every window in its set, [W]."""
        return np.array([number for one in self.sets for number in range(len(one.lengths))], np.int32)

    def padded(self, pad_id: int) -> Ids:
        """The token ids, [W, T] int32; what is missing of a short window is `pad_id`."""
        out = np.full((len(self), self.window), pad_id, np.int32)
        out[np.arange(self.window) < self.lengths[:, None]] = np.concatenate([one.ids for one in self.sets])
        return out
