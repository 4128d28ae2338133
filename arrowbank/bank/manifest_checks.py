"""Whether a manifest says what its writer said: everything that can be told without reading the rows.

plan digest     recomputed from format, kind and recipe
recipe          every field that the recipe decides is held against it
provenance      the other fields that the stage gave (paths, names, counts of what was left out) are held against a sha256 that the commit
                writes beside them
state.json, dataset_info.json   are what the writer would write for these shards

Opening a bank does all of this, and reads nothing but these files for it. What the rows decide is recounted by `verify` (recounts.py). A
recipe of a maker that this version does not know decides nothing here; its digest is checked all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrowbank.bank.manifest import (
    INFO,
    MANIFEST,
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
from arrowbank.errors import CorruptBank

PROVENANCE = "provenance"
# what the writer itself says; the plan digest, the shards and the hashes tell whether it is right
WRITERS = ("format", "kind", "plan_digest", "recipe", "rows", "complete", "files", PROVENANCE)
# Recounted from the rows to the last digit, here and by `in2 verify`, which name the one that is wrong: provenance leaves them out.
RECOUNTED: dict[str, tuple[str, ...]] = {
    "in2": (
        *("total_tokens", "answer_tokens", "answer_frac", "synthetic_tokens", "synthetic_frac"),
        *("decoys_placed", "triples", "survivors"),
    ),
}
# of a target bank: what exports and trainers take its hidden states for
TARGET_LABELS = (
    *("target_model_name_or_path", "target_layer_ids", "layer_id_convention", "layers", "hidden_size", "hidden_dtype"),
    *("last_hidden_norm", "codec", "spans", "loss_mask", "vocab_size", "num_hidden_layers"),
)
CAPTURED = ("data_sha256", "tokenizer_fingerprint", "chat_template_sha256", "max_length", "min_loss_tokens", "limit")

ENTRY = {"name", "rows", "bytes", "sha256"}  # of a file
ABSENT = object()
Field = tuple[str, object, object]  # a name, what the manifest says (or ABSENT), what is expected (or ABSENT)


# written by the commit


def provenance_of(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What a manifest says under `provenance` of the `fields` that a stage gave: their names, and the sha256 of their canonical JSON."""
    names = sorted(set(fields) - {*WRITERS, *RECOUNTED.get(kind, ())})
    return {"fields": names, "sha256": _sha256({name: fields[name] for name in names})}


def foreign_fields(manifest: Manifest) -> list[str]:
    """The fields that no writer of banks wrote: a trainer may add its own."""
    known = {*WRITERS, *RECOUNTED.get(manifest["kind"], ()), *manifest.get(PROVENANCE, {}).get("fields", ())}
    return sorted(set(manifest) - known)


# looked at by every opening


def check_manifest(path: Path | str, manifest: Manifest) -> None:
    """CorruptBank, naming the field, unless the committed `manifest` in the file (or at the address) `path` agrees with itself."""
    try:
        wrong = [
            f"{name} {_said(found)}, expected {_short(wanted)}"
            for name, found, wanted in _fields(manifest)
            if not same_json(found, wanted)
        ]
        if not wrong and not _is_of_provenance(manifest):
            wrong = [f"a field that {PROVENANCE} names is not what it was (their sha256 is another one)"]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:  # JSON of any shape may stand there
        wrong = [f"a field is lacking or of another type ({type(error).__name__}: {error})"]
    if wrong:
        raise CorruptBank(
            f"{path}: {'; '.join(wrong[:3])}. It was changed after the bank was committed: restore it from a copy, or rebuild the bank."
        )


