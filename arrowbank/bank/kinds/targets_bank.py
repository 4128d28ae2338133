"""Target banks: training sequences with what the target model computed there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.codecs import CODECS
from arrowbank.bank.columns import list_values, nested_lists, values_of
from arrowbank.bank.floats import INFINITY, MAGNITUDE, Bits
from arrowbank.bank.kinds import FOLDER, INT, STRING, Description, Field, Kind, Types, equal, lists, register, vectors
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest, Vocabulary, Whole, Width, canonical_json, short_json
from arrowbank.bank.mapped import require_same_lengths
from arrowbank.bank.reader import Bank
from arrowbank.errors import CorruptBank
from arrowbank.progress import SILENT, Progress

if TYPE_CHECKING:
    from arrowbank.bank.torch_rows import TorchTargets


# what exports and trainers take hidden states for
LABELS = (
    *("target_model_name_or_path", "target_layer_ids", "layer_id_convention", "layers", "hidden_size", "hidden_dtype"),
    *("last_hidden_norm", "codec", "spans", "loss_mask", "vocab_size", "num_hidden_layers"),
)
CAPTURED = ("data_sha256", "tokenizer_fingerprint", "chat_template_sha256", "max_length", "min_loss_tokens", "limit")
QUARANTINE = "quarantine.jsonl"


class TargetCounts(msgspec.Struct, kw_only=True):
    """`kept` samples, their tokens, those in the loss, and those whose hidden states are kept; what was dropped, by reason."""

    kept: Count
    tokens: Count
    loss_tokens: Count
    dropped: dict[str, Count]
    hidden_tokens: Any = None


class TargetManifest(BankManifest, kw_only=True):
    """See `TargetFacts` for what holds for every row."""

    target_layer_ids: list[Whole] | None
    layers: Width
    hidden_size: Width
    target_model_name_or_path: str
    last_hidden_norm: Literal["post", "pre", "unknown"]
    loss_mask: str
    codec: str
    spans: Literal["all", "supervised"]
    vocab_size: Vocabulary | None
    num_hidden_layers: Width | None
    counts: TargetCounts
    codec_error: dict[str, Any] | None = None
    nonfinite: dict[str, Any] | None = None
    model_fingerprint: str | None = None
    engine: dict[str, Any] | None = None


TARGET_ROW = f'from arrowbank import open_bank\n\nrow = open_bank("{FOLDER}").to_torch()[0]'


KIND = "targets"
Norm = Literal["post", "pre", "unknown"]
Codec = Literal["bf16", "fp8"]
Spans = Literal["all", "supervised"]
BLOCK_OUTPUT = "block_output"
EMBEDDINGS = -1  # the layer id of what goes into the first block
TOKEN_BYTES = 6  # an int32 id, a byte of loss mask, a byte of attention mask (or of offsets)


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What holds for every row.

    target_layer_ids   ascending; id i is what decoder block i puts out, −1 the embeddings; None where nobody said
    layers             L, how many of them
    last_hidden_norm   "post" or "pre": after or before the model's final norm; or "unknown"
    loss_mask          the rule that made it
    spans              "supervised": hidden states are there only where a loss token needs them
    vocab_size, num_hidden_layers   of the target model, where they are known
    """

    target_layer_ids: tuple[int, ...] | None
    layers: int
    hidden_size: int
    target_model_name_or_path: str
    last_hidden_norm: str
    loss_mask: str
    codec: str = "bf16"
    spans: str = "all"
    vocab_size: int | None = None
    num_hidden_layers: int | None = None

    @property
    def layer_names(self) -> list[str]:
        """The tapped layers in words, for errors and counts: their ids, or their places where the ids are not known."""
        return [str(layer) for layer in self.target_layer_ids or range(self.layers)]

    def sample_bytes(self, tokens: int, hidden: int | None = None) -> int:
        """Bytes of a row of `tokens` tokens, `hidden` of which (all) have their hidden states kept."""
        kept = tokens if hidden is None else hidden
        return tokens * TOKEN_BYTES + kept * (self.layers + 1) * CODECS[self.codec].vector_bytes(self.hidden_size)


@dataclass(frozen=True)
class TargetSample:
    """One row. Arrays may lie over mapped files: use them before the next row is read, or copy.

    input_ids [S] int32 · loss_mask [S] uint8 · taps [K, L·H] and last [K, H] bfloat16 bits · positions [K] int32, the tokens
    that the hidden states belong to, or None where that is every token (K = S).
    """

    name: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    taps: Bits
    last: Bits
    positions: npt.NDArray[np.int32] | None = None


class TargetRows(Protocol):
    """Rows of a target bank, wherever they lie."""

    @property
    def facts(self) -> TargetFacts: ...

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """S of every row, [N]."""

    @property
    def digest(self) -> str:
        """A sha256 that tells these rows from others."""

    @property
    def place(self) -> str:
        """Where they lie, for messages."""

    def read(self, row: int) -> TargetSample:
        """Row `row`, 0 ≤ row < N."""


