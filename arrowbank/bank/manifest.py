"""What a bank says about itself: names of its files, receipts, digests, and the two files that `datasets` reads.

data-00000.arrow …     the shards: Arrow IPC stream files of one record batch each
dataset_info.json      the column types, for `datasets`
manifest.json          what the bank is, from what, and a byte count, row count and sha256 for every file
state.json             the shards, for `datasets`, and a sha256 of the manifest; written last: its presence is the commit
build.jsonl            when, where and how fast: the only file in which two runs of one plan differ
journal/               while a build is on: its locks, and a receipt for every finished file
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from arrowbank.bank.refusals import naming
from arrowbank.errors import CorruptBank

FAMILY = "arrowbank/"  # what the format of a bank of any version begins with
FORMAT = f"{FAMILY}2"
MANIFEST = "manifest.json"
STATE = "state.json"
INFO = "dataset_info.json"
CARD = "README.md"
LOG = "build.jsonl"
JOURNAL = "journal"
# what every writer says
FIELDS: dict[str, type] = {"kind": str, "plan_digest": str, "recipe": dict, "rows": int, "complete": bool, "files": list}
SHA256 = re.compile("[0-9a-f]{64}")
SHARD_NAME = re.compile(r"data-(\d{5,})\.arrow", re.ASCII)
RESERVED = (MANIFEST, STATE, CARD, LOG, JOURNAL)  # what a manifest cannot list
# A manifest lists each file in about 200 bytes: there is room for 300,000. Hostile JSON takes about 20 times its bytes in memory.
MAX_JSON_BYTES = 64 << 20
MAX_RECEIPT_BYTES = 64 << 10
MAX_JSON_DEPTH = 64
MAX_COUNT = 1 << 63

Manifest = dict[str, Any]


def shard_name(index: int) -> str:
    return f"data-{index:05d}.arrow"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A finished file: its name in the bank, rows (None where rows mean nothing), bytes, sha256, and the seconds it took.

    Files of an export have an xxh3-128 instead of the sha256.
    """

    name: str
    rows: int | None
    bytes: int
    sha256: str = ""
    xxh3_128: str = ""
    plan_digest: str
    seconds: float = 0.0

    @property
    def shard(self) -> int | None:
        """The shard's number; None for a file that is no shard."""
        match = SHARD_NAME.fullmatch(self.name)
        return int(match[1]) if match else None

    def entry(self) -> dict[str, Any]:
        """How the manifest lists this file."""
        return {"name": self.name, "rows": self.rows, "bytes": self.bytes, "sha256": self.sha256}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def canonical_json(value: object) -> bytes:
    """The one spelling of `value` that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def joint_sha256(hashes: Sequence[str]) -> str:
    """The sha256 of one file, or for several files the sha256 over their hexadecimal sha256s on end."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def plan_digest(kind: str, recipe: Mapping[str, Any]) -> str:
    """The sha256 over everything that decides a bank's rows: format, kind and recipe."""
    return hashlib.sha256(canonical_json({"format": FORMAT, "kind": kind, "recipe": recipe})).hexdigest()


def short_json(value: object, most: int = 60, *, ascii: bool = True) -> str:
    """A JSON value for a message, cut where it is long. `ascii`: other characters as escapes."""
    text = json.dumps(value, ensure_ascii=ascii, default=str)
    return text if len(text) <= most else text[: most - 3] + "…"


def differing_fields(found: object, wanted: object, prefix: str = "") -> dict[str, tuple[object, object]]:
    """The leaves in which two JSON values differ: dotted name → (found, wanted)."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        fields: dict[str, tuple[object, object]] = {}
        for key in sorted({*found, *wanted}):
            fields |= differing_fields(found.get(key), wanted.get(key), f"{prefix}.{key}" if prefix else key)
        return fields
    same = json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)
    return {} if same else {prefix or "value": (found, wanted)}


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The JSON value in `path`. CorruptBank when it is not JSON within the limits of `parsed_json`."""
    try:
        return json_in(path, max_bytes=max_bytes)
    except ValueError as error:
        raise CorruptBank(
            f"{path}: not readable as JSON ({error}). The file is damaged; restore it or rebuild the bank."
        ) from None


def readable_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The JSON value in `path`; None where there is no file, or where a power cut has left it empty or cut: it is to be written again."""
    try:
        return read_json(path, max_bytes=max_bytes)
    except (CorruptBank, FileNotFoundError):
        return None


def json_in(path: Path, *, max_bytes: int = MAX_JSON_BYTES, strict: bool = True) -> Any:
    """The JSON value in `path`. OSError, and ValueError as `parsed_json` raises it, also for what is no regular file."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    with naming(path), path.open("rb") as file:
        return parsed_json(file.read(max_bytes + 1), max_bytes=max_bytes, strict=strict)


