"""One picture of a bank: how long its texts are, how far its needles lie, how large its hidden states. The same bank, the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from arrowbank.bank import Bank
from arrowbank.bank.columns import fixed_lists, list_values, values_of
from arrowbank.bank.floats import float32_of
from arrowbank.bank.targets import TargetBank

BINS = 50
SAMPLES = 16  # of a target bank
WIDE = 100
COLOR = "#4269d0"


@dataclass(frozen=True)
class Histogram:
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


def picture_of(bank: Bank) -> Histogram | Spread | None:
    """What is worth a picture in a bank of this kind; None where nothing is."""
    make = _PICTURES.get(bank.kind)
    return make(bank) if make else None


def png(picture: Histogram | Spread) -> bytes:
    """The picture drawn. ImportError where matplotlib is not installed."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        figure = Figure(figsize=(7, 3), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.set_title(picture.title, fontsize=9)
        if isinstance(picture, Histogram):
            _draw_histogram(axes, picture)
        else:
            _draw_spread(axes, picture)
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=130, metadata={"Software": None})
    return data.getvalue()


def _draw_histogram(axes: Any, picture: Histogram) -> None:
    """Bins of one width; for values that differ a hundredfold, of one ratio; for few whole numbers, one each."""
    low, high = float(picture.values.min()), float(picture.values.max())
    if np.issubdtype(picture.values.dtype, np.integer) and high - low < BINS:
        edges = np.arange(low - 0.5, high + 1.5)
    elif low >= 0 and high > WIDE * max(low, 1):
        edges = np.geomspace(max(low, 1), high, BINS + 1)
        axes.set_xscale("log")
    else:
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    axes.hist(np.clip(picture.values, edges[0], edges[-1]), bins=edges, color=COLOR)
    axes.set(xlabel=picture.what, ylabel="how many")


def _draw_spread(axes: Any, picture: Spread) -> None:
    places = np.arange(len(picture.names))
    low, middle, high = picture.percentiles.T
    axes.errorbar(places, middle, yerr=[middle - low, high - middle], fmt="o", color=COLOR, capsize=4)
    axes.set(xlabel="layer", ylabel="L2 norm", yscale="log")
    axes.set_xticks(places, picture.names)


def _characters(bank: Bank) -> Histogram:
    counts = [pc.utf8_length(batch.column("text")) for batch in bank.shards()]
    return Histogram(np.concatenate([values_of(count) for count in counts]), "characters", "Length of the texts")


def _lengths(column: str, title: str) -> Callable[[Bank], Histogram]:
    def make(bank: Bank) -> Histogram:
        return Histogram(np.concatenate([values_of(batch.column(column)) for batch in bank.shards()]), "tokens", title)

    return make


def _distances(bank: Bank) -> Histogram | None:
    values = np.concatenate([list_values(batch.column("distance"))[0] for batch in bank.shards()])
    return (
        Histogram(values, "tokens from needle to probe", "Distances of the facts that are asked for") if len(values) else None
    )


def _trial_distances(bank: Bank) -> Histogram | None:
    values = np.concatenate([values_of(batch.column("distance")) for batch in bank.shards()])
    there = values[values >= 0]
    return Histogram(there, "tokens from needle to probe", "Distances in the trials") if len(there) else None


def _first_choices(bank: Bank) -> Histogram:
    batch = bank.shard(0)
    first = fixed_lists(batch.column("topk_probs").flatten())[:, 0]
    return Histogram(first, "probability", "The model's first choice of the next token (first shard)")


def _norms(bank: Bank) -> Spread | None:
    if not isinstance(bank, TargetBank):
        return None
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


_PICTURES: dict[str, Callable[[Bank], Histogram | Spread | None]] = {
    "texts": _characters,
    "tokens": _lengths("length", "Length of the texts"),
    "features": _lengths("length", "Length of the texts"),
    "targets": _norms,
    "in2": _distances,
    "in2-probes": _trial_distances,
    "trunk": _first_choices,
    "taps": _lengths("length", "Length of the windows"),
    "drafts": _lengths("length", "Length of the windows"),
}
