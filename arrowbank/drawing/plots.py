"""The kinds of plots: histograms, outlines laid over each other, lines with bands, ranges and bars by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from arrowbank.drawing.frame import COLOURS, HEIGHT, Frame, Plot, Table, marker
from arrowbank.drawing.markup import Markup, join, number, percent, tag, ticks

BINS, FEWEST_BINS = 32, 9
MOST_NAMES = 20  # of bars
MOST_MARKS = 24  # of a line: more than that hide it
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Histogram:
    """counts[i] values lie in edges[i] ≤ value < edges[i + 1] (the last bin has its end, too)."""

    edges: Floats
    counts: npt.NDArray[np.int64]


def histogram(
    values: npt.ArrayLike, *, whole: bool = False, bins: int = BINS, span: tuple[float, float] | None = None
) -> Histogram:
    """About `bins` equal bins with round edges over the finite `values`. `whole`: values are whole, and so are the edges.

    A bin of whole numbers is centred on them where it holds one: its edges are at halves.
    """
    given = np.asarray(values, np.float64).ravel()
    given = given[np.isfinite(given)]
    low, high = span if span else (float(given.min()), float(given.max())) if given.size else (0.0, 1.0)
    if whole:
        step = max(1.0, math.ceil((high - low + 1) / bins))
        first = math.floor(low / step) * step
        count = int((high - first) // step) + 1
        room = max(0, FEWEST_BINS - count)  # for empty places, where one bar would else fill the picture; none below zero
        below = min(room // 2, int(first // step)) if first >= 0 else room // 2
        edges = np.array([first + step * at for at in range(-below, count + room - below + 1)])
        edges = edges - 0.5 if step == 1 else edges
    else:
        edges = _round_edges(low, high, bins)
    counts, _ = np.histogram(given, edges)
    return Histogram(edges, counts.astype(np.int64))


def _round_edges(low: float, high: float, bins: int) -> Floats:
    marks = ticks(low, high, bins)
    step = marks[1] - marks[0] if len(marks) > 1 else 0.0
    if not step or low + step == low:  # one value, or values that float64 hardly tells apart
        room = max(abs(low), abs(high)) * 1e-3 or 0.5
        return np.linspace(low - room, high + room, 9)
    first = marks[0] - step * math.ceil((marks[0] - low) / step - 1e-9)
    count = max(1, math.ceil((high - first) / step - 1e-9))
    edges = np.array([first + step * at for at in range(count + 1)])
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
    return edges


def bars_of(
    title: str, found: Histogram, *, x_label: str, y_label: str, summary: str, unit: str = "", whole: bool = False
) -> Plot:
    """A histogram as bars."""
    edges, counts = found.edges, found.counts
    frame = Frame(
        (float(edges[0]), float(edges[-1])),
        (0, max(1.0, float(counts.max()))),
        x_label=x_label,
        y_label=y_label,
        whole_x=whole,
        whole_y=True,
    )
    drawn: list[Markup] = []
    for low, high, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True):
        if not count:
            continue
        left, right, top = frame.x(low), frame.x(high), min(frame.y(count), frame.y.start - 1)
        gap = 1.0 if right - left > 4 else 0.0
        place = {"x": left + gap / 2, "y": top, "width": right - left - gap, "height": frame.y.start - top}
        hint = tag("title", None, f"{_bin(low, high, whole)} {unit}: {number(count)}".replace(" :", ":"))
        drawn.append(tag("rect", {"class": "bar", **place}, hint))
    rows = [
        (_bin(low, high, whole), count)
        for low, high, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
    ]
    body = join([frame.axes(), tag("g", {"class": "s0"}, *drawn)])
    return Plot(title, summary, body, Table((x_label, y_label), rows))


def _bin(low: float, high: float, whole: bool) -> str:
    if whole:
        first, last = math.ceil(low), math.ceil(high) - 1
        return number(first) if first == last else f"{number(first)}–{number(last)}"
    return f"{number(low, 4)} to {number(high, 4)}"


def outlines(title: str, found: Mapping[str, Histogram], *, x_label: str, y_label: str, summary: str) -> Plot:
    """Histograms with the same edges over each other, each as shares of its own sum."""
    shares = {name: one.counts / max(1, one.counts.sum()) * 100 for name, one in found.items()}
    edges = next(iter(found.values())).edges
    top = max(float(share.max()) for share in shares.values()) or 1.0
    frame = Frame((float(edges[0]), float(edges[-1])), (0, top), x_label=x_label, y_label=y_label)
    drawn = []
    for index, share in enumerate(shares.values()):
        steps = [f"M{frame.x(edges[0]):.1f} {frame.y(0):.1f}"]
        for low, high, value in zip(edges[:-1].tolist(), edges[1:].tolist(), share.tolist(), strict=True):
            steps.append(f"L{frame.x(low):.1f} {frame.y(value):.1f}H{frame.x(high):.1f}")
        steps.append(f"V{frame.y(0):.1f}")
        drawn.append(tag("path", {"class": f"line s{index % COLOURS}", "d": "".join(steps)}))
    rows = [
        (f"{number(low)}–{number(high)}", *(round(float(share[at]), 3) for share in shares.values()))
        for at, (low, high) in enumerate(pairwise(edges.tolist()))
    ]
    return Plot(
        title,
        summary,
        join([frame.axes(), *drawn]),
        Table((x_label, *shares), rows),
        tuple(shares) if len(shares) > 1 else (),
        "outline",
    )


@dataclass(frozen=True)
class Series:
    """y over x, and where it is known the band low … high around it. NaN leaves a gap. `levels` are values that do not depend on x:
    horizontal lines, the first dotted, the others dashed."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    levels: Sequence[float] = ()


