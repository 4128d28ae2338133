"""What the draft sees: the steps of a chain from every row at once, and rounds as a server runs them.

In a chain every row p is its own round: step 1 takes the trunk's hidden state, a later one the draft's own output at row p of the
step before. In rounds only every n-th row starts one, and row q of it takes the draft's output at row q − 1, over a cache of the
trunk's states: that is what serving looks like.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from arrowbank.errors import InputError
from arrowbank.mtp.draft import Draft, DraftOutput


def step_tokens(input_ids_NT: torch.Tensor, step: int, fill: int) -> torch.Tensor:
    """t_{p+step} at every row p, [N, T] int64; `fill` (EOS) past the window's end, where no row counts."""
    shifted = torch.full_like(input_ids_NT, fill, dtype=torch.int64)
    if step < input_ids_NT.shape[1]:
        shifted[:, : input_ids_NT.shape[1] - step] = input_ids_NT[:, step:]
    return shifted


def chain(
    draft: Draft, input_ids_NT: torch.Tensor, hidden_NTH: torch.Tensor, *, steps: int, fill: int
) -> Iterator[DraftOutput]:
    """The draft's output at chain steps 1 … `steps`, each from the one before; `hidden` is the trunk's, on the side it is fed."""
    for step in range(1, steps + 1):
        output: DraftOutput = draft(step_tokens(input_ids_NT, step, fill), hidden_NTH)
        yield output
        hidden_NTH = output.side(draft.recycle)


def round_steps(rows: int, *, steps: int, stride: int, offset: int) -> torch.Tensor:
    """The step that each row is of, [rows] int64: 1 … steps in a round, 0 outside of any. Rounds start at offset + i · stride.

    Raises InputError for a stride shorter than the chain.
    """
    if stride < steps:
        raise InputError(f"stride is {stride}, shorter than the chain of {steps}; expected at least {steps}, or 0 for none")
    if not 0 <= offset < stride:
        raise InputError(f"offset is {offset}; expected 0 to {stride - 1}, below the stride")
    place = torch.arange(rows) - offset
    step = place % stride + 1
    return torch.where((place >= 0) & (step <= steps), step, torch.zeros_like(step))


def rounds(
    draft: Draft, input_ids_NT: torch.Tensor, hidden_NTH: torch.Tensor, *, steps: int, stride: int, offset: int, fill: int
) -> tuple[torch.Tensor, DraftOutput]:
    """(the hidden states that rows are fed in rounds [N, T, H], the draft's output on them), after `steps` passes.

    Row q takes token t_{q+1} at any step. Rows of steps 2 … take the draft's output at row q − 1, all others keep the trunk's.
    Pass j fills the rows of step j in all rounds at once: so what row q takes was computed over rounds before it that were filled
    as far as step j − 1, and the output comes from rows all of which are filled.
    """
    tokens = step_tokens(input_ids_NT, 1, fill)
    step_T = round_steps(tokens.shape[1], steps=steps, stride=stride, offset=offset).to(tokens.device)
    fed = hidden_NTH.to(draft.dtype)
    output: DraftOutput = draft(tokens, fed)
    for step in range(2, steps + 1):
        rows = (step_T == step).nonzero().squeeze(1)
        fed = fed.index_copy(1, rows, output.side(draft.recycle)[:, rows - 1].to(fed.dtype))
        output = draft(tokens, fed)
    return fed, output
