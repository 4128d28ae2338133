"""A file of `torch.save`, read without unpickling: a walk over its opcodes that knows dicts, plain values and plain tensors.

A pickle is a program, and a file may come from a stranger. Here nothing of it is called: what the walk does not know is an error.
The file is a zip archive of stored (not compressed) members: `data.pkl`, and the bytes of each storage under `data/`, each with a CRC.
"""

from __future__ import annotations

import gzip
import io
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.errors import CorruptBank

PICKLE = "data.pkl"
REBUILD, EMPTY_HOOKS = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
# storage classes: the tensor's dtype as torch names it, and as NumPy sees it (bfloat16: its bits)
STORAGES = {
    "torch LongStorage": ("int64", "<i8"),
    "torch IntStorage": ("int32", "<i4"),
    "torch BoolStorage": ("bool", "u1"),
    "torch ByteStorage": ("uint8", "u1"),
    "torch BFloat16Storage": ("bfloat16", "<u2"),
    "torch HalfStorage": ("float16", "<f2"),
    "torch FloatStorage": ("float32", "<f4"),
    "torch DoubleStorage": ("float64", "<f8"),
    "torch ShortStorage": ("int16", "<i2"),
    "torch CharStorage": ("int8", "i1"),
}
PLAIN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "GLOBAL"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


@dataclass(frozen=True)
class TorchTensor:
    """A tensor: the storage that holds it, where in it, and its shape. Offset and strides count values."""

    storage: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return STORAGES[self.kind][0]


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass(frozen=True)
class _Storage:
    name: str
    kind: str
    count: int


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Values from a tensor's first to behind its last one."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) if all(shape) else 0


class TorchFile:
    """A file of `torch.save`. `value` is what was saved, its tensors as TorchTensor. As a context manager.

    Raises CorruptBank for what is damaged, or is more than plain values and tensors; for damaged archives what zipfile raises.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive = zipfile.ZipFile(io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path)
        names = [info.filename for info in self._archive.infolist()]
        if len(set(names)) < len(names) or any(info.compress_type for info in self._archive.infolist()):
            raise self._damaged("members that are compressed, or twice in the archive")
        self._root = next((name.removesuffix(PICKLE) for name in names if name.endswith(f"/{PICKLE}")), "")
        if not self._root:
            raise self._damaged(f"no {PICKLE} in it")
        order = f"{self._root}byteorder"
        if order in names and self._archive.read(order) != b"little":
            raise self._damaged("not little-endian")
        self.value = self._walk(self._archive.read(f"{self._root}{PICKLE}"))

    @property
    def identity(self) -> bytes:
        """Names, sizes and CRCs of all members: other content gives another identity."""
        members = [(info.filename.removeprefix(self._root), info.file_size, info.CRC) for info in self._archive.infolist()]
        return repr(members).encode()

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def array(self, tensor: TorchTensor) -> npt.NDArray[Any]:
        """The values of a tensor; their CRC is checked."""
        data = self._archive.read(f"{self._root}data/{tensor.storage}")
        values: npt.NDArray[Any] = np.frombuffer(data, STORAGES[tensor.kind][1])[tensor.offset :]
        if len(values) < _extent(tensor.shape, tensor.strides):
            raise self._damaged(f"a tensor of shape {tensor.shape} past the end of its storage")
        steps = [step * values.itemsize for step in tensor.strides]
        shaped: npt.NDArray[Any] = np.lib.stride_tricks.as_strided(values, tensor.shape, steps, writeable=False)
        return shaped

    def check(self) -> None:
        """Read every member, and hold it against its CRC."""
        if name := self._archive.testzip():
            raise self._damaged(f"the CRC of {name} is not that of its bytes")

    def _walk(self, data: bytes) -> Any:
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, Any] = {}

        def since_mark() -> list[Any]:
            at = marks.pop()
            values = stack[at:]
            del stack[at:]
            return values

        try:
            for opcode, arg, at in pickletools.genops(data):
                name = opcode.name
                if name in PLAIN:
                    stack.append(_Global(str(arg)) if name == "GLOBAL" else arg)
                elif name in CONSTANTS:
                    stack.append(CONSTANTS[name])
                elif name in ("BINPUT", "LONG_BINPUT"):
                    memo[int(arg or 0)] = stack[-1]
                elif name in ("BINGET", "LONG_BINGET"):
                    stack.append(memo[int(arg or 0)])
                elif name == "MARK":
                    marks.append(len(stack))
                elif name == "EMPTY_DICT":
                    stack.append({})
                elif name == "EMPTY_TUPLE":
                    stack.append(())
                elif name == "TUPLE":
                    stack.append(tuple(since_mark()))
                elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                    count = int(name[-1])
                    stack[-count:] = [tuple(stack[-count:])]
                elif name in ("SETITEM", "SETITEMS"):
                    values = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                    self._set(stack[-1], values)
                elif name == "BINPERSID":
                    stack.append(self._storage(stack.pop()))
                elif name == "REDUCE":
                    args = stack.pop()
                    stack.append(self._made(stack.pop(), args))
                elif name == "STOP":
                    return stack.pop()
                elif name != "PROTO":
                    raise self._damaged(f"opcode {name} at byte {at} of {PICKLE}; expected plain values and tensors")
        except (IndexError, KeyError, ValueError, TypeError) as error:
            raise self._damaged(f"{PICKLE} is no whole pickle ({error!r})") from None
        raise self._damaged(f"{PICKLE} does not end")

    def _set(self, target: Any, values: list[Any]) -> None:
        keys = values[::2]
        if not isinstance(target, dict) or len(values) % 2 or not all(isinstance(key, str | int) for key in keys):
            raise self._damaged("a dict with keys other than strings and numbers")
        if len(set(keys)) < len(keys) or target.keys() & set(keys):
            raise self._damaged("a key twice in one dict")
        target.update(zip(keys, values[1::2], strict=True))

    def _storage(self, reference: Any) -> _Storage:
        word, kind, name, device, count = reference
        if word != "storage" or not isinstance(kind, _Global) or kind.name not in STORAGES or device != "cpu":
            raise self._damaged(f"a storage {reference!r}; expected one of {', '.join(STORAGES)}, on the CPU")
        return _Storage(str(name), kind.name, int(count))

    def _made(self, function: Any, args: tuple[Any, ...]) -> Any:
        if function == _Global(EMPTY_HOOKS) and args == ():
            return None
        if function != _Global(REBUILD):
            raise self._damaged(f"a call of {function!r}; expected plain values and tensors")
        storage, offset, shape, strides = args[:4]
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or not all(type(number) is int and number >= 0 for number in numbers):
            raise self._damaged(f"a tensor of shape {shape!r} and strides {strides!r}")
        if len(shape) != len(strides) or offset + _extent(shape, strides) > storage.count:
            raise self._damaged(f"a tensor of shape {shape!r} past the end of its storage of {storage.count} values")
        return TorchTensor(storage.name, storage.kind, tuple(shape), offset, tuple(strides))

    def _damaged(self, found: str) -> CorruptBank:
        return CorruptBank(f"{self.path}: not a plain file of torch.save ({found}). Make or copy it again.")
