"""Encoders: batches of token ids, all texts of a batch of one length, to one float32 vector a text: passes (see passes.py) whose
hidden states are pooled where they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from arrowbank.errors import InputError
from arrowbank.models.describe import ModelInfo
from arrowbank.models.device import resolve_device
from arrowbank.models.load import load_hidden_states, widen_where_needed
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.passes import Passes, passes_on
from arrowbank.models.pooling import heads_of, pool
from arrowbank.models.sentence_folder import static_table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int32]
    Vectors = NDArray[np.float32]


def load(config: ModelConfig, info: ModelInfo, *, worker: int = 0, skip: int = 0) -> ModelEncoder | TableEncoder:
    """See arrowbank.models.load_encoder."""
    if info.sentence is not None and info.sentence.static:
        return TableEncoder(info)
    device = torch.device(resolve_device(config, worker)[0])
    reader = load_hidden_states(config, info, device)
    widen_where_needed(reader, info, device)
    return ModelEncoder(passes_on(device, PooledReader(reader, info, device, skip), info))


class PooledReader(nn.Module):
    """(N, T) int64 ids → (N, D) float32: hidden states pooled without the first `skip` tokens, through the heads; (N, T, D)
    without pooling."""

    def __init__(self, reader: nn.Module, info: ModelInfo, device: torch.device, skip: int = 0) -> None:
        super().__init__()
        self.reader, self.heads = reader, heads_of(info).to(device)
        self.how, self.skip = info.pooling, skip

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.heads(pool(self.reader(input_ids_NT), self.how, self.skip))
        return vectors


class ModelEncoder:
    """(N, T) int32 token ids → (N, D) float32 vectors: pooled, through the folder's modules; (N, T, D) with the pooling "none". A NaN is
    for the caller to refuse."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.info = passes.info
        self.hidden_size = passes.info.width

    def encode(self, input_ids_NT: Ids) -> Vectors:
        """The vectors of one batch. Raises InputError for an id outside the vocabulary, or a text longer than the positions."""
        [vectors] = self.encode_stream([input_ids_NT])
        return vectors

    def encode_stream(self, batches: Iterable[Ids]) -> Iterator[Vectors]:
        """`encode` of each batch, in order, the same to the bit, with later batches started before a result is waited for."""
        for vectors in self.passes.stream(batches):
            yield vectors.numpy()


class TableEncoder:
    """(N, T) int32 token ids → (N, D) float32 vectors: the mean of the tokens' vectors in a table, through the folder's modules."""

    def __init__(self, info: ModelInfo) -> None:
        self.info, self.hidden_size = info, info.width
        table = static_table(info.folder)
        tensors = load_file(table.file)
        self._vectors = tensors[table.vectors].float()
        if table.mapping:
            self._vectors = self._vectors[tensors[table.mapping].long()]
        if table.weights:
            self._vectors = self._vectors * tensors[table.weights].float()[:, None]
        self._heads = heads_of(info)

    def encode(self, input_ids_NT: Ids) -> Vectors:
        """The vectors of one batch. Raises InputError for an id outside the table."""
        if input_ids_NT.size and not 0 <= input_ids_NT.min() <= input_ids_NT.max() < len(self._vectors):
            raise InputError(f"model {self.info.model!r} has {len(self._vectors):,} tokens, an id is {input_ids_NT.max()}.")
        with torch.inference_mode():
            ids = torch.from_numpy(np.ascontiguousarray(input_ids_NT, np.int64))
            vectors: Vectors = self._heads(functional.embedding_bag(ids, self._vectors, mode="mean")).numpy()
        return vectors
