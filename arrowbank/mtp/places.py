"""Where each tensor of a checkpoint has its place in the draft's module.

Mostly one is the other. Two are not: experts, which a checkpoint may store one by one and transformers packs into one tensor each
for all gates and ups and for all downs; and a projection whose halves a family has the other way round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from arrowbank.errors import InputError
from arrowbank.mtp.layouts import FoundLayout, shown

_GATE_UP = "experts.gate_up_proj"
_DOWN = "experts.down_proj"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The checkpoint's tensor `stored` is the region `index` of the module's tensor `own`; `shape` is the region's.

    `swapped`: its first half along the columns is the module's second, and the other way round.
    """

    stored: str
    own: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    swapped: bool = False

    def read(self, own: torch.Tensor) -> torch.Tensor:
        """What is stored of the module's tensor."""
        part = own[self.index] if self.index else own
        return part.roll(part.shape[-1] // 2, dims=-1) if self.swapped else part

    def write(self, own: torch.Tensor, stored: torch.Tensor) -> None:
        """Copy what is stored into the module's tensor, converted to its dtype and device."""
        part = own[self.index] if self.index else own
        part.copy_(stored.roll(stored.shape[-1] // 2, dims=-1) if self.swapped else stored)


def find_places(found: FoundLayout, own: Mapping[str, tuple[int, ...]], names: Collection[str] | None) -> list[Place]:
    """The places of all the draft's tensors, whose `own` names and shapes are given, under the checkpoint's `names`.

    Without `names` (a draft that was not in a checkpoint before) experts are stored one by one, as trunks are.
    Raises InputError, naming them, for tensors that the draft needs and the checkpoint lacks, and for those it has too many.
    """
    places = [place for name, shape in own.items() for place in _places(found, name, shape, names)]
    if names is None:
        return places
    wanted = {place.stored for place in places}
    missing = [place.stored for place in places if place.stored not in names]
    extra = [name for name in found.own_tensors(names) if name not in wanted and not name.endswith("rotary_emb.inv_freq")]
    if missing or extra:
        parts = [f"lacks {shown(missing)}"] * bool(missing) + [f"has {shown(extra)} too many"] * bool(extra)
        raise InputError(
            f"the draft of layout {found.layout.family} at {found.prefix}* {' and '.join(parts)}, for a block of this trunk's kind. "
            "Expected exactly the tensors of one full-attention block of the trunk: is this the draft of another model?"
        )
    return places


def _places(found: FoundLayout, own: str, shape: tuple[int, ...], names: Collection[str] | None) -> Iterator[Place]:
    stored = found.stored(own)
    packed = own.endswith((_GATE_UP, _DOWN)) and len(shape) == 3
    if not packed or (names is not None and stored in names):
        yield Place(stored=stored, own=own, shape=shape, swapped=own == "eh_proj.weight" and found.layout.hidden_first)
        return
    experts, rows, columns = shape
    base = stored.rpartition(".")[0]
    for expert in range(experts):
        if own.endswith(_DOWN):
            yield Place(stored=f"{base}.{expert}.down_proj.weight", own=own, shape=(rows, columns), index=(expert,))
            continue
        half = rows // 2
        for part, where in (("gate_proj", slice(0, half)), ("up_proj", slice(half, rows))):
            yield Place(stored=f"{base}.{expert}.{part}.weight", own=own, shape=(half, columns), index=(expert, where))
