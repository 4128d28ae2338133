"""Whether a draft is fed what it was trained on: its acceptance, untrained, under each convention.

Families differ in which side of the trunk's final norm the draft is fed, and of its own norm at later steps. The wrong side costs
most of the acceptance and raises no error anywhere, so it is looked at before anything is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from arrowbank.errors import InputError
from arrowbank.heal.measure import measure
from arrowbank.heal.windows import Windows
from arrowbank.mtp.draft import Draft
from arrowbank.mtp.layouts import Side

WINDOWS = 8
RATIO, MARGIN = 1.25, 0.05  # better by so much is clearly better


def check_conventions(draft: Draft, windows: Windows, rows: Sequence[int], *, chain: int, batch: int) -> dict[str, float]:
    """Expected accepted drafts a round by convention, "hidden/recycle"; InputError where the chosen one is clearly the worse.

    Hidden states before the norm give both sides; a bank of those after it only one.
    """
    chosen: tuple[Side, Side] = (draft.hidden, draft.recycle)
    sides: tuple[Side, ...] = get_args(Side)
    hiddens = sides if windows.norm == "pre" else (draft.hidden,)
    scores: dict[tuple[Any, Any], float] = {}
    for hidden in hiddens:
        for recycle in sides if chain > 1 else (draft.recycle,):
            draft.feed(recycle=recycle)
            found = measure(draft, windows, rows[:WINDOWS], chain=chain, batch=batch, hidden=hidden)
            scores[hidden, recycle] = found.whole.score
    draft.feed(recycle=chosen[1])
    best = max(scores, key=lambda sides: scores[sides])
    if scores[best] > RATIO * scores[chosen] + MARGIN:
        table = "".join(
            f"\n  --hidden {hidden} --recycle {recycle}: {score:.3f}" for (hidden, recycle), score in scores.items()
        )
        raise InputError(
            f"the draft is fed --hidden {chosen[0]} --recycle {chosen[1]}, and accepts {scores[chosen]:.3f} drafts a round; it was "
            f"trained on something else:{table}\nGive --hidden {best[0]} --recycle {best[1]}."
        )
    return {f"{hidden}/{recycle}": score for (hidden, recycle), score in scores.items()}
