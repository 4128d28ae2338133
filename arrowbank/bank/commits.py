"""Which commit of a bank is in a folder: an open bank reads files of the commit that it opened, or none.

`--restart` writes a new bank into the same folder. Shards that are mapped stay the old ones, because a file that is mapped outlives
its name. A file that is opened later would be the new bank's. So every later opening is framed by two looks at the commit:
`manifest.json` and `state.json` are replaced as a whole, and only together with the files that they list.
"""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from arrowbank.bank.manifest import MANIFEST, MAX_JSON_BYTES, STATE
from arrowbank.bank.refusals import raise_refusal
from arrowbank.errors import CorruptBank

Identity = tuple[int, int, int, int]  # device, inode, bytes, time of change


@dataclass
class Commit:
    """The commit in `folder` when it was opened: sha256 and identity of the two files by which it is known."""

    folder: Path
    digests: dict[str, str]
    identities: dict[str, Identity]

    @classmethod
    def of(cls, folder: Path) -> Commit | None:
        """The commit that is in `folder` now; None where a file of it is missing or cannot be read."""
        commit = cls(folder, {}, {})
        try:
            for name in (MANIFEST, STATE):
                commit.digests[name], commit.identities[name] = _read(folder / name)
        except OSError as error:
            raise_refusal(error, folder)
            return None
        return commit

    @property
    def digest(self) -> str:
        """What tells this commit from any other one, also on another machine."""
        return " ".join(self.digests.values())

    def require(self, digest: str) -> None:
        """Raise CorruptBank where this is not the commit of that digest: what was opened elsewhere, under the same name."""
        if self.digest != digest:
            raise self._changed(self.folder)

    def require_unchanged(self) -> None:
        """Raise CorruptBank where the folder holds another commit than when it was opened, or none."""
        for name, known in self.identities.items():
            path = self.folder / name
            try:
                if _identity(path.stat()) == known:
                    continue
                digest, identity = _read(path)
            except OSError as error:
                raise_refusal(error, path)
                digest, identity = "", known
            if digest != self.digests[name]:
                raise self._changed(path)
            self.identities[name] = identity  # copied or touched: the same bytes list the same files

    def _changed(self, path: Path) -> CorruptBank:
        return CorruptBank(
            f"{path}: changed since it was opened: another bank is being written or was written into this folder. Open the bank "
            "again, and write new banks into folders of their own."
        )


def _read(path: Path) -> tuple[str, Identity]:
    """The sha256 of a file's bytes, and its identity. OSError where it cannot be read."""
    if path.exists() and not path.is_file():  # a named pipe would be waited for
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        # what is longer is refused where it is read as JSON
        return hashlib.sha256(file.read(MAX_JSON_BYTES + 1)).hexdigest(), _identity(os.fstat(file.fileno()))


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
