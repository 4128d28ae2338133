"""Records as Python values, whatever file or table they are in, for the stages that take them one by one.

The scan reads the same blocks (inputs/sources.py) with a reader of its own, which takes out texts only and works in several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arrowbank.bank.manifest import joint_sha256
from arrowbank.errors import InputError
from arrowbank.inputs.bad_lines import BadLine, parse_line
from arrowbank.inputs.formats import Reading
from arrowbank.inputs.lines import MAX_LINE_BYTES, Span
from arrowbank.inputs.sources import Print, Source, SourceFile, find_source, fingerprint, read_blocks
from arrowbank.progress import SILENT
from arrowbank.settings import Settings, refuse_unread

if TYPE_CHECKING:
    from arrowbank.inputs.tables import TableRows

NESTED = frozenset({"input_ids", "loss_mask", "messages", "tools"})  # fields that are no texts: JSON in a cell of CSV
TABLES = "tables (.parquet, .arrow), which have no lines"


@dataclass(frozen=True)
class Record:
    """One record as it was read: where (file and line, for errors), a name for it (file:line), and its fields."""

    place: str
    name: str
    value: dict[str, Any]


@dataclass
class Records:
    """The records at a place, in order. InputError where there is no such place.

    fields          what is read of tables
    skip_bad_lines  lines that are no JSON object in UTF-8 (or no row of a CSV file) are counted in `bad_lines`, not an error
    max_line_bytes  a longer line is an error
    name            of the source, ahead of the numbers of its records (None: the file's)

    `unread` names the columns of the tables so far that are not among `fields`.
    """

    path: str | Path
    fields: Sequence[str]
    skip_bad_lines: bool = False
    max_line_bytes: int = MAX_LINE_BYTES
    name: str | None = None
    bad_lines: int = field(default=0, init=False)
    unread: dict[str, None] = field(default_factory=dict, init=False)
    source: Source = field(init=False)

    def __post_init__(self) -> None:
        self.source = find_source(self.name or "", self.path)
        self._prints: dict[Any, Print] = {}  # of the files, once somebody has asked for their sha256

    @property
    def are_rows(self) -> bool:
        """Whether all of them are in tables."""
        return all(file.is_table for file in self.source.files)

    @property
    def sha256(self) -> str:
        """The sha256 of the file, or of several files' sha256s. From here on the files have to stay as they are."""
        self._prints = self._prints or fingerprint(self.source.files, SILENT)
        return joint_sha256([self._prints[file.path].sha256 for file in self.source.files])

    def refuse_unread(self, config: Settings) -> None:
        """InputError for options about lines where there are none."""
        if self.are_rows:
            refuse_unread(TABLES, config, ["on_bad_line", "max_line_bytes"])

    def __iter__(self) -> Iterator[Record]:
        """Every record. InputError for a line that is none, and for a file that is cut off or changes."""
        self.bad_lines = rows = 0
        reading = Reading(max_line_bytes=self.max_line_bytes, nested=NESTED)
        for file in self.source.files:
            before = 0
            for block, _ in read_blocks(file, reading, self._prints.get(file.path), self.fields):
                if isinstance(block, bytes):
                    yield from self._lines(file, block, before)
                    before += block.count(b"\n") + (not block.endswith(b"\n"))
                elif isinstance(block, BadLine):
                    self._count(file, block, before)
                    before += block.line
                elif not isinstance(block, Span):  # which nobody asked for
                    yield from self._rows(file, block, before, rows)
                    before += block.batch.num_rows
                    rows += block.batch.num_rows

    def _lines(self, file: SourceFile, block: bytes, before: int) -> Iterator[Record]:
        name = self.name or file.path.name
        for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), before + 1):
            try:
                value = parse_line(line, 1, numbers=True)
            except BadLine as bad:
                self._count(file, bad, number - 1)
                continue
            if value is not None:
                yield Record(file.place(number), f"{name}:{number}", value)

    def _rows(self, file: SourceFile, rows: TableRows, before: int, first: int) -> Iterator[Record]:
        from arrowbank.inputs.tables import values_of

        if not rows.batch.num_columns:
            raise InputError(
                f"{file.path}: a table of the columns {', '.join(rows.names)}; expected one of {', '.join(self.fields)}. Give another "
                "table, or name its column."
            )
        self.unread |= dict.fromkeys(name for name in rows.names if name not in self.fields)
        name = self.name or self.source.path.name
        try:
            for number, value in enumerate(values_of(rows.batch)):
                yield Record(file.place(before + number + 1), f"{name}:{first + number}", value)
        except BadLine as bad:
            raise file.complaint(bad, before) from None

    def _count(self, file: SourceFile, bad: BadLine, before: int) -> None:
        if not (bad.skippable and self.skip_bad_lines):
            raise file.complaint(bad, before) from None
        self.bad_lines += 1


def is_text(value: str) -> bool:
    """Whether a string has an UTF-8 form: JSON can spell halves of surrogate pairs, which have none."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
