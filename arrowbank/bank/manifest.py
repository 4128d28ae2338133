"""What a bank says about itself: names of its files, receipts, digests, and the two files that `datasets` reads.

data-00000.arrow …     the shards: Arrow IPC stream files of one record batch each
dataset_info.json      the column types, for `datasets`
manifest.json          what the bank is, from what, and a byte count, row count and sha256 for every file
state.json             the shards, for `datasets`; written last: its presence is the commit
build.jsonl            when, where and how fast: the only file in which two runs of one plan differ
journal/               while a build is on: its locks, and a receipt for every finished file
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrowbank.errors import CorruptBank, InputError

FORMAT = "arrowbank/1"
MANIFEST = "manifest.json"
STATE = "state.json"
INFO = "dataset_info.json"
CARD = "README.md"
LOG = "build.jsonl"
JOURNAL = "journal"
SHARD_NAME = re.compile(r"data-(\d{5,})\.arrow")

Manifest = dict[str, Any]


def shard_name(index: int) -> str:
    return f"data-{index:05d}.arrow"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A finished file: its name in the bank, rows (None where rows mean nothing), bytes, sha256, and the seconds it took.

    Files of an export are not hashed: their sha256 is empty.
    """

    name: str
    rows: int | None
    bytes: int
    sha256: str
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


def differing_fields(found: object, wanted: object, prefix: str = "") -> dict[str, tuple[object, object]]:
    """The leaves in which two JSON values differ: dotted name → (found, wanted)."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        fields: dict[str, tuple[object, object]] = {}
        for key in sorted({*found, *wanted}):
            fields |= differing_fields(found.get(key), wanted.get(key), f"{prefix}.{key}" if prefix else key)
        return fields
    same = json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)
    return {} if same else {prefix or "value": (found, wanted)}


def read_json(path: Path) -> Any:
    """The JSON value in `path`; CorruptBank when it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptBank(
            f"{path}: not readable as JSON ({error}). The file is damaged; restore it or rebuild the bank."
        ) from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the bank in `folder`, committed or not. InputError when there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(_no_bank(folder))
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise InputError(f"{path}: format {found!r}, this version reads {FORMAT!r}. Open it with the version that wrote it.")
    return manifest


def _no_bank(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder. Give the folder of a bank."
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    hint = f"Did you mean {folder / inside[-1]}?" if inside else "Give a folder that arrowbank has written."
    return f"{folder}: not a bank (no {MANIFEST}). {hint}"


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
    """What state.json holds: `datasets` insists on all seven keys."""
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
