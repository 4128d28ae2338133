"""A safetensors file as it lies on disk, read and written: a checked header, and the tensors' bytes, without torch or a copy.

The safetensors package gives arrays, and NumPy has no bfloat16; here a bfloat16 tensor is its bits. Layout:
https://huggingface.co/docs/safetensors (eight bytes of header length, a JSON header, the data without holes).
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.errors import InputError

MAX_HEADER = 100_000_000
LENGTH_BYTES = 8
PIECE = 1 << 26

# how each dtype is seen in NumPy: what NumPy has not (bfloat16, 8-bit floats) as its bits
DTYPES = {
    "BOOL": "u1",
    **{f"U{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"},
}


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry in the header; `start` and `stop` count from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A mapped safetensors file. The map goes when the last array over it goes.

    Raises InputError for a file that is torn, or whose header is not what the format says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():  # a named pipe would be waited for
            raise InputError(f"{path}: not a regular file, expected a safetensors file. Give a dump whose files are all there.")
        try:
            with path.open("rb", buffering=0) as file:
                self.size = os.fstat(file.fileno()).st_size
                self.header = self._header(file.read(LENGTH_BYTES), file)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}). Give a dump whose files are all there.") from None
        self.metadata: dict[str, str] = {}
        self.tensors = self._tensors()

    def _header(self, length: bytes, file: Any) -> bytes:
        count = int.from_bytes(length, "little")
        if len(length) < LENGTH_BYTES or not 2 <= count <= min(MAX_HEADER, self.size - LENGTH_BYTES):
            raise self._torn(f"{self.size} bytes, with a header of {count if len(length) == LENGTH_BYTES else 'no'} bytes")
        return bytes(file.read(count))

    def _tensors(self) -> dict[str, Tensor]:
        try:
            entries = json.loads(self.header, object_pairs_hook=_no_name_twice)
        except (ValueError, RecursionError) as error:
            raise self._torn(f"the header is not JSON ({error})") from None
        if not isinstance(entries, dict):
            raise self._torn("the header is not a JSON object")
        self.metadata = self._metadata(entries.pop("__metadata__", None))
        base = LENGTH_BYTES + len(self.header)
        tensors = {name: self._tensor(name, entry, base) for name, entry in entries.items()}
        end = base
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
            if tensor.start != end:
                raise self._torn(f"tensor {tensor.name} begins at byte {tensor.start}, where the one before it ends at {end}")
            end = tensor.stop
        if end != self.size:
            raise self._torn(f"{self.size} bytes, its header says {end}")
        return tensors

    def _metadata(self, found: Any) -> dict[str, str]:
        pairs = {} if found is None else found
        if not isinstance(pairs, dict) or not all(isinstance(value, str) for value in pairs.values()):
            raise self._torn("its __metadata__ is not an object of strings")
        return pairs

    def _tensor(self, name: str, entry: Any, base: int) -> Tensor:
        try:
            dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, start, stop]
        except (TypeError, KeyError, ValueError):
            raise self._torn(f"tensor {name}: no dtype, shape and data_offsets") from None
        if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
            raise self._torn(f"tensor {name}: {dtype!r} of shape {shape!r} at {[start, stop]!r}")
        if dtype in DTYPES and math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize != stop - start:
            raise self._torn(f"tensor {name}: {dtype} of shape {tuple(shape)} in {stop - start} bytes")
        return Tensor(name, dtype, tuple(shape), base + start, base + stop)

    def array(self, tensor: Tensor) -> npt.NDArray[Any]:
        """A tensor of one of DTYPES as a flat array over the map. Raises InputError for any other."""
        if tensor.dtype not in DTYPES:
            raise InputError(f"{self.path}: tensor {tensor.name} is {tensor.dtype!r}, expected one of {', '.join(DTYPES)}.")
        return self.raw(tensor).view(DTYPES[tensor.dtype])

    def raw(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """A tensor of any dtype as its bytes, flat over the map."""
        values: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, tensor.stop - tensor.start, tensor.start)
        return values

    def _torn(self, found: str) -> InputError:
        return InputError(f"{self.path}: not a whole safetensors file: {found}. Make or copy it again.")


def write_safetensors(
    file: Any, tensors: Mapping[str, tuple[str, Sequence[int], npt.NDArray[Any]]], metadata: Mapping[str, str]
) -> None:
    """Write `tensors`, name → (dtype, shape, array with its values or bytes), and `metadata` to a file opened for writing bytes.

    Give the widest dtype first: then every tensor lies on a multiple of its width.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for _, _, values in tensors.values():
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        for start in range(0, len(data), PIECE):
            file.write(data[start : start + PIECE])


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found
