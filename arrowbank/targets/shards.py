"""The shards of a target bank, written from any rows: columns, codec, spans, what is counted on the way, and the stage's plan."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import BankWriter
from arrowbank.bank.bad_states import BadStates, refuse_bad_states
from arrowbank.bank.codecs import CODECS
from arrowbank.bank.columns import fixed_list_column, list_column, number_column
from arrowbank.bank.files import publish_json
from arrowbank.bank.floats import Bits, cosines, float32_of
from arrowbank.bank.kinds.targets_bank import KIND, Codec, Spans, TargetFacts, TargetRows, TargetSample, needed_positions
from arrowbank.bank.manifest import Manifest, read_json, readable_json
from arrowbank.engine.plan import Shard, cut_shards
from arrowbank.engine.stage import Stage
from arrowbank.errors import InputError
from arrowbank.settings import Help

StoredAs = Annotated[Codec, Help("As stored; fp8: half the size, error measured.")]
StoredSpans = Annotated[Spans, Help("supervised: states only where loss needs them.")]


def target_shards(lengths: npt.NDArray[np.int64], facts: TargetFacts, shard_bytes: int | None = None) -> list[Shard]:
    """The shards of a target bank, by the rows' lengths; see `cut_shards`."""
    return cut_shards(lengths.tolist(), facts.sample_bytes, facts.layers * facts.hidden_size, shard_bytes)


@dataclass
class Tally:
    """What is counted of rows while they pass: JSON-able, and added up over shards.

    nonfinite: layer → values that are Inf or NaN; constant: layer → vectors that are all zero, of one value, or the same at every
    position; error: layer → sums from which the codec's error follows.
    """

    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    hidden_tokens: int = 0
    nonfinite: dict[str, int] = field(default_factory=dict)
    constant: dict[str, int] = field(default_factory=dict)
    error: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        self.rows += other.rows
        self.tokens += other.tokens
        self.loss_tokens += other.loss_tokens
        self.hidden_tokens += other.hidden_tokens
        for mine, theirs in ((self.nonfinite, other.nonfinite), (self.constant, other.constant)):
            for layer, count in theirs.items():
                mine[layer] = mine.get(layer, 0) + count
        for layer, sums in other.error.items():
            added = self.error.setdefault(layer, dict.fromkeys(sums, 0.0))
            for name, value in sums.items():
                added[name] += value

    def codec_error(self) -> dict[str, dict[str, float]]:
        """Layer → mean cosine between stored and true vectors, and the relative error ‖stored − true‖ / ‖true‖ over all."""
        return {
            layer: {
                "cosine": round(sums["cosine"] / max(sums["vectors"], 1), 6),
                "relative": round((sums["squared_error"] / max(sums["squared"], 1e-300)) ** 0.5, 6),
            }
            for layer, sums in self.error.items()
        }


