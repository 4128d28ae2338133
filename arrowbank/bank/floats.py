"""bfloat16 as bits: NumPy and Arrow have no such type, so a bfloat16 is a uint16 here, the upper half of a float32.

Every conversion rounds once, to nearest even. Nothing here needs torch, but the fp8 codec and `bfloat16_tensor`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]

NAN = 0x7FC0
INFINITY = 0x7F80  # from here on, without the sign, a bfloat16 is Inf or NaN
MAGNITUDE = 0x7FFF
FP8_MAX = 448.0  # the largest e4m3 (fn: no infinities)

_PIECE = 1 << 17  # values looked at together: they stay in a core's cache


def bfloat16_bits(values: npt.NDArray[Any]) -> Bits:
    """Floats of 16, 32 or 64 bits as bfloat16 bits of the same shape, rounded to nearest even; NaN stays NaN, Inf stays Inf."""
    with np.errstate(over="ignore"):
        bits = _rounded_to_odd(values) if values.dtype.itemsize > 4 else values.astype(np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = NAN
    return rounded


def _rounded_to_odd(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """float64 as float32 bits whose lowest bit says that something was cut off: rounding these again rounds once."""
    near = values.astype(np.float32)
    bits = near.view(np.uint32)
    wide = near.astype(np.float64)
    bits = bits - (np.abs(wide) > np.abs(values)).astype(np.uint32)  # toward zero
    odd: npt.NDArray[np.uint32] = bits | (wide != values).astype(np.uint32)
    return odd


def float32_of(bits: Bits) -> npt.NDArray[np.float32]:
    """bfloat16 bits as the float32 values that they are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp8_table(exponent_bits: int) -> Bits:
    """All 256 values of an 8-bit float as bfloat16 bits, exactly: e4m3 (fn: no Inf, NaN at all ones) or e5m2 (IEEE)."""
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.where(exponent > 0, 1 + mantissa, mantissa) * 2.0 ** (np.maximum(exponent, 1) - bias)
    if exponent_bits == 5:
        value[exponent == 31] = np.where(mantissa[exponent == 31] > 0, np.nan, np.inf)
    else:
        value[(codes & 0x7F) == 0x7F] = np.nan
    return bfloat16_bits(np.where(codes >= 128, -value, value).astype(np.float32))


def all_finite(bits: Bits) -> bool:
    """Whether no value of a contiguous array is Inf or NaN. Reads it once, in pieces, without a copy of it all."""
    flat = bits.reshape(-1)
    scratch = np.empty(min(_PIECE, flat.size), np.uint16)
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        room = scratch[: piece.size]
        if piece.flags.aligned:
            np.bitwise_and(piece, MAGNITUDE, out=room)
        else:  # NumPy would take it value by value; copying the bytes first is much faster
            room.view(np.uint8)[:] = piece.view(np.uint8)
            np.bitwise_and(room, MAGNITUDE, out=room)
        if room.size and room.max() >= INFINITY:
            return False
    return True


def bfloat16_tensor(bits: Bits) -> Any:
    """bfloat16 bits as a torch tensor of the same shape, of its own memory."""
    import torch

    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def nonfinite(bits: Bits) -> npt.NDArray[np.bool_]:
    """Which values are Inf or NaN."""
    found: npt.NDArray[np.bool_] = (bits & MAGNITUDE) >= INFINITY
    return found


def fp8_encode(bits: Bits, groups: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """bfloat16 bits [S, groups·H], all finite, as e4m3 codes of the same shape and the scales [S, groups]: value = code · scale.

    The scale brings the largest magnitude of a group to e4m3's largest; a group of zeros has scale 1.
    """
    import torch

    values = torch.from_numpy(float32_of(bits)).view(len(bits), groups, bits.shape[1] // groups)
    scales = values.abs().amax(dim=2, keepdim=True) / FP8_MAX
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (values / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy().reshape(bits.shape), scales.squeeze(2).numpy()


def fp8_decode(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> Bits:
    """What `fp8_encode` gave, as bfloat16 bits of the codes' shape, rounded to nearest even."""
    width = codes.shape[1] // scales.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # of damaged scales: the checks say what is not finite
        values = float32_of(E4M3[codes]).reshape(*scales.shape, width) * scales[..., None]
    return bfloat16_bits(values.reshape(codes.shape))


def cosines(x: npt.NDArray[Any], y: npt.NDArray[Any], *, of_zeros: float) -> npt.NDArray[np.float64]:
    """The cosine of each vector of `x` to the one of `y` beside it: [..., D] and [..., D] → [...], computed in float64.

    `of_zeros` stands for the cosine of a vector that is zero, which has none.
    """
    x, y = x.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
    dots, norms = (x * y).sum(axis=-1), np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    with np.errstate(invalid="ignore"):  # the cosine of a vector with Inf or NaN is NaN
        found: npt.NDArray[np.float64] = np.divide(dots, norms, out=np.full_like(dots, of_zeros), where=norms != 0)
    return found


E4M3, E5M2 = fp8_table(4), fp8_table(5)
