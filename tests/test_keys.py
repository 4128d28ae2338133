"""The two key tables against a dict: the scan's growing one, and the bank's sorted file, also where sha1 prefixes collide."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank.bank.columns import ShardedColumn
from arrowbank.bank.keys import SortedKeys, sorted_keys, text_key, text_keys
from arrowbank.features.key_table import KeyTable

# few different bytes, so that whole keys, their first words and their first eight bytes all collide
digests = st.lists(st.lists(st.sampled_from([0, 1, 255]), min_size=5, max_size=5), max_size=60).map(
    lambda rows: np.array([[value for value in row for _ in range(4)] for row in rows], np.uint8).reshape(-1, 20)
)


@settings(deadline=None)
@given(st.lists(digests, max_size=6))
def test_the_growing_table_knows_what_is_new_as_a_set_does(batches: list[np.ndarray]) -> None:
    table, seen = KeyTable(), set()
    for batch in batches:
        fresh = table.add(batch.view(np.uint32))
        for row, new in zip(batch, fresh, strict=True):
            assert new == (row.tobytes() not in seen)
            seen.add(row.tobytes())
    assert len(table) == len(seen)


def test_the_growing_table_at_size() -> None:
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 1 << 32, (150_000, 5), dtype=np.uint32)
    table = KeyTable()
    assert table.add(keys).all()
    again = np.concatenate([keys[::-1], keys[:10] ^ 1])
    assert table.add(again).tolist() == [False] * len(keys) + [True] * 10


@settings(deadline=None)
@given(digests, digests)
def test_the_sorted_keys_find_as_a_dict_does(stored: np.ndarray, asked: np.ndarray) -> None:
    unique = np.unique(stored, axis=0)[::-1]
    cut = len(unique) // 2
    column = ShardedColumn([unique[:cut], unique[cut:]], np.array([0, cut, len(unique)]))
    rows = {row.tobytes(): place for place, row in enumerate(unique)}
    assert SortedKeys(sorted_keys(unique)).find(asked, column).tolist() == [rows.get(row.tobytes(), -1) for row in asked]


@given(st.lists(st.text(max_size=8), max_size=8))
def test_a_key_is_the_sha1_of_the_stripped_text(texts: list[str]) -> None:
    assert [row.tobytes() for row in text_keys(texts)] == [text_key(text) for text in texts]
    assert text_key("  a\ud800 ") == text_key("a?")


@given(st.lists(st.integers(0, 29), max_size=40), st.lists(st.integers(0, 30), max_size=3))
def test_a_sharded_column_takes_rows_as_one_array_does(rows: list[int], cuts: list[int]) -> None:
    whole = np.arange(60, dtype=np.float16).reshape(30, 2)
    starts = np.array(sorted({0, 30, *cuts}))
    parts = [whole[low:high] for low, high in itertools.pairwise(starts)]
    assert np.array_equal(ShardedColumn(parts, starts).take(rows), whole[rows])
