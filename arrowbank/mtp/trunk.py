"""What a draft shares with its trunk, found in the loaded model, and a decoder block of the trunk's own kind.

The block is not built by itself but as the one layer of a model of the trunk's class: so rotary embeddings, causal mask, attention
kernels and expert layers are those of transformers' own model, whichever family it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from arrowbank.errors import InputError
from arrowbank.models.layers import find_blocks

_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
_PROBE_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """The parts of a loaded language model: all of them the model's own, frozen, none copied.

    decoder is what reads ids and gives hidden states [N, T, H]; blocks are its layers; norm its final norm, called norm_name;
    embed maps ids to [N, T, H]; head maps [N, T, H] to logits [N, T, V]; config is the decoder's.
    """

    decoder: Any
    blocks: nn.ModuleList
    norm: nn.Module
    norm_name: str
    embed: nn.Module
    head: nn.Linear
    config: Any

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """What the trunk computes in: its head's dtype."""
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its head stands."""
        return self.head.weight.device

    @property
    def template(self) -> int:
        """The index of the last block with full attention (of the last block where the config does not tell them apart)."""
        kinds = getattr(self.config, "layer_types", None) or []
        full = [index for index, kind in enumerate(kinds) if kind == "full_attention" and index < len(self.blocks)]
        return full[-1] if full else len(self.blocks) - 1


def trunk_of(model: Any) -> Trunk:
    """The parts of `model`, a language model of transformers with its head; freezes it.

    Runs two passes over three tokens, to see that the head on the hidden states gives the model's logits.
    Raises InputError for a model without a head, or one that is not decoder, final norm and head in a row.
    """
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise InputError(f"{type(model).__name__} has no head over a vocabulary; expected a causal language model")
    model.eval().requires_grad_(False)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    blocks = find_blocks(decoder, decoder.config.num_hidden_layers)
    norm_name = next((name for name in _NORMS if isinstance(getattr(decoder, name, None), nn.Module)), None)
    if blocks is None or norm_name is None:
        what = "list of decoder blocks" if blocks is None else "final norm"
        raise InputError(
            f"{type(decoder).__name__}: its {what} is not found; expected a decoder-only model as transformers has them"
        )
    weight = getattr(head, "weight", None)
    if weight is None or weight.shape[-1] != decoder.config.hidden_size or not weight.is_floating_point():
        raise InputError(
            f"{type(model).__name__}: its head is {type(head).__name__} over {None if weight is None else tuple(weight.shape)}; "
            f"expected plain floats [V, {decoder.config.hidden_size}]. Load the model without quantising its head."
        )
    probe = torch.arange(_PROBE_TOKENS, device=weight.device)[None] % weight.shape[0]
    with torch.no_grad():
        found = head(decoder(input_ids=probe, use_cache=False).last_hidden_state)
        expected = model(input_ids=probe, use_cache=False).logits
    if not torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-2 * float(expected.float().abs().max())):
        raise InputError(
            f"{type(model).__name__} does something to its logits after the head (a scale, a cap); a draft that shares the head would "
            "not agree with it. Expected logits = head · hidden state."
        )
    return Trunk(
        decoder=decoder,
        blocks=blocks,
        norm=getattr(decoder, norm_name),
        norm_name=norm_name,
        embed=model.get_input_embeddings(),
        head=head,
        config=decoder.config,
    )


def one_block(trunk: Trunk, *, sparse: bool, dtype: torch.dtype) -> Any:
    """A model of the trunk's class with one full-attention block, no final norm and no vocabulary; its weights are not set yet.

    `sparse`: a layer of experts, in a family that has both kinds. Weights are of `dtype`, but for those that transformers keeps
    in float32 (an expert router's, say).
    """
    import transformers.initialization as initialization

    empty = getattr(initialization, "no_init_weights", nullcontext)
    config = _one_block_config(trunk.config, trunk.template, sparse=sparse)
    with torch.random.fork_rng(devices=[]), _making(dtype, trunk.device), empty():
        body = type(trunk.decoder)(config)
    setattr(body, trunk.norm_name, nn.Identity())
    body.set_input_embeddings(nn.Identity())
    kept = {*(getattr(body, "_keep_in_fp32_modules", None) or ()), *(getattr(body, "_keep_in_fp32_modules_strict", None) or ())}
    for name, tensor in body.state_dict(keep_vars=True).items():
        if any(part in name for part in kept):
            tensor.data = tensor.data.float()
    return body.eval()


def _one_block_config(config: Any, template: int, *, sparse: bool) -> Any:
    """A copy of a decoder's config for its layer `template` alone, with full attention."""
    single = copy.deepcopy(config)
    changes: dict[str, Any] = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "sliding_window": None,
        "use_sliding_window": False,
        "num_nextn_predict_layers": 0,
    }
    rope = getattr(single, "no_rope_layers", None)
    if rope:
        changes["no_rope_layers"] = [rope[template]]
    for name, value in changes.items():
        if getattr(single, name, None) is not None:
            setattr(single, name, value)
    single.num_hidden_layers, single.vocab_size, single.pad_token_id, single.use_cache = 1, 1, None, False
    single.tie_word_embeddings = False
    return single


@contextmanager
def _making(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """What is made inside has this dtype and stands on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