class ShardColumns:
    """Rows `shard` of `rows` as the columns of a target bank of `facts`, counted in `tally`: `fill` reads the hidden states, `batch`
    has all columns.

    `taps` [K, L·H] and `last` [K, H] are what is stored of hidden states: bits of bfloat16, or codes of fp8.
    `keep_nonfinite`: hidden states that are NaN, Inf or constant are counted, not refused (BadVector).
    """

    def __init__(self, rows: TargetRows, shard: Shard, facts: TargetFacts, *, keep_nonfinite: bool) -> None:
        self._rows, self._facts, self._keep = rows, facts, keep_nonfinite
        self._shard = range(shard.start, shard.stop)
        self._ids, self._masks, self._names, positions = [], [], [], []
        for sample in map(rows.read, self._shard):
            self._ids.append(sample.input_ids.copy())
            self._masks.append(sample.loss_mask.copy())
            self._names.append(sample.name)
            if facts.spans == "supervised":
                given = sample.positions
                positions.append(needed_positions(sample.loss_mask) if given is None else given.copy())
        self._positions = positions
        self._starts = _offsets(list(map(len, self._positions or self._ids)))
        self._codec = CODECS[facts.codec]
        total, value = int(self._starts[-1]), self._codec.dtype
        self.taps = np.empty((total, facts.layers * facts.hidden_size), value)
        self.last = np.empty((total, facts.hidden_size), value)
        self._scales = np.empty((total, facts.layers + 1), np.float32)
        self.tally = Tally(
            rows=len(self._ids),
            tokens=sum(map(len, self._ids)),
            loss_tokens=sum(int(mask.sum()) for mask in self._masks),
            hidden_tokens=total,
            nonfinite=dict.fromkeys([*facts.layer_names, "last"], 0),
        )

    def fill(self) -> None:
        """Read the hidden states of all rows. Raises BadVector."""
        facts = self._facts
        for at, sample in enumerate(map(self._rows.read, self._shard)):
            here = slice(self._starts[at], self._starts[at + 1])
            self._put(sample, sample.taps, facts.layer_names, self.taps[here], self._scales[here, :-1])
            self._put(sample, sample.last, ["last"], self.last[here], self._scales[here, -1:])

    def batch(self) -> pa.RecordBatch:
        """All columns, without a copy."""
        facts, lengths, starts = self._facts, _offsets(list(map(len, self._ids))), self._starts
        columns = {
            "input_ids": list_column(np.concatenate(self._ids), lengths),
            "loss_mask": list_column(np.concatenate(self._masks), lengths),
            "target_hidden_states": _lists(starts, fixed_list_column(self.taps)),
            "target_last_hidden_states": _lists(starts, fixed_list_column(self.last)),
            "seq_len": number_column(np.diff(lengths)),
            "sample": pa.array(self._names, pa.string()),
        }
        if not self._codec.exact:
            columns["target_hidden_scales"] = _lists(starts, fixed_list_column(self._scales[:, :-1]))
            columns["target_last_hidden_scales"] = _lists(starts, number_column(self._scales[:, -1]))
        if facts.spans == "supervised":
            columns["hidden_positions"] = list_column(np.concatenate(self._positions), starts)
        return pa.record_batch(columns)

    def _put(self, sample: TargetSample, hidden: Bits, layers: Sequence[str], stored: Any, scales: Any) -> None:
        """Store `hidden`, or what the bank keeps of it, in `stored`, and the scales of its codes in `scales`."""
        if self._facts.spans == "supervised" and sample.positions is None:
            hidden = hidden[needed_positions(sample.loss_mask)]
        if hidden.shape != stored.shape:
            raise InputError(
                f"{self._rows.place}: {sample.name}: hidden states of shape {hidden.shape}, expected {stored.shape}: the file changed "
                "while it was read. Leave it alone and run the same command again."
            )
        bad = look_at_states(self._rows.place, sample, hidden, layers, keep=self._keep)
        if bad.nonfinite and not self._codec.exact:
            look_at_states(self._rows.place, sample, hidden, layers, keep=False)
        self.tally.add(Tally(nonfinite=bad.nonfinite, constant=bad.constant))
        if self._codec.encode is None:
            stored.reshape(-1).view(np.uint8)[:] = (
                np.ascontiguousarray(hidden).reshape(-1).view(np.uint8)
            )  # it may be unaligned
        else:
            stored[...], scales[...] = self._codec.encode(np.ascontiguousarray(hidden), len(layers))
            self._count_error(hidden, stored, scales, layers)

    def _count_error(
        self, hidden: Bits, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], layers: Sequence[str]
    ) -> None:
        true = float32_of(hidden).astype(np.float64).reshape(*scales.shape, self._facts.hidden_size)
        stored = float32_of(self._codec.decode(codes, scales)).astype(np.float64).reshape(true.shape)
        cosine = cosines(true, stored, of_zeros=1.0)
        for at, layer in enumerate(layers):
            sums = {
                "cosine": float(cosine[:, at].sum()),
                "vectors": float(len(hidden)),
                "squared_error": float(((stored - true)[:, at] ** 2).sum()),
                "squared": float((true[:, at] ** 2).sum()),
            }
            self.tally.add(Tally(error={layer: sums}))


