"""A place to push to, and a file that is to lie there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from arrowbank.bank.remote.stores import Report, Store, Stored


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
    def of_entry(cls, folder: Path, entry: dict[str, Any]) -> Outgoing:
        """A file as the manifest lists it."""
        return cls(name=entry["name"], source=folder / entry["name"], size=entry["bytes"], sha256=entry["sha256"])

    def contents(self) -> bytes:
        """The file whole; for small ones."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    @property
    def entry(self) -> dict[str, Any]:
        """As the manifest would list it."""
        return {"name": self.name, "bytes": self.size, "sha256": self.sha256}


class Place(Store, Protocol):
    """A store that can be written to."""

    hub: bool

    def visit(self, *, public: bool) -> bool:
        """Whether the place is there already. InputError where what `public` says cannot be had."""

    def create(self, *, public: bool) -> None:
        """Make the place."""

    def is_right(self, file: Outgoing, found: Stored | None) -> bool:
        """Whether what lies there is the file, as far as the place can tell."""

    def send(self, files: Sequence[Outgoing], message: str, report: Report) -> None:
        """Put files there; `report` is called with the bytes of each that is done."""

    def remove(self, names: Iterable[str], message: str) -> None:
        """Take files away."""

    def facts(self) -> dict[str, Any]:
        """Where a person or a program finds it, and which commit that is now."""
