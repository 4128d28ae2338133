"""The trace of a training: a line a measurement, and its plots."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arrowbank.drawing.frame import Plot
from arrowbank.drawing.markup import number
from arrowbank.drawing.plots import Series, lines

TRACE, TRACE_PLOT = "trace.jsonl", "trace.svg"
MOST_POINTS = 200


def percent_of(rate: float | None) -> float:
    """A rate in percent, NaN where there is none."""
    return math.nan if rate is None else 100 * rate


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The measurements, evenly thinned where there are very many; none where nothing was trained."""
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    every = max(1, math.ceil(len(found) / MOST_POINTS))
    return [*found[:-1:every], *found[-1:]]


def trace_plots(trace: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Loss, drafts a round and acceptance by chain step, over training steps."""
    at, best = [float(line["step"]) for line in trace], float(trace[-1]["best_step"])
    known = [(step, float(line["loss"])) for step, line in zip(at, trace, strict=True) if line["loss"] is not None]
    scores = [float(line["score"]) for line in trace]
    drawn = []
    if known:
        losses = [loss for _, loss in known]
        drawn.append(
            lines(
                "Loss",
                [Series("loss", [step for step, _ in known], losses)],
                x_label="training step",
                y_label="nats a row, KL to the trunk's top k",
                summary=f"From {number(losses[0])} to {number(losses[-1])}, the mean since the measurement before.",
                floor=None,
                whole_x=True,
            )
        )
    control = [float(line["control"]["score"]) for line in trace]
    drawn.append(
        lines(
            "Drafts a round on held-out windows",
            [Series("drafts a round", at, scores), Series("control", at, control)],
            x_label="training step",
            y_label="drafts a round",
            summary=f"From {number(scores[0])} to {number(max(scores))} at step {number(best)}, which is kept (dotted).",
            upright=best,
            whole_x=True,
        )
    )
    steps = len(trace[0]["rates"])
    series = [Series(f"step {step + 1}", at, [percent_of(line["rates"][step]) for line in trace]) for step in range(steps)]
    drawn.append(
        lines(
            "Acceptance by chain step",
            series,
            x_label="training step",
            y_label="% accepted",
            summary="On held-out windows: " + ", ".join(f"{one.name} {number(one.y[-1])} %" for one in series) + " at the end.",
            ceiling=100.0,
            upright=best,
            whole_x=True,
        )
    )
    return drawn
