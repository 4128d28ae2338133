"""Random edits of bytes and of JSON."""

from __future__ import annotations

import copy
import random
from typing import Any

NUMBERS = [0, -1, 1, 2, 255, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, float("nan"), float("inf")]
STRINGS = [
    "",
    " ",
    "../x",
    "/etc/hostname",
    "a\x00b",
    "\ud800",
    "\n",
    "x" * 3000,
    "null",
    "{{ x }}",
    "ä",
    "\u202e",
    "1e999",
    "-",
]
TOKENS = [
    b"",
    b"\0",
    b"\xff",
    b"\n",
    b"\r\n",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b",",
    b":",
    b"null",
    b"true",
    b"NaN",
    b"Infinity",
    b"-1",
    b"1e999",
    b"99999999999999999999",
    b'"\\ud800"',
    b"../../x",
    b"[" * 2000,
    b'{"a":' * 2000,
    b"\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"\xff" * 8,
    b"\0" * 8,
]


def flip(rng: random.Random, data: bytes) -> bytes:
    """One byte changed."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ rng.randint(1, 255)]) + data[at + 1 :]


def edit_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to four edits: a byte, a range cut out, doubled or zeroed, a token put in or over, the end cut off or doubled."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice((1, 2, 4, 8, rng.randrange(1, 200))))
        match rng.randrange(9):
            case 0 | 1 if data:
                data = flip(rng, data)
            case 2:
                data = data[:start] + data[stop:]
            case 3:
                data = data[:stop] + data[start:]
            case 4:
                data = data[:start] + bytes(stop - start) + data[stop:]
            case 5:
                data = data[:start] + rng.choice(TOKENS) + data[start:]
            case 6:
                token = rng.choice(TOKENS)
                data = data[:start] + token + data[start + len(token) :]
            case 7:
                data = data[:start]
            case _:
                data += data[start:stop]
    return data


def edit_json(rng: random.Random, value: Any, edits: int = 1) -> Any:
    """A copy with so many values changed, taken out, doubled or put in, anywhere."""
    value = copy.deepcopy(value)
    for _ in range(edits):
        value = _edited(rng, value)
    return value


def _edited(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(12):
            case 0:
                del value[key]
            case 1:
                value[rng.choice(STRINGS)] = value[key]
            case 2:
                value[str(rng.choice(list(value)))] = value[key]
            case _:
                value[key] = _edited(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        match rng.randrange(10):
            case 0:
                del value[at]
            case 1:
                value.insert(at, value[at])
            case 2:
                rng.shuffle(value)
            case _:
                value[at] = _edited(rng, value[at])
        return value
    return _another(rng, value)


def _another(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool) and rng.random() < 0.6:
        return not value
    if isinstance(value, int) and rng.random() < 0.6:
        return value + rng.choice((-1, 1, 7, 256))
    if isinstance(value, str) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(("", "x", value[at] * 2, "/", "..")) + value[at + 1 :]
    deep: Any = 1
    for _ in range(rng.choice((0, 0, 0, 800))):
        deep = [deep]
    return rng.choice((None, True, False, rng.choice(NUMBERS), rng.choice(STRINGS), [], {}, [value], {"a": value}, deep))
