"""Families of checkpoints: under which names a draft lies there, and what it is fed.

A family is a row of LAYOUTS, nothing else. transformers drops these tensors when it loads a model, so they are read straight from
the safetensors. Tensors that look like a draft's but fit no row are refused: a draft read by a wrong guess accepts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from arrowbank.errors import InputError

Side = Literal["post", "pre"]

ROLES = ("eh_proj", "enorm", "hnorm", "norm")
_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class DraftLayout:
    """How one family names a draft's tensors, all below a prefix. H is the model's width, V its vocabulary.

    prefixes       what all names begin with, the first that is found; {N} is the trunk's number of layers, {i} the draft's number
    eh_proj        the projection of both inputs, [H, 2H]
    enorm, hnorm   the norms of the embedding and of the hidden state, [H]: of the trunk's own kind, so (1 + w) where its are
    norm           the norm before the head, [H]
    block          what the names of the decoder block's tensors begin with; after it they are the trunk's own
    shared         copies of the trunk's embeddings and head, [V, H], which some families store again: neither read nor changed
    hidden_first   whether eh_proj takes the hidden state in its first H columns, and not the embedding
    hidden         whether the draft is fed the trunk's hidden state after ("post") or before ("pre") the trunk's final norm
    recycle        whether a chain is fed the draft's own state after or before the draft's norm
    """

    family: str
    prefixes: tuple[str, ...]
    eh_proj: str
    enorm: str
    hnorm: str
    norm: str
    block: str
    shared: tuple[str, ...] = ()
    hidden_first: bool = False
    hidden: Side = "post"
    recycle: Side = "post"

    def names(self) -> dict[str, str]:
        """Own name → name below the prefix, of all tensors outside the block."""
        return {f"{role}.weight": getattr(self, role) for role in ROLES}


CANONICAL = DraftLayout(
    family="canonical",
    prefixes=("model.mtp.", "model.language_model.mtp."),
    eh_proj="eh_proj.weight",
    enorm="enorm.weight",
    hnorm="hnorm.weight",
    norm="norm.weight",
    block="layers.0.",
)
LAYOUTS = (
    DraftLayout(
        family="qwen3-next",
        prefixes=("mtp.",),
        eh_proj="fc.weight",
        enorm="pre_fc_norm_embedding.weight",
        hnorm="pre_fc_norm_hidden.weight",
        norm="norm.weight",
        block="layers.0.",
    ),
    DraftLayout(
        family="deepseek-v3",
        prefixes=("model.layers.{N}.", "model.language_model.layers.{N}.", "language_model.model.layers.{N}."),
        eh_proj="eh_proj.weight",
        enorm="enorm.weight",
        hnorm="hnorm.weight",
        norm="shared_head.norm.weight",
        block="",
        shared=("shared_head.head.weight", "embed_tokens.weight"),
        recycle="pre",
    ),
    CANONICAL,
    DraftLayout(
        family="mimo",
        prefixes=("model.mtp_layers.{i}.",),
        eh_proj="input_proj.weight",
        enorm="token_layernorm.weight",
        hnorm="hidden_layernorm.weight",
        norm="final_layernorm.weight",
        block="",
        hidden_first=True,
        hidden="pre",
    ),
)


@dataclass(frozen=True, kw_only=True)
class FoundLayout:
    """A layout with its prefix filled in: `stored(own)` is a checkpoint's name for one of the draft's own."""

    layout: DraftLayout
    prefix: str

    def stored(self, own: str) -> str:
        """The checkpoint's name of `own`: eh_proj.weight, enorm.weight, hnorm.weight, norm.weight or block.<the trunk's name>."""
        inside = self.layout.names().get(own)
        return self.prefix + (self.layout.block + own.removeprefix("block.") if inside is None else inside)

    @property
    def block(self) -> str:
        """What the names of the block's tensors begin with."""
        return self.prefix + self.layout.block

    def own_tensors(self, names: Collection[str]) -> list[str]:
        """Those of `names` that are this draft's, without the shared copies."""
        shared = {self.prefix + name for name in self.layout.shared}
        return sorted(name for name in names if name.startswith(self.prefix) and name not in shared)


def find_layout(names: Collection[str], num_layers: int, *, where: object, number: int = 0) -> FoundLayout:
    """The layout of the draft among a checkpoint's tensor `names`; `num_layers` is its trunk's, `number` which draft of several.

    Raises InputError if there is no draft (and says --init), or one of a layout that is not known, naming its tensors.
    """
    found = match_layout(names, num_layers, number=number)
    if found:
        return found
    suspects = sorted(name for name in names if looks_like_a_draft(name, num_layers))
    if not suspects:
        raise InputError(
            f"{where} has no tensors of an MTP draft among its {len(names)}, and none is made up. Give --init to start one from the "
            "trunk's last block, or --draft-from with a checkpoint that has one."
        )
    expected = "; ".join(f"{layout.family}: {layout.prefixes[0]}{layout.eh_proj} …" for layout in LAYOUTS)
    raise InputError(
        f"{where}: an MTP draft in a layout that is not known: {shown(suspects)}. Expected one of: {expected} "
        f"(N = {num_layers} layers), whole. Rename the tensors to one of these, or give --init to start a new draft."
    )


def match_layout(names: Collection[str], num_layers: int, *, number: int = 0) -> FoundLayout | None:
    """The first layout all of whose tensors outside the block are among `names`."""
    for layout in LAYOUTS:
        for pattern in layout.prefixes:
            prefix = pattern.format(N=num_layers + number, i=number)
            inside = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
            if set(layout.names().values()) <= inside:
                return FoundLayout(layout=layout, prefix=prefix)
    return None


def looks_like_a_draft(name: str, num_layers: int) -> bool:
    """Whether a tensor's name says that it belongs to some draft: a block beyond the trunk's, or what such blocks are called."""
    beyond = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if re.search(r"(?:^|[._])(?:mtp|nextn|eh_proj|enorm|hnorm|shared_head)(?:[._]|\d|$)", name):
        return True
    visual = any(part in name for part in ("visual", "vision", "audio"))
    return beyond is not None and not visual and int(beyond[1]) >= num_layers


def shown(names: Collection[str]) -> str:
    """The first few of `names`, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")
