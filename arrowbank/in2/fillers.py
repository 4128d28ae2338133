"""Where filler comes from: files of token ids, banks, and records with texts, all read as one long run of ids without loading it.

    NAME.bin   headerless little-endian uint16; or, where it starts with a magic number, llm.c's 256 int32 and then uint16 (GPT-2) or
               uint32 (Llama 3); or, where NAME.idx is beside it, Megatron's
    NAME.ds    datatrove's, as wide as NAME.ds.metadata says
    NAME.npy   a one-dimensional array of integers
    a folder   a token bank of ours, or a texts bank, which is tokenized (its rows follow each other with nothing between)
    records    of any known format, with the field `text` (or another, --text-field): tokenized in the same way

A filler is looked at once before anything is built: every id must lie below the vocabulary. What a file's name says of itself counts:
a train split is not built from a validation file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from arrowbank.bank import Bank, open_bank
from arrowbank.bank.columns import list_values
from arrowbank.bank.files import sha256_of
from arrowbank.bank.kinds.texts_bank import TextsBank
from arrowbank.bank.kinds.tokens_bank import TokensBank
from arrowbank.bank.manifest import MANIFEST, read_json, short_json
from arrowbank.bank.mapped import map_npy
from arrowbank.bank.refusals import raise_refusal
from arrowbank.bank.remote.addresses import is_address
from arrowbank.errors import InputError
from arrowbank.formats.tokens import HEADER_BYTES, LLMC_HEADERS, read_ids
from arrowbank.in2.arm_config import FillerTexts
from arrowbank.inputs.formats import PLAIN, TEXT
from arrowbank.inputs.records import TABLES, Records, is_text
from arrowbank.settings import given, refuse_unread

Ids = npt.NDArray[Any]

LLMC = {magic: (version, np.dtype(kind).itemsize) for kind, (magic, version) in LLMC_HEADERS.items()}
HALVES, FEWEST_HALVES, MOST_HIGH = 1 << 20, 64, 3  # a vocabulary has at most 262,144 ids
BLOCK = 1 << 24
TEXTS_AT_ONCE = 4096
VALIDATION = {"val", "valid", "validation"}


class Filler(Protocol):
    """A run of token ids."""

    def __len__(self) -> int: ...

    def window(self, start: int, length: int) -> Ids:
        """Ids start … start + length − 1."""

    def blocks(self) -> Iterator[Ids]:
        """All ids in order, a piece at a time."""

    @property
    def digest(self) -> str:
        """A sha256 of what decides the ids."""


@dataclass(frozen=True)
class ArrayFiller:
    """Ids in a mapped file."""

    ids: Ids
    path: Path

    def __len__(self) -> int:
        return len(self.ids)

    def window(self, start: int, length: int) -> Ids:
        return self.ids[start : start + length]

    def blocks(self) -> Iterator[Ids]:
        for start in range(0, len(self.ids), BLOCK):
            yield self.ids[start : start + BLOCK]

    @property
    def digest(self) -> str:
        return sha256_of(self.path)


class BankFiller:
    """The ids of a token bank, row after row."""

    def __init__(self, bank: Bank) -> None:
        bank.check_hashes()
        self._bank = bank
        self._parts = [list_values(batch.column("input_ids"))[0] for batch in bank.shards()]
        self._starts = np.cumsum([0, *map(len, self._parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def window(self, start: int, length: int) -> Ids:
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces: list[Ids] = []
        while length and first < len(self._parts):
            low = start - int(self._starts[first])
            piece = self._parts[first][low : low + length]
            pieces.append(piece)
            start, length, first = start + len(piece), length - len(piece), first + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def blocks(self) -> Iterator[Ids]:
        return iter(self._parts)

    @property
    def digest(self) -> str:
        return self._bank.content_digest


class TextFiller:
    """The ids of texts: tokenized once, without special tokens, and kept (four bytes a token). `digest` is of the texts."""

    def __init__(self, texts: Iterable[str], digest: str, tokenizer: str, bad_lines: Callable[[], int] = lambda: 0) -> None:
        from arrowbank.models.tokenizer import encode_texts, load_tokenizer, tokenizer_fingerprint

        loaded = load_tokenizer(tokenizer)
        self.digest = hashlib.sha256(f"{digest} {tokenizer_fingerprint(loaded)}".encode()).hexdigest()
        parts: list[Ids] = [np.empty(0, np.uint32)]
        following = iter(texts)
        while some := list(islice(following, TEXTS_AT_ONCE)):
            encoded = encode_texts(loaded.backend_tokenizer, some)
            parts += [np.array(one.ids, np.uint32) for one in encoded]
        self._ids = np.concatenate(parts)
        self.bad_lines = bad_lines()

    def __len__(self) -> int:
        return len(self._ids)

    def window(self, start: int, length: int) -> Ids:
        return self._ids[start : start + length]

    def blocks(self) -> Iterator[Ids]:
        yield self._ids


def check_names(paths: Sequence[str | Path], split: str) -> None:
    """InputError where a train split is to be built from a file whose name says validation."""
    for path in paths:
        words = set(re.split(r"[^a-z]+", Path(path).name.lower()))
        if split == "train" and (said := words & VALIDATION):
            raise InputError(
                f"{path}: its name says {said.pop()}, and --split is train: a model would be trained on what it is measured on. "
                "Give train files, or --split val."
            )


PLAIN_IDS = FillerTexts()


def open_filler(path: str | Path, texts: FillerTexts = PLAIN_IDS) -> Filler:
    """The filler in `path`; `texts` is how texts become ids. Raises InputError for what is not one; ids are not looked at."""
    suffix = Path(path).suffix.lower()
    if suffix in (".npy", ".bin") and not is_address(path):
        if not Path(path).exists():
            raise InputError(f"{path}: no such filler. Give a file of token ids (.bin, .npy), a bank, or records with texts.")
        if not Path(path).is_dir():
            return ArrayFiller(_npy(Path(path)) if suffix == ".npy" else _bin(Path(path)), Path(path))
    if suffix == ".ds" and not is_address(path):
        return ArrayFiller(_ds(Path(path)), Path(path))
    if (Path(path) / MANIFEST).exists():
        return _open_bank(Path(path), texts.tokenizer)
    records = _records(path, texts)
    if texts.tokenizer is None:
        raise InputError(
            f"{path}: holds texts: say how they become ids with --tokenizer M, or give token ids (.bin, .npy, a bank)."
        )
    read = given(texts, ["text_field", "on_bad_line"])  # with the defaults, the digest is that of the records alone
    digest = " ".join([records.sha256, *(f"{name}={value}" for name, value in read.items())])
    return TextFiller(_texts(records), digest, texts.tokenizer, lambda: records.bad_lines)


def _records(path: str | Path, texts: FillerTexts) -> Records:
    """The records in `path`, which are read for one field."""
    field, skip = texts.text_field or TEXT, texts.on_bad_line == "skip"
    return Records(path, (field,), skip_bad_lines=skip, max_line_bytes=texts.max_line_bytes)


def _texts(records: Records) -> Iterator[str]:
    (field,) = records.fields
    for record in records:
        text = record.value.get(field)
        if not isinstance(text, str) or not is_text(text):
            raise InputError(
                f"{record.place}: {short_json(record.value)}; expected an object with a text under {field!r}. Give --text-field NAME for "
                "where texts are."
            )
        yield text


def _open_bank(path: Path, tokenizer: str | None) -> Filler:
    bank = open_bank(path)
    if isinstance(bank, TokensBank):
        return BankFiller(bank)
    if not isinstance(bank, TextsBank):
        raise InputError(f"{path}: a bank of {bank.kind}; filler is tokens or texts.")
    if tokenizer is None:
        raise InputError(f"{path}: a bank of texts: say how they become ids with --tokenizer M, or give a bank of tokens.")
    bank.check_hashes()
    texts = (text for batch in bank.shards() for text in _strings(batch.column("text")))
    return TextFiller(texts, bank.content_digest, tokenizer)


def _strings(column: Any) -> Iterator[str]:
    for start in range(0, len(column), TEXTS_AT_ONCE):
        yield from column.slice(start, TEXTS_AT_ONCE).to_pylist()


def _bin(path: Path) -> Ids:
    size = path.stat().st_size
    if not size:
        raise InputError(f"{path}: is empty. Give a file of token ids.")
    if path.with_suffix(".idx").is_file():  # Megatron's, which says how wide a token is
        return read_ids("megatron", path, None)
    header = np.fromfile(path, "<i4", count=3)
    if len(header) == 3 and int(header[0]) in LLMC:
        version, width = LLMC[int(header[0])]
        if header[1] != version or size != HEADER_BYTES + width * int(header[2]):
            raise InputError(
                f"{path}: an llm.c file of version {header[1]} that announces {header[2]:,} tokens in {size:,} bytes; expected "
                f"version {version} and {HEADER_BYTES} + {width} × tokens bytes. It was cut, or is of another kind."
            )
        return np.asarray(np.memmap(path, f"<u{width}", mode="r", offset=HEADER_BYTES))
    if size % 2:
        raise InputError(f"{path}: {size} bytes, ends inside a token (uint16). It was cut, or is no file of token ids.")
    ids = np.asarray(np.memmap(path, "<u2", mode="r"))  # a plain array: a window of it is made in no time
    _refuse_halves(path, ids)
    return ids


def _refuse_halves(path: Path, ids: Ids) -> None:
    """InputError for ids of 32 bits: read as 16 bits, every second one is almost nothing, and the others are not."""
    low, high = (ids[start:HALVES:2] for start in (0, 1))
    if len(high) >= FEWEST_HALVES and (high <= MOST_HIGH).mean() > 0.99 and (low > MOST_HIGH).mean() > 0.5:
        raise InputError(
            f"{path}: every second token is at most {MOST_HIGH}, so these are the halves of uint32 ids; a .bin without a header is read as "
            "uint16. Save it as .npy, which says its type: np.save('filler.npy', np.fromfile(path, '<u4'))."
        )


def _ds(path: Path) -> Ids:
    """datatrove's tokens, whose width NAME.ds.metadata says."""
    if not path.is_file():
        raise InputError(f"{path}: no such filler. Give a file of token ids (.bin, .npy, .ds), a bank, or records with texts.")
    return read_ids("nanotron", path, None)


