"""What a draft shares with its trunk, found in the loaded model, and a decoder block of the trunk's own kind.

The block is not built by itself but as the one layer of a model of the trunk's class: so rotary embeddings, causal mask, attention
kernels and expert layers are those of transformers' own model, whichever family it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn

from arrowbank.errors import InputError
from arrowbank.models.layers import find_blocks
from arrowbank.mtp.layouts import CANONICAL, ROLES, DraftLayout, Side

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


@dataclass(frozen=True, kw_only=True)
class DraftOutput:
    """The draft's hidden states [N, T, H], in the draft's dtype: before its norm, and after it (what the head takes)."""

    pre: torch.Tensor
    post: torch.Tensor

    def side(self, side: Side) -> torch.Tensor:
        """The one that a chain goes on from: post or pre."""
        return self.post if side == "post" else self.pre


@dataclass(frozen=True, kw_only=True)
class DraftOrigin:
    """Where a draft's first weights came from, for the record.

    init is "checkpoint" or "last block"; family the layout's; notes are lines a person should see.
    """

    init: str
    family: str
    notes: tuple[str, ...] = field(default=())

    def record(self) -> dict[str, Any]:
        """JSON-able."""
        return {"init": self.init, "family": self.family}


class Draft(nn.Module):
    """(N, T) int64 ids and (N, T, H) hidden states → DraftOutput. Made by `load_draft` and `init_from_last_block`.

    hidden and recycle say what it is to be fed: the trunk's state, and at later steps of a chain its own, "post" or "pre" norm.
    It stays in eval mode: a frozen trunk's dropout would only be noise. Its parameters are of `dtype`, in which it also computes;
    but on a GPU float32 weights over a 16-bit trunk run under torch.autocast.
    """

    def __init__(
        self, trunk: Trunk, *, sparse: bool, dtype: torch.dtype | None = None, layout: DraftLayout = CANONICAL
    ) -> None:
        super().__init__()
        self.dtype = dtype or trunk.dtype
        width = trunk.hidden_size
        self.eh_proj = nn.Linear(2 * width, width, bias=False, dtype=self.dtype, device=trunk.device)
        self.enorm, self.hnorm, self.norm = (
            copy.deepcopy(trunk.norm).to(device=trunk.device, dtype=self.dtype) for _ in range(3)
        )
        self.body = one_block(trunk, sparse=sparse, dtype=self.dtype)
        self.hidden: Side = layout.hidden
        self.recycle: Side = layout.recycle
        self.origin = DraftOrigin(init="nothing", family=layout.family)
        self._trunk = [trunk]  # in a list, so that its modules are not this one's
        self.eval()

    @property
    def trunk(self) -> Trunk:
        """The model that it drafts for."""
        return self._trunk[0]

    @property
    def block(self) -> nn.Module:
        """The decoder block."""
        blocks = find_blocks(self.body, 1)
        if blocks is None:
            raise InputError(
                f"{type(self.body).__name__} with one layer has no list of one block; this family cannot be drafted for"
            )
        return blocks[0]

    @property
    def head_weight(self) -> torch.Tensor:
        """The trunk's head, [V, H], in the trunk's dtype."""
        return self.trunk.head.weight

    @property
    def head_bias(self) -> torch.Tensor | None:
        """The head's bias, [V], if it has one."""
        return getattr(self.trunk.head, "bias", None)

    def forward(self, input_ids_NT: torch.Tensor, hidden_NTH: torch.Tensor) -> DraftOutput:
        """At chain step j row p takes token t_{p+j} and the hidden state of row p, and predicts token p + j + 1."""
        with torch.no_grad():
            embedded = self.trunk.embed(input_ids_NT).to(self.dtype)
        with self._precision():
            both = torch.cat((self.enorm(embedded), self.hnorm(hidden_NTH.to(self.dtype))), dim=-1)
            pre = self.body(inputs_embeds=self.eh_proj(both), use_cache=False).last_hidden_state
            return DraftOutput(pre=pre, post=self.norm(pre))

    def _precision(self) -> AbstractContextManager[Any]:
        """Weights that train are float32; on a GPU they multiply in the trunk's 16 bits, as they will when they are served."""
        if self.trunk.device.type != "cuda" or self.dtype is not torch.float32 or self.trunk.dtype is torch.float32:
            return nullcontext()
        return torch.autocast("cuda", self.trunk.dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint stores, by the draft's own names: eh_proj.weight, enorm.weight …, block.<the trunk's names>.

        The module's own tensors, not copies.
        """
        outside = {f"{role}.weight": getattr(self, role).weight for role in ROLES}
        return outside | {f"block.{name}": tensor for name, tensor in self.block.state_dict(keep_vars=True).items()}

    def train_only(self, *, projection: bool = False) -> list[nn.Parameter]:
        """Let block and norms train, and eh_proj if `projection`; the parameters that do, in a fixed order."""
        self.requires_grad_(True)
        self.eh_proj.requires_grad_(projection)
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def feed(self, *, hidden: Side | None = None, recycle: Side | None = None) -> Draft:
        """Set what it is fed, where it is not the family's default; itself. InputError for a word that is neither post nor pre."""
        for name, side in (("hidden", hidden), ("recycle", recycle)):
            if side is not None and side not in get_args(Side):
                raise InputError(f"{name} is {side!r}; expected post or pre")
            if side is not None:
                setattr(self, name, side)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of `tensors()` on the CPU: a snapshot."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors().items()}

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take a snapshot back. InputError for names or shapes that are not this draft's."""
        own = self.tensors()
        if set(own) != set(weights):
            names = ", ".join(sorted(set(own) ^ set(weights))[:6])
            raise InputError(f"a snapshot of another draft: the two differ in {names}. Start without it.")
        with torch.no_grad():
            for name, tensor in own.items():
                if tensor.shape != weights[name].shape:
                    found, expected = tuple(weights[name].shape), tuple(tensor.shape)
                    raise InputError(f"snapshot: tensor {name} has shape {found}; expected {expected}. Start without it.")
                tensor.copy_(weights[name])


def step_tokens(input_ids_NT: torch.Tensor, step: int, fill: int) -> torch.Tensor:
    """t_{p+step} at every row p, [N, T] int64; `fill` (EOS) past the window's end, where no row counts."""
    shifted = torch.full_like(input_ids_NT, fill, dtype=torch.int64)
    if step < input_ids_NT.shape[1]:
        shifted[:, : input_ids_NT.shape[1] - step] = input_ids_NT[:, step:]
    return shifted


def chain(
    draft: Draft, input_ids_NT: torch.Tensor, hidden_NTH: torch.Tensor, *, steps: int, fill: int
) -> Iterator[DraftOutput]:
    """The draft's output at chain steps 1 … `steps`, each from the one before; `hidden` is the trunk's, on the side it is fed."""
    for step in range(1, steps + 1):
        output: DraftOutput = draft(step_tokens(input_ids_NT, step, fill), hidden_NTH)
        yield output
        hidden_NTH = output.side(draft.recycle)


def round_steps(rows: int, *, steps: int, stride: int, offset: int) -> torch.Tensor:
    """The step that each row is of, [rows] int64: 1 … steps in a round, 0 outside of any. Rounds start at offset + i · stride.

    Raises InputError for a stride shorter than the chain.
    """
    if stride < steps:
        raise InputError(f"stride is {stride}, shorter than the chain of {steps}; expected at least {steps}, or 0 for none")
    if not 0 <= offset < stride:
        raise InputError(f"offset is {offset}; expected 0 to {stride - 1}, below the stride")
    place = torch.arange(rows) - offset
    step = place % stride + 1
    return torch.where((place >= 0) & (step <= steps), step, torch.zeros_like(step))


def rounds(
    draft: Draft, input_ids_NT: torch.Tensor, hidden_NTH: torch.Tensor, *, steps: int, stride: int, offset: int, fill: int
) -> tuple[torch.Tensor, DraftOutput]:
    """(the hidden states that rows are fed in rounds [N, T, H], the draft's output on them), after `steps` passes.

    Row q takes token t_{q+1} at any step. Rows of steps 2 … take the draft's output at row q − 1, all others keep the trunk's.
    Pass j fills the rows of step j in all rounds at once: so what row q takes was computed over rounds before it that were filled
    as far as step j − 1, and the output comes from rows all of which are filled.
    """
    tokens = step_tokens(input_ids_NT, 1, fill)
    step_T = round_steps(tokens.shape[1], steps=steps, stride=stride, offset=offset).to(tokens.device)
    fed = hidden_NTH.to(draft.dtype)
    output: DraftOutput = draft(tokens, fed)
    for step in range(2, steps + 1):
        rows = (step_T == step).nonzero().squeeze(1)
        fed = fed.index_copy(1, rows, output.side(draft.recycle)[:, rows - 1].to(fed.dtype))
        output = draft(tokens, fed)
    return fed, output
