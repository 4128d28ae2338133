"""Taps: what chosen decoder blocks put out in the held-out windows of a trunk bank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.columns import fixed_lists, nested_lists, values_of
from arrowbank.bank.kinds import INT, Description, Field, Kind, Types, column_sum, equal, fixed, lists, register, vectors
from arrowbank.bank.kinds.trunk_bank import model_fields
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest, Whole, Width
from arrowbank.bank.reader import Bank


class TapsCounts(msgspec.Struct, kw_only=True):
    """Windows and their real tokens."""

    windows: Count
    tokens: Count


class TapsManifest(BankManifest, kw_only=True):
    """`layers` are ids: i is what decoder block i puts out, −1 the embeddings."""

    window: Width
    layers: list[Whole]
    hidden_size: Width
    model_path: str
    counts: TapsCounts


class TapsBank(Bank):
    """A committed bank of taps."""

    manifest: TapsManifest


def _check_taps(bank: TapsBank) -> Check:
    """Lists of as many rows as there are real tokens, finite values."""
    wrong: list[str] = []
    for start, batch in bank.numbered_shards():
        lengths = values_of(batch.column("length"))
        for layer in bank.manifest.layers:
            values, offsets = nested_lists(batch.column(f"layer_{layer}"))
            if not np.isfinite(values).all() or values.shape[1] != bank.manifest.hidden_size:
                wrong.append(f"layer {layer} from row {start}")
            wrong += [f"layer {layer} row {start + at}" for at in np.flatnonzero(np.diff(offsets) != lengths)[:3]]
        if fixed_lists(batch.column("input_ids")).shape[1] != bank.manifest.window:
            wrong.append(f"input_ids from row {start}")
    return found_wrong("taps", wrong, f"{len(bank)} windows, finite, one row a real token", "not finite, or of other shapes:")


@register
class TapsKind(Kind):
    name = "taps"
    manifest = TapsManifest
    words = "taps"
    unit = "windows"
    made_by = "`arrowbank trunk build --layers`"
    shown = ("model_path", "hidden_size", "window")
    picture = "arrowbank.share.pictures:window_lengths"
    story = "arrowbank.report.hidden:tell_taps"
    bank = TapsBank

    def columns(self, manifest: TapsManifest) -> dict[str, Types]:
        return {
            "row": INT,
            "input_ids": fixed(pa.int32(), manifest.window),
            "length": INT,
            "next_ids": lists(pa.int32()),
            **{f"layer_{layer}": vectors(pa.float16(), manifest.hidden_size) for layer in manifest.layers},
        }

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "method" not in recipe:
            return
        yield from equal(manifest, {"layers": recipe["layers"], "layer_id_convention": "block_output"})
        yield from model_fields(manifest, recipe, ("hidden_size",))

    def files_beside(self, bank: Bank) -> dict[str, int | None]:
        return {INFO: None}

    def recounted(self, bank: Bank) -> dict[str, Any]:
        return {"counts": {"windows": len(bank), "tokens": column_sum(bank, "length")}}

    def checks(self, bank: TapsBank) -> Mapping[str, Callable[[], Check]]:
        return {"taps": partial(_check_taps, bank)}

    def describe(self, manifest: TapsManifest) -> Description:
        facts = {
            "model": manifest.model_path,
            "held-out windows": manifest.counts.windows,
            "tokens": manifest.counts.tokens,
            "layers (what decoder block i puts out, before any norm, float16)": manifest.layers,
        }
        return Description("Taps of a trunk bank", facts, ("speculative-decoding",))
