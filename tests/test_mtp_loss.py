"""The chunked loss against the plain formula, its gradients against autograd and against differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank.errors import InputError
from arrowbank.mtp.loss import rows_at_a_time, top_tokens, topk_kl


def drawn(rows: int, k: int, *, width: int = 8, vocabulary: int = 40, seed: int = 0, bias: bool = False) -> tuple[Any, ...]:
    """hidden, head, bias, ids, probs: a true softmax's k largest, so that a tail is missing."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    head = torch.randn(vocabulary, width, generator=generator) / 2
    offsets = torch.randn(vocabulary, generator=generator) if bias else None
    probs, ids = (torch.randn(rows, vocabulary, generator=generator) * 2).softmax(-1).topk(k)
    return hidden, head, offsets, ids, probs


def plain(hidden: Any, head: Any, bias: Any, ids: Any, probs: Any, hard: float) -> torch.Tensor:
    """The documented formula, over all logits at once, term by term."""
    target = probs * (1 - hard)
    target = torch.cat([target[:, :1] + hard, target[:, 1:]], dim=1)
    logits = hidden @ head.T + (0 if bias is None else bias)
    log_q = logits.float().log_softmax(-1).gather(1, ids)
    return (target * (target.log() - log_q)).sum(1)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 23),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(1, 9),
    st.integers(0, 99),
    st.booleans(),
)
def test_it_is_the_plain_formula_whatever_the_chunks(rows: int, k: int, hard: float, chunk: int, seed: int, bias: bool) -> None:
    hidden, head, offsets, ids, probs = drawn(rows, k, seed=seed, bias=bias)
    weights = torch.linspace(0.5, 2, rows)
    ours, theirs = hidden.clone().requires_grad_(True), hidden.clone().requires_grad_(True)
    found = topk_kl(ours, head, ids, probs, bias_V=offsets, hard=hard, chunk_rows=chunk)
    if hard < 1:
        expected = plain(theirs, head, offsets, ids, probs, hard)
    else:  # 0 · log 0 is 0
        logits = theirs @ head.T + (0 if offsets is None else offsets)
        expected = torch.nn.functional.cross_entropy(logits, ids[:, 0], reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_gradients_are_the_differences() -> None:
    hidden, head, _, ids, probs = drawn(3, 4)
    hidden = hidden.requires_grad_(True)
    topk_kl(hidden, head, ids, probs, hard=0.2).sum().backward()
    step = 1e-2
    for row in range(3):
        for column in range(hidden.shape[1]):
            moved = torch.zeros_like(hidden)
            moved[row, column] = step
            with torch.no_grad():
                up = topk_kl(hidden + moved, head, ids, probs, hard=0.2).double().sum()
                down = topk_kl(hidden - moved, head, ids, probs, hard=0.2).double().sum()
            assert hidden.grad is not None
            assert hidden.grad[row, column].item() == pytest.approx(float((up - down) / (2 * step)), abs=1e-3)


def test_bfloat16_is_near_and_its_gradient_is_bfloat16() -> None:
    hidden, head, _, ids, probs = drawn(37, 5)
    exact = hidden.to(torch.bfloat16).float().requires_grad_(True)
    narrow = hidden.to(torch.bfloat16).requires_grad_(True)
    expected = plain(exact, head.to(torch.bfloat16).float(), None, ids, probs, 0.0)
    found = topk_kl(narrow, head.to(torch.bfloat16), ids, probs, chunk_rows=5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    found.mean().backward()
    expected.mean().backward()
    assert narrow.grad is not None
    assert exact.grad is not None
    assert narrow.grad.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(narrow.grad.float().flatten(), exact.grad.flatten(), dim=0) > 0.999


def test_a_float32_draft_over_a_bfloat16_head_keeps_its_gradient_wide() -> None:
    hidden, head, _, ids, probs = drawn(9, 5)
    hidden.requires_grad_(True)
    topk_kl(hidden, head.to(torch.bfloat16), ids, probs).mean().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32
    assert bool(hidden.grad.abs().sum() > 0)


def test_autocast_around_it_changes_nothing() -> None:
    hidden, head, _, ids, probs = drawn(9, 5)
    hidden.requires_grad_(True)
    topk_kl(hidden, head, ids, probs).mean().backward()
    expected, hidden.grad = hidden.grad, None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        topk_kl(hidden, head, ids, probs).mean().backward()
    assert torch.equal(hidden.grad, expected)


def test_rows_without_targets_have_neither_loss_nor_gradient() -> None:
    hidden, head, _, ids, probs = drawn(4, 3)
    hidden.requires_grad_(True)
    probs[2] = 0
    losses = topk_kl(hidden, head, ids, probs)
    losses.sum().backward()
    assert losses[2].item() == 0
    assert hidden.grad is not None
    assert not hidden.grad[2].any()
    assert hidden.grad[1].any()


def test_the_missing_mass_is_not_made_good() -> None:
    hidden, head, _, ids, probs = drawn(6, 3)
    whole = torch.zeros(6, 40).scatter(1, ids, probs)
    log_q = (hidden @ head.T).log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, whole, reduction="none").sum(1)
    torch.testing.assert_close(topk_kl(hidden, head, ids, probs), expected, rtol=1e-5, atol=1e-5)
    scaled = topk_kl(hidden, head, ids, probs / probs.sum(1, keepdim=True))
    assert not torch.allclose(scaled, expected, atol=1e-2)


def test_it_is_zero_where_the_draft_says_what_the_trunk_does() -> None:
    hidden, head, _, _, _ = drawn(4, 1)
    probs, ids = (hidden @ head.T).softmax(-1).topk(40)
    hidden.requires_grad_(True)
    found = topk_kl(hidden, head, ids, probs)
    torch.testing.assert_close(found, torch.zeros(4), rtol=0, atol=1e-5)
    found.sum().backward()
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden), rtol=0, atol=1e-5)


def test_no_tensor_of_all_rows_logits_is_made() -> None:
    hidden, head, _, ids, probs = drawn(300, 4, vocabulary=500)
    hidden.requires_grad_(True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            sizes = [
                each.numel() for each in (result if isinstance(result, tuple | list) else [result]) if torch.is_tensor(each)
            ]
            largest = max([largest, *sizes])
            return result

    with Watch():
        topk_kl(hidden, head, ids, probs, chunk_rows=7).mean().backward()
    assert 7 * 500 <= largest <= 500 * 8


def test_chunks_are_bounded_in_bytes() -> None:
    assert rows_at_a_time(128_000) * 128_000 * 4 <= 1 << 27
    assert rows_at_a_time(1 << 30) == 16


def test_top_tokens_are_the_most_likely_ones() -> None:
    hidden, head, bias, _, _ = drawn(11, 1, bias=True)
    ids, probs = top_tokens(hidden, head, 4, bias_V=bias, chunk_rows=3)
    best = (hidden @ head.T + bias).softmax(-1).topk(4)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(probs, best.values)


def test_shapes_and_shares_that_do_not_fit_are_refused() -> None:
    hidden, head, _, ids, probs = drawn(4, 3)
    with pytest.raises(InputError, match=r"ids \(3, 3\)"):
        topk_kl(hidden, head, ids[:3], probs)
    with pytest.raises(InputError, match=r"hard is 1\.5"):
        topk_kl(hidden, head, ids, probs, hard=1.5)
