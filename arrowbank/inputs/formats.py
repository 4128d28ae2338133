"""The formats that records are read from, by the suffix of a file's name.

A format turns a file into one of two things, and all that reads records takes both:

lines    blocks of JSON lines, from a stream of bytes. JSON lines are that already; CSV, text and JSON arrays become it.
batches  Arrow record batches, from an open file (inputs/tables.py).

So a new format is one function and one line in FORMATS."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from arrowbank.inputs.bad_lines import WITHOUT_NUMBERS, BadLine, decode_json, deepest_column, line_too_long, no_text
from arrowbank.inputs.lines import BOM, COMPRESSIONS, line_blocks

if TYPE_CHECKING:
    from arrowbank.inputs.tables import TableRows

BLOCK_BYTES = 1 << 20
TEXT = "text"  # the field that a line of a text file becomes


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How lines are read: a longer one is an error; `nested` are the fields that are no texts, which CSV has as JSON in a cell."""

    max_line_bytes: int
    nested: frozenset[str] = frozenset()


Lines = Iterator["bytes | BadLine"]


@dataclass(frozen=True, kw_only=True)
class InputFormat:
    """A kind of file. Exactly one of `lines` and `batches` is there.

    `unit` is what a record is called in messages. `rank`: of the files in a folder those of the least rank are read. `spans`: the
    file is JSON lines as it is, so that workers can be told places in it.
    """

    name: str
    suffixes: tuple[str, ...]
    lines: Callable[[io.BufferedReader, Reading], Lines] | None = None
    batches: Callable[[Any, Sequence[str], int], Iterator[TableRows]] | None = None
    unit: str = "line"
    rank: int = 0
    spans: bool = False


def _json_lines(stream: io.BufferedReader, reading: Reading) -> Lines:
    return line_blocks(stream, BLOCK_BYTES, reading.max_line_bytes)


def _text_lines(stream: io.BufferedReader, reading: Reading) -> Lines:
    """Every line is an object with the field `text`; blank ones stay blank, so that lines keep their numbers."""
    block = _JsonBlock()
    for lines in line_blocks(stream, BLOCK_BYTES, reading.max_line_bytes):
        if isinstance(lines, BadLine):
            yield from block.then(lines)
            return
        for line in lines.removesuffix(b"\n").split(b"\n"):
            bare = line.rstrip(b"\r")
            try:
                text = bare.decode()
            except UnicodeDecodeError as error:
                yield from block.then(no_text(1, bare, error))
                continue
            block.add(b'{"text":' + msgspec.json.encode(text) + b"}" if text.strip() else b"")
        yield from block.full(0)


