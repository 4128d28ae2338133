"""The kinds of banks: for each one everything that the package knows of it, in a module of its own in this folder.

A kind says what its manifest and its columns are, which class opens it, what `verify` counts again, what it is in words, and what to
run next. What stands above the bank (rules of `merge` and `select`, a picture for the card, a section of the report) it names by a
dotted string, which that wing resolves. A module that defines a kind decorates it with `register`; those in this folder are found by
themselves, so a new kind is one new file. A bank of a kind that nobody has registered opens as a plain `Bank` of plain columns.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from arrowbank.bank.columns import values_of
from arrowbank.bank.manifest import BankManifest, Manifest, with_fields
from arrowbank.errors import CorruptBank

if TYPE_CHECKING:
    from arrowbank.bank.checks import Check
    from arrowbank.bank.reader import Bank

Types = Sequence[pa.DataType]  # that a column may have
Field = tuple[str, object, object]  # a name, what the manifest says (or ABSENT), what is expected (or ABSENT)
ABSENT = object()
FOLDER = "path/to/this/folder"  # where a reader of a card puts the bank's own
LOAD = f'from datasets import load_from_disk\n\nbank = load_from_disk("{FOLDER}")'


@dataclass(frozen=True)
class Description:
    """What a bank is: its title, facts by name in the order to be read, tags of the hub, and the Python that opens it."""

    title: str
    facts: dict[str, object]
    tags: tuple[str, ...] = ()
    snippet: str = LOAD


class Kind:
    """A kind of bank. Subclasses change what is different about theirs; the base is a kind that nobody has registered."""

    name: str
    manifest: ClassVar[type[BankManifest]] = BankManifest
    words: ClassVar[str] = ""  # on a page: "target bank"
    unit: ClassVar[str] = "texts"  # what its rows are
    expected: ClassVar[str] = ""  # in "expected …", where it is not the name
    made_by: ClassVar[str] = ""  # the command that writes one: "`arrowbank encode`"
    next: ClassVar[str] = "arrowbank verify {folder}"  # what to run with one
    shown: ClassVar[tuple[str, ...]] = ()  # fields of the manifest that `info` shows, beside those of every kind
    behind: ClassVar[tuple[str, ...]] = ()  # kinds that `build` puts beside it, in folders of their names: what it is made of
    together: ClassVar[bool] = False  # whether several are shown on one page

    # dotted names of what stands above the bank: "arrowbank.wing.module:name"
    rules: ClassVar[str] = ""  # of merge and select: a subclass of arrowbank.combine.rules:CombineRules
    merge_instead: ClassVar[str] = "Build one bank of all the data instead."  # where it cannot be merged
    picture: ClassVar[str] = ""  # for its card: bank → Histogram, Spread or None
    story: ClassVar[str] = ""  # for its page: subject → Story

    bank: ClassVar[Any] = "arrowbank.bank.reader:Bank"  # the class that opens it, or its dotted name

    def __init__(self, name: str = "") -> None:
        self.name = name or self.name

    @property
    def opens(self) -> type[Bank]:
        """The class that opens it."""
        found: type[Bank] = resolve(self.bank) if isinstance(self.bank, str) else self.bank
        return found

    def columns(self, manifest: Any) -> dict[str, Types]:
        """The columns of its shards, and the types that each may have (the first one is what writers give)."""
        return {}

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        """The fields that the recipe decides, as the manifest has them and as the recipe has them."""
        yield from ()

    def files_beside(self, bank: Any) -> dict[str, int | None] | None:
        """The files beside the shards, and the rows stated of each; None for a maker that is not known here."""
        return None

    def recounted(self, bank: Any) -> dict[str, Any]:
        """The fields of the manifest that the rows decide, counted in the rows."""
        return {}

    def bounds(self, bank: Any) -> Iterator[str]:
        """What is wrong with fields that the rows do not decide, but bound."""
        yield from ()

    def checks(self, bank: Any) -> Mapping[str, Callable[[], Check | Sequence[Check]]]:
        """What `verify` checks of the rows, by name."""
        return {}

    def describe(self, manifest: Any) -> Description:
        """What a bank is in words. Facts that are None or empty are left out."""
        return Description(f"Bank of {self.name}", {"rows": manifest.rows})

    def parse(self, manifest: Manifest, where: Path | str) -> BankManifest:
        """The manifest of the file `where`, typed. CorruptBank for a field that is lacking, or not what its readers expect."""
        try:
            found = msgspec.convert({**manifest, "json": {}, "extra": []}, self.manifest)
        except msgspec.ValidationError as error:
            raise self._wrong(manifest, where, str(error)) from None
        found.json = with_fields(manifest, str(where))
        found.recipe = found.json["recipe"]
        return found

    def _wrong(self, manifest: Manifest, where: Path | str, said: str) -> CorruptBank:
        """`said` is msgspec's word: "Expected `int` >= 1 - at `$.hidden_size`"."""
        what, _, place = said.partition(" - at `$")
        inside = re.findall(r"[^.\[\]`]+", place)
        lacking = re.search("missing required field `(.+)`", what)
        names = [*(name for name in inside if name != "..."), *([lacking[1]] if lacking else [])]
        name = names[0] if names else "a field"
        found = repr(manifest[name])[:60] if name in manifest else "nothing"
        where_in = f" ({'.'.join(names)}: {what})" if len(names) > 1 else f" ({what})" if name in manifest else ""
        return CorruptBank(
            f"{where}: {name} is {found}{where_in}, which no bank of {self.name} has. The file is damaged; restore it or rebuild the "
            "bank."
        )


