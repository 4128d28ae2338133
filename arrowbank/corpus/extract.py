"""From a block of JSON lines to its texts and their keys: all of the scan that is worth doing in several processes.

Two readers that agree. The fast one lets msgspec decode a line straight into structs that have nothing but the wanted fields, and refuses
every line that is not quite as expected. Those lines go to the plain one, `json` and `walk`, which decides what is counted and what is an
error. msgspec is as strict about JSON as `json` is, but does not look at the UTF-8 of what it skips: blocks are checked first.

A block's texts are stripped, emptied of the empty, made unique and hashed here. That they are made unique inside a block only saves work: no
count and no row depends on where a block ends. Imports stay small, because every worker process pays for them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from arrowbank.corpus.badlines import BadLine, not_a_text, parse_line
from arrowbank.corpus.fields import EACH, FieldPath, Step, parse_path

SHA1_BYTES = 20


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What to take out of an episode: (kind, field path) pairs in order, and what to do about what is not a text or not JSON."""

    fields: tuple[tuple[str, str], ...]
    strict: bool = False
    skip_bad_lines: bool = False

    @property
    def kinds(self) -> list[str]:
        """The kinds in order; a text's kind is stored as its place in this list."""
        return list(dict.fromkeys(kind for kind, _ in self.fields))


class Counts(msgspec.Struct, kw_only=True):
    """What was met, whether or not it became a row. No count depends on how the input was cut into blocks."""

    episodes: int = 0  # JSON objects, or rows
    texts_seen: int = 0  # usable texts, repeated ones included
    empty: int = 0  # texts of nothing but white space
    not_text: int = 0  # a number, bool, list or object where a text should be
    not_object: int = 0  # something else where an object should be, null excepted
    not_list: int = 0  # something else where a list should be, null excepted
    lone_surrogates: int = 0  # texts in which a lone surrogate became `?`
    bad_lines: int = 0  # lines that are no JSON object in UTF-8, skipped

    def add(self, other: Counts) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, kw_only=True)
class Extract:
    """The texts of a block in first-seen order. Repeated ones may be left out.

    `data` is the UTF-8 of the n texts on end, `lengths` n uint32 of its bytes, `digests` n × 20 bytes of sha1, `kinds` n bytes. `lines`
    is how many lines (or rows) the block has; `error` what ended it early, with the line counted from 1.
    """

    data: bytes
    lengths: bytes
    digests: bytes
    kinds: bytes
    counts: Counts
    lines: int
    error: BadLine | None = None


@dataclass
class Found:
    """Texts as they are met: not stripped, kinds beside them."""

    texts: list[str] = field(default_factory=list)
    kinds: bytearray = field(default_factory=bytearray)
    counts: Counts = field(default_factory=Counts)

    def seal(self, lines: int, error: BadLine | None = None) -> Extract:
        """Strip, drop the empty and the repeated, hash."""
        texts = list(map(str.strip, self.texts))
        kinds = bytes(self.kinds)
        if not all(texts):
            kinds = bytes(compress(kinds, texts))
            kept = list(filter(None, texts))
            self.counts.empty += len(texts) - len(kept)
            texts = kept
        self.counts.texts_seen += len(texts)
        count = len(texts)
        first = dict(zip(reversed(texts), range(count - 1, -1, -1), strict=True))  # the last to enter is the first seen
        if 1 < len(first) < count:
            places = sorted(first.values())
            pick = itemgetter(*places)
            texts, kinds = list(pick(texts)), bytes(pick(kinds))
        elif len(first) < count:
            texts, kinds = texts[:1], kinds[:1]
        encoded = [text.encode() for text in texts]
        return Extract(
            data=b"".join(encoded),
            lengths=array("I", map(len, encoded)).tobytes(),
            digests=sha1_digests(encoded),
            kinds=kinds,
            counts=self.counts,
            lines=lines,
            error=error,
        )


def sha1_digests(values: Iterable[bytes]) -> bytes:
    """The sha1 of each value, on end. Copying one fresh state costs half of what OpenSSL takes to set up another."""
    fresh = hashlib.sha1(usedforsecurity=False).copy
    digests = []
    for value in values:
        state = fresh()
        state.update(value)
        digests.append(state.digest())
    return b"".join(digests)


