"""Draws and places are those of CPython's generator taken one at a time, for any options."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank import In2Config
from arrowbank.errors import InputError
from arrowbank.in2.draws import Stream, first_below
from arrowbank.in2.placement import Placement
from tests.arms import NoPlace, as_written

BOUNDS = st.integers(1, 2**32 - 1) | st.integers(1, 40) | st.integers(0, 31).map(lambda bits: 1 << bits)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**80), st.integers(1, 40), st.lists(st.tuples(BOUNDS, st.integers(1, 90), st.booleans()), max_size=8))
def test_draws_in_blocks_and_one_at_a_time_are_cpythons(seed: int, words: int, draws: list[tuple[int, int, bool]]) -> None:
    theirs, ours = random.Random(seed), Stream(seed, words)
    for bound, count, at_once in draws:
        wanted = [theirs.randrange(bound) for _ in range(count)]
        found = ours.many_below(bound, count).tolist() if at_once else [ours.below(bound) for _ in range(count)]
        assert found == wanted
    assert ours.peek(3) == [theirs.getrandbits(32) for _ in range(3)]


@given(st.integers(0, 2**80), st.integers(1, 2**70))
def test_a_single_draw_may_be_past_a_word(seed: int, bound: int) -> None:
    assert first_below(seed, bound) == random.Random(seed).randrange(bound)


@st.composite
def options(draw: st.DrawFn) -> In2Config:
    """Options from easy to so tight that something finds no place."""
    key_len, val_len, min_distance = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(0, 40))
    span, triples = key_len + val_len, draw(st.integers(1, 12))
    least = span + min_distance + 4 + span + 2 * span * triples
    return In2Config(
        arm=draw(st.sampled_from("abc")),
        length=least + draw(st.integers(1, 40) | st.integers(1, 600)),
        examples=5,
        triples=triples,
        key_len=key_len,
        val_len=val_len,
        alphabet=draw(st.integers(1, 1024)),
        decoys=draw(st.none() | st.integers(0, 60)),
        min_distance=min_distance,
        seed=draw(st.integers(0, 2**40)),
        vocab=1024,
    )


@settings(max_examples=150, deadline=None)
@given(options(), st.integers(0, 4))
def test_places_are_those_of_the_draws_as_written(config: In2Config, example: int) -> None:
    filler = np.full(config.length + 7, 1023, np.uint16)
    try:
        wanted = as_written(config, [filler], example)
    except NoPlace:
        with pytest.raises(InputError, match=f"example {example}:"):
            Placement(config).place(example)
        return
    found = Placement(config).place(example)
    tokens = np.full(config.length, 1023)
    for starts, spans in ((found.sites, found.spans), (found.needles, found.spans), (found.decoys, found.decoy_spans)):
        assert len(starts) == len(spans)
        for start, span in zip(starts, spans, strict=True):
            tokens[start : start + config.span] = span
    assert tokens.tolist() == wanted.tokens
    assert [(one["needle_start"], one["probe_start"]) for one in wanted.records] == list(
        zip(found.needles, found.sites, strict=True)
    )
    assert len(found.decoys) == wanted.decoys
