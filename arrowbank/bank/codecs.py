"""How hidden states are stored, by the name that a manifest has under `codec`. A new codec is one more entry of CODECS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.floats import Bits, fp8_decode, fp8_encode

Codes = npt.NDArray[Any]
Scales = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class HiddenCodec:
    """Vectors of bfloat16 bits [K, L·H] as values of `dtype` of the same shape and, where there are any, scales [K, L].

    hidden_dtype     what a stored value is
    encode, decode   bits and L → values and scales; values and scales → bits. No encoder: the values are the bits.
    """

    dtype: np.dtype[Any]
    hidden_dtype: str
    encode: Callable[[Bits, int], tuple[Codes, Scales]] | None = None
    decode: Callable[[Codes, Scales], Bits] = lambda values, scales: values

    @property
    def exact(self) -> bool:
        """Whether the stored values are the bits themselves: there are no scales, and Inf and NaN can be stored."""
        return self.encode is None

    def vector_bytes(self, width: int) -> int:
        """Bytes of a vector of `width` values, with its scale."""
        return width * self.dtype.itemsize + (0 if self.exact else 4)


CODECS = {
    "bf16": HiddenCodec(dtype=np.dtype(np.uint16), hidden_dtype="bfloat16"),
    "fp8": HiddenCodec(dtype=np.dtype(np.uint8), hidden_dtype="float8_e4m3fn", encode=fp8_encode, decode=fp8_decode),
}
