"""What a bank of each kind must have: fields of the manifest and their types, columns of the shards and theirs.

Opening a bank checks both before anything is read from it, so that a damaged or hostile bank is a CorruptBank that names the field
or the column, not a KeyError in the middle of a training. A kind that is not listed here must have plain column types only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrowbank.bank.manifest import MANIFEST, Manifest
from arrowbank.bank.manifest_checks import ABSENT
from arrowbank.errors import CorruptBank

LONGEST_CHAIN = 1000
MOST_TOKENS = 1 << 24
LARGEST = 2**31 - 1  # of a width: Arrow's fixed-size lists have 32-bit sizes


# fields of the manifest


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


_is_whole = _whole(-(2**63), 2**63 - 1)
_is_count = _whole(0, 2**63 - 1)
_is_width = _whole(1, LARGEST)
_is_vocabulary = _whole(1, MOST_TOKENS)  # how many tokens a model knows: memory is taken for each
_is_chain = _whole(1, LONGEST_CHAIN)  # steps of a draft, each of which has columns


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _one_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in values


def _list_of(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(rule, value))


def _object_of(**rules: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """An object with these fields, at least."""
    return lambda value: isinstance(value, dict) and all(rule(value.get(name)) for name, rule in rules.items())


def _values_of(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(rule, value.values()))


def _nullable(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The field may be null."""
    return lambda value: value is None or rule(value)


