"""Token rows ready for a model: made of the samples once, checked, counted, and kept in one mapped Arrow file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.columns import list_column, list_values, one_array
from arrowbank.bank.files import HashedFile, publish_json, publishing, sha256_of
from arrowbank.bank.kinds.targets_bank import needed_positions
from arrowbank.bank.locks import waiting_lock
from arrowbank.bank.manifest import readable_json
from arrowbank.bank.refusals import raise_refusal
from arrowbank.engine.plan import Shard
from arrowbank.errors import CorruptBank, InputError
from arrowbank.inputs.records import Record, Records, is_text
from arrowbank.progress import SILENT, Phase, Progress, tell_unread
from arrowbank.targets.conversations import ChatTokenizer

ROWS_A_BATCH = 1024
ASSISTANT_TOKENS, GIVEN, ONES_EXCEPT_FIRST = "assistant_tokens", "given", "ones_except_first"
SORTS = {
    ASSISTANT_TOKENS: "a conversation (messages)",
    GIVEN: "token ids with a loss mask (input_ids, loss_mask)",
    ONES_EXCEPT_FIRST: "token ids without a loss mask (input_ids)",
}
FIELDS = ("id", "messages", "tools", "input_ids", "loss_mask")
READ = {  # the fields of a sample that count, by what makes its loss mask
    ASSISTANT_TOKENS: ("id", "messages", "tools"),
    GIVEN: ("id", "input_ids", "loss_mask"),
    ONES_EXCEPT_FIRST: ("id", "input_ids"),
}
LENGTH = "length"  # of a token bank: only what input_ids say
SCHEMA = pa.schema([("sample", pa.string()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))])

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]


def samples_at(path: str | Path, **policy: Any) -> Records:
    """The samples at a place: conversations (`messages`) or rows of token ids (`input_ids`, with a `loss_mask` or without). One place
    holds one sort of them, so that one rule made every loss mask of a bank. `policy` is what `Records` takes."""
    return Records(path, FIELDS, **policy)


def loss_mask_rule(samples: Records) -> str:
    """What makes the loss masks, by the first sample. InputError where there is none."""
    first = next(iter(samples), None)
    if first is None:
        raise InputError(f"{samples.path}: holds no sample. Give a file of at least one conversation or token row.")
    return _rule_of(first)


def _rule_of(sample: Record) -> str:
    """What makes a sample's loss mask, by its fields. InputError for a sample of no known sort, or of two."""
    conversation, tokens = sample.value.get("messages") is not None, sample.value.get("input_ids") is not None
    if conversation == tokens:
        found = "messages and input_ids both" if conversation else f"the fields {', '.join(sample.value) or 'of nothing'}"
        raise InputError(f"{sample.place}: found {found}; expected messages (a conversation) or input_ids (its tokens).")
    if conversation:
        return ASSISTANT_TOKENS
    return ONES_EXCEPT_FIRST if sample.value.get("loss_mask") is None else GIVEN


@dataclass(frozen=True)
class TokenRow:
    """A sample's name, its tokens [S] and which of them count in the loss [S]."""

    name: str
    input_ids: Ids
    loss_mask: Mask


@dataclass
class RowCounts:
    """kept rows, `truncated` ones among them, samples dropped for too few loss tokens, and lines skipped that were none."""

    kept: int = 0
    truncated: int = 0
    few_loss_tokens: int = 0
    bad_lines: int = 0


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """What becomes of a sample. `vocab_size` and `max_positions` (None: no limit) are the model's."""

    loss_mask: str
    max_length: int
    min_loss_tokens: int
    limit: int | None
    vocab_size: int
    max_positions: int | None
    model: str


