"""Records in Parquet and Arrow files. For the scan a field path is followed through whole columns, and what is found is put back
into the order of the records.

What counts as what is the same as in JSON: null is absent, a struct is an object, a column of another type is what it would be there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from arrowbank.errors import InputError
from arrowbank.inputs.bad_lines import BadLine, not_a_text, not_utf8
from arrowbank.inputs.extract import Counts, Extract, FoundTexts, Rules
from arrowbank.inputs.fields import EACH, FieldPath, parse_path

FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

RowNumbers = npt.NDArray[np.int64]


class TableRows(NamedTuple):
    """Some rows of a table, the share of the file that they are, and the names of all columns of the file."""

    batch: pa.RecordBatch
    share: float
    names: list[str]


@contextmanager
def readable(path: object, kind: str) -> Iterator[None]:
    """InputError for a table that is cut off or not what its name says."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:  # a column's name may be no text
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{path}: not readable as {kind} data ({reason}). Copy or make the file again.") from None


def _check(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid where offsets, lengths or codes lead out of the data: Arrow itself would follow them.

    Text that is not UTF-8 passes, for `extract_rows` says in which row it is.
    """
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            column.view(_as_bytes(column.type)).validate(full=True)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """The type with bytes where it has text."""
    for is_text, binary in _TEXTS:
        if is_text(kind):
            return binary
    if pa.types.is_struct(kind):
        return pa.struct(
            [kind.field(number).with_type(_as_bytes(kind.field(number).type)) for number in range(kind.num_fields)]
        )
    for is_list, list_of in _LISTS:
        if is_list(kind):
            return list_of(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)), kind.list_size)
    return kind


_TEXTS = (
    (pa.types.is_string, pa.binary()),
    (pa.types.is_large_string, pa.large_binary()),
    (pa.types.is_string_view, pa.binary_view()),
)
_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def parquet_batches(source: Any, columns: Sequence[str], size: int) -> Iterator[TableRows]:
    """Those of `columns` that there are, about `size` bytes of rows at a time. `source` is a path, or an open file."""
    with pq.ParquetFile(source, pre_buffer=False) as file:
        meta, names = file.metadata, list(file.schema_arrow.names)
        wanted = _wanted(columns, names)
        total = sum(meta.row_group(group).total_byte_size for group in range(meta.num_row_groups))
        rows = _rows_of(size, total, meta.num_rows)
        for batch in file.iter_batches(batch_size=rows, columns=wanted):
            _check(batch)
            yield TableRows(batch, batch.num_rows / meta.num_rows, names)


def arrow_batches(source: Any, columns: Sequence[str], size: int) -> Iterator[TableRows]:
    """As `parquet_batches`, of an Arrow file or stream."""
    with pa.memory_map(str(source)) if isinstance(source, Path) else pa.PythonFile(source, mode="r") as file:
        total = file.size()
        streamed = file.read(len(FILE_MAGIC)) != FILE_MAGIC
        file.seek(0)
        for whole in _stream(file) if streamed else _file(file):
            names = list(whole.schema.names)
            batch = whole.select(_wanted(columns, names))
            _check(batch)
            held = whole.get_total_buffer_size()  # nbytes would follow offsets, also of columns that nobody has checked
            rows = _rows_of(size, held, whole.num_rows)
            for start in range(0, whole.num_rows, rows):
                share = held / total * min(rows, whole.num_rows - start) / whole.num_rows
                yield TableRows(batch.slice(start, rows), share, names)


def _wanted(columns: Sequence[str], names: list[str]) -> list[str]:
    """Those of `columns` that there are. ArrowInvalid where one of them is there twice."""
    wanted = [name for name in columns if name in names]
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise pa.ArrowInvalid(f"two columns named {twice[0]!r}")
    return wanted


def values_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows as Python values. Raises BadLine for text that is not UTF-8, with the row counted from 1."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for row in range(batch.num_rows):
            for name in batch.schema.names:
                try:
                    batch.column(name)[row].as_py()
                except UnicodeDecodeError:
                    raise not_utf8(row + 1, (name,)) from None
        raise


def _rows_of(size: int, total: int, rows: int) -> int:
    """How many rows have `size` bytes together, where `rows` have `total`."""
    return max(1, min(rows, size * rows // max(1, total)))


def _file(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(source)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _stream(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """A stream cut between two batches reads as a shorter one: the mark at its end is what tells."""
    yield from pa.ipc.open_stream(source)
    end = source.tell()
    source.seek(max(0, end - len(END_OF_STREAM)))
    if source.read(len(END_OF_STREAM)) != END_OF_STREAM:
        raise pa.ArrowInvalid("the stream has no end mark: it was cut off")


def extract_rows(batch: pa.RecordBatch, rules: Rules) -> Extract:
    """The texts of a batch's rows in order. The error that ends the scan is in the extract, with the row counted from 1."""
    found = FoundTexts()
    found.counts.episodes = batch.num_rows
    kinds = rules.kinds
    texts: list[str] = []
    rows: list[RowNumbers] = []
    codes: list[npt.NDArray[np.uint8]] = []
    errors: list[BadLine] = []
    for kind, name in rules.fields:
        path = parse_path(name)
        values, places = _follow(batch, path, found.counts)
        if len(values) and not _is_text(values.type):
            found.counts.not_text += len(values)
            if rules.strict:
                errors.append(not_a_text(int(places[0]) + 1, path))
            continue
        strings = _strings(values)
        if None in strings:
            errors.append(not_utf8(int(places[strings.index(None)]) + 1, path))
        texts += strings
        rows.append(places)
        codes.append(np.full(len(strings), kinds.index(kind), np.uint8))
    error = min(errors, key=lambda error: error.line, default=None)
    if error is None and texts:
        order = np.argsort(np.concatenate(rows), kind="stable")
        found.texts = [texts[place] for place in order]
        found.kinds = bytearray(np.concatenate(codes)[order])
    found.settle()
    return found.extract(batch.num_rows, error)


def _follow(batch: pa.RecordBatch, path: FieldPath, counts: Counts) -> tuple[pa.Array, RowNumbers]:
    """The values at `path` that are not null, and the row of each."""
    nothing = pa.nulls(0), np.empty(0, np.int64)
    if path[0] not in batch.schema.names:
        return nothing
    values, rows = _present(batch.column(path[0]), np.arange(batch.num_rows))
    for step in path[1:]:
        if not len(values):
            return nothing
        if step is EACH:
            if not _is_list(values.type):
                counts.not_list += len(values)
                return nothing
            rows = rows[pc.list_parent_indices(values).to_numpy()]
            values = pc.list_flatten(values)
        else:
            if not pa.types.is_struct(values.type):
                counts.not_object += len(values)
                return nothing
            place = values.type.get_field_index(step)
            if place < 0:
                return nothing
            values = pc.struct_field(values, [place])
        values, rows = _present(values, rows)
    return values, rows


def _present(values: pa.Array, rows: RowNumbers) -> tuple[pa.Array, RowNumbers]:
    """Without nulls, and without encodings that only save space."""
    while True:
        if isinstance(values, pa.ExtensionArray):
            values = values.storage
        elif pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        elif pa.types.is_run_end_encoded(values.type):
            values = pc.run_end_decode(values)
        else:
            break
    if values.null_count == 0 and not pa.types.is_null(values.type):
        return values, rows
    there = values.is_valid()
    return values.filter(there), rows[there.to_numpy(zero_copy_only=False)]


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        is_one(kind)
        for is_one in (
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
            types.is_list_view,
            types.is_large_list_view,
        )
    )


def _is_text(kind: pa.DataType) -> bool:
    return any(is_one(kind) for is_one in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _strings(values: pa.Array) -> list[Any]:
    """Texts as Python has them; None for one that is not UTF-8."""
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError:
        return [_string(value) for value in values]


def _string(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return None
