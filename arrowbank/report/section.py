"""Parts of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from arrowbank.report.frame import Plot, Table
from arrowbank.report.markup import Markup, tag


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

    `failed` are checks that did not pass. `data` is for the page's script, where a section has something to click on.
    """

    tiles: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    data: object = None
    facts: dict[str, object] = field(default_factory=dict)


def plots(*drawn: Plot | None) -> Markup:
    """Figures beside each other where the page is wide enough."""
    return tag("div", {"class": "plots"}, *(plot.figure() for plot in drawn if plot is not None))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> Markup:
    """A table that is always shown."""
    return Table(columns, rows).markup(caption)


def paragraph(text: str) -> Markup:
    return tag("p", None, text)
