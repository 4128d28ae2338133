"""Small real trunk banks: token rows, a config, and what transformers itself gives for a window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from arrowbank import ModelConfig, TrunkConfig, TrunkData
from arrowbank.models import describe
from arrowbank.mtp.trunk_records import shuffled
from tests.test_capture import one_thread

WINDOW, TOPK = 48, 6


def write_ids(path: Path, records: int, vocabulary: int = 256) -> list[list[int]]:
    """A .jsonl of token rows of 1 to 40 tokens each; the rows."""
    random = np.random.default_rng(records)
    rows = [random.integers(2, vocabulary, 1 + (7 * i) % 40).tolist() for i in range(records)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return rows


def packed_by_hand(rows: list[list[int]], tokens: int, window: int = WINDOW, least: int = 19) -> list[list[int]]:
    stream = [token for at in shuffled(len(rows)) for token in rows[at]][:tokens]
    windows = [stream[start : start + window] for start in range(0, len(stream), window)]
    return [one for one in windows if len(one) >= min(least, window)]


def make(model: Path, *data: TrunkData, dtype: Any = "auto", **options: Any) -> TrunkConfig:
    given: dict[str, Any] = {"window": WINDOW, "topk": TOPK, "tokens": 560}
    return TrunkConfig(model=ModelConfig(model=str(model), device="cpu", dtype=dtype), sources=data, **(given | options))


def direct(folder: Path, windows: list[list[int]], topk: int = TOPK, dtype: str = "auto") -> list[dict[str, np.ndarray]]:
    """What a plain forward pass of the model's own class says about each window, on its own."""
    architecture = describe(ModelConfig(model=str(folder))).architecture
    model = getattr(tf, architecture).from_pretrained(folder, dtype=dtype).eval()
    before: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, args: before.append(args[0]))
    found = []
    with one_thread():
        for ids in windows:
            before.clear()
            output = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
            probs, choices = torch.softmax(output.logits[0].float(), dim=-1).topk(topk)
            found.append(
                {
                    "topk_ids": choices.numpy().astype(np.int32),
                    "topk_probs": probs.numpy(),
                    "tail_mass": (1 - probs.sum(dim=-1)).numpy(),
                    "post": bits(output.hidden_states[-1][0]),
                    "pre": bits(before[0][0]),
                    "layers": np.stack([state[0].half().numpy() for state in output.hidden_states]),
                }
            )
    return found


def bits(values: torch.Tensor) -> np.ndarray:
    return values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
