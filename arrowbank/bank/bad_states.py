"""Hidden states that no trainer can use, found while they pass: NaN and Inf, vectors of one value, one vector at every position.

A failed kernel or an empty buffer gives zeros, a broken gather gives the same vector everywhere. Both are finite, and a draft that
learns from them learns nothing. One place looks for all of them: import, capture and export call it for every sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from arrowbank.bank.floats import MAGNITUDE, Bits, all_finite, nonfinite
from arrowbank.errors import BadVector

REPEATED = 8  # positions from which on the same vector at all of them is a fault


@dataclass
class BadStates:
    """Layer → values that are NaN or Inf; layer → vectors that are all zero, one value, or the same at every position."""

    nonfinite: dict[str, int] = field(default_factory=dict)
    constant: dict[str, int] = field(default_factory=dict)
    first: int = 0

    def __bool__(self) -> bool:
        return bool(self.nonfinite or self.constant)

    def __str__(self) -> str:
        kinds = (
            ("values that are NaN or Inf", self.nonfinite),
            ("vectors that are all zero, one value throughout, or the same at every position", self.constant),
        )
        listed = [
            f"{kind} ({', '.join(f'{count} in layer {layer}' for layer, count in counts.items())})"
            for kind, counts in kinds
            if counts
        ]
        return f"{' and '.join(listed)}, first at hidden state {self.first}"


def find_bad_states(hidden: Bits, layers: Sequence[str], ids: npt.NDArray[np.int32]) -> BadStates:
    """What is wrong with `hidden` [K, L·H], bfloat16 bits of the tokens `ids` [K].

    The same token at every position gives the same vector at every position in a sound model: there it is no fault.
    """
    found = BadStates()
    if not hidden.size:
        return found
    states = hidden.reshape(len(hidden), len(layers), -1)
    bad = np.zeros(states.shape[:2], np.bool_)
    if not all_finite(hidden):
        values = nonfinite(states)
        bad |= values.any(axis=2)
        found.nonfinite = _by_layer(layers, values.sum(axis=(0, 2)))
    constant = _constant(states)
    if len(states) >= REPEATED and (ids != ids[0]).any():
        constant |= _repeated(states)[None, :]
    constant &= ~bad
    if constant.any():
        found.constant = _by_layer(layers, constant.sum(axis=0))
    if found:
        found.first = int(np.flatnonzero((bad | constant).any(axis=1))[0])
    return found


def refuse_bad_states(
    where: str, hidden: Bits, layers: Sequence[str], ids: npt.NDArray[np.int32], *, remedy: str, keep: bool = False
) -> BadStates:
    """What `find_bad_states` finds, with `keep`; without it BadVector for anything."""
    found = find_bad_states(hidden, layers, ids)
    if found and not keep:
        raise BadVector(f"{where}: {found} of {len(hidden)}. {remedy}")
    return found


def _by_layer(layers: Sequence[str], counts: npt.NDArray[np.int64]) -> dict[str, int]:
    return {layer: int(count) for layer, count in zip(layers, counts, strict=True) if count}


def _constant(states: Bits) -> npt.NDArray[np.bool_]:
    """Which vectors of [K, L, H] are of one value, +0 and −0 alike. The first two elements rule out nearly all."""
    found: npt.NDArray[np.bool_] = np.zeros(states.shape[:2], np.bool_)
    if states.shape[2] < 2:  # one element says nothing
        return found
    one, two = states[..., 0], states[..., 1]
    maybe = np.nonzero((one == two) | ((one | two) & MAGNITUDE == 0))
    vectors = states[maybe]
    found[maybe] = (vectors == vectors[:, :1]).all(axis=1) | ~(vectors & MAGNITUDE).any(axis=1)
    return found


def _repeated(states: Bits) -> npt.NDArray[np.bool_]:
    """In which layers of [K, L, H] all vectors are the first one."""
    found: npt.NDArray[np.bool_] = (states[0] == states[1]).all(axis=1)
    for layer in np.flatnonzero(found):
        found[layer] = bool((states[:, layer] == states[0, layer]).all())
    return found