def check_state(folder: Path, manifest: Manifest) -> list[str]:
    """The names of the shards in order. CorruptBank unless state.json is what the writer writes for them."""
    shards = [entry["name"] for entry in manifest["files"] if SHARD_NAME.fullmatch(entry["name"])]
    if not shards or shards != [shard_name(index) for index in range(len(shards))]:
        raise CorruptBank(
            f"{folder / MANIFEST}: lists the shards {_short(shards)}, expected {shard_name(0)} and so on. Restore it from a copy, or "
            "rebuild the bank."
        )
    found, wanted = read_json(folder / STATE), dataset_state(shards, manifest["plan_digest"])
    if not isinstance(found, dict) or not same_json(found.get("_data_files"), wanted["_data_files"]):
        raise CorruptBank(
            f"{folder / STATE}: does not list the shards of {MANIFEST}. Restore it from a copy, or rebuild the bank."
        )
    _require_equal(folder / STATE, found, wanted)
    return shards


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


def _is_of_provenance(manifest: Manifest) -> bool:
    """Whether the fields under `provenance` are those that were committed. True where there is none: `verify` misses it."""
    if PROVENANCE not in manifest:
        return True
    stated = manifest[PROVENANCE]
    names = sorted(set(stated["fields"]))
    return same_json(stated, {"fields": names, "sha256": _sha256({name: manifest[name] for name in names})})


def _fields(manifest: Manifest) -> Iterator[Field]:
    recipe, kind = manifest["recipe"], manifest["kind"]
    yield "plan_digest", manifest["plan_digest"], plan_digest(kind, recipe)
    for at, entry in enumerate(manifest["files"]):
        if entry.keys() != ENTRY:
            yield f"files[{at}]", sorted(entry), sorted(ENTRY)
    if "text_count" in manifest:
        yield "text_count", manifest["text_count"], manifest["rows"]
    if decided := _DECIDED.get(kind):
        yield from decided(manifest, recipe)


def _equal(manifest: Manifest, wanted: Mapping[str, object]) -> Iterator[Field]:
    """The fields of these names and values."""
    for name, value in wanted.items():
        yield name, manifest.get(name, ABSENT), value


def _parts(entries: Iterable[Mapping[str, Any]], names: Iterable[str]) -> list[dict[str, Any]]:
    """Of each entry what the recipe has of it, too."""
    return [{name: entry[name] for name in names} for entry in entries]