def look_at_states(place: str, sample: TargetSample, hidden: Bits, layers: Sequence[str], *, keep: bool) -> BadStates:
    """What is wrong with `hidden`, of all tokens of `sample` or of those that supervision needs. BadVector, unless `keep`."""
    ids = sample.input_ids
    if len(hidden) != len(ids):
        ids = ids[needed_positions(sample.loss_mask) if sample.positions is None else sample.positions]
    return refuse_bad_states(f"{place}: {sample.name}", hidden, layers, ids, remedy=KEEP_OR_DROP, keep=keep)


def _offsets(counts: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *counts]).astype(np.int32)


def _lists(offsets: npt.NDArray[np.int32], values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(number_column(offsets), values)


def check_layers(layers: tuple[int, ...] | None) -> None:
    """InputError for layer ids that are not ascending from −1 (the embeddings) on."""
    if layers is not None and (not layers or list(layers) != sorted(set(layers)) or layers[0] < -1):
        raise InputError(
            f"--layers {','.join(map(str, layers))}: expected ascending ids of decoder blocks, each once, −1 for the embeddings, "
            "as in --layers 1,11,21."
        )


KEEP_OR_DROP = "Give --on-nonfinite drop to leave such samples out or keep to store them (fp8 cannot hold NaN and Inf), or make them again."
WHAT = "the target bank"
REMEDY = "Give fewer --layers, --codec fp8 (half), --spans supervised, --limit, or"


def tally_file(folder: Path, shard: int) -> Path:
    """Where the counts of a shard lie while the bank is being built."""
    return folder / f"tally-{shard:05d}.json"


def publish_tally(folder: Path, shard: int, tally: Tally) -> None:
    """Note the counts of a shard."""
    folder.mkdir(exist_ok=True)
    publish_json(tally_file(folder, shard), vars(tally))


class TargetStage(Stage):
    """What the stages that make target banks have in common: sizes from the rows' tokens, and counts that the commit adds up.

    lengths   tokens of each row
    needed    of these, the tokens whose hidden states supervision needs; where nothing has counted them, `lengths`
    """

    kind, what, remedy = KIND, WHAT, REMEDY
    lengths: npt.NDArray[np.int64]
    needed: npt.NDArray[np.int64]

    @property
    @abstractmethod
    def facts(self) -> TargetFacts:
        """What the bank's hidden states are."""

    def tokens(self, shard: Shard) -> int:
        return int(self.lengths[shard.start : shard.stop].sum())

    def shard_bytes(self, shard: Shard) -> int:
        hidden = self.needed if self.facts.spans == "supervised" else self.lengths
        return self.facts.sample_bytes(self.tokens(shard), int(hidden[shard.start : shard.stop].sum()))

    @property
    def counts(self) -> dict[str, int]:
        return {"bytes_per_token": self.facts.sample_bytes(1)}

    def is_done(self, bank: BankWriter, shard: Shard) -> bool:
        if not super().is_done(bank, shard):
            return False
        tally = readable_json(tally_file(bank.work_dir, shard.index))  # a power cut may have taken it: the shard is made again
        return isinstance(tally, dict) and tally.keys() == vars(Tally()).keys()

    def decided(self, bank: BankWriter) -> dict[str, Any]:
        """Fields of the manifest that the work decided, beside counts."""
        return {}

    def commit(self, bank: BankWriter, dropped: dict[str, int], **more: int) -> Manifest:
        """Commit the bank with the counts of all its shards, and `more` counts; its manifest."""
        tally = Tally()
        for shard in self.shards:
            tally.add(Tally(**read_json(tally_file(bank.work_dir, shard.index))))
        counts: dict[str, Any] = {
            "kept": tally.rows,
            "dropped": dropped,
            "tokens": tally.tokens,
            "loss_tokens": tally.loss_tokens,
            "hidden_tokens": tally.hidden_tokens,
            **more,
        }
        fields = {**self.decided(bank), "counts": counts, "nonfinite": tally.nonfinite}
        if tally.constant:
            fields["constant"] = tally.constant
        if not CODECS[self.facts.codec].exact:
            fields["codec_error"] = tally.codec_error()
        return bank.commit(rows=tally.rows, manifest=fields)
