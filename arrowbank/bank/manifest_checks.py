"""Reading a manifest, and whether it says what its writer said: everything that can be told without reading the rows.

plan digest     recomputed from format, kind and recipe
recipe          every field that the recipe decides is held against it
state.json      has the list of shards, and a sha256 of all fields that were committed
dataset_info.json   is what the writer would write for these shards

Opening a bank does all of this, and reads nothing but these files for it. What the rows decide is recounted by `verify` (recounts.py). A
recipe of a maker that this version does not know decides nothing here; its digest is checked all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrowbank.bank.kinds import ABSENT, Field, kind_of
from arrowbank.bank.manifest import (
    CARD,
    FAMILY,
    FIELDS,
    FORMAT,
    INFO,
    LOG,
    MANIFEST,
    MAX_COUNT,
    RESERVED,
    SHA256,
    SHARD_NAME,
    STATE,
    Manifest,
    canonical_json,
    dataset_info,
    dataset_state,
    differing_fields,
    plan_digest,
    read_json,
    shard_name,
    short_json,
)
from arrowbank.bank.names import check_names, check_places
from arrowbank.errors import CorruptBank, InputError

VOUCHED = "_manifest"  # the key of state.json under which the commit vouches for the manifest
# what the writer itself says
WRITERS = ("format", "kind", "plan_digest", "recipe", "rows", "complete", "files")

ENTRY = {"name", "rows", "bytes", "sha256"}  # of a file


# read, committed or not


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the bank in `folder`, committed or not. InputError when there is none, CorruptBank when a field is lacking,
    UnsafeName when it lists a file that is not in the folder."""
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(_no_bank(folder))
    check_places(folder, [MANIFEST], folder)
    manifest = checked_manifest(read_json(path), path, "The file is damaged; restore it or rebuild the bank.")
    check_places(folder, [*(entry["name"] for entry in manifest["files"]), STATE, INFO, LOG, CARD], path)
    return manifest


