"""Encoders: batches of token ids, all texts of a batch of one length, to one float32 vector a text: passes (see passes.py) whose
hidden states are pooled where they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from arrowbank.models.describe import ModelInfo
from arrowbank.models.device import resolve_device
from arrowbank.models.load import load_hidden_states, widen_where_needed
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.passes import Passes, passes_on
from arrowbank.models.pooling import pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int32]
    Vectors = NDArray[np.float32]


def load(config: ModelConfig, info: ModelInfo, *, worker: int = 0) -> ModelEncoder:
    """See arrowbank.models.load_encoder."""
    device = torch.device(resolve_device(config, worker)[0])
    reader = load_hidden_states(config, info, device)
    widen_where_needed(reader, info, device)
    return ModelEncoder(passes_on(device, PooledReader(reader, info.pooling), info))


class PooledReader(nn.Module):
    """(N, T) int64 ids → (N, D) float32: the hidden states of `reader`, pooled; (N, T, D) without pooling."""

    def __init__(self, reader: nn.Module, how: str) -> None:
        super().__init__()
        self.reader = reader
        self.how = how

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        return pool(self.reader(input_ids_NT), self.how)


class ModelEncoder:
    """(N, T) int32 token ids → (N, D) float32 vectors, or (N, T, D) with the pooling "none": not normalised. A NaN is passed on, for the
    caller to refuse."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.info = passes.info
        self.hidden_size = passes.info.hidden_size

    def encode(self, input_ids_NT: Ids) -> Vectors:
        """The vectors of one batch. Raises InputError for an id outside the vocabulary, or a text longer than the positions."""
        [vectors] = self.encode_stream([input_ids_NT])
        return vectors

    def encode_stream(self, batches: Iterable[Ids]) -> Iterator[Vectors]:
        """`encode` of each batch, in order, the same to the bit, with later batches started before a result is waited for."""
        for vectors in self.passes.stream(batches):
            yield vectors.numpy()
