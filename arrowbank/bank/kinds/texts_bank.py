"""Texts: unique strings in first-seen order, each with its sha1, its kind and the source that it was met in first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.columns import fixed_bytes
from arrowbank.bank.keys import SHA1_BYTES, text_keys
from arrowbank.bank.kinds import BINARY, STRING, TEXT, Description, Field, Kind, Types, equal, parts, register
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest
from arrowbank.bank.reader import Bank


class SourceEntry(msgspec.Struct, kw_only=True):
    """A file that texts were read from."""

    name: str
    file: str
    bytes: Count


class TextsManifest(BankManifest, kw_only=True):
    """`source_rows` is how many rows were met first in each source, `counts` what was met on the way."""

    kinds: dict[str, Count]
    counts: dict[str, Any] | None = None
    source_rows: dict[str, Count] | None = None
    source_duplicates: dict[str, Any] | None = None
    sources: list[SourceEntry] | None = None


class TextsBank(Bank):
    """A committed bank of texts."""

    manifest: TextsManifest


@register
class TextsKind(Kind):
    name = "texts"
    manifest = TextsManifest
    words = "texts"
    made_by = "`arrowbank scan`"
    next = "arrowbank tokenize {folder} --tokenizer M --out DIR"
    rules = "arrowbank.combine.rules:CombineRules"
    picture = "arrowbank.share.pictures:text_lengths"
    story = "arrowbank.report.vectors:tell_texts"
    bank = TextsBank

    def columns(self, manifest: TextsManifest) -> dict[str, Types]:
        return {"text": TEXT, "sha1": BINARY, "kind": STRING, "source": STRING}

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "sources" not in recipe:
            return
        yield from equal(manifest, {"fields": recipe["fields"]})
        numbered = sorted((int(key.split(" ", 1)[0]), key.split(" ", 1)[1], said) for key, said in recipe["sources"].items())
        wanted = [{"name": name, "bytes": said["bytes"], "sha256": said["sha256"]} for _, name, said in numbered]
        newest = manifest["sources"][-len(wanted) :] if recipe["onto"] else manifest["sources"]
        yield "sources", parts(newest, ("name", "bytes", "sha256")), wanted
        names = [one["name"] for one in wanted]
        yield from equal(manifest, {f"{one['name']}_sha256": one["sha256"] for one in wanted if names.count(one["name"]) == 1})
        ends = [recipe["onto"]["rows"]] if recipe["onto"] else []
        yield "generations", manifest["generations"][-1 - len(ends) :], [*ends, manifest["rows"]]

    def files_beside(self, bank: Bank) -> dict[str, int | None]:
        return {INFO: None}

    def recounted(self, bank: TextsBank) -> dict[str, Any]:
        stated = bank.manifest
        return {
            "kinds": value_counts(bank, "kind", stated.kinds),
            "source_rows": value_counts(bank, "source", stated.source_rows or {}),
        }

    def bounds(self, bank: TextsBank) -> Iterator[str]:
        counts = bank.manifest.counts or {}
        if "texts_seen" in counts and counts["texts_seen"] - counts["duplicates"] != len(bank):
            yield f"counts has {counts['texts_seen']} texts of which {counts['duplicates']} are duplicates, the rows are {len(bank)}"

    def checks(self, bank: TextsBank) -> Mapping[str, Callable[[], Check]]:
        return {"keys": partial(check_keys, bank), "unique": partial(check_unique, bank), "kinds": partial(_check_kinds, bank)}

    def describe(self, manifest: TextsManifest) -> Description:
        facts = {
            "unique texts": manifest.rows,
            "by kind": manifest.kinds,
            "by source": manifest.source_rows,
            "duplicates left out": (manifest.counts or {}).get("duplicates"),
            "made from": [f"{source.name}: {source.file} ({source.bytes:,} bytes)" for source in manifest.sources or ()],
        }
        return Description("Unique texts", facts)


def value_counts(bank: Bank, column: str, stated: Mapping[str, int]) -> dict[str, int]:
    """How often each value is in the column; those that are stated to be nowhere are, too, unless they are there."""
    counts = {value: 0 for value, count in stated.items() if count == 0}
    for batch in bank.shards():
        for item in batch.column(column).value_counts().to_pylist():
            counts[item["values"]] = counts.get(item["values"], 0) + item["counts"]
    return counts


def check_keys(bank: Bank) -> Check:
    wrong: list[str] = []
    for row, batch in bank.numbered_shards():
        stored = fixed_bytes(batch.column("sha1"), SHA1_BYTES)
        differing = np.flatnonzero((text_keys(batch.column("text").to_pylist()) != stored).any(axis=1))
        wrong += [f"row {row + at}" for at in differing[:3]]
    return found_wrong("keys", wrong, "sha1 of every text", "sha1 is not that of the text in")


def check_unique(bank: Bank) -> Check:
    digests = np.concatenate([fixed_bytes(batch.column("sha1"), SHA1_BYTES) for batch in bank.shards()])
    twice = len(digests) - len(np.unique(digests, axis=0))
    return Check("unique", not twice, f"{twice} texts stand in the bank twice" if twice else "no text twice")


def _check_kinds(bank: TextsBank) -> Check:
    counts = value_counts(bank, "kind", {})
    wanted = {kind: count for kind, count in bank.manifest.kinds.items() if count}
    return Check("kinds", counts == wanted, f"{counts} in the rows, {wanted} in the manifest")
