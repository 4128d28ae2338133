"""One picture of a bank: how long its texts are, how far its needles lie, how large its hidden states. The same bank, the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from arrowbank.bank import Bank
from arrowbank.bank.columns import fixed_lists, list_values, values_of
from arrowbank.bank.floats import float32_of
from arrowbank.bank.kinds import kind_of, resolve
from arrowbank.bank.kinds.targets_bank import TargetBank
from arrowbank.drawing.frame import Plot, svg_file
from arrowbank.drawing.markup import number
from arrowbank.drawing.plots import bars_of, histogram, ranges

SAMPLES = 16  # of a target bank


@dataclass(frozen=True)
class Distribution:
    """How often values occur, and what they are."""

    values: npt.NDArray[Any]
    what: str
    title: str


@dataclass(frozen=True)
class Spread:
    """For each name the 5th, 50th and 95th percentile of something, [names, 3]."""

    names: list[str]
    percentiles: npt.NDArray[np.float64]
    title: str


def picture_of(bank: Bank) -> Distribution | Spread | None:
    """What is worth a picture in a bank of this kind; None where nothing is."""
    named = kind_of(bank.kind).picture
    found: Distribution | Spread | None = resolve(named)(bank) if named else None
    return found


def svg(picture: Distribution | Spread) -> bytes:
    """The picture drawn, as a file."""
    return svg_file(_bars(picture) if isinstance(picture, Distribution) else _ranges(picture))


def _bars(picture: Distribution) -> Plot:
    values, whole = picture.values, np.issubdtype(picture.values.dtype, np.integer)
    low, middle, high = map(float, np.percentile(values, (0, 50, 100)))
    summary = f"From {number(low)} to {number(high)}, half of them at most {number(middle)}."
    found = histogram(values, whole=whole)
    return bars_of(picture.title, found, x_label=picture.what, y_label="how many", summary=summary, whole=whole)


def _ranges(picture: Spread) -> Plot:
    summary = "The 5th, the 50th and the 95th percentile of each layer."
    return ranges(picture.title, picture.names, picture.percentiles, x_label="L2 norm", summary=summary)


def text_lengths(bank: Bank) -> Distribution:
    counts = [pc.utf8_length(batch.column("text")) for batch in bank.shards()]
    return Distribution(np.concatenate([values_of(count) for count in counts]), "characters", "Length of the texts")


def token_lengths(bank: Bank) -> Distribution:
    return _lengths(bank, "Length of the texts")


def window_lengths(bank: Bank) -> Distribution:
    return _lengths(bank, "Length of the windows")


def _lengths(bank: Bank, title: str) -> Distribution:
    return Distribution(np.concatenate([values_of(batch.column("length")) for batch in bank.shards()]), "tokens", title)


def needle_distances(bank: Bank) -> Distribution | None:
    values = np.concatenate([list_values(batch.column("distance"))[0] for batch in bank.shards()])
    return (
        Distribution(values, "tokens from needle to probe", "Distances of the facts that are asked for")
        if len(values)
        else None
    )


def trial_distances(bank: Bank) -> Distribution | None:
    values = np.concatenate([values_of(batch.column("distance")) for batch in bank.shards()])
    there = values[values >= 0]
    return Distribution(there, "tokens from needle to probe", "Distances in the trials") if len(there) else None


def first_choices(bank: Bank) -> Distribution:
    batch = bank.shard(0)
    first = fixed_lists(batch.column("topk_probs").flatten())[:, 0]
    return Distribution(first, "probability", "The model's first choice of the next token (first shard)")


def layer_norms(bank: TargetBank) -> Spread:
    facts, norms = bank.facts, []
    for row in range(min(SAMPLES, len(bank))):
        sample = bank.read(row)
        taps = sample.taps.reshape(len(sample.taps), facts.layers, facts.hidden_size)
        states = float32_of(np.concatenate([taps, sample.last[:, None, :]], axis=1))
        norms.append(np.sqrt(np.square(states).sum(axis=2)))
    percentiles = np.percentile(np.concatenate(norms), (5, 50, 95), axis=0).T
    return Spread(
        [*facts.layer_names, "last"],
        percentiles,
        f"Hidden states of the first {len(norms)} samples: median, 5th to 95th percentile",
    )
