"""Trunk banks: windows of tokens with what a model says after each, as the teacher of its draft."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.columns import fixed_list_column, fixed_lists, list_values, nested_lists, number_column, values_of
from arrowbank.bank.floats import all_finite, bfloat16_tensor
from arrowbank.bank.kinds import FOLDER, INT, STRING, Description, Field, Kind, Types, equal, fixed, lists, register, vectors
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest, Vocabulary, Width
from arrowbank.bank.mapped import require_same_lengths
from arrowbank.bank.reader import Bank
from arrowbank.errors import InputError

if TYPE_CHECKING:
    import torch


WINDOW = (
    f'from arrowbank import open_bank\n\nbank = open_bank("{FOLDER}")\nwindow = bank.read(0)\n'
    "print(window.topk_ids.shape, window.hidden.shape)  # (S, k) (S, H)"
)


class TrunkSet(msgspec.Struct, kw_only=True):
    """A data set of a trunk bank: its windows, and their real tokens."""

    windows: Count
    tokens: Count


class TrunkCounts(msgspec.Struct, kw_only=True):
    """Windows, those that are held out, and real tokens."""

    windows: Count
    held_out: Count
    tokens: Count


class TrunkManifest(BankManifest, kw_only=True):
    """`window` is T, `topk` is k; `hold_all`: every window is held out, else each tenth."""

    window: Width
    topk: Width
    hidden_size: Width
    hidden_norm: Literal["post", "pre"]
    hidden_dtype: Literal["bfloat16", "float16"]
    hold_all: bool
    pad_id: Count
    vocab_size: Vocabulary
    model_path: str
    model_fingerprint: str
    sets: dict[str, TrunkSet]
    counts: TrunkCounts


def model_fields(manifest: Manifest, recipe: Mapping[str, Any], names: Iterable[str]) -> Iterator[Field]:
    """What the manifest says of the model, and what the recipe has of it."""
    model = recipe["model"]
    yield from equal(manifest, {"model_fingerprint": model["model_sha256"], **{name: model[name] for name in names}})


KIND, TAPS_KIND = "trunk", "taps"
HIDDEN_TYPES = {"bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.float16)}
WINDOWS_A_BATCH = 10  # that training needs at least, for each window of a batch


@dataclass(frozen=True)
class TrunkWindow:
    """One row. Arrays lie over a mapped file and cannot be written to. S ≤ T is the number of real tokens.

    input_ids [T] int32, padded behind · topk_ids [S, k] int32 and topk_probs [S, k] float32, most likely first · tail_mass [S]
    float32 · hidden [S, H] uint16 (bfloat16 bits) or float16 · set and window: the data set, and the window's index in it.
    """

    input_ids: npt.NDArray[np.int32]
    length: int
    topk_ids: npt.NDArray[np.int32]
    topk_probs: npt.NDArray[np.float32]
    tail_mass: npt.NDArray[np.float32]
    hidden: npt.NDArray[Any]
    set: str
    window: int
    held_out: bool

    def hidden_tensor(self) -> torch.Tensor:
        """The hidden states as a torch tensor of its own memory, [S, H] bfloat16 or float16."""
        import torch

        if self.hidden.dtype == np.float16:
            return torch.from_numpy(self.hidden.copy())
        tensor: torch.Tensor = bfloat16_tensor(self.hidden)
        return tensor


class TrunkBank(Bank):
    """A committed trunk bank: N windows of up to T tokens."""

    manifest: TrunkManifest

    @property
    def window_tokens(self) -> int:
        """T."""
        return self.manifest.window

    @property
    def topk(self) -> int:
        """k, the next tokens kept a row."""
        return self.manifest.topk

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.manifest.hidden_size

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Real tokens of every window, [N]."""
        return np.concatenate([values_of(part) for part in self.parts("length")])

    @cached_property
    def held_out(self) -> npt.NDArray[np.bool_]:
        """Which windows are kept from training, [N]."""
        return np.array([value for part in self.parts("held_out") for value in part.to_pylist()], np.bool_)

    @cached_property
    def set_names(self) -> list[str]:
        """The data set of every window, [N]."""
        return [value for part in self.parts("set") for value in part.to_pylist()]

    @property
    def held_out_rows(self) -> npt.NDArray[np.int64]:
        """The rows that are only measured on."""
        return np.flatnonzero(self.held_out).astype(np.int64)

    def training_rows(self, batch: int) -> npt.NDArray[np.int64]:
        """The rows to train on with `batch` windows a step. InputError where the bank has too few windows for that."""
        needed = WINDOWS_A_BATCH * batch
        rows = np.flatnonzero(~self.held_out).astype(np.int64)
        if len(self) < needed or not len(rows):
            raise InputError(
                f"{self.folder}: {len(self):,} windows, {len(rows):,} of them to train on; training with {batch} windows a batch "
                f"needs at least {needed} windows ({WINDOWS_A_BATCH} a window of the batch) that are not all held out. Build a "
                "bank of more --source or --tokens, without --hold-all, or give a smaller batch."
            )
        return rows

    def read(self, row: int) -> TrunkWindow:
        """Row `row`, 0 ≤ row < N."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a bank of {len(self)} rows")
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self._view(index).window(row - int(self.starts[index]))

    @cached_property
    def _views(self) -> dict[int, _TrunkShard]:
        return {}

    def _view(self, index: int) -> _TrunkShard:
        """The columns of shard `index`, made when they are first asked for."""
        if index not in self._views:
            self._views[index] = _TrunkShard(self.shard(index), self.folder / self.shard_names[index])
        return self._views[index]


class _TrunkShard:
    """The columns of one shard as arrays over the mapped file."""

    def __init__(self, batch: pa.RecordBatch, path: Path) -> None:
        self._batch = batch
        self._ids = fixed_lists(batch.column("input_ids"))
        self._lengths, self._numbers = values_of(batch.column("length")), values_of(batch.column("window"))
        self._topk_ids, self._starts = nested_lists(batch.column("topk_ids"))
        beside = {}
        self._probs, beside["topk_probs"] = nested_lists(batch.column("topk_probs"))
        self._tail, beside["tail_mass"] = list_values(batch.column("tail_mass"))
        self._hidden, beside["hidden"] = nested_lists(batch.column("hidden"))
        require_same_lengths(path, self._starts, beside)

    def window(self, row: int) -> TrunkWindow:
        rows = slice(int(self._starts[row]), int(self._starts[row + 1]))
        return TrunkWindow(
            self._ids[row],
            int(self._lengths[row]),
            self._topk_ids[rows],
            self._probs[rows],
            self._tail[rows],
            self._hidden[rows],
            self._batch.column("set")[row].as_py(),
            int(self._numbers[row]),
            self._batch.column("held_out")[row].as_py(),
        )


@dataclass(frozen=True)
class TrunkColumns:
    """The columns of a shard of n windows and R real tokens, to be written.

    input_ids [n, T] int32 · lengths [n] int32 · topk_ids [R, k] int32 · topk_probs [R, k] float32 · tail_mass [R] float32 ·
    hidden [R, H] of a HIDDEN_TYPES · sets, windows [n] int32, held_out: as in TrunkWindow.
    """

    input_ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    topk_ids: npt.NDArray[np.int32]
    topk_probs: npt.NDArray[np.float32]
    tail_mass: npt.NDArray[np.float32]
    hidden: npt.NDArray[Any]
    sets: list[str]
    windows: npt.NDArray[np.int32]
    held_out: list[bool]

    def batch(self) -> pa.RecordBatch:
        """The record batch, without a copy of what is large."""
        offsets = row_offsets(self.lengths)
        return pa.record_batch(
            {
                "input_ids": fixed_list_column(self.input_ids),
                "length": number_column(self.lengths),
                "topk_ids": lists_of(offsets, fixed_list_column(self.topk_ids)),
                "topk_probs": lists_of(offsets, fixed_list_column(self.topk_probs)),
                "tail_mass": lists_of(offsets, number_column(self.tail_mass)),
                "hidden": lists_of(offsets, fixed_list_column(self.hidden)),
                "set": pa.array(self.sets, pa.string()),
                "window": number_column(self.windows),
                "held_out": pa.array(self.held_out, pa.bool_()),
            }
        )


def row_offsets(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Where the real tokens of each window begin among all of them, [n + 1]."""
    return np.cumsum([0, *lengths.tolist()]).astype(np.int32)


