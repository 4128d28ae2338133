"""What all plots share: a frame with axes, a legend, and the figure around it with its words and its table, or a file of its own.

Every figure can do without its picture: the SVG has a title and a sentence, and the data is there as a table. Colours are
the page's (classes s0 … s5, safe for colour-blind eyes), and no series is told from another by colour alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from arrowbank.drawing.markup import Markup, Scale, join, labels, log_labels, number, tag

WIDTH, HEIGHT = 460, 264
TOP, RIGHT, BOTTOM = 30, 12, 46
LETTER = 7.2  # about the width of a digit of a label
COLOURS = 6
MAX_TABLE_ROWS = 120
GAP = 28  # between plots of a file
STYLE = files("arrowbank.drawing").joinpath("style.css").read_text("utf-8")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\ufffe\uffff]")  # what XML cannot hold


@dataclass(frozen=True)
class Table:
    """Rows under a heading. Cells that are numbers are set right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def markup(self, caption: str = "") -> Markup:
        """The table in a box that scrolls by itself where the page is narrow."""
        shown = self.rows[:MAX_TABLE_ROWS]
        left_out = len(self.rows) - len(shown)
        return join(
            [
                tag(
                    "div",
                    {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": caption or "table"},
                    tag(
                        "table",
                        None,
                        tag("caption", {"class": "unseen"}, caption) if caption else None,
                        tag("thead", None, tag("tr", None, *map(self._head, range(len(self.columns))))),
                        tag("tbody", None, *(tag("tr", None, *map(_cell, row)) for row in shown)),
                    ),
                ),
                tag("p", {"class": "note"}, f"and {left_out:,} more rows") if left_out else None,
            ]
        )

    def _head(self, at: int) -> Markup:
        numbers = bool(self.rows) and all(row[at] is None or _is_number(row[at]) for row in self.rows)
        return tag("th", {"scope": "col", "class": "n" if numbers else None}, self.columns[at])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> Markup:
    if isinstance(value, Markup):
        return tag("td", None, value)
    if value is None or isinstance(value, int | float):
        return tag("td", {"class": "n"}, number(value, 4))
    return tag("td", None, str(value))


@dataclass(frozen=True)
class Plot:
    """A drawing and what it says. `summary` is one sentence with its numbers; `legend` are names of series, each drawn as
    `mark` says: a line with its marks, a bare outline, or a bar."""

    title: str
    summary: str
    drawing: Markup
    table: Table
    legend: Sequence[str] = ()
    mark: str = "line"
    height: int = HEIGHT

    def figure(self) -> Markup:
        """The figure for a page."""
        identity = "p" + hashlib.sha256(self.title.encode("utf-8", "replace") + self.drawing.encode()).hexdigest()[:10]
        svg = tag(
            "svg",
            {
                "viewBox": f"0 0 {WIDTH} {self.height}",
                "role": "img",
                "aria-labelledby": f"{identity}t {identity}d",
            },
            tag("title", {"id": f"{identity}t"}, self.title),
            tag("desc", {"id": f"{identity}d"}, self.summary),
            self.drawing,
        )
        return tag(
            "figure",
            {"class": "plot"},
            tag("figcaption", None, tag("h3", None, self.title), tag("p", None, self.summary), legend(self.legend, self.mark)),
            svg,
            tag("details", None, tag("summary", None, "Data"), self.table.markup(self.title)),
        )


def svg_file(*plots: Plot) -> bytes:
    """An SVG file with plots side by side, each under its title and its legend. The same plots give the same bytes."""
    top = 48 if any(plot.legend for plot in plots) else 30
    height = top + max(plot.height for plot in plots)
    width = len(plots) * (WIDTH + GAP) + GAP
    parts: list[Markup] = []
    for at, plot in enumerate(plots):
        names, x = [], 0.0
        for index, name in enumerate(plot.legend):
            word = tag("text", {"class": "tick", "x": x + 28, "y": 10}, name)
            drawn = tag("g", {"transform": f"translate({x:.0f})"}, *_key(index, plot.mark))
            names.append(tag("g", {"class": f"s{index % COLOURS}"}, drawn, word))
            x += 44 + LETTER * len(name)
        heading = tag("text", {"class": "title", "x": 0, "y": 20}, plot.title)
        left = GAP + at * (WIDTH + GAP)
        legend_line = tag("g", {"transform": "translate(0 30)"}, *names)
        body = tag("g", {"transform": f"translate(0 {top})"}, tag("desc", None, plot.summary), plot.drawing)
        parts.append(tag("g", {"transform": f"translate({left})"}, heading, legend_line, body))
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    style = Markup(re.sub(r"light-dark\((.+?), .+?\)", r"\1", STYLE).replace("color-scheme: light dark;", ""))
    paper = tag("rect", {"width": "100%", "height": "100%", "fill": "#fdfdfb"})
    svg = tag("svg", attributes, tag("style", None, style), paper, *parts)
    return (CONTROLS.sub("?", svg) + "\n").encode("utf-8", "replace")


def legend(names: Sequence[str], mark: str) -> Markup | None:
    """The names of series beside how each is drawn."""
    if not names:
        return None
    return tag(
        "ul",
        {"class": "legend"},
        *(
            tag("li", {"class": f"s{index % COLOURS}"}, _swatch(index, mark), tag("bdi", None, name))
            for index, name in enumerate(names)
        ),
    )


def _swatch(index: int, mark: str) -> Markup:
    return tag("svg", {"viewBox": "0 0 24 12", "width": 24, "height": 12, "aria-hidden": "true"}, *_key(index, mark))


def _key(index: int, mark: str) -> list[Markup]:
    """How series `index` is drawn, in 24 × 12."""
    line = tag("line", {"class": "line", "x1": 1, "x2": 23, "y1": 6, "y2": 6})
    if mark == "line":
        return [line, marker(index, 12, 6)]
    return [line if mark == "outline" else tag("rect", {"class": "bar", "x": 6, "y": 0, "width": 12, "height": 12})]


def marker(index: int, x: float, y: float, size: float = 3.2) -> Markup:
    """The mark of series `index` at a place: a disc, a square, a diamond, a triangle, and so on."""
    at = {"class": "mark"}
    shapes = (
        None,
        [(-1, -1), (1, -1), (1, 1), (-1, 1)],
        [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)],
        [(0, -1.3), (1.2, 0.9), (-1.2, 0.9)],
        [(0, 1.3), (1.2, -0.9), (-1.2, -0.9)],
        [(-1.4, -0.6), (1.4, -0.6), (1.4, 0.6), (-1.4, 0.6)],
    )
    corners = shapes[index % COLOURS]
    if corners is None:
        return tag("circle", {**at, "cx": float(x), "cy": float(y), "r": size})
    points = " ".join(f"{x + size * dx:.1f} {y + size * dy:.1f}" for dx, dy in corners)
    return tag("path", {**at, "d": f"M{points}Z"})


