"""The records of a trunk bank's data as token ids, each by its number, and the windows that they are packed into.

The order of the records is the one shuffle of this package's formats: xorshift64 and Fisher-Yates, the same on any machine and for ever.
So only those are tokenized, or looked at, that the shuffle brings up before the set has its tokens. Banks and saved datasets are mapped; of
all others what is read is put into a temporary file first, so that memory does not grow with them."""

from __future__ import annotations

import json
import mmap
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import open_bank
from arrowbank.bank.manifest import MANIFEST, short_json
from arrowbank.bank.refusals import explained
from arrowbank.errors import InputError
from arrowbank.inputs.records import Records, is_text
from arrowbank.models.tokenizer import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from arrowbank.bank import Bank


SEED = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
LEAST_REAL = 16  # tokens of a short last window, beside those that the chain looks ahead
HELD_OUT_EVERY = 10
IDS = "input_ids"
TEXTS_A_CALL = 64  # texts that are tokenized together
Ids = npt.NDArray[np.int32]


def xorshift64(state: int = SEED) -> Iterator[int]:
    """The numbers that follow `state`, each of 64 bits."""
    while True:
        state ^= (state << 13) & MASK
        state ^= state >> 7
        state ^= (state << 17) & MASK
        yield state


def shuffled(count: int, numbers: Iterator[int] | None = None) -> list[int]:
    """0 … count − 1 in the order that `numbers` (by default those that follow the seed) give: Fisher-Yates, from the end."""
    order, numbers = list(range(count)), xorshift64() if numbers is None else numbers
    for i in range(count - 1, 0, -1):
        j = next(numbers) % (i + 1)
        order[i], order[j] = order[j], order[i]
    return order


def joined(records: Iterable[Ids], tokens: int) -> Ids:
    """The records end to end, [at most `tokens`]. Reads no more of them than it needs."""
    parts, missing = [np.empty(0, np.int32)], tokens
    for record in records:
        parts.append(record[:missing])
        missing -= len(parts[-1])
        if not missing:
            break
    return np.concatenate(parts)


def window_lengths(tokens: int, window: int, least: int) -> list[int]:
    """How `tokens` tokens are cut: windows of `window`, and a last short one if it has at least `least`."""
    full, rest = divmod(tokens, window)
    return [window] * full + ([rest] if rest >= least else [])


def least_tokens(chain: int) -> int:
    """The tokens that a short last window needs to be kept."""
    return LEAST_REAL + chain


def is_held_out(index: int, *, hold_all: bool = False) -> bool:
    """Whether the window of that index, counted over all sets, is kept from training."""
    return hold_all or index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


@dataclass(frozen=True)
class PackedSet:
    """A set's tokens, [sum of lengths] int32, and how many each of its windows has."""

    name: str
    ids: Ids
    lengths: tuple[int, ...]


def pack(name: str, records: Iterable[Ids], *, tokens: int, window: int, chain: int) -> PackedSet:
    """The windows of a set from its records, which come in their shuffled order."""
    ids = joined(records, tokens)
    lengths = window_lengths(len(ids), window, least_tokens(chain))
    return PackedSet(name, ids[: sum(lengths)], tuple(lengths))