def parsed_json(data: bytes, *, max_bytes: int = MAX_JSON_BYTES, strict: bool = True) -> Any:
    """The JSON value in `data`. ValueError when it is not JSON, or has more than `max_bytes` or MAX_JSON_DEPTH levels.

    `strict`, for what arrowbank itself writes: no key of an object twice, no NaN or Infinity, no lone surrogates.
    """
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes")
    hooks: dict[str, Any] = {"object_pairs_hook": _without_duplicates, "parse_constant": _no_constant} if strict else {}
    deep = ValueError(f"nested more than {MAX_JSON_DEPTH} levels deep")
    try:
        value = json.loads(data, **hooks)
    except RecursionError:
        raise deep from None
    if _is_deep(value):
        raise deep
    if strict and b"\\ud" in data.lower():
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice in an object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _containers(outer)]
        if not level:
            return False
    return True


def _containers(value: dict[str, Any] | list[Any]) -> list[Any]:
    inside = value.values() if isinstance(value, dict) else value
    return [inner for inner in inside if isinstance(inner, dict | list)]


class Fields(dict[str, Any]):
    """An object of a committed bank's manifest: CorruptBank, not KeyError, for a field that it lacks."""

    where = MANIFEST

    def __missing__(self, name: str) -> Any:
        raise CorruptBank(f"{self.where}: has no field {name}. The file is damaged; restore it or rebuild the bank.")


def with_fields(value: Any, where: str) -> Any:
    """A JSON value whose objects, at any depth, are `Fields` of the file `where`."""
    if isinstance(value, list):
        return [with_fields(inside, where) for inside in value]
    if not isinstance(value, dict):
        return value
    fields = Fields({name: with_fields(inside, f"{where}, {name}") for name, inside in value.items()})
    fields.where = where
    return fields


# the same, typed: what readers get. Each kind adds its own fields (see arrowbank.bank.kinds).

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # Arrow's fixed-size lists have 32-bit sizes
Vocabulary = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]  # how many tokens a model knows: memory is taken for each


class FileEntry(msgspec.Struct, kw_only=True):
    """A file as the manifest lists it; `rows` is None where rows mean nothing."""

    name: str
    rows: Count | None
    bytes: Count
    sha256: str


class Merged(msgspec.Struct, kw_only=True):
    """How a merged bank came about: its parts in order, and how many rows were in an earlier part already."""

    parts: list[dict[str, Any]]
    shared: Count


class Selected(msgspec.Struct, kw_only=True):
    """The bank that a selection is of: its plan digest, and its rows."""

    plan_digest: str
    rows: Count


class BankManifest(msgspec.Struct, kw_only=True):
    """What the manifest of a committed bank says. `json` is the JSON object itself, also with the fields that a consumer has added
    (`extra` are their names): `manifest["trained_by"]`, `manifest.get("trained_by")` and `"trained_by" in manifest` read it.

    recipe        everything that decided the rows, by content; its fields depend on the maker
    text_count    the rows that the bank has when it is complete
    kinds         how many rows there are of each kind of text
    generations   the cumulative ends of rows, for a bank that grew
    """

    format: str
    kind: str
    plan_digest: str
    recipe: dict[str, Any]
    rows: Count
    complete: bool
    files: list[FileEntry]
    text_count: Count | None = None
    kinds: dict[str, Count] | None = None
    generations: list[Count] | None = None
    counts: Any = None
    merged: Merged | None = None
    selected: Selected | None = None
    json: dict[str, Any]
    extra: list[str]

    def __getitem__(self, name: str) -> Any:
        return self.json[name]

    def __contains__(self, name: str) -> bool:
        return name in self.json

    def keys(self) -> KeysView[str]:
        return self.json.keys()

    def items(self) -> ItemsView[str, Any]:
        return self.json.items()

    def get(self, name: str, default: Any = None) -> Any:
        return self.json.get(name, default)


def dataset_info(schema: pa.Schema) -> dict[str, Any]:
    """What dataset_info.json holds for columns of `schema`: the features as `datasets` spells them."""
    features = {field.name: _feature(field.type) for field in schema}
    return {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_fixed_size_list(kind):
        return {"feature": _feature(kind.value_type), "length": kind.list_size, "_type": "List"}
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": {"halffloat": "float16", "float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}


def dataset_state(shards: Iterable[str], digest: str) -> dict[str, Any]:
    """What a state.json holds for `datasets`, which insists on all seven keys."""
    return {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people: 0-2, 5."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}-{high}" if low < high else f"{low}" for low, high in parts) or "none"
