"""A dataset repository to push to.

Large files go to the hub's file store first, a few at once, and are then named by commits of at most PIECE_BYTES each: what is in a
commit is found by the next push in the repository's tree, and what is only in the file store the hub itself does not ask for again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from arrowbank.bank.remote.hub import MAIN, TYPE, HubStore, hub_errors, without_bars
from arrowbank.bank.remote.stores import AT_ONCE, Report, Stored
from arrowbank.errors import CorruptBank, InputError
from arrowbank.hub.places import Outgoing

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

    def is_right(self, file: Outgoing, found: Stored | None) -> bool:
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
