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
from arrowbank.bank.columns import list_values, nested_lists, number_column, values_of
from arrowbank.bank.features import MATRIX_FILE
from arrowbank.bank.files import require_space
from arrowbank.bank.manifest_checks import TARGET_LABELS, WRITERS
from arrowbank.bank.mirror import finished_batches, write_keys, write_mirror
from arrowbank.bank.targets import facts_of
from arrowbank.progress import Phase, Progress
from arrowbank.targets.shards import nonfinite_values

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
    bank.adopt_shard(index, piece.bank.folder / name, rows=piece.count, sha256=piece.bank.entries[name]["sha256"])


# of a feature bank's recipe: what decides a vector once its tokens are given
VECTORS = ("encoding_method", "model", "hidden_size", "normalize", "batches")
# of a target bank's manifest: what its hidden states are, and of which model
HIDDEN = (*TARGET_LABELS, "model_fingerprint", "tokenizer_fingerprint", "chat_template_sha256")

Fields = dict[str, Any]


def stated(bank: Bank) -> Fields:
    """A bank's manifest without what the writer of another bank says itself."""
    return {name: value for name, value in bank.manifest.items() if name not in WRITERS}


def has_mirror(bank: Bank) -> bool:
    return MATRIX_FILE in {entry["name"] for entry in bank.manifest["files"]}


def vectors_recipe(bank: Bank) -> Fields:
    """What decided the vectors of a feature bank, or what the hidden states of a target bank are; nothing for other kinds."""
    if bank.kind == "targets":
        return {name: bank.manifest.get(name) for name in HIDDEN}
    return {name: bank.manifest["recipe"].get(name) for name in VECTORS} if bank.kind == "features" else {}


def counted(bank: BankWriter, before: Fields) -> Fields:
    """The fields that the finished shards of `bank` decide, in the order of names that `before` (a manifest) has."""
    batches = finished_batches(bank)
    fields: Fields = {"text_count": bank.done_rows}
    for name, column in (("kinds", "kind"), ("source_rows", "source")):
        if column in batches[0].schema.names:
            found = value_counts(batches, column)
            fields[name] = {**dict.fromkeys(before.get(name, ()), 0), **found}
    if bank.kind == "features":
        fields |= {"encoded_rows": bank.done_rows, "limit": None}
    if bank.kind == "tokens":
        fields["counts"] = {"tokens": sum(int(values_of(batch.column("length")).sum(dtype=np.int64)) for batch in batches)}
    if bank.kind == "targets":
        fields |= _target_counts(batches, before)
    return fields


def value_counts(batches: Sequence[pa.RecordBatch], column: str) -> dict[str, int]:
    """How often each value of a column of strings or numbers is there."""
    counts: dict[str, int] = {}
    for batch in batches:
        for item in batch.column(column).value_counts().to_pylist():
            counts[item["values"]] = counts.get(item["values"], 0) + item["counts"]
    return counts


def _target_counts(batches: Sequence[pa.RecordBatch], before: Fields) -> Fields:
    """Rows, tokens and NaN. The codec's error was measured against values that are not here any more: it is not stated."""
    counts = dict.fromkeys(("kept", "tokens", "loss_tokens", "hidden_tokens"), 0)
    for batch in batches:
        counts["kept"] += batch.num_rows
        counts["tokens"] += int(values_of(batch.column("seq_len")).sum(dtype=np.int64))
        counts["loss_tokens"] += int(list_values(batch.column("loss_mask"))[0].sum(dtype=np.int64))
        counts["hidden_tokens"] += len(nested_lists(batch.column("target_last_hidden_states"))[0])
    nonfinite = dict.fromkeys(before["nonfinite"], 0)
    if any(before["nonfinite"].values()):  # else no row has one
        layers = facts_of(before).layer_names
        for batch in batches:
            for column, names in (("target_hidden_states", layers), ("target_last_hidden_states", ["last"])):
                bits, _ = nested_lists(batch.column(column))
                for layer, count in nonfinite_values("", "", bits, names, keep=True).items():
                    nonfinite[layer] += count
    return {"counts": counts, "nonfinite": nonfinite}


def write_beside(bank: BankWriter, *, mirror: bool, progress: Progress) -> None:
    """The key file of a feature bank, and its mirror where it is to have one; nothing for other kinds."""
    if bank.kind != "features":
        return
    rows, width = bank.done_rows, finished_batches(bank)[0].schema.field("features").type.list_size
    with progress.phase("mirror", rows, unit="rows") as phase:
        write_keys(bank, rows=rows)
        if mirror:
            write_mirror(bank, rows=rows, width=width, report=phase.advance)


def bytes_beside(rows: int, old: Bank, *, mirror: bool) -> int:
    """About what `write_beside` will take for `rows` rows like those of `old`."""
    if old.kind != "features":
        return 0
    texts = sum(batch.column("text").nbytes for batch in old.shards()) * rows // len(old)
    return 16 * rows + (2 * rows * int(old.manifest["hidden_size"]) + 2 * texts if mirror else 0)
