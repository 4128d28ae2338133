"""The parts of a report that are plain functions: escaping, ticks, histograms, samples, the projection, the pace of a build."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from arrowbank.drawing.frame import Table
from arrowbank.drawing.markup import Markup, Scale, data_script, escape, labels, log_ticks, number, percent, tag, ticks
from arrowbank.drawing.plots import histogram, shares
from arrowbank.errors import CorruptBank, InputError
from arrowbank.features.audit import read_audit
from arrowbank.report.atlas import find_neighbours, grouping, project
from arrowbank.report.build_log import read_pace
from arrowbank.report.drafts import entropy
from arrowbank.report.sample import spread_rows
from arrowbank.report.write import ReportConfig
from tests.feature_banks import save_features

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


class Reader(HTMLParser):
    """What a parser sees: elements with their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0")))
def test_a_text_is_read_back_as_it_was_and_makes_no_element(text: str) -> None:
    read = Reader(tag("p", {"title": text}, text))
    assert read.elements == [("p", {"title": text})]
    assert read.text == text


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_data_in_a_script_cannot_end_it_and_is_read_back(value: object) -> None:
    script = data_script("d", value)
    inside = script.removeprefix('<script type="application/json" id="d">').removesuffix("</script>")
    assert not set("<>&\u2028\u2029") & set(inside)
    kept = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))  # a lone surrogate is `?`
    assert json.loads(inside) == kept


def test_only_markup_is_put_in_as_it_is() -> None:
    assert tag("p", None, "<b>", Markup("<i>")) == "<p>&lt;b&gt;<i></p>"
    assert escape("\ud800<") == "?&lt;"
    assert tag("rect", {"x": 1.0, "y": 0.125, "hidden": None, "open": True}) == '<rect x="1" y="0.12" open/>'


@given(FINITE, FINITE, st.integers(1, 40))
def test_ticks_are_evenly_spaced_and_inside(one: float, other: float, count: int) -> None:
    low, high = sorted((one, other))
    found = ticks(low, high, count)
    assert found
    assert all(low <= value <= high for value in found)
    assert len(found) <= 2.5 * count + 2
    if len(found) > 2:
        steps = np.diff(found)
        assert np.allclose(steps[1:-1], steps[1:-1].mean() if len(steps) > 2 else 0, rtol=1e-6, atol=1e-6 * abs(steps).max())
        assert (steps > 0).all()


@given(st.floats(1e-9, 1e9), st.floats(1.001, 1e9))
def test_logarithmic_ticks_are_inside_and_ascend(low: float, times: float) -> None:
    found = log_ticks(low, low * times)
    assert found
    assert found == sorted(set(found))
    assert all(low * (1 - 1e-6) <= value <= low * times * (1 + 1e-6) for value in found)


@given(st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=8, unique=True))
def test_labels_tell_ticks_apart(values: list[int]) -> None:
    shown = labels(ticks(float(min(values)), float(max(values))))
    assert len(set(shown)) == len(shown)


def test_numbers_are_said_in_few_digits() -> None:
    assert [number(value) for value in (0, 1234, 1234.5, 0.012345, -3.14159, None, math.nan)] == [
        "0", "1,234", "1,234", "0.0123", "−3.14", "–", "–",
    ]  # fmt: skip
    assert [percent(part, 200) for part in (0, 0.1, 25, 199.999, 200)] == ["0.0 %", "< 0.1 %", "12.5 %", "> 99.9 %", "100 %"]
    assert labels([0.0, 25000.0, 50000.0]) == ["0", "25k", "50k"]
    assert labels([0.0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]


def test_a_scale_goes_both_ways_and_in_decades() -> None:
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(3.5, -0.5, 0, 40)(-0.5) == 40
    assert Scale(1, 100, 0, 10, log=True)(10) == pytest.approx(5)
    assert Scale(0, 1, 0, 1).ticks(4, whole=True) == [0, 1]


@given(arrays(np.float64, st.integers(0, 60), elements=st.floats(-1e9, 1e9) | st.just(math.nan)))
def test_a_histogram_counts_every_finite_value_once(values: np.ndarray) -> None:
    found = histogram(values)
    assert found.counts.sum() == np.isfinite(values).sum()
    assert (np.diff(found.edges) > 0).all()
    assert len(found.counts) == len(found.edges) - 1 <= 90


@given(arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 5000)))
def test_a_histogram_of_whole_numbers_has_whole_bins(values: np.ndarray) -> None:
    found = histogram(values, whole=True)
    assert found.counts.sum() == len(values)
    widths = np.diff(found.edges)
    assert (widths == widths[0]).all()
    assert float(widths[0]).is_integer()
    assert 9 <= len(found.counts) <= 34
    assert found.edges[0] >= -0.5


