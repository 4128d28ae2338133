"""Pages of hidden states: target banks and taps, a layer at a time, on tokens evenly spread over a sample of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from arrowbank.bank.codecs import CODECS
from arrowbank.bank.files import human_bytes
from arrowbank.bank.floats import float32_of
from arrowbank.bank.kinds.taps_bank import TapsBank
from arrowbank.bank.kinds.targets_bank import TargetBank
from arrowbank.drawing.frame import Plot
from arrowbank.drawing.markup import Markup, number, percent, plural
from arrowbank.drawing.plots import bars_of, histogram, ranges
from arrowbank.report.sample import SOME_ROWS, numbers, of_sample, sampled_norms, spread_rows, take
from arrowbank.report.section import Section, Story, plots, table
from arrowbank.report.subject import Subject

ROWS, TOKENS = 256, 64  # looked at, and of each so many tokens
VALUES = 1 << 26  # read at most, whatever the width
PERCENTILES = (1, 50, 99)


def tell_targets(subject: Subject) -> Story:
    """Norms by layer, what is not finite, the loss mask, lengths, and what each layer takes on disk."""
    bank = subject.bank_as(TargetBank)
    facts, counts = bank.facts, bank.manifest.counts
    layers = [*(f"layer {name}" for name in facts.layer_names), "last"]
    rows = rows_to_read(len(bank), facts.hidden_size * len(layers))
    norms, bad = _states(bank, rows)
    lengths = bank.lengths[spread_rows(len(bank), SOME_ROWS)]
    tiles = [
        (f"{counts.kept:,}", "samples"),
        (f"{counts.tokens:,}", "tokens"),
        (percent(counts.loss_tokens, counts.tokens), "in the loss"),
        (f"{facts.layers} + 1", f"layers of {facts.hidden_size:,}"),
    ]
    states = Section(
        "Hidden states",
        [plots(norm_plot(layers, norms)), _layer_table(bank, layers, bad, len(norms[0]))],
        f"L2 norms of {plural(len(norms[0]), 'token')}, evenly spread over {plural(len(rows), 'sample')} of {len(bank):,}.",
        "Layers",
    )
    loss = Section("Tokens and loss", [plots(_length_plot(lengths, len(bank)), _loss_plot(bank, rows))], short="Loss")
    return Story(tiles, [states, loss])


def tell_taps(subject: Subject) -> Story:
    """Norms of each tapped layer."""
    bank = subject.bank_as(TapsBank)
    ids = bank.manifest.layers
    layers = ["embeddings" if layer < 0 else f"layer {layer}" for layer in ids]
    rows = rows_to_read(len(bank), bank.manifest.hidden_size * len(ids))
    norms = [sampled_norms(bank, f"layer_{layer}", rows, TOKENS) for layer in ids]
    lengths = numbers(take(bank, ["length"], spread_rows(len(bank), SOME_ROWS)), "length")
    tiles = [
        (f"{len(bank):,}", "held-out windows"),
        (f"{bank.manifest.counts.tokens:,}", "tokens"),
        (str(len(ids)), f"layers of {bank.manifest.hidden_size:,}"),
    ]
    lead = f"What each block puts out before any norm, of {plural(len(norms[0]), 'token')}."
    section = Section("Hidden states", [plots(norm_plot(layers, norms), _length_plot(lengths, len(bank)))], lead, "Layers")
    return Story(tiles, [section])


def norm_plot(layers: Sequence[str], norms: Sequence[npt.NDArray[np.float32]], title: str = "Norms by layer") -> Plot:
    """Median and 1st to 99th percentile of the norms of each layer; those that are not finite left out."""
    spread = []
    for one in norms:
        finite = one[np.isfinite(one)]
        spread.append(np.percentile(finite, PERCENTILES) if finite.size else np.full(3, np.nan))
    said = "; ".join(f"{name} {number(float(row[1]))}" for name, row in list(zip(layers, spread, strict=True))[:6])
    return ranges(
        title,
        layers,
        np.array(spread),
        x_label="L2 norm: median, and 1st to 99th percentile",
        summary=f"Medians: {said}{' …' if len(layers) > 6 else '.'}",
    )


def rows_to_read(total: int, width: int) -> npt.NDArray[np.int64]:
    """As many rows as a page may read, for tokens of `width` numbers."""
    return spread_rows(total, max(1, min(ROWS, VALUES // max(1, width * TOKENS))))


def _states(bank: TargetBank, rows: npt.NDArray[np.int64]) -> tuple[list[npt.NDArray[np.float32]], list[int]]:
    """For each layer the norms of sampled tokens, and how many of these vectors are not finite."""
    facts = bank.facts
    found: list[list[npt.NDArray[np.float32]]] = [[] for _ in range(facts.layers + 1)]
    for row in rows.tolist():
        sample = bank.read(row)
        at = spread_rows(len(sample.last), TOKENS)
        taps = float32_of(sample.taps[at]).reshape(len(at), facts.layers, facts.hidden_size)
        for layer in range(facts.layers):
            found[layer].append(np.linalg.norm(taps[:, layer], axis=1))
        found[-1].append(np.linalg.norm(float32_of(sample.last[at]), axis=1))
    norms = [np.concatenate(parts) for parts in found]
    return norms, [int((~np.isfinite(one)).sum()) for one in norms]


def _layer_table(bank: TargetBank, layers: Sequence[str], bad: Sequence[int], seen: int) -> Markup:
    facts, counts = bank.facts, bank.manifest.counts
    width = CODECS[facts.codec].vector_bytes(facts.hidden_size)
    stated = bank.manifest.nonfinite or {}
    rows = [
        (
            name,
            human_bytes(counts.hidden_tokens * width),
            stated.get(name.removeprefix("layer "), 0),
            f"{found:,} of {seen:,}",
        )
        for name, found in zip(layers, bad, strict=True)
    ]
    return table(("layer", "bytes", "values not finite, in all", "vectors not finite, of those looked at"), rows, "layers")


def _length_plot(lengths: npt.NDArray[np.float64] | npt.NDArray[np.int64], total: int) -> Plot:
    middle, most = np.percentile(lengths, [50, 99])
    said = (
        f"Median {number(float(middle))} tokens, 99th percentile {number(float(most))}, longest {number(float(lengths.max()))}."
        f"{of_sample(np.arange(len(lengths)), total)}"
    )
    found = histogram(lengths, whole=True)
    return bars_of("Sequence lengths", found, x_label="tokens", y_label="sequences", summary=said, unit="tokens", whole=True)


def _loss_plot(bank: TargetBank, rows: npt.NDArray[np.int64]) -> Plot:
    covered = np.array([100 * float((bank.read(row).loss_mask != 0).mean()) for row in rows.tolist()])
    counts = bank.manifest.counts
    none = int((covered == 0).sum())
    some = "Each sample looked at has some." if not none else f"{none:,} samples looked at have none."
    said = (
        f"{number(counts.loss_tokens)} of {number(counts.tokens)} tokens are in the loss "
        f"({percent(counts.loss_tokens, counts.tokens)}), by the rule {bank.facts.loss_mask!r}. "
        f"{some}{of_sample(rows, len(bank), 'sample')}"
    )
    found = histogram(covered, span=(0.0, 100.0), bins=20)
    return bars_of("Share of a sample in the loss", found, x_label="% of its tokens", y_label="samples", summary=said, unit="%")
