"""Frozen models and tokenizers: where they lie, what they are, and the forward pass from token ids to one vector a text.

    config.py        ModelConfig: what was asked for
    source.py        a name → a local folder, and the weight files in it
    fingerprint.py   a folder's content → a digest
    describe.py      ModelInfo: what that comes to (width, dtype, device, pooling …), known before any weight is loaded
    tokenizer.py     fast tokenizers and their fingerprint
    loading.py       ModelInfo → a torch module that maps ids to hidden states
    pooling.py       hidden states → one vector a text
    encoder.py       the passes: on the cores of a CPU, or on a GPU with one batch of look-ahead

Importing this package pulls in neither torch nor transformers; the functions do when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arrowbank.models.config import ModelConfig
from arrowbank.models.describe import ModelInfo, describe
from arrowbank.models.fingerprint import model_fingerprint
from arrowbank.models.source import resolve_model
from arrowbank.models.tokenizer import load_tokenizer, tokenizer_fingerprint

if TYPE_CHECKING:
    from arrowbank.models.encoder import Encoder

__all__ = [
    "ModelConfig",
    "ModelInfo",
    "describe",
    "load_encoder",
    "load_tokenizer",
    "model_fingerprint",
    "resolve_model",
    "tokenizer_fingerprint",
]


def load_encoder(config: ModelConfig, *, worker: int = 0, info: ModelInfo | None = None) -> Encoder:
    """Load the model of `config` and return its encoder: (N, T) int32 token ids → (N, D) float32 vectors.

    `worker` picks the GPU (`cuda:{worker % count}`) where the device is not named; `info`, if the caller has it from
    `describe(config)`, saves reading the weights once more for their fingerprint. Raises InputError for whatever of
    the model, the device or the options cannot be used.
    """
    from arrowbank.models import encoder

    return encoder.load(config, info or describe(config), worker=worker)
