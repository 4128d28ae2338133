"""A tensor and what is stored of it: floats of 16 or 32 bits, int8 with a scale a row, NF4 with a scale a block of 64 values.

    keep    the tensor's own dtype: F32, F16 or BF16 (or, where it was stored by one of the two below, by that one again)
    bf16, fp16   one tensor of dtype BF16 or F16, rounded to nearest even
    int8    `name` I8 of the tensor's shape, `name.scale` F32 of the shape without its last dimension: value = code · scale,
            scale = the row's largest magnitude / 127 (1 for a row of zeros), codes from −127 to 127
    nf4     `name` U8 [⌈n/2⌉]: two codes a byte, the first one in the upper half, over all n values in C order; `name.absmax` F32
            [⌈n/64⌉]: the largest magnitude of each 64 of them; `name.shape` I64: the tensor's shape. value = table[code] · absmax

int8 and nf4 are for matrices; vectors (norms, biases) keep their dtype under them. The routers of expert layers keep theirs under any
codec: a rounding there changes which expert is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from arrowbank.errors import InputError

Codec = Literal["keep", "bf16", "fp16", "int8", "nf4"]
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

Stored = dict[str, torch.Tensor]


def check_codec(codec: str) -> None:
    """InputError for a codec that is not known."""
    if codec not in CODECS:
        raise InputError(f"codec is {codec!r}; expected one of {', '.join(CODECS)}")


def encode(name: str, values: torch.Tensor, codec: str, dtype: torch.dtype) -> Stored:
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


def _int8(name: str, values: torch.Tensor) -> Stored:
    scale = values.abs().amax(dim=-1) / INT8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (values / scale.unsqueeze(-1)).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return {name: codes.contiguous(), name + SCALE: scale.contiguous()}


def _nf4(name: str, values: torch.Tensor) -> Stored:
    flat = values.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    absmax = blocks.abs().amax(dim=1)
    table = torch.tensor(NF4_TABLE, dtype=torch.float32, device=values.device)
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / torch.where(absmax > 0, absmax, torch.ones_like(absmax)).unsqueeze(1), middles)
    codes = codes.view(-1)[: flat.numel() + flat.numel() % 2].view(-1, 2)
    packed = ((codes[:, 0] << 4) | codes[:, 1]).to(torch.uint8)
    return {name: packed, name + ABSMAX: absmax, name + SHAPE: torch.tensor(values.shape, dtype=torch.int64)}
