"""The one shuffle of this package's formats: xorshift64 and Fisher-Yates, the same on any machine and for ever."""

from __future__ import annotations

from collections.abc import Iterator

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
