"""The verbs that look for texts by their vectors: search, audit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from arrowbank.cli import options as o
from arrowbank.cli.parameters import Common
from arrowbank.cli.show import fail_on, progress_for
from arrowbank.cli.spread import spread
from arrowbank.settings import Count, Flag, Help, refuse_unread

if TYPE_CHECKING:
    from arrowbank import SearchConfig
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


@spread
def audit(
    bank: Annotated[str, typer.Argument(metavar="BANK", help="A feature bank that has the texts of all sources.")],
    common: o.Common,
    other: Annotated[
        str | None, typer.Argument(metavar="EVAL_BANK", help="In place of sources: a bank audited against BANK.")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", metavar="NAME=PATH", help="A split, and where its records are; repeat it.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field", metavar="KIND=PATH", help="Where texts of a kind are, as for `scan`. Default: as BANK was built."
        ),
    ] = None,
    on_bad_line: o.OnBadLine = None,
    max_line_bytes: o.MaxLineBytes = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="NAME", help="The split that the others are compared to. Default: the first."),
    ] = None,
    threshold: Annotated[float, typer.Option("--threshold", help="Texts with this cosine or more are near.")] = 0.95,
    max_shared: Annotated[
        int | None, typer.Option("--max-shared", help="Exit code 1 if more texts are shared, exactly or nearly.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write counts and the most alike pairs as JSON.")
    ] = None,
) -> None:
    """Count the texts of a split that are in another one, exactly or nearly: eval that a model has seen in training.

    Example: arrowbank audit router/features --source train=train.jsonl --source eval=eval.jsonl --max-shared 0
    """
    from arrowbank.features.audit import AuditConfig, audit_file, inputs_of, write_audit
    from arrowbank.features.audit import audit as run
    from arrowbank.features.scan import ScanConfig

    sources = o.sources(source)
    if not sources:
        refuse_unread(
            "two banks, which have their own texts", field=field, on_bad_line=on_bad_line, max_line_bytes=max_line_bytes
        )
    scan = None
    if sources:
        scan = o.make(
            ScanConfig,
            None,
            sources=sources,
            fields=o.pairs("--field", field) or None,
            on_bad_line=on_bad_line,
            max_line_bytes=max_line_bytes,
        )
    config = AuditConfig(scan=scan, threshold=threshold, max_shared=max_shared, against=against)
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
