"""The nearest rows of a feature bank are those of a plain loop over the whole matrix."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank.bank import FeatureBank
from arrowbank.errors import CorruptBank, InputError
from arrowbank.features import nearest as module
from arrowbank.features.nearest import nearest
from arrowbank.features.search import IndexedRows
from tests.feature_banks import save_features


def plain(matrix: npt.NDArray[np.float16], query: npt.NDArray[np.float32], k: int) -> tuple[list[int], list[float]]:
    """One query, the whole matrix, every cosine, one stable sort."""
    wide, asked = matrix.astype(np.float64), query.astype(np.float64)
    asked = asked / np.linalg.norm(asked)
    cosines = [np.float32((asked * row).sum() / np.sqrt((row * row).sum())) for row in wide]
    order = sorted(range(len(matrix)), key=lambda row: (-cosines[row], row))[:k]
    return order, [float(cosines[row]) for row in order]


def unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)


def agree(bank: FeatureBank, matrix: npt.NDArray[np.float16], queries: npt.NDArray[np.float32], k: int) -> None:
    rows, cosines = nearest(bank, queries, k)
    assert rows.dtype == np.int64
    assert cosines.dtype == np.float32
    assert rows.shape == cosines.shape == (len(queries), min(k, len(matrix)))
    for number, query in enumerate(queries):
        wanted_rows, wanted_cosines = plain(matrix, query, k)
        assert rows[number].tolist() == wanted_rows
        assert cosines[number].tolist() == wanted_cosines


@pytest.mark.slow
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_bank_gives_what_a_plain_loop_gives(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    few = data.draw(st.integers(1, 60))  # small numbers of different vectors: many ties
    matrix = rng.integers(-2, 3, (few, width))[rng.integers(0, few, rows)].astype(np.float16)
    matrix[~matrix.any(axis=1)] = 1
    normalize = data.draw(st.booleans())
    stored = unit(matrix.astype(np.float32)) if normalize else matrix
    queries = rng.standard_normal((data.draw(st.integers(1, 4)), width)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        bank = save_features(
            Path(folder) / "bank",
            stored,
            normalize=normalize,
            shard_rows=data.draw(st.integers(1, 60)),
            mirror=data.draw(st.booleans()),
        )
        agree(bank, stored, queries, data.draw(st.integers(1, 70)))


@pytest.mark.slow
@pytest.mark.parametrize("mirror", [True, False])
def test_a_bank_of_many_blocks_gives_what_a_plain_loop_gives(tmp_path: Path, mirror: bool) -> None:
    rng = np.random.default_rng(1)
    width = 2048  # 512 rows a block
    matrix = unit(rng.standard_normal((2500, width)).astype(np.float32))
    matrix[1900] = matrix[3]
    bank = save_features(tmp_path / "bank", matrix, mirror=mirror, normalize=True)
    assert module.BLOCK_BYTES // (4 * width) < 1000 - 1
    agree(bank, matrix, np.concatenate([rng.standard_normal((2, width)), matrix[3:4]]).astype(np.float32), 10)


def test_only_the_rows_asked_for_count(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    matrix = unit(rng.standard_normal((900, 8)).astype(np.float32))
    bank = save_features(tmp_path / "bank", matrix, shard_rows=250, normalize=True)
    query = rng.standard_normal((1, 8)).astype(np.float32)
    among = rng.random(900) < 0.1
    among[250:500] = False
    wanted, _ = plain(matrix[among], query[0], 900)
    rows, _ = nearest(bank, query, 900, among=among)
    assert rows[0].tolist() == np.flatnonzero(among)[wanted].tolist()
    assert nearest(bank, query, 3, among=np.zeros(900, np.bool_))[0].shape == (1, 0)


def test_rows_that_are_all_equal_come_in_their_order(tmp_path: Path) -> None:
    matrix = np.full((3000, 16), 3, np.float16)
    matrix[7] = -3
    bank = save_features(tmp_path / "bank", matrix, shard_rows=700)
    rows, cosines = nearest(bank, np.ones((2, 16), np.float32), 9)
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5, 6, 8, 9]] * 2
    assert (cosines == 1).all()


def test_vectors_that_are_not_normalised_are_compared_by_angle_alone(tmp_path: Path) -> None:
    matrix = np.array([[1000, 1000], [0.001, 0], [500, 0.5]], np.float16)
    bank = save_features(tmp_path / "bank", matrix)
    rows, cosines = nearest(bank, np.array([[5, 0]], np.float32), 5)
    assert rows.tolist() == [[1, 2, 0]]
    assert cosines[0].tolist() == pytest.approx([1, 1, np.sqrt(0.5)], abs=1e-6)


def test_the_number_of_threads_does_not_change_a_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    matrix = unit(rng.standard_normal((4000, 64)).astype(np.float32))
    bank = save_features(tmp_path / "bank", matrix, normalize=True)
    queries = rng.standard_normal((5, 64)).astype(np.float32)
    before = torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            answers.append([array.tobytes() for array in nearest(bank, queries, 20)])
    finally:
        torch.set_num_threads(before)
    assert answers[0] == answers[1]
    alone = [nearest(bank, query[None], 20) for query in queries]
    assert answers[0] == [np.concatenate([pair[part] for pair in alone]).tobytes() for part in (0, 1)]


def test_no_query_gives_no_row(tmp_path: Path) -> None:
    bank = save_features(tmp_path / "bank", np.ones((3, 4), np.float16))
    rows, cosines = nearest(bank, np.empty((0, 4), np.float32), 2)
    assert rows.shape == cosines.shape == (0, 2)


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    bank = save_features(tmp_path / "bank", np.ones((3, 4), np.float16))
    with pytest.raises(InputError, match=r"shape \(1, 5\), expected \[Q, 4\]"):
        nearest(bank, np.ones((1, 5), np.float32), 1)
    with pytest.raises(InputError, match="shape"):
        nearest(bank, np.ones(4, np.float32), 1)
    with pytest.raises(InputError, match="k is 0"):
        nearest(bank, np.ones((1, 4), np.float32), 0)
    for bad in (0, np.nan, np.inf):
        with pytest.raises(InputError, match="query 1 is all zero or not finite"):
            nearest(bank, np.array([[1, 1, 1, 1], [bad] * 4], np.float32), 1)


def test_a_damaged_vector_is_no_answer(tmp_path: Path) -> None:
    matrix = np.ones((3, 4), np.float16)
    matrix[1, 2] = np.nan
    bank = save_features(tmp_path / "bank", matrix)
    assert nearest(bank, np.ones((1, 4), np.float32), 2)[0].tolist() == [[0, 2]]
    with pytest.raises(CorruptBank, match="arrowbank verify"):
        nearest(bank, np.ones((1, 4), np.float32), 3)


@pytest.mark.slow
@pytest.mark.parametrize("normalised_rows", ["random", "all equal", "many equal"])
def test_faiss_finds_the_same_rows(tmp_path: Path, normalised_rows: str) -> None:
    pytest.importorskip("faiss")
    rng = np.random.default_rng(4)
    matrix = unit(rng.standard_normal((6000, 16)).astype(np.float32))
    if normalised_rows == "all equal":
        matrix[:] = matrix[0]
    elif normalised_rows == "many equal":
        matrix[rng.integers(0, 6000, 300)] = matrix[5]
    bank = save_features(tmp_path / "bank", matrix, shard_rows=2500, normalize=True)
    queries = np.concatenate([rng.standard_normal((3, 16)), matrix[5:6]]).astype(np.float32)
    for among in (None, rng.random(6000) < 0.3):
        index = IndexedRows(bank, among)
        for k in (1, 10, 200, 9000):
            for some, others in zip(index.nearest(queries, k), nearest(bank, queries, k, among=among), strict=True):
                assert some.tobytes() == others.tobytes()
    with pytest.raises(InputError, match="k is 0"):
        index.nearest(queries, 0)


def test_faiss_gives_a_damaged_vector_as_no_answer_either(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    matrix = np.full((3, 4), 0.5, np.float16)
    matrix[1, 2] = np.nan
    index = IndexedRows(save_features(tmp_path / "bank", matrix, normalize=True))
    assert index.nearest(np.ones((1, 4), np.float32), 2)[0].tolist() == [[0, 2]]
    with pytest.raises(CorruptBank, match="arrowbank verify"):
        index.nearest(np.ones((1, 4), np.float32), 3)


def test_faiss_refuses_a_bank_that_is_not_normalised(tmp_path: Path) -> None:
    bank = save_features(tmp_path / "bank", np.ones((3, 4), np.float16))
    with pytest.raises(InputError, match="faiss has no cosine"):
        IndexedRows(bank)
