"""IN2 probes: trials in which only the needle changes, to score models with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pyarrow as pa

from arrowbank.bank.kinds import INT, LONG, STRING, Description, Field, Kind, Types, equal, fixed, parts, register
from arrowbank.bank.kinds.in2_bank import ANSWERS, FillerEntry
from arrowbank.bank.manifest import INFO, BankManifest, Manifest, Width
from arrowbank.bank.reader import Bank


class ProbesManifest(BankManifest, kw_only=True):
    """`length` tokens per trial, `val_len` of them the answer; `blocks` of trials that differ in nothing but the needle."""

    length: Width
    val_len: Width
    blocks: Width
    positions: list[Any]
    dtype: Literal["uint16", "uint32"]
    fillers: list[FillerEntry]
    tokenizer: str | None = None


class ProbesBank(Bank):
    """A committed bank of IN2 probes."""

    manifest: ProbesManifest


@register
class ProbesKind(Kind):
    name = "in2-probes"
    manifest = ProbesManifest
    words = "IN2 probes"
    unit = "trials"
    made_by = "`arrowbank in2 probes`"
    next = "arrowbank in2 score {folder} --model M --out DIR"
    shown = ("seed", "split", "tokenizer")
    picture = "arrowbank.share.pictures:trial_distances"
    story = "arrowbank.report.arms:tell_probes"
    bank = ProbesBank

    def columns(self, manifest: ProbesManifest) -> dict[str, Types]:
        numbers = ("block", "needle_start", "probe_start", "answer_start", "distance", "filler")
        return {
            "input_ids": fixed(pa.type_for_alias(manifest.dtype), manifest.length),
            "answer_mask": fixed(pa.uint8(), manifest.length),
            "condition": STRING,
            "position": [pa.float64()],
            "probe_pos": [pa.float64()],
            **dict.fromkeys(numbers, INT),
            **dict.fromkeys(("filler_start", "trial"), LONG),
        }

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "method" not in recipe:
            return
        yield from equal(manifest, {name: value for name, value in recipe.items() if name not in ("method", "fillers")})
        yield from equal(manifest, {"span": recipe["key_len"] + recipe["val_len"], "pad_tail": 4})
        yield "fillers", parts(manifest["fillers"], ("tokens", "sha256")), recipe["fillers"]

    def files_beside(self, bank: Bank) -> dict[str, int | None]:
        return {INFO: None}

    def describe(self, manifest: ProbesManifest) -> Description:
        recipe = manifest.recipe
        facts = {
            "trials": f"{manifest.rows:,} of {manifest.length:,} tokens, in {manifest.blocks:,} blocks",
            "positions (1: right before the probe; lower is farther)": recipe["positions"],
            "the probe's places": recipe["probe_pos"],
            "controls": "absent (no needle), null (another key's needle)",
            "seed": str(recipe["seed"]),
        }
        return Description("IN2 probes", facts, ("long-context",), ANSWERS)