def _maybe(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The field may be absent or null."""
    return lambda value: value is None or value is ABSENT or rule(value)


Fields = Mapping[str, Callable[[Any], bool]]

_is_counts = _values_of(_is_count)  # name → count
_LAYERS = _list_of(_is_whole)
_FILLERS = _list_of(_object_of(path=_is_text, tokens=_is_count, sha256=_is_text))
_EVERY: Fields = {
    "text_count": _maybe(_is_count),
    "kinds": _maybe(_is_counts),
    "generations": _maybe(_list_of(_is_count)),
    "counts": _maybe(_is_object),
    "merged": _maybe(_object_of(parts=lambda parts: isinstance(parts, list), shared=_is_count)),
    "selected": _maybe(_object_of(plan_digest=_is_text, rows=_is_count)),
}
_FIELDS: dict[str, Fields] = {
    "texts": {
        "kinds": _is_counts,
        "source_rows": _maybe(_is_counts),
        "sources": _maybe(_list_of(_object_of(name=_is_text, file=_is_text, bytes=_is_count))),
    },
    "tokens": {
        "texts": _maybe(_object_of(path=_is_text, plan_digest=_is_text)),
        "tokenizer": _maybe(_is_text),
        "max_tokens": _maybe(_is_width),
        "special_tokens": _maybe(_is_flag),
        "prompt": _maybe(_is_text),
    },
    "features": {
        "hidden_size": _is_width,
        "model_path": _is_text,
        "max_key_tokens": _is_width,
        "encoding": _object_of(normalize=_is_flag),
        "recipe": _object_of(model=_maybe(_is_object), batches=_maybe(_object_of(max_batch=_is_width, token_budget=_is_width))),
        "tokenizer": _maybe(_is_text),
        "special_tokens": _maybe(_is_flag),
        "prompt": _maybe(_is_text),
    },
    "targets": {
        "target_layer_ids": _nullable(_LAYERS),
        "layers": _is_width,
        "hidden_size": _is_width,
        "target_model_name_or_path": _is_text,
        "last_hidden_norm": _one_of("post", "pre", "unknown"),
        "loss_mask": _is_text,
        "codec": _one_of("bf16", "fp8"),
        "spans": _one_of("all", "supervised"),
        "vocab_size": _nullable(_is_vocabulary),
        "num_hidden_layers": _nullable(_is_width),
        "counts": _object_of(kept=_is_count, tokens=_is_count, loss_tokens=_is_count, dropped=_is_counts),
    },
    "in2": {
        "arm": _one_of("a", "b", "c"),
        "T": _is_width,
        "K": _is_count,
        "span": _is_width,
        "triples": _is_count,
        "decoys_placed": _is_count,
        "survivors": _maybe(_is_counts),
        "dtype": _one_of("uint16", "uint32"),
        "fillers": _FILLERS,
        "tokenizer": _maybe(_is_text),
    },
    "in2-probes": {
        "length": _is_width,
        "val_len": _is_width,
        "blocks": _is_width,
        "positions": lambda value: isinstance(value, list),
        "dtype": _one_of("uint16", "uint32"),
        "fillers": _FILLERS,
    },
    "trunk": {
        "window": _is_width,
        "topk": _is_width,
        "hidden_size": _is_width,
        "hidden_norm": _one_of("post", "pre"),
        "hidden_dtype": _one_of("bfloat16", "float16"),
        "hold_all": _is_flag,
        "pad_id": _is_count,
        "vocab_size": _is_vocabulary,
        "model_path": _is_text,
        "model_fingerprint": _is_text,
        "sets": _values_of(_object_of(windows=_is_count, tokens=_is_count)),
        "counts": _object_of(windows=_is_count, held_out=_is_count, tokens=_is_count),
    },
    "taps": {
        "window": _is_width,
        "layers": _LAYERS,
        "hidden_size": _is_width,
        "model_path": _is_text,
        "counts": _object_of(windows=_is_count, tokens=_is_count),
    },
    "drafts": {"windows": _is_count, "chain": _is_chain, "kept": _is_width, "hidden_size": _is_width},
}


def check_fields(folder: Path, manifest: Manifest) -> None:
    """Raise CorruptBank for a field that a bank of this kind lacks, or that is not what its readers expect."""
    fields = {**_EVERY, **_FIELDS.get(manifest["kind"], {})}
    for name, rule in fields.items():
        if not rule(manifest.get(name, ABSENT)):
            found = repr(manifest.get(name)) if name in manifest else "nothing"
            raise CorruptBank(
                f"{folder / MANIFEST}: {name} is {found[:60]}, which no bank of {manifest['kind']} has. The file is damaged; "
                "restore it or rebuild the bank."
            )


# columns of the shards

Types = Sequence[pa.DataType]

_STRING, _INT, _LONG = [pa.string()], [pa.int32()], [pa.int64()]
_TEXT = [pa.large_string(), pa.string()]
_SHA1 = [pa.binary()]


def _fixed(value: pa.DataType, width: int) -> Types:
    return [pa.list_(value, width)]


def _lists(value: pa.DataType) -> Types:
    return [pa.list_(value)]


def _vectors(value: pa.DataType, width: int) -> Types:
    """A list of fixed-size lists."""
    return [pa.list_(pa.list_(value, width))]


def _target_columns(manifest: Manifest) -> dict[str, Types]:
    value = pa.uint16() if manifest["codec"] == "bf16" else pa.uint8()
    layers, width = manifest["layers"], manifest["hidden_size"]
    columns = {
        "input_ids": _lists(pa.int32()),
        "loss_mask": _lists(pa.uint8()),
        "target_hidden_states": _vectors(value, layers * width),
        "target_last_hidden_states": _vectors(value, width),
        "seq_len": _INT,
        "sample": _STRING,
    }
    if manifest["codec"] == "fp8":
        columns["target_hidden_scales"] = _vectors(pa.float32(), layers)
        columns["target_last_hidden_scales"] = _lists(pa.float32())
    if manifest["spans"] == "supervised":
        columns["hidden_positions"] = _lists(pa.int32())
    return columns


def _in2_columns(manifest: Manifest) -> dict[str, Types]:
    places = ("needle_start", "probe_start", "answer_start", "distance", "decoy_start")
    return {
        "input_ids": _fixed(pa.type_for_alias(manifest["dtype"]), manifest["T"]),
        "answer_mask": _fixed(pa.uint8(), manifest["T"]),
        **dict.fromkeys(places, _lists(pa.int32())),
        "decoys_placed": _INT,
        "filler": _INT,
        "filler_start": _LONG,
        "arm": _STRING,
        "example": _LONG,
    }


def _probe_columns(manifest: Manifest) -> dict[str, Types]:
    numbers = ("block", "needle_start", "probe_start", "answer_start", "distance", "filler")
    return {
        "input_ids": _fixed(pa.type_for_alias(manifest["dtype"]), manifest["length"]),
        "answer_mask": _fixed(pa.uint8(), manifest["length"]),
        "condition": _STRING,
        "position": [pa.float64()],
        "probe_pos": [pa.float64()],
        **dict.fromkeys(numbers, _INT),
        **dict.fromkeys(("filler_start", "trial"), _LONG),
    }


def _trunk_columns(manifest: Manifest) -> dict[str, Types]:
    hidden = pa.uint16() if manifest["hidden_dtype"] == "bfloat16" else pa.float16()
    return {
        "input_ids": _fixed(pa.int32(), manifest["window"]),
        "length": _INT,
        "topk_ids": _vectors(pa.int32(), manifest["topk"]),
        "topk_probs": _vectors(pa.float32(), manifest["topk"]),
        "tail_mass": _lists(pa.float32()),
        "hidden": _vectors(hidden, manifest["hidden_size"]),
        "set": _STRING,
        "window": _INT,
        "held_out": [pa.bool_()],
    }


def _taps_columns(manifest: Manifest) -> dict[str, Types]:
    return {
        "row": _INT,
        "input_ids": _fixed(pa.int32(), manifest["window"]),
        "length": _INT,
        "next_ids": _lists(pa.int32()),
        **{f"layer_{layer}": _vectors(pa.float16(), manifest["hidden_size"]) for layer in manifest["layers"]},
    }


def _draft_columns(manifest: Manifest) -> dict[str, Types]:
    columns: dict[str, Types] = {"when": _STRING, "set": _STRING, "row": _INT, "length": _INT}
    for step in range(1, manifest["chain"] + 1):
        columns[f"hidden_{step}"] = _vectors(pa.float16(), manifest["hidden_size"])
        columns[f"topk_ids_{step}"] = _vectors(pa.int32(), manifest["kept"])
        columns[f"topk_probs_{step}"] = _vectors(pa.float32(), manifest["kept"])
    return columns


_COLUMNS: dict[str, Callable[[Manifest], dict[str, Types]]] = {
    "texts": lambda manifest: {"text": _TEXT, "sha1": _SHA1, "kind": _STRING, "source": _STRING},
    "tokens": lambda manifest: {"input_ids": _lists(pa.int32()), "length": _INT},
    "features": lambda manifest: {
        "text": _TEXT,
        "kind": _STRING,
        "sha1": _SHA1,
        "length": _INT,
        "features": _fixed(pa.float16(), manifest["hidden_size"]),
    },
    "targets": _target_columns,
    "in2": _in2_columns,
    "in2-probes": _probe_columns,
    "trunk": _trunk_columns,
    "taps": _taps_columns,
    "drafts": _draft_columns,
}


def check_columns(path: Path, schema: pa.Schema, manifest: Manifest) -> None:
    """Raise CorruptBank where the columns of the shard at `path` are not those of the bank's kind."""
    kind_of_bank = manifest["kind"]
    wanted = _COLUMNS[kind_of_bank](manifest) if kind_of_bank in _COLUMNS else {}
    found = {field.name: field.type for field in schema}
    wrong = [f"{name} is there twice" for name in found if schema.names.count(name) > 1]
    wrong += [f"no column {name}" for name in wanted if name not in found]
    for name, kind in found.items():
        expected = wanted.get(name)
        if expected is not None and kind not in expected:
            wrong.append(f"column {name} is {kind}, expected {expected[0]}")
        elif expected is None and not _is_plain(kind):
            wrong.append(f"column {name} is {kind}, which no writer of banks gives")
    if wrong:
        raise CorruptBank(f"{path}: {'; '.join(wrong[:3])}. The file is damaged; restore it or rebuild the bank.")


def _is_plain(kind: Any) -> bool:
    """Whether a column may be of this type: numbers, flags, text, bytes, and lists of these."""
    types = pa.types
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    plain = ("is_integer", "is_floating", "is_boolean", "is_string", "is_large_string", "is_binary")
    return any(getattr(types, name)(kind) for name in plain)
