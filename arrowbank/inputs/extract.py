"""From a block of JSON lines to its texts and their keys: all of the scan that is worth doing in several processes.

Two readers that agree. The fast one lets msgspec decode a line straight into structs that have nothing but the wanted fields, and
refuses every line that is not quite as expected. Those go to the plain one, `json` and `walk`, which decides what is counted and what
is an error. msgspec is as strict about JSON as `json` is, but does not look at the UTF-8 of what it skips: that is checked first.

A block is worked off in pieces that fit a processor's cache with all that is made of them. No count and no row depends on where a
block or a piece ends. Texts are not made unique here: that costs more for every text than it saves for the few that come twice in one
block. Imports stay few, because every worker process pays for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from itertools import compress
from operator import attrgetter
from typing import Any

import msgspec

from arrowbank.inputs.bad_lines import BadLine, line_too_long, not_a_text, parse_line, unreadable
from arrowbank.inputs.fields import EACH, FieldPath, Step, parse_path
from arrowbank.inputs.lines import MAX_LINE_BYTES, Span

SHA1_BYTES = 20
PIECE_BYTES = 1 << 17

Buffer = bytes | bytearray


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What to take out of an episode, (kind, field path) pairs in order, and what to do about what is not a text or not JSON."""

    fields: tuple[tuple[str, str], ...]
    strict: bool = False
    skip_bad_lines: bool = False
    max_line_bytes: int = MAX_LINE_BYTES

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
    """What is known of the n texts of a block, in order, repeated ones included, empty ones not.

    `lengths` is n uint32, the bytes of UTF-8 of each; `digests` n × 20 bytes of sha1; `kinds` n bytes. `lines` is how many lines (or
    rows) the block has; `error` what ended it early, with the line counted from 1. `texts` is the UTF-8 itself, unless a worker keeps it.
    """

    lengths: Buffer
    digests: Buffer
    kinds: Buffer
    counts: Counts
    lines: int
    error: BadLine | None = None
    texts: list[bytes] = field(default_factory=list)


def picked(texts: list[bytes], fresh: Buffer) -> bytes:
    """The texts on end for which `fresh`, n bytes, is not 0."""
    return b"".join(compress(texts, fresh))


class FoundTexts:
    """Texts as they are met, and what has become of those before them."""

    def __init__(self) -> None:
        self.texts: list[str] = []  # as met, not stripped
        self.kinds = bytearray()  # beside them
        self.counts = Counts()
        self._encoded: list[bytes] = []
        self._digests: list[bytes] = []
        self._kinds = bytearray()

    def settle(self) -> None:
        """Strip the texts, drop the empty, hash the others."""
        texts = list(map(str.strip, self.texts))
        if not all(texts):
            self.kinds = bytearray(compress(self.kinds, texts))
            self.counts.empty += texts.count("")
            texts = list(filter(None, texts))
        self.counts.texts_seen += len(texts)
        encoded = list(map(str.encode, texts))
        self._encoded += encoded
        self._digests.append(b"".join([sha1(text).digest() for text in encoded]))
        self._kinds += self.kinds
        self.texts, self.kinds = [], bytearray()

    def extract(self, lines: int, error: BadLine | None = None) -> Extract:
        """All of it, once every text is settled."""
        return Extract(
            lengths=array("I", map(len, self._encoded)).tobytes(),
            digests=b"".join(self._digests),
            kinds=bytes(self._kinds),
            counts=self.counts,
            lines=lines,
            error=error,
            texts=self._encoded,
        )


def extract_of(bad: BadLine, rules: Rules) -> Extract:
    """The extract of a line that its format's reader refused: counted where such lines are skipped, else the scan's end."""
    found = FoundTexts()
    if not (bad.skippable and rules.skip_bad_lines):
        return found.extract(0, bad)
    found.counts.bad_lines += 1
    return found.extract(bad.line)


