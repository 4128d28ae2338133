"""The hidden states of one layer out of any transformers model, without running what lies above it.

For most models `hidden_states[i]` is what goes into block i (0: the embeddings), and the last of them what comes out of the
model after its final norm. So below the last, a hook before block i takes its input and ends the pass there, and the blocks
above are let go. A model that counts otherwise, or whose blocks are not found (shared or nested ones), is run whole and asked
for all its states: which of the two it is, is tried out on a few tokens when the model is loaded.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from arrowbank.errors import InputError

_PROBE_IDS = ((0, 1, 2),)


class _Reached(Exception):
    """Carries the wanted hidden states out of the pass."""

    def __init__(self, hidden_NTD: torch.Tensor) -> None:
        super().__init__()
        self.hidden_NTD = hidden_NTD


class LayerReader(nn.Module):
    """(N, T) int64 ids → (N, T, D) hidden states of `layer`, 0 to `num_layers`; `model` stands on `device`, ready to run."""

    def __init__(self, model: nn.Module, device: torch.device, *, layer: int, num_layers: int, whole_model: bool) -> None:
        super().__init__()
        self.model = model
        self.layer = layer
        takes = inspect.signature(model.forward).parameters
        self.arguments: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
        if whole_model and "logits_to_keep" in takes:
            self.arguments["logits_to_keep"] = 1  # the head runs, but its output for every token is nobody's
        self.selects = whole_model or layer < num_layers
        if self.selects and not whole_model:
            blocks = _blocks(model, num_layers)
            self.selects = blocks is None or not self._stop_before(blocks, device)

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        if self.selects:
            states = self.model(input_ids=input_ids_NT, output_hidden_states=True, **self.arguments).hidden_states
            if not states:
                raise InputError(f"{type(self.model).__name__} does not give hidden states; use --backbone inner --layer -1")
            return states[self.layer]  # type: ignore[no-any-return]
        try:
            return self.model(input_ids=input_ids_NT, **self.arguments).last_hidden_state  # type: ignore[no-any-return]
        except _Reached as reached:
            return reached.hidden_NTD

    @torch.inference_mode()
    def _stop_before(self, blocks: nn.ModuleList, device: torch.device) -> bool:
        """End passes at the input of block `layer` if that is what the model's own list of hidden states has there."""
        probe = torch.tensor(_PROBE_IDS, device=device)
        wanted = self(probe)
        hook = blocks[self.layer].register_forward_pre_hook(_leave, with_kwargs=True)
        self.selects = False
        if not torch.equal(self(probe), wanted):
            hook.remove()
            return False
        del blocks[self.layer + 1 :]
        return True


def _blocks(model: nn.Module, num_layers: int) -> nn.ModuleList | None:
    """The outermost list of as many blocks as the model has layers."""
    lists = [(name.count("."), module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return next((module for _, module in sorted(lists, key=lambda item: item[0]) if len(module) == num_layers), None)


def _leave(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args[0] if args else kwargs["hidden_states"])