def lists_of(offsets: npt.NDArray[np.int32], values: pa.Array) -> pa.Array:
    """Values of any type as lists, a list a window."""
    return pa.ListArray.from_arrays(number_column(offsets), values)


def window_bytes(window: int, length: int, topk: int, hidden_size: int) -> int:
    """Bytes of a row of `length` real tokens, without what Arrow adds a shard."""
    return 4 * window + length * (topk * 8 + 4 + 2 * hidden_size) + ROW_OVERHEAD


ROW_OVERHEAD = 40  # length, index, flag, name, and the offsets of five lists


# float32 probabilities, k of them summed in float32
MASS_TOLERANCE = 1e-4


def trunk_checks(bank: TrunkBank) -> list[Check]:
    """Read every window."""
    wrong: dict[str, list[str]] = {name: [] for name in _FAULTS}
    tokens, numbers = 0, dict.fromkeys(bank.manifest.json["sets"], 0)
    sets: dict[str, _Set] = {}
    misplaced = []
    for row in range(len(bank)):
        window = bank.read(row)
        tokens += window.length
        sets.setdefault(window.set, _Set(row)).add(window)
        for name, (_, _, is_wrong) in _FAULTS.items():
            if is_wrong(bank, window):
                wrong[name].append(f"row {row}")
        if window.window != numbers.get(window.set) or window.held_out != (bank.manifest.hold_all or row % 10 == 9):
            misplaced.append(f"row {row}")
        numbers[window.set] = numbers.get(window.set, 0) + 1
    wrong["ids"] += [
        f"set {name}" for name, stated in bank.manifest.json["sets"].items() if not _is_set(sets.get(name), stated)
    ]
    checks = [found_wrong(name, wrong[name], good, bad) for name, (good, bad, _) in _FAULTS.items()]
    checks.append(
        found_wrong("windows", misplaced, "numbered set by set, every tenth held out", "set, number or held_out wrong in")
    )
    return [*checks, _counts(bank, tokens, numbers)]


