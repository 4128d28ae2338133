"""How well a causal language model expects tokens that are there already: the negative log-likelihood of chosen positions."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arrowbank.errors import InputError
from arrowbank.models.describe import ModelInfo
from arrowbank.models.device import resolve_device
from arrowbank.models.load import load_reader, widen_where_needed
from arrowbank.models.model_config import ModelConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray


class CausalModel:
    """A frozen causal language model with its head. Raises InputError for a model that gives no logits."""

    def __init__(self, config: ModelConfig, info: ModelInfo) -> None:
        self.info = info
        self.device = torch.device(resolve_device(config)[0])
        self._model: Any = load_reader(config, info, self.device, lambda model: model)
        widen_where_needed(self._model, info, self.device)
        self._selects = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        if self._model.get_output_embeddings() is None:
            raise InputError(f"model {info.model!r} has no LM head. Give a causal language model.")

    def nll(self, input_ids_NT: NDArray[np.integer[Any]], start: int, stop: int) -> NDArray[np.float32]:
        """−ln p of tokens start … stop − 1 of each row, given all before them: [N, stop − start] float32, in nats.

        Only the logits of those positions are computed. Raises InputError for ids past the vocabulary, or rows longer than the
        model's positions.
        """
        self._check(input_ids_NT)
        ids = torch.from_numpy(input_ids_NT.astype(np.int64)).to(self.device)
        rows = torch.arange(start - 1, stop - 1, device=self.device)
        keep = {"logits_to_keep": rows} if self._selects else {}
        try:
            with torch.inference_mode():
                logits = self._model(input_ids=ids, use_cache=False, **keep).logits
                logits = logits if self._selects else logits[:, rows]
                expected = torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, start:stop, None])
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{self.device} has no memory left for {' x '.join(map(str, input_ids_NT.shape))} tokens: {error}\n"
                "Lower --token-budget, or use --load-in-4bit."
            ) from error
        found: NDArray[np.float32] = -expected.squeeze(2).cpu().numpy()
        return found

    def _check(self, input_ids_NT: NDArray[np.integer[Any]]) -> None:
        highest, length, limit = int(input_ids_NT.max()), input_ids_NT.shape[1], self.info.max_positions
        if highest >= self.info.vocab_size:
            raise InputError(
                f"token id {highest}, but model {self.info.model!r} has a vocabulary of {self.info.vocab_size}. Make the tokens with "
                "its tokenizer."
            )
        if limit is not None and length > limit:
            raise InputError(
                f"rows of {length} tokens, but model {self.info.model!r} has {limit} positions. Give shorter ones."
            )