@dataclass(frozen=True)
class PackedWindows:
    """The windows of all sets in the order of the sets: what the rows of a trunk bank are about."""

    sets: Sequence[PackedSet]
    window: int
    hold_all: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Real tokens of every window, [W]."""
        return np.array([length for one in self.sets for length in one.lengths], np.int32)

    @cached_property
    def held_out(self) -> npt.NDArray[np.bool_]:
        """Which windows are kept from training, [W]."""
        return np.array([is_held_out(index, hold_all=self.hold_all) for index in range(len(self))], np.bool_)

    @cached_property
    def names(self) -> list[str]:
        """The set of every window."""
        return [one.name for one in self.sets for _ in one.lengths]

    @cached_property
    def numbers(self) -> npt.NDArray[np.int32]:
        """The index of every window in its set, [W]."""
        return np.array([number for one in self.sets for number in range(len(one.lengths))], np.int32)

    def padded(self, pad_id: int) -> Ids:
        """The token ids, [W, T] int32; what is missing of a short window is `pad_id`."""
        out = np.full((len(self), self.window), pad_id, np.int32)
        out[np.arange(self.window) < self.lengths[:, None]] = np.concatenate([one.ids for one in self.sets])
        return out


class NumberedRecords(Protocol):
    """Records by their numbers. `text_field` is where texts are, None where records have no named fields; `unread` names the
    fields that were met so far and not read; `bad_lines` were skipped; `are_rows`: there are no lines."""

    text_field: str | None
    unread: dict[str, None]
    bad_lines: int
    are_rows: bool

    def __len__(self) -> int:
        """How many records there are."""

    def read(self, number: int) -> Any:
        """What a record holds: token ids or a text."""

    def place_of(self, number: int) -> str:
        """Where a record is, in words."""


def number_records(records: str | Path, text_field: str, **policy: Any) -> NumberedRecords:
    """The records at a place; `policy` is what `Records` takes. InputError where there are none."""
    if (Path(records) / MANIFEST).exists():
        return _of_bank(open_bank(records))
    found = Records(records, (IDS, text_field), **policy)
    folder = found.source.path
    if isinstance(folder, Path) and (folder / "state.json").exists():
        return _of_dataset(found, text_field)
    return StoredRecords(found, text_field)


@dataclass
class MappedRows:
    """A column of mapped record batches, each as a function that gives it."""

    batches: Sequence[Callable[[], pa.RecordBatch]]
    starts: Sequence[int]  # and the end
    column: str
    place: str
    first: int  # number of a row in messages
    text_field: str | None
    unread: dict[str, None]
    bad_lines: int = 0
    are_rows: bool = True

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, number: int) -> Any:
        batch = bisect_right(self.starts, number) - 1
        return self.batches[batch]().column(self.column)[number - int(self.starts[batch])].as_py()

    def place_of(self, number: int) -> str:
        return f"{self.place}, row {number + self.first}"


def _of_bank(bank: Bank) -> MappedRows:
    """A committed bank with a column of `input_ids`, or else of `text`. InputError for one that has neither."""
    columns = [name for name in (IDS, "text") if name in bank.columns]
    if not columns or pa.types.is_fixed_size_list(bank.schema.field(columns[0]).type):
        raise InputError(
            f"{bank.folder}: a bank of {bank.kind}, expected tokens or texts. Give what `arrowbank tokenize` has written."
        )
    batches = [partial(bank.shard, index) for index in range(len(bank.shard_names))]
    starts = [*map(int, bank.starts[: len(batches)]), len(bank)]
    return MappedRows(batches, starts, columns[0], str(bank.folder), 0, None, {})


def _of_dataset(records: Records, text_field: str) -> MappedRows:
    """A saved dataset with a column `input_ids`, or else `text_field`. InputError for one that has neither."""
    from arrowbank.inputs.sources import refused
    from arrowbank.inputs.tables import arrow_batches, readable

    batches: list[pa.RecordBatch] = []
    names: list[str] = []
    for file in records.source.files:
        with refused(file.path), readable(file.path, file.format.name):
            for rows in arrow_batches(file.path, records.fields, 1 << 62):
                batches.append(rows.batch)
                names = rows.names
    columns = [name for name in records.fields if name in names]
    if names and not columns:
        raise InputError(
            f"{records.path}: a dataset of the columns {', '.join(names)}; expected input_ids, or a text column named with --text-field."
        )
    return MappedRows(
        [partial(_same, batch) for batch in batches],
        list(accumulate((batch.num_rows for batch in batches), initial=0)),
        (columns or [IDS])[0],
        str(records.path),
        1,
        text_field,
        dict.fromkeys(name for name in names if name != columns[0]),
    )


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class StoredRecords:
    """What is read of other records, as JSON in a temporary file without a name."""

    def __init__(self, records: Records, text_field: str) -> None:
        plain = all(file.format.name == "text" for file in records.source.files)
        self.text_field: str | None = None if plain else text_field
        self.are_rows = records.are_rows
        self.unread: dict[str, None] = {}
        self._ends = array("q", [0])
        temporary = Path(tempfile.gettempdir())
        with explained(temporary), tempfile.TemporaryFile(prefix="arrowbank-") as file:
            for record in records:
                size = file.write(_as_json([self._value(record.value, record.place), record.place]))
                self._ends.append(self._ends[-1] + size)
            file.flush()
            self._data = mmap.mmap(file.fileno(), 0) if len(self) else b""
        self.unread |= records.unread
        self.bad_lines = records.bad_lines

    def _value(self, fields: dict[str, Any], place: str) -> Any:
        wanted = (IDS, self.text_field or "text")
        name = next((name for name in wanted if fields.get(name) is not None), None)
        if name is None:
            raise InputError(
                f"{place}: {short_json(fields)}; expected an object with input_ids, or a text under {wanted[1]!r} (--text-field names it)."
            )
        self.unread |= dict.fromkeys(other for other in fields if other != name and fields[other] is not None)
        return fields[name]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, number: int) -> Any:
        return self._stored(number)[0]

    def place_of(self, number: int) -> str:
        return str(self._stored(number)[1])

    def _stored(self, number: int) -> Any:
        return json.loads(self._data[self._ends[number] : self._ends[number + 1]])


def _as_json(stored: list[Any]) -> bytes:
    try:
        return json.dumps(stored).encode()
    except TypeError:
        raise InputError(f"{stored[1]}: {short_json(stored[0])}; expected a text, or a list of token ids.") from None


@dataclass(frozen=True)
class TokenRecords:
    """Records as token ids, each checked. `place` is the data set in words, vocab_size the model's; `tokenizer` gives what makes ids of
    texts, and is asked only where there is a text.
    """

    records: NumberedRecords
    place: str
    vocab_size: int
    tokenizer: Callable[[], PreTrainedTokenizerFast | None] = lambda: None

    def in_order(self, numbers: Sequence[int]) -> Iterator[Ids]:
        """The records of `numbers` in that order, [tokens] int32 each. InputError for one that is neither ids nor text."""
        for start in range(0, len(numbers), TEXTS_A_CALL):
            some = numbers[start : start + TEXTS_A_CALL]
            yield from map(self._checked, some, self._ids(some, list(map(self.records.read, some))))

    def _ids(self, numbers: Sequence[int], values: list[Any]) -> list[Any]:
        """Texts among the values tokenized, without special tokens."""
        texts = [value for value in values if isinstance(value, str)]
        if not texts:
            return values
        tokenizer = self.tokenizer()
        if tokenizer is None:
            raise InputError(f"{self.place}: holds texts, and there is no tokenizer. Give --tokenizer M.")
        for number, value in zip(numbers, values, strict=True):
            if isinstance(value, str) and not is_text(value):
                raise InputError(
                    f"{self._of(number)}: holds half of a surrogate pair, which is no text. Repair it, or leave it out."
                )
        made = iter(encode_texts(tokenizer.backend_tokenizer, texts))
        return [next(made).ids if isinstance(value, str) else value for value in values]

    def _checked(self, number: int, value: Any) -> Ids:
        if not (isinstance(value, list) and all(type(token) is int for token in value)):
            raise InputError(f"{self._of(number)}: {short_json(value)}; expected a text, or a list of token ids.")
        if not value:
            return np.empty(0, np.int32)
        for token in (min(value), max(value)):
            if not 0 <= token < self.vocab_size:
                raise InputError(
                    f"{self._of(number)}: token id {token}, but the model has a vocabulary of {self.vocab_size} (0 to "
                    f"{self.vocab_size - 1}). The tokens are another model's: give data of this model's tokenizer."
                )
        return np.asarray(value, np.int32)

    def _of(self, number: int) -> str:
        return self.records.place_of(number)