def checked_manifest(manifest: Any, where: object, remedy: str) -> Manifest:
    """`manifest`, of whatever came from `where`. InputError for another format, CorruptBank where a field or entry is lacking,
    UnsafeName for a name that is not a plain one."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(_other_format(manifest, where))
    if wrong := [name for name, kind in FIELDS.items() if not _is(manifest.get(name), kind)] or _wrong_entries(manifest):
        raise CorruptBank(f"{where}: says nothing usable of {', '.join(wrong)}. {remedy}")
    check_names((entry["name"] for entry in manifest["files"]), where, reserved=RESERVED)
    return manifest


def _other_format(manifest: Any, where: object) -> str:
    found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
    said = f"{where}: format {short_json(found)}, this version reads {FORMAT!r}."
    if not str(found).startswith(FAMILY):
        return f"{said} Give the folder of a bank."
    made_by = kind_of(str(manifest.get("kind"))).made_by or "the command that made it"
    return f"{said} Build the bank again with {made_by}, into a new folder."


def _is(value: object, kind: type) -> bool:
    """Whether `value` is a `kind`; of an int also that it is no bool, and a count that 64 bits hold."""
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT
    return isinstance(value, kind)


def _wrong_entries(manifest: Manifest) -> list[str]:
    """The places in `files` that no writer would have left so. Their names are another matter."""
    wrong = []
    for at, entry in enumerate(manifest["files"]):
        if not isinstance(entry, dict) or "name" not in entry or not _is_entry(entry):
            wrong.append(f"files[{at}]")
        elif entry.get("rows") is None and isinstance(entry["name"], str) and SHARD_NAME.fullmatch(entry["name"]):
            wrong.append(f"files[{at}] ({entry['name']})")
    return wrong[:5]


def _is_entry(entry: Mapping[str, Any]) -> bool:
    counted = entry.get("rows") is None or _is(entry["rows"], int)
    hashed = isinstance(entry.get("sha256"), str) and SHA256.fullmatch(entry["sha256"])
    return bool(counted and hashed and _is(entry.get("bytes"), int))


def _no_bank(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder. Give the folder of a bank."
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    hint = f"Did you mean {folder / inside[-1]}?" if inside else "Give a folder that arrowbank has written."
    return f"{folder}: not a bank (no {MANIFEST}). {hint}"


# written by the commit


def state_of(manifest: Manifest, fields: Iterable[str] | None = None) -> dict[str, Any]:
    """What state.json holds for a bank of this manifest: its shards, and the sha256 of the canonical JSON of an object of its `fields`
    (all that it has). KeyError for a field that it has not."""
    shards = sorted(int(match[1]) for entry in manifest["files"] if (match := SHARD_NAME.fullmatch(entry["name"])))
    names = sorted(set(manifest if fields is None else fields))
    digest = hashlib.sha256(canonical_json({name: manifest[name] for name in names})).hexdigest()
    vouched = {VOUCHED: {"fields": names, "sha256": digest}}
    return dataset_state(map(shard_name, shards), manifest["plan_digest"]) | vouched


def vouched_fields(state: Any) -> list[str]:
    """The fields of the manifest that the commit vouches for, as state.json names them; empty where it names none."""
    stated = state.get(VOUCHED) if isinstance(state, dict) else None
    fields = stated.get("fields") if isinstance(stated, dict) else None
    return fields if isinstance(fields, list) and all(isinstance(name, str) for name in fields) else []


def is_state_of(state: Any, manifest: Manifest) -> bool:
    """Whether `state` is the commit of the bank with this manifest: its shards, and every field that was committed."""
    fields = vouched_fields(state)
    return set(WRITERS) <= set(fields) <= set(manifest) and same_json(state, state_of(manifest, fields))


# looked at by every opening


def check_manifest(path: Path | str, manifest: Manifest) -> None:
    """CorruptBank, naming the field, unless the committed `manifest` in the file (or at the address) `path` agrees with itself."""
    try:
        wrong = [
            f"{name} {_said(found)}, expected {_short(wanted)}"
            for name, found, wanted in _fields(manifest)
            if not same_json(found, wanted)
        ]
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:  # JSON of any shape may stand there
        wrong = [f"a field is lacking or of another type ({type(error).__name__}: {error})"]
    if wrong:
        raise CorruptBank(
            f"{path}: {'; '.join(wrong[:3])}. It was changed after the bank was committed: restore it from a copy, or rebuild the bank."
        )


def check_state(folder: Path, manifest: Manifest) -> list[str]:
    """The fields of the manifest that the commit does not vouch for: a consumer has added them. CorruptBank unless state.json is what
    the writer writes for this manifest."""
    shards = [entry["name"] for entry in manifest["files"] if SHARD_NAME.fullmatch(entry["name"])]
    if not shards or shards != [shard_name(index) for index in range(len(shards))]:
        raise CorruptBank(
            f"{folder / MANIFEST}: lists the shards {_short(shards)}, expected {shard_name(0)} and so on. Restore it from a copy, or "
            "rebuild the bank."
        )
    found = read_json(folder / STATE)
    if refuse_changed(folder, manifest, found):
        return sorted(set(manifest) - set(vouched_fields(found)))
    wanted = state_of(manifest, ())
    if not isinstance(found, dict) or not same_json(found.get("_data_files"), wanted["_data_files"]):
        raise CorruptBank(
            f"{folder / STATE}: does not list the shards of {MANIFEST}. Restore it from a copy, or rebuild the bank."
        )
    _require_equal(folder / STATE, found, {**wanted, VOUCHED: found.get(VOUCHED)})  # raises: anything but the digest differs
    return []


def refuse_changed(where: Path | str, manifest: Manifest, state: Any) -> bool:
    """Whether `state` is the commit of the manifest at the place `where`. CorruptBank where it is one of the same plan and shards, and
    vouches for another manifest."""
    if not isinstance(state, dict) or not same_json({**state, VOUCHED: 0}, {**state_of(manifest, ()), VOUCHED: 0}):
        return False
    fields = vouched_fields(state)
    if lacking := [name for name in fields if name not in manifest]:
        wrong = f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} lacking"
    elif unsaid := [name for name in WRITERS if name not in fields]:
        raise CorruptBank(
            f"{where}/{STATE}: does not vouch for {', '.join(unsaid)} of {MANIFEST}. Restore it from a copy, or rebuild the bank."
        )
    elif not is_state_of(state, manifest):
        wrong = f"a field is not what it was (the sha256 in {STATE} is that of other values)"
    else:
        return True
    raise CorruptBank(
        f"{where}/{MANIFEST}: {wrong}. It was changed after the bank was committed: restore it from a copy, or rebuild the bank."
    )


def check_info(folder: Path, schema: pa.Schema) -> None:
    """CorruptBank unless dataset_info.json is what the writer writes for shards of `schema`."""
    path = folder / INFO
    if not path.is_file():
        raise CorruptBank(f"{path}: the file is missing. Restore it from a copy, or rebuild the bank.")
    _require_equal(path, read_json(path), dataset_info(schema))


def _require_equal(path: Path, found: object, wanted: object) -> None:
    if same_json(found, wanted):
        return
    # none differs where only a key is lacking whose value is null
    name, values = next(iter(differing_fields(found, wanted).items()), ("a key", (found, wanted)))
    raise CorruptBank(
        f"{path}: {name} is {_short(values[0])}, expected {_short(values[1])} for the shards that {MANIFEST} lists. Restore it from a "
        "copy, or rebuild the bank."
    )


def _fields(manifest: Manifest) -> Iterator[Field]:
    recipe, kind = manifest["recipe"], manifest["kind"]
    yield "plan_digest", manifest["plan_digest"], plan_digest(kind, recipe)
    for at, entry in enumerate(manifest["files"]):
        if entry.keys() != ENTRY:
            yield f"files[{at}]", sorted(entry), sorted(ENTRY)
    if "text_count" in manifest:
        yield "text_count", manifest["text_count"], manifest["rows"]
    yield from kind_of(kind).decided(manifest, recipe)


def same_json(found: object, wanted: object) -> bool:
    """Whether two JSON values are one: true is not 1, and 1 is not 1.0."""
    if found is ABSENT or wanted is ABSENT:
        return found is wanted
    try:
        return canonical_json(found) == canonical_json(wanted)
    except ValueError:  # NaN, Infinity or half of a surrogate pair: no writer writes them
        return False


def _said(found: object) -> str:
    return "is lacking" if found is ABSENT else f"is {_short(found)}"


def _short(value: object) -> str:
    return "none" if value is ABSENT else short_json(value)
