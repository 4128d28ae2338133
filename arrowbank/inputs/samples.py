"""Training samples as they lie in a file: JSON lines (also .gz and .zst), or the rows of a saved dataset or a token bank.

A sample is a conversation (`messages`) or a row of token ids (`input_ids`, with a `loss_mask` or without). One file holds one
sort of them, so that one rule made every loss mask of a bank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arrowbank.bank.files import sha256_of
from arrowbank.bank.manifest import canonical_json
from arrowbank.bank.refusals import raise_refusal
from arrowbank.errors import InputError
from arrowbank.inputs.lines import MAX_LINE_BYTES, numbered_lines

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


@dataclass(frozen=True)
class Record:
    """One sample as it was read: where (file and line, for errors), its name in the bank, and its fields."""

    place: str
    name: str
    value: dict[str, Any]

    @property
    def loss_mask_rule(self) -> str:
        """What makes this sample's loss mask, by its fields. InputError for a sample of no known sort, or of two."""
        conversation, tokens = self.value.get("messages") is not None, self.value.get("input_ids") is not None
        if conversation == tokens:
            found = "messages and input_ids both" if conversation else f"the fields {', '.join(self.value) or 'of nothing'}"
            raise InputError(f"{self.place}: found {found}; expected messages (a conversation) or input_ids (its tokens).")
        if conversation:
            return ASSISTANT_TOKENS
        return ONES_EXCEPT_FIRST if self.value.get("loss_mask") is None else GIVEN


@dataclass(frozen=True)
class Records:
    """The samples in `path`, a file or the folder of a saved dataset, in order. InputError where there is no such thing.

    A line longer than `max_line_bytes` is an error.
    """

    path: Path
    max_line_bytes: int = MAX_LINE_BYTES

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise InputError(f"{self.path}: no such file. Give JSON lines of conversations or token rows, or a saved dataset.")

    @property
    def sha256(self) -> str:
        """A sha256 over the bytes of the file, or over those of a dataset's Arrow files."""
        if not self.path.is_dir():
            return sha256_of(self.path)
        files = {path.relative_to(self.path).as_posix(): sha256_of(path) for path in sorted(self.path.rglob("*.arrow"))}
        return hashlib.sha256(canonical_json(files)).hexdigest()

    @property
    def loss_mask_rule(self) -> str:
        """What makes the loss masks, by the first sample. InputError where there is none."""
        first = next(iter(self), None)
        if first is None:
            raise InputError(f"{self.path}: holds no sample. Give a file of at least one conversation or token row.")
        return first.loss_mask_rule

    @property
    def unread_columns(self) -> list[str]:
        """The columns of a saved dataset that nobody reads; none of a file, and of a token bank's none but what others put there."""
        return [name for name in self._dataset.column_names if name not in (*FIELDS, LENGTH)] if self.path.is_dir() else []

    def __iter__(self) -> Iterator[Record]:
        """Every sample. InputError for a line that is not a JSON object in UTF-8, and for a file cut off."""
        return self._rows() if self.path.is_dir() else self._lines()

    def _lines(self) -> Iterator[Record]:
        for number, line in numbered_lines(self.path, self.max_line_bytes):
            place = f"{self.path}, line {number}"
            value = _object(line, place)
            if value is not None:
                yield Record(place, _name(value.get("id"), f"{self.path.name}:{number}", place), value)

    @property
    def _dataset(self) -> Any:
        import datasets

        try:
            rows = datasets.load_from_disk(str(self.path))
        except (OSError, ValueError, KeyError) as error:
            raise_refusal(error, self.path)
            raise InputError(f"{self.path}: not a saved dataset ({error}). Give one, or a file of JSON lines.") from None
        if not isinstance(rows, datasets.Dataset):
            raise InputError(f"{self.path}: a saved dataset of several splits. Give the folder of one: {', '.join(rows)}.")
        return rows

    def _rows(self) -> Iterator[Record]:
        rows = self._dataset
        rows = rows.select_columns([name for name in FIELDS if name in rows.column_names]).with_format(None)
        for number, value in enumerate(rows):
            place = f"{self.path}, row {number}"
            yield Record(place, _name(value.get("id"), f"{self.path.name}:{number}", place), value)


def _object(line: bytes, place: str) -> dict[str, Any] | None:
    """The object on a line, None for a blank one."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place}, byte {error.start + 1}: not UTF-8 (0x{line[error.start]:02x}). Write the file again."
        ) from None
    if not text.strip():
        return None
    try:
        value = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        raise InputError(f"{place}, column {error.colno}: not JSON ({error.msg}). Expected one object a line.") from None
    except RecursionError:
        raise InputError(f"{place}: nested too deeply to be read. Expected one object a line.") from None
    if not isinstance(value, dict):
        raise InputError(f"{place}: a JSON {type(value).__name__}, expected an object with messages or input_ids.")
    return value


def _name(given: object, default: str, place: str) -> str:
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, str | int) or not is_text(str(given)):
        raise InputError(f"{place}: id is {json.dumps(given)}, expected a string or a whole number, or none.")
    return str(given)


def is_text(value: str) -> bool:
    """Whether a string has an UTF-8 form: JSON can spell halves of surrogate pairs, which have none."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