@dataclass
class RowMaker:
    """Samples → token rows, counted as they pass. `chat` is needed for conversations. `unread` names the fields that were met and
    not read."""

    records: Records
    rules: RowRules
    chat: ChatTokenizer | None
    counts: RowCounts = field(default_factory=RowCounts)
    unread: dict[str, None] = field(default_factory=dict)

    def tell_unread(self, progress: Progress) -> None:
        """Name what the samples so far hold and nobody reads."""
        tell_unread(
            progress, self.records.path, fields=[*(name for name in self.records.unread if name != LENGTH), *self.unread]
        )

    def __iter__(self) -> Iterator[TokenRow]:
        """The rows that are kept. InputError for a sample that is no good, and where none is kept."""
        self.counts = RowCounts()
        for record in islice(self.records, self.rules.limit):
            name = _name_of(record)
            ids, mask = self._tokens(record)
            self._note_unread(record)
            self._check_vocabulary(record, ids)
            truncated = len(ids) > self.rules.max_length
            ids, mask = ids[: self.rules.max_length], mask[: self.rules.max_length]
            if not len(ids) or int(mask.sum()) < self.rules.min_loss_tokens:
                self.counts.few_loss_tokens += 1
                continue
            self._check_positions(record, len(ids))
            self.counts.kept += 1
            self.counts.truncated += truncated
            yield TokenRow(name, ids, mask)
        self.counts.bad_lines = self.records.bad_lines
        if not self.counts.kept:
            raise InputError(
                f"{self.records.path}: none of {self.counts.few_loss_tokens:,} samples has {self.rules.min_loss_tokens} loss tokens "
                f"within its first {self.rules.max_length} tokens. Lower --min-loss-tokens, raise --max-length, or check the data."
            )

    def _tokens(self, record: Record) -> tuple[Ids, Mask]:
        if (rule := _rule_of(record)) != self.rules.loss_mask:
            raise InputError(
                f"{record.place}: is {SORTS[rule]}, the samples before it are {SORTS[self.rules.loss_mask]}. A bank has one rule "
                "for its loss masks: give one sort of samples a file."
            )
        if rule == ASSISTANT_TOKENS and self.chat is not None:
            return self.chat.tokens(record)
        ids = _whole_numbers(record, "input_ids", np.iinfo(np.int32).max)
        if rule == ONES_EXCEPT_FIRST:
            mask = np.ones(len(ids), np.uint8)
            mask[:1] = 0  # it has no left context, so nothing predicts it
            return ids, mask
        mask = _whole_numbers(record, "loss_mask", 1).astype(np.uint8)
        if len(mask) != len(ids):
            raise InputError(f"{record.place}: loss_mask has {len(mask)} entries, expected one for each of {len(ids)} tokens.")
        return ids, mask

    def _note_unread(self, record: Record) -> None:
        for name, value in record.value.items():
            if value is not None and name not in READ[self.rules.loss_mask]:
                self.unread[name] = None

    def _check_vocabulary(self, record: Record, ids: Ids) -> None:
        if (highest := int(ids.max(initial=0))) >= self.rules.vocab_size:
            raise InputError(
                f"{record.place}: token id {highest}, but model {self.rules.model!r} has a vocabulary of {self.rules.vocab_size} (0 "
                f"to {self.rules.vocab_size - 1}). The tokens are another model's: give the right --tokenizer or data."
            )

    def _check_positions(self, record: Record, length: int) -> None:
        if self.rules.max_positions is not None and length > self.rules.max_positions:
            raise InputError(
                f"{record.place}: {length} tokens, but model {self.rules.model!r} has {self.rules.max_positions} positions. Give "
                f"--max-length {self.rules.max_positions} or less."
            )


def _name_of(record: Record) -> str:
    given = record.value.get("id")
    if given is None:
        return record.name
    if isinstance(given, bool) or not isinstance(given, str | int) or not is_text(str(given)):
        raise InputError(
            f"{record.place}: id is {json.dumps(given, default=str)}, expected a string or a whole number, or none."
        )
    return str(given)


