"""Files under addresses, with what this wing asks of a `Path`: hf://datasets/OWNER/NAME[@REVISION][/PATH], and what fsspec reaches.

They are streamed and never stored here. A login in an address goes to the filesystem as an option and is in no message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arrowbank.bank.remote.addresses import HUB, WEB, is_address, parse_address
from arrowbank.bank.remote.hub import hub_errors
from arrowbank.bank.remote.objects import ObjectStore, object_errors
from arrowbank.errors import InputError
from arrowbank.secrets import know_hub_token

READ_AHEAD = 1 << 22  # bytes of a file that are asked for at a time

_ON_HUB = re.compile(r"(hf://datasets/[^/@]+/[^/@]+(?:@(?:refs/[^/]+/)?[^/]+)?)(?:/(.*))?")


@dataclass(frozen=True)
class RemotePath:
    """`key` in the fsspec filesystem `fs`; `shown` is for people."""

    fs: Any
    key: str
    shown: str

    def __str__(self) -> str:
        return self.shown

    def __truediv__(self, name: str) -> RemotePath:
        return replace(self, key=f"{self.key}/{name}", shown=f"{self.shown}/{name}")

    @property
    def name(self) -> str:
        return self.shown.partition("?")[0].rpartition("/")[2]

    @contextmanager
    def refused(self) -> Iterator[None]:
        """What the filesystem raises, as ours; InputError for a file that is not there."""
        with hub_errors(self.shown) if self.shown.startswith(HUB) else object_errors(self.shown, but=(FileNotFoundError,)):
            try:
                yield
            except FileNotFoundError:
                raise InputError(f"{self.shown}: no such file. Restore it, or name another source.") from None

    @property
    def is_repository(self) -> bool:
        """Whether it is all of a repository on the hub."""
        return self.shown.startswith(HUB) and self.key.count("/") == 2

    def exists(self) -> bool:
        with self.refused():
            return bool(self.fs.exists(self.key))

    def is_dir(self) -> bool:
        with self.refused():
            return not self._on_web and bool(self.fs.isdir(self.key))

    def is_file(self) -> bool:
        with self.refused():
            return bool(self.fs.isfile(self.key))

    def files(self) -> list[RemotePath]:
        """The files of the folder."""
        with self.refused():
            entries = self.fs.ls(self.key, detail=True)
        names = (str(entry["name"]).rpartition("/")[2] for entry in entries if entry["type"] == "file")
        return [self / name for name in sorted(names) if name]

    def matching(self) -> list[RemotePath]:
        """The files that the name matches, where it has signs of a pattern."""
        if self._on_web:
            return []
        fixed = re.split(r"[*?\[]", self.key, maxsplit=1)[0].rpartition("/")[0]
        above = self.shown[: len(self.shown) - len(self.key) + len(fixed)]
        with self.refused():
            found = sorted(str(key) for key in self.fs.glob(self.key) if self.fs.isfile(key))
        return [replace(self, key=key, shown=above + key[len(fixed) :]) for key in found if key.startswith(fixed)]

    def open(self) -> Any:
        """The file, open for reading as bytes."""
        with self.refused():
            return self.fs.open(self.key, "rb", block_size=READ_AHEAD)

    def identity(self) -> tuple[Any, ...]:
        """What tells that the file is the same: its size, and what its store says of its contents."""
        with self.refused():
            self.fs.invalidate_cache()
            info = self.fs.info(self.key)
        marks = ("ETag", "etag", "md5", "content_md5", "blob_id", "LastModified", "last_modified", "mtime", "created")
        return 0, 0, int(info.get("size") or 0), *(str(info[mark]) for mark in marks if info.get(mark))

    @property
    def _on_web(self) -> bool:
        return self.shown.partition("://")[0].lower() in WEB


def place_of(value: str | Path) -> Path | RemotePath:
    """A path on this machine, or the place of an address. InputError for an address that is none, MissingDependency."""
    if not is_address(value):
        return Path(value)
    value = str(value)
    if value.startswith(HUB):
        return _on_hub(value)
    address = parse_address(value)
    if address.local is not None:
        return address.local
    store = ObjectStore(address)
    query = address.query.reveal()
    return RemotePath(store.fs, store.root + (f"?{query}" if query else ""), address.shown)


def _on_hub(value: str) -> RemotePath:
    found = _ON_HUB.fullmatch(value.rstrip("/"))
    address = parse_address(found[1] if found else value)  # refuses what is none
    from huggingface_hub import HfFileSystem

    know_hub_token()
    shown = address.shown + (f"/{found[2]}" if found and found[2] else "")
    return RemotePath(HfFileSystem(), shown.removeprefix(HUB), shown)
