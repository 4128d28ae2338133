"""Where the records of a set come from: a token bank, texts (a texts bank, .jsonl, .txt) with a tokenizer, or a saved dataset.

A source knows how many records it has and gives any of them by its number, as token ids: so that only those are tokenized, or
looked at, that the shuffle brings up before the set has its tokens. A text file is read into memory whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import open_bank
from arrowbank.bank.columns import list_values
from arrowbank.bank.manifest import MANIFEST
from arrowbank.errors import InputError
from arrowbank.inputs.lines import COMPRESSIONS, MAX_LINE_BYTES, numbered_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from arrowbank.bank import Bank


Ids = npt.NDArray[np.int32]

TEXTS_A_CALL = 64  # texts that are tokenized together


class Source(Protocol):
    """Records by their numbers. `text_field` is where texts are, None where records have no named fields; `unread` names the
    fields that were met so far and not read."""

    text_field: str | None
    unread: dict[str, None]

    def __len__(self) -> int:
        """How many records there are."""

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """What the records of these numbers hold: token ids or a text each."""

    def place_of(self, number: int) -> str:
        """Where a record is in the source, in words."""


@dataclass(frozen=True)
class Records:
    """The records of a source as token ids, each checked. `place` is the source in words, vocab_size the model's; `tokenizer`
    gives what makes ids of texts, and is asked only where there is a text.
    """

    source: Source
    place: str
    vocab_size: int
    tokenizer: Callable[[], PreTrainedTokenizerFast | None] = lambda: None

    def in_order(self, numbers: Sequence[int]) -> Iterator[Ids]:
        """The records of `numbers` in that order, [tokens] int32 each. InputError for one that is neither ids nor text."""
        for start in range(0, len(numbers), TEXTS_A_CALL):
            some = numbers[start : start + TEXTS_A_CALL]
            yield from map(self._checked, some, self._ids(some, self.source.read(some)))

    def _ids(self, numbers: Sequence[int], values: list[Any]) -> list[Any]:
        """Texts among the values tokenized, without special tokens."""
        texts = [value for value in values if isinstance(value, str)]
        if not texts:
            return values
        tokenizer = self.tokenizer()
        if tokenizer is None:
            raise InputError(f"{self.place}: holds texts, and there is no tokenizer. Give --tokenizer M.")
        for number, value in zip(numbers, values, strict=True):
            if isinstance(value, str) and not _is_text(value):
                raise InputError(
                    f"{self._of(number)}: holds half of a surrogate pair, which is no text. Repair it, or leave it out."
                )
        made = iter(tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [next(made).ids if isinstance(value, str) else value for value in values]

    def _checked(self, number: int, value: Any) -> Ids:
        given = isinstance(value, list) and all(type(token) is int for token in value)
        if not given and not isinstance(value, np.ndarray):
            raise InputError(f"{self._of(number)}: {_short(value)}; expected a text, or a list of token ids.")
        if not len(value):
            return np.empty(0, np.int32)
        lowest, highest = (min(value), max(value)) if given else (value.min(), value.max())
        for token in (int(lowest), int(highest)):
            if not 0 <= token < self.vocab_size:
                raise InputError(
                    f"{self._of(number)}: token id {token}, but the model has a vocabulary of {self.vocab_size} (0 to "
                    f"{self.vocab_size - 1}). The tokens are another model's: give data of this model's tokenizer."
                )
        return np.asarray(value, np.int32)

    def _of(self, number: int) -> str:
        return f"{self.place}, {self.source.place_of(number)}"


def open_source(path: Path, text_field: str, max_line_bytes: int = MAX_LINE_BYTES) -> Source:
    """The records in `path`: a bank of ours, a saved dataset, or a .jsonl (.gz, .zst) or .txt file of lines of at most
    `max_line_bytes`. InputError where it is none of these."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder. Give a token bank, a texts bank, a saved dataset, .jsonl or .txt.")
    if (path / MANIFEST).exists():
        return BankSource(open_bank(path))
    if path.is_dir():
        return DatasetSource(path, text_field)
    kind = Path(path.name.removesuffix(path.suffix)).suffix if path.suffix in COMPRESSIONS else path.suffix
    if kind not in (".jsonl", ".txt"):
        raise InputError(f"{path}: a file whose name ends in {kind!r}; expected .jsonl or .txt (also .gz, .zst), or a folder.")
    return FileSource(path, text_field if kind == ".jsonl" else None, max_line_bytes)


