"""The sidecar of an export, `arrowbank-export.json`: what the folder is, what it was made from, and bytes and xxh3-128 of each file.

Trainers do not read it, and no pattern of theirs matches it. Readers of a folder of Parquet files take every file that is not
hidden, so there the sidecar is in `.arrowbank/`. It carries a digest of itself; like all digests in it, that one finds damage
and edits by hand, not a forger, who would compute it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from arrowbank.bank.files import digest_of, json_bytes
from arrowbank.bank.manifest import MAX_COUNT, canonical_json, read_json
from arrowbank.bank.names import check_names, check_places
from arrowbank.errors import CorruptBank

SIDECAR = "arrowbank-export.json"
HIDDEN_SIDECAR = f".arrowbank/{SIDECAR}"
PLACES = (SIDECAR, HIDDEN_SIDECAR)
VERSION = "arrowbank-export/1"
REMEDY = "The file is damaged or was edited; restore it or export again."
FIELDS: dict[str, type | tuple[type, ...]] = {
    "format": str,
    "format_version": (int, type(None)),
    "converter": str,
    "made_from": dict,
    "options": dict,
    "plan": str,
    "files": list,
}
MAX_BYTES = 512 << 20  # some millions of files, a sample each
ENTRY: dict[str, type] = {"name": str, "bytes": int, "xxh3_128": str}  # of a file

Sidecar = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class About:
    """What a sidecar says of an export before its files are there.

    format          as `--to` names it
    format_version  the format's own number, where it has one
    made_from       what was exported: its kind, and digests that tell it from others
    options         those that had a say
    """

    format: str
    format_version: int | None = None
    made_from: Mapping[str, Any]
    options: Mapping[str, Any]


def xxh3_128(data: bytes) -> str:
    """The xxh3-128 of `data`, in hexadecimal."""
    return xxhash.xxh3_128(data).hexdigest()


def sealed(fields: Mapping[str, Any]) -> Sidecar:
    """`fields` as a sidecar: with its version, and the digest over their canonical JSON."""
    unsealed = {**fields, "sidecar": VERSION}
    return {**unsealed, "digest": xxh3_128(canonical_json(unsealed))}


def sidecar_bytes(sidecar: Sidecar) -> bytes:
    """The file's bytes."""
    return json_bytes(sidecar)


def find_sidecar(folder: Path) -> Path | None:
    """The path of the sidecar in `folder`; None where there is none."""
    return next((folder / place for place in PLACES if (folder / place).is_file()), None)


def sidecar_in(folder: Path) -> Sidecar:
    """The sidecar of the export in `folder`; empty where there is none. CorruptBank as `read_sidecar`."""
    path = find_sidecar(folder)
    return read_sidecar(path) if path else {}


def require_as_exported(folder: Path, names: Iterable[str]) -> None:
    """CorruptBank for the first of the small files `names` whose bytes are not those that the sidecar lists, where there is one:
    what they say of layers and model becomes a bank's labels. Large files are for `arrowbank verify`."""
    listed = {entry["name"]: entry for entry in sidecar_in(folder).get("files", ())}
    for name in names:
        if name in listed and (found := digest_of(folder / name, "xxh3_128")) != listed[name]["xxh3_128"]:
            raise CorruptBank(
                f"{folder / name}: not the file that was exported (found xxh3-128 {found}, expected {listed[name]['xxh3_128']}). {REMEDY}"
            )


def read_sidecar(path: Path) -> Sidecar:
    """The sidecar at `path`. CorruptBank where it is not one, its digest is not that of its fields, or a name in it is not plain."""
    folder = path.parents[1] if path.parent.name == Path(HIDDEN_SIDECAR).parent.name else path.parent
    check_places(folder, PLACES, folder)
    sidecar = read_json(path, max_bytes=MAX_BYTES)
    if not isinstance(sidecar, dict) or sidecar.get("sidecar") != VERSION:
        found = sidecar.get("sidecar") if isinstance(sidecar, dict) else type(sidecar).__name__
        raise CorruptBank(f"{path}: not a sidecar that this version reads (found {found!r}, expected {VERSION!r}). {REMEDY}")
    said = {name: value for name, value in sidecar.items() if name != "digest"}
    try:
        digest = xxh3_128(canonical_json(said))
    except (ValueError, RecursionError) as error:
        raise CorruptBank(f"{path}: has values that no export writes ({error}). {REMEDY}") from None
    if sidecar.get("digest") != digest:
        raise CorruptBank(f"{path}: its digest is not that of its fields (found {digest}, expected what it says). {REMEDY}")
    if wrong := [name for name, kind in FIELDS.items() if not isinstance(said.get(name), kind)] or _wrong_entries(
        said["files"]
    ):
        raise CorruptBank(f"{path}: no usable {', '.join(wrong)}. {REMEDY}")
    check_names((entry["name"] for entry in said["files"]), path, nested=True, reserved=(SIDECAR,))
    return sidecar


def origin(sidecar: Sidecar) -> str:
    """What an export was made from, for people: its kind and twelve digits of its digest."""
    made = sidecar["made_from"]
    kind, digest = str(made.get("kind")), str(made.get("plan_digest") or made.get("rows_digest"))
    return f"{kind if kind.isidentifier() else repr(kind)[:40]} {digest[:12] if digest.isalnum() else None}"


def _wrong_entries(files: list[Any]) -> list[str]:
    """The places in `files` that no export would have written so. Their names are another matter."""
    return [f"files[{at}]" for at, entry in enumerate(files) if not _is_entry(entry)][:5]


def _is_entry(entry: Any) -> bool:
    typed = isinstance(entry, dict) and all(type(entry.get(name)) is kind for name, kind in ENTRY.items())
    return typed and 0 <= entry["bytes"] < MAX_COUNT
