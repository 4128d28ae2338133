"""The shards of a target bank, written from any rows: columns, codec, spans, and what is counted on the way.

The hidden states of a shard are promised columns: they go row by row from where they lie to the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import BankWriter
from arrowbank.bank.columns import Promise, list_column, number_column
from arrowbank.bank.files import human_bytes, publish_json
from arrowbank.bank.floats import Bits, all_finite, cosines, float32_of, fp8_decode, fp8_encode, nonfinite
from arrowbank.bank.manifest import Manifest, read_json, readable_json
from arrowbank.bank.targets import TargetFacts, TargetRows, TargetSample, needed_positions
from arrowbank.engine.plan import Shard
from arrowbank.errors import BadVector, DiskFull, InputError

SHARD_BYTES = 1 << 29
MAX_VALUES = 2**31 - 1  # of a column in one record batch


def target_shards(lengths: npt.NDArray[np.int64], facts: TargetFacts, shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Contiguous shards of at most `shard_bytes` (and at least one row), by the rows' lengths. InputError for a row that no
    record batch can hold."""
    width = facts.layers * facts.hidden_size
    too_long = np.flatnonzero(lengths * width > MAX_VALUES)
    if len(too_long):
        raise InputError(
            f"row {too_long[0]} has {lengths[too_long[0]]} tokens of {width} values: more than a record batch holds "
            f"({MAX_VALUES} values). Leave it out, or shorten it to {MAX_VALUES // width} tokens."
        )
    shards: list[Shard] = []
    start, size, tokens = 0, 0, 0
    for row, length in enumerate(lengths):
        more = facts.sample_bytes(int(length))
        if row > start and (size + more > shard_bytes or (tokens + int(length)) * width > MAX_VALUES):
            shards.append(Shard(len(shards), start, row))
            start, size, tokens = row, 0, 0
        size, tokens = size + more, tokens + int(length)
    shards.append(Shard(len(shards), start, len(lengths)))
    return shards


@dataclass
class Tally:
    """What is counted of rows while they pass: JSON-able, and added up over shards.

    nonfinite: layer → values that are Inf or NaN; error: layer → sums from which the codec's error follows.
    """

    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    hidden_tokens: int = 0
    nonfinite: dict[str, int] = field(default_factory=dict)
    error: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        self.rows += other.rows
        self.tokens += other.tokens
        self.loss_tokens += other.loss_tokens
        self.hidden_tokens += other.hidden_tokens
        for layer, count in other.nonfinite.items():
            self.nonfinite[layer] = self.nonfinite.get(layer, 0) + count
        for layer, sums in other.error.items():
            mine = self.error.setdefault(layer, dict.fromkeys(sums, 0.0))
            for name, value in sums.items():
                mine[name] += value

    def codec_error(self) -> dict[str, dict[str, float]]:
        """Layer → mean cosine between stored and true vectors, and the relative error ‖stored − true‖ / ‖true‖ over all."""
        return {
            layer: {
                "cosine": round(sums["cosine"] / max(sums["vectors"], 1), 6),
                "relative": round((sums["squared_error"] / max(sums["squared"], 1e-300)) ** 0.5, 6),
            }
            for layer, sums in self.error.items()
        }


