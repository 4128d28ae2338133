"""Two sides measured in turns, and the row of the table that comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


def best_seconds(sides: Mapping[str, Callable[[], None]], turns: int) -> dict[str, float]:
    """The best time of each side, which take turns in the order given."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(turns):
        for side, work in sides.items():
            start = time.perf_counter()
            work()
            best[side] = min(best[side], time.perf_counter() - start)
    return best


def tokens_row(what: str, tokens: int, best: Mapping[str, float], goal: float) -> dict[str, Any]:
    """The row for `tokens` tokens in the best times of "ours" and "baseline"."""
    return {
        "what": what,
        "ours": tokens / best["ours"],
        "baseline": tokens / best["baseline"],
        "ratio": best["baseline"] / best["ours"],
        "goal": goal,
        "unit": "tokens/s",
    }
