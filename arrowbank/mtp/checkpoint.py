"""Where each tensor of a checkpoint has its place in the draft's module.

Mostly one is the other. Two are not: experts, which a checkpoint may store one by one and transformers packs into one tensor each
for all gates and ups and for all downs; and a projection whose halves a family has the other way round."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from arrowbank.bank.manifest import parsed_json
from arrowbank.errors import InputError
from arrowbank.formats.safetensors import SafetensorsFile
from arrowbank.models.model_folder import read_json, weight_files
from arrowbank.mtp.heal_config import Codec
from arrowbank.mtp.layouts import FoundLayout, find_layout, match_layout, shown

_GATE_UP = "experts.gate_up_proj"
_DOWN = "experts.down_proj"


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
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


def find_places(found: FoundLayout, own: Mapping[str, tuple[int, ...]], names: Collection[str] | None) -> list[TensorPlace]:
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


def _places(found: FoundLayout, own: str, shape: tuple[int, ...], names: Collection[str] | None) -> Iterator[TensorPlace]:
    stored = found.stored(own)
    packed = own.endswith((_GATE_UP, _DOWN)) and len(shape) == 3
    if not packed or (names is not None and stored in names):
        yield TensorPlace(stored=stored, own=own, shape=shape, swapped=own == "eh_proj.weight" and found.layout.hidden_first)
        return
    experts, rows, columns = shape
    base = stored.rpartition(".")[0]
    for expert in range(experts):
        if own.endswith(_DOWN):
            yield TensorPlace(stored=f"{base}.{expert}.down_proj.weight", own=own, shape=(rows, columns), index=(expert,))
            continue
        half = rows // 2
        for part, where in (("gate_proj", slice(0, half)), ("up_proj", slice(half, rows))):
            yield TensorPlace(stored=f"{base}.{expert}.{part}.weight", own=own, shape=(half, columns), index=(expert, where))


CODECS: tuple[str, ...] = get_args(Codec)

SCALE, ABSMAX, SHAPE = ".scale", ".absmax", ".shape"
NF4_BLOCK = 64
INT8_MAX = 127
_ROUTERS = ("gate", "shared_expert_gate", "router")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = _FLOATS | {"I8": torch.int8, "U8": torch.uint8, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The quantiles of a normal distribution that NF4 is defined by, from −1 to 1.
NF4_TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

StoredTensors = dict[str, torch.Tensor]


def check_codec(codec: str) -> None:
    """InputError for a codec that is not known."""
    if codec not in CODECS:
        raise InputError(f"codec is {codec!r}; expected one of {', '.join(CODECS)}")


def encode(name: str, values: torch.Tensor, codec: str, dtype: torch.dtype) -> StoredTensors:
    """What is stored of the tensor `name`: `values`, of any float dtype and shape, by `codec`; `dtype` is the one to keep.

    Raises InputError for values that the codec cannot hold (Inf or NaN, or too large for float16).
    """
    if not bool(torch.isfinite(values).all()):
        raise InputError(
            f"tensor {name} has values that are Inf or NaN; expected finite ones. The draft is broken: it is not written."
        )
    values = values.detach()
    if is_router(name):
        codec = "keep"
    if codec in ("int8", "nf4") and values.dim() >= 2:
        return _int8(name, values.float()) if codec == "int8" else _nf4(name, values.float())
    plain = values.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(codec, dtype)).contiguous()
    if not bool(torch.isfinite(plain).all()):
        raise InputError(
            f"tensor {name} has the value {float(values.abs().max()):g}, too large for {str(plain.dtype).removeprefix('torch.')}; "
            "use another codec (bf16 holds it)."
        )
    return {name: plain}


def stored_bytes(name: str, shape: Sequence[int], codec: str, itemsize: int) -> int:
    """The bytes of what `encode` gives of a tensor of this shape; `itemsize` is that of the dtype to keep."""
    count = math.prod(shape)
    if is_router(name) or codec == "keep":
        return count * itemsize
    if codec == "int8" and len(shape) >= 2:
        return count + 4 * math.prod(shape[:-1])
    if codec == "nf4" and len(shape) >= 2:
        return (count + 1) // 2 + 4 * -(-count // NF4_BLOCK) + 8 * len(shape)
    return count * (itemsize if codec in ("int8", "nf4") else 2)


def is_router(name: str) -> bool:
    """Whether a tensor belongs to an expert layer's router."""
    parts = name.split(".")
    return len(parts) > 1 and parts[-2] in _ROUTERS


def stored_codec(name: str, dtypes: Mapping[str, str]) -> str | None:
    """By what the tensor `name` is stored, from all names' safetensors dtypes: keep, int8 or nf4; None where nothing here did."""
    if name + SCALE in dtypes and dtypes[name] == "I8":
        return "int8"
    if name + ABSMAX in dtypes and name + SHAPE in dtypes and dtypes[name] == "U8":
        return "nf4"
    return "keep" if dtypes[name] in _FLOATS else None


def is_part(name: str, names: Any) -> bool:
    """Whether `name` is a scale or shape that belongs to another of `names`."""
    return any(name.endswith(suffix) and name.removesuffix(suffix) in names for suffix in (SCALE, ABSMAX, SHAPE))