@dataclass
class _Set:
    """What is counted of a set, whose first window is row `first`."""

    first: int
    windows: int = 0
    tokens: int = 0
    ids: Any = field(default_factory=hashlib.sha256)

    def add(self, window: TrunkWindow) -> None:
        self.windows, self.tokens = self.windows + 1, self.tokens + window.length
        self.ids.update(np.ascontiguousarray(window.input_ids[: window.length], "<i4"))


def _is_set(found: _Set | None, stated: object) -> bool:
    """Whether a set is what the manifest says of it."""
    if found is None:
        return False
    return stated == {
        "first": found.first,
        "windows": found.windows,
        "tokens": found.tokens,
        "ids_sha256": found.ids.hexdigest(),
    }


def _counts(bank: TrunkBank, tokens: int, numbers: dict[str, int]) -> Check:
    found = {"windows": len(bank), "held_out": int(bank.held_out.sum()), "tokens": tokens}
    found |= {f"windows of {name}": count for name, count in numbers.items()}
    stated = dict(bank.manifest.json["counts"])
    stated |= {f"windows of {name}": facts["windows"] for name, facts in bank.manifest.json["sets"].items()}
    differing = [
        f"{name} is {stated.get(name)}, the rows have {count}" for name, count in found.items() if stated.get(name) != count
    ]
    return found_wrong("counts", differing, "those of the manifest", "not those of the rows:")


def _bad_ids(bank: TrunkBank, window: TrunkWindow) -> bool:
    ids, vocabulary = window.input_ids, bank.manifest.vocab_size
    return bool(
        not 1 <= window.length <= bank.window_tokens
        or len(ids) != bank.window_tokens
        or ids.min() < 0
        or ids.max() >= vocabulary
        or (ids[window.length :] != bank.manifest.pad_id).any()
    )


def _bad_shape(bank: TrunkBank, window: TrunkWindow) -> bool:
    rows = (len(window.topk_ids), len(window.topk_probs), len(window.tail_mass), len(window.hidden))
    widths = (window.topk_ids.shape[1], window.topk_probs.shape[1], window.hidden.shape[1])
    return set(rows) != {window.length} or widths != (bank.topk, bank.topk, bank.hidden_size)


