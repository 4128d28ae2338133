"""What several decoder blocks of a transformers model put out, and its last hidden states, in one pass: for target banks.

A hook on each wanted block copies what passes; the model itself is not changed, and hooks are there for a pass only. That the
hooks are where they should be is proved when the model is loaded: in one pass over a few tokens, what they catch must equal, to
the bit, what transformers gives as `output_hidden_states`. A model for which it does not is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from arrowbank.bank.kinds.targets_bank import EMBEDDINGS
from arrowbank.errors import InputError
from arrowbank.models.describe import ModelInfo
from arrowbank.models.device import resolve_device
from arrowbank.models.layers import find_blocks
from arrowbank.models.load import load_reader, widen_where_needed
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.passes import Passes, passes_on

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int32]

_PROBE_TOKENS = 5


def load(config: ModelConfig, info: ModelInfo, layers: Sequence[int], norm: str, *, worker: int = 0) -> HiddenStates:
    """See arrowbank.models.load_taps."""
    device = torch.device(resolve_device(config, worker)[0])
    reader = load_taps_reader(config, info, device, layers, norm)
    widen_where_needed(reader, info, device)
    return HiddenStates(passes_on(device, Rounded(reader), info))


def load_taps_reader(config: ModelConfig, info: ModelInfo, device: torch.device, layers: Sequence[int], norm: str) -> TapReader:
    """The frozen model of `info` on `device` as a TapReader. Raises InputError if it cannot be loaded whole, or not tapped."""
    return load_reader(config, info, device, lambda part: TapReader(part, info, device, layers, norm))


class HiddenStates:
    """(N, T) int32 token ids → (N, T, L + 1, H) bfloat16 hidden states on the CPU: L tapped layers, then the last ones."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.info = passes.info

    def stream(self, batches: Iterable[Ids]) -> Iterator[torch.Tensor]:
        """The hidden states of each batch, in order, with later batches started before a result is waited for.

        Raises InputError for an id outside the vocabulary, or a row longer than the model's positions.
        """
        return self.passes.stream(batches)


class Rounded(nn.Module):
    """The hidden states of `reader` as bfloat16, rounded where they are computed."""

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        return self.reader(input_ids_NT).to(torch.bfloat16)  # type: ignore[no-any-return]


