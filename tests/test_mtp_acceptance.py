"""Accepted drafts, against a server played token by token, and the loss against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank.errors import InputError
from arrowbank.mtp.acceptance import Acceptance, count_chains, count_in_order, count_rounds, nothing, round_offsets


@st.composite
def windows(draw: Any) -> tuple[Any, Any, Any, Any]:
    """Tokens, trunk's choices, drafts of J steps, lengths: few tokens, and mostly right, so that long chains happen."""
    n, t, j = draw(st.integers(1, 3)), draw(st.integers(1, 14)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    agree = draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    tokens = rng.integers(0, 4, (n, t))
    choices = rng.integers(0, 4, (n, t))
    follows = rng.random((n, t)) < agree
    choices[:, :-1] = np.where(follows[:, :-1], tokens[:, 1:], choices[:, :-1])
    drafts = rng.integers(0, 4, (j, n, t))
    for step in range(1, j + 1):
        for p in range(t - step):
            right = rng.random(n) < agree
            drafts[step - 1, :, p] = np.where(right, choices[:, p + step], drafts[step - 1, :, p])
    lengths = rng.integers(0, t + 1, n)
    return tokens, choices, drafts, lengths


class Server:
    """Plays one round from row n: what is drafted, what the trunk says, and when the text no longer tells."""

    def __init__(self, tokens: Any, choices: Any, length: int) -> None:
        self.tokens, self.choices = [int(t) for t in tokens[:length]], [int(c) for c in choices[:length]]

    def round(self, n: int, guesses: list[int], hits: list[int], rows: list[int], shift: int = 0) -> int | None:
        """How many guesses are kept; None if no round can start at row n."""
        text, said = self.tokens, self.choices
        if n + 1 >= len(text) or text[n + 1] != said[n]:
            return None
        known, kept, counted = said[n], 0, False  # `known` is the token that the next draft is fed: the trunk's
        for j, guess in enumerate(guesses, start=1):
            if n + j >= len(text) or text[n + j] != known or n + j + shift >= len(said):
                break
            counted = True
            rows[j - 1] += 1
            known = said[n + j]
            if guess != said[n + j + shift]:
                break
            hits[j - 1] += 1
            kept += 1
        return kept if counted else None


@settings(deadline=None, max_examples=200)
@given(windows(), st.sampled_from([0, 1]))
def test_chains_are_counted_as_a_server_would_from_every_row(drawn: Any, shift: int) -> None:
    tokens, choices, drafts, lengths = drawn
    hits, rows = [0] * len(drafts), [0] * len(drafts)
    for w, length in enumerate(lengths):
        server = Server(tokens[w], choices[w], length)
        for p in range(length):
            server.round(p, [int(drafts[j, w, p]) for j in range(len(drafts))], hits, rows, shift)
    found = count_chains(tokens, choices, drafts, lengths, shift=shift)
    assert (found.hits, found.rows) == (tuple(hits), tuple(rows))


@settings(deadline=None, max_examples=200)
@given(windows(), st.integers(0, 3), st.integers(0, 20))
def test_rounds_with_a_stride_are_counted_one_by_one(drawn: Any, more: int, offset: int) -> None:
    tokens, choices, drafts, lengths = drawn
    steps, rowwise = len(drafts), drafts[0]
    stride = steps + more
    offset %= stride
    hits, rows = [0] * steps, [0] * steps
    for w, length in enumerate(lengths):
        server = Server(tokens[w], choices[w], length)
        for n in range(offset, length, stride):
            guesses = [int(rowwise[w, q]) if q < rowwise.shape[1] else -9 for q in range(n, n + steps)]
            server.round(n, guesses, hits, rows)
    found = count_rounds(tokens, choices, rowwise, lengths, steps=steps, stride=stride, offset=offset)
    assert (found.hits, found.rows) == (tuple(hits), tuple(rows))


@settings(deadline=None, max_examples=200)
@given(windows())
def test_rounds_in_order_go_on_after_what_was_kept(drawn: Any) -> None:
    tokens, choices, drafts, lengths = drawn
    hits, rows = [0] * len(drafts), [0] * len(drafts)
    for w, length in enumerate(lengths):
        server, n = Server(tokens[w], choices[w], length), 0
        while n < length:
            kept = server.round(n, [int(drafts[j, w, n]) for j in range(len(drafts))], hits, rows)
            n += 1 if kept is None else kept + 1
    found = count_in_order(tokens, choices, drafts, lengths)
    assert (found.hits, found.rows) == (tuple(hits), tuple(rows))


def test_a_perfect_draft_on_the_trunks_own_text_is_accepted_whole_and_the_control_is_not() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, (3, 50))
    choices = np.concatenate([tokens[:, 1:], rng.integers(0, 1000, (3, 1))], axis=1)
    drafts = np.stack([np.roll(choices, -j, axis=1) for j in (1, 2, 3)])
    lengths = np.array([50, 50, 20])
    found = count_chains(tokens, choices, drafts, lengths)
    assert found.rates == (1.0, 1.0, 1.0)
    assert found.score == 3.0
    assert found.rows == (49 * 2 + 19, 48 * 2 + 18, 47 * 2 + 17)
    control = count_chains(tokens, choices, drafts, lengths, shift=1)
    assert control.score < 0.1
    assert control.rows[0] == 48 * 2 + 18
    in_order = count_in_order(tokens, choices, drafts, lengths)
    assert in_order.rows[0] == 13 + 13 + 5  # rounds of four tokens each over 49 and 19 rows
    counted = count_rounds(tokens, choices, np.roll(choices, -1, axis=1), lengths, steps=3, stride=5, offset=0)
    assert counted.score == 3.0
    assert counted.rows == (10 + 10 + 4, 10 + 10 + 4, 10 + 10 + 4)


def test_rates_and_score() -> None:
    counts = Acceptance(hits=(8, 3, 0), rows=(10, 6, 2)) + Acceptance(hits=(0, 0, 0), rows=(0, 0, 0))
    assert counts.rates == (0.8, 0.5, 0.0)
    assert counts.score == pytest.approx(0.8 + 0.4)
    assert counts.record() == {"hits": [8, 3, 0], "rows": [10, 6, 2], "rates": [0.8, 0.5, 0.0], "score": counts.score}
    empty = nothing(2)
    assert all(math.isnan(rate) for rate in empty.rates)
    assert empty.score == 0
    assert empty.record()["rates"] == [None, None]
    with pytest.raises(InputError, match="counts of 3 and of 2 steps"):
        counts + empty


def test_offsets_are_zero_and_half_the_stride() -> None:
    assert round_offsets(6) == (0, 3)
    assert round_offsets(5) == (0, 2)
    assert round_offsets(1) == (0,)


def test_a_stride_below_the_chain_and_odd_shapes_are_refused() -> None:
    ids = np.zeros((1, 4), np.int64)
    with pytest.raises(InputError, match="chain 3, stride 2"):
        count_rounds(ids, ids, ids, np.array([4]), steps=3, stride=2, offset=0)
    with pytest.raises(InputError, match=r"drafts \(1, 4\)"):
        count_chains(ids, ids, ids, np.array([4]))
