"""A folder under any fsspec address: S3, Google's and Azure's stores, memory, a shared disk.

Credentials and endpoints come from where each filesystem looks for them (for S3: AWS_* and its config files).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arrowbank.bank.files import explained
from arrowbank.bank.remote.addresses import Address, without_credentials
from arrowbank.bank.remote.stores import Report, Stored
from arrowbank.errors import InputError, MissingDependency, RemoteError

BLOCK = 1 << 25
EXTRAS = {"s3": "arrowbank[s3]", "s3a": "arrowbank[s3]"}


class ObjectStore:
    """The folder at an fsspec address."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.fs, self.root = _filesystem(address)

    @property
    def shown(self) -> str:
        return self.address.shown

    def path(self, name: str) -> str:
        """Where the file `name` lies in the filesystem's own spelling."""
        return f"{self.root}/{name}"

    def listing(self) -> dict[str, Stored]:
        with object_errors(self.shown):
            self.fs.invalidate_cache()
            try:
                entries = self.fs.ls(self.root, detail=True)
            except FileNotFoundError:
                return {}
        files = [entry for entry in entries if entry["type"] == "file"]
        return {str(entry["name"]).rpartition("/")[2]: Stored(size=int(entry["size"])) for entry in files}

    def read(self, name: str) -> bytes:
        with object_errors(f"{self.shown}/{name}"):
            return bytes(self.fs.cat_file(self.path(name)))

    def fetch(self, name: str, size: int, work: Path, report: Report) -> Path:
        """Bring a file in blocks; what an earlier call got of it is kept."""
        place = work / name
        with explained(place), place.open("ab") as file:
            if file.tell() > size:
                file.truncate(0)
            for start in range(file.tell(), size, BLOCK):
                report(file.write(self._block(name, start, min(size, start + BLOCK))))
        return place

    def _block(self, name: str, start: int, end: int) -> bytes:
        with object_errors(f"{self.shown}/{name}"):
            return bytes(self.fs.cat_file(self.path(name), start=start, end=end))


def _filesystem(address: Address) -> tuple[Any, str]:
    """fsspec's filesystem and the folder's path in it."""
    from fsspec.core import url_to_fs

    scheme = address.url.partition("://")[0]
    try:
        fs, root = url_to_fs(address.url)
    except ImportError as error:
        what = EXTRAS.get(scheme)
        install = f"pip install '{what}'" if what else "Install the package that it names"
        raise MissingDependency(f"{address.shown}: needs a package that is not installed ({error}). {install}.") from None
    except ValueError as error:
        raise InputError(
            f"{address.shown}: {without_credentials(str(error))}. Give an address as in s3://bucket/prefix."
        ) from None
    return fs, root.rstrip("/")


@contextmanager
def object_errors(shown: str) -> Iterator[None]:
    """Tell what a filesystem raises as ours."""
    try:
        yield
    except _refusals() as error:
        said = without_credentials(str(error))
        raise RemoteError(
            f"{shown}: {type(error).__name__}: {said}. What is finished is kept: the same command goes on from there."
        ) from None


def _refusals() -> tuple[type[BaseException], ...]:
    """What filesystems raise for refusals: OSError; and the client's own class of errors where S3's is loaded."""
    client = sys.modules.get("botocore.exceptions")
    return (OSError,) if client is None else (OSError, client.BotoCoreError, client.ClientError)
