"""What `arrowbank audit --out` found, as a section: how many texts of one split are in another, exactly or nearly."""

from __future__ import annotations

from typing import Any

from arrowbank.leakage import Audit
from arrowbank.report.integrity import verdict
from arrowbank.report.markup import tag
from arrowbank.report.scales import number, percent
from arrowbank.report.section import Section, table

EXAMPLES = 50
CHARACTERS = 400


def audit_section(audit: Audit) -> Section:
    """The counts, and the nearest pairs."""
    found = audit.exact + audit.near
    lead = f"{number(found)} texts are in both of two sources, the same or with a cosine of at least {number(audit.threshold)}."
    rows = [
        (row.kind, row.source, row.against, row.texts, row.exact, row.near, percent(row.exact + row.near, row.texts))
        for row in audit.rows
    ]
    columns = ("kind", "source", "against", "texts", "the same", "near", "share")
    parts = [table(columns, rows, "texts shared between sources")]
    if audit.max_shared is not None:
        parts.append(tag("p", None, verdict(audit.ok, f"{found:,} shared, {audit.max_shared:,} allowed")))
    if audit.examples:
        first = sorted(audit.examples, key=lambda example: -example.cosine)[:EXAMPLES]
        cells: list[Any] = [
            (
                example.cosine,
                *(tag("bdi", None, _cut(text)) for text in (example.text, example.nearest)),
                example.kind,
                example.source,
                example.against,
            )
            for example in first
        ]
        parts += [
            tag("h3", None, "Examples"),
            table(("cosine", "text", "nearest", "kind", "source", "against"), cells, "examples"),
        ]
    return Section("Texts shared between sources", parts, lead, "Audit")


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…"
