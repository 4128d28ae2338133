"""Target banks of made samples, for tests of what is made from a bank (tests of the import make their dumps with tests/dumps.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from arrowbank import ImportConfig, import_targets
from tests.mutations import reseal

MODEL = "org/target"
LAYERS = (1, 11, 21)
HIDDEN_SIZE = 8
LENGTHS = (5, 1, 9, 3)
VOCAB = 50


@dataclass(frozen=True)
class Sample:
    """What a file of the dump holds: ids and mask int64 [S], taps [S, L, H], last [S, H] of the dump's dtype."""

    name: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    taps: torch.Tensor
    last: torch.Tensor


def make_dump(
    folder: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    layers: int = len(LAYERS),
    hidden_size: int = HIDDEN_SIZE,
    dtype: torch.dtype = torch.bfloat16,
    names: Sequence[str] | None = None,
    loss_mask: bool = True,
    seed: int = 0,
) -> list[Sample]:
    """Write a dump of random samples, one for each of `lengths` (tokens), and give them.

    `names` are the files' (may lie in folders of the dump); `loss_mask`: whether the files hold one (random, row 0's all ones).
    """
    random = torch.Generator().manual_seed(seed)
    samples, lines = [], []
    for row, length in enumerate(lengths):
        name = names[row] if names else f"sample-{row:04d}.safetensors"
        sample = Sample(
            name,
            torch.randint(VOCAB, (length,), generator=random),
            torch.randint(2, (length,), generator=random) if row else torch.ones(length, dtype=torch.int64),
            torch.randn(length, layers, hidden_size, generator=random).to(dtype),
            torch.randn(length, hidden_size, generator=random).to(dtype),
        )
        tensors = {"input_ids": sample.input_ids, "target_hidden_states": sample.taps, "target_last_hidden_states": sample.last}
        if loss_mask:
            tensors["loss_mask"] = sample.loss_mask
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / name)
        samples.append(sample)
        lines.append(json.dumps({"file": name, "n_tokens": length}))
    (folder / "index.jsonl").write_text("\n".join(lines) + "\n")
    return samples


def import_config(**options: Any) -> ImportConfig:
    """How the dumps made here are imported, unless `options` say otherwise."""
    said: dict[str, Any] = {"target_model": MODEL, "target_layer_ids": LAYERS, "loss_mask": "from_dump", **options}
    return ImportConfig(**said)


def make_target_bank(folder: Path, *, dump: dict[str, Any] | None = None, **options: Any) -> list[Sample]:
    """A committed target bank at `folder`, of a dump made beside it; the samples of the dump. `dump`: options of `make_dump`,
    `options`: of ImportConfig."""
    source = folder.parent / f"{folder.name}-dump"
    samples = make_dump(source, **(dump or {}))
    import_targets(import_config(**options), source, folder)
    return samples


def know_the_depth(bank: Path, num_hidden_layers: int) -> None:
    """Let a bank know how many blocks its model has: a capture notes it, a dump does not say it."""

    def edit(manifest: dict[str, Any]) -> None:
        manifest["num_hidden_layers"] = manifest["recipe"]["num_hidden_layers"] = num_hidden_layers

    reseal(bank, edit)
