"""What was checked, and what stands on the disk: the table of files, each with its own verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arrowbank.bank.checks import Check, attempt
from arrowbank.bank.files import human_bytes, sha256_of
from arrowbank.bank.manifest import FileEntry
from arrowbank.bank.reader import Bank
from arrowbank.bank.verify import verify
from arrowbank.drawing.markup import Markup, join, number, percent, plural, tag
from arrowbank.features.audit import Audit
from arrowbank.progress import Progress
from arrowbank.report.section import Section, table

SHOWN_FILES = 100


@dataclass(frozen=True)
class Verification:
    """The checks of a bank; `damaged` are the files whose bytes are not those of the manifest."""

    full: bool
    checks: list[Check]
    damaged: frozenset[str]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def words(self) -> str:
        """For the head of the page."""
        if not self.full:
            return "sizes and row counts"
        return "every byte proved" if self.ok else "a check failed"


def prove(bank: Bank, *, full: bool, progress: Progress) -> Verification:
    """Run `verify`, quick or in full. Which files are damaged is looked up only where its hashes failed."""
    checks = verify(bank.folder, quick=not full, progress=progress)
    damaged = frozenset[str]()
    if any(check.name == "hashes" and not check.ok for check in checks):
        damaged = frozenset(entry.name for entry in bank.manifest.files if _is_damaged(bank, entry))
    return Verification(full, checks, damaged)


def _is_damaged(bank: Bank, entry: FileEntry) -> bool:
    """Whether a file's bytes are not those of the manifest, or cannot be read at all."""
    with attempt(bank.folder / entry.name):
        return sha256_of(bank.folder / entry.name) != entry.sha256
    return True


def verdict(ok: bool, words: str) -> Markup:
    """A mark with words: never a colour alone."""
    return tag("span", {"class": "good" if ok else "bad"}, f"{'✓' if ok else '✗'} {words}")


def _verdict_of(entry: FileEntry, proof: Verification) -> Markup:
    if entry.name in proof.damaged:
        return verdict(False, "bytes differ")
    if proof.full:
        return verdict(True, "sha256")
    return verdict(True, "size" if entry.rows is None else "size, rows")


def files_of(name: str, bank: Bank, proof: Verification) -> Markup:
    """The checks and the files of a bank; shards first, damaged ones before all."""
    shards = set(bank.shard_names)
    entries = sorted(
        bank.manifest.files,
        key=lambda entry: (entry.name not in proof.damaged, entry.name not in shards, entry.name),
    )
    rows = [
        (
            tag("code", None, entry.name),
            entry.rows,
            tag("span", {"title": f"{entry.bytes:,} bytes", "class": "nowrap"}, human_bytes(entry.bytes)),
            tag("code", {"title": entry.sha256}, entry.sha256[:12]),
            _verdict_of(entry, proof),
        )
        for entry in entries[:SHOWN_FILES]
    ]
    left_out = len(entries) - len(rows)
    checks = [(check.name, verdict(check.ok, "ok" if check.ok else "failed"), check.detail) for check in proof.checks]
    return join(
        [
            tag("h3", None, f"Files of {name}"),
            tag("div", {"class": "files"}, table(("file", "rows", "bytes", "sha256", "integrity"), rows, f"files of {name}")),
            tag("p", {"class": "note"}, f"and {plural(left_out, 'more file')}, listed in manifest.json") if left_out else None,
            table(("check", "result", "found"), checks, f"checks of {name}"),
        ]
    )


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
