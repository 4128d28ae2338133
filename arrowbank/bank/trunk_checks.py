"""What the training of a draft takes on trust in a trunk bank, looked at: ids, padding, distributions, hidden states, counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.columns import fixed_lists, nested_lists, values_of
from arrowbank.bank.floats import all_finite
from arrowbank.bank.reader import Bank
from arrowbank.bank.trunk import TrunkBank, TrunkWindow

# float32 probabilities, k of them summed in float32
MASS_TOLERANCE = 1e-4


def trunk_checks(bank: TrunkBank) -> list[Check]:
    """Read every window."""
    wrong: dict[str, list[str]] = {name: [] for name in _FAULTS}
    tokens, numbers = 0, dict.fromkeys(bank.manifest["sets"], 0)
    sets: dict[str, _Set] = {}
    misplaced = []
    for row in range(len(bank)):
        window = bank.read(row)
        tokens += window.length
        sets.setdefault(window.set, _Set(row)).add(window)
        for name, (_, _, is_wrong) in _FAULTS.items():
            if is_wrong(bank, window):
                wrong[name].append(f"row {row}")
        if window.window != numbers.get(window.set) or window.held_out != (bank.manifest["hold_all"] or row % 10 == 9):
            misplaced.append(f"row {row}")
        numbers[window.set] = numbers.get(window.set, 0) + 1
    wrong["ids"] += [f"set {name}" for name, stated in bank.manifest["sets"].items() if not _is_set(sets.get(name), stated)]
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
    stated = dict(bank.manifest["counts"])
    stated |= {f"windows of {name}": facts["windows"] for name, facts in bank.manifest["sets"].items()}
    differing = [
        f"{name} is {stated.get(name)}, the rows have {count}" for name, count in found.items() if stated.get(name) != count
    ]
    return found_wrong("counts", differing, "those of the manifest", "not those of the rows:")


def _bad_ids(bank: TrunkBank, window: TrunkWindow) -> bool:
    ids, vocabulary = window.input_ids, bank.manifest["vocab_size"]
    return bool(
        not 1 <= window.length <= bank.window_tokens
        or len(ids) != bank.window_tokens
        or ids.min() < 0
        or ids.max() >= vocabulary
        or (ids[window.length :] != bank.manifest["pad_id"]).any()
    )


def _bad_shape(bank: TrunkBank, window: TrunkWindow) -> bool:
    rows = (len(window.topk_ids), len(window.topk_probs), len(window.tail_mass), len(window.hidden))
    widths = (window.topk_ids.shape[1], window.topk_probs.shape[1], window.hidden.shape[1])
    return set(rows) != {window.length} or widths != (bank.topk, bank.topk, bank.hidden_size)


def _bad_choices(bank: TrunkBank, window: TrunkWindow) -> bool:
    """Whether next tokens are outside the vocabulary, or stand twice in a row."""
    ordered = np.sort(window.topk_ids, axis=1)
    return bool((ordered < 0).any() or (ordered >= bank.manifest["vocab_size"]).any() or (np.diff(ordered, axis=1) == 0).any())


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


def taps_check(bank: Bank) -> Check:
    """Lists of as many rows as there are real tokens, finite values."""
    wrong = []
    for start, batch in zip(map(int, bank.starts), bank.shards(), strict=False):
        lengths = values_of(batch.column("length"))
        for layer in bank.manifest["layers"]:
            values, offsets = nested_lists(batch.column(f"layer_{layer}"))
            if not np.isfinite(values).all() or values.shape[1] != bank.manifest["hidden_size"]:
                wrong.append(f"layer {layer} from row {start}")
            wrong += [f"layer {layer} row {start + at}" for at in np.flatnonzero(np.diff(offsets) != lengths)[:3]]
        if fixed_lists(batch.column("input_ids")).shape[1] != bank.manifest["window"]:
            wrong.append(f"input_ids from row {start}")
    return found_wrong("taps", wrong, f"{len(bank)} windows, finite, one row a real token", "not finite, or of other shapes:")
