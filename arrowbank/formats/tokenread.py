"""Token files read back as their loaders read them: headers, indexes and sizes must agree. The writers are in `tokenshards.py`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.manifest import read_json
from arrowbank.bank.names import check_names, check_places
from arrowbank.errors import CorruptBank, InputError
from arrowbank.formats.exported import NOTE
from arrowbank.formats.tokenshards import LAYOUTS, LLMC_HEADER, MEGATRON_CODES, MEGATRON_MAGIC

Ids = npt.NDArray[Any]
HEADER_BYTES = 1024


class TokenExport:
    """An export of an arm. `shards` are its files' ids, mapped.

    Raises InputError for a folder that is none, CorruptBank where files are missing or do not agree with their headers.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not is_token_export(self.folder):
            raise InputError(f"{folder}: no export of an arm. Give a folder that `arrowbank export` has written.")
        self.note: dict[str, Any] = read_json(self.folder / NOTE)
        self._check_names()
        self.shards = [self._shard(entry) for entry in self.note["shards"]]

    def _check_names(self) -> None:
        """UnsafeName for a shard, or a file that belongs to it, whose name or place is not in the folder."""
        names = check_names((entry["name"] for entry in self.note["shards"]), self.folder / NOTE)
        endings = tuple(LAYOUTS[self.note["format"]].files)
        files = [f"{name.removesuffix(endings[0])}{ending}" for name in names for ending in endings]
        check_places(self.folder, [NOTE, *files], self.folder / NOTE)

    def _shard(self, entry: dict[str, Any]) -> Ids:
        path = self.folder / entry["name"]
        try:
            ids = _READERS[self.note["format"]](path, self.note["dtype"])
        except (OSError, ValueError, struct.error) as error:
            raise CorruptBank(f"{path}: not readable as {self.note['format']} ({error}). Export again.") from None
        if len(ids) != entry["tokens"]:
            raise CorruptBank(f"{path}: {len(ids):,} tokens, {NOTE} says {entry['tokens']:,}. Export again.")
        return ids


def is_token_export(folder: Path) -> bool:
    """Whether `folder` holds an export of an arm."""
    return (folder / NOTE).is_file() and read_json(folder / NOTE).get("format") in LAYOUTS


def _raw(path: Path, dtype: str) -> Ids:
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _llmc(path: Path, dtype: str) -> Ids:
    header = np.fromfile(path, "<i4", 256)
    ids = np.asarray(np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES))
    _require(header[:2].tolist() == list(LLMC_HEADER) and not header[3:].any(), "another header")
    _require(int(header[2]) == len(ids), f"the header announces {header[2]:,} tokens, {len(ids):,} are there")
    return ids


def _npy(path: Path, dtype: str) -> Ids:
    ids = np.load(path, mmap_mode="r", allow_pickle=False)
    _require(ids.dtype == np.uint16 and ids.ndim == 1, f"{ids.dtype} of shape {ids.shape}")
    return np.asarray(ids)


def _megatron(path: Path, dtype: str) -> Ids:
    ids, index = _raw(path, dtype), path.with_suffix(".idx").read_bytes()
    magic, fixed = len(MEGATRON_MAGIC), struct.calcsize("<QBQQ")
    version, code, count, documents = struct.unpack_from("<QBQQ", index, magic)
    _require(index[:magic] == MEGATRON_MAGIC and (version, code) == (1, MEGATRON_CODES[dtype]), "another index header")
    at = magic + fixed
    _require(len(index) == at + 12 * count + 8 * documents, f"the index has {len(index)} bytes")
    lengths = np.frombuffer(index, "<i4", count, at)
    pointers = np.frombuffer(index, "<i8", count, at + 4 * count)
    ends = np.frombuffer(index, "<i8", documents, at + 12 * count)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    _require(np.array_equal(pointers, starts * ids.itemsize), "pointers are not where documents start")
    _require(np.array_equal(ends, np.arange(count + 1)), "a document is not one example")
    _require(int(lengths.sum(dtype=np.int64)) == len(ids), "documents do not add up to the tokens")
    return ids


def _nanotron(path: Path, dtype: str) -> Ids:
    ids, ends = _raw(path, dtype), np.fromfile(f"{path}.index", "<u8")
    said = Path(f"{path}.metadata").read_text().split("\n")
    _require(len(ends) > 0 and int(ends[-1]) == len(ids), "documents do not end where the tokens do")
    _require(said[0].endswith("|2") and int(said[1]) == len(ids), "the metadata says otherwise")
    return ids


_READERS: dict[str, Callable[[Path, str], Ids]] = {
    "raw": _raw,
    "llmc": _llmc,
    "nanogpt-npy": _npy,
    "megatron": _megatron,
    "nanotron": _nanotron,
}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
