"""Verifying a bank: everything that opening it takes on trust is read and checked.

Each check has its own line. A check that fails says where. A bank that cannot be opened and an exception inside a check are
failed checks with the file, never an exception of `verify`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.checks import NOTHING, Check, attempt, found_wrong, run_check
from arrowbank.bank.columns import fixed_bytes, fixed_lists, list_values, values_of
from arrowbank.bank.features import MATRIX_FILE, FeatureBank
from arrowbank.bank.files import sha256_of
from arrowbank.bank.keys import KEY_FILE, SHA1_BYTES, sorted_keys, text_keys
from arrowbank.bank.manifest import INFO, MANIFEST, SHARD_NAME, STATE, read_json, short_json
from arrowbank.bank.manifest_checks import PROVENANCE, RECOUNTED, foreign_fields, raw_shards, same_json
from arrowbank.bank.mirror import INDEX_ENTRY_BYTES, INDEX_FILE, TEXTS_FILE
from arrowbank.bank.opening import open_bank
from arrowbank.bank.reader import Bank
from arrowbank.bank.refusals import explains
from arrowbank.bank.targets import TargetBank, facts_of, target_checks
from arrowbank.bank.trunk import TrunkBank, taps_check, trunk_checks
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

# float16 keeps 11 bits: each of D rounded components is off by at most 2^-12 of itself, and so is the norm
NORM_TOLERANCE = 2.0**-11


@explains("folder", "read")
@checked
def verify(folder: str | Path, *, quick: bool = False, progress: Progress = SILENT) -> list[Check]:
    """All checks of the bank in `folder`. `quick` looks at sizes and row counts only."""
    with attempt(Path(folder) / MANIFEST) as failures:
        bank = open_bank(folder, progress=progress)
    if failures:
        return [Check("opens", False, failures[0])]
    manifest = bank.folder / MANIFEST
    checks = [
        Check("opens", True, f"committed, {len(bank):,} rows in {len(bank.shard_names)} shards, sizes and row counts right")
    ]
    if not len(bank):
        checks.append(Check("rows", False, NOTHING))
    if quick or not len(bank):
        return checks
    with progress.phase("verify", sum(entry["bytes"] for entry in bank.manifest["files"]), unit="bytes") as phase:
        checks += run_check("hashes", manifest, lambda: _hashes(bank, phase.advance))
    checks += run_check("shards", manifest, lambda: _strays(bank))
    if unreadable := _unreadable(bank):
        return [*checks, unreadable]
    checks += run_check("types", manifest, lambda: _types(bank))
    checks += run_check("manifest", manifest, lambda: manifest_check(bank))
    checks += run_check("dataset", bank.folder / STATE, lambda: _dataset(bank))
    for name, check in _CHECKS.get(bank.kind, {}).items():
        checks += run_check(name, manifest, partial(check, bank))
    return checks + run_check("rows", manifest, lambda: _of_windows(bank))


def _hashes(bank: Bank, report: Callable[[int], None]) -> Check:
    wrong = []
    for entry in bank.manifest["files"]:
        if sha256_of(bank.folder / entry["name"]) != entry["sha256"]:
            wrong.append(entry["name"])
        report(entry["bytes"])
    return found_wrong(
        "hashes", wrong, f"sha256 of {len(bank.manifest['files'])} files", "bytes differ from the manifest's sha256 in"
    )


def _strays(bank: Bank) -> Check:
    found = {path.name for path in bank.folder.iterdir() if SHARD_NAME.fullmatch(path.name)}
    return found_wrong("shards", sorted(found - set(bank.shard_names)), "no file beside the manifest's", "not in the manifest:")


def _types(bank: Bank) -> Check:
    wrong = [name for name, batch in zip(bank.shard_names, bank.shards(), strict=True) if batch.schema != bank.schema]
    return found_wrong("types", wrong, f"columns {', '.join(bank.columns)}", "other column types in")


def _unreadable(bank: Bank) -> Check | None:
    """The failed check of a bank with a shard whose bytes are not values of its columns' types (an offset out of range, text
    that is not UTF-8): each of the other checks would say the same. None where there is none."""
    wrong: list[str] = []
    for index, name in enumerate(bank.shard_names):
        with attempt(bank.folder / name) as failures:
            bank.shard(index)
        wrong += failures
    return found_wrong("values", wrong, "", "") if wrong else None


def _dataset(bank: Bank) -> Check:
    """What a trainer does first: `load_from_disk`, and a row from either end."""
    dataset = bank.dataset
    for row in (0, len(bank) - 1) if len(bank) else ():
        dataset[row]
    found, wanted = (dataset.num_rows, dataset.column_names), (len(bank), bank.columns)
    return Check("dataset", found == wanted, f"load_from_disk gives {found[0]:,} rows of {', '.join(found[1])}")


def _text_keys(bank: Bank) -> Check:
    wrong = []
    for row, batch in _with_rows(bank):
        stored = fixed_bytes(batch.column("sha1"), SHA1_BYTES)
        differing = np.flatnonzero((text_keys(batch.column("text").to_pylist()) != stored).any(axis=1))
        wrong += [f"row {row + at}" for at in differing[:3]]
    return found_wrong("keys", wrong, "sha1 of every text", "sha1 is not that of the text in")


def _unique(bank: Bank) -> Check:
    digests = np.concatenate([fixed_bytes(batch.column("sha1"), SHA1_BYTES) for batch in bank.shards()])
    twice = len(digests) - len(np.unique(digests, axis=0))
    return Check("unique", not twice, f"{twice} texts stand in the bank twice" if twice else "no text twice")


def _kinds(bank: Bank) -> Check:
    counts: dict[str, int] = {}
    for batch in bank.shards():
        for item in batch.column("kind").value_counts().to_pylist():
            counts[item["values"]] = counts.get(item["values"], 0) + item["counts"]
    wanted = {kind: count for kind, count in bank.manifest["kinds"].items() if count}
    return Check("kinds", counts == wanted, f"{counts} in the rows, {wanted} in the manifest")


def _tokens(bank: Bank) -> Check:
    limit = bank.manifest["max_tokens"]
    wrong = []
    for row, batch in _with_rows(bank):
        values, offsets = list_values(batch.column("input_ids"))
        lengths = np.diff(offsets)
        bad = (lengths != values_of(batch.column("length"))) | (lengths < 1) | (lengths > limit)
        wrong += [f"row {row + at}" for at in np.flatnonzero(bad)[:3]]
        wrong += [f"row {row + np.searchsorted(offsets, at, 'right') - 1}" for at in np.flatnonzero(values < 0)[:3]]
    return found_wrong("tokens", wrong, f"ids ≥ 0, lengths right, 1 to {limit}", "ids or length wrong in")


def _vectors(bank: Bank) -> Check:
    """Finite, not zero, and of norm 1 where the bank says so."""
    import torch

    normalized = bool(bank.manifest["recipe"]["normalize"])
    wrong, low, high = [], np.inf, 0.0
    for row, batch in _with_rows(bank):
        vectors = fixed_lists(batch.column("features"))
        norms = torch.linalg.vector_norm(torch.tensor(vectors).float(), dim=1).numpy()
        bad = ~np.isfinite(norms) | (norms == 0)
        if normalized:
            bad |= np.abs(norms - 1) > NORM_TOLERANCE
        wrong += [f"row {row + at} (norm {norms[at]:.4g})" for at in np.flatnonzero(bad)[:3]]
        low, high = min(low, float(norms.min())), max(high, float(norms.max()))
    return found_wrong("vectors", wrong, f"finite, norms {low:.5f} to {high:.5f}", "not finite, zero, or of a wrong norm:")


def _mirror(bank: Bank) -> Check:
    names = {entry["name"] for entry in bank.manifest["files"]}
    if not isinstance(bank, FeatureBank) or MATRIX_FILE not in names:
        return Check("mirror", True, "none (built with --no-mirror)")
    parts: dict[str, Callable[[FeatureBank], Iterator[str]]] = {MATRIX_FILE: _matrix, INDEX_FILE: _index, TEXTS_FILE: _texts}
    wrong: list[str] = []
    for name, differences in parts.items():
        with attempt(bank.folder / name) as failures:
            wrong += list(islice(differences(bank), 1))
        wrong += failures
    return found_wrong("mirror", wrong, "equal to the Arrow shards", "differs from the Arrow shards:")


def _matrix(bank: FeatureBank) -> Iterator[str]:
    """Where the matrix differs from the shards."""
    matrix = bank.matrix
    for row, part in _vector_parts(bank):
        if not np.array_equal(_bits(matrix[row : row + len(part)]), _bits(part)):
            yield f"{MATRIX_FILE} from row {row}"


def _index(bank: FeatureBank) -> Iterator[str]:
    with bank.opening(INDEX_FILE) as path:
        index = read_json(path, max_bytes=(len(bank) + 1) * INDEX_ENTRY_BYTES)
    keys = [key.hex() for batch in bank.shards() for key in batch.column("sha1").to_pylist()]
    if not isinstance(index, dict) or list(index) != keys or list(index.values()) != list(range(len(keys))):
        yield INDEX_FILE


def _texts(bank: FeatureBank) -> Iterator[str]:
    texts = (text for batch in bank.shards() for text in batch.column("text").to_pylist())
    with bank.opening(TEXTS_FILE) as path, path.open("rb") as lines:
        for row, (line, text) in enumerate(zip_longest(lines, texts)):
            if line is None or text is None:
                yield f"{TEXTS_FILE} has {'fewer' if line is None else 'more'} lines than the bank has rows ({len(bank)})"
                return
            if json.loads(line) != text:
                yield f"{TEXTS_FILE} line {row + 1}"


def _key_file(bank: Bank) -> Check:
    digests = np.concatenate([fixed_bytes(batch.column("sha1"), SHA1_BYTES) for batch in bank.shards()])
    same = isinstance(bank, FeatureBank) and np.array_equal(bank.key_table, sorted_keys(digests))
    return Check("look-up", same, f"{KEY_FILE} {'finds every text' if same else 'does not fit the sha1 column'}")


def _of_windows(bank: Bank) -> list[Check]:
    """The checks of banks of hidden states."""
    if isinstance(bank, TargetBank):
        return target_checks(bank, bank.manifest)
    return trunk_checks(bank) if isinstance(bank, TrunkBank) else []


_CHECKS: dict[str, dict[str, Callable[[Bank], Check]]] = {
    "texts": {"keys": _text_keys, "unique": _unique, "kinds": _kinds},
    "tokens": {"tokens": _tokens},
    "features": {"keys": _text_keys, "unique": _unique, "vectors": _vectors, "look-up": _key_file, "mirror": _mirror},
    "taps": {"taps": taps_check},
}


def _with_rows(bank: Bank) -> Iterator[tuple[int, pa.RecordBatch]]:
    return zip(map(int, bank.starts), bank.shards(), strict=False)


def _vector_parts(bank: FeatureBank) -> Iterator[tuple[int, npt.NDArray[np.float16]]]:
    for row, batch in _with_rows(bank):
        yield row, fixed_lists(batch.column("features"))


def _bits(vectors: npt.NDArray[np.float16]) -> npt.NDArray[np.uint16]:
    return vectors.view(np.uint16)


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


def _recount_texts(bank: Bank) -> dict[str, Any]:
    names = {"kinds": "kind", "source_rows": "source"}
    return {name: _values(bank, column, bank.manifest.get(name, {})) for name, column in names.items()}


def _values(bank: Bank, column: str, stated: Mapping[str, int]) -> dict[str, int]:
    """How often each value is in the column; those that are stated to be nowhere are, too, unless they are there."""
    counts = {value: 0 for value, count in stated.items() if count == 0}
    for batch in bank.shards():
        for item in batch.column(column).value_counts().to_pylist():
            counts[item["values"]] = counts.get(item["values"], 0) + item["counts"]
    return counts


def _recount_tokens(bank: Bank) -> dict[str, Any]:
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
    "texts": _recount_texts,
    "tokens": _recount_tokens,
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
