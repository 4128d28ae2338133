"""What any reader of hidden states takes on trust, looked at: ids, masks, and rows that no model gives, a layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.floats import INFINITY, MAGNITUDE, Bits
from arrowbank.bank.targets import TargetRows, TargetSample, needed_positions
from arrowbank.progress import SILENT, Progress


@dataclass
class _Bad:
    """Hidden states of one kind of badness in one layer."""

    count: int = 0
    values: int = 0
    first: str = ""

    def note(self, sample: TargetSample, bad: npt.NDArray[np.bool_], values: Bits) -> None:
        if not bad.any():
            return
        if not self.count:
            at = int(bad.argmax())
            token = at if sample.positions is None else int(sample.positions[at])
            self.first = f"{sample.name} token {token}"
        self.count += int(bad.sum())
        self.values += int((values[bad] & MAGNITUDE >= INFINITY).sum())


def target_checks(rows: TargetRows, stated: Mapping[str, Any] | None = None, *, progress: Progress = SILENT) -> list[Check]:
    """Read every row. `stated` is the manifest, where there is one."""
    facts, wrong = rows.facts, []
    layers = [*facts.layer_names, "last"]
    bad = {(layer, kind): _Bad() for layer in layers for kind in ("zero", "constant", "not finite")}
    tokens = loss_tokens = hidden = 0
    with progress.phase("look", len(rows.lengths), unit="samples") as phase:
        for row in range(len(rows.lengths)):
            sample = rows.read(row)
            wrong += _malformed(rows, row, sample)
            tokens, loss_tokens = tokens + len(sample.input_ids), loss_tokens + int(sample.loss_mask.sum())
            hidden += len(sample.last)
            taps = sample.taps.reshape(len(sample.taps), facts.layers, facts.hidden_size)
            states = np.concatenate([taps, sample.last[:, None, :]], axis=1)
            for layer, values in zip(layers, np.moveaxis(states, 1, 0), strict=True):
                vectors = np.ascontiguousarray(values)
                for kind, found in _faults(vectors).items():
                    bad[layer, kind].note(sample, found, vectors)
            phase.advance(1)
    good = f"{len(rows.lengths):,} samples of {tokens:,} tokens, {loss_tokens:,} in the loss: ids and masks well formed"
    checks = [found_wrong("rows", wrong, good, "ids or masks wrong in")]
    if stated is not None:
        found_counts = {"kept": len(rows.lengths), "tokens": tokens, "loss_tokens": loss_tokens, "hidden_tokens": hidden}
        differing = [
            f"{name} is {stated['counts'].get(name)}, the rows have {value}"
            for name, value in found_counts.items()
            if stated["counts"].get(name) != value
        ]
        nonfinite = {layer: bad[layer, "not finite"].values for layer in layers}
        if stated["nonfinite"] != nonfinite:
            differing.append(f"nonfinite is {stated['nonfinite']}, the rows have {nonfinite}")
        checks.append(found_wrong("counts", differing, "those of the manifest", "not those of the rows:"))
    shape = f"{hidden:,} vectors of width {facts.hidden_size} each in layers {', '.join(layers)}"
    faults = [
        f"layer {layer}: {found.count} of {hidden} vectors {kind}, first at {found.first}"
        for (layer, kind), found in bad.items()
        if found.count
    ]
    return [*checks, found_wrong("hidden", faults, f"{shape}: finite, none zero or constant", f"{shape}:")]


def _malformed(rows: TargetRows, row: int, sample: TargetSample) -> list[str]:
    """What is wrong with a row's ids, mask or lengths."""
    facts, length = rows.facts, int(rows.lengths[row])
    limit = facts.vocab_size if facts.vocab_size is not None else np.iinfo(np.int32).max
    positions = sample.positions
    fits = (
        len(sample.input_ids) == len(sample.loss_mask) == length > 0
        and len(sample.taps) == len(sample.last) == (length if positions is None else len(positions))
        and sample.input_ids.min() >= 0
        and sample.input_ids.max() < limit
        and sample.loss_mask.max() <= 1
        and (positions is None or np.array_equal(positions, needed_positions(sample.loss_mask)))
    )
    return [] if fits else [f"row {row} ({sample.name})"]


def _faults(bits: Bits) -> dict[str, npt.NDArray[np.bool_]]:
    """Which vectors [K, H] are zero; all one value; not finite."""
    magnitudes = bits & MAGNITUDE
    zero = ~magnitudes.any(axis=1)
    constant = (bits == bits[:, :1]).all(axis=1) & ~zero if bits.shape[1] > 1 else np.zeros(len(bits), bool)
    return {"zero": zero, "constant": constant, "not finite": magnitudes.max(axis=1, initial=0) >= INFINITY}
