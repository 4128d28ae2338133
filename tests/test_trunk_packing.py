"""Packing: the order of the format, and joins, cuts and caps held against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowbank.mtp.trunk_records import PackedWindows, is_held_out, joined, pack, shuffled, window_lengths

RECORDS = st.lists(st.lists(st.integers(0, 99), max_size=12), max_size=30)


def arrays(records: list[list[int]]) -> list[np.ndarray]:
    return [np.array(record, np.int32) for record in records]


def plain_order(count: int) -> list[int]:
    """The shuffle as the format's page spells it."""
    items, x = list(range(count)), 0x9E3779B97F4A7C15
    for i in range(count - 1, 0, -1):
        x = (x ^ (x << 13)) % 2**64
        x = (x ^ (x >> 7)) % 2**64
        x = (x ^ (x << 17)) % 2**64
        at = x % (i + 1)
        items[i], items[at] = items[at], items[i]
    return items


def plain_windows(records: list[list[int]], tokens: int, window: int, least: int) -> list[list[int]]:
    stream = [token for record in records for token in record][:tokens]
    windows = []
    while len(stream) >= window:
        windows.append(stream[:window])
        stream = stream[window:]
    if len(stream) >= least:
        windows.append(stream)
    return windows


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (8, [2, 1, 3, 6, 7, 0, 4, 5]),
        (20, [10, 17, 2, 14, 3, 11, 19, 8, 5, 1, 18, 7, 15, 13, 0, 16, 12, 6, 4, 9]),
        (1, [0]),
        (0, []),
    ],
)
def test_the_order_is_that_of_the_format(count: int, expected: list[int]) -> None:
    assert shuffled(count) == expected


@given(st.integers(0, 400))
def test_the_order_is_a_permutation_made_as_the_page_says(count: int) -> None:
    assert sorted(shuffled(count)) == list(range(count))
    assert shuffled(count) == plain_order(count)


@given(RECORDS, st.integers(1, 200), st.integers(1, 40), st.integers(1, 9))
def test_windows_are_those_of_a_plain_loop(records: list[list[int]], tokens: int, window: int, chain: int) -> None:
    packed = pack("a", iter(arrays(records)), tokens=tokens, window=window, chain=chain)
    expected = plain_windows(records, tokens, window, 16 + chain)
    windows = PackedWindows([packed], window)
    padded = windows.padded(99)
    assert packed.lengths == tuple(map(len, expected))
    assert [row[:length].tolist() for row, length in zip(padded, windows.lengths, strict=True)] == expected
    assert all((row[length:] == 99).all() for row, length in zip(padded, windows.lengths, strict=True))
    assert packed.ids.tolist() == [token for window in expected for token in window]


@given(RECORDS, st.integers(1, 60))
def test_no_more_records_are_read_than_the_cap_needs(records: list[list[int]], tokens: int) -> None:
    read = []

    def reading() -> object:
        for record in arrays(records):
            read.append(len(record))
            yield record

    found = joined(reading(), tokens)  # type: ignore[arg-type]
    assert len(found) == min(tokens, sum(map(len, records)))
    assert sum(read[:-1]) < tokens or not read


@pytest.mark.parametrize(("rest", "kept"), [(18, []), (19, [19]), (0, []), (63, [63])])
def test_a_short_last_window_needs_sixteen_tokens_and_the_chain(rest: int, kept: list[int]) -> None:
    assert window_lengths(128 + rest, 64, 16 + 3) == [64, 64, *kept]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_every_tenth_window_over_all_sets_is_held_out(counts: list[int]) -> None:
    sets = [pack(f"s{i}", arrays([[7] * 32 * count]), tokens=10**6, window=32, chain=1) for i, count in enumerate(counts)]
    windows, all_out = PackedWindows(sets, 32), PackedWindows(sets, 32, hold_all=True)
    assert windows.held_out.tolist() == [index % 10 == 9 for index in range(sum(counts))]
    assert all_out.held_out.all()
    assert windows.numbers.tolist() == [number for count in counts for number in range(count)]
    assert windows.names == [f"s{i}" for i, count in enumerate(counts) for _ in range(count)]
    assert is_held_out(9)
    assert not is_held_out(0)
