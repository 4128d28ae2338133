"""How many drafts a server would keep, counted over windows: by data set and chain step, with the control that must miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch

from arrowbank.errors import InputError
from arrowbank.mtp.acceptance import Acceptance, Ints, count_chains, count_in_order, count_rounds, nothing, round_offsets
from arrowbank.mtp.batches import DraftWindows, WindowBatch
from arrowbank.mtp.draft import Draft, rounds
from arrowbank.mtp.draft import chain as unrolled
from arrowbank.mtp.layouts import Side
from arrowbank.mtp.loss import top_tokens


@dataclass
class Measured:
    """Counts over all windows; `sets` by data set; `control` with targets a row late; `in_order` where it was asked for."""

    whole: Acceptance
    control: Acceptance
    sets: dict[str, Acceptance] = field(default_factory=dict)
    in_order: Acceptance | None = None

    def record(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **self.whole.record(),
            "control": self.control.record(),
            "sets": {name: counts.record() for name, counts in self.sets.items()},
            **({} if self.in_order is None else {"in_order": self.in_order.record()}),
        }


@torch.no_grad()
def measure(
    draft: Draft,
    windows: DraftWindows,
    rows: Sequence[int],
    *,
    chain: int,
    stride: int = 0,
    batch: int = 2,
    in_order: bool = False,
    hidden: str | None = None,
) -> Measured:
    """Count the acceptance of `draft` on windows `rows`: every row a chain or, with a stride, rounds at the offsets 0 and stride/2.

    `hidden` is the side of the trunk's states that it is fed, where not the draft's own.
    """
    found = Measured(nothing(chain), nothing(chain), {}, nothing(chain) if in_order else None)
    names = windows.bank.set_names
    fill = windows.bank.manifest.pad_id
    for name in dict.fromkeys(names[row] for row in rows):
        found.sets[name] = nothing(chain)
        mine = [row for row in rows if names[row] == name]
        for part in windows.batches(mine, batch, hidden=hidden):
            if stride:
                counts, control = _in_rounds(draft, part, chain, stride, fill)
            if in_order or not stride:
                drafts = _chain_drafts(draft, part, chain, fill)
            if not stride:
                counts, control = _in_chains(part, drafts)
            if found.in_order is not None:
                found.in_order += count_in_order(*_text(part), drafts, part.lengths)
            found.sets[name] += counts
            found.control += control
        found.whole += found.sets[name]
    return found


def _text(part: WindowBatch) -> tuple[Ints, Ints]:
    return part.input_ids.cpu().numpy(), part.choices.cpu().numpy()


def _chain_drafts(draft: Draft, part: WindowBatch, steps: int, fill: int) -> Ints:
    """The token that every row drafts at every step, [J, N, T]."""
    return np.stack(
        [best_tokens(draft, out.post) for out in unrolled(draft, part.input_ids, part.hidden, steps=steps, fill=fill)]
    )


def _in_chains(part: WindowBatch, drafts: Any) -> tuple[Acceptance, Acceptance]:
    tokens, choices = _text(part)
    return tuple(count_chains(tokens, choices, drafts, part.lengths, shift=shift) for shift in (0, 1))  # type: ignore[return-value]


def _in_rounds(draft: Draft, part: WindowBatch, steps: int, stride: int, fill: int) -> tuple[Acceptance, Acceptance]:
    tokens, choices = _text(part)
    counts, control = nothing(steps), nothing(steps)
    for offset in round_offsets(stride):
        _, out = rounds(draft, part.input_ids, part.hidden, steps=steps, stride=stride, offset=offset, fill=fill)
        drafts = best_tokens(draft, out.post)
        how = {"steps": steps, "stride": stride, "offset": offset}
        counts += count_rounds(tokens, choices, drafts, part.lengths, **how)
        control += count_rounds(tokens, choices, drafts, part.lengths, shift=1, **how)
    return counts, control


def best_tokens(draft: Draft, post: torch.Tensor) -> Ints:
    """The draft's most likely token at every row, [N, T], from its hidden states after its norm [N, T, H]."""
    best, _ = top_tokens(post.flatten(0, 1), draft.head_weight, 1, bias_V=draft.head_bias)
    return best.view(post.shape[:2]).cpu().numpy()


WINDOWS = 8
RATIO, MARGIN = 1.25, 0.05  # better by so much is clearly better


def check_conventions(draft: Draft, windows: DraftWindows, rows: Sequence[int], *, chain: int, batch: int) -> dict[str, float]:
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
            f"\n  --last-hidden-norm {hidden} --recycle {recycle}: {score:.3f}" for (hidden, recycle), score in scores.items()
        )
        raise InputError(
            f"the draft is fed --last-hidden-norm {chosen[0]} --recycle {chosen[1]}, and accepts {scores[chosen]:.3f} drafts a round; it "
            f"was trained on something else:{table}\nGive --last-hidden-norm {best[0]} --recycle {best[1]}."
        )
    return {f"{hidden}/{recycle}": score for (hidden, recycle), score in scores.items()}
