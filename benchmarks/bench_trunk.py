"""Windows into a trunk bank, against the bare forward passes with the LM head over the same batches by the same loaded model.

A random Qwen3 of about 100 million parameters with a vocabulary of 32,000. Ours is the path of the stage: passes, softmax and
the 64 most likely next tokens, rounding, the shard written to disk and synced. The baseline runs the whole model over the same
passes and lets go of its logits. The sides take turns, and each side's best time counts.

    python -m benchmarks.bench_trunk [WINDOWS]
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
from torch import nn

from arrowbank import ModelConfig, TrunkConfig, TrunkData
from arrowbank.bank import BankWriter
from arrowbank.engine.pool import Job, run_here
from arrowbank.models.load import cpu_has_bfloat16
from arrowbank.models.passes import Passes, passes_on
from arrowbank.mtp.trunk_build import ShardComputer, TrunkStage
from arrowbank.mtp.trunk_passes import TrunkReader
from benchmarks.bench_capture import save_model
from benchmarks.turns import best_seconds, tokens_row

WINDOWS = 12
WINDOW = 1024
GOAL = 0.90
TURNS = 3


def write_ids(path: Path, windows: int) -> None:
    """Token rows that come to so many windows, and no more."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(windows):
            file.write(json.dumps({"input_ids": random.integers(0, 32_000, WINDOW).tolist()}) + "\n")


class Bare(nn.Module):
    """The model as it is, with its head; of its logits, nothing but a number a row is kept."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids_NT, use_cache=False).logits[:, -1, 0]  # type: ignore[no-any-return]


def bare(passes: Passes, plan: TrunkStage) -> Callable[[], None]:
    """The passes alone, over the batches that the stage makes: a window each."""
    windows = plan.windows.padded(plan.pad_id)

    def work() -> None:
        for _ in passes.stream(window[None] for window in windows):
            pass

    return work


def ours(worker: ShardComputer, plan: TrunkStage, folder: Path) -> Callable[[], None]:
    """The stage from packed windows to written shards, each time into a new bank."""
    made = iter(range(1_000_000))

    def work() -> None:
        with BankWriter(folder / f"bank-{next(made)}", kind="trunk", recipe={"bench": 1}) as bank:
            run_here(plan.shards, Job(lambda number: worker, bank.shards), bank, lambda units: None)

    return work


def run(windows: int = WINDOWS) -> list[dict[str, Any]]:
    """The row of the benchmark table."""
    dtype = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", dtype)
        write_ids(folder / "ids.jsonl", windows)
        config = TrunkConfig(
            model=ModelConfig(model=str(folder / "model"), device="cpu"),
            sources=(TrunkData("a", folder / "ids.jsonl"),),
            window=WINDOW,
            hold_all=True,  # any number of windows will do
        )
        plan = TrunkStage(config)
        worker = plan.job(folder)(0)
        reader = next(module for module in worker.trunk.passes.module.modules() if isinstance(module, TrunkReader))
        base = bare(passes_on(torch.device("cpu"), Bare(reader.model), plan.model), plan)
        mine = ours(worker, plan, folder)
        mine()
        base()
        best = best_seconds({"baseline": base, "ours": mine}, TURNS)
        tokens = int(plan.windows.lengths.sum())
    kind = str(dtype).removeprefix("torch.")
    what = f"trunk build of a Qwen3 of 100 M, {kind}, {windows} windows of {WINDOW}, against its bare passes with the head"
    return [tokens_row(what, tokens, best, GOAL)]


if __name__ == "__main__":
    for row in run(*map(int, sys.argv[1:])):
        print(row)
