"""Parts of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arrowbank.bank.cards import plain
from arrowbank.bank.checks import Check
from arrowbank.drawing.frame import Plot, Table
from arrowbank.drawing.markup import Markup, number, tag


@dataclass(frozen=True)
class Section:
    """A heading with what is under it; `short` is its name in the page's list of sections."""

    title: str
    parts: Sequence[Markup]
    lead: str = ""
    short: str = ""


@dataclass(frozen=True)
class Story:
    """What a kind of bank has to say: the numbers to see first (value, what it is), and sections.

    `data` is for the page's script, where a section has something to click on; `checks` are those that it has run itself.
    """

    tiles: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    data: object = None
    checks: Sequence[Check] = ()


def plots(*drawn: Plot | None) -> Markup:
    """Figures beside each other where the page is wide enough."""
    return tag("div", {"class": "plots"}, *(plot.figure() for plot in drawn if plot is not None))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> Markup:
    """A table that is always shown."""
    return Table(columns, rows).markup(caption)


def paragraph(text: str) -> Markup:
    return tag("p", None, text)


def code_block(code: str) -> Markup:
    """Lines of Python."""
    return tag("pre", {"tabindex": "0"}, tag("code", None, code))


def facts_list(facts: Mapping[str, object]) -> Markup:
    """Facts as name and value."""
    parts = []
    for name, value in facts.items():
        shown = value if isinstance(value, Markup) else number(value) if isinstance(value, float) else plain(value)
        parts += [tag("dt", None, name), tag("dd", None, shown)]
    return tag("dl", None, *parts)
