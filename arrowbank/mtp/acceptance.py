"""How many drafted tokens a server would keep, counted on text that lies there.

A window is T tokens t_0 … of which `length` are real; `choices` are the trunk's most likely next tokens: choices[p] is for token p + 1.
At chain step j a draft for row p predicts token p + j + 1, and is right where it says choices[p + j]. A server drafts onto the trunk's
own text, so row p counts at step j only while the text has followed the trunk since p (t_{p+i} = choices[p + i − 1] for i = 1 … j) and
all earlier drafts of the chain were right. Everything here is NumPy on the CPU; N windows, J steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.errors import InputError

Ints = npt.NDArray[Any]
Counted = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """hits[j − 1] of rows[j − 1] that got to step j were the trunk's choice. Counts add up with +."""

    hits: tuple[int, ...]
    rows: tuple[int, ...]

    def __add__(self, other: Acceptance) -> Acceptance:
        if len(self.hits) != len(other.hits):
            raise InputError(f"counts of {len(self.hits)} and of {len(other.hits)} steps do not add up")
        return Acceptance(
            hits=tuple(a + b for a, b in zip(self.hits, other.hits, strict=True)),
            rows=tuple(a + b for a, b in zip(self.rows, other.rows, strict=True)),
        )

    @property
    def rates(self) -> tuple[float, ...]:
        """hits / rows of each step; NaN where no row got there."""
        return tuple(hits / rows if rows else math.nan for hits, rows in zip(self.hits, self.rows, strict=True))

    @property
    def score(self) -> float:
        """Σ_j Π_{i ≤ j} rate_i: expected accepted drafts a round, 0 to J. It ends at the first step that no row got to."""
        total, product = 0.0, 1.0
        for rate in self.rates:
            if math.isnan(rate):
                break
            product *= rate
            total += product
        return total

    def record(self) -> dict[str, Any]:
        """JSON-able: hits and rows by step, rates (None where no row got there) and the score."""
        rates = [None if math.isnan(rate) else rate for rate in self.rates]
        return {"hits": list(self.hits), "rows": list(self.rows), "rates": rates, "score": self.score}


def nothing(steps: int) -> Acceptance:
    """No rows at any of `steps` steps: where a sum starts."""
    return Acceptance(hits=(0,) * steps, rows=(0,) * steps)


def count_chains(tokens_NT: Ints, choices_NT: Ints, drafts_JNT: Ints, lengths_N: Ints, *, shift: int = 0) -> Acceptance:
    """Every row p starts a chain; drafts[j − 1, n, p] is the token that it drafts at step j.

    Raises InputError for shapes that do not fit. `shift=1` is the control: the drafts are held against the choices one row later,
    and nearly all must miss.
    """
    _check(tokens_NT, choices_NT, drafts_JNT, lengths_N)
    return _counts(_steps(tokens_NT, choices_NT, drafts_JNT, lengths_N, shift))


def count_rounds(
    tokens_NT: Ints,
    choices_NT: Ints,
    drafts_NT: Ints,
    lengths_N: Ints,
    *,
    steps: int,
    stride: int,
    offset: int,
    shift: int = 0,
) -> Acceptance:
    """Rounds start at rows n = offset, offset + stride …; drafts[·, q] is what row q = n + j − 1 drafts at its step j of the round.

    Row q counts while the text at q + 1 is the trunk's choice, and is right where it says choices[q + 1]; the first miss ends the
    round. Raises InputError for shapes that do not fit, and for a stride shorter than the chain.
    """
    if not 1 <= steps <= stride or not 0 <= offset < stride:
        raise InputError(
            f"chain {steps}, stride {stride}, offset {offset}: expected 1 ≤ chain ≤ stride and 0 ≤ offset < stride"
        )
    rows = tokens_NT.shape[1]
    starts = np.arange(offset, rows, stride)
    # what a row drafts at step j as a chain from n: the row itself is j − 1 further on
    taken = [np.minimum(starts + step, rows - 1) for step in range(steps)]
    drafts = np.stack([_scattered(drafts_NT[:, at], starts, tokens_NT.shape) for at in taken])
    _check(tokens_NT, choices_NT, drafts, lengths_N)
    begins = np.zeros(rows, np.bool_)
    begins[starts] = True
    return _counts(
        (reached & begins, right & begins) for reached, right in _steps(tokens_NT, choices_NT, drafts, lengths_N, shift)
    )


