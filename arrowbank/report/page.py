"""The page: head, sections, and nothing that it would have to fetch.

Its policy lets only its own style and script run, by their hashes, and lets it reach for nothing: should a text ever get
through as HTML, it still could not do anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from arrowbank import __version__
from arrowbank.drawing.frame import STYLE
from arrowbank.drawing.markup import Markup, data_script, tag
from arrowbank.report.section import Section


@dataclass(frozen=True)
class Page:
    """What a page shows. `what` is the kind in words; `data` is for the map."""

    title: str
    what: str
    subtitle: str
    tiles: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    data: object = None

    def html(self) -> bytes:
        """The file."""
        style, script = Markup(STYLE + _resource("page.css")), Markup(_resource("page.js"))
        head = tag(
            "head",
            None,
            tag("meta", {"charset": "utf-8"}),
            tag("meta", {"http-equiv": "Content-Security-Policy", "content": _policy(style, script)}),
            tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
            tag("meta", {"name": "generator", "content": f"arrowbank {__version__}"}),
            tag("link", {"rel": "icon", "href": "data:,"}),
            tag("title", None, f"{self.title} · {self.what}"),
            tag("style", None, style),
        )
        body = tag(
            "body",
            None,
            tag("a", {"class": "skip", "href": "#content"}, "Skip to the content"),
            tag("div", {"class": "page"}, self._head(), self._sections(), _foot()),
            None if self.data is None else data_script("map-data", self.data),
            tag("script", None, script),
        )
        return f"<!DOCTYPE html>\n{tag('html', {'lang': 'en'}, head, body)}\n".encode()

    def _head(self) -> Markup:
        links = [tag("li", None, tag("a", {"href": f"#{_anchor(one)}"}, one.short or one.title)) for one in self.sections]
        return tag(
            "header",
            None,
            tag(
                "div",
                {"class": "top"},
                tag("span", None, f"arrowbank report · {self.what}"),
                tag("button", {"type": "button", "id": "theme", "hidden": True}, "Dark"),
            ),
            tag("h1", None, tag("bdi", None, self.title)),
            tag("p", {"class": "subtitle"}, self.subtitle),
            tag(
                "ul",
                {"class": "tiles"},
                *(tag("li", None, tag("b", None, value), tag("span", None, of)) for value, of in self.tiles),
            ),
            tag("nav", {"aria-label": "Sections"}, tag("ul", None, *links)),
            tag(
                "noscript", None, tag("p", {"class": "note"}, "Without JavaScript the map cannot be clicked; all else is here.")
            ),
        )

    def _sections(self) -> Markup:
        return tag(
            "main",
            {"id": "content"},
            *(
                tag(
                    "section",
                    {"id": _anchor(one), "aria-labelledby": f"{_anchor(one)}-h"},
                    tag("h2", {"id": f"{_anchor(one)}-h"}, one.title),
                    tag("p", None, one.lead) if one.lead else None,
                    *one.parts,
                )
                for one in self.sections
            ),
        )


def _anchor(section: Section) -> str:
    return re.sub(r"[^a-z0-9]+", "-", (section.short or section.title).lower()).strip("-")


def _foot() -> Markup:
    words = f"Made by arrowbank {__version__} report. The page is whole in itself: it loads nothing. The same bank gives the same page."
    return tag("footer", {"class": "foot"}, words)


def _policy(style: str, script: str) -> str:
    return f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _resource(name: str) -> str:
    return files("arrowbank.report").joinpath(name).read_text("utf-8")
