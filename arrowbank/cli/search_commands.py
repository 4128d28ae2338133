"""The verbs that look for texts by their vectors: search, audit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from arrowbank.cli.options import Common
from arrowbank.cli.show import fail_on, progress_for
from arrowbank.settings import Count, Flag, Help

if TYPE_CHECKING:
    from arrowbank import AuditConfig, SearchConfig
    from arrowbank.features.audit import Audit
    from arrowbank.features.search import Searcher


PROMPT = "> "
SHOWN_PAIRS = 3


def search(
    bank: Annotated[str, typer.Argument(metavar="BANK", help="A feature bank's folder.")],
    text: Annotated[list[str] | None, typer.Argument(metavar="TEXT...", help="Default: a line of input at a time.")] = None,
    k: Annotated[Count, Flag("-k"), Help("How many texts to show for each.")] = 10,
    *,
    config: SearchConfig,
    common: Common,
) -> None:
    """The bank's nearest texts to each TEXT, through the very model that the bank was made with. Without TEXT it asks for lines.

    Example: arrowbank search router/features -k 5 "Where does Ada live?"
    """
    from arrowbank.features.search import Searcher

    searcher = Searcher(bank, config)
    if text:
        _show(searcher, text, k, common.json)
    else:
        for line in _lines():
            _show(searcher, [line], k, common.json)


def audit(
    bank: Annotated[str, typer.Argument(metavar="BANK", help="A feature bank that has the texts of all sources.")],
    other: Annotated[
        str | None, typer.Argument(metavar="EVAL_BANK", help="In place of sources: a bank audited against BANK.")
    ] = None,
    *,
    config: AuditConfig,
    common: Common,
    out: Annotated[str, Help("Write counts and the most alike pairs as JSON.", "FILE")] | None = None,
) -> None:
    """Count the texts of a split that are in another one, exactly or nearly: eval that a model has seen in training.

    Example: arrowbank audit router/features --source train=train.jsonl --source eval=eval.jsonl --max-shared 0
    """
    from arrowbank.features.audit import audit as run
    from arrowbank.features.audit import audit_file, inputs_of, write_audit

    if out is not None:
        audit_file(out, inputs_of(config, bank, other))
    found = run(config, bank, other, progress=progress_for(common.json))
    if out is not None:
        write_audit(found, out)
    if common.json:
        print(json.dumps({"phase": "done", **asdict(found)}, ensure_ascii=False), flush=True)
    else:
        _show_audit(found)
    fail_on(found.failed)


def _show_audit(found: Audit) -> None:
    """The counts as a table, and the pairs that are most alike."""
    from arrowbank.features.search import one_line

    table = [("kind", "source", "against", "texts", "exact", "near")]
    table += [(row.kind, row.source, row.against, f"{row.texts:,}", f"{row.exact:,}", f"{row.near:,}") for row in found.rows]
    total = sum(row.texts for row in found.rows)
    table.append(("all", "", "", f"{total:,}", f"{found.exact:,}", f"{found.near:,}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        named = [cell.ljust(width) for cell, width in zip(line[:3], widths[:3], strict=True)]
        print("  ".join([*named, *(cell.rjust(width) for cell, width in zip(line[3:], widths[3:], strict=True))]))
    for pair in found.examples[:SHOWN_PAIRS]:
        print(f"\n{pair.cosine:.4f}  {pair.source}: {one_line(pair.text)}\n        {pair.against}: {one_line(pair.nearest)}")


def _lines() -> Iterator[str]:
    """What comes in on standard input, a line at a time, with a prompt where a person types it."""
    asking = sys.stdin.isatty()
    if asking:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives `input` a history and a cursor)
    while True:
        try:
            line = input(PROMPT if asking else "")
        except (EOFError, KeyboardInterrupt):  # either is how people leave a prompt
            return
        if line.strip():
            yield line


def _show(searcher: Searcher, texts: list[str], k: int, as_json: bool) -> None:
    from arrowbank.features.search import one_line

    for text, hits in zip(texts, searcher.search(texts, k), strict=True):
        if not as_json and len(texts) > 1:
            print(f"nearest to {one_line(text)!r}:")
        for rank, hit in enumerate(hits, 1):
            if as_json:
                print(json.dumps({"query": text, "rank": rank, **asdict(hit)}, ensure_ascii=False))
            else:
                print(f"{rank:3}  {hit.cosine:.4f}  row {hit.row:<8} {hit.kind:10} {one_line(hit.text)}")
    sys.stdout.flush()
