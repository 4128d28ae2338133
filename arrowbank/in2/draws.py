"""A stream of draws, equal to CPython's `random.Random(seed)` to the bit, taken in blocks.

`below(n)` is the top `n.bit_length()` bits of the next 32-bit word, drawn again while that is n or more. The order of draws is
part of the format: a stream counts the words that it has used, so that draws one at a time and draws in blocks can be mixed.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

FIRST_WORDS = 256
M = 1_000_003


def base_seed(seed: int, length: int, example: int) -> int:
    """What the three streams of example `example` (its index over all shards) of `length` tokens start from."""
    return ((seed * M + length) * M + example) * M


class Stream:
    """The draws of one seed. `words` is how many 32-bit words are likely to be used: more are made when they are."""

    def __init__(self, seed: int, words: int = FIRST_WORDS) -> None:
        self._random = random.Random(seed)
        self._words = self._make(words)
        self._at = 0

    def _make(self, count: int) -> Words:
        return np.frombuffer(self._random.randbytes(4 * count), "<u4")

    def _more(self) -> None:
        self._words = np.concatenate([self._words, self._make(max(FIRST_WORDS, len(self._words)))])

    def peek(self, count: int, shift: int = 0) -> list[int]:
        """The next `count` words without their lowest `shift` bits. They stay unused until `skip`."""
        while len(self._words) - self._at < count:
            self._more()
        words: list[int] = (self._words[self._at : self._at + count] >> np.uint32(shift)).tolist()
        return words

    def skip(self, count: int) -> None:
        """Use `count` words that were peeked at."""
        self._at += count

    def below(self, n: int) -> int:
        """One number in [0, n), 0 < n < 2^32."""
        shift = 32 - n.bit_length()
        while True:
            (word,) = self.peek(1)
            self.skip(1)
            if (value := word >> shift) < n:
                return value

    def many_below(self, n: int, count: int) -> Words:
        """`count` numbers below n, [count] uint32."""
        if not count:
            return np.empty(0, np.uint32)
        shift = np.uint32(32 - n.bit_length())
        while True:
            values = self._words[self._at :] >> shift
            good = np.flatnonzero(values < n)
            if len(good) >= count:
                break
            self._more()
        self._at += int(good[count - 1]) + 1
        taken: Words = values[good[:count]]
        return taken


def first_below(seed: int, n: int) -> int:
    """The first number below n of a stream of which nothing else is wanted; n may be past 2^32."""
    stream = random.Random(seed)
    bits = n.bit_length()
    while (value := stream.getrandbits(bits)) >= n:
        pass
    return value
