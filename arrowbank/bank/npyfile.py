"""A `.npy` file, mapped: its header is checked against the file before anything is read. Never pickle."""

from __future__ import annotations

import struct
import tokenize
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def map_npy(path: Path) -> npt.NDArray[Any]:
    """The array in `path` as a read-only map, in C order.

    Raises ValueError for a file that is not exactly such an array: another format, a header that is damaged, Python objects, fields,
    Fortran order, or more or fewer bytes than the header announces. Raises OSError where it cannot be read.
    """
    with path.open("rb") as file:
        shape, dtype, start = _header(file)
        size = file.seek(0, 2)
    count = 1
    for length in shape:
        count *= length
    if size != start + count * dtype.itemsize:
        raise ValueError(f"{size:,} bytes, its header announces {start + count * dtype.itemsize:,}")
    mapped = np.memmap(path, dtype, mode="r", offset=start, shape=shape) if count else np.empty(shape, dtype)
    return np.asarray(mapped)


def _header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and the place of the first value."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged header is no Python 2 header, whatever NumPy guesses
            version = np.lib.format.read_magic(file)
            if version not in HEADERS:
                raise ValueError(f"format version {version}, expected 1.0 or 2.0")
            shape, fortran_order, dtype = HEADERS[version](file)
    except (
        SyntaxError,
        TypeError,
        KeyError,
        OverflowError,
        MemoryError,
        RecursionError,
        struct.error,
        tokenize.TokenError,
    ) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from None
    if dtype.kind not in "biuf" or fortran_order or not all(0 <= length < 2**63 for length in shape):
        raise ValueError(f"{dtype} of shape {shape}{' in Fortran order' if fortran_order else ''}, expected numbers in C order")
    return shape, dtype, file.tell()
