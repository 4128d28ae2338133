"""Token files read back as their loaders read them: headers, indexes and sizes must agree. The writers are in `tokenshards.py`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.manifest import read_json
from arrowbank.bank.names import check_places
from arrowbank.bank.npyfile import map_npy
from arrowbank.errors import CorruptBank, InputError
from arrowbank.formats.sidecar import SIDECAR, find_sidecar, sidecar_in
from arrowbank.formats.tokenshards import LAYOUTS, LLMC_HEADER, MEGATRON_CODES, MEGATRON_MAGIC

Ids = npt.NDArray[Any]
HEADER_BYTES = 1024


class TokenExport:
    """An export of an arm. `said` is its sidecar, `shards` are its files' ids, mapped.

    Raises InputError for a folder that is none, CorruptBank where files are missing or do not agree with their headers.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.said = sidecar_in(self.folder)
        if self.said.get("format") not in LAYOUTS:
            raise InputError(f"{folder}: not an export of an arm. Give a folder that `arrowbank export` has written.")
        self._listed = {entry["name"] for entry in self.said["files"]}
        check_places(self.folder, self._listed, self.folder / SIDECAR)
        try:
            self.shards = [self._shard(entry["name"], entry["tokens"]) for entry in self.said["shards"]]
        except (KeyError, TypeError) as error:
            raise CorruptBank(f"{self.folder / SIDECAR}: no usable shards ({error!r}). Export again.") from None

    def _shard(self, name: str, tokens: int) -> Ids:
        if name not in self._listed:
            raise CorruptBank(f"{self.folder / SIDECAR}: shard {name!r} is not among its files. Export again.")
        ids = read_ids(self.said["format"], self.folder / name, self.said["dtype"])
        if len(ids) != tokens:
            raise CorruptBank(f"{self.folder / name}: {len(ids):,} tokens, {SIDECAR} says {tokens:,}. Export again.")
        return ids


def is_token_export(folder: Path) -> bool:
    """Whether `folder` holds an export of an arm."""
    path = find_sidecar(folder)
    said = read_json(path) if path else {}
    return isinstance(said, dict) and said.get("format") in LAYOUTS


def read_ids(format: str, path: Path, dtype: str | None) -> Ids:
    """The ids in the file `path` of one of LAYOUTS, mapped. `dtype` is that of an export of an arm, whose documents are its examples;
    None: the file is another program's, and uint16 where it does not say more. CorruptBank where its header, or an index beside it,
    does not agree with it."""
    try:
        return _READERS[format](path, dtype)
    except (OSError, ValueError, struct.error) as error:
        raise CorruptBank(f"{path}: not readable as {format} ({error}). Export again.") from None


def _raw(path: Path, dtype: str | None) -> Ids:
    return np.asarray(np.memmap(path, dtype or "<u2", mode="r"))


def _llmc(path: Path, dtype: str | None) -> Ids:
    header = np.fromfile(path, "<i4", 256)
    ids = np.asarray(np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES))
    _require(header[:2].tolist() == list(LLMC_HEADER) and not header[3:].any(), "another header")
    _require(int(header[2]) == len(ids), f"the header announces {header[2]:,} tokens, {len(ids):,} are there")
    return ids


def _npy(path: Path, dtype: str | None) -> Ids:
    ids = map_npy(path)
    _require(ids.dtype == np.uint16 and ids.ndim == 1, f"{ids.dtype} of shape {ids.shape}")
    return ids


def _megatron(path: Path, dtype: str | None) -> Ids:
    index = path.with_suffix(".idx").read_bytes()
    magic, fixed = len(MEGATRON_MAGIC), struct.calcsize("<QBQQ")
    version, code, count, documents = struct.unpack_from("<QBQQ", index, magic)
    kinds = {code: kind for kind, code in MEGATRON_CODES.items() if dtype in (None, kind)}
    _require(index[:magic] == MEGATRON_MAGIC and version == 1 and code in kinds, "another index header")
    ids = _raw(path, kinds[code])
    at = magic + fixed
    _require(len(index) == at + 12 * count + 8 * documents, f"the index has {len(index)} bytes")
    lengths = np.frombuffer(index, "<i4", count, at)
    pointers = np.frombuffer(index, "<i8", count, at + 4 * count)
    ends = np.frombuffer(index, "<i8", documents, at + 12 * count)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    _require(np.array_equal(pointers, starts * ids.itemsize), "pointers are not where sequences start")
    if dtype:
        _require(np.array_equal(ends, np.arange(count + 1)), "a document is not one example")
    _require(documents > 0 and (int(ends[0]), int(ends[-1])) == (0, count), "documents do not end with the sequences")
    _require(bool((np.diff(ends) >= 0).all()) and bool((lengths >= 0).all()), "sequences or documents of negative length")
    _require(int(lengths.sum(dtype=np.int64)) == len(ids), "sequences do not add up to the tokens")
    return ids


def _nanotron(path: Path, dtype: str | None) -> Ids:
    said = Path(f"{path}.metadata").read_text().split("\n")
    width = said[0].rpartition("|")[2]
    _require(width == "2" or (width == "4" and dtype is None), "the metadata says another width of a token")
    ids, ends = _raw(path, f"<u{width}"), np.fromfile(f"{path}.index", "<u8")
    _require(len(ends) > 0 and int(ends[-1]) == len(ids), "documents do not end where the tokens do")
    _require(bool((ends[1:] >= ends[:-1]).all()), "documents of negative length")
    _require(int(said[1]) == len(ids), "the metadata says otherwise")
    return ids


_READERS: dict[str, Callable[[Path, str | None], Ids]] = {
    "raw": _raw,
    "llmc": _llmc,
    "nanogpt-npy": _npy,
    "megatron": _megatron,
    "nanotron": _nanotron,
}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
