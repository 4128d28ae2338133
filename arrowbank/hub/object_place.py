"""A folder under an fsspec address to push to.

Such stores list sizes, and no hash that means the same everywhere: what lies there is proved by reading it back, unless `read_back`
is off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from arrowbank.bank.remote.addresses import Address
from arrowbank.bank.remote.objects import BLOCK, ObjectStore, object_errors
from arrowbank.bank.remote.stores import Report, Stored, side_by_side
from arrowbank.errors import InputError
from arrowbank.hub.places import Outgoing

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

    def is_right(self, file: Outgoing, found: Stored | None) -> bool:
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