@given(st.integers(0, 10**12), st.integers(1, 500))
def test_a_sample_is_spread_over_all_rows_and_has_none_twice(total: int, at_most: int) -> None:
    rows = spread_rows(total, at_most)
    assert len(rows) == min(total, at_most)
    assert (np.diff(rows) > 0).all()
    assert not len(rows) or (rows[0] == 0 and rows[-1] < total and rows[-1] >= total - total / len(rows) - 1)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_the_projection_is_that_of_a_singular_value_decomposition(count: int, width: int, seed: int) -> None:
    vectors = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    found = project(vectors)
    centred = vectors - vectors.mean(axis=0, dtype=np.float64)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    wanted = np.zeros((count, 2))
    shown = min(2, len(values))
    wanted[:, :shown] = (left * values)[:, :shown]
    assert np.allclose(np.abs(found.places), np.abs(wanted), atol=1e-5)
    assert found.explained.sum() == pytest.approx(1 if count > 1 else 0, abs=1e-9)
    assert np.allclose(found.explained[:shown], (values**2 / max(1e-30, (values**2).sum()))[:shown], atol=1e-6)


def test_vectors_that_no_encode_has_stored_are_the_banks_fault(tmp_path: Path) -> None:
    vectors = np.eye(4, 8, dtype=np.float16)
    vectors[2] = 0
    bank = save_features(tmp_path / "bank", vectors)
    with pytest.raises(CorruptBank, match="the vector of row 2 is not finite or all zero"):
        find_neighbours(bank, np.array([0, 2]), vectors[[0, 2]].astype(np.float32), 2)


def test_small_groups_are_one() -> None:
    values = [str(number) for number in range(9) for _ in range(10 - number)]
    found = grouping("kind", [*values, "new"], len(values))
    assert found.groups == ["0", "1", "2", "3", "4", "other"]
    assert found.of_text[-1] == 5


def test_entropy_of_even_odds_is_their_logarithm() -> None:
    probs = np.array([[0.25, 0.25, 0.25], [1.0, 0.0, 0.0]])
    assert entropy(probs, np.array([0.25, 0.0])) == pytest.approx([math.log(4), 0])


def test_the_pace_leaves_pauses_out_and_passes_over_a_cut_line(tmp_path: Path) -> None:
    log = tmp_path / "build.jsonl"
    times = [100.0, 110.0, 120.0, 90_000.0, 90_010.0]
    lines = [json.dumps({"time": time, "host": "a", "event": "shard", "rows": 5}) for time in times]
    log.write_text("\n".join([*lines, json.dumps({"event": "commit", "time": 1}), '{"time": 90']))
    pace = read_pace(log)
    assert pace.at == [0, 10, 20, 20, 30]
    assert pace.rows == [5, 10, 15, 20, 25]
    assert pace.pauses == [89_880.0]
    assert read_pace(tmp_path / "absent").at == []


def test_a_long_table_says_how_much_is_left_out() -> None:
    read = Reader(Table(("a", "b"), [(row, "x") for row in range(1000)]).markup("rows"))
    assert sum(name == "tr" for name, _ in read.elements) == 121
    assert "and 880 more rows" in read.text


@pytest.mark.parametrize("options", [{"points": -1}, {"points": 5001}, {"neighbours": 0}, {"neighbours": 21}])
def test_options_that_make_no_page_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="expected at least"):
        ReportConfig(**options)  # type: ignore[arg-type]


def test_a_file_that_is_no_audit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text('{"threshold": "high", "rows": []}')
    with pytest.raises(InputError, match=r"audit\.json: not an audit .*threshold"):
        read_audit(tmp_path / "audit.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_audit(tmp_path / "absent.json")


def test_of_very_many_names_the_smallest_are_one_bar() -> None:
    plot = shares("Sources", {f"<{number}>": 100 - number for number in range(100)}, x_label="texts", summary="Many.")
    names = [row[0] for row in plot.table.rows]
    assert (len(names), names[0], names[-1]) == (20, "<0>", "81 others")
    assert sum(row[1] for row in plot.table.rows) == sum(range(1, 101))  # type: ignore[misc]
    assert "<0>" not in plot.figure()
