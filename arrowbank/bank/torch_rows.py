"""Banks as PyTorch datasets: feature vectors that stay float16, hidden states that stay bfloat16.

Each DataLoader worker maps the bank itself: nothing is copied, nothing is pickled but the folder's name and its commit. A worker that
finds another bank in the folder raises CorruptBank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from arrowbank.bank.floats import bfloat16_tensor

if TYPE_CHECKING:
    from arrowbank.bank.kinds.features_bank import FeatureBank
    from arrowbank.bank.kinds.targets_bank import TargetBank, TargetSample
    from arrowbank.bank.kinds.token_features_bank import TokenFeatureBank

TensorRow = dict[str, torch.Tensor]
IGNORED = -1  # the position of a padded hidden state


class TorchVectors(Dataset[torch.Tensor]):
    """The vectors of a feature bank by row: `dataset[i]` is [D] float16, of a bank with a vector per token [T, D].

    A DataLoader fetches whole batches through `__getitems__`.
    """

    def __init__(self, bank: FeatureBank | TokenFeatureBank) -> None:
        self.bank = bank

    def __len__(self) -> int:
        return len(self.bank)

    def __getitem__(self, row: int) -> torch.Tensor:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a bank of {len(self)} rows")
        return torch.from_numpy(self.bank.take([row % len(self)])[0])

    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        return [torch.from_numpy(vectors) for vectors in self.bank.take(rows)]


class TorchTargets(Dataset[TensorRow]):
    """The rows of a target bank. `dataset[i]` is a dict of tensors of its own memory:

    input_ids [S] int64 · loss_mask [S] uint8 · target_hidden_states [K, L·H] bfloat16 · target_last_hidden_states [K, H] bfloat16,
    with K = S; in a bank of supervised spans also hidden_positions [K] int64, the tokens that hidden states belong to.
    """

    def __init__(self, bank: TargetBank) -> None:
        self.bank = bank

    def __len__(self) -> int:
        return len(self.bank)

    def __getitem__(self, row: int) -> TensorRow:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a bank of {len(self)} rows")
        return _tensors(self.bank.read(row % len(self)))


def collate_targets(rows: Sequence[TensorRow]) -> TensorRow:
    """Rows of a target bank padded behind to the longest, and stacked: [N, S] and [N, K, …], with attention_mask [N, S] uint8 (1: a
    real token). The `collate_fn` of a DataLoader.

    Padding is 0 in every tensor, and −1 in hidden_positions.
    """
    padded = {
        name: torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in rows], batch_first=True, padding_value=IGNORED if name == "hidden_positions" else 0
        )
        for name in rows[0]
    }
    real = [torch.ones(len(row["input_ids"]), dtype=torch.uint8) for row in rows]
    padded["attention_mask"] = torch.nn.utils.rnn.pad_sequence(real, batch_first=True)
    return padded


def _tensors(sample: TargetSample) -> TensorRow:
    row = {
        "input_ids": torch.from_numpy(sample.input_ids.astype(np.int64)),
        "loss_mask": torch.from_numpy(sample.loss_mask.copy()),
        "target_hidden_states": bfloat16_tensor(sample.taps),
        "target_last_hidden_states": bfloat16_tensor(sample.last),
    }
    if sample.positions is not None:
        row["hidden_positions"] = torch.from_numpy(sample.positions.astype(np.int64))
    return row