class BankSource:
    """A committed bank with a column of `input_ids`, or else of `text`. InputError for one that has neither."""

    text_field: str | None = None

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self.unread: dict[str, None] = {}
        columns = [name for name in ("input_ids", "text") if name in bank.columns]
        if not columns or pa.types.is_fixed_size_list(bank.schema.field(columns[0]).type):
            raise InputError(
                f"{bank.folder}: a bank of {bank.kind}, expected tokens or texts. Give what `arrowbank tokenize` has written."
            )
        self._column = columns[0]

    def __len__(self) -> int:
        return len(self._bank)

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return [self._one(number) for number in numbers]

    def place_of(self, number: int) -> str:
        return f"row {number}"

    def _one(self, number: int) -> Any:
        shard = int(np.searchsorted(self._bank.starts, number, side="right")) - 1
        row = number - int(self._bank.starts[shard])
        if self._column == "text":
            return self._bank.shard(shard).column("text")[row].as_py()
        values, offsets = self._ids(shard)
        return values[offsets[row] : offsets[row + 1]]

    def _ids(self, shard: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        if shard not in self._views:
            self._views[shard] = list_values(self._bank.shard(shard).column("input_ids"))
        return self._views[shard]

    @cached_property
    def _views(self) -> dict[int, tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]:
        return {}


class DatasetSource:
    """A saved dataset of one split with a column `input_ids`, or else the text column `text_field`."""

    def __init__(self, path: Path, text_field: str) -> None:
        import datasets

        try:
            rows = datasets.load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{path}: neither a bank nor a saved dataset ({error}).") from None
        if not isinstance(rows, datasets.Dataset):
            raise InputError(f"{path}: a saved dataset of several splits. Give the folder of one: {', '.join(rows)}.")
        columns = [name for name in ("input_ids", text_field) if name in rows.column_names]
        if not columns:
            raise InputError(
                f"{path}: a dataset of the columns {', '.join(rows.column_names)}; expected input_ids, or a text column named "
                "with --text-field."
            )
        self.text_field: str | None = text_field
        self.unread = dict.fromkeys(name for name in rows.column_names if name != columns[0])
        self._column = columns[0]
        self._rows = rows.select_columns(columns[:1]).with_format(None)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return list(self._rows[list(numbers)][self._column])

    def place_of(self, number: int) -> str:
        return f"row {number}"


@dataclass
class FileSource:
    """A text file with a record a line; blank lines are none. With a `text_field` a line is an object, else it is a text."""

    path: Path
    text_field: str | None
    max_line_bytes: int
    unread: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lines = numbered_lines(self.path, self.max_line_bytes)
        self.lines = [(number, line) for number, line in lines if line.strip()]

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return [self._one(*self.lines[number]) for number in numbers]

    def place_of(self, number: int) -> str:
        return f"line {self.lines[number][0]}"

    def _one(self, number: int, line: bytes) -> Any:
        place = f"{self.path}, line {number}"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{place}, byte {error.start + 1}: not UTF-8. Write the file again.") from None
        if self.text_field is None:
            return text
        value = _json_value(text, place)
        named = value if isinstance(value, dict) else {}
        name = next((name for name in ("input_ids", self.text_field) if named.get(name) is not None), None)
        if name is None:
            raise InputError(
                f"{place}: {_short(value)}; expected an object with input_ids, or a text under {self.text_field!r} (--text-field "
                "names it)."
            )
        self.unread |= dict.fromkeys(other for other in named if other != name)
        return named[name]


def _json_value(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}, column {error.colno}: not JSON ({error.msg}). Expected one object a line.") from None
    except RecursionError:
        raise InputError(f"{place}: nested too deeply to be read. Expected one object a line.") from None


def _is_text(value: str) -> bool:
    """Whether a string has an UTF-8 form: JSON can spell halves of surrogate pairs, which have none."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