def _bad_choices(bank: TrunkBank, window: TrunkWindow) -> bool:
    """Whether next tokens are outside the vocabulary, or stand twice in a row."""
    ordered = np.sort(window.topk_ids, axis=1)
    return bool((ordered < 0).any() or (ordered >= bank.manifest.vocab_size).any() or (np.diff(ordered, axis=1) == 0).any())


def _bad_probabilities(bank: TrunkBank, window: TrunkWindow) -> bool:
    """Whether probabilities are not in [0, 1] (the first above 0), not in order, or do not add up to 1 with the tail."""
    probs, tail = window.topk_probs, window.tail_mass
    inside = (probs >= 0) & (probs <= 1)  # a NaN is in no range; a very small one may have become 0
    if not inside.all() or not (probs[:, 0] > 0).all() or not ((tail >= 0) & (tail < 1)).all():
        return True
    total = probs.sum(axis=1, dtype=np.float64) + tail
    return bool((np.diff(probs, axis=1) > 0).any() or (np.abs(total - 1) > MASS_TOLERANCE).any())


def _bad_hidden(bank: TrunkBank, window: TrunkWindow) -> bool:
    if window.hidden.dtype == np.float16:
        return not bool(np.isfinite(window.hidden).all())
    return not all_finite(window.hidden)


_FAULTS: dict[str, tuple[str, str, Callable[[TrunkBank, TrunkWindow], bool]]] = {
    "ids": ("in the vocabulary, padding in its place, sets as stated", "ids, length or padding wrong in", _bad_ids),
    "rows": ("one a real token in every list", "lists of other lengths or widths in", _bad_shape),
    "choices": ("next tokens in the vocabulary, none twice", "next tokens wrong in", _bad_choices),
    "probs": ("sorted, in [0, 1], 1 with the tail", "not sorted, not in [0, 1] or not 1 with the tail in", _bad_probabilities),
    "hidden": ("finite", "not finite in", _bad_hidden),
}


@register
class TrunkKind(Kind):
    name = "trunk"
    manifest = TrunkManifest
    words = "trunk bank"
    unit = "windows"
    expected = "a trunk bank"
    made_by = "`arrowbank trunk build`"
    next = "arrowbank heal --trunk {folder} --model M --out DIR"
    shown = ("model_path", "hidden_size", "window", "topk", "hidden_norm", "hidden_dtype", "hold_all")
    merge_instead = "Build one trunk bank of all sets: --source NAME=FILE may be repeated."
    picture = "arrowbank.share.pictures:first_choices"
    story = "arrowbank.report.drafts:tell_trunk"
    bank = TrunkBank

    def columns(self, manifest: TrunkManifest) -> dict[str, Types]:
        hidden = pa.uint16() if manifest.hidden_dtype == "bfloat16" else pa.float16()
        return {
            "input_ids": fixed(pa.int32(), manifest.window),
            "length": INT,
            "topk_ids": vectors(pa.int32(), manifest.topk),
            "topk_probs": vectors(pa.float32(), manifest.topk),
            "tail_mass": lists(pa.float32()),
            "hidden": vectors(hidden, manifest.hidden_size),
            "set": STRING,
            "window": INT,
            "held_out": [pa.bool_()],
        }

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "method" not in recipe:
            return
        names = ("window", "topk", "hidden_norm", "hidden_dtype", "hold_all", "pad_id", "sets")
        yield from equal(manifest, {name: recipe[name] for name in names})
        yield from model_fields(manifest, recipe, ("architecture", "dtype", "quantisation", "hidden_size"))

    def files_beside(self, bank: TrunkBank) -> dict[str, int | None]:
        return {INFO: None}

    def checks(self, bank: TrunkBank) -> Mapping[str, Callable[[], Sequence[Check]]]:
        return {"rows": partial(trunk_checks, bank)}

    def describe(self, manifest: TrunkManifest) -> Description:
        counts = manifest.counts
        facts = {
            "model": manifest.model_path,
            "windows": f"{counts.windows:,} of {manifest.window:,} tokens, {counts.held_out:,} held out",
            "sets": {name: one.windows for name, one in manifest.sets.items()},
            "tokens": counts.tokens,
            "next tokens a row": manifest.topk,
            "hidden states": f"{manifest.hidden_norm} norm, {manifest.hidden_dtype}, width {manifest.hidden_size:,}",
        }
        return Description("Trunk bank", facts, ("speculative-decoding",), WINDOW)
