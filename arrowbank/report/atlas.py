"""The map of a feature bank: a sample of its vectors on their first two principal components, with each one's nearest texts.

The neighbours are exact and of the whole bank; only which points are drawn is a sample. Texts are cut so that the page stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.columns import Rows, number_column
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.reader import Bank
from arrowbank.drawing.frame import Frame, Plot
from arrowbank.drawing.markup import Markup, number, percent, plural, tag
from arrowbank.drawing.plots import Series, bars_of, histogram, lines
from arrowbank.errors import CorruptBank
from arrowbank.features.nearest import nearest
from arrowbank.report.sample import names, of_sample, spread_rows, take
from arrowbank.report.section import Section, plots

WIDTH, HEIGHT = 620, 500
TEXT_CHARACTERS = 2_000_000  # that the page holds
SHORTEST, LONGEST = 80, 600  # characters of a text that is cut
GROUPS = 6  # that have a colour of their own; the last one is of all others
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Projection:
    """`places` [n, 2] on the first two components, and the share of the variance that each of all components has."""

    places: Floats
    explained: Floats


def project(vectors: npt.NDArray[np.float32]) -> Projection:
    """The principal components of [n, D] vectors. The sign of a component is such that its farthest point is on the positive side."""
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    count, width = centred.shape
    if count <= width:
        values, rotated = np.linalg.eigh(centred @ centred.T)
        places = rotated * np.sqrt(np.maximum(values, 0))
    else:
        values, axes = np.linalg.eigh(centred.T @ centred)
        places = centred @ axes
    order = np.argsort(-values, kind="stable")
    values, places = np.maximum(values[order], 0), places[:, order[:2]]
    if places.shape[1] < 2:
        places = np.hstack([places, np.zeros((count, 2 - places.shape[1]))])
    farthest = places[np.abs(places).argmax(axis=0), [0, 1]]
    total = float(values.sum())
    return Projection(places * np.where(farthest < 0, -1.0, 1.0), values / total if total else values)


@dataclass(frozen=True)
class Neighbours:
    """For the i-th of the sampled `rows`, its nearest other rows of the bank and their cosines, [n, k]."""

    rows: Rows
    near: npt.NDArray[np.int64]
    cosines: npt.NDArray[np.float32]


def find_neighbours(bank: FeatureBank, rows: Rows, vectors: npt.NDArray[np.float32], count: int) -> Neighbours:
    """The `count` nearest other texts of each of `rows`, whose vectors are given (fewer in a bank that has no more).

    Raises CorruptBank for vectors that no encode has stored: not finite, or all zero.
    """
    good = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
    if not good.all():
        bad = int(rows[np.flatnonzero(~good)[0]])
        raise CorruptBank(
            f"{bank.folder}: the vector of row {bad} is not finite or all zero. `arrowbank verify` names the shard; restore it."
        )
    wanted = min(count, len(bank) - 1)
    near, cosines = nearest(bank, vectors, wanted + 1)
    kept = near != rows[:, None]
    kept[kept.all(axis=1), -1] = False  # of many that are all as near, itself may not be among the first
    shape = (len(rows), wanted)
    return Neighbours(rows, near[kept].reshape(shape), cosines[kept].reshape(shape))


@dataclass(frozen=True)
class Grouping:
    """What the points can be coloured by: the group of every text, and the groups' names."""

    name: str
    groups: list[str]
    of_text: list[int]


def grouping(name: str, values: Sequence[str], sampled: int) -> Grouping:
    """Groups by size in the sample; where there are many, the small ones are one."""
    counts: dict[str, int] = {}
    for value in values[:sampled]:
        counts[value] = counts.get(value, 0) + 1
    found = sorted(counts, key=lambda value: (-counts[value], value))
    groups = found if len(found) <= GROUPS else [*found[: GROUPS - 1], "other"]
    return Grouping(name, groups, [groups.index(value) if value in groups else len(groups) - 1 for value in values])