def lines(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    summary: str,
    step: bool = False,
    log_x: bool = False,
    floor: float | None = 0.0,
    ceiling: float | None = None,
    whole_x: bool = False,
    whole_y: bool = False,
    marked: bool = True,
    upright: float | None = None,
) -> Plot:
    """Lines, `marked` where there are few points. `upright` is an x to mark; `floor` and `ceiling` are always in the picture."""
    every_x = [x for one in series for x in one.x]
    every_y = [y for one in series for part in (one.y, one.low, one.high, one.levels) for y in part if math.isfinite(y)]
    bounds = [bound for bound in (floor, ceiling) if bound is not None]
    low, high = min([*every_y, *bounds], default=0.0), max([*every_y, *bounds], default=1.0)
    frame = Frame(
        (min(every_x), max(every_x)),
        (low, high if high > low else low + 1),
        x_label=x_label,
        y_label=y_label,
        log_x=log_x,
        whole_x=whole_x,
        whole_y=whole_y,
    )
    drawn: list[Markup] = []
    if upright is not None:
        at = frame.x(upright)
        drawn.append(tag("line", {"class": "upright", "x1": at, "x2": at, "y1": frame.y.start, "y2": frame.y.end}))
    for index, one in enumerate(series):
        drawn.append(tag("g", {"class": f"s{index % COLOURS}"}, *_line(frame, index, one, step=step, marked=marked)))
    xs = sorted(set(every_x))
    known = [dict(zip(one.x, one.y, strict=True)) for one in series]
    rows = [(x, *(one.get(x) for one in known)) for x in xs]
    table = Table((x_label, *(one.name for one in series)), rows)
    names = tuple(one.name for one in series) if len(series) > 1 else ()
    return Plot(title, summary, join([frame.axes(), *drawn]), table, names, "line" if marked and not step else "outline")


def _line(frame: Frame, index: int, one: Series, *, step: bool, marked: bool) -> list[Markup]:
    drawn = []
    if one.low:
        ways = [*zip(one.x, one.high, strict=True), *reversed(list(zip(one.x, one.low, strict=True)))]
        drawn.append(tag("path", {"class": "band", "d": _path(frame, ways) + "Z"}))
    for y in map(frame.y, one.levels):
        drawn.append(tag("line", {"class": "level", "x1": frame.x.start, "x2": frame.x.end, "y1": y, "y2": y}))
    points = list(zip(one.x, one.y, strict=True))
    drawn.append(tag("path", {"class": "line", "d": _path(frame, points, step=step)}))
    if marked and not step and len(points) <= MOST_MARKS:
        drawn += [marker(index, frame.x(x), frame.y(y)) for x, y in points if math.isfinite(y)]
    return drawn


def _path(frame: Frame, points: Sequence[tuple[float, float]], *, step: bool = False) -> str:
    parts, pen_down = [], False
    for x, y in points:
        if not math.isfinite(y):
            pen_down = False
            continue
        place = f"{frame.x(x):.1f} {frame.y(y):.1f}"
        if pen_down and step:
            parts.append(f"V{frame.y(y):.1f}H{frame.x(x):.1f}")
        else:
            parts.append(f"{'L' if pen_down else 'M'}{place}")
        pen_down = True
    return "".join(parts)