class ShardSource:
    """Rows `shard` of `rows` as the columns of a target bank of `facts`, counted in `tally` as they pass.

    `keep_nonfinite`: Inf and NaN are counted, not refused (BadVector).
    """

    def __init__(self, rows: TargetRows, shard: Shard, facts: TargetFacts, *, keep_nonfinite: bool) -> None:
        self._rows, self._shard, self._facts, self._keep = rows, shard, facts, keep_nonfinite
        self.tally = Tally(nonfinite=dict.fromkeys([*facts.layer_names, "last"], 0))
        self._tap_scales: list[npt.NDArray[np.float32]] = []
        self._last_scales: list[npt.NDArray[np.float32]] = []
        self.batch, self.promises = self._columns()

    def _columns(self) -> tuple[pa.RecordBatch, list[Promise]]:
        facts, ids, masks, names, positions = self._facts, [], [], [], []
        for sample in self._samples():
            ids.append(sample.input_ids.copy())
            masks.append(sample.loss_mask.copy())
            names.append(sample.name)
            positions.append(self._positions(sample))
        lengths = [len(row) for row in ids]
        kept = lengths if facts.spans == "all" else [len(row) for row in positions]
        total, starts = sum(kept), _offsets(kept)
        value = np.uint16 if facts.codec == "bf16" else np.uint8
        taps = Promise(value, total * facts.layers * facts.hidden_size, self._taps)
        last = Promise(value, total * facts.hidden_size, self._last)
        columns = {
            "input_ids": list_column(np.concatenate(ids), _offsets(lengths)),
            "loss_mask": list_column(np.concatenate(masks), _offsets(lengths)),
            "target_hidden_states": _lists(starts, _rows_of(taps.column, facts.layers * facts.hidden_size)),
            "target_last_hidden_states": _lists(starts, _rows_of(last.column, facts.hidden_size)),
            "seq_len": number_column(np.array(lengths, np.int32)),
            "sample": pa.array(names, pa.string()),
        }
        promises = [taps, last]
        if facts.codec == "fp8":
            tap_scales = Promise(np.float32, total * facts.layers, lambda: self._tap_scales)
            last_scales = Promise(np.float32, total, lambda: self._last_scales)
            promises += [tap_scales, last_scales]
            columns["target_hidden_scales"] = _lists(starts, _rows_of(tap_scales.column, facts.layers))
            columns["target_last_hidden_scales"] = _lists(starts, last_scales.column)
        if facts.spans == "supervised":
            columns["hidden_positions"] = list_column(np.concatenate(positions), starts)
        self.tally.rows, self.tally.tokens, self.tally.hidden_tokens = len(ids), sum(lengths), total
        self.tally.loss_tokens = sum(int(mask.sum()) for mask in masks)
        return pa.record_batch(columns), promises

    def _samples(self) -> Iterator[TargetSample]:
        return (self._rows.read(row) for row in range(self._shard.start, self._shard.stop))

    def _positions(self, sample: TargetSample) -> npt.NDArray[np.int32]:
        if self._facts.spans == "all":
            return np.empty(0, np.int32)
        return needed_positions(sample.loss_mask) if sample.positions is None else sample.positions.copy()

    def _taps(self) -> Iterator[npt.NDArray[Any]]:
        for sample in self._samples():
            taps = self._kept(sample, sample.taps)
            self._check(sample, taps, self._facts.layer_names)
            yield taps if self._facts.codec == "bf16" else self._quantised(taps, self._facts.layer_names, self._tap_scales)

    def _last(self) -> Iterator[npt.NDArray[Any]]:
        for sample in self._samples():
            last = self._kept(sample, sample.last)
            self._check(sample, last, ["last"])
            yield last if self._facts.codec == "bf16" else self._quantised(last, ["last"], self._last_scales)

    def _kept(self, sample: TargetSample, hidden: Bits) -> Bits:
        if self._facts.spans == "all" or sample.positions is not None:
            return hidden
        return hidden[needed_positions(sample.loss_mask)]

    def _check(self, sample: TargetSample, hidden: Bits, layers: Sequence[str]) -> None:
        keep = self._keep and self._facts.codec == "bf16"
        for layer, count in nonfinite_values(self._rows.place, sample.name, hidden, layers, keep=keep).items():
            self.tally.nonfinite[layer] += count

    def _quantised(self, hidden: Bits, layers: Sequence[str], scales: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.uint8]:
        codes, scale = fp8_encode(np.ascontiguousarray(hidden), len(layers))
        scales.append(scale)
        true = float32_of(hidden).astype(np.float64).reshape(*scale.shape, self._facts.hidden_size)
        stored = float32_of(fp8_decode(codes, scale)).astype(np.float64).reshape(true.shape)
        cosine = cosines(true, stored, of_zeros=1.0)
        for at, layer in enumerate(layers):
            sums = {
                "cosine": float(cosine[:, at].sum()),
                "vectors": float(len(hidden)),
                "squared_error": float(((stored - true)[:, at] ** 2).sum()),
                "squared": float((true[:, at] ** 2).sum()),
            }
            self.tally.add(Tally(error={layer: sums}))
        return codes


