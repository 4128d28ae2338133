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
from arrowbank.models.describe import ModelInfo

_PROBE_TOKENS = 3


class _Reached(Exception):
    """Carries the wanted hidden states out of the pass."""

    def __init__(self, hidden_NTD: torch.Tensor) -> None:
        super().__init__()
        self.hidden_NTD = hidden_NTD


class LayerReader(nn.Module):
    """(N, T) int64 ids → (N, T, D) hidden states of one layer of `model`, which stands on `device`, ready to run.

    Making one runs a pass or two over three tokens: to find out how the layer is had, to see that it gives D values a token
    (InputError if not), and to be past what libraries do and say on a first pass (bitsandbytes repacks weights in place).
    """

    def __init__(self, model: nn.Module, info: ModelInfo, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.layer = info.layer
        whole_model = info.backbone == "outer"
        takes = inspect.signature(model.forward).parameters
        self.arguments: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
        if whole_model and "logits_to_keep" in takes:
            self.arguments["logits_to_keep"] = 1  # the head runs, but its output for every token is nobody's
        self.selects = whole_model or info.layer < info.num_layers
        probe = torch.arange(_PROBE_TOKENS, device=device).clamp(max=info.vocab_size - 1)[None]
        with torch.inference_mode():
            hidden = self(probe)
            blocks = None if whole_model or not self.selects else find_blocks(model, info.num_layers)
            if blocks is not None:
                self._stop_before(blocks, probe, hidden)
        if hidden.shape != (1, _PROBE_TOKENS, info.hidden_size):
            raise InputError(
                f"model {info.model!r} gives hidden states of shape {tuple(hidden.shape)} at layer {info.layer} for {_PROBE_TOKENS} "
                f"tokens; expected (1, {_PROBE_TOKENS}, {info.hidden_size}). This layer of it cannot be banked."
            )

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

    def _stop_before(self, blocks: nn.ModuleList, probe: torch.Tensor, wanted: torch.Tensor) -> None:
        """End passes at the input of block `layer` if that is what the model's own list of hidden states has there."""
        hook = blocks[self.layer].register_forward_pre_hook(_leave, with_kwargs=True)
        self.selects = False
        if torch.equal(self(probe), wanted):
            del blocks[self.layer + 1 :]
        else:
            hook.remove()
            self.selects = True


def find_blocks(model: nn.Module, num_layers: int) -> nn.ModuleList | None:
    """The outermost list of as many blocks as the model has layers."""
    lists = [(name.count("."), module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return next((module for _, module in sorted(lists, key=lambda item: item[0]) if len(module) == num_layers), None)


def _leave(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args[0] if args else kwargs["hidden_states"])