class _JsonBlock:
    """JSON lines until they are a block."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._bytes = 0

    def add(self, line: bytes, lines: int = 1) -> None:
        """A record that took so many lines of the file."""
        self._lines += [line, *[b""] * (lines - 1)]
        self._bytes += len(line) + lines

    def full(self, size: int = BLOCK_BYTES) -> Iterator[bytes]:
        """The block, if it has so many bytes."""
        if self._lines and self._bytes >= size:
            yield b"\n".join([*self._lines, b""])
            self._lines, self._bytes = [], 0

    def then(self, bad: BadLine) -> Lines:
        """The block, whatever it has, and what is wrong with the line after it."""
        yield from self.full(0)
        yield bad


# CSV


class _CsvLines:
    """The lines of a CSV file as `csv` wants them. Raises BadLine for one that is not UTF-8, and for a record that is too long."""

    def __init__(self, stream: io.BufferedReader, most: int) -> None:
        self._stream, self._most = stream, most
        self.taken = self._bytes = 0  # of the record

    def begin(self) -> None:
        self.taken = self._bytes = 0

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(self._most + len(BOM) + 2)
        if not line:
            raise StopIteration
        self.taken += 1
        self._bytes += len(line.rstrip(b"\r\n"))
        if self._bytes > self._most:
            raise line_too_long(self.taken, self._most)
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise no_text(self.taken, line, error) from None


def _cells(stream: io.BufferedReader, reading: Reading, *, delimiter: str) -> Lines:
    """Every row is an object with a field for each column of the header. An empty cell is an absent field."""
    block, header = _JsonBlock(), list[str]()
    if stream.peek(len(BOM))[: len(BOM)] == BOM:
        stream.read(len(BOM))
    rows = _CsvLines(stream, reading.max_line_bytes)
    reader = csv.reader(rows, delimiter=delimiter, strict=True)
    while True:
        rows.begin()
        try:
            row = _next_row(reader, reading.max_line_bytes)
            if row is None:
                break
            if not header:
                header = _header(row)
                block.add(b"", rows.taken)
                continue
            block.add(_object(header, row, reading.nested) if row else b"", rows.taken)
        except BadLine as bad:
            if not header:
                bad.skippable = False
            yield from block.then(bad)
            if rows.taken > bad.line:
                block.add(b"", rows.taken - bad.line)
            reader = csv.reader(rows, delimiter=delimiter, strict=True)
        yield from block.full()
    yield from block.full(0)


def _next_row(reader: Any, most: int) -> list[str] | None:
    before = csv.field_size_limit(most)  # the limit is the process's
    try:
        row: list[str] | None = next(reader, None)
    except csv.Error as error:
        raise BadLine(1, f"not CSV ({error})") from None
    finally:
        csv.field_size_limit(before)
    return row


def _header(row: list[str]) -> list[str]:
    if twice := [name for name in dict.fromkeys(row) if row.count(name) > 1]:
        raise BadLine(1, f"a header with two columns named {twice[0]!r}", remedy="Rename one of them.")
    return row


def _object(header: list[str], row: list[str], nested: frozenset[str]) -> bytes:
    if len(row) != len(header):
        raise BadLine(1, f"{len(row)} cells, where the header has {len(header)}")
    cells = []
    for name, cell in zip(header, row, strict=True):
        if not cell:
            continue
        value = _nested(name, cell) if name in nested else msgspec.json.encode(cell)
        cells.append(msgspec.json.encode(name) + b":" + value)
    return b"{" + b",".join(cells) + b"}"


def _nested(name: str, cell: str) -> bytes:
    try:
        decode_json(cell)
    except json.JSONDecodeError as error:
        raise BadLine(1, f"column {name!r}: not JSON ({error.msg})") from None
    except RecursionError:
        raise BadLine(1, f"column {name!r}: nested too deeply to be read") from None
    return _on_one_line(cell)


def _on_one_line(text: str) -> bytes:
    """A JSON text without line ends: in its strings there are none."""
    return text.encode().replace(b"\r", b" ").replace(b"\n", b" ")


# JSON arrays

_BLANKS = " \t\r\n"
_CUT = 16  # characters from the end of what was read, within which an error may only mean that more is to come


class _Array:
    """The elements of a JSON array, one text after the other, while no more than one of them is in memory. Raises BadLine."""

    def __init__(self, stream: io.BufferedReader, most: int) -> None:
        self._stream, self._most = stream, most
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False
        self.number = 1  # of the element

    def __iter__(self) -> Iterator[bytes]:
        if self._next() == "\ufeff":
            self._at += 1
        self._expect("[", "Expecting an array")
        if self._next() == "]":
            self._at += 1
        else:
            while True:
                yield self._element()
                self.number += 1
                if self._next() == "]":
                    self._at += 1
                    break
                self._expect(",", "Expecting ',' delimiter")
                self._next()
        if self._next():
            raise self._bad("not JSON (Extra data)")

    def _element(self) -> bytes:
        while True:
            try:
                stop = WITHOUT_NUMBERS.raw_decode(self._text, self._at)[1]
                if stop < len(self._text) or self._ended:  # a number may go on
                    break
            except RecursionError:
                raise self._bad("nested too deeply to be read", deepest_column(self._text[self._at :])) from None
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - _CUT or error.msg.startswith("Unterminated string")
                if self._ended or not cut:
                    raise self._bad(f"not JSON ({error.msg})") from None
            if len(self._text) - self._at > self._most:
                raise line_too_long(1, self._most)
            self._more()
        data = _on_one_line(self._text[self._at : stop])
        self._at = stop
        if len(data) > self._most:
            raise line_too_long(1, self._most)
        return data

    def _expect(self, sign: str, words: str) -> None:
        if self._next() != sign:
            raise self._bad(f"not JSON ({words})")
        self._at += 1

    def _next(self) -> str:
        """The next character that is not blank, which stays; "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _BLANKS:
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._more()

    def _more(self) -> None:
        """Read on, twice as much each time that a long element does not end."""
        data = self._stream.read(max(BLOCK_BYTES, len(self._text) - self._at))
        self._ended = not data
        try:
            text = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise self._bad(f"not UTF-8 (byte 0x{error.object[error.start]:02x})") from None
        self._text, self._at = self._text[self._at :] + text, 0

    def _bad(self, what: str, column: int = 0) -> BadLine:
        return BadLine(1, what, column, remedy="Write the file again.", skippable=False)


