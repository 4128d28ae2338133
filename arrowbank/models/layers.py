"""The hidden states of one layer out of any transformers model, without running what lies above it.

`hidden_states[i]` is, by transformers' count, what goes into block i (0: the embeddings), and for the last i what comes out
of the model after its final norm. So below the last, a hook before block i takes its input and ends the pass there, and the
blocks above are let go. A model whose blocks are not found (shared or nested ones) is run whole and asked for all its states.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from arrowbank.errors import InputError


class _Reached(Exception):
    """Carries the wanted hidden states out of the pass."""

    def __init__(self, hidden_NTD: torch.Tensor) -> None:
        super().__init__()
        self.hidden_NTD = hidden_NTD


class LayerReader(nn.Module):
    """(N, T) int64 ids → (N, T, D) hidden states of `layer`, 0 to `num_layers`."""

    def __init__(self, model: nn.Module, *, layer: int, num_layers: int, whole_model: bool) -> None:
        super().__init__()
        self.model = model
        self.layer = layer
        takes = inspect.signature(model.forward).parameters
        self.arguments: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
        self.stops = not whole_model and layer < num_layers and _stop_before(model, layer, num_layers)
        self.selects = whole_model or (layer < num_layers and not self.stops)
        if self.selects:
            self.arguments["output_hidden_states"] = True
        if whole_model and "logits_to_keep" in takes:
            self.arguments["logits_to_keep"] = 1  # the head runs, but its output for every token is nobody's

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        try:
            output = self.model(input_ids=input_ids_NT, **self.arguments)
        except _Reached as reached:
            return reached.hidden_NTD
        if not self.selects:
            hidden: torch.Tensor = output.last_hidden_state
            return hidden
        if not output.hidden_states:
            raise InputError(f"{type(self.model).__name__} does not give hidden states; use --backbone inner --layer -1")
        return output.hidden_states[self.layer]  # type: ignore[no-any-return]


def _stop_before(model: nn.Module, layer: int, num_layers: int) -> bool:
    """Make the pass of `model` end with the input of block `layer`; False if no blocks are found."""
    lists = [(name.count("."), module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    blocks = next((module for _, module in sorted(lists, key=lambda item: item[0]) if len(module) == num_layers), None)
    if blocks is None:
        return False
    del blocks[layer + 1 :]
    blocks[layer].register_forward_pre_hook(_leave, with_kwargs=True)
    return True


def _leave(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args[0] if args else kwargs["hidden_states"])
