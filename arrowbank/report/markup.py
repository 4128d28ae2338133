"""HTML and SVG as strings that cannot be broken by what is put into them.

`tag` escapes every child that is not `Markup` and every attribute. Texts of users only ever get into a page through it, or
through `data_script`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape as html_escape

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
