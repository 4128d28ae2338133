"""What a manifest says of rows and files, counted again in them: for `verify`, which reads them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.columns import fixed_lists, list_values, values_of
from arrowbank.bank.features import MATRIX_FILE
from arrowbank.bank.keys import KEY_FILE
from arrowbank.bank.manifest import INFO, short_json
from arrowbank.bank.manifest_checks import PROVENANCE, RECOUNTED, foreign_fields, raw_shards, same_json
from arrowbank.bank.mirror import INDEX_FILE, TEXTS_FILE
from arrowbank.bank.reader import Bank
from arrowbank.bank.targets import facts_of

QUARANTINE = "quarantine.jsonl"


def manifest_check(bank: Bank) -> Check:
    """Provenance, the list of files, and every field that the rows decide. Says which fields a trainer has added."""
    manifest, wrong = bank.manifest, []
    if PROVENANCE not in manifest:
        wrong.append(
            f"{PROVENANCE} is lacking: nothing vouches for names, paths and counts (made by an earlier version, or edited)"
        )
    wrong += _wrong_files(bank)
    for name, counted in _counted(bank).items():
        if name in manifest or name in RECOUNTED.get(bank.kind, ()):
            found = manifest.get(name)
            if not same_json(found, counted):
                wrong.append(f"{name} is {_short(found)}, counted {_short(counted)}")
    wrong += _inconsistent(bank)
    foreign = foreign_fields(manifest)
    good = "as it was committed; every count is that of the rows"
    good += f"; fields not written by arrowbank: {', '.join(foreign)}" if foreign else ""
    return found_wrong("manifest", wrong, good, "not what was committed:")


def _wrong_files(bank: Bank) -> Iterator[str]:
    """Where the list of files is not that of the writer: names in order, and the files that belong to such a bank."""
    entries = [(entry["name"], entry["rows"]) for entry in bank.manifest["files"]]
    if entries != sorted(entries):
        yield "files are not in the order of their names"
    if (beside := _files_beside(bank)) is None:
        return
    wanted = dict(zip(bank.shard_names, bank.shard_rows, strict=True)) | beside
    found = dict(entries)
    for name in sorted({*found, *wanted}):
        if name not in found:
            yield f"{name} is not in the list of files"
        elif name not in wanted:
            yield f"{name} is in the list of files, and no file of such a bank"
        elif found[name] != wanted[name]:
            yield f"rows of {name} is {found[name]}, expected {wanted[name]}"


def _files_beside(bank: Bank) -> dict[str, int | None] | None:
    """The files that a bank has beside its shards, and the rows stated of each; None for a kind or maker that is not known here."""
    recipe, rows = bank.manifest["recipe"], len(bank)
    if bank.kind == "features" and "mirror" in recipe:
        mirror = (MATRIX_FILE, INDEX_FILE, TEXTS_FILE) if recipe["mirror"] else ()
        return {INFO: None, **dict.fromkeys((KEY_FILE, *mirror), rows)}
    if bank.kind == "in2" and "method" in recipe:
        raw = list(raw_shards(recipe))
        return {INFO: None, **dict.fromkeys(raw), **dict.fromkeys(name.replace(".bin", ".json") for name in raw[:1])}
    if bank.kind == "targets":
        imported = "rows" in recipe and bank.manifest["counts"]["dropped"].get("quarantined")
        return {INFO: None, **({QUARANTINE: None} if imported else {})}
    return {INFO: None} if bank.kind in ("texts", "tokens", "in2-probes", "trunk", "taps", "drafts") else None


def _counted(bank: Bank) -> dict[str, Any]:
    """The fields of a manifest that the rows decide."""
    count = _COUNTED.get(bank.kind)
    return count(bank) if count else {}


def _texts(bank: Bank) -> dict[str, Any]:
    names = {"kinds": "kind", "source_rows": "source"}
    return {name: _values(bank, column, bank.manifest.get(name, {})) for name, column in names.items()}


def _values(bank: Bank, column: str, stated: Mapping[str, int]) -> dict[str, int]:
    """How often each value is in the column; those that are stated to be nowhere are, too, unless they are there."""
    counts = {value: 0 for value, count in stated.items() if count == 0}
    for batch in bank.shards():
        for item in batch.column(column).value_counts().to_pylist():
            counts[item["values"]] = counts.get(item["values"], 0) + item["counts"]
    return counts


def _tokens(bank: Bank) -> dict[str, Any]:
    return {"counts": {**bank.manifest.get("counts", {}), "tokens": _sum(bank, "length")}}


def _features(bank: Bank) -> dict[str, Any]:
    return {"kinds": _values(bank, "kind", bank.manifest.get("kinds", {}))}


def _in2(bank: Bank) -> dict[str, Any]:
    recipe = bank.manifest["recipe"]
    if "method" not in recipe:
        return {}
    length, span, examples = recipe["length"], recipe["key_len"] + recipe["val_len"], recipe["examples"]
    total = dict.fromkeys(("answer_tokens", "synthetic_tokens", "decoys_placed", "triples"), 0)
    survivors = {"T": 0, "T+1": 0}
    each = -(-examples // recipe["shards"])
    for batch in bank.shards():
        lists = {name: list_values(batch.column(f"{name}_start")) for name in ("needle", "answer", "decoy")}
        (answers, offsets), (needles, _), (decoys, _) = lists["answer"], lists["needle"], lists["decoy"]
        total["answer_tokens"] += int(fixed_lists(batch.column("answer_mask")).sum(dtype=np.int64))
        total["synthetic_tokens"] += span * (len(answers) + len(needles) + len(decoys))
        total["decoys_placed"] += int(values_of(batch.column("decoys_placed")).sum(dtype=np.int64))
        total["triples"] += len(answers)
        example = np.repeat(values_of(batch.column("example")), np.diff(offsets))
        if len(needles) != len(answers):  # arm a has neither
            continue
        place, file = example % each * length, np.minimum(each, examples - example // each * each) * length
        for name, window in zip(survivors, (length, length + 1), strict=True):  # a loader drops what does not fill a window
            end = ((place + needles) // window + 1) * window
            survivors[name] += int(np.count_nonzero((place + answers + recipe["val_len"] <= end) & (end <= file)))
    tokens = len(bank) * length
    fractions = {f"{name}_frac": total[f"{name}_tokens"] / tokens for name in ("answer", "synthetic")}
    return {**total, **fractions, "total_tokens": tokens, "survivors": survivors}


def _taps(bank: Bank) -> dict[str, Any]:
    return {"counts": {"windows": len(bank), "tokens": _sum(bank, "length")}}


_COUNTED: dict[str, Callable[[Bank], dict[str, Any]]] = {
    "texts": _texts,
    "tokens": _tokens,
    "features": _features,
    "in2": _in2,
    "taps": _taps,
}


def _inconsistent(bank: Bank) -> Iterator[str]:
    """Fields that the rows do not decide, but bound."""
    manifest, rows = bank.manifest, len(bank)
    if (ends := manifest.get("generations")) is not None and not _are_ends(ends, bank):
        yield f"generations is {_short(ends)}, expected ends of shards up to {rows}"
    counts = manifest.get("counts") or {}
    if bank.kind == "texts" and "texts_seen" in counts and counts["texts_seen"] - counts["duplicates"] != rows:
        yield f"counts has {counts['texts_seen']} texts of which {counts['duplicates']} are duplicates, the rows are {rows}"
    if merged := manifest.get("merged"):
        new, there = (sum(part[name] for part in merged["parts"]) for name in ("new", "rows"))
        if (new, merged["shared"]) != (rows, there - rows):
            yield f"merged adds up to {new} new and {merged['shared']} shared rows, expected {rows} and {there - rows}"
    if bank.kind == "features" and (longest := _max(bank, "length")) > manifest["max_key_tokens"]:
        yield f"max_key_tokens is {manifest['max_key_tokens']}, a row has {longest} tokens"
    if bank.kind == "targets" and "codec_error" in manifest:
        layers = {*facts_of(manifest).layer_names, "last"}
        if manifest["codec"] == "bf16" or set(manifest["codec_error"]) != layers:
            yield f"codec_error is of {_short(sorted(manifest['codec_error']))}, the codec is {manifest['codec']}"


def _are_ends(ends: Sequence[int], bank: Bank) -> bool:
    starts = bank.starts.tolist()
    return ends == sorted(ends) and bool(ends) and ends[-1] == len(bank) and set(ends) <= set(starts[1:])


def _sum(bank: Bank, column: str) -> int:
    return sum(int(values_of(batch.column(column)).sum(dtype=np.int64)) for batch in bank.shards())


def _max(bank: Bank, column: str) -> int:
    return max(int(values_of(batch.column(column)).max(initial=0)) for batch in bank.shards())


def _short(value: object) -> str:
    return short_json(value, 80)
