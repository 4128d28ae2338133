"""Engines' dumps as tests need them: any names, dtypes and shapes, and damage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS, WIDTH = 3, 8
LENGTHS = (5, 1, 9, 4)

Tensors = dict[str, torch.Tensor]


def sample(length: int, seed: int, *, layers: int = LAYERS, width: int = WIDTH, vocab: int = 100) -> Tensors:
    """The tensors of a sample under an engine's usual names."""
    random = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, vocab, (length,), generator=random),
        "target_hidden_states": torch.randn((length, layers, width), generator=random).bfloat16(),
        "target_last_hidden_states": torch.randn((length, width), generator=random).bfloat16(),
        "loss_mask": torch.randint(0, 2, (length,), generator=random),
    }


def make_dump(
    folder: Path,
    lengths: Sequence[int] = LENGTHS,
    *,
    change: Callable[[int, Tensors], Mapping[str, torch.Tensor] | None] = lambda row, tensors: None,
    lines: Callable[[int, str], Any] = lambda row, name: {"file": name},
    **shape: int,
) -> list[Tensors]:
    """A dump in `folder`; the tensors of its samples. `change(row, tensors)` may give others, `lines(row, name)` an index line:
    an object, or a string to be written as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with (folder / "index.jsonl").open("w") as index:
        for row, length in enumerate(lengths):
            tensors = sample(length, row, **shape)
            tensors = dict(change(row, tensors) or tensors)
            name = f"s{row}.safetensors"
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
            line = lines(row, name)
            index.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
            made.append(tensors)
    return made


def bits(tensor: torch.Tensor) -> Any:
    """A tensor's bfloat16 bits as a NumPy array of two dimensions."""
    flat = tensor.reshape(tensor.shape[0], -1)
    return flat.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