def _texts(manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
    if "sources" not in recipe:
        return
    yield from _equal(manifest, {"fields": recipe["fields"]})
    numbered = sorted((int(key.split(" ", 1)[0]), key.split(" ", 1)[1], said) for key, said in recipe["sources"].items())
    wanted = [{"name": name, "bytes": said["bytes"], "sha256": said["sha256"]} for _, name, said in numbered]
    newest = manifest["sources"][-len(wanted) :] if recipe["onto"] else manifest["sources"]
    yield "sources", _parts(newest, ("name", "bytes", "sha256")), wanted
    names = [one["name"] for one in wanted]
    yield from _equal(manifest, {f"{one['name']}_sha256": one["sha256"] for one in wanted if names.count(one["name"]) == 1})
    ends = [recipe["onto"]["rows"]] if recipe["onto"] else []
    yield "generations", manifest["generations"][-1 - len(ends) :], [*ends, manifest["rows"]]


def _tokens(manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
    if "method" not in recipe:
        return
    names = ("tokenizer_fingerprint", "max_tokens", "special_tokens", "on_long", "prompt", "generations")
    yield from _equal(manifest, {name: recipe[name] for name in names})
    yield "texts.plan_digest", manifest["texts"]["plan_digest"], recipe["texts"]


def _features(manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
    if "encoding_method" not in recipe:
        return
    model, mirror = recipe["model"], {"bank": "features.f16.npy", "index": "index.json", "texts": "texts.jsonl"}
    own = set(model) == {"name", "version"}
    yield from _equal(manifest, {"format_version": 2, "dtype": "float16_memmap", "hidden_size": recipe["hidden_size"]})
    yield from _equal(manifest, mirror if recipe["mirror"] else dict.fromkeys(mirror, ABSENT))
    yield from _equal(manifest, {"encoded_rows": manifest["rows"]} | ({"model_path": model["name"]} if own else {}))
    yield from _equal(manifest, {name: recipe[name] for name in ("limit", "generations") if name in recipe})
    encoding = {**recipe["batches"], "backbone": "encoder", "normalize": recipe["normalize"], **({} if own else model)}
    yield from _equal(manifest, {"encoding": encoding})


def _targets(manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
    yield from _equal(manifest, {name: recipe[name] for name in (*TARGET_LABELS, *CAPTURED) if name in recipe})
    if "model_fingerprint" in recipe:  # of a merged or selected bank
        yield from _equal(manifest, {"model_fingerprint": recipe["model_fingerprint"]})
    elif "model" in recipe:  # of a captured one
        model = recipe["model"]
        yield from _equal(manifest, {"model_fingerprint": model["model_sha256"]})
        yield from _equal(manifest, {name: model[name] for name in ("dtype", "quantisation")})
    elif "method" in recipe:  # of an imported one: nobody said
        yield from _equal(manifest, dict.fromkeys(("model_fingerprint", *CAPTURED[1:3])))


def _in2(manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
    if "method" not in recipe:
        return
    names = ("arm", "examples", "split", "key_len", "val_len", "alphabet", "decoys", "seed", "vocab", "dtype")
    yield from _equal(manifest, {name: recipe[name] for name in names})
    yield from _equal(manifest, {"T": recipe["length"], "K": recipe["triples"], "d_min": recipe["min_distance"]})
    yield from _equal(manifest, {"span": recipe["key_len"] + recipe["val_len"], "pad_tail": 4})
    yield "fillers", _parts(manifest["fillers"], ("tokens", "sha256")), recipe["fillers"]
    raw = [{"name": name, "tokens": tokens} for name, tokens in raw_shards(recipe).items()]
    yield from _equal(manifest, {"raw_shards": raw or ABSENT})


def raw_shards(recipe: Mapping[str, Any]) -> dict[str, int]:
    """The raw shards that an arm's recipe asks for, and how many tokens each holds."""
    if not recipe["mirror"]:
        return {}
    examples, each = recipe["examples"], -(-recipe["examples"] // recipe["shards"])
    starts = range(0, examples, each)
    stem = f"in2{recipe['arm']}_{recipe['split']}"
    return {
        f"{stem}_{index:05d}.bin": (min(start + each, examples) - start) * recipe["length"]
        for index, start in enumerate(starts)
    }


def _probes(manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
    if "method" not in recipe:
        return
    yield from _equal(manifest, {name: value for name, value in recipe.items() if name not in ("method", "fillers")})
    yield from _equal(manifest, {"span": recipe["key_len"] + recipe["val_len"], "pad_tail": 4})
    yield "fillers", _parts(manifest["fillers"], ("tokens", "sha256")), recipe["fillers"]


def _trunk(manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
    if "method" not in recipe:
        return
    names = ("window", "topk", "hidden_norm", "hidden_dtype", "hold_all", "pad_id", "sets")
    yield from _equal(manifest, {name: recipe[name] for name in names})
    yield from _model_fields(manifest, recipe, ("architecture", "dtype", "quantisation", "hidden_size"))


def _taps(manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
    if "method" not in recipe:
        return
    yield from _equal(manifest, {"layers": recipe["layers"], "layer_id_convention": "block_output"})
    yield from _model_fields(manifest, recipe, ("hidden_size",))


def _model_fields(manifest: Manifest, recipe: Mapping[str, Any], names: Iterable[str]) -> Iterator[Field]:
    model = recipe["model"]
    yield from _equal(manifest, {"model_fingerprint": model["model_sha256"], **{name: model[name] for name in names}})


def _drafts(manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
    if "heal" not in recipe:
        return
    yield from _equal(manifest, {"chain": recipe["heal"]["chain"]})
    yield "windows", manifest["windows"] * len(recipe["when"]), manifest["rows"]


_DECIDED: dict[str, Callable[[Manifest, Mapping[str, Any]], Iterator[Field]]] = {
    "texts": _texts,
    "tokens": _tokens,
    "features": _features,
    "targets": _targets,
    "in2": _in2,
    "in2-probes": _probes,
    "trunk": _trunk,
    "taps": _taps,
    "drafts": _drafts,
}


def _sha256(value: object) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


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
