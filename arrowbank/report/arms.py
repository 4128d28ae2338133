"""Pages of IN2 arms, several laid over each other, and of probes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.columns import list_values
from arrowbank.bank.kinds.in2_bank import ArmBank
from arrowbank.bank.kinds.probes_bank import ProbesBank
from arrowbank.bank.reader import Bank
from arrowbank.drawing.frame import Plot
from arrowbank.drawing.markup import Markup, number, plural
from arrowbank.drawing.plots import Histogram, Series, histogram, lines, outlines, rails, shares
from arrowbank.report.sample import SOME_ROWS, names, numbers, of_sample, spread_rows, take
from arrowbank.report.section import Section, Story, paragraph, plots, table
from arrowbank.report.subject import Subject

TRIPLES = 1_000_000  # looked at, an arm
PLACES = {"needle_start": "Needles", "probe_start": "Probes"}
DISTANCE = "distance"
NOTHING = "Arm a has no needles and no probes: it is plain filler, the control for drift."
QUANTILES = 120  # of a curve
MATCHED = ("T", "examples", "K", "key_len", "val_len", "alphabet", "d_min", "decoys", "seed", "split", "vocab")


Looked = dict[str, npt.NDArray[np.int32]]  # flat values by column


def tell_arms(subject: Subject) -> Story:
    """Where needles and probes lie, and how far apart, arm over arm."""
    banks = {name: bank for name, bank in subject.banks.items() if isinstance(bank, ArmBank)}
    labels = {name: f"{name} (arm {bank.manifest.arm})" for name, bank in banks.items()}
    looked = {labels[name]: _look(bank) for name, bank in banks.items()}
    length = max(bank.manifest.T for bank in banks.values())
    found = [_places(column, looked, length) for column in PLACES]
    drawn = [plot for plot in (*found, _distances(looked, length)) if plot is not None]
    lead = "Arms that match have the same probes; only the distance to the needle differs." if len(banks) > 1 else ""
    first = next(iter(banks.values()))
    lead = f"{lead}{of_sample(_rows(first), len(first), 'example')}".strip()
    arms = [bank.manifest.arm for bank in banks.values()]
    tiles = [
        (f"{sum(map(len, banks.values())):,}", "examples"),
        (f"{length:,}", "tokens each"),
        (f"{sum(bank.manifest.triples for bank in banks.values()):,}", "triples"),
        (", ".join(arms), "arm" if len(arms) == 1 else "arms"),
    ]
    places = Section("Where facts lie", [plots(*drawn) if drawn else paragraph(NOTHING)], lead, "Places")
    return Story(tiles, [places, Section("Options", [_options(labels, banks)], short="Options")])


def _rows(bank: ArmBank) -> npt.NDArray[np.int64]:
    """The examples that are looked at."""
    return spread_rows(len(bank), max(1, TRIPLES // max(1, bank.manifest.K)))


def _look(bank: ArmBank) -> Looked:
    columns = [*PLACES, DISTANCE]
    found = take(bank, columns, _rows(bank))
    return {name: list_values(found.column(name).combine_chunks())[0] for name in columns}


def _places(column: str, looked: Mapping[str, Looked], length: int) -> Plot | None:
    with_some = {label: one for label, one in looked.items() if one[column].size}
    if not with_some:
        return None
    found: dict[str, Histogram] = {
        label: histogram(one[column], span=(0.0, float(length)), bins=40) for label, one in with_some.items()
    }
    said = "; ".join(_said(label, one[column]) for label, one in with_some.items())
    same = len(found) > 1 and len({one.counts.tobytes() for one in found.values()}) == 1
    said = f"{said}. {'The curves lie on each other.' if same else ''}".strip()
    return outlines(PLACES[column], found, x_label="token of the example", y_label="% of triples", summary=said)


def _distances(looked: Mapping[str, Looked], length: int) -> Plot | None:
    """How many of the triples are at most so far apart: a curve that an arm of one distance does not spoil for the others."""
    series, said = [], []
    for label, one in looked.items():
        values = np.sort(one[DISTANCE])
        if values.size:
            at = np.unique(np.linspace(0, values.size - 1, min(values.size, QUANTILES)).astype(int))
            share = np.concatenate([[0.0], (at + 1) / values.size * 100]).repeat(2)[:-1]  # a step up at each distance
            x = np.concatenate([[0.0], values[at].repeat(2).astype(float), [float(length)]])
            series.append(Series(label, x.tolist(), [*share.tolist(), 100.0]))
            said.append(_said(label, values))
    if not series:
        return None
    return lines(
        "Distance from needle to probe",
        series,
        x_label="tokens",
        y_label="% of triples at most so far apart",
        summary=f"{'; '.join(said)}.",
        marked=False,
    )


def _said(label: str, values: npt.NDArray[np.int32]) -> str:
    low, middle, high = int(values.min()), float(np.median(values)), int(values.max())
    if low == high:
        return f"{label}: always {number(low)}"
    return f"{label}: {number(low)} to {number(high)}, median {number(middle)}"


def _options(labels: Mapping[str, str], banks: Mapping[str, Bank]) -> Markup:
    """The options side by side; those that matched arms must share are marked where they differ."""
    fields = [*MATCHED, "triples", "decoys_placed", "answer_tokens", "survivors"]
    rows = []
    for name in fields:
        values = [bank.manifest.get(name) for bank in banks.values()]
        if all(value is None for value in values):
            continue
        shown = [
            ", ".join(f"{key} {number(part)}" for key, part in value.items()) if isinstance(value, dict) else value
            for value in values
        ]
        same = "" if len(banks) == 1 or name not in MATCHED else "same" if len(set(map(str, values))) == 1 else "✗ differ"
        rows.append((name, *shown, *([same] if len(banks) > 1 else [])))
    columns = ("option", *labels.values(), *(["matched"] if len(banks) > 1 else []))
    return table(columns, rows, "options of the arms")


def tell_probes(subject: Subject) -> Story:
    """Conditions, and where needle and probe of each kind of trial lie."""
    bank = subject.bank_as(ProbesBank)
    rows = spread_rows(len(bank), SOME_ROWS)
    found = take(bank, ["condition", "position", "probe_pos", "needle_start", "probe_start"], rows)
    conditions = names(found, "condition")
    counts = {name: conditions.count(name) for name in dict.fromkeys(conditions)}
    length = bank.manifest.length
    said = ", ".join(f"{number(count)} {name}" for name, count in counts.items())
    drawn = [shares("Trials by condition", counts, x_label="trials", summary=f"{said}; absent and null are the controls.")]
    places = numbers(found, "probe_pos")
    for where in sorted(set(places.tolist()), reverse=True):
        drawn.append(_rails(where, places, found, conditions, length))
    tiles = [
        (f"{len(bank):,}", "trials"),
        (f"{bank.manifest['blocks']:,}", "blocks"),
        (f"{length:,}", "tokens each"),
        (str(len(bank.manifest.positions)), "distances"),
    ]
    lead = "Within a block nothing but the needle changes: the same filler, the same probe."
    return Story(tiles, [Section("Trials", [plots(*drawn)], lead, "Trials")])


def _rails(where: float, places: npt.NDArray[np.float64], found: pa.Table, conditions: list[str], length: int) -> Plot:
    """One line for each position of the needle, and one for the trials without any."""
    positions, needles, probes = (numbers(found, name) for name in ("position", "needle_start", "probe_start"))
    labels: list[str] = []
    marks: list[tuple[float, float]] = []
    here = places == where
    is_needle = np.array([condition == "needle" for condition in conditions])
    for position in sorted(set(positions[here & is_needle].tolist())):
        at = int(np.flatnonzero(here & is_needle & (positions == position))[0])
        labels.append(f"position {position:g}")
        marks.append((float(needles[at]), float(probes[at])))
    labels.append("absent")
    marks.append((math.nan, float(probes[int(np.flatnonzero(here)[0])])))
    farthest = max(probe - needle for needle, probe in marks if math.isfinite(needle)) if len(marks) > 1 else 0.0
    said = f"{plural(len(marks) - 1, 'distance')} up to {number(farthest)} tokens, and trials without a needle."
    return rails(f"Probe at {where:g} of the window", labels, marks, length, summary=said)
