"""What a causal language model says about each of its tokens: the hidden state there, and its most likely next tokens.

The model without its head runs once over a batch; the head then runs over a part of the rows at a time, so that a softmax over
the whole vocabulary is never there for all rows. The head is the model's own forward pass with the inner part's answer put in
its place: whatever a model does to its logits (a cap, a scale) is done here too. That this gives the logits of a plain forward
pass, to the bit, is proved over a few tokens when the model is loaded; a model for which it does not is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from arrowbank.errors import InputError
from arrowbank.models.describe import ModelInfo, describe, read_config, text_part
from arrowbank.models.device import resolve_device
from arrowbank.models.load import load_reader, widen_where_needed
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.passes import Passes, passes_on
from arrowbank.models.taps import TapReader, load_taps_reader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int32]


# Rows that the head takes at a time. Parts are of nearly equal size: a matrix product of a few rows would have other last bits.
# In 16 bits a part may be large, and has to be: a CPU lays the head's weights out anew for every product.
HEAD_ROWS = {torch.float32: 256}
HEAD_ROWS_16 = 2048

# Values of a softmax at a time: on a CPU they stay in a core's cache.
SOFTMAX_VALUES = {"cpu": 1 << 18, "cuda": 1 << 26}

_PROBE_TOKENS = 6
_SAME_PAST = 32  # units of rounding: experts sum in another order when another token is among theirs


@dataclass(frozen=True)
class TrunkStates:
    """What the model says about a batch, on the CPU: hidden [N, T, H] in the stored dtype (see `stored_dtype`), topk_ids [N, T, k]
    int32 and topk_probs [N, T, k] float32, most likely first, tail_mass [N, T] float32."""

    hidden: torch.Tensor
    topk_ids: torch.Tensor
    topk_probs: torch.Tensor
    tail_mass: torch.Tensor


def stored_dtype(info: ModelInfo) -> str:
    """How hidden states of a model are kept: float16 of one that computes in it, bfloat16 of any other."""
    return "float16" if info.dtype == "float16" else "bfloat16"


def end_of_text(config: ModelConfig, info: ModelInfo) -> int:
    """The id that the model's config calls the end of a text (the first, where it names several), else its padding, else 0."""
    text_config = text_part(read_config(info.folder, trust_remote_code=config.trust_remote_code))
    for name in ("eos_token_id", "pad_token_id"):
        found = getattr(text_config, name, None)
        found = found[0] if isinstance(found, list) and found else found
        if isinstance(found, int) and 0 <= found < info.vocab_size:
            return found
    return 0


def require_causal(config: ModelConfig, info: ModelInfo) -> None:
    """InputError for a model whose class has no head, or looks both ways: by its name, before any weight is loaded. Code that
    comes with a model is looked at when it runs."""
    from transformers.models.auto import modeling_auto as auto

    if config.trust_remote_code:
        return
    named = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    known = {
        name for mapping in named for names in mapping.values() for name in ((names,) if isinstance(names, str) else names)
    }
    both = read_config(info.folder, trust_remote_code=False).is_encoder_decoder
    if both or info.architecture not in known:
        raise _refusal(info, "it has an encoder and a decoder" if both else "that is no causal language model with its head")


def load_trunk(config: ModelConfig, topk: int, norm: str, *, worker: int = 0, info: ModelInfo | None = None) -> TrunkPasses:
    """Load the causal language model of `config`, whose backbone must be "outer", as a trunk: (N, T) int32 token ids → hidden
    states after its final norm (`norm` "post") or before it ("pre"), and the `topk` most likely next tokens of every row.

    `worker` picks the GPU, and `info` saves describing the model again, as for `arrowbank.models.load_encoder`. Raises
    InputError for whatever of the model, the device or the options cannot be used, and for a model that is none.
    """
    info = info or describe(config)
    device = torch.device(resolve_device(config, worker)[0])
    reader = load_reader(config, info, device, lambda model: TrunkReader(model, info, device, topk, norm))
    widen_where_needed(reader, info, device)
    return TrunkPasses(passes_on(device, reader, info))


def load_layers(config: ModelConfig, layers: Sequence[int], *, worker: int = 0, info: ModelInfo | None = None) -> Passes:
    """Load the model of `config` for passes (N, T) ids → (N, T, L, H) float16: what decoder blocks `layers` put out, before any
    norm. A value past float16's range becomes Inf, for the caller to refuse. Raises what `arrowbank.models.load_taps` raises."""
    info = info or describe(config)
    device = torch.device(resolve_device(config, worker)[0])
    reader = load_taps_reader(config, info, device, layers, "post")
    widen_where_needed(reader, info, device)
    return passes_on(device, _Layers(reader), info)


class TrunkPasses:
    """(N, T) int32 token ids → TrunkStates."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.info = passes.info

    def stream(self, batches: Iterable[Ids]) -> Iterator[TrunkStates]:
        """What the model says about each batch, in order, with later batches started before a result is waited for.

        Raises InputError for an id outside the vocabulary, or a row longer than the model's positions.
        """
        return (TrunkStates(*tensors) for tensors in self.passes.stream_all(batches))


class _Layers(nn.Module):
    """(N, T) ids → (N, T, L, H) float16: the tapped layers of a TapReader alone. A value past float16's range becomes Inf."""

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        return self.reader(input_ids_NT)[:, :, :-1].to(torch.float16)  # type: ignore[no-any-return]


