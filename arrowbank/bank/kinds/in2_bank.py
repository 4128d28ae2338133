"""IN2 arms: examples of long filler with needles, probes and answers in it, and how far each needle lies from its probe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa

from arrowbank.bank.columns import fixed_lists, list_values, values_of
from arrowbank.bank.kinds import (
    ABSENT,
    FOLDER,
    INT,
    LONG,
    STRING,
    Description,
    Field,
    Kind,
    Types,
    equal,
    fixed,
    lists,
    parts,
    register,
)
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest, Width
from arrowbank.bank.reader import Bank

ANSWERS = (
    f'from datasets import load_from_disk\n\nrows = load_from_disk("{FOLDER}").with_format("numpy")\n'
    'answers = rows[0]["input_ids"][rows[0]["answer_mask"] == 1]'
)
NEEDLES = {
    "a": "none: plain filler, the control for drift",
    "b": "immediately before its probe",
    "c": "anywhere far enough before its probe",
}


class FillerEntry(msgspec.Struct, kw_only=True):
    """A file or bank that filler was taken from."""

    path: str
    tokens: Count
    sha256: str
    bad_lines: Count | None = None


class ArmManifest(BankManifest, kw_only=True):
    """`T` tokens per example, `K` triples and some decoys in it; `span` tokens per needle and per answer with its probe."""

    arm: Literal["a", "b", "c"]
    T: Width
    K: Count
    span: Width
    triples: Count
    decoys_placed: Count
    dtype: Literal["uint16", "uint32"]
    fillers: list[FillerEntry]
    survivors: dict[str, Count] | None = None
    tokenizer: str | None = None
    text_field: str | None = None
    on_bad_line: Literal["error", "skip"] | None = None
    max_line_bytes: Count | None = None
    d_min: Any = None
    seed: Any = None


class ArmBank(Bank):
    """A committed IN2 arm."""

    manifest: ArmManifest


@register
class ArmKind(Kind):
    name = "in2"
    manifest = ArmManifest
    words = "IN2 arms"
    unit = "examples"
    made_by = "`arrowbank in2 build`"
    next = "arrowbank in2 verify {folder}\narrowbank export {folder} --to FORMAT --out DIR"
    shown = ("arm", "T", "examples", "triples", "decoys_placed", "seed", "split", "tokenizer")
    together = True
    merge_instead = "Build one arm of as many examples (another --seed gives other ones)."
    picture = "arrowbank.share.pictures:needle_distances"
    story = "arrowbank.report.arms:tell_arms"
    bank = ArmBank

    def columns(self, manifest: ArmManifest) -> dict[str, Types]:
        places = ("needle_start", "probe_start", "answer_start", "distance", "decoy_start")
        return {
            "input_ids": fixed(pa.type_for_alias(manifest.dtype), manifest.T),
            "answer_mask": fixed(pa.uint8(), manifest.T),
            **dict.fromkeys(places, lists(pa.int32())),
            "decoys_placed": INT,
            "filler": INT,
            "filler_start": LONG,
            "arm": STRING,
            "example": LONG,
        }

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "method" not in recipe:
            return
        names = ("arm", "examples", "split", "key_len", "val_len", "alphabet", "decoys", "seed", "vocab", "dtype")
        yield from equal(manifest, {name: recipe[name] for name in names})
        yield from equal(manifest, {"T": recipe["length"], "K": recipe["triples"], "d_min": recipe["min_distance"]})
        yield from equal(manifest, {"span": recipe["key_len"] + recipe["val_len"], "pad_tail": 4})
        yield "fillers", parts(manifest["fillers"], ("tokens", "sha256")), recipe["fillers"]
        raw = [{"name": name, "tokens": tokens} for name, tokens in raw_shards(recipe).items()]
        yield from equal(manifest, {"raw_shards": raw or ABSENT})

    def files_beside(self, bank: ArmBank) -> dict[str, int | None] | None:
        recipe = bank.manifest.recipe
        if "method" not in recipe:
            return None
        raw = list(raw_shards(recipe))
        return {INFO: None, **dict.fromkeys(raw), **dict.fromkeys(name.replace(".bin", ".json") for name in raw[:1])}

    def recounted(self, bank: ArmBank) -> dict[str, Any]:
        recipe = bank.manifest.recipe
        if "method" not in recipe:
            return {}
        length, span, examples = recipe["length"], recipe["key_len"] + recipe["val_len"], recipe["examples"]
        total = dict.fromkeys(("answer_tokens", "synthetic_tokens", "decoys_placed", "triples"), 0)
        survivors = {"T": 0, "T+1": 0}
        each = -(-examples // recipe["shards"])
        for batch in bank.shards():
            found = {name: list_values(batch.column(f"{name}_start")) for name in ("needle", "answer", "decoy")}
            (answers, offsets), (needles, _), (decoys, _) = found["answer"], found["needle"], found["decoy"]
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

    def describe(self, manifest: ArmManifest) -> Description:
        facts = {
            "examples": f"{manifest.rows:,} of {manifest.T:,} tokens",
            "needles": NEEDLES[manifest.arm],
            "least distance": manifest.d_min if manifest.arm == "c" else None,
            "triples of needle, probe and answer": manifest.triples,
            "decoys": manifest.decoys_placed,
            "seed": str(manifest.seed),
        }
        return Description(f"IN2 arm {manifest.arm}", facts, ("long-context",), ANSWERS)


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
