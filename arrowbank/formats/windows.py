"""Where a loader cuts a file of tokens, and which planted triples it keeps whole.

A loader reads windows of `read` tokens, `step` tokens apart, and drops what does not fill one. Under a step of T an example of T tokens
stays whole; under T + 1 it drifts a token a window and is finally cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

STRIDES = ("T", "T+1")


def whole_in_a_window(
    begin: npt.NDArray[Any], end: npt.NDArray[Any], tokens: npt.NDArray[Any] | int, *, read: int, step: int
) -> npt.NDArray[np.bool_]:
    """For spans from token `begin` to token `end` (both included) of files of `tokens` tokens: whether one window holds each whole."""
    start = begin // step * step
    whole: npt.NDArray[np.bool_] = (end < start + read) & (start + read <= tokens)
    return whole