def nonfinite_values(place: str, name: str, hidden: Bits, layers: Sequence[str], *, keep: bool) -> dict[str, int]:
    """Layer → values of `hidden` [K, L·H] that are Inf or NaN; BadVector for the first one, unless `keep`."""
    if all_finite(hidden):
        return {}
    bad = nonfinite(hidden).reshape(len(hidden), len(layers), -1)
    counts = {layer: int(bad[:, at].sum()) for at, layer in enumerate(layers) if bad[:, at].any()}
    if not keep:
        listed = ", ".join(f"{count} in layer {layer}" for layer, count in counts.items())
        raise BadVector(
            f"{place}: {name}: values that are NaN or Inf ({listed}), first at hidden state "
            f"{int(np.flatnonzero(bad.any(axis=(1, 2)))[0])} of {len(hidden)}. Give --on-nonfinite drop to leave such samples "
            "out or keep to store them (fp8 cannot hold them), or make them again."
        )
    return counts


def filled(batch: pa.RecordBatch, promises: Iterable[Promise]) -> pa.RecordBatch:
    """`batch` with its promises kept in memory, for a worker that hands it on."""
    for promise in promises:
        promise.fill()
    return batch


def _offsets(counts: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *counts]).astype(np.int32)


def _rows_of(flat: pa.Array, width: int) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(flat, width)


def _lists(offsets: npt.NDArray[np.int32], values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(number_column(offsets), values)


def check_layers(layers: tuple[int, ...] | None) -> None:
    """InputError for layer ids that are not ascending from −1 (the embeddings) on."""
    if layers is not None and (not layers or list(layers) != sorted(set(layers)) or layers[0] < -1):
        raise InputError(
            f"--layers {','.join(map(str, layers))}: expected ascending ids of decoder blocks, each once, −1 for the embeddings, "
            "as in --layers 1,11,21."
        )


def require_budget(needed: int, budget: int | None, what: str) -> None:
    """DiskFull when `needed` is past a budget that the user has set."""
    if budget is not None and needed > budget:
        raise DiskFull(
            f"{what} takes {human_bytes(needed)}, the budget is {human_bytes(budget)}. Tap fewer layers, give --codec fp8 (half), "
            "--spans supervised, --limit, or a larger --budget-gb."
        )


@dataclass(frozen=True)
class TargetEstimate:
    """What a target bank will take. `bytes` is what is written, `free_bytes` what the disk has."""

    samples: int
    tokens: int
    bytes_a_token: int
    bytes: int
    free_bytes: int
    budget_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it, and the budget."""
        return self.bytes <= min(self.free_bytes, self.bytes if self.budget_bytes is None else self.budget_bytes)


def tally_file(folder: Path, shard: int) -> Path:
    """Where the counts of a shard lie while the bank is being built."""
    return folder / f"tally-{shard:05d}.json"


def publish_tally(folder: Path, shard: int, tally: Tally) -> None:
    """Note the counts of a shard."""
    folder.mkdir(exist_ok=True)
    publish_json(tally_file(folder, shard), vars(tally))


def is_done(bank: BankWriter, shard: Shard) -> bool:
    """Whether a shard and its counts are there."""
    found = readable_json(tally_file(bank.work_dir, shard.index))  # a power cut may have taken it: the shard is made again
    return shard.index in bank.done_shards and isinstance(found, dict) and found.keys() == vars(Tally()).keys()


def commit_targets(bank: BankWriter, shards: list[Shard], facts: TargetFacts, dropped: dict[str, int], **more: int) -> Manifest:
    """Commit the bank with the counts of all its shards, and `more` counts; its manifest."""
    tally = Tally()
    for shard in shards:
        tally.add(Tally(**read_json(tally_file(bank.work_dir, shard.index))))
    counts: dict[str, Any] = {
        "kept": tally.rows,
        "dropped": dropped,
        "tokens": tally.tokens,
        "loss_tokens": tally.loss_tokens,
        "hidden_tokens": tally.hidden_tokens,
        **more,
    }
    fields = {"counts": counts, "nonfinite": tally.nonfinite}
    if facts.codec != "bf16":
        fields["codec_error"] = tally.codec_error()
    return bank.commit(rows=tally.rows, manifest=fields)
