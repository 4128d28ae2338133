"""Pages of trunk banks and of drafts: how much of the probability the kept tokens hold, and how sure the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from arrowbank.bank.kinds.drafts_bank import DraftsBank
from arrowbank.bank.kinds.trunk_bank import TrunkBank
from arrowbank.drawing.frame import Plot
from arrowbank.drawing.markup import Markup, number, percent, plural
from arrowbank.drawing.plots import Series, bars_of, histogram, lines, ranges
from arrowbank.report.hidden import norm_plot, rows_to_read
from arrowbank.report.sample import names, of_sample, sampled_lists, sampled_norms, spread_rows, take
from arrowbank.report.section import Section, Story, plots, table
from arrowbank.report.subject import Subject

ROWS, TOKENS = 512, 256  # windows looked at, and of each so many tokens
Floats = npt.NDArray[np.float64]


def tell_trunk(subject: Subject) -> Story:
    """Mass of the top k, tail, entropy; by data set."""
    bank = subject.bank_as(TrunkBank)
    rows = spread_rows(len(bank), ROWS)
    probs, tails, sets = _read(bank, rows)
    counts = bank.manifest.counts
    tiles = [
        (f"{counts.windows:,}", f"windows of {bank.window_tokens:,}"),
        (f"{counts.tokens:,}", "tokens"),
        (str(bank.topk), "next tokens kept a row"),
        (f"{counts.held_out:,}", "windows held out"),
    ]
    lead = f"{plural(len(probs), 'token')}, evenly spread over {plural(len(rows), 'window')} of {len(bank):,}."
    drawn = [_mass(probs), _entropies(probs, tails), _tails(tails), _lengths(bank)]
    said = Section("What the model says next", [plots(*drawn), _by_set(bank, probs, tails, sets)], lead, "Next tokens")
    return Story(tiles, [said])


def _read(bank: TrunkBank, rows: npt.NDArray[np.int64]) -> tuple[Floats, Floats, list[str]]:
    """Probabilities [n, k], tail masses [n], and the data set of each of n tokens."""
    probs, tails, sets = [], [], []
    for row in rows.tolist():
        window = bank.read(row)
        at = spread_rows(window.length, TOKENS)
        probs.append(window.topk_probs[at].astype(np.float64))
        tails.append(window.tail_mass[at].astype(np.float64))
        sets += [window.set] * len(at)
    return np.concatenate(probs), np.concatenate(tails), sets


def entropy(probs: Floats, tails: Floats) -> Floats:
    """In nats, of the kept tokens and the rest as one token: the least that the whole distribution's can be. [n, k], [n] → [n]."""
    every = np.hstack([probs, np.maximum(tails, 0)[:, None]])
    found: Floats = -np.sum(np.where(every > 0, every * np.log(np.where(every > 0, every, 1)), 0), axis=1)
    return found


def _mass(probs: Floats) -> Plot:
    summed = np.cumsum(probs, axis=1) * 100
    low, middle, high = np.percentile(summed, [10, 50, 90], axis=0)
    ranks = [float(rank) for rank in range(1, probs.shape[1] + 1)]
    said = (
        f"The likeliest token alone has {number(float(summed[:, 0].mean()))} % on average, all {probs.shape[1]} kept ones "
        f"{number(float(summed[:, -1].mean()))} %. The band is the 10th to the 90th percentile."
    )
    one = Series("median", ranks, middle.tolist(), low.tolist(), high.tolist())
    return lines(
        "Probability within the top k",
        [one],
        x_label="k",
        y_label="% of the probability",
        summary=said,
        ceiling=100.0,
        whole_x=True,
    )


def _entropies(probs: Floats, tails: Floats) -> Plot:
    found = entropy(probs, tails)
    said = (
        f"Median {number(float(np.median(found)))} nats, that is like {number(float(np.exp(np.median(found))))} equally likely tokens; "
        f"what is not kept counts as one token."
    )
    return bars_of("Entropy of the next token", histogram(found), x_label="nats", y_label="tokens", summary=said, unit="nats")


def _tails(tails: Floats) -> Plot:
    said = (
        f"Median {percent(float(np.median(tails)))}, 99th percentile {percent(float(np.percentile(tails, 99)))} of the probability "
        "is on tokens that are not kept."
    )
    found = histogram(100 * tails)
    return bars_of(
        "Probability that is not kept", found, x_label="% of the probability", y_label="tokens", summary=said, unit="%"
    )