@dataclass(frozen=True)
class Atlas:
    """Everything that the map shows. `texts` are of the sample, then of neighbours outside it; `near` are places among them."""

    projection: Projection
    neighbours: Neighbours
    rows: Rows
    texts: list[str]
    near: npt.NDArray[np.int64]
    groupings: list[Grouping]

    def data(self) -> dict[str, Any]:
        """What the page's script reads."""
        limit = max(SHORTEST, min(LONGEST, TEXT_CHARACTERS // max(1, len(self.texts))))
        return {
            "rows": self.rows.tolist(),
            "texts": [text if len(text) <= limit else text[: limit - 1] + "…" for text in self.texts],
            "sampled": len(self.near),
            "places": [[round(x, 4) for x in place] for place in self.projection.places.tolist()],
            "near": self.near.tolist(),
            "cosines": [[round(float(value), 4) for value in row] for row in self.neighbours.cosines],
            "groupings": [{"name": one.name, "groups": one.groups, "of": one.of_text} for one in self.groupings],
        }


def make_atlas(bank: FeatureBank, texts: Bank | None, *, points: int, neighbours: int) -> Atlas:
    """Sample, project, find the neighbours, and read the texts that are shown. `texts`, if it is there, knows the sources."""
    rows = spread_rows(len(bank), points)
    vectors = bank.take(rows).astype(np.float32)
    found = find_neighbours(bank, rows, vectors, neighbours)
    others = np.setdiff1d(found.near, rows)
    every = np.concatenate([rows, others])
    order = np.argsort(every, kind="stable")
    near = order[np.searchsorted(every[order], found.near)]
    table = in_order(bank, ["text", "kind"], every)
    groupings = [grouping("kind", names(table, "kind"), len(rows))]
    if texts is not None:
        groupings.append(grouping("source", names(in_order(texts, ["source"], every), "source"), len(rows)))
    return Atlas(project(vectors), found, every, names(table, "text"), near, groupings)


def in_order(bank: Bank, columns: Sequence[str], rows: Rows) -> pa.Table:
    """Columns of rows in any order."""
    order = np.argsort(rows, kind="stable")
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return take(bank, columns, rows[order]).take(number_column(back))


# what is drawn


def map_section(atlas: Atlas, total: int) -> Section:
    """The map with its panel, and the figures that belong to it."""
    sampled = len(atlas.near)
    reach = atlas.near.shape[1]
    lead = (
        f"{plural(sampled, 'text')}{'' if sampled == total else f' evenly spread over {total:,}'}, drawn where their vectors lie on "
        f"the two directions in which they differ most. Choose one to see its {reach} nearest texts of the whole bank."
    )
    nearest_first = atlas.neighbours.cosines[:, 0] if reach else np.zeros(0, np.float32)
    return Section("Map", [_map(atlas), plots(_scree(atlas, sampled), _nearness(nearest_first, sampled, total))], lead, "Map")


def _map(atlas: Atlas) -> Markup:
    places, share = atlas.projection.places, [*atlas.projection.explained.tolist(), 0.0, 0.0]
    frame = _equal_frame(places, share)
    of = atlas.groupings[0].of_text
    points = [
        tag("circle", {"class": f"point s{of[at]}", "cx": round(frame.x(x), 1), "cy": round(frame.y(y), 1), "r": 3.4})
        for at, (x, y) in enumerate(places.tolist())
    ]
    said = f"{plural(len(points), 'point')}. The first axis holds {percent(share[0])} of the variance, the second {percent(share[1])}."
    svg = tag(
        "svg",
        {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-labelledby": "map-title map-desc", "id": "map-svg"},
        tag("title", {"id": "map-title"}, "Map of the vectors"),
        tag("desc", {"id": "map-desc"}, said),
        frame.axes(),
        tag("g", {"id": "map-links"}),
        tag("g", {"id": "map-points"}, *points),
        tag("g", {"id": "map-rings"}),
    )
    how = "Map of texts. Arrow keys go to the next point in that direction, Enter to the nearest text, Backspace back."
    box = tag(
        "div",
        {"class": "map-box", "id": "map-box", "tabindex": "0", "role": "application", "aria-label": how},
        svg,
        tag("div", {"class": "tip", "id": "map-tip", "hidden": True}),
    )
    return tag(
        "div",
        {"class": "map"},
        tag("figure", {"class": "plot"}, _tools(atlas), box, tag("figcaption", None, tag("p", None, said)), _map_table()),
        tag(
            "div",
            {"class": "panel", "id": "map-panel", "aria-live": "polite"},
            tag("p", {"class": "note"}, "Nothing is chosen yet. Click a point, or use the arrow keys on the map."),
        ),
    )


def _tools(atlas: Atlas) -> Markup:
    choices = [
        tag(
            "label",
            None,
            tag("input", {"type": "radio", "name": "map-colour", "value": index, "checked": index == 0}),
            f"by {one.name}",
        )
        for index, one in enumerate(atlas.groupings)
    ]
    return tag(
        "div",
        {"class": "tools"},
        tag("fieldset", None, tag("legend", {"class": "unseen"}, "Colours"), *choices) if len(choices) > 1 else None,
        tag("ul", {"class": "legend", "id": "map-legend"}),
        tag(
            "input",
            {"type": "search", "id": "map-search", "placeholder": "Find in the sample", "aria-label": "Find in the sample"},
        ),
        tag("span", {"class": "note", "id": "map-found", "role": "status"}),
    )


def _map_table() -> Markup:
    """Filled by the script when it is opened: its rows are in the page's data already."""
    return tag("details", {"id": "map-table"}, tag("summary", None, "Data"), tag("div", {"class": "scroll", "tabindex": "0"}))


def _equal_frame(places: Floats, share: Sequence[float]) -> Frame:
    """A frame in which a step to the right is as far as one up, with some room around the points."""
    low, high = places.min(axis=0), places.max(axis=0)
    middle = (low + high) / 2
    reach = max((high[0] - low[0]) / WIDTH, (high[1] - low[1]) / HEIGHT, 1e-9) * 1.06
    half = np.array([reach * WIDTH, reach * HEIGHT]) / 2
    (left, bottom), (right, top) = (middle - half).tolist(), (middle + half).tolist()
    return Frame(
        (left, right),
        (bottom, top),
        x_label=f"first principal component, {percent(share[0])} of the variance",
        y_label=f"second, {percent(share[1])}",
        width=WIDTH,
        height=HEIGHT,
        bottom=54,
    )


def _scree(atlas: Atlas, sampled: int) -> Plot:
    summed = np.cumsum(atlas.projection.explained) * 100
    shown = min(len(summed), 100)
    half, most = (int(np.searchsorted(summed, part - 1e-9)) + 1 for part in (50, 90))
    said = (
        f"{plural(half, 'component')} hold half of the variance of the sample, {most:,} hold nine tenths, of {len(summed):,} that "
        f"{plural(sampled, 'vector')} can have."
    )
    one = Series("variance", [float(at) for at in range(1, shown + 1)], summed[:shown].tolist())
    return lines(
        "Variance by components",
        [one],
        x_label="components, largest first",
        y_label="% of the variance, summed",
        summary=said,
        ceiling=100.0,
        whole_x=True,
    )


def _nearness(cosines: npt.NDArray[np.float32], sampled: int, total: int) -> Plot | None:
    if not len(cosines):
        return None
    close = int((cosines > 0.95).sum())
    said = (
        f"The nearest other text has a median cosine of {number(float(np.median(cosines)))}; for {percent(close, len(cosines))} it is "
        f"above 0.95.{of_sample(np.arange(sampled), total, 'text')}"
    )
    return bars_of(
        "Cosine to the nearest other text",
        histogram(cosines),
        x_label="cosine",
        y_label="texts",
        summary=said,
    )
