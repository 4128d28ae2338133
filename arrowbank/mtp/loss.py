"""KL of the trunk's most likely tokens to the draft's whole softmax, for any number of rows in the memory of a few.

For a row with the trunk's k most likely tokens of ids i and probabilities p_i (their sum s may be below 1), and q the draft's softmax
over all V tokens:

    loss = Σ_i p'_i · (log p'_i − log q_i),   p' = (1 − hard) · p + hard · [1 at the trunk's first choice]

The sum is over the k tokens only. It includes the constant Σ p' log p'. It leaves out what the tail, of mass (1 − hard) · (1 − s),
would add, since its shape is not known; p is not scaled up to make that good. So a loss can be below 0 by as much as the tail's mass
allows (it is at least s' log s', with s' = Σ p'), and its gradient in the logits is s' · q − p'.

The head is frozen, so a row's loss and its gradient in the hidden state come out of the same logits: both are computed chunk by chunk in
the forward pass, and no logits are kept or computed twice. Against plain autograd that saves [R, V] float32, and some time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from arrowbank.errors import InputError

CHUNK_BYTES = 1 << 27  # of float32 logits at a time
_LEAST_ROWS = 16
_TINY = 1e-30


def topk_kl(
    hidden_RH: torch.Tensor,
    head_VH: torch.Tensor,
    ids_RK: torch.Tensor,
    probs_RK: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    hard: float = 0.0,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """The loss of each of R rows, [R] float32, differentiable (once) in `hidden`, the draft's hidden states after its norm.

    head is the trunk's, [V, H], frozen; logits are computed in its dtype and summed up in float32. ids int64 or int32, most likely
    first; probs float32. Raises InputError for shapes that do not fit and for a `hard` outside of [0, 1].
    """
    rows, width = hidden_RH.shape
    if ids_RK.shape != probs_RK.shape or ids_RK.shape[:1] != (rows,) or head_VH.shape[1:] != (width,):
        found = f"hidden {tuple(hidden_RH.shape)}, head {tuple(head_VH.shape)}, ids {tuple(ids_RK.shape)}, probs {tuple(probs_RK.shape)}"
        raise InputError(f"the loss got {found}; expected [R, H], [V, H], [R, k] and [R, k]")
    if not 0 <= hard <= 1:
        raise InputError(f"hard is {hard}; expected a share from 0 to 1 of the mass")
    chunk = chunk_rows or rows_at_a_time(head_VH.shape[0])
    targets = hardened(probs_RK.float(), hard)
    with torch.autocast(hidden_RH.device.type, enabled=False):  # the head's dtype decides, also where the draft runs under it
        losses: torch.Tensor = _TopKKL.apply(hidden_RH, head_VH, bias_V, ids_RK.long(), targets, chunk)  # type: ignore[no-untyped-call]
    return losses


def hardened(probs_RK: torch.Tensor, hard: float) -> torch.Tensor:
    """(1 − hard) · probs, and `hard` more on the first column."""
    if not hard:
        return probs_RK
    targets = probs_RK * (1 - hard)
    targets[:, 0] += hard
    return targets


def rows_at_a_time(vocabulary: int) -> int:
    """How many rows' logits are computed together."""
    return max(_LEAST_ROWS, CHUNK_BYTES // (4 * vocabulary))


class _TopKKL(torch.autograd.Function):
    """Losses [R] and, where it is asked for, the gradient of each in its own row's hidden state, kept until backward: [R, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        head_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        ids_RK: torch.Tensor,
        targets_RK: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        losses = hidden_RH.new_empty(len(hidden_RH), dtype=torch.float32)
        gradient = torch.empty_like(hidden_RH) if ctx.needs_input_grad[0] else None
        chunk = max(1, min(chunk, len(hidden_RH)))
        # the two large buffers, made once: new ones for each chunk would cost a CPU as much as the sums over them
        logits_CV = head_VH.new_empty((chunk, len(head_VH)))
        q_CV = logits_CV.new_empty(logits_CV.shape, dtype=torch.float32)
        for start in range(0, len(hidden_RH), chunk):
            part = slice(start, start + chunk)
            hidden, ids, targets = hidden_RH[part].to(head_VH.dtype), ids_RK[part], targets_RK[part]
            logits, q = logits_CV[: len(hidden)], q_CV[: len(hidden)]
            torch.mm(hidden, head_VH.T, out=logits)
            if bias_V is not None:
                logits += bias_V
            torch.softmax(logits, dim=1, dtype=torch.float32, out=q)
            largest, at = logits.max(dim=1, keepdim=True)
            total = largest.float() - q.gather(1, at).log()  # log Σ exp(logits): the largest q is never near 0
            log_q = logits.gather(1, ids).float() - total
            losses[part] = (torch.xlogy(targets, targets) - targets * log_q).sum(dim=1)
            if gradient is not None:  # s' · (q − p' / s') · head
                mass = targets.sum(dim=1, keepdim=True)
                q.scatter_add_(1, ids, -targets / mass.clamp_min(_TINY))
                slope = q if q.dtype == logits.dtype else logits.copy_(q)
                gradient[part] = (slope @ head_VH).float().mul_(mass)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_R: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream_R.unsqueeze(1).to(gradient.dtype), None, None, None, None, None


@torch.no_grad()
def top_tokens(
    hidden_RH: torch.Tensor, head_VH: torch.Tensor, k: int, *, bias_V: torch.Tensor | None = None, chunk_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft's k most likely tokens [R, k] int64, most likely first, and their softmax probabilities [R, k] float32."""
    chunk = chunk_rows or rows_at_a_time(head_VH.shape[0])
    ids = torch.empty((len(hidden_RH), k), dtype=torch.int64, device=hidden_RH.device)
    probs = torch.empty((len(hidden_RH), k), dtype=torch.float32, device=hidden_RH.device)
    for start in range(0, len(hidden_RH), chunk):
        part = slice(start, start + chunk)
        logits = functional.linear(hidden_RH[part].to(head_VH.dtype), head_VH, bias_V).float()
        best, ids[part] = logits.topk(k, dim=1)
        probs[part] = (best - torch.logsumexp(logits, dim=1, keepdim=True)).exp()
    return ids, probs
