"""From the likelihoods of trials to what they say: means by distance, gaps to the controls, and the reach. Pure NumPy.

Gaps are paired by block: trials of a block differ in the needle only. An interval is a percentile bootstrap over blocks, with draws
that are the same each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.in2.probes import ABSENT, NEEDLE, NULL

Floats = npt.NDArray[np.float64]

FEW_BLOCKS = 5


@dataclass(frozen=True)
class Trials:
    """What is known of each trial [N]: its condition, block, place of the probe, distance, and the NLL of its answer's tokens
    [N, val_len] in nats."""

    condition: npt.NDArray[Any]
    block: npt.NDArray[np.int64]
    probe_pos: Floats
    distance: npt.NDArray[np.int64]
    nll: Floats

    def of(self, chosen: npt.NDArray[np.bool_]) -> Trials:
        return Trials(*(value[chosen] for value in vars(self).values()))


@dataclass(frozen=True)
class Gap:
    """How much lower the NLL is with the needle than in a control: mean over blocks, and the interval's ends."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """One distance under one place of the probe. NLL in nats a token, of the answer and of its first token."""

    probe_pos: float
    distance: int
    nll: float
    first: float
    to_absent: Gap
    to_null: Gap
    first_to_absent: Gap
    first_to_null: Gap

    @property
    def found(self) -> bool:
        """Whether the needle helps beyond doubt: both intervals lie above zero."""
        return self.to_absent.low > 0 and self.to_null.low > 0


@dataclass(frozen=True)
class Curve:
    """A model's curve: points by place of the probe and distance, the controls' NLL by place, the reach, and what to know of it.

    `reach` is the largest distance at which the needle helps beyond doubt; None where it does at none.
    """

    points: list[Point]
    controls: dict[str, dict[float, tuple[float, float]]]
    reach: int | None
    notes: list[str]


def curve(trials: Trials, *, draws: int, confidence: float, seed: int = 0) -> Curve:
    """The curve of one model's trials."""
    points, controls = [], {name: dict[float, tuple[float, float]]() for name in (ABSENT, NULL)}
    for where in np.unique(trials.probe_pos):
        here = trials.of(trials.probe_pos == where)
        control = {name: _by_block(here.of(here.condition == name)) for name in (ABSENT, NULL)}
        for name, values in control.items():
            controls[name][float(where)] = (float(values.mean()), float(values[:, 0].mean()))
        needles = here.of(here.condition == NEEDLE)
        for distance in np.unique(needles.distance):
            values = _by_block(needles.of(needles.distance == distance))
            rng = np.random.default_rng(seed)  # the same draws everywhere: intervals of a curve can be compared
            resampled = rng.integers(0, len(values), (draws, len(values)))
            gaps = [
                _gap(of(control[name]) - of(values), resampled, confidence)
                for of in (_whole, _first)
                for name in (ABSENT, NULL)
            ]
            points.append(Point(float(where), int(distance), float(values.mean()), float(values[:, 0].mean()), *gaps))
    reach = max((point.distance for point in points if point.found), default=None)
    return Curve(points, controls, reach, _notes(points, len(np.unique(trials.block))))


def _by_block(trials: Trials) -> Floats:
    """The NLL of one trial a block, in the blocks' order."""
    ordered: Floats = trials.nll[np.argsort(trials.block, kind="stable")]
    return ordered


def _whole(nll: Floats) -> Floats:
    mean: Floats = nll.mean(axis=1)
    return mean


def _first(nll: Floats) -> Floats:
    first: Floats = nll[:, 0]
    return first


def _gap(differences: Floats, resampled: npt.NDArray[np.int64], confidence: float) -> Gap:
    means = differences[resampled].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Gap(float(differences.mean()), float(low), float(high))


def _notes(points: Sequence[Point], blocks: int) -> list[str]:
    """What a reader would otherwise take for granted, where it does not hold."""
    notes = []
    if blocks < FEW_BLOCKS:
        notes.append(f"{blocks} blocks: intervals from so few say little; give in2 probes more --blocks")
    places = sorted({point.probe_pos for point in points})
    for where in places:
        here = [point for point in points if point.probe_pos == where]
        nearest, lowest = min(here, key=lambda point: point.distance), min(here, key=lambda point: point.nll)
        place = f" (probe at {where:g})" if len(places) > 1 else ""
        if nearest is not lowest:
            notes.append(
                f"the nearest needle (distance {nearest.distance}, NLL {nearest.nll:.3f}) is not the easiest: distance "
                f"{lowest.distance} has {lowest.nll:.3f}{place}"
            )
        misleading = [str(point.distance) for point in here if point.to_absent.high < 0]
        if misleading:
            notes.append(f"worse with a needle than without one at distance {', '.join(misleading)}{place}")
        lost = [point.distance for point in here if not point.found]
        found = [point.distance for point in here if point.found]
        if lost and found and min(lost) < max(found):
            notes.append(f"not found at distance {', '.join(str(d) for d in lost if d < max(found))}, but farther away{place}")
    return notes
