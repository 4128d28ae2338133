"""A folder under any fsspec address: S3, Google's and Azure's stores, memory, a shared disk.

Credentials and endpoints come from where each filesystem looks for them (for S3: AWS_* and its config files). A user and password in the
address come first. They go to the filesystem as its options, never in a name.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arrowbank.bank.refusals import explained
from arrowbank.bank.remote.addresses import ELSEWHERE, WEB, Address
from arrowbank.bank.remote.stores import Report, StoredFile
from arrowbank.errors import ArrowbankError, InputError, MissingDependency, RemoteError

BLOCK = 1 << 25
EXTRAS = {"s3": "arrowbank[s3]", "s3a": "arrowbank[s3]"}
LOGINS = {  # what filesystems call user and password
    **dict.fromkeys(("s3", "s3a"), ("key", "secret")),
    **dict.fromkeys(("ftp", "sftp", "ssh", "smb", "webdav", "webdavs", "hdfs"), ("username", "password")),
}


UNUSABLE = (ValueError, TypeError, AttributeError)  # of an address: no such store, or one that wants more than an address


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

    def listing(self) -> dict[str, StoredFile]:
        with object_errors(self.shown):
            self.fs.invalidate_cache()
            try:
                entries = self.fs.ls(self.root, detail=True)
            except FileNotFoundError:
                return {}
        files = [entry for entry in entries if entry["type"] == "file"]
        return {str(entry["name"]).rpartition("/")[2]: StoredFile(size=int(entry["size"])) for entry in files}

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
    """fsspec's filesystem and the folder's path in it.

    Not by `url_to_fs`: it takes an address apart at each `::`, so that a part of a name became a folder of this machine.
    """
    from fsspec import get_filesystem_class

    try:
        options = _options(address)
        with object_errors(address.shown, but=UNUSABLE):  # some connect right here
            store = get_filesystem_class(address.url.partition("://")[0])
            fs = store(**{**store._get_kwargs_from_urls(address.url), **options})
            root = str(fs._strip_protocol(address.url))
    except ImportError as error:
        what = EXTRAS.get(address.scheme)
        install = f"pip install '{what}'" if what else "Install the package that it names"
        raise MissingDependency(f"{address.shown}: needs a package that is not installed ({error}). {install}.") from None
    except UNUSABLE as error:
        raise InputError(f"{address.shown}: {error}. Give an address as in s3://bucket/prefix.") from None
    return fs, root.rstrip("/")


def _options(address: Address) -> dict[str, Any]:
    """The user and password of an address under the names that its filesystem has for them."""
    if address.login.reveal() is None:
        return {}
    user, password = address.login.reveal()
    if address.scheme in WEB:
        login = base64.b64encode(f"{user}:{password}".encode()).decode()
        return {"client_kwargs": {"headers": {"Authorization": f"Basic {login}"}}}
    if address.scheme == "memory":  # it has no users
        return {}
    if (names := LOGINS.get(address.scheme)) is None:
        raise InputError(f"{address.shown}: {address.scheme} addresses take no user and password: {ELSEWHERE}")
    if not (user and password) and address.scheme in EXTRAS:
        raise InputError(f"{address.shown}: its address has a user or a password, and not both. Give both, or neither.")
    return {name: value for name, value in zip(names, (user, password), strict=True) if value}


@contextmanager
def object_errors(shown: str, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Tell what a filesystem raises as ours, `but` for some. It may be anything: each has a client of its own behind it."""
    try:
        yield
    except (ArrowbankError, ImportError):
        raise
    except but:
        raise
    except Exception as error:  # noqa: BLE001  # raised as ours
        raise RemoteError(
            f"{shown}: {type(error).__name__}: {error}. What is finished is kept: the same command goes on from there."
        ) from None
