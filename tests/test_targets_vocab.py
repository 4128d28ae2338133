"""`targets vocab`: the most frequent loss tokens, and both maps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from arrowbank import ImportConfig, import_targets
from arrowbank.errors import InputError
from arrowbank.targets.vocab import map_path, vocab_map, write_vocab_map
from tests.dumps import make_dump

CONFIG = ImportConfig(target_model="m", target_layer_ids=(1, 11, 21), loss_mask="from_dump", vocab_size=100)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_the_maps_are_of_the_most_frequent_tokens(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    made = vocab_map(np.array(counts), size)
    chosen = sorted(sorted(range(len(counts)), key=lambda token: (-counts[token], token))[:size])
    assert made.d2t.dtype == np.int64
    assert [draft + int(shift) for draft, shift in enumerate(made.d2t)] == chosen
    assert np.flatnonzero(made.t2d).tolist() == chosen
    assert len(made.t2d) == len(counts)


def test_only_loss_tokens_count(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "dump", (50, 60), vocab=20)
    import_targets(CONFIG, tmp_path / "dump", tmp_path / "bank")
    counts = Counter(
        token
        for one in made
        for token, counted in zip(one["input_ids"].tolist(), one["loss_mask"].tolist(), strict=True)
        if counted
    )
    found = write_vocab_map(tmp_path / "bank", 7)
    chosen = sorted(sorted(counts, key=lambda token: (-counts[token], token))[:7])
    assert np.flatnonzero(found.t2d).tolist() == chosen
    assert found.coverage == pytest.approx(sum(counts[token] for token in chosen) / counts.total())
    back = load_file(map_path(tmp_path / "bank", 7))
    assert np.array_equal(back["d2t"], found.d2t)
    assert np.array_equal(back["t2d"], found.t2d)


@pytest.mark.parametrize(
    ("size", "vocab", "words"),
    [(0, None, "expected 1 to 100"), (101, None, "expected 1 to 100"), (5, 3, "has token id")],
)
def test_sizes_that_do_not_fit(tmp_path: Path, size: int, vocab: int | None, words: str) -> None:
    make_dump(tmp_path / "dump", (5, 6))
    import_targets(CONFIG, tmp_path / "dump", tmp_path / "bank")
    with pytest.raises(InputError, match=words):
        write_vocab_map(tmp_path / "bank", size, vocab_size=vocab)
    assert not list((tmp_path / "bank").glob("*.safetensors"))


def test_a_vocabulary_that_nobody_told_must_be_told(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump", (5, 6))
    import_targets(ImportConfig(target_model="m"), tmp_path / "dump", tmp_path / "bank")
    with pytest.raises(InputError, match="Give --vocab-size"):
        write_vocab_map(tmp_path / "bank", 5)
    assert len(write_vocab_map(tmp_path / "bank", 5, vocab_size=200).t2d) == 200