class TrunkReader(nn.Module):
    """(N, T) int64 ids → the tensors of TrunkStates. `norm` is "post" for hidden states after the model's final norm, "pre" for
    those before it. Making one runs a few passes over a few tokens for the proofs; raises InputError where they fail.
    """

    def __init__(self, model: Any, info: ModelInfo, device: torch.device, topk: int, norm: str) -> None:
        super().__init__()
        self.model = model
        self.topk = topk
        self._info = info
        inner = model.get_decoder() if hasattr(model, "get_decoder") else None
        if inner is None or inner is model or model.get_output_embeddings() is None:
            raise _refusal(self._info, "it has no LM head over a decoder of its own")
        self._inner_name = next(name for name, module in model.named_modules() if module is inner)
        self._outer_arguments, self._inner_arguments = _no_cache(model), _no_cache(inner)
        self.taps = TapReader(inner, info, device, (), "pre") if norm == "pre" else None
        self._dtype = getattr(torch, stored_dtype(info))
        probe = torch.arange(_PROBE_TOKENS, device=device).clamp(max=info.vocab_size - 1)[None]
        with torch.inference_mode():
            self._prove(probe)

    def forward(self, input_ids_NT: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, output = self._run(input_ids_NT)
        return hidden.to(self._dtype), *self._most_likely(input_ids_NT, output)

    def _run(self, input_ids_NT: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The hidden states that are kept, and what the inner part gives."""
        if self.taps is not None:
            states, output = self.taps.run(input_ids_NT)
            return states[:, :, 0], output
        output = self.model.get_submodule(self._inner_name)(input_ids=input_ids_NT, **self._inner_arguments)
        return output.last_hidden_state, output

    def _most_likely(self, input_ids_NT: torch.Tensor, output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids and probabilities [N, T, k] of the most likely next tokens, and the mass [N, T] of all others."""
        rows, length = input_ids_NT.shape
        ids = torch.empty((rows, length, self.topk), dtype=torch.int32, device=input_ids_NT.device)
        probs = torch.empty((rows, length, self.topk), dtype=torch.float32, device=input_ids_NT.device)
        for start, stop in _even_parts(length, rows, HEAD_ROWS.get(output.last_hidden_state.dtype, HEAD_ROWS_16)):
            logits = self._logits(input_ids_NT[:, start:stop], output, output.last_hidden_state[:, start:stop])
            some = SOFTMAX_VALUES[logits.device.type] // logits.shape[-1]
            for first, last in _even_parts(stop - start, rows, max(1, some)):
                there = slice(start + first, start + last)
                softmax = torch.softmax(logits[:, first:last], dim=-1, dtype=torch.float32)
                probs[:, there], ids[:, there] = softmax.topk(self.topk)
        return ids, probs, (1 - probs.sum(dim=-1)).clamp(min=0)  # rounding may bring the sum just above 1

    def _logits(self, input_ids_NT: torch.Tensor, output: Any, hidden_NTH: torch.Tensor) -> torch.Tensor:
        """The head's logits for hidden states of the inner part, by the model's own forward pass."""
        inner = self.model.get_submodule(self._inner_name)
        with _answering(inner, type(output)(last_hidden_state=hidden_NTH)):
            return self.model(input_ids=input_ids_NT, **self._outer_arguments).logits  # type: ignore[no-any-return]

    def _prove(self, probe: torch.Tensor) -> None:
        """InputError unless the head gives what the whole model gives, and no token sees those behind it."""
        wanted = getattr(self.model(input_ids=probe, **self._outer_arguments), "logits", None)
        if wanted is None or wanted.shape[:2] != probe.shape:
            raise _refusal(self._info, "its forward pass gives no logits for every token")
        if wanted.shape[-1] < self.topk:
            raise InputError(
                f"--topk {self.topk}: model {self._info.model!r} has {wanted.shape[-1]} logits a token; give at most that."
            )
        hidden, output = self._run(probe)
        if hidden.shape != (*probe.shape, self._info.hidden_size):
            raise _refusal(self._info, f"its decoder gives hidden states of shape {tuple(hidden.shape)}")
        if not torch.equal(self._logits(probe, output, output.last_hidden_state), wanted):
            raise _refusal(self._info, "its logits do not follow from its decoder's last hidden states alone")
        other = probe.clone()
        other[0, -1] = 0
        seen = self.model(input_ids=other, **self._outer_arguments).logits
        bound = _SAME_PAST * torch.finfo(wanted.dtype).eps * float(wanted.abs().max())
        if not float((seen - wanted)[:, :-1].abs().max()) <= bound and torch.isfinite(wanted).all():
            raise _refusal(self._info, "a token's logits depend on the tokens behind it")


def _refusal(info: ModelInfo, why: str) -> InputError:
    return InputError(
        f"model {info.model!r} ({info.architecture}): {why}, so that it cannot be a trunk. Give a causal language model with its "
        "head, as its class in transformers (…ForCausalLM) saves it."
    )


def _even_parts(length: int, rows: int, most: int) -> Iterator[tuple[int, int]]:
    """`length` positions of so many rows each, cut into parts of nearly the same size and about `most` rows in all."""
    parts = min(length, -(-rows * length // most))
    return pairwise(length * part // parts for part in range(parts + 1))


def _no_cache(module: Any) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}


@contextmanager
def _answering(module: nn.Module, answer: Any) -> Iterator[None]:
    """Have `module` give `answer` to whatever it is called with."""
    before = vars(module).get("forward")  # some libraries put one of their own there
    vars(module)["forward"] = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        if before is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = before