def ranges(
    title: str, names: Sequence[str], spread: npt.ArrayLike, *, x_label: str, summary: str, log: bool | None = None
) -> Plot:
    """For each name a line from low to high with a disc at the middle; `spread` is [n, 3]: low, middle, high.

    The axis is logarithmic where `log` says so, or (None) where the values are positive and span more than a factor of 20.
    """
    values = np.asarray(spread, np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    logarithmic = low > 0 and high / low > 20 if log is None else log
    if not logarithmic:
        low = min(0.0, low)
    if high <= low:
        low, high = (low / 2, low * 2) if logarithmic else (low, low + 1)
    height = max(120, 62 + 26 * len(names))
    frame = Frame((low, high), (len(names) - 0.4, -0.6), x_label=x_label, names=names, log_x=logarithmic, height=height)
    drawn = []
    for index, (least, middle, most) in enumerate(values.tolist()):
        if not all(map(math.isfinite, (least, middle, most))):
            continue
        at = frame.y(index)
        hint = tag("title", None, f"{names[index]}: {number(middle)} ({number(least)} to {number(most)})")
        line = tag("line", {"class": "whisker", "x1": frame.x(least), "x2": frame.x(most), "y1": at, "y2": at})
        drawn.append(tag("g", {"class": "s0"}, hint, line, marker(0, frame.x(middle), at, 4.5)))
    rows = [(name, *map(float, row)) for name, row in zip(names, values, strict=True)]
    table = Table(("", "low", "middle", "high"), rows)
    return Plot(title, summary, join([frame.axes(), *drawn]), table, height=height)


def shares(title: str, counts: Mapping[str, int], *, x_label: str, summary: str) -> Plot:
    """A bar a name, with count and share written behind it; of very many names the smallest are one."""
    if len(counts) > MOST_NAMES:
        largest_first = sorted(counts.items(), key=lambda pair: -pair[1])
        counts = dict(largest_first[: MOST_NAMES - 1])
        counts[f"{len(largest_first) - len(counts):,} others"] = sum(count for _, count in largest_first[MOST_NAMES - 1 :])
    total, largest = sum(counts.values()), max(1, *counts.values()) if counts else 1
    names, height = list(counts), max(110, 62 + 26 * len(counts))
    frame = Frame((0, largest * 1.32), (len(names) - 0.4, -0.6), x_label=x_label, names=names, whole_x=True, height=height)
    drawn = []
    for index, count in enumerate(counts.values()):
        at, left = frame.y(index), frame.x(0)
        width = max(1.0, frame.x(count) - left)
        drawn.append(tag("rect", {"class": "bar", "x": left, "y": at - 8, "width": width, "height": 16}))
        text = f"{number(count)} · {percent(count, total)}"
        drawn.append(tag("text", {"class": "tick", "x": left + width + 6, "y": at + 4}, text))
    rows = [(name, count, percent(count, total)) for name, count in counts.items()]
    body = join([frame.axes(), tag("g", {"class": "s0"}, *drawn)])
    return Plot(title, summary, body, Table(("", x_label, "share"), rows), height=height)


def rails(title: str, names: Sequence[str], marks: Sequence[tuple[float, float]], length: int, *, summary: str) -> Plot:
    """For each name a line of `length` tokens with a needle (NaN: none) and a probe on it."""
    height = max(HEIGHT // 2, 62 + 26 * len(names))
    frame = Frame((0, length), (len(names) - 0.4, -0.6), x_label="token", names=names, height=height)
    drawn = []
    for index, (needle, probe) in enumerate(marks):
        at = frame.y(index)
        drawn.append(tag("line", {"class": "grid", "x1": frame.x(0), "x2": frame.x(length), "y1": at, "y2": at}))
        if math.isfinite(needle):
            between = {"class": "whisker", "x1": frame.x(needle), "x2": frame.x(probe), "y1": at, "y2": at}
            drawn.append(tag("g", {"class": "s0"}, tag("line", between), marker(0, frame.x(needle), at, 4.5)))
        drawn.append(tag("g", {"class": "s1"}, marker(1, frame.x(probe), at, 4)))
    rows = [(name, needle, probe, probe - needle) for name, (needle, probe) in zip(names, marks, strict=True)]
    table = Table(("trial", "needle at", "probe at", "distance"), rows)
    return Plot(title, summary, join([frame.axes(), *drawn]), table, ("needle", "probe"), height=height)
