"""A training step of a draft, against the bare forward and backward passes of the same block and head in plain torch.

A random Qwen3 of width 768 with a vocabulary of 32,000, windows of 512 tokens, two a step. Ours is what a step does: the windows read
from the trunk bank, the draft, the loss, backward, clipping and Adam. The baseline has its tensors ready: the same block, all logits
at once, softmax, KL to the k tokens by the plain formula, backward; it neither clips nor steps. The sides take turns, and each side's
best time counts. The second row is memory: what the loss takes beside its inputs at many rows, over what it takes at few.

    python -m benchmarks.bench_heal [STEPS]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arrowbank import HealConfig, ModelConfig, TrunkBank, TrunkConfig, TrunkData, build_trunk, open_bank
from arrowbank.mtp.batches import DraftWindows
from arrowbank.mtp.draft import step_tokens
from arrowbank.mtp.draft_files import init_from_last_block
from arrowbank.mtp.loss import topk_kl
from arrowbank.mtp.trainer import ChainBatch, Training
from benchmarks.turns import best_seconds, tokens_row

STEPS = 3
WINDOW, WINDOWS, BATCH, TOPK = 512, 20, 2, 64
VOCABULARY, WIDTH = 32_000, 768
GOAL = 0.85
TURNS = 4
FEW, MANY = 1024, 8192  # rows of the loss


def save_model(folder: Path) -> None:
    """A random Qwen3 of two layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def training(folder: Path) -> Training:
    """A training on a trunk bank of that model, made here in float32."""
    from transformers import AutoModelForCausalLM

    save_model(folder / "model")
    random = np.random.default_rng(0)
    rows = [random.integers(0, VOCABULARY, WINDOW).tolist() for _ in range(WINDOWS)]
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    model = ModelConfig(model=str(folder / "model"), device="cpu", dtype="float32")
    build_trunk(
        TrunkConfig(
            model=model, sources=(TrunkData("a", folder / "ids.jsonl"),), window=WINDOW, topk=TOPK, last_hidden_norm="pre"
        ),
        folder / "bank",
    )
    draft = init_from_last_block(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32))
    windows, config = DraftWindows(open_bank(folder / "bank", kind=TrunkBank), draft), HealConfig(model=model, batch=BATCH)
    (folder / "work").mkdir()
    return Training(config, draft, windows, windows.bank.training_rows(BATCH).tolist(), [], folder / "work", "")


def ours(heal: Training, steps: int) -> Callable[[], None]:
    """Steps as the stage does them."""

    def work() -> None:
        for number in range(steps):
            heal._step(heal.jobs[number])

    return work


def bare(heal: Training, steps: int) -> Callable[[], None]:
    """Forward and backward of the same jobs, the tensors of which are there already."""
    ready = [_ready(heal, heal.jobs[number]) for number in range(steps)]
    draft = heal.draft

    def work() -> None:
        for tokens, hidden, ids, probs in ready:
            logits = torch.nn.functional.linear(draft(tokens, hidden).post.flatten(0, 1), draft.head_weight)
            log_q = torch.log_softmax(logits, dim=-1).gather(1, ids)
            (torch.xlogy(probs, probs) - probs * log_q).sum(1).mean().backward()  # type: ignore[no-untyped-call]
            for parameter in heal.parameters:
                parameter.grad = None

    return work


def _ready(heal: Training, job: ChainBatch) -> tuple[torch.Tensor, ...]:
    """What the draft is fed, and its targets a row (none past the end, whose targets have no mass)."""
    part = heal.windows.batch(job.rows)
    ahead = torch.nn.functional.pad
    ids, probs = (ahead(each[:, job.step :], (0, 0, 0, job.step)).flatten(0, 1) for each in (part.topk_ids, part.topk_probs))
    return step_tokens(part.input_ids, job.step, 0), heal.feeding.of(part, job.step), ids, probs


def loss_bytes(rows: int) -> int:
    """The most memory that the loss and its backward pass take at a time beside their inputs, by torch's own account."""
    from torch.profiler import ProfilerActivity, profile

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).requires_grad_()
    head = torch.randn(VOCABULARY, WIDTH, generator=generator)
    ids = torch.randint(VOCABULARY, (rows, TOPK), generator=generator)
    probs = torch.full((rows, TOPK), 0.9 / TOPK)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        topk_kl(hidden, head, ids, probs).mean().backward()  # type: ignore[no-untyped-call]
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def run(steps: int = STEPS) -> list[dict[str, Any]]:
    """The rows of the benchmark table."""
    with tempfile.TemporaryDirectory() as name:
        heal = training(Path(name))
        heal._refresh()
        sides = {"baseline": bare(heal, steps), "ours": ours(heal, steps)}
        for work in sides.values():
            work()
        best = best_seconds(sides, TURNS)
        tokens = steps * BATCH * WINDOW
    few, many = loss_bytes(FEW), loss_bytes(MANY)
    logits = FEW * VOCABULARY * 4
    what = f"heal, a step of {BATCH} windows of {WINDOW}, vocabulary {VOCABULARY:,}, against bare forward and backward passes"
    return [
        tokens_row(what, tokens, best, GOAL),
        {
            "what": f"heal, memory of the loss at {MANY:,} rows, against {FEW:,} rows",
            "ours": many / 1e6,
            "baseline": few / 1e6,
            "ratio": many / few,
            "goal": f"flat but for gradients; all logits would be {logits * MANY / FEW / 1e6:,.0f} MB",
            "unit": "MB",
        },
    ]


if __name__ == "__main__":
    for row in run(*map(int, sys.argv[1:])):
        print(row)
