"""Drafts: what a draft was fed and said at each step of its chain, before and after its healing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from arrowbank.bank.kinds import INT, STRING, Description, Field, Kind, Types, equal, register, vectors
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest, Width
from arrowbank.bank.reader import Bank

Chain = Annotated[int, msgspec.Meta(ge=1, le=1000)]  # steps, each of which has columns


class DraftsManifest(BankManifest, kw_only=True):
    """`kept` next tokens at each of the `chain` steps."""

    windows: Count
    chain: Chain
    kept: Width
    hidden_size: Width


class DraftsBank(Bank):
    """A committed bank of drafts."""

    manifest: DraftsManifest


@register
class DraftsKind(Kind):
    name = "drafts"
    manifest = DraftsManifest
    words = "drafts"
    unit = "windows"
    made_by = "`arrowbank heal --dump`"
    shown = ("hidden_size",)
    picture = "arrowbank.share.pictures:window_lengths"
    story = "arrowbank.report.drafts:tell_drafts"
    bank = DraftsBank

    def columns(self, manifest: DraftsManifest) -> dict[str, Types]:
        columns: dict[str, Types] = {"when": STRING, "set": STRING, "row": INT, "length": INT}
        for step in range(1, manifest.chain + 1):
            columns[f"hidden_{step}"] = vectors(pa.float16(), manifest.hidden_size)
            columns[f"topk_ids_{step}"] = vectors(pa.int32(), manifest.kept)
            columns[f"topk_probs_{step}"] = vectors(pa.float32(), manifest.kept)
        return columns

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "heal" not in recipe:
            return
        yield from equal(manifest, {"chain": recipe["heal"]["chain"]})
        yield "windows", manifest["windows"] * len(recipe["when"]), manifest["rows"]

    def files_beside(self, bank: Bank) -> dict[str, int | None]:
        return {INFO: None}

    def describe(self, manifest: DraftsManifest) -> Description:
        facts = {name: getattr(manifest, name) for name in ("windows", "chain", "kept", "hidden_size")}
        return Description(
            "Drafts", {name.replace("_", " "): value for name, value in facts.items()}, ("speculative-decoding",)
        )
