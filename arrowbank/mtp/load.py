"""A checkpoint's tensors → a draft, or, where a model has none, a draft that starts as the trunk's last block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from arrowbank.errors import InputError
from arrowbank.mtp.checkpoint import Checkpoint, TensorPlace, find_places
from arrowbank.mtp.draft import Draft, DraftOrigin, Trunk, trunk_of
from arrowbank.mtp.layouts import CANONICAL, FoundLayout

_PROBE_ROWS = 3


def load_draft(model: Any, folder: Path, *, dtype: torch.dtype | None = None, number: int = 0) -> Draft:
    """The draft stored in `folder`, over `model`: its trunk, a language model of transformers with its head.

    `folder` may be another checkpoint than the trunk's (--draft-from). dtype: the trunk's where None. number: which draft of
    several. It is fed what the checkpoint's record says, else what its family is fed. Raises InputError if there is no draft, its
    layout is not known, or its tensors are not those of a block of this trunk.
    """
    checkpoint = Checkpoint(folder)
    found = checkpoint.layout(number)
    trunk = model if isinstance(model, Trunk) else trunk_of(model)
    sparse = any(".experts." in name for name in checkpoint.names if name.startswith(found.block))
    draft = Draft(trunk, sparse=sparse, dtype=dtype, layout=found.layout)
    own = draft.tensors()
    places = find_places(found, {name: tuple(tensor.shape) for name, tensor in own.items()}, checkpoint.names)
    check_shapes(checkpoint, places)
    _fill(own, places, checkpoint)
    draft.origin = DraftOrigin(init="checkpoint", family=found.layout.family, notes=_notes(checkpoint, found))
    written = (checkpoint.record() or {}).get("draft")
    if isinstance(written, dict):  # by save_draft: what it was fed need not be the family's
        draft.feed(hidden=written.get("hidden"), recycle=written.get("recycle"))
    check_plain(draft)
    return draft


def init_from_last_block(model: Any, *, dtype: torch.dtype | None = None) -> Draft:
    """A draft of the canonical family whose block is the trunk's last one with full attention, for a model without a draft.

    All its norms are the trunk's final norm, and eh_proj is half the embedding plus half the hidden state, both normed: it has to
    be trained with its projection. Raises InputError for a trunk whose blocks are not plain floats.
    """
    trunk = model if isinstance(model, Trunk) else trunk_of(model)
    block = trunk.blocks[trunk.template].state_dict()
    draft = Draft(trunk, sparse=any("experts." in name for name in block), dtype=dtype, layout=CANONICAL)
    own = {name.removeprefix("block."): tensor for name, tensor in draft.tensors().items() if name.startswith("block.")}
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in block.items()}:
        odd = sorted(set(block) ^ set(own)) or sorted(name for name in own if own[name].shape != block[name].shape)
        raise InputError(
            f"the trunk's block {trunk.template} ({type(trunk.blocks[trunk.template]).__name__}) cannot be copied into a draft: they "
            f"differ in {', '.join(odd[:4])}. Expected a block of plain weights; load the trunk without quantising it."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(block[name])
        half = torch.eye(trunk.hidden_size, dtype=draft.dtype, device=draft.eh_proj.weight.device) / 2
        draft.eh_proj.weight.copy_(torch.cat((half, half), dim=1))
    draft.feed(hidden="pre", recycle="pre")
    draft.origin = DraftOrigin(init="last block", family=CANONICAL.family)
    check_plain(draft)
    return draft


def check_shapes(checkpoint: Checkpoint, places: list[TensorPlace]) -> None:
    """InputError, by tensor, for a shape that is not the one of its place."""
    for place in places:
        shape = checkpoint.shape(place.stored)
        if shape != place.shape:
            raise InputError(
                f"{checkpoint.place[place.stored]}: tensor {place.stored} has shape {shape}; expected {place.shape} for this "
                "trunk. Give the draft of a model of this shape."
            )


def check_plain(draft: Draft) -> None:
    """InputError for a family whose model does more to its inputs than run its blocks on them (scales them, say)."""
    seen: list[torch.Tensor] = []
    inputs = torch.linspace(-1, 1, _PROBE_ROWS * draft.trunk.hidden_size, device=draft.trunk.device, dtype=draft.dtype)
    inputs = inputs.view(1, _PROBE_ROWS, -1)
    hooks = (
        draft.block.register_forward_pre_hook(lambda _, args, kwargs: seen.append(_first(args, kwargs)), with_kwargs=True),
        draft.block.register_forward_hook(
            lambda _, args, output: seen.append(output if torch.is_tensor(output) else output[0])
        ),
    )
    with torch.no_grad():
        last = draft.body(inputs_embeds=inputs, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    if len(seen) != 2 or not torch.equal(seen[0], inputs) or seen[1].data_ptr() != last.data_ptr():
        raise InputError(
            f"{type(draft.body).__name__} does more to its inputs than run blocks on them; no draft can be made for it"
        )


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    found: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _fill(own: Mapping[str, torch.Tensor], places: list[TensorPlace], checkpoint: Checkpoint) -> None:
    with torch.no_grad():
        for place in places:
            place.write(own[place.own], checkpoint.read(place.stored))


def _notes(checkpoint: Checkpoint, found: FoundLayout) -> tuple[str, ...]:
    """Says which of a draft's copies of embeddings and head are not copies of the trunk's: the trunk's are used all the same."""
    whose = {
        "embed_tokens.weight": ("embed_tokens.weight",),
        "shared_head.head.weight": ("lm_head.weight", "embed_tokens.weight"),
    }
    notes = []
    for name in found.layout.shared:
        stored = found.prefix + name
        if stored not in checkpoint.place:
            continue
        trunks = [
            other
            for end in whose[name]
            for other in sorted(checkpoint.names)
            if other.endswith(end) and not other.startswith(found.prefix)
        ]
        if trunks and not checkpoint.same(stored, trunks[0]):
            notes.append(f"{stored} differs from {trunks[0]}; the draft uses the trunk's, and its own stays as it is")
    return tuple(notes)