@dataclass(frozen=True)
class RowsView:
    """Other rows seen in another way: some of them in the order given (None: all), under other facts, each sample through `seen`."""

    rows: TargetRows
    facts: TargetFacts
    selected: npt.NDArray[np.int64] | None = None
    seen: Callable[[TargetSample], TargetSample] = lambda sample: sample

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.rows.lengths if self.selected is None else self.rows.lengths[self.selected]

    @property
    def digest(self) -> str:
        if self.selected is None:
            return self.rows.digest
        return hashlib.sha256(canonical_json([self.rows.digest, *self.selected.tolist()])).hexdigest()

    @property
    def place(self) -> str:
        return self.rows.place

    def read(self, row: int) -> TargetSample:
        return self.seen(self.rows.read(row if self.selected is None else int(self.selected[row])))


def needed_positions(loss_mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """The tokens whose hidden states supervision needs: the loss tokens, and the token before each, which predicts it."""
    counts = loss_mask != 0
    counts[:-1] |= counts[1:]
    return np.flatnonzero(counts).astype(np.int32)


class TargetBank(Bank):
    """A committed target bank: token ids and the hidden states of a target model, row by row."""

    manifest: TargetManifest

    @cached_property
    def facts(self) -> TargetFacts:
        return facts_of(self.manifest.json)

    @property
    def digest(self) -> str:
        return self.content_digest

    @property
    def place(self) -> str:
        return str(self.folder)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.concatenate([values_of(part).astype(np.int64) for part in self.parts("seq_len")])

    def read(self, row: int) -> TargetSample:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a bank of {len(self)} rows")
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self._view(index).sample(row - int(self.starts[index]))

    def to_torch(self) -> TorchTargets:
        """The rows as a `torch.utils.data.Dataset` of dicts of tensors, for a DataLoader with `collate_targets`."""
        from arrowbank.bank.torch_rows import TorchTargets

        return TorchTargets(self)

    @cached_property
    def _views(self) -> dict[int, _TargetShard]:
        return {}

    def _view(self, index: int) -> _TargetShard:
        """The columns of shard `index`, made when they are first asked for."""
        if index not in self._views:
            self._views[index] = _TargetShard(self.shard(index), self.facts, self.folder / self.shard_names[index])
        return self._views[index]


class _TargetShard:
    """The columns of one shard as arrays over the mapped file."""

    def __init__(self, batch: pa.RecordBatch, facts: TargetFacts, path: Path) -> None:
        self._names = batch.column("sample")
        self._ids, self._starts = list_values(batch.column("input_ids"))
        self._masks, mask_starts = list_values(batch.column("loss_mask"))
        self._taps, self._hidden_starts = nested_lists(batch.column("target_hidden_states"))
        self._last, last_starts = nested_lists(batch.column("target_last_hidden_states"))
        self._positions: npt.NDArray[np.int32] | None = None
        beside = {"target_last_hidden_states": last_starts}
        if facts.spans == "supervised":
            self._positions, beside["hidden_positions"] = list_values(batch.column("hidden_positions"))
        self._codec = CODECS[facts.codec]
        if not self._codec.exact:
            self._tap_scales, beside["target_hidden_scales"] = nested_lists(batch.column("target_hidden_scales"))
            self._last_scales, beside["target_last_hidden_scales"] = list_values(batch.column("target_last_hidden_scales"))
        require_same_lengths(path, self._starts, {"loss_mask": mask_starts})
        require_same_lengths(path, self._hidden_starts, beside)
        if facts.spans == "all":
            require_same_lengths(path, self._starts, {"target_hidden_states": self._hidden_starts})

    def sample(self, row: int) -> TargetSample:
        tokens = slice(int(self._starts[row]), int(self._starts[row + 1]))
        hidden = slice(int(self._hidden_starts[row]), int(self._hidden_starts[row + 1]))
        taps, last = self._taps[hidden], self._last[hidden]
        if not self._codec.exact:
            taps = self._codec.decode(taps, self._tap_scales[hidden])
            last = self._codec.decode(last, self._last_scales[hidden, None])
        return TargetSample(
            self._names[row].as_py(),
            self._ids[tokens],
            self._masks[tokens],
            taps,
            last,
            None if self._positions is None else self._positions[hidden],
        )


def facts_of(manifest: Manifest) -> TargetFacts:
    """The facts that a target bank's manifest states."""
    ids = manifest["target_layer_ids"]
    return TargetFacts(
        target_layer_ids=None if ids is None else tuple(ids),
        layers=manifest["layers"],
        hidden_size=manifest["hidden_size"],
        target_model_name_or_path=manifest["target_model_name_or_path"],
        last_hidden_norm=manifest["last_hidden_norm"],
        loss_mask=manifest["loss_mask"],
        codec=manifest["codec"],
        spans=manifest["spans"],
        vocab_size=manifest["vocab_size"],
        num_hidden_layers=manifest["num_hidden_layers"],
    )


def manifest_of(facts: TargetFacts) -> dict[str, Any]:
    """The same as fields of a manifest, with the conventions spelled out."""
    return {
        "target_layer_ids": None if facts.target_layer_ids is None else list(facts.target_layer_ids),
        "layer_id_convention": BLOCK_OUTPUT,
        "layers": facts.layers,
        "hidden_size": facts.hidden_size,
        "hidden_dtype": CODECS[facts.codec].hidden_dtype,
        "target_model_name_or_path": facts.target_model_name_or_path,
        "last_hidden_norm": facts.last_hidden_norm,
        "loss_mask": facts.loss_mask,
        "codec": facts.codec,
        "spans": facts.spans,
        "vocab_size": facts.vocab_size,
        "num_hidden_layers": facts.num_hidden_layers,
    }


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
    bad = {
        (layer, kind): _Bad() for layer in layers for kind in ("zero", "constant", "the same at every position", "not finite")
    }
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
                kinds = _faults(vectors)
                ids = sample.input_ids if sample.positions is None else sample.input_ids[sample.positions]
                if len(ids) >= 8 and len(np.unique(ids)) > 1 and len(np.unique(vectors, axis=0)) == 1:
                    bad[layer, "the same at every position"].note(sample, ~(kinds["zero"] | kinds["constant"]), vectors)
                for kind, found in kinds.items():
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


@register
class TargetsKind(Kind):
    name = "targets"
    manifest = TargetManifest
    words = "target bank"
    unit = "samples"
    made_by = "`arrowbank targets import` or `targets capture`"
    next = "arrowbank targets verify {folder} --model M\narrowbank export {folder} --to FORMAT --out DIR"
    shown = ("hidden_size", "limit", "target_model_name_or_path", "target_layer_ids", "last_hidden_norm", "codec", "spans")
    rules = "arrowbank.combine.rules:SampleRules"
    picture = "arrowbank.share.pictures:layer_norms"
    story = "arrowbank.report.hidden:tell_targets"
    bank = TargetBank

    def parse(self, manifest: Manifest, where: Path | str) -> BankManifest:
        found = super().parse(manifest, where)
        if manifest["codec"] not in CODECS:
            raise CorruptBank(
                f"{where}: codec is {short_json(manifest['codec'])}, this version knows {', '.join(CODECS)}. Open it with a version "
                "that knows it, or restore the file."
            )
        return found

    def columns(self, manifest: TargetManifest) -> dict[str, Types]:
        codec = CODECS[manifest.codec]
        value = pa.from_numpy_dtype(codec.dtype)
        layers, width = manifest.layers, manifest.hidden_size
        columns = {
            "input_ids": lists(pa.int32()),
            "loss_mask": lists(pa.uint8()),
            "target_hidden_states": vectors(value, layers * width),
            "target_last_hidden_states": vectors(value, width),
            "seq_len": INT,
            "sample": STRING,
        }
        if not codec.exact:
            columns["target_hidden_scales"] = vectors(pa.float32(), layers)
            columns["target_last_hidden_scales"] = lists(pa.float32())
        if manifest.spans == "supervised":
            columns["hidden_positions"] = lists(pa.int32())
        return columns

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        yield from equal(manifest, {name: recipe[name] for name in (*LABELS, *CAPTURED) if name in recipe})
        if "model_fingerprint" in recipe:  # of a merged or selected bank
            yield from equal(manifest, {"model_fingerprint": recipe["model_fingerprint"]})
        elif "model" in recipe:  # of a captured one
            model = recipe["model"]
            yield from equal(manifest, {"model_fingerprint": model["model_sha256"]})
            yield from equal(manifest, {name: model[name] for name in ("dtype", "quantisation")})
        elif "method" in recipe:  # of an imported one: nobody said
            yield from equal(manifest, dict.fromkeys(("model_fingerprint", *CAPTURED[1:3])))

    def files_beside(self, bank: TargetBank) -> dict[str, int | None]:
        imported = "rows" in bank.manifest.recipe and bank.manifest.counts.dropped.get("quarantined")
        return {INFO: None, **({QUARANTINE: None} if imported else {})}

    def bounds(self, bank: TargetBank) -> Iterator[str]:
        manifest = bank.manifest
        if manifest.codec_error is None:
            return
        if CODECS[manifest.codec].exact or set(manifest.codec_error) != {*bank.facts.layer_names, "last"}:
            yield f"codec_error is of {short_json(sorted(manifest.codec_error), 80)}, the codec is {manifest.codec}"

    def checks(self, bank: TargetBank) -> Mapping[str, Callable[[], Sequence[Check]]]:
        return {"rows": partial(target_checks, bank, bank.manifest.json)}

    def describe(self, manifest: TargetManifest) -> Description:
        layers, counts = manifest.target_layer_ids, manifest.counts
        facts = {
            "target model": manifest.target_model_name_or_path,
            "samples": counts.kept,
            "tokens": counts.tokens,
            "tokens in the loss": f"{counts.loss_tokens:,} ({manifest.loss_mask})",
            "layers (what decoder block i puts out)": layers if layers is not None else f"{manifest.layers}, ids not said",
            "last hidden states": f"{manifest.last_hidden_norm} norm",
            "stored as": manifest.codec,
        }
        if (engine := manifest.engine) is not None:
            facts["computed by"] = f"{engine.get('name')} {engine.get('version')} in {engine.get('dtype')}"
        return Description("Target bank", facts, ("speculative-decoding",), TARGET_ROW)
