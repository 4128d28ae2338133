"""The curves of `in2 score` as a picture: NLL by distance with both controls, and the gap to `absent` with its interval."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from arrowbank.errors import MissingDependency
from arrowbank.in2.reach import Curve

STYLES = {"absent": ":", "null": "--"}


def require_matplotlib() -> None:
    """MissingDependency where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependency(
            "a plot needs matplotlib, which is not installed. Install arrowbank[report], or give --no-plot."
        ) from None


def figures(curves: Mapping[str, Curve], *, confidence: float) -> dict[str, bytes]:
    """scores.png and scores.svg. The same curves give the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "arrowbank", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        for number, (model, curve) in enumerate(curves.items()):
            _draw(left, right, model, curve, f"C{number}")
        left.set(xscale="log", xlabel="distance from needle to probe, tokens", ylabel="NLL of the answer, nats a token")
        left.set_title("controls: absent dotted, null dashed", fontsize=8)
        right.axhline(0, color="black", linewidth=0.8)
        right.set(xscale="log", xlabel="distance from needle to probe, tokens", ylabel="gap to absent, nats a token")
        right.set_title(f"paired by block, {confidence:.0%} intervals", fontsize=8)
        left.legend(fontsize=8)
        found = {}
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            data = io.BytesIO()
            figure.savefig(data, format=kind, dpi=150, metadata=metadata)
            found[f"scores.{kind}"] = data.getvalue()
    return found


def _draw(left: Any, right: Any, model: str, curve: Curve, color: str) -> None:
    places = sorted({point.probe_pos for point in curve.points})
    for place in places:
        points = [point for point in curve.points if point.probe_pos == place]
        label = model if len(places) == 1 else f"{model}, probe at {place:g}"
        distances = [point.distance for point in points]
        strength = {"color": color, "alpha": 1 - 0.6 * places.index(place) / len(places)}
        left.plot(distances, [point.nll for point in points], marker="o", markersize=3, label=label, **strength)
        for name, style in STYLES.items():
            left.axhline(curve.controls[name][place][0], linestyle=style, linewidth=0.9, **strength)
        gaps = [point.to_absent for point in points]
        right.plot(distances, [gap.mean for gap in gaps], marker="o", markersize=3, **strength)
        right.fill_between(distances, [gap.low for gap in gaps], [gap.high for gap in gaps], color=color, alpha=0.15)
