"""Hidden states into a target bank, against the bare forward passes of the same batches by the same loaded model.

A random Qwen3 of about 100 million parameters, sequences of a few exact lengths, three taps and the last hidden states. Ours is
the path of the stage: passes with hooks, rounding, rows put back in order, the shard written to disk and synced, its counts
beside it. The baseline runs the model's inner part alone over the same passes, and lets go of what it gives. The sides take turns,
and each side's best time counts.

    python -m benchmarks.bench_capture [SEQUENCES]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from arrowbank import CaptureConfig, ModelConfig
from arrowbank.bank import BankWriter
from arrowbank.engine.plan import batches, gather
from arrowbank.engine.pool import Job, run_here
from arrowbank.models.device import quiet
from arrowbank.models.load import cpu_has_bfloat16
from arrowbank.models.passes import Passes, passes_on
from arrowbank.models.taps import HiddenStates, TapReader
from arrowbank.targets.capture import CaptureJob, CaptureStage, ShardCapturer
from arrowbank.targets.shards import target_shards
from arrowbank.targets.target_rows import PreparedRows, prepare
from benchmarks.turns import best_seconds, tokens_row

SEQUENCES = 96
LENGTHS = (64, 128, 192, 256, 384, 512)
LAYERS = (1, 5, 9)
GOAL = 0.90
TURNS = 4
SHARD_BYTES = 1 << 26  # smaller than by default, so that a short run, too, writes a shard while it makes the next


def save_model(folder: Path, dtype: torch.dtype) -> None:
    """A random Qwen3 of about 100 million parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=11,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with quiet():
        Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)


def write_rows(path: Path, count: int) -> None:
    """`count` token rows, their lengths spread evenly over LENGTHS."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for row in range(count):
            ids = random.integers(0, 32_000, LENGTHS[row % len(LENGTHS)])
            file.write(json.dumps({"input_ids": ids.tolist()}) + "\n")


class Bare(nn.Module):
    """The model's inner part as it is; of its result, nothing but a number a row is kept."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids_NT, use_cache=False).last_hidden_state[:, -1, 0]  # type: ignore[no-any-return]


def bare(passes: Passes, rows: PreparedRows, plan: CaptureStage) -> Callable[[], None]:
    """The passes alone, over the batches that the stage makes."""

    def work() -> None:
        for shard in target_shards(rows.lengths, plan.facts, plan.config.max_shard_bytes):
            _, ids, _, offsets = rows.of(shard)
            for _ in passes.stream(_batches(ids, offsets, plan)):
                pass

    return work


def _batches(ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int32], plan: CaptureStage) -> Iterator[npt.NDArray[np.int32]]:
    return (gather(ids, offsets, batch) for batch in batches(np.diff(offsets), plan.config.rules))


def ours(worker: ShardCapturer, rows: PreparedRows, plan: CaptureStage, folder: Path) -> Callable[[], None]:
    """The stage from prepared rows to written shards, each time into a new bank."""
    made = iter(range(1_000_000))

    def work() -> None:
        with BankWriter(folder / f"bank-{next(made)}", kind="targets", recipe={"bench": 1}) as bank:
            shards = target_shards(rows.lengths, plan.facts, plan.config.max_shard_bytes)
            run_here(shards, Job(lambda number: worker, bank.shards), bank, lambda units: None)

    return work


def run(count: int = SEQUENCES) -> list[dict[str, Any]]:
    """The row of the benchmark table."""
    dtype = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", dtype)
        write_rows(folder / "rows.jsonl", count)
        model = ModelConfig(model=str(folder / "model"), device="cpu")
        config = CaptureConfig(model=model, data=folder / "rows.jsonl", target_layer_ids=LAYERS, max_shard_bytes=SHARD_BYTES)
        plan = CaptureStage(config)
        rows, _ = prepare(folder / "work", "0" * 16, plan.maker())
        job = CaptureJob(
            model=model, info=plan.model, facts=plan.facts, rules=config.rules, rows=rows.path, tallies=folder / "tallies"
        )
        worker = job(0)
        states = worker.states
        assert isinstance(states, HiddenStates)
        reader = next(module for module in states.passes.module.modules() if isinstance(module, TapReader))
        base = bare(passes_on(torch.device("cpu"), Bare(reader.model), plan.model), rows, plan)
        mine = ours(worker, rows, plan, folder)
        mine()
        base()
        best = best_seconds({"baseline": base, "ours": mine}, TURNS)
        tokens = int(rows.lengths.sum())
    what = (
        f"capture 3 taps of a Qwen3 of 100 M, {str(dtype).removeprefix('torch.')}, {count} sequences, against its bare passes"
    )
    return [tokens_row(what, tokens, best, GOAL)]


if __name__ == "__main__":
    for row in run(*map(int, sys.argv[1:])):
        print(row)
