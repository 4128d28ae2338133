"""A shard on disk: an Arrow IPC stream of one record batch, mapped, and checked before anything follows its offsets.

Arrow trusts what a stream says of itself. An offset out of range is read from wherever it points, which ends the process with
SIGSEGV, and a compressed body may unpack to any size. Opening a shard checks its frame and costs nothing per row; `check_values`
reads the offsets and the text of one column, once, when it is first used. Vectors and other columns of fixed width are never read."""

from __future__ import annotations

import struct
import tokenize
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.keys import SHA1_BYTES
from arrowbank.bank.refusals import raise_refusal
from arrowbank.errors import CorruptBank

REMEDY = "Restore it from a copy or rebuild the bank."
RECORD_BATCH = "record batch"


def map_shard(path: Path, check_schema: Callable[[pa.Schema], None] = lambda schema: None) -> pa.RecordBatch:
    """The record batch of the shard at `path`, memory-mapped.

    `check_schema` is given the columns before the batch is looked at. A file that is cut short in place while it is mapped ends the
    process with SIGBUS when a page behind its end is touched, as with every map of Arrow.

    Raises CorruptBank for a file that is not an uncompressed stream of one batch without nulls.
    """
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.memory_map(str(path)))
        schema = pa.ipc.read_schema(messages.read_next_message())
        check_schema(schema)
        message = messages.read_next_message()
        if message.type != RECORD_BATCH or _is_compressed(memoryview(message.metadata)):
            raise CorruptBank(f"{path}: holds a {message.type} that no writer of banks gives, or a compressed one. {REMEDY}")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate()
        if (more := next(iter(messages), None)) is not None:
            raise CorruptBank(f"{path}: a {more.type} behind the first record batch, expected the end. {REMEDY}")
    except (pa.ArrowException, StopIteration, EOFError, OSError, ValueError, MemoryError, OverflowError, struct.error) as error:
        raise_refusal(error, path)
        raise CorruptBank(f"{path}: not readable as an Arrow stream ({_first_line(error)}). {REMEDY}") from None
    for name, column in zip(schema.names, batch.columns, strict=True):
        if _has_nulls(column):
            raise CorruptBank(f"{path}: column {name} has nulls, expected a value in every row. {REMEDY}")
    return batch


def check_values(path: Path, name: str, column: pa.Array) -> None:
    """Raise CorruptBank where offsets of `column` point outside its values, or its text is not UTF-8."""
    try:
        column.validate(full=True)
    except (pa.ArrowException, MemoryError) as error:
        raise CorruptBank(f"{path}: column {name}: {_first_line(error)}. {REMEDY}") from None
    if name == "sha1":
        offsets = np.frombuffer(column.buffers()[1], np.int32, count=len(column) + 1, offset=4 * column.offset)
        if (np.diff(offsets) != SHA1_BYTES).any():
            raise CorruptBank(f"{path}: column {name}: a value that has not {SHA1_BYTES} bytes. {REMEDY}")


def require_same_lengths(path: Path, starts: npt.NDArray[np.int32], others: Mapping[str, npt.NDArray[np.int32]]) -> None:
    """Raise CorruptBank where a list column has other lengths than the one whose n + 1 offsets are `starts`."""
    for name, offsets in others.items():
        differing = np.flatnonzero(np.diff(offsets) != np.diff(starts))
        if len(differing):
            row = int(differing[0])
            raise CorruptBank(
                f"{path}: row {row} of the shard has {np.diff(offsets)[row]} entries in {name}, expected {np.diff(starts)[row]}. "
                f"{REMEDY}"
            )


def _has_nulls(column: pa.Array) -> bool:
    kind = column.type
    inner = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    return column.null_count > 0 or (inner and _has_nulls(column.values))


def _is_compressed(message: memoryview) -> bool:
    """Whether a record batch message says that its body is compressed: field 3 of the table that is field 2 of the message
    (https://arrow.apache.org/docs/format/Columnar.html). Arrow has checked the tables when it opened the message."""
    header = _field(message, struct.unpack_from("<I", message, 0)[0], 2)
    if header is None:
        return False
    return _field(message, header + struct.unpack_from("<I", message, header)[0], 3) is not None


def _field(message: memoryview, table: int, number: int) -> int | None:
    """Where field `number` of a FlatBuffers table begins; None where the table does not have it."""
    fields = table - struct.unpack_from("<i", message, table)[0]
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", message, fields + at)[0] if at < struct.unpack_from("<H", message, fields)[0] else 0
    return table + offset if offset else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


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
