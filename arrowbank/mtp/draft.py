"""The draft as a torch module.

    x_p = eh_proj · [enorm(embed(t)) ; hnorm(h_p)]    →    one decoder block, causal over the rows    →    norm    →    the trunk's head

The embedding comes first in the module, whatever order a checkpoint has. Embeddings and head are the trunk's own modules, and not
among the draft's parameters. Shapes: N windows of T rows, width H, vocabulary V.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn

from arrowbank.errors import InputError
from arrowbank.models.layers import find_blocks
from arrowbank.mtp.layouts import CANONICAL, ROLES, Layout, Side
from arrowbank.mtp.trunk import Trunk, one_block


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

    def __init__(self, trunk: Trunk, *, sparse: bool, dtype: torch.dtype | None = None, layout: Layout = CANONICAL) -> None:
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
