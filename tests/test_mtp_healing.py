"""The parts together: a few steps on a few windows, and the trunk keeps more of what the draft says on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from arrowbank.mtp.acceptance import Acceptance, count_chains
from arrowbank.mtp.draft import Draft, chain
from arrowbank.mtp.draft_files import init_from_last_block, load_draft, save_draft
from arrowbank.mtp.loss import top_tokens, topk_kl
from tests import drafts

N, T, K, STEPS = 4, 16, 8, 2


def accepted(draft: Draft, ids: torch.Tensor, hidden: torch.Tensor, choices: torch.Tensor, shift: int = 0) -> Acceptance:
    drafted = []
    with torch.no_grad():
        for output in chain(draft, ids, hidden, steps=STEPS, fill=0):
            best, _ = top_tokens(output.post.flatten(0, 1), draft.head_weight, 1)
            drafted.append(best.view(N, T).numpy())
    return count_chains(ids.numpy(), choices.numpy(), np.stack(drafted), np.full(N, T), shift=shift)


def test_training_on_the_trunks_choices_raises_acceptance_and_the_file_has_it(tmp_path: Path) -> None:
    made = drafts.make("llama, canonical", tmp_path / "source", draft=False)
    model, generator = made.trunk(), torch.Generator().manual_seed(0)
    draft = init_from_last_block(model)
    ids = torch.randint(0, drafts.V, (N, 1), generator=generator)
    before_norm: list[torch.Tensor] = []
    hook = draft.trunk.norm.register_forward_hook(lambda _, args, output: before_norm.append(args[0]))
    with torch.no_grad():
        for _ in range(T - 1):  # the trunk's own text, but for every fifth token
            best = model(ids, use_cache=False).logits[:, -1].argmax(-1)
            other = torch.randint(0, drafts.V, (N,), generator=generator)
            ids = torch.cat([ids, torch.where(torch.rand(N, generator=generator) < 0.8, best, other)[:, None]], 1)
        probs, topk = model(ids, use_cache=False).logits.softmax(-1).topk(K)
    hook.remove()
    assert draft.hidden == "pre"
    hidden, choices = before_norm[-1], topk[..., 0]
    before = accepted(draft, ids, hidden, choices)
    optimizer = torch.optim.Adam(draft.train_only(projection=True), 5e-3)
    for _ in range(40):
        loss = torch.zeros(())
        for step, output in enumerate(chain(draft, ids, hidden, steps=STEPS, fill=0), start=1):
            rows = output.post[:, : T - step].flatten(0, 1)
            loss = loss + topk_kl(rows, draft.head_weight, topk[:, step:].flatten(0, 1), probs[:, step:].flatten(0, 1)).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = accepted(draft, ids, hidden, choices)
    assert after.score > before.score + 0.5
    assert accepted(draft, ids, hidden, choices, shift=1).score < after.score / 2
    save_draft(draft, made.folder, tmp_path / "copy", provenance=draft.origin.record())
    stored = load_draft(drafts.load_trunk(tmp_path / "copy"), tmp_path / "copy")
    assert (stored.hidden, stored.recycle) == ("pre", "pre")
    assert accepted(stored, ids, hidden, choices) == after