class TapReader(nn.Module):
    """(N, T) int64 ids → (N, T, L + 1, H) in the model's dtype: what blocks `layers` put out, then the last hidden states.

    Layer −1 is the embeddings, that is what goes into block 0. `norm` is "post" for last hidden states after the model's final
    norm, "pre" for those before it, what the last block puts out. `final_norm` is the module that leads from these to those,
    where there is one of its own. Making one runs a pass over a few tokens for the proof;
    raises InputError where the model cannot be tapped.
    """

    def __init__(self, model: Any, info: ModelInfo, device: torch.device, layers: Sequence[int], norm: str) -> None:
        super().__init__()
        self.model = model
        self.layers = tuple(layers)
        self.norm = norm
        self._info = info
        self.final_norm: nn.Module | None = None
        self._arguments: dict[str, Any] = {}
        if "use_cache" in inspect.signature(model.forward).parameters:
            self._arguments["use_cache"] = False
        blocks = find_blocks(model, info.num_layers)
        if blocks is None:
            raise self._refusal(f"it has no list of {info.num_layers} blocks, one a layer")
        self._blocks_name = next(name for name, module in model.named_modules() if module is blocks)
        probe = torch.arange(_PROBE_TOKENS, device=device).clamp(max=info.vocab_size - 1)[None]
        with torch.inference_mode():
            self._prove(probe)

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        return self.run(input_ids_NT)[0]

    def run(self, input_ids_NT: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tapped states, and what the model itself gave in the same pass."""
        return self._run(input_ids_NT, self.layers, self.norm)

    def _run(self, input_ids_NT: torch.Tensor, layers: Sequence[int], norm: str, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """The tapped states, and what the model itself gave."""
        blocks = self.model.get_submodule(self._blocks_name)
        taps = [*layers, len(blocks) - 1] if norm == "pre" else list(layers)
        caught = _Caught(input_ids_NT, len(layers) + 1, self._info, self._refusal)
        handles = [
            blocks[0].register_forward_pre_hook(partial(caught.entering, place), with_kwargs=True)
            if layer == EMBEDDINGS
            else blocks[layer].register_forward_hook(partial(caught.leaving, place))
            for place, layer in enumerate(taps)
        ]
        try:
            output = self.model(input_ids=input_ids_NT, **self._arguments, **arguments)
        finally:
            for handle in handles:
                handle.remove()
        if norm != "pre":
            caught.put(len(layers), output.last_hidden_state)
        return caught.whole(), output

    def _prove(self, probe: torch.Tensor) -> None:
        """InputError unless every layer's hook catches what transformers itself gives for that layer, in the same pass."""
        count = self._info.num_layers
        norms = _Norms(self.model, self._blocks_name)
        try:
            found, output = self._run(probe, range(EMBEDDINGS, count), "post", output_hidden_states=True)
        finally:
            norms.remove()
        states = output.hidden_states
        if not states or len(states) != count + 1:
            raise self._refusal(f"transformers gives {len(states or ())} hidden states for its {count} blocks, not {count + 1}")
        wanted = {layer: states[layer + 1] for layer in range(EMBEDDINGS, count - 1)}
        for layer, expected in wanted.items():
            if not _same(found[:, :, layer + 1], expected):
                raise self._refusal(
                    f"what {'goes into block 0' if layer == EMBEDDINGS else f'block {layer} puts out'} is not what transformers "
                    f"gives as hidden_states[{layer + 1}]"
                )
        if not _same(found[:, :, -1], states[-1]):
            raise self._refusal("its last hidden state is not the last one that transformers gives")
        uses_last_block = self.norm == "pre" or count - 1 in self.layers
        self.final_norm = norms.leading(found[:, :, count], found[:, :, -1])
        if uses_last_block and self.final_norm is None:
            raise self._refusal(
                "no module of its own leads from what its last block puts out to its last hidden states, so that nothing proves "
                "the former; leave that block out, and give --last-hidden-norm post"
            )

    def _refusal(self, why: str) -> InputError:
        return InputError(
            f"model {self._info.model!r}: this model cannot be tapped: {why}. Dump its hidden states with another engine, and use "
            "`arrowbank targets import`."
        )


class _Caught:
    """The hidden states of one pass, copied when they come by: whatever is done to them afterwards changes nothing."""

    def __init__(self, input_ids_NT: torch.Tensor, places: int, info: ModelInfo, refusal: Callable[[str], InputError]) -> None:
        shape = (*input_ids_NT.shape, places, info.hidden_size)
        self._states = torch.empty(shape, dtype=getattr(torch, info.dtype), device=input_ids_NT.device)
        self._filled: set[int] = set()
        self._refusal = refusal

    def entering(self, place: int, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.put(place, args[0] if args else kwargs.get("hidden_states"))

    def leaving(self, place: int, _block: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self.put(place, output[0] if isinstance(output, tuple) else output)

    def put(self, place: int, hidden: Any) -> None:
        there = self._states[:, :, place]
        if not isinstance(hidden, torch.Tensor) or hidden.shape != there.shape:
            found = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
            raise self._refusal(f"its blocks pass on {found}, not hidden states of shape {tuple(there.shape)}")
        if place in self._filled:
            raise self._refusal("it runs a block more than once")
        there.copy_(hidden)
        self._filled.add(place)

    def whole(self) -> torch.Tensor:
        if len(self._filled) != self._states.shape[2]:
            raise self._refusal("it does not run all of its blocks")
        return self._states


class _Norms:
    """The modules beside the list of blocks, watched during a pass: one of them is the final norm, whatever its name."""

    def __init__(self, model: nn.Module, blocks_name: str) -> None:
        beside = model.get_submodule(blocks_name.rpartition(".")[0])
        on_the_way = {blocks_name[:end] for end, letter in enumerate([*blocks_name, "."]) if letter == "."}
        named = {**dict(model.named_children()), **{f".{name}": child for name, child in beside.named_children()}}
        blocks = model.get_submodule(blocks_name)
        watched = {id(child): child for name, child in named.items() if child is not blocks and name not in on_the_way}
        self._seen: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
        self._handles = [module.register_forward_hook(self._note) for module in watched.values()]

    def _note(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
            self._seen.append((module, args[0].clone(), output.clone()))

    def leading(self, before: torch.Tensor, after: torch.Tensor) -> nn.Module | None:
        """The one that made `after` of `before` (an Identity, where nothing lies between the two), or None."""
        if _same(before, after):
            return nn.Identity()
        return next((module for module, given, made in self._seen if _same(before, given) and _same(after, made)), None)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in every value; NaN and Inf equal themselves."""
    if left.shape != right.shape or left.dtype is not right.dtype:
        return False
    return torch.allclose(left, right.to(left.device), rtol=0, atol=0, equal_nan=True)
