"""A digest of what a model *is*: config.json and every weight file, byte for byte; never where it lies or since when.

A file is hashed in fixed pieces, so that one file of many gigabytes still uses every core; a file's digest is the sha256 of its
pieces' digests, the model's that of (name, size, digest) of each file in the order of the names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arrowbank.errors import InputError
from arrowbank.models.source import weight_files

_PIECE = 64 << 20  # bytes; part of the definition of the digest
_READ = 1 << 20


def model_fingerprint(folder: Path, *, code: bool = False) -> str:
    """sha256 (hex) of the model in `folder`; `code` adds its Python files. Raises InputError if files are missing."""
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{folder} has no config.json; expected a model folder as save_pretrained() writes it")
    return files_digest(folder, [config, *weight_files(folder), *(sorted(folder.rglob("*.py")) if code else [])])


def files_digest(folder: Path, files: Iterable[Path]) -> str:
    """sha256 (hex) of the names (relative to `folder`), sizes and bytes of `files`, in the order of the names."""
    named = sorted((file.relative_to(folder).as_posix(), file, file.stat().st_size) for file in files)
    pieces = [(file, start) for _, file, size in named for start in range(0, size, _PIECE)]
    total = hashlib.sha256()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        digests = pool.map(_piece, pieces)
        for name, _, size in named:
            whole = hashlib.sha256()
            for _ in range(0, size, _PIECE):
                whole.update(next(digests))
            total.update(f"{name}\0{size}\0{whole.hexdigest()}\n".encode())
    return total.hexdigest()


def _piece(piece: tuple[Path, int]) -> bytes:
    file, start = piece
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        left = _PIECE
        while left and (block := stream.read(min(left, _READ))):
            digest.update(block)
            left -= len(block)
    return digest.digest()
