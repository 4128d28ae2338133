"""A place to push to, and a file that is to lie there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from arrowbank.bank.manifest import FileEntry
from arrowbank.bank.remote.addresses import Address
from arrowbank.bank.remote.hub import MAIN, TYPE, HubStore, hub_errors, without_bars
from arrowbank.bank.remote.objects import BLOCK, ObjectStore, object_errors
from arrowbank.bank.remote.stores import AT_ONCE, Report, Store, StoredFile, side_by_side
from arrowbank.errors import CorruptBank, InputError


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A file that is to lie at the place under `name`: bytes, or a file of the bank, with the size and sha256 it must have."""

    name: str
    source: Path | bytes
    size: int
    sha256: str

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> Outgoing:
        return cls(name=name, source=data, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    @classmethod
    def of_entry(cls, folder: Path, entry: FileEntry) -> Outgoing:
        """A file as the manifest lists it."""
        return cls(name=entry.name, source=folder / entry.name, size=entry.bytes, sha256=entry.sha256)

    def contents(self) -> bytes:
        """The file whole; for small ones."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    @property
    def entry(self) -> dict[str, Any]:
        """As the manifest would list it."""
        return {"name": self.name, "bytes": self.size, "sha256": self.sha256}


class PushPlace(Store, Protocol):
    """A store that can be written to."""

    hub: bool

    def visit(self, *, public: bool) -> bool:
        """Whether the place is there already. InputError where what `public` says cannot be had."""

    def create(self, *, public: bool) -> None:
        """Make the place."""

    def is_right(self, file: Outgoing, found: StoredFile | None) -> bool:
        """Whether what lies there is the file, as far as the place can tell."""

    def send(self, files: Sequence[Outgoing], message: str, report: Report) -> None:
        """Put files there; `report` is called with the bytes of each that is done."""

    def remove(self, names: Iterable[str], message: str) -> None:
        """Take files away."""

    def facts(self) -> dict[str, Any]:
        """Where a person or a program finds it, and which commit that is now."""


PIECE_BYTES = 4 << 30
PIECE_FILES = 64


class HubPlace(HubStore):
    """The main branch of a dataset repository, as it is at each call."""

    hub = True

    @property
    def commit(self) -> str:
        return MAIN

    def visit(self, *, public: bool) -> bool:
        with hub_errors(self.shown):
            if get_token() is None:
                raise InputError(f"{self.shown}: no login for the hub here. `hf auth login`, or set HF_TOKEN, and push again.")
            try:
                private = bool(self.api.repo_info(self.repo, repo_type=TYPE).private)
            except RepositoryNotFoundError:
                return False
        if private == public:
            is_, wish = (
                ("private", "leave --public out") if private else ("public", "give --public if everybody may read this bank")
            )
            raise InputError(
                f"{self.shown}: is there already and is {is_}; a push does not change that. Either {wish}, or change it on the "
                "repository's settings page, or give another name."
            )
        return True

    def create(self, *, public: bool) -> None:
        with hub_errors(self.shown):
            self.api.create_repo(self.repo, repo_type=TYPE, private=not public)

    def is_right(self, file: Outgoing, found: StoredFile | None) -> bool:
        if found is None or found.size != file.size:
            return False
        if found.sha256:
            return found.sha256 == file.sha256
        return found.blob == _blob(file)

    def send(self, files: Sequence[Outgoing], message: str, report: Report) -> None:
        for piece in pieces(files):
            operations = [_addition(file) for file in piece]
            with hub_errors(self.shown), without_bars():
                for first in range(0, len(piece), AT_ONCE):
                    self.api.preupload_lfs_files(
                        self.repo, operations[first : first + AT_ONCE], repo_type=TYPE, num_threads=AT_ONCE, free_memory=False
                    )
                    report(sum(file.size for file in piece[first : first + AT_ONCE]))
                self.api.create_commit(self.repo, operations, commit_message=message, repo_type=TYPE)

    def remove(self, names: Iterable[str], message: str) -> None:
        operations = [CommitOperationDelete(path_in_repo=name) for name in names]
        if operations:
            with hub_errors(self.shown):
                self.api.create_commit(self.repo, operations, commit_message=message, repo_type=TYPE)

    def facts(self) -> dict[str, Any]:
        with hub_errors(self.shown):
            info = self.api.repo_info(self.repo, repo_type=TYPE)
        return {"url": f"{self.api.endpoint}/datasets/{self.repo}", "private": bool(info.private), "commit": str(info.sha)}


def pieces(files: Sequence[Outgoing]) -> Iterator[list[Outgoing]]:
    """`files` in order, in lists of at most PIECE_FILES files and PIECE_BYTES bytes (or one file that is larger)."""
    piece: list[Outgoing] = []
    for file in files:
        if piece and (len(piece) == PIECE_FILES or sum(other.size for other in piece) + file.size > PIECE_BYTES):
            yield piece
            piece = []
        piece.append(file)
    if piece:
        yield piece


def _addition(file: Outgoing) -> CommitOperationAdd:
    return CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file.source)


def _blob(file: Outgoing) -> str:
    """Git's name of the file's contents, which have to be those that the manifest vouches for."""
    data = file.contents()
    if hashlib.sha256(data).hexdigest() != file.sha256:
        name = file.source if isinstance(file.source, Path) else file.name
        raise CorruptBank(f"{name}: has changed since it was verified. Leave the bank alone and push again.")
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"}


class ObjectPlace(ObjectStore):
    """The folder as it is at each call."""

    hub = False

    def __init__(self, address: Address, *, read_back: bool) -> None:
        super().__init__(address)
        self.read_back = read_back

    def visit(self, *, public: bool) -> bool:
        if public:
            raise InputError(f"{self.shown}: --public is for repositories on the hub; who may read this is set where it lies.")
        return bool(self.listing())

    def create(self, *, public: bool) -> None:
        if self.address.url.partition("://")[0] not in WITHOUT_FOLDERS:
            with object_errors(self.shown):
                self.fs.makedirs(self.root, exist_ok=True)

    def is_right(self, file: Outgoing, found: StoredFile | None) -> bool:
        if found is None or found.size != file.size:
            return False
        return not self.read_back or self._sha256(file) == file.sha256

    def _sha256(self, file: Outgoing) -> str:
        digest = hashlib.sha256()
        with object_errors(f"{self.shown}/{file.name}"):
            for start in range(0, file.size, BLOCK):
                digest.update(self.fs.cat_file(self.path(file.name), start=start, end=min(file.size, start + BLOCK)))
        return digest.hexdigest()

    def send(self, files: Sequence[Outgoing], message: str, report: Report) -> None:
        def put(file: Outgoing) -> int:
            with object_errors(f"{self.shown}/{file.name}"):
                if isinstance(file.source, bytes):
                    self.fs.pipe_file(self.path(file.name), file.source)
                else:
                    self.fs.put_file(str(file.source), self.path(file.name))
            return file.size

        side_by_side(put, files, report)

    def remove(self, names: Iterable[str], message: str) -> None:
        for name in names:
            with object_errors(f"{self.shown}/{name}"):
                self.fs.rm_file(self.path(name))

    def facts(self) -> dict[str, Any]:
        return {"url": self.shown}