def decode(name: str, stored: Mapping[str, torch.Tensor], codec: str) -> torch.Tensor:
    """The tensor `name` out of what is stored of it: float32 from int8 and nf4, else as it is.

    Raises InputError, naming the part, if the parts do not belong together.
    """
    if codec == "int8":
        codes, scale = stored[name], stored[name + SCALE]
        _expect(name + SCALE, tuple(scale.shape), tuple(codes.shape[:-1]))
        return codes.float() * scale.float().unsqueeze(-1)
    if codec == "nf4":
        shape = tuple(int(size) for size in stored[name + SHAPE].tolist())
        count = math.prod(shape)
        _expect(name, tuple(stored[name].shape), ((count + 1) // 2,))
        _expect(name + ABSMAX, tuple(stored[name + ABSMAX].shape), (-(-count // NF4_BLOCK),))
        packed = stored[name].long()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)
        values = torch.tensor(NF4_TABLE, dtype=torch.float32)[codes[:count]]
        return (values * stored[name + ABSMAX].float().repeat_interleave(NF4_BLOCK)[:count]).view(shape)
    return stored[name]


def _expect(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise InputError(f"tensor {name} has shape {found}; expected {expected} for what it encodes. Write the draft again.")


def _int8(name: str, values: torch.Tensor) -> StoredTensors:
    scale = values.abs().amax(dim=-1) / INT8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (values / scale.unsqueeze(-1)).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return {name: codes.contiguous(), name + SCALE: scale.contiguous()}


def _nf4(name: str, values: torch.Tensor) -> StoredTensors:
    flat = values.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    absmax = blocks.abs().amax(dim=1)
    table = torch.tensor(NF4_TABLE, dtype=torch.float32, device=values.device)
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / torch.where(absmax > 0, absmax, torch.ones_like(absmax)).unsqueeze(1), middles)
    codes = codes.view(-1)[: flat.numel() + flat.numel() % 2].view(-1, 2)
    packed = ((codes[:, 0] << 4) | codes[:, 1]).to(torch.uint8)
    return {name: packed, name + ABSMAX: absmax, name + SHAPE: torch.tensor(values.shape, dtype=torch.int64)}


PROVENANCE = "arrowbank.mtp"
_SUFFIXES = {"keep": ("",), "int8": ("", SCALE), "nf4": ("", ABSMAX, SHAPE)}


class Checkpoint:
    """The weights under `folder`. Raises InputError for a folder without safetensors, or with a torn one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path: SafetensorsFile(path) for path in weight_files(folder) if path.suffix == ".safetensors"}
        self.place = {name: path for path, file in self.files.items() for name in file.tensors}
        self.dtypes = {name: self.files[path].tensors[name].dtype for name, path in self.place.items()}

    @cached_property
    def num_layers(self) -> int:
        """The number of the trunk's layers, from config.json."""
        config = read_json(self.folder / "config.json")
        texts = [
            config,
            *(config[key] for key in ("text_config", "llm_config", "language_config") if isinstance(config.get(key), dict)),
        ]
        found: list[Any] = [part["num_hidden_layers"] for part in texts if "num_hidden_layers" in part]
        if not found or type(found[-1]) is not int:
            raise InputError(f"{self.folder / 'config.json'} names no num_hidden_layers; expected the config of a text model")
        return int(found[-1])

    def layout(self, number: int = 0) -> FoundLayout:
        """The layout of the draft in here. Raises InputError if there is none, or one that is not known."""
        return find_layout(self.names, self.num_layers, where=self.folder, number=number)

    def known_layout(self, number: int = 0) -> FoundLayout | None:
        """The layout of the draft in here; None if there is none of a known one."""
        return match_layout(self.names, self.num_layers, number=number)

    @cached_property
    def names(self) -> set[str]:
        """All tensors' names, without the scales and shapes that belong to encoded ones."""
        return {name for name in self.place if not is_part(name, self.place)}

    def record(self) -> dict[str, Any] | None:
        """What `save_draft` wrote about the draft in here; None where it did not. InputError if it is not a JSON object."""
        for path, file in self.files.items():
            text = file.metadata.get(PROVENANCE)
            if text is None:
                continue
            try:
                return dict(parsed_json(text.encode()))
            except (ValueError, TypeError) as error:
                raise InputError(
                    f"{path}: its record {PROVENANCE!r} is not a JSON object ({error}). Write the draft again."
                ) from None
        return None

    def codec(self, name: str) -> str:
        """By what a tensor is stored: keep, int8 or nf4. Raises InputError for a dtype that a draft cannot be read from."""
        codec = stored_codec(name, self.dtypes)
        if codec is None:
            raise InputError(
                f"{self.place[name]}: tensor {name} is stored as {self.dtypes[name]}; expected F32, F16 or BF16, or the int8 or "
                "nf4 that arrowbank writes. Give a checkpoint whose draft is not quantised by another tool."
            )
        return codec

    def parts(self, name: str) -> list[str]:
        """The names of all that is stored of a tensor: itself, and where it is encoded its scale or shape."""
        return [name + suffix for suffix in _SUFFIXES[self.codec(name)]]

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values on the CPU, decoded where it is encoded (to float32), else in its own dtype."""
        return decode(name, {part: self.raw(part) for part in self.parts(name)}, self.codec(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, of its values."""
        if self.codec(name) == "nf4":
            return tuple(int(size) for size in self.raw(name + SHAPE).tolist())
        return self.files[self.place[name]].tensors[name].shape

    def raw(self, name: str) -> torch.Tensor:
        """What is stored under a name, as it is, on the CPU."""
        file = self.files[self.place[name]]
        tensor = file.tensors[name]
        values = torch.from_numpy(np.array(file.raw(tensor)))  # a copy: torch cannot have the map itself
        return values.view(DTYPES[tensor.dtype]).view(tensor.shape)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are stored with the same dtype, shape and bytes."""
        one, two = (self.files[self.place[each]] for each in (name, other))
        first, second = one.tensors[name], two.tensors[other]
        return (first.dtype, first.shape) == (second.dtype, second.shape) and np.array_equal(one.raw(first), two.raw(second))
