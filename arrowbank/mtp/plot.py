"""The trace of a healing as a picture: loss, and acceptance by chain step, over training steps."""

from __future__ import annotations

import io
import json
from pathlib import Path


def plot_trace(trace: Path) -> dict[str, bytes]:
    """trace.png and trace.svg of a trace's JSON lines. Nothing where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    steps = [line["step"] for line in lines]
    with matplotlib.rc_context({"svg.hashsalt": "arrowbank", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        known = [(step, line["loss"]) for step, line in zip(steps, lines, strict=True) if line["loss"] is not None]
        left.plot([step for step, _ in known], [loss for _, loss in known], marker="o", markersize=3, color="C0")
        left.set(xlabel="step", ylabel="loss: KL to the trunk's top k, nats a row")
        right.plot(steps, [line["score"] for line in lines], marker="o", markersize=3, color="black", label="expected drafts")
        for step in range(len(lines[0]["rates"])):
            rates = [line["rates"][step] for line in lines]
            right.plot(
                steps, [float("nan") if rate is None else rate for rate in rates], color=f"C{step}", label=f"rate {step + 1}"
            )
        right.axvline(lines[-1]["best_step"], color="grey", linestyle=":", linewidth=1)
        right.set(xlabel="step", ylabel="held-out windows", ylim=(0, None))
        right.legend(fontsize=8)
        found = {}
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            data = io.BytesIO()
            figure.savefig(data, format=kind, dpi=150, metadata=metadata)
            found[f"trace.{kind}"] = data.getvalue()
    return found
