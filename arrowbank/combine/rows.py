"""What new banks are made of here: rows of a shard of an old bank become a shard of the new one.

Which rows these are is found out twice, when the plan is made and when the shard is written: so no list of rows is ever in memory,
and one shard at a time is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import Bank, BankWriter
from arrowbank.bank.columns import number_column
from arrowbank.bank.files import require_space
from arrowbank.bank.manifest_checks import WRITERS
from arrowbank.bank.mirror import MATRIX_FILE
from arrowbank.progress import Phase

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """`count` rows (at least one) of shard `shard` of a committed bank; `choose` says which, ascending from the shard's start."""

    bank: Bank
    shard: int
    count: int
    choose: Callable[[], Rows]

    @property
    def whole(self) -> bool:
        """Whether it is the shard as it is."""
        return self.count == self.bank.shard_rows[self.shard]

    @property
    def bytes(self) -> int:
        """About what it takes on disk, where it is written."""
        return 0 if self.whole else self.bank.shard(self.shard).nbytes * self.count // self.bank.shard_rows[self.shard]

    def batch(self) -> pa.RecordBatch:
        """The rows as a batch of their own."""
        return self.bank.shard(self.shard).take(number_column(self.choose()))


def write_pieces(bank: BankWriter, pieces: Sequence[Piece], phase: Phase, *, beside: int = 0) -> None:
    """Make the shards that `bank` lacks, in the order of `pieces`; `beside` is how many bytes will be written after them: DiskFull
    where there is no room."""
    done = bank.done_shards
    todo = {index for index in range(len(pieces)) if index not in done}
    require_space(bank.folder, beside + sum(pieces[index].bytes for index in todo), "the bank")
    for index, piece in enumerate(pieces):
        if index in todo:
            _write(bank, index, piece)
        phase.advance(piece.count)


def _write(bank: BankWriter, index: int, piece: Piece) -> None:
    if not piece.whole:
        bank.write_shard(index, piece.batch())
        return
    name = piece.bank.shard_names[piece.shard]
    bank.adopt_shard(index, piece.bank.folder / name, rows=piece.count, sha256=piece.bank.entries[name].sha256)


ManifestFields = dict[str, Any]


def stated(bank: Bank) -> ManifestFields:
    """A bank's manifest without what the writer of another bank says itself."""
    return {name: value for name, value in bank.manifest.json.items() if name not in WRITERS}


def has_mirror(bank: Bank) -> bool:
    return MATRIX_FILE in bank.entries


def value_counts(batches: Sequence[pa.RecordBatch], column: str) -> dict[str, int]:
    """How often each value of a column of strings or numbers is there."""
    counts: dict[str, int] = {}
    for batch in batches:
        for item in batch.column(column).value_counts().to_pylist():
            counts[item["values"]] = counts.get(item["values"], 0) + item["counts"]
    return counts