def round_offsets(stride: int) -> tuple[int, ...]:
    """The offsets at which rounds of a stride are counted: 0 and half of it."""
    return (0, stride // 2) if stride > 1 else (0,)


def count_in_order(tokens_NT: Ints, choices_NT: Ints, drafts_JNT: Ints, lengths_N: Ints, *, shift: int = 0) -> Acceptance:
    """Rounds one after another as a server runs them: from row n the next starts at n + kept + 1, where `kept` drafts were right.

    A row whose next token is not the trunk's choice is stepped over. drafts as in `count_chains`. rows[0] is the number of rounds.
    """
    _check(tokens_NT, choices_NT, drafts_JNT, lengths_N)
    steps = list(_steps(tokens_NT, choices_NT, drafts_JNT, lengths_N, shift))
    kept_NT = sum((right.astype(np.int64) for _, right in steps), np.zeros(tokens_NT.shape, np.int64))
    begins = np.zeros(tokens_NT.shape, np.bool_)
    for window, kept in enumerate(kept_NT.tolist()):
        row, starts = 0, np.flatnonzero(steps[0][0][window])
        for start in starts.tolist():  # rows whose next token is the trunk's choice
            if start >= row:
                begins[window, start] = True
                row = start + kept[start] + 1
    return _counts((reached & begins, right & begins) for reached, right in steps)


def _steps(
    tokens_NT: Ints, choices_NT: Ints, drafts_JNT: Ints, lengths_N: Ints, shift: int
) -> Iterator[tuple[Counted, Counted]]:
    """For each step j: which rows [N, T] got there, and which of them were right."""
    rows = tokens_NT.shape[1]
    reached = np.ones(tokens_NT.shape, np.bool_)
    for step, drafts_NT in enumerate(drafts_JNT, start=1):
        real = np.arange(rows) + step + shift < np.asarray(lengths_N)[:, None]  # the row of the target is a real one
        reached = reached & real & (_ahead(tokens_NT, step) == _ahead(choices_NT, step - 1))
        right = reached & (drafts_NT == _ahead(choices_NT, step + shift))
        yield reached, right
        reached = right


def _counts(steps: Iterable[tuple[Counted, Counted]]) -> Acceptance:
    found = [(int(np.count_nonzero(right)), int(np.count_nonzero(reached))) for reached, right in steps]
    return Acceptance(hits=tuple(hits for hits, _ in found), rows=tuple(rows for _, rows in found))


def _ahead(values_NT: Ints, by: int) -> Ints:
    """values[p + by] at every row p; −1 past the end, where no row counts."""
    moved = np.full(values_NT.shape, -1, np.int64)
    if by < values_NT.shape[1]:
        moved[:, : values_NT.shape[1] - by] = values_NT[:, by:]
    return moved


def _scattered(values_NS: Ints, at_S: Ints, shape: tuple[int, ...]) -> Ints:
    """[N, T] with a column of `values` at each of the rows `at`, −1 elsewhere."""
    spread = np.full(shape, -1, np.int64)
    spread[:, at_S] = values_NS
    return spread


def _check(tokens_NT: Ints, choices_NT: Ints, drafts_JNT: Ints, lengths_N: Ints) -> None:
    shape = tokens_NT.shape
    fits = len(shape) == 2 and choices_NT.shape == shape and drafts_JNT.shape[1:] == shape and np.shape(lengths_N) == shape[:1]
    if not fits or not len(drafts_JNT):
        found = f"tokens {shape}, choices {choices_NT.shape}, drafts {drafts_JNT.shape}, lengths {np.shape(lengths_N)}"
        raise InputError(f"counting got {found}; expected [N, T], [N, T], [steps, N, T] and [N]")