class Extractor:
    """Takes the texts out of blocks of JSON lines, and out of values that `json` would give."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        kinds = rules.kinds
        self._fields = [(bytes([kinds.index(kind)]), parse_path(path)) for kind, path in rules.fields]
        self._decode, takers = fast_reader([path for _, path in self._fields])
        self._readers = [(take, each, mark) for (mark, _), (take, each) in zip(self._fields, takers, strict=False)]

    def block(self, block: Buffer | Span) -> Extract:
        """The texts of whole lines."""
        found = FoundTexts()
        try:
            data = block.read() if isinstance(block, Span) else block
        except OSError as error:
            return found.extract(0, unreadable(error))
        view = memoryview(data)
        lines = start = 0
        while start < len(data):
            stop = data.find(b"\n", start + PIECE_BYTES) + 1 or len(data)
            bad = self._piece(bytes(view[start:stop]), lines, found, is_checked=not isinstance(block, Span))
            found.settle()
            if bad:
                return found.extract(bad.line, bad)
            lines += data.count(b"\n", start, stop)
            start = stop
        return found.extract(lines)

    def _piece(self, data: bytes, before: int, found: FoundTexts, *, is_checked: bool) -> BadLine | None:
        """The texts of a few lines, the first of which is number `before` + 1. The error that ends the scan, if there is one. Lines of a
        stream were checked for their length when they were read."""
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        if not is_checked and len(data) > self.rules.max_line_bytes:
            long = next((at for at, line in enumerate(lines) if len(line.rstrip(b"\r")) > self.rules.max_line_bytes), None)
            if long is not None:
                return line_too_long(before + long + 1, self.rules.max_line_bytes)
        decode = self._decode if is_utf8(data) else None
        texts, kinds, readers = found.texts, found.kinds, self._readers
        plain = 0
        for number, line in enumerate(lines, before + 1):
            try:
                episode = decode(line) if decode else None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                episode = None
            if episode is None:
                plain += 1
                if error := self._plain_line(line, number, found):
                    return error
                continue
            for take, each, mark in readers:
                value = take(episode)
                if value is None:
                    continue
                if each is None:
                    texts.append(value)
                    kinds += mark
                else:
                    inside = [text for text in map(each, value) if text is not None]
                    texts += inside
                    kinds += mark * len(inside)
        found.counts.episodes += len(lines) - plain
        return None

    def _plain_line(self, line: bytes, number: int, found: FoundTexts) -> BadLine | None:
        """A line that the fast reader refused. The error that ends the scan, if it is one."""
        try:
            episode = parse_line(line, number)
            if episode is not None:
                self._plain_episode(episode, number, found)
        except BadLine as error:
            if not (error.skippable and self.rules.skip_bad_lines):
                return error
            found.counts.bad_lines += 1
        return None

    def _plain_episode(self, episode: dict[str, Any], number: int, found: FoundTexts) -> None:
        found.counts.episodes += 1
        for mark, path in self._fields:
            before = found.counts.not_text
            texts = [_without_lone_surrogates(text, found.counts) for text in walk(episode, path, found.counts)]
            if self.rules.strict and found.counts.not_text > before:
                raise not_a_text(number, path)
            found.texts += texts
            found.kinds += mark * len(texts)


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


def is_utf8(data: bytes) -> bool:
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


Decode = Callable[[bytes], Any]
Take = Callable[[Any], Any]
Taker = tuple[Take, Take | None]


def fast_reader(paths: Sequence[FieldPath]) -> tuple[Decode | None, list[Taker]]:
    """A decoder of lines, and for every path how to get from what it gives to the texts there.

    That is a function to one text, or, where there is a second function, to a list of values each of which that turns into a text. Any
    of these may be None. The decoder is None where one value would have to be read as two types: the plain reader then has every line.
    """
    root = _Node()
    for path in paths:
        root.grow(path)
    if root.roles() > 1:
        return None, []
    return msgspec.json.Decoder(root.type()).decode, [_taker(root, path) for path in paths]


def _taker(node: _Node, path: FieldPath) -> Taker:
    """The two usual shapes, a key and a key in each object of a list, without a Python call for each text or list."""
    first = attrgetter(node.attribute(path[0]))
    if len(path) == 1:
        return first, None
    if len(path) == 3 and path[1] is EACH and path[2] is not EACH:
        return first, attrgetter(node.inside[path[0]].inside[EACH].attribute(path[2]))
    return _texts_at(node, path), _itself


def _texts_at(node: _Node, path: FieldPath) -> Callable[[Any], list[str]]:
    """From a decoded value of `node` that is not None to the texts at `path` in it."""
    if not path:
        return lambda text: [text]
    inner = _texts_at(node.inside[path[0]], path[1:])
    if path[0] is EACH:
        return lambda values: [text for value in values if value is not None for text in inner(value)]
    get = attrgetter(node.attribute(path[0]))
    return lambda value: inner(found) if (found := get(value)) is not None else []


def _itself(text: str) -> str:
    return text
