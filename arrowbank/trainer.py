"""A feature bank as a PyTorch dataset that keeps float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from arrowbank.bank.features import open_features


class FeatureDataset(Dataset[torch.Tensor]):
    """The vectors of a feature bank by row: `dataset[i]` is [D] float16.

    A DataLoader fetches whole batches through `__getitems__`. Each DataLoader worker maps the bank itself: nothing is copied.
    """

    def __init__(self, folder: str | Path, expect: dict[str, Any] | None = None) -> None:
        self._folder, self._expect = Path(folder), dict(expect or {})
        self.bank = open_features(self._folder, self._expect)

    def __len__(self) -> int:
        return len(self.bank)

    def __getitem__(self, row: int) -> torch.Tensor:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a bank of {len(self)} rows")
        return torch.from_numpy(self.bank.take([row % len(self)])[0])

    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        return list(torch.from_numpy(self.bank.take(rows)))

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_expect": self._expect}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.bank = open_features(self._folder, self._expect)