def _lengths(bank: TrunkBank) -> Plot:
    lengths = bank.lengths
    short = int((lengths < bank.window_tokens).sum())
    said = f"{plural(short, 'window is', 'windows are')} shorter than {bank.window_tokens:,} tokens: the last of a data set."
    found = histogram(lengths, whole=True)
    return bars_of("Tokens a window", found, x_label="tokens", y_label="windows", summary=said, unit="tokens", whole=True)


def _by_set(bank: TrunkBank, probs: Floats, tails: Floats, sets: Sequence[str]) -> Markup:
    at, entropies = np.array(sets), entropy(probs, tails)
    rows = []
    for name, facts in bank.manifest.sets.items():
        mine = at == name
        means = [float(values[mine].mean()) if mine.any() else None for values in (100 * probs[:, 0], 100 * tails, entropies)]
        rows.append((name, facts.windows, facts.tokens, *means))
    return table(("data set", "windows", "tokens", "top token, %", "not kept, %", "entropy, nats"), rows, "data sets")


# the rows of drafts


def tell_drafts(subject: Subject) -> Story:
    """Before and after: how sure the draft is at every chain step, and the norms of what it was fed."""
    bank = subject.bank_as(DraftsBank)
    chain, kept = bank.manifest.chain, bank.manifest.kept
    rows = rows_to_read(len(bank), chain * bank.manifest.hidden_size)
    when = np.array(names(take(bank, ["when"], rows), "when"))
    masses: dict[str, Floats] = {}
    norms: dict[str, npt.NDArray[np.float32]] = {}
    for at in dict.fromkeys(when.tolist()):
        mine = rows[when == at]
        for step in range(1, chain + 1):
            probs = np.concatenate(list(sampled_lists(bank, f"topk_probs_{step}", mine, TOKENS)))
            masses[f"{at}, step {step}"] = probs.astype(np.float64)
            norms[f"{at}, step {step}"] = sampled_norms(bank, f"hidden_{step}", mine, TOKENS)
    tiles = [
        (f"{bank.manifest['windows']:,}", "windows"),
        (str(chain), "chain steps"),
        (str(kept), "tokens kept a row"),
    ]
    drawn = [
        _sure(masses),
        _summed(masses, kept),
        _unsure(masses),
        norm_plot(list(norms), list(norms.values()), "Norms of what the draft was fed"),
    ]
    lead = f"The draft's own probabilities, before and after the healing.{of_sample(rows, len(bank))}"
    return Story(tiles, [Section("What the draft says", [plots(*drawn)], lead, "Drafts")])


def _sure(masses: Mapping[str, Floats]) -> Plot:
    spread = [np.percentile(100 * one[:, 0], [10, 50, 90]) for one in masses.values()]
    said = "; ".join(f"{name} {number(float(row[1]))} %" for name, row in zip(masses, spread, strict=True))
    return ranges(
        "Probability of the draft's first choice",
        list(masses),
        np.array(spread),
        x_label="%: median, and 10th to 90th percentile",
        summary=f"Medians: {said}.",
        log=False,
    )


def _summed(masses: Mapping[str, Floats], kept: int) -> Plot:
    ranks = [float(rank) for rank in range(1, kept + 1)]
    series = [Series(name, ranks, (100 * np.cumsum(one, axis=1).mean(axis=0)).tolist()) for name, one in masses.items()]
    said = "; ".join(f"{one.name} {number(one.y[-1])} %" for one in series)
    return lines(
        "Probability within the top k of the draft",
        series,
        x_label="k",
        y_label="mean % of the probability",
        summary=f"Within the top {kept}: {said}.",
        ceiling=100.0,
        whole_x=True,
    )


def _unsure(masses: Mapping[str, Floats]) -> Plot:
    entropies = [entropy(one, 1 - one.sum(axis=1)) for one in masses.values()]
    spread = np.array([np.percentile(one, [10, 50, 90]) for one in entropies])
    said = "; ".join(f"{name} {number(float(row[1]))}" for name, row in zip(masses, spread, strict=True))
    return ranges(
        "Entropy of the draft's next token",
        list(masses),
        spread,
        x_label="nats: median, and 10th to 90th percentile",
        summary=f"Medians: {said} nats; what is not kept counts as one token.",
        log=False,
    )