_KINDS: dict[str, Kind] = {}
K = TypeVar("K", bound=type[Kind])


def register(kind: K) -> K:
    """Make a kind known to the package."""
    _KINDS[kind.name] = kind()
    return kind


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)


def every_kind() -> dict[str, Kind]:
    """The registered kinds by name, in the order of the alphabet."""
    _discover()
    return dict(sorted(_KINDS.items()))


def kind_of(name: str) -> Kind:
    """The kind of that name; a plain one where nobody has registered it."""
    _discover()
    return _KINDS.get(name) or Kind(name)


def resolve(name: str) -> Any:
    """What a dotted name, "arrowbank.wing.module:name", stands for."""
    module, _, inside = name.partition(":")
    return getattr(importlib.import_module(module), inside)


def typed(manifest: Manifest, where: Path | str) -> BankManifest:
    """The manifest of the file `where`, as its kind types it. CorruptBank for a field that is lacking or of another type."""
    return kind_of(manifest["kind"]).parse(manifest, where)


# what a recipe decides


def equal(manifest: Manifest, wanted: Mapping[str, object]) -> Iterator[Field]:
    """The fields of these names and values."""
    for name, value in wanted.items():
        yield name, manifest.get(name, ABSENT), value


def parts(entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Of each entry what the recipe has of it, too."""
    return [{name: entry[name] for name in names} for entry in entries]


def column_sum(bank: Bank, column: str) -> int:
    """The sum of a column of whole numbers."""
    return sum(int(values_of(batch.column(column)).sum(dtype=np.int64)) for batch in bank.shards())


# columns of the shards

STRING, INT, LONG = [pa.string()], [pa.int32()], [pa.int64()]
TEXT = [pa.large_string(), pa.string()]
BINARY = [pa.binary()]


def fixed(value: pa.DataType, width: int) -> Types:
    return [pa.list_(value, width)]


def lists(value: pa.DataType) -> Types:
    return [pa.list_(value)]


def vectors(value: pa.DataType, width: int) -> Types:
    """A list of fixed-size lists."""
    return [pa.list_(pa.list_(value, width))]


def check_columns(path: Path, schema: pa.Schema, manifest: BankManifest) -> None:
    """Raise CorruptBank where the columns of the shard at `path` are not those of the bank's kind."""
    wanted = kind_of(manifest.kind).columns(manifest)
    found = {field.name: field.type for field in schema}
    wrong = [f"{name} is there twice" for name in found if schema.names.count(name) > 1]
    wrong += [f"no column {name}" for name in wanted if name not in found]
    for name, type_found in found.items():
        expected = wanted.get(name)
        if expected is not None and type_found not in expected:
            wrong.append(f"column {name} is {type_found}, expected {expected[0]}")
        elif expected is None and not _is_plain(type_found):
            wrong.append(f"column {name} is {type_found}, which no writer of banks gives")
    if wrong:
        raise CorruptBank(f"{path}: {'; '.join(wrong[:3])}. The file is damaged; restore it or rebuild the bank.")


def _is_plain(kind: Any) -> bool:
    """Whether a column may be of this type: numbers, flags, text, bytes, and lists of these."""
    types = pa.types
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    plain = ("is_integer", "is_floating", "is_boolean", "is_string", "is_large_string", "is_binary")
    return any(getattr(types, name)(kind) for name in plain)