def _npy(path: Path) -> Ids:
    try:
        ids: Ids = map_npy(path)
    except (ValueError, OSError) as error:
        raise_refusal(error, path)
        raise InputError(f"{path}: not readable as .npy ({error}). Give a one-dimensional array of token ids.") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{path}: {ids.dtype} of shape {ids.shape}; expected a one-dimensional array of integers.")
    return ids


def open_fillers(
    paths: Sequence[str | Path], *, length: int, vocab: int, texts: FillerTexts = PLAIN_IDS
) -> tuple[list[Filler], list[dict[str, Any]]]:
    """The fillers in `paths` and what the manifest says of each (path, tokens, sha256).

    Every id is looked at. Raises InputError for a filler that is missing, too short, or holds an id outside [0, vocab).
    """
    if not paths:
        raise InputError("--filler: give at least one file of token ids, or a bank of tokens or texts.")
    _refuse_unread(paths, texts)
    opened, entries = [], []
    for path in paths:
        filler = open_filler(path, texts)
        if len(filler) < length + 1:
            raise InputError(
                f"{path}: {len(filler):,} tokens, too short: --length {length} needs at least {length + 1:,}. Give a longer "
                "filler or a smaller --length."
            )
        _check_ids(path, filler, vocab)
        opened.append(filler)
        entry = {"path": str(path), "tokens": len(filler), "sha256": filler.digest}
        entries.append(entry | ({"bad_lines": filler.bad_lines} if isinstance(filler, TextFiller) and filler.bad_lines else {}))
    return opened, entries


