"""How trainers number the layers of a target model, and the one place where numbers are converted.

Ours (`block_output`): id i is what decoder block i puts out, −1 the embeddings. Counted by what goes into a block
(`block_input`), the same hidden states have ids one higher, and the embeddings are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from arrowbank.bank.targets import BLOCK_OUTPUT

BLOCK_INPUT = "block_input"
SHIFT = {BLOCK_OUTPUT: 0, BLOCK_INPUT: 1}


def theirs(ids: Sequence[int], convention: str) -> list[int]:
    """Our layer ids as a trainer of `convention` counts them."""
    return [layer + SHIFT[convention] for layer in ids]


def ours(ids: Sequence[int], convention: str) -> tuple[int, ...]:
    """A trainer's layer ids as we count them."""
    return tuple(layer - SHIFT[convention] for layer in ids)
