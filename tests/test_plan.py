"""The plan: every row in exactly one batch of rows of its own length, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowbank.engine.plan import BatchRules, batch_counts, batches, gather, rows_a_shard, shard_ranges
from arrowbank.errors import InputError

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=200).map(lambda values: np.array(values, np.int32))
rules = st.builds(BatchRules, max_batch=st.integers(1, 9), token_budget=st.integers(1, 90))


@given(lengths, rules)
def test_batches_partition_the_rows_by_exact_length(lengths: np.ndarray, rules: BatchRules) -> None:
    plan = list(batches(lengths, rules))
    rows = np.concatenate([batch.rows for batch in plan])
    assert sorted(rows) == list(range(len(lengths)))
    for batch in plan:
        assert set(lengths[batch.rows]) == {batch.length}
        assert len(batch.rows) <= rules.max_batch
        assert len(batch.rows) == 1 or len(batch.rows) * batch.length <= rules.token_budget
    assert [batch.length for batch in plan] == sorted((batch.length for batch in plan), reverse=True)


@given(lengths, rules, st.integers(1, 50))
def test_counts_are_those_of_the_batches(lengths: np.ndarray, rules: BatchRules, shard_rows: int) -> None:
    shards = shard_ranges([len(lengths)], shard_rows)
    planned, ideal = batch_counts(lengths, shards, rules)
    assert planned == sum(len(list(batches(lengths[shard.start : shard.stop], rules))) for shard in shards)
    assert ideal == len(list(batches(lengths, rules))) <= planned


@given(lengths, rules)
def test_gather_takes_the_tokens_of_each_row(lengths: np.ndarray, rules: BatchRules) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = np.arange(offsets[-1], dtype=np.int32)
    for batch in batches(lengths, rules):
        ids = gather(values, offsets, batch)
        assert ids.dtype == np.int32
        assert [list(row) for row in ids] == [list(values[offsets[row] : offsets[row + 1]]) for row in batch.rows]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 25))
def test_shards_are_contiguous_and_a_grown_bank_keeps_the_old_ones(steps: list[int], shard_rows: int) -> None:
    generations = [int(end) for end in np.cumsum(steps)]
    shards = shard_ranges(generations, shard_rows)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert [shard.start for shard in shards] == [0, *[shard.stop for shard in shards[:-1]]]
    assert shards[-1].stop == generations[-1]
    assert all(shard.rows <= shard_rows for shard in shards)
    old = shard_ranges(generations[:-1], shard_rows)
    assert shards[: len(old)] == old


def test_a_shard_holds_at_most_one_gibibyte_of_vectors() -> None:
    assert rows_a_shard(65_536, 2 * 2560) == 65_536
    assert rows_a_shard(65_536, 2 * 16_384) == 32_768
    assert rows_a_shard(65_536, 1 << 31) == 1


def test_the_numbers_of_the_design() -> None:
    assert [BatchRules().size(length) for length in (1, 64, 65, 256, 8192, 9000)] == [128, 128, 126, 32, 1, 1]


@pytest.mark.parametrize("field", ["max_batch", "token_budget"])
def test_rules_below_one_are_refused(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} is 0"):
        BatchRules(**{field: 0})