def _whole_numbers(record: Record, name: str, most: int) -> Ids:
    """The field `name` as int32; InputError unless it is a list of whole numbers from 0 to `most`."""
    values = record.value[name]
    if not isinstance(values, list) or (name == "input_ids" and not values):
        raise InputError(f"{record.place}: {name} is a {type(values).__name__} of no tokens, expected a list of whole numbers.")
    for at, value in enumerate(values):
        whole = type(value) is int or (most == 1 and type(value) is bool)
        if not whole or not 0 <= value <= most:
            raise InputError(f"{record.place}: {name}[{at}] is {value!r}, expected a whole number from 0 to {most}.")
    return np.array(values, np.int32)


class PreparedRows:
    """The rows in a file that `prepare` has written, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
            self._table = stream.read_all()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every row, [N]."""
        return np.concatenate([np.diff(list_values(chunk)[1]) for chunk in self._table["input_ids"].chunks]).astype(np.int64)

    @cached_property
    def needed(self) -> npt.NDArray[np.int64]:
        """Tokens of every row whose hidden states supervision needs, [N]."""
        counts = []
        for chunk in self._table["loss_mask"].chunks:
            values, offsets = list_values(chunk)
            counts += [len(needed_positions(values[start:stop])) for start, stop in pairwise(offsets)]
        return np.array(counts, np.int64)

    def first_tokens(self, count: int) -> Ids:
        """The first `count` tokens of all rows on end; fewer where the first chunk has fewer."""
        found: Ids = list_values(self._table["input_ids"].chunk(0))[0][:count]
        return found

    def of(self, shard: Shard) -> tuple[list[str], Ids, Mask, npt.NDArray[np.int32]]:
        """Names, flat tokens, flat loss mask and the n + 1 offsets of a shard's rows."""
        rows = self._table.slice(shard.start, shard.rows)
        ids, offsets = list_values(one_array(rows["input_ids"]))
        mask, _ = list_values(one_array(rows["loss_mask"]))
        return rows["sample"].to_pylist(), ids, mask, offsets


def prepare(folder: Path, digest: str, maker: RowMaker, progress: Progress = SILENT) -> tuple[PreparedRows, RowCounts]:
    """The rows of `maker` in a file in `folder`, which is kept for the next run of the plan `digest`; and their counts."""
    folder.mkdir(exist_ok=True)
    with waiting_lock(folder / "lock-rows"):  # of the workers of a job array, one makes them
        return _prepared(folder, digest, maker, progress)


def _prepared(folder: Path, digest: str, maker: RowMaker, progress: Progress) -> tuple[PreparedRows, RowCounts]:
    path, note = folder / f"rows-{digest[:16]}.arrow", folder / f"rows-{digest[:16]}.json"
    noted = readable_json(note)
    if noted is None and note.exists() and _is_readable(path):  # a power cut took the note, and shards may be made of the rows
        noted = {"sha256": sha256_of(path), "counts": None}
        publish_json(note, noted)
    if noted and noted["counts"] and path.exists() and noted["sha256"] == sha256_of(path):
        return PreparedRows(path), RowCounts(**noted["counts"])
    with progress.phase("prepare", None, unit="samples") as phase, publishing(path) as file:
        _write(file, maker, phase)
    maker.tell_unread(progress)
    if noted and noted["sha256"] != file.digest:
        raise CorruptBank(
            f"{path}: was damaged, and the same samples do not give the same tokens again, as when a chat template writes the date. "
            "Give --restart, or another folder."
        )
    publish_json(note, {"sha256": file.digest, "counts": asdict(maker.counts)})
    return PreparedRows(path), maker.counts


def _is_readable(path: Path) -> bool:
    try:
        PreparedRows(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise_refusal(error, path)
        return False
    return True


def _write(file: HashedFile, maker: RowMaker, phase: Phase) -> None:
    rows = iter(maker)
    with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), SCHEMA) as stream:
        while some := list(islice(rows, ROWS_A_BATCH)):
            offsets = np.cumsum([0, *(len(row.input_ids) for row in some)]).astype(np.int32)
            columns = [
                pa.array([row.name for row in some], pa.string()),
                list_column(np.concatenate([row.input_ids for row in some]), offsets),
                list_column(np.concatenate([row.loss_mask for row in some]), offsets),
            ]
            stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
            phase.advance(len(some))
