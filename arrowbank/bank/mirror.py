"""The mirror of a feature bank, for trainers that map a matrix and read JSON: same rows, same order.

features.f16.npy   [N, D] float16
index.json         sha1 hex → row, one entry a line; only up to INDEX_ROWS rows, because a reader of JSON takes many times its bytes
texts.jsonl        one JSON string a line
keys.npy           this package's own look-up (see keys.py); there with and without the mirror
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from arrowbank.bank.columns import fixed_bytes, fixed_lists
from arrowbank.bank.files import HashedFile
from arrowbank.bank.keys import KEY_FILE, SHA1_BYTES, sorted_keys
from arrowbank.bank.manifest import shard_name
from arrowbank.bank.mapped import map_shard
from arrowbank.bank.writer import BankWriter

MATRIX_FILE = "features.f16.npy"
INDEX_FILE = "index.json"
TEXTS_FILE = "texts.jsonl"
INDEX_ROWS = 10_000_000  # of a bank that has an INDEX_FILE, at most
INDEX_ENTRY_BYTES = 200  # of a row in INDEX_FILE, at most: what a reader of it must allow for


def mirror_files(
    shards: Sequence[pa.RecordBatch], *, rows: int, width: int, report: Callable[[int], None]
) -> dict[str, Callable[[HashedFile], None]]:
    """What writes each file of the mirror of a feature bank's `shards`, by name. `report` is told of rows of the matrix."""

    def matrix(file: HashedFile) -> None:
        header = {"descr": "<f2", "fortran_order": False, "shape": (rows, width)}
        np.lib.format.write_array_header_1_0(file, header)
        for batch in shards:
            file.write(fixed_lists(batch.column("features")))
            report(batch.num_rows)

    def index(file: HashedFile) -> None:
        row = 0
        file.write(b"{\n")
        for batch in shards:
            keys = fixed_bytes(batch.column("sha1"), SHA1_BYTES).tobytes().hex()
            lines = [f'"{keys[at : at + 40]}": {row + at // 40}' for at in range(0, len(keys), 40)]
            file.write(((",\n" if row else "") + ",\n".join(lines)).encode())
            row += batch.num_rows
        file.write(b"\n}")

    def texts(file: HashedFile) -> None:
        for batch in shards:
            file.write("".join(json.dumps(text) + "\n" for text in batch.column("text").to_pylist()).encode())

    return {MATRIX_FILE: matrix, INDEX_FILE: index, TEXTS_FILE: texts}


def mirror_fields(rows: int) -> dict[str, str]:
    """The fields of the manifest that name the files of the mirror of a bank of so many rows."""
    return {"bank": MATRIX_FILE, **({"index": INDEX_FILE} if rows <= INDEX_ROWS else {}), "texts": TEXTS_FILE}


def write_mirror(bank: BankWriter, *, rows: int, width: int, report: Callable[[int], None]) -> None:
    """Write the mirror's files from the finished shards of `bank`. A file already there with its receipt is kept."""
    names = mirror_fields(rows).values()
    files = mirror_files(finished_batches(bank), rows=rows, width=width, report=report)
    files = {name: write for name, write in files.items() if name in names}
    with ThreadPoolExecutor(len(files)) as pool:  # the matrix is the disk's and the hash's work, the others Python's
        for written in [pool.submit(bank.write_file, name, write, rows=rows) for name, write in files.items()]:
            written.result()


def write_keys(bank: BankWriter, *, rows: int) -> None:
    """Write the sorted key file from the finished shards of `bank`."""

    def keys(file: HashedFile) -> None:
        digests = [fixed_bytes(batch.column("sha1"), SHA1_BYTES) for batch in finished_batches(bank)]
        table = sorted_keys(np.concatenate(digests))
        np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": table.shape})
        file.write(table)

    bank.write_file(KEY_FILE, keys, rows=rows)


def finished_batches(bank: BankWriter) -> Sequence[pa.RecordBatch]:
    """The finished shards of a bank that is being written, memory-mapped, in row order."""
    paths = [bank.folder / shard_name(index) for index in sorted(bank.done_shards)]
    return [map_shard(path) for path in paths]