def _refuse_unread(paths: Sequence[str | Path], texts: FillerTexts) -> None:
    """InputError for an option about texts that none of the fillers needs."""
    banks = [Path(path) for path in paths if not is_address(path) and (Path(path) / MANIFEST).is_file()]
    others = [path for path in paths if is_address(path) or Path(path) not in banks]
    readable = [path for path in others if is_address(path) or Path(path).suffix.lower() not in (".npy", ".bin", ".ds")]
    if not readable and not any(read_json(bank / MANIFEST).get("kind") == "texts" for bank in banks):
        refuse_unread("fillers that are token ids", texts, ["tokenizer"])
    if not readable:
        refuse_unread("fillers that are no records (token ids, banks)", texts, ["text_field", "on_bad_line", "max_line_bytes"])
    elif given(texts, ["text_field", "on_bad_line", "max_line_bytes"]):
        found = [_records(path, texts) for path in readable]
        if all(records.are_rows for records in found):
            refuse_unread(TABLES, texts, ["on_bad_line", "max_line_bytes"])
        if any(file.format is PLAIN for records in found for file in records.source.files):
            refuse_unread("text files, whose lines have no fields", texts, ["text_field"])


def unread_beside(paths: Sequence[str | Path]) -> list[str]:
    """The files beside those of token ids that go by their names (masks, document bounds, manifests), which nobody reads."""
    files = [path for path in map(Path, paths) if path.is_file()]
    return [
        str(other)
        for path in files
        for other in sorted(path.parent.iterdir())
        if other.name.startswith((f"{path.stem}.", f"{path.name}.", f"{path.stem}_mask")) and other not in files
    ]


def _check_ids(path: str | Path, filler: Filler, vocab: int) -> None:
    start = 0
    for block in filler.blocks():
        low, high = (int(block.min()), int(block.max())) if len(block) else (0, 0)
        if low < 0 or high >= vocab:
            at = int(np.flatnonzero((block < 0) | (block >= vocab))[0])
            wide = " --vocab past 65,536 needs --dtype uint32." if high >= 1 << 16 else ""
            raise InputError(
                f"{path}: id {int(block[at])} at token {start + at:,}; expected 0 to {vocab - 1} (--vocab {vocab}). Give the "
                f"filler of this vocabulary, or the right --vocab.{wide}"
            )
        start += len(block)