def _elements(stream: io.BufferedReader, reading: Reading) -> Lines:
    block = _JsonBlock()
    try:
        for element in _Array(stream, reading.max_line_bytes):
            block.add(element)
            yield from block.full()
    except BadLine as bad:
        yield from block.then(bad)
        return
    yield from block.full(0)


# tables: pyarrow's Parquet and compute parts take 15 MB, which lines need not pay


def _parquet(source: Any, columns: Sequence[str], size: int) -> Iterator[TableRows]:
    from arrowbank.inputs.tables import parquet_batches

    return parquet_batches(source, columns, size)


def _arrow(source: Any, columns: Sequence[str], size: int) -> Iterator[TableRows]:
    from arrowbank.inputs.tables import arrow_batches

    return arrow_batches(source, columns, size)


ARRAY = InputFormat(name="JSON array", suffixes=(), lines=_elements, unit="element", rank=1)
JSON = InputFormat(name="JSON", suffixes=(".json",), lines=_json_lines, rank=1, spans=True)  # an ARRAY where it begins with [
ARROW = InputFormat(name="Arrow", suffixes=(".arrow", ".feather"), batches=_arrow, unit="row")
PLAIN = InputFormat(name="text", suffixes=(".txt",), lines=_text_lines, rank=2)
FORMATS = (
    InputFormat(name="JSON lines", suffixes=(".jsonl", ".ndjson"), lines=_json_lines, spans=True),
    JSON,
    InputFormat(name="CSV", suffixes=(".csv",), lines=partial(_cells, delimiter=",")),
    InputFormat(name="TSV", suffixes=(".tsv",), lines=partial(_cells, delimiter="\t")),
    PLAIN,
    InputFormat(name="Parquet", suffixes=(".parquet",), batches=_parquet, unit="row"),
    ARROW,
)
KNOWN = (
    f"{', '.join(suffix for one in FORMATS if one.lines for suffix in one.suffixes)} (each also with {' or '.join(COMPRESSIONS)}), "
    f"{', '.join(suffix for one in FORMATS if one.batches for suffix in one.suffixes)}"
)


def format_of(name: str) -> tuple[InputFormat, str] | None:
    """The format of a file by its name, in whatever case, and its compression (".gz", ".zst" or nothing); None for another."""
    name = name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    suffix = PurePosixPath(name.removesuffix(compression)).suffix
    found = next((one for one in FORMATS if suffix in one.suffixes), None)
    return None if found is None or (compression and found.batches) else (found, compression)


def is_array(stream: io.BufferedReader) -> bool:
    """Whether a .json file holds an array, by its first sign."""
    start = stream.read(BLOCK_BYTES).removeprefix(BOM).lstrip()
    return start.startswith(b"[")
