"""One line of a proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 5


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


def found_wrong(name: str, wrong: Sequence[str], good: str, bad: str) -> Check:
    """A check that is good where nothing is wrong, and else says what is."""
    shown = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
    return Check(name, not wrong, f"{bad} {shown}".strip() if wrong else good)
