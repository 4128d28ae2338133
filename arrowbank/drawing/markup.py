"""Numbers on axes and in sentences: round ticks, linear and logarithmic scales, and few digits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape as html_escape

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`, evenly spaced, at least one; both finite."""
    if not low < high:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    if not power:  # a span of denormals: there are no round numbers in it
        return [low]
    step = next(step for step in (factor * power for factor in STEPS) if step >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = [min(max(number * step, low), high) for number in range(first, last + 1)]
    return found or [low]


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Powers of ten from `low` to `high`, both > 0, with 2 and 5 between them where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(found) >= 3:
            return found[:: max(1, round(len(found) / count))]
    return ticks(low, high, count)


@dataclass(frozen=True)
class Scale:
    """Values low … high onto places start … end, in proportion to the value, or to its logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of `value`; places outside are allowed."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low * 1e-3))
        part = (at - low) / (high - low) if high != low else 0.5
        return self.start + part * (self.end - self.start)

    def ticks(self, count: int = 5, *, whole: bool = False) -> list[float]:
        """Round values to mark; `whole` ones only, where there are any."""
        found = log_ticks(self.low, self.high, count) if self.log else ticks(self.low, self.high, count)
        return [value for value in found if value.is_integer()] or found if whole else found


def labels(values: Sequence[float]) -> list[str]:
    """Ticks as text, all with the same decimals: 0, 2.5k, 5k."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest >= 10_000:
        size, suffix = next(pair for pair in SUFFIXES if largest >= pair[0])
    else:
        size, suffix = 1.0, ""
    shown = [value / size for value in values]
    if largest and (largest < 1e-3 or largest >= 1e16):
        return [f"{value:.2g}".replace("-", "−") for value in values]
    decimals = next((count for count in range(6) if all(_whole(value * 10**count) for value in shown)), 6)
    return [f"{value:,.{decimals}f}".replace("-", "−") + (suffix if value else "") for value in shown]


def log_labels(values: Sequence[float]) -> list[str]:
    """Ticks of a logarithmic axis, each with the digits that it needs."""
    return [labels([value])[0] for value in values]


def number(value: float | int | None, digits: int = 3) -> str:
    """A number for a sentence or a table: whole ones with commas, others to so many digits, – for none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}".replace("-", "−")
    if abs(value) >= 10**digits:
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−").replace("e−0", "e−")


def percent(part: float, whole: float = 1.0) -> str:
    """A share for people: 12.3 %, < 0.1 %."""
    if not whole:
        return "–"
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "< 0.1 %"
    return "100 %" if share == 100 else f"{share:.1f} %" if share < 99.95 else "> 99.9 %"


def plural(count: int, one: str, many: str = "") -> str:
    """3 shards, 1 shard."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def seconds(value: float) -> str:
    """A duration for people."""
    if value < 120:
        return f"{number(value)} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _whole(value: float) -> bool:
    return abs(value - round(value)) < 1e-6 * max(1.0, abs(value))


VOID = {"meta", "link", "br", "input"}  # elements without an end tag
EMPTY = {"path", "rect", "circle", "line", "use"}  # of SVG: nothing inside, closed at once


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()


Child = Markup | str | None


def escape(text: str) -> Markup:
    """`text` as HTML that shows it; a lone surrogate, which UTF-8 cannot hold, as `?`."""
    return Markup(html_escape(text.encode("utf-8", "replace").decode()))


def tag(name: str, attributes: dict[str, object] | None = None, /, *children: Child) -> Markup:
    """An element. Attributes of None or False are left out, those of True have no value; numbers get at most two decimals."""
    given = "".join(_attribute(key, value) for key, value in (attributes or {}).items())
    if name in VOID:
        return Markup(f"<{name}{given}>")
    inside = join(children)
    return Markup(f"<{name}{given}/>") if name in EMPTY and not inside else Markup(f"<{name}{given}>{inside}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Children one after another, escaped where they are plain text."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children if child is not None))


def data_script(identity: str, value: object) -> Markup:
    """`value` as JSON in a script element that is not run. No text in it can end the element or begin another."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    kept = text.encode("utf-8", "replace").decode()
    return Markup(f'<script type="application/json" id="{escape(identity)}">{kept}</script>')


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {name}="{escape(text)}"'