class Extractor:
    """Takes the texts out of blocks of JSON lines, and out of values that `json` would give."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        kinds = rules.kinds
        self._fields = [(kinds.index(kind), parse_path(path)) for kind, path in rules.fields]
        self._decode, self._takers = fast_reader([path for _, path in self._fields])
        self._marks = [bytes([kind]) for kind, _ in self._fields]

    def block(self, data: bytes) -> Extract:
        """The texts of whole lines."""
        found = Found()
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        checked = _is_utf8(data)
        decode, counts = self._decode, found.counts
        readers = list(zip(self._takers, self._marks, strict=False))
        for number, line in enumerate(lines, 1):
            try:
                if decode is None or not (checked or _is_utf8(line)):
                    raise msgspec.DecodeError
                episode = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                if error := self._plain_line(line, number, found):
                    return found.seal(number, error)
                continue
            counts.episodes += 1
            for take, mark in readers:
                texts = take(episode)
                found.texts += texts
                found.kinds += mark * len(texts)
        return found.seal(len(lines))

    def _plain_line(self, line: bytes, number: int, found: Found) -> BadLine | None:
        """A line that the fast reader refused. The error that ends the scan, if it is one."""
        try:
            episode = parse_line(line, number)
            if episode is not None:
                self.value(episode, number, found)
        except BadLine as error:
            if error.skippable and self.rules.skip_bad_lines:
                found.counts.bad_lines += 1
                return None
            return error
        return None

    def value(self, episode: dict[str, Any], number: int, found: Found) -> None:
        """The texts of one episode as a plain value. Raises BadLine under `strict` for what is not a text."""
        found.counts.episodes += 1
        for kind, path in self._fields:
            before = found.counts.not_text
            texts = [_without_lone_surrogates(text, found.counts) for text in walk(episode, path, found.counts)]
            if self.rules.strict and found.counts.not_text > before:
                raise not_a_text(number, path)
            found.texts += texts
            found.kinds += bytes([kind]) * len(texts)


def walk(value: Any, path: FieldPath, counts: Counts) -> list[str]:
    """The strings at `path` inside a plain value, in order; what stands in the way is counted. null is absent."""
    if value is None:
        return []
    if not path:
        if isinstance(value, str):
            return [value]
        counts.not_text += 1
        return []
    step, rest = path[0], path[1:]
    if step is EACH:
        if isinstance(value, list):
            return [text for item in value for text in walk(item, rest, counts)]
        counts.not_list += 1
        return []
    if isinstance(value, dict):
        return walk(value.get(step), rest, counts)
    counts.not_object += 1
    return []


def _without_lone_surrogates(text: str, counts: Counts) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        counts.lone_surrogates += 1
        return text.encode("utf-8", "replace").decode()
    return text


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# The fast reader: a tree of the wanted fields, as msgspec types that decode it and as functions that read it.


@dataclass
class _Node:
    """What is wanted of a value: that it is a text, and what lies at its keys or in EACH of its elements."""

    text: bool = False
    inside: dict[Step, _Node] = field(default_factory=dict)

    def grow(self, path: FieldPath) -> None:
        if not path:
            self.text = True
        else:
            self.inside.setdefault(path[0], _Node()).grow(path[1:])

    def roles(self) -> int:
        """As how many types this value, or one inside, would have to be read: text, list, object."""
        here = self.text + (EACH in self.inside) + bool(self.inside.keys() - {EACH})
        return max([here, *(node.roles() for node in self.inside.values())])

    def type(self) -> Any:
        """The msgspec type of a value with one role, null excepted."""
        if self.text:
            return str
        if EACH in self.inside:
            item = self.inside[EACH]
            return list[item.type() | None] if item.text else list[item.type()]  # type: ignore[misc]
        fields = [(self.attribute(key), node.type() | None, None) for key, node in self.inside.items()]
        return msgspec.defstruct("Wanted", fields, rename={self.attribute(key): str(key) for key in self.inside}, gc=False)

    def attribute(self, key: Step) -> str:
        """The attribute that holds what lies at `key`: keys need not be Python names."""
        return f"f{list(self.inside).index(key)}"


Take = Callable[[Any], Sequence[str]]


def fast_reader(paths: Sequence[FieldPath]) -> tuple[Callable[[bytes], Any] | None, list[Take]]:
    """A decoder of lines, and for every path a function from what it gives to the texts there.

    The decoder is None where one value would have to be read as two types: the plain reader then has every line.
    """
    root = _Node()
    for path in paths:
        root.grow(path)
    if root.roles() > 1:
        return None, []
    return msgspec.json.Decoder(root.type()).decode, [_taker(root, path) for path in paths]


def _taker(node: _Node, path: FieldPath) -> Take:
    """From a decoded value of `node` that is not None to the texts at `path` in it."""
    if not path:
        return lambda text: (text,)
    step, rest = path[0], path[1:]
    child = node.inside[step]
    if step is EACH and len(rest) == 1 and rest[0] is not EACH:  # the way of almost every text
        get_text = attrgetter(child.attribute(rest[0]))
        return lambda values: [text for text in map(get_text, values) if text is not None]
    inner = _taker(child, rest)
    if step is EACH:
        return lambda values: [text for value in values if value is not None for text in inner(value)]
    get = attrgetter(node.attribute(step))

    def take(value: Any) -> Sequence[str]:
        found = get(value)
        return inner(found) if found is not None else ()

    return take
