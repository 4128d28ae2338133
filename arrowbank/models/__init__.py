"""Frozen models and tokenizers: where they lie, what they are, and the forward pass from token ids to one vector a text, or to
hidden states.

    model_config.py  ModelConfig: what was asked for
    model_folder.py  a name → a local folder, the weight files in it, and a digest of its content
    sentence_folder.py  what a sentence-transformers folder asks for beside its transformer
    describe.py      ModelInfo: what that comes to (width, dtype, device, pooling …), known before any weight is loaded; TextRules
    tokenizer.py     fast tokenizers and their fingerprint
    load.py          ModelInfo → a torch module that maps ids to hidden states
    pooling.py       hidden states → one vector a text
    passes.py        batches through a module: on the cores of a CPU, or on a GPU with one batch of look-ahead
    encoder.py       passes → one vector a text
    taps.py          passes → what several decoder blocks put out, for target banks
    vllm_*.py        the same from vLLM, in a process of its own or a server; engine_probe.py compares it with transformers

Importing this package pulls in neither torch nor transformers; the functions do when they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from arrowbank.models.describe import DEFAULT_TOKENS, ModelInfo, TextRules, describe, text_rules
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.model_folder import local_model, model_fingerprint, resolve_model
from arrowbank.models.sentence_folder import NO_LIMIT
from arrowbank.models.tokenizer import encode_texts, load_tokenizer, tokenizer_fingerprint

if TYPE_CHECKING:
    from arrowbank.models.encoder import ModelEncoder, TableEncoder
    from arrowbank.models.taps import HiddenStates

__all__ = [
    "DEFAULT_TOKENS",
    "NO_LIMIT",
    "ModelConfig",
    "ModelInfo",
    "TextRules",
    "describe",
    "encode_texts",
    "load_encoder",
    "load_taps",
    "load_tokenizer",
    "local_model",
    "model_fingerprint",
    "require_loadable",
    "resolve_model",
    "text_rules",
    "tokenizer_fingerprint",
]


def load_encoder(
    config: ModelConfig, *, worker: int = 0, info: ModelInfo | None = None, skip: int = 0
) -> ModelEncoder | TableEncoder:
    """Load the model of `config` and return its encoder: (N, T) int32 token ids → (N, D) float32 vectors.

    `worker` picks the GPU (`cuda:{worker % count}`) where the device is not named; `info`, if the caller has it from
    `describe(config)`, saves reading the weights once more for their fingerprint; the first `skip` tokens of a text are not
    pooled. Raises InputError for whatever of the model, the device or the options cannot be used.
    """
    from arrowbank.models import encoder

    return encoder.load(config, info or describe(config), worker=worker, skip=skip)


def require_loadable(config: ModelConfig, info: ModelInfo) -> None:
    """Raise InputError where transformers cannot load the model of `info` whole, or the modules of its folder cannot be loaded. No value of
    the model's weights is read."""
    from arrowbank.models import load, pooling

    load.require_loadable(config, info)
    pooling.heads_of(info)


def load_taps(
    config: ModelConfig, layers: Sequence[int], norm: str, *, worker: int = 0, info: ModelInfo | None = None
) -> HiddenStates:
    """Load the model of `config` and return its taps: (N, T) int32 token ids → (N, T, L + 1, H) bfloat16 hidden states.

    The first L are what decoder blocks `layers` put out (−1: what goes into block 0), the last ones the model's last hidden
    states, after its final norm (`norm` "post") or before it ("pre"). `worker` and `info` are as for `load_encoder`. Raises
    InputError for whatever of the model, the device or the options cannot be used, and for a model that cannot be tapped.
    """
    from arrowbank.models import taps

    return taps.load(config, info or describe(config), layers, norm, worker=worker)
