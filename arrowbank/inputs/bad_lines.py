"""Lines that are no JSON object in UTF-8: what is wrong with them, and where."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from arrowbank.inputs.fields import FieldPath, spell_path

SKIP_HINT = "Fix the line, or give --on-bad-line skip, which skips and counts such lines."

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]')  # a string, or one character of structure


@dataclass(eq=False)
class BadLine(Exception):
    """What is wrong with a line and what to do about it. Lines and columns count from 1; 0 is no one line, no one place in it."""

    line: int
    what: str
    column: int = 0
    remedy: str = SKIP_HINT
    skippable: bool = True


def not_a_text(line: int, path: FieldPath) -> BadLine:
    """What `--strict` says about a number, bool, list or object at `path`."""
    what = f"a number, bool, list or object at {spell_path(path)}, where a text should be"
    return BadLine(line, what, remedy="Fix it, or scan without --strict, which skips and counts such values.", skippable=False)


def not_utf8(line: int, path: FieldPath) -> BadLine:
    """What is said about a table's text column that has something else in it."""
    return BadLine(line, f"text at {spell_path(path)} that is not UTF-8", remedy="Write the file again.", skippable=False)


def line_too_long(line: int, max_line_bytes: int) -> BadLine:
    """What is said about a line that is not read at all."""
    remedy = "Write one record per line, or raise --max-line-bytes."
    return BadLine(line, f"longer than {max_line_bytes:,} bytes", remedy=remedy, skippable=False)


def no_text(line: int, data: bytes, error: UnicodeDecodeError) -> BadLine:
    """What is said about a line that has a byte that is not UTF-8."""
    return BadLine(line, f"not UTF-8 (byte 0x{data[error.start]:02x})", error.start + 1)


def unreadable(error: OSError) -> BadLine:
    """What is said about a file that the system does not let be read any more."""
    remedy = "Restore it, then run the same command again."
    return BadLine(0, f"cannot be read any more ({error.strerror})", remedy=remedy, skippable=False)


def parse_line(line: bytes, number: int, *, numbers: bool = False) -> dict[str, Any] | None:
    """The object on a line, None for a blank one. Raises BadLine. Without `numbers` every number in it is 0. Those are read as well
    that JSON does not have and Python writes: NaN, Infinity, -Infinity."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise no_text(number, line, error) from None
    if not text.strip():
        return None
    try:
        value = decode_json(text) if numbers else WITHOUT_NUMBERS.decode(text)
    except json.JSONDecodeError as error:
        raise BadLine(number, f"not JSON ({error.msg})", error.colno) from None
    except RecursionError:
        raise BadLine(number, "nested too deeply to be read", deepest_column(text)) from None
    if not isinstance(value, dict):
        raise BadLine(number, f"{_name(value)}, where an object (a record) should be", 1)
    return value


def decode_json(text: str) -> Any:
    """The value of a JSON text. A whole number of more digits than Python converts becomes an infinity, which no reader takes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _WITH_HUGE_NUMBERS.decode(text)


def _zero(_digits: str) -> int:
    """Numbers are never texts: their value, which may be too long for Python to convert, does not matter."""
    return 0


WITHOUT_NUMBERS = json.JSONDecoder(parse_int=_zero, parse_float=_zero, parse_constant=_zero)
_WITH_HUGE_NUMBERS = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 4000 else float("inf"))


def deepest_column(text: str) -> int:
    """Where the line first is at its deepest."""
    depth = deepest = column = 0
    for match in _TOKENS.finditer(text):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth > deepest:
            deepest, column = depth, match.start() + 1
    return column


def _name(value: object) -> str:
    names: dict[type, str] = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
