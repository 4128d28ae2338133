"""Tokens: for each row of a texts bank its token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.columns import list_values, values_of
from arrowbank.bank.kinds import ABSENT, INT, Description, Field, Kind, Types, column_sum, equal, lists, register
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest, Width
from arrowbank.bank.reader import Bank


class TextsBehind(msgspec.Struct, kw_only=True):
    """The texts bank that tokens were made from: its folder, seen from the bank's own, and its plan digest."""

    path: str
    plan_digest: str


class TokensManifest(BankManifest, kw_only=True):
    """`max_tokens` is how many a text has at most; `prompt` was put before every text, of a kind in `prompts` that one."""

    texts: TextsBehind | None = None
    tokenizer: str | None = None
    tokenizer_fingerprint: str | None = None
    max_tokens: Width | None = None
    special_tokens: bool | None = None
    prompt: str | None = None
    prompts: dict[str, str] | None = None
    prompt_tokens: Count = 0
    counts: dict[str, Any] | None = None


class TokensBank(Bank):
    """A committed bank of tokens."""

    manifest: TokensManifest


@register
class TokensKind(Kind):
    name = "tokens"
    manifest = TokensManifest
    words = "tokens"
    made_by = "`arrowbank tokenize`"
    next = "arrowbank encode {folder} --model M --out DIR"
    shown = ("tokenizer", "max_tokens")
    behind = ("texts",)
    rules = "arrowbank.combine.rules:TokenRules"
    merge_instead = "Merge their texts banks and tokenize the result: that gives the same ids."
    picture = "arrowbank.share.pictures:token_lengths"
    story = "arrowbank.report.vectors:tell_texts"
    bank = TokensBank

    def columns(self, manifest: TokensManifest) -> dict[str, Types]:
        return {"input_ids": lists(pa.int32()), "length": INT}

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "method" not in recipe:
            return
        names = ("tokenizer_fingerprint", "max_tokens", "special_tokens", "on_long", "prompt", "generations")
        yield from equal(manifest, {name: recipe[name] for name in names})
        yield from equal(manifest, {"prompts": recipe.get("prompts", ABSENT)})
        yield "texts.plan_digest", manifest["texts"]["plan_digest"], recipe["texts"]

    def files_beside(self, bank: Bank) -> dict[str, int | None]:
        return {INFO: None}

    def recounted(self, bank: TokensBank) -> dict[str, Any]:
        return {"counts": {**(bank.manifest.counts or {}), "tokens": column_sum(bank, "length")}}

    def checks(self, bank: TokensBank) -> Mapping[str, Callable[[], Check]]:
        return {"tokens": partial(_check_tokens, bank)}

    def describe(self, manifest: TokensManifest) -> Description:
        counts = manifest.counts or {}
        facts = {
            "texts": manifest.rows,
            "tokens": counts.get("tokens"),
            "tokenizer": manifest.tokenizer,
            "at most tokens a text": manifest.max_tokens,
            "special tokens": "yes" if manifest.special_tokens else "no",
            "truncated": counts.get("truncated"),
            "texts without a token of their own": counts.get("empty"),
        }
        return Description("Tokens", facts)


def _check_tokens(bank: TokensBank) -> Check:
    limit = bank.manifest.json["max_tokens"]
    wrong: list[str] = []
    for row, batch in bank.numbered_shards():
        values, offsets = list_values(batch.column("input_ids"))
        lengths = np.diff(offsets)
        bad = (lengths != values_of(batch.column("length"))) | (lengths > limit)
        wrong += [f"row {row + at}" for at in np.flatnonzero(bad)[:3]]
        wrong += [f"row {row + np.searchsorted(offsets, at, 'right') - 1}" for at in np.flatnonzero(values < 0)[:3]]
    return found_wrong("tokens", wrong, f"ids ≥ 0, lengths right, at most {limit}", "ids or length wrong in")
