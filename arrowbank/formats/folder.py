"""A folder in a trainer's format, written so that it is whole or not there, and goes on after a crash.

Each file is hashed while it is written, and published with a receipt (see `arrowbank.bank.journal`). When all are there the sidecar
follows (see `sidecar.py`), then the format's own last file where it has one, and the receipts go. The same export again keeps
files whose receipts fit; another one into the same folder is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from types import TracebackType
from typing import Any

from arrowbank import __version__
from arrowbank.bank import Bank
from arrowbank.bank.files import HashedFile, publish_bytes, refuse_address
from arrowbank.bank.journal import Journal
from arrowbank.bank.locks import FolderLock
from arrowbank.bank.manifest import JOURNAL, Receipt, canonical_json
from arrowbank.bank.names import check_places, own_folder
from arrowbank.bank.refusals import explained
from arrowbank.bank.writer import ShardWriter
from arrowbank.errors import InputError, PlanMismatch
from arrowbank.formats.sidecar import ENTRY, PLACES, SIDECAR, About, Sidecar, sealed, sidecar_bytes, xxh3_128

CONVERTER = f"arrowbank {__version__}"


def made_from(bank: Bank) -> dict[str, str]:
    """What a sidecar says of the bank that was exported."""
    return {"kind": bank.kind, "plan_digest": bank.plan_digest, "content_digest": bank.content_digest}


class ExportFolder:
    """The one writer of an export, as a context manager.

    `recipe` is everything that decides the files. `about` goes into the sidecar (None: there is none). `owns` are the patterns of
    the format's file names, `last` is the file whose presence means that the export is whole, and whose bytes hold the plan
    (`mark`): the sidecar, unless the format has its own.

    Raises InputError for a folder that holds something else, PlanMismatch where it holds another export (unless `restart`),
    BankLocked, CorruptBank.
    """

    def __init__(
        self,
        folder: str | Path,
        recipe: Mapping[str, Any],
        *,
        about: About | None = None,
        owns: tuple[str, ...],
        last: str = SIDECAR,
        restart: bool,
    ) -> None:
        self.folder = Path(folder)
        self.digest = hashlib.sha256(canonical_json(recipe)).hexdigest()
        self.receipts: dict[str, Receipt] = {}
        self._about, self._owns, self._last, self._restart = about, (*owns, *PLACES), last, restart
        self._sidecar = last if last in PLACES else SIDECAR
        self._journal = Journal(self.folder, self.digest, nested=True)
        self._writer = ShardWriter(self.folder, self.digest)
        self._lock: FolderLock | None = None
        self._made = {""}

    @property
    def mark(self) -> str:
        """What the last file holds of the plan: sixteen digits that no other export has."""
        return self.digest[:16]

    @property
    def complete(self) -> bool:
        """Whether the folder holds this export whole."""
        return self._is_of_this_plan(self.folder / self._last)

    def _is_of_this_plan(self, path: Path) -> bool:
        return path.is_file() and self.mark.encode() in path.read_bytes()

    def _is_taken(self) -> bool:
        """Whether an export was finished here: this one, or another, perhaps of another format."""
        sidecars = [self.folder / place for place in PLACES if (self.folder / place).exists()]
        return (self.folder / self._last).exists() or not all(map(self._is_of_this_plan, sidecars))

    def __enter__(self) -> ExportFolder:
        refuse_address(self.folder)
        there = self._inside()
        if self.folder.is_dir():
            check_places(self.folder, {self._last, *PLACES}, self.folder)
        if foreign := sorted(name for name in there if not any(fnmatch(name, pattern) for pattern in self._owns)):
            raise InputError(
                f"{self.folder}: holds files that are no part of this format ({foreign[0]}, …). Give a new folder."
            )
        if there and not self._is_taken() and not self._journal.folder.exists():
            raise InputError(  # whoever wrote them, it was not this class: they are not taken over, nor thrown away
                f"{self.folder}: holds files of which there is no record ({there[0]}, …). Give a new folder."
            )
        self._journal.make()
        self._lock = FolderLock(self._journal.folder)
        try:
            self._open()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if (self.folder / self._last).exists() or not self._inside():
            self._journal.drop()
        if self._lock:
            self._lock.release()

    def _inside(self) -> list[str]:
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: is a file. Give a folder.")
        files = (path for path in self.folder.rglob("*") if not path.is_dir() and not path.name.startswith("."))
        names = (path.relative_to(self.folder).as_posix() for path in files)
        return [name for name in names if not name.startswith(f"{JOURNAL}/")]

    def _open(self) -> None:
        self._journal.sweep(*self._folders())
        if self.complete:
            return
        if self._restart:
            for name in (self._last, *PLACES):
                (self.folder / name).unlink(missing_ok=True)
            self._journal.forget_all()
        elif self._is_taken() or self._journal.has_others():
            raise PlanMismatch(
                f"{self.folder}: holds another export. Give --restart to throw it away, or another folder to keep it."
            )
        self.receipts = self._journal.read(deep=True)
        # a file without a receipt is of a killed run, and perhaps of another export: a trainer would read it
        for name in self._inside():
            if name not in self.receipts:
                (self.folder / name).unlink(missing_ok=True)

    def _folders(self) -> list[str]:
        """The folders that this format has in its own, as far as they exist."""
        patterns = {pattern.rpartition("/")[0] for pattern in self._owns}
        places = (place for pattern in patterns if pattern for place in self.folder.glob(pattern))
        return [place.relative_to(self.folder).as_posix() for place in places]

    def write(self, name: str, write: Callable[[HashedFile], object]) -> Receipt:
        """Publish the file `name` (a relative path) through `write`; one with a receipt is kept."""
        if name not in self.receipts:
            self._make_parent(name)
            self.receipts[name] = self._writer.write_file(name, write, hash="xxh3_128")
        return self.receipts[name]

    def _make_parent(self, name: str) -> None:
        """Make the folder of the file `name`, once. UnsafeName where a link would lead out of the export."""
        parent = name.rpartition("/")[0]
        if parent not in self._made:
            with explained(self.folder / name):
                own_folder(self.folder, parent)
            self._made.add(parent)

    def finish(self, facts: Mapping[str, Any] | None = None, *, last: bytes = b"") -> Sidecar:
        """Publish the sidecar, with `facts` in it, and then the format's own last file, if it has one. What the sidecar says."""
        sidecar = self._write_sidecar({**asdict(self._about), **(facts or {})}, last) if self._about else {}
        if self._last != self._sidecar:
            publish_bytes(self.folder / self._last, last)
        return sidecar

    def _write_sidecar(self, said: Mapping[str, Any], last: bytes) -> Sidecar:
        found = [(name, receipt.bytes, receipt.xxh3_128) for name, receipt in self.receipts.items()]
        if self._last != self._sidecar:
            found.append((self._last, len(last), xxh3_128(last)))
        files = [dict(zip(ENTRY, entry, strict=True)) for entry in sorted(found)]
        sidecar = sealed({**said, "converter": CONVERTER, "plan": self.mark, "files": files})
        self._make_parent(self._sidecar)
        publish_bytes(self.folder / self._sidecar, sidecar_bytes(sidecar))
        return sidecar
