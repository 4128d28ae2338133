"""Addresses of banks that lie elsewhere.

org/name                          a dataset repository on the Hugging Face Hub (only where an address is asked for: push and pull)
hf://datasets/org/name@revision   the same, with a branch, tag or commit
s3://bucket/prefix                any folder that fsspec reaches: s3, gs, memory, file …
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from arrowbank.errors import InputError

HUB = "hf://"
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")


@dataclass(frozen=True, kw_only=True)
class Address:
    """`repo` with `revision` (None: its main branch) on the hub, or the fsspec `url` of a folder; `shown` is for people."""

    repo: str = ""
    revision: str | None = None
    url: str = ""

    @property
    def shown(self) -> str:
        """The address as it may be printed: without a user or password that stands in it."""
        if self.url:
            return without_credentials(self.url)
        return f"{HUB}datasets/{self.repo}" + (f"@{self.revision}" if self.revision else "")

    @property
    def local(self) -> Path | None:
        """The folder on this machine that a file:// address means."""
        for scheme in ("file://", "local://"):
            if self.url.startswith(scheme):
                return Path(self.url.removeprefix(scheme))
        return None


def without_credentials(text: str) -> str:
    """`text` without the users and passwords of the addresses in it."""
    return _CREDENTIALS.sub("", text)


def is_address(value: object) -> bool:
    """Whether `value` is an address, not a folder of this machine."""
    return isinstance(value, str) and "://" in value


def parse_address(value: str, revision: str | None = None) -> Address:
    """The address that `value` is. InputError where it is none, or names a revision and `revision` another."""
    if not is_address(value):
        if not _REPO.fullmatch(value) or value.startswith((".", "/")):
            raise InputError(
                f"{value!r}: expected OWNER/NAME of a dataset repository, or an address as in s3://bucket/prefix. "
                "A folder of this machine is file:///its/path."
            )
        return Address(repo=value, revision=revision)
    if not value.startswith(HUB):
        if revision is not None:
            raise InputError(f"{Address(url=value).shown}: has no revisions; leave --revision {revision} out.")
        return Address(url=value.rstrip("/"))
    place, _, named = value.removeprefix(HUB).partition("@")
    repo = place.removeprefix("datasets/")
    if repo == place or not _REPO.fullmatch(repo):
        raise InputError(f"{value}: expected hf://datasets/OWNER/NAME, or hf://datasets/OWNER/NAME@REVISION.")
    if revision and named and named != revision:
        raise InputError(f"{value}: names the revision {named}, and --revision {revision}. Give one of them.")
    return Address(repo=repo, revision=named or revision)