class Frame:
    """A plot's area with its axes. `x` and `y` give places; `names` are categories in place of numbers on the y axis."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        x_label: str,
        y_label: str = "",
        log_x: bool = False,
        log_y: bool = False,
        names: Sequence[str] = (),
        width: int = WIDTH,
        height: int = HEIGHT,
        whole_x: bool = False,
        whole_y: bool = False,
        bottom: int = BOTTOM,
    ) -> None:
        self.width, self.height, self.x_label, self.y_label = width, height, x_label, y_label
        y_values = [] if names else Scale(*y, 0, 1, log_y).ticks(4, whole=whole_y)
        self._names = [name if len(name) <= 18 else name[:17] + "…" for name in names]
        y_labels = log_labels(y_values) if log_y else labels(y_values)
        left = 14 + LETTER * max([2, *map(len, [*y_labels, *self._names])])
        top = TOP if y_label else 12
        self.x = Scale(*x, left, width - RIGHT, log_x)
        self.y = Scale(*y, height - bottom, top, log_y)
        self._y_ticks = list(zip(y_values, y_labels, strict=True))
        x_values = self.x.ticks(5, whole=whole_x)
        self._x_ticks = list(zip(x_values, log_labels(x_values) if log_x else labels(x_values), strict=True))

    def axes(self) -> Markup:
        """Grid, ticks, and the names of both axes."""
        left, right, bottom = self.x.start, self.x.end, self.y.start
        parts: list[Markup] = []
        for value, label in self._y_ticks:
            at = self.y(value)
            parts.append(tag("line", {"class": "grid", "x1": left, "x2": right, "y1": at, "y2": at}))
            parts.append(tag("text", {"class": "tick end", "x": left - 8, "y": at + 4}, label))
        for index, name in enumerate(self._names):
            parts.append(tag("text", {"class": "tick end", "x": left - 8, "y": self.y(index) + 4}, name))
        for value, label in self._x_ticks:
            at = self.x(value)
            parts.append(tag("line", {"class": "axis", "x1": at, "x2": at, "y1": bottom, "y2": bottom + 4}))
            parts.append(tag("text", {"class": "tick middle", "x": at, "y": bottom + 18}, label))
        parts.append(tag("line", {"class": "axis", "x1": left, "x2": right, "y1": bottom, "y2": bottom}))
        parts.append(tag("text", {"class": "label middle", "x": (left + right) / 2, "y": self.height - 8}, self.x_label))
        if self.y_label:
            parts.append(tag("text", {"class": "label", "x": 2, "y": 14}, self.y_label))
        return tag("g", None, *parts)
