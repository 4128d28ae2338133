"""A folder in a trainer's format, written so that it is whole or not there, and goes on after a crash.

Each file is hashed while it is written, and published with a receipt (see `arrowbank.bank.journal`). When all are there the sidecar
follows (see `sidecar.py`), then the format's own last file where it has one, and the receipts go. The same export again keeps
files whose receipts fit; another one into the same folder is refused. `journal/export` says which export is on its way.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from arrowbank import __version__
from arrowbank.bank import Bank
from arrowbank.bank.files import HashedFile, PublishingGroup, digest_of, publish_bytes, publish_json, refuse_address
from arrowbank.bank.folder_writer import FolderWriter
from arrowbank.bank.manifest import JOURNAL, Receipt, canonical_json, readable_json
from arrowbank.bank.names import UnsafeName, check_places, own_folder, refuse_links
from arrowbank.bank.places import Next, in_words, is_bare_journal
from arrowbank.bank.refusals import explained
from arrowbank.bank.writer import ShardWriter
from arrowbank.errors import CorruptBank, InputError, PlanMismatch
from arrowbank.formats.sidecar import ENTRY, PLACES, SIDECAR, About, Sidecar, read_sidecar, sealed, sidecar_bytes, xxh3_128

CONVERTER = f"arrowbank {__version__}"
NOTE = "export"  # in the journal
GROUP_FILES, GROUP_BYTES = 256, 64 << 20  # of small files that are synced together


def made_from(bank: Bank) -> dict[str, str]:
    """What a sidecar says of the bank that was exported."""
    return {"kind": bank.kind, "plan_digest": bank.plan_digest, "content_digest": bank.content_digest}


class ExportFolder(FolderWriter):
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
        self.digest = hashlib.sha256(canonical_json(recipe)).hexdigest()
        super().__init__(Path(folder), self.digest, nested=True)
        self.receipts: dict[str, Receipt] = {}
        self._about, self._owns, self._last, self._restart = about, (*owns, *PLACES), last, restart
        self._sidecar = last if last in PLACES else SIDECAR
        self._writer = ShardWriter(self.folder, self.digest)
        self._made = {""}
        self._unproven: set[str] = set()  # files of an export that nothing says it is this one

    @property
    def mark(self) -> str:
        """What the last file holds of the plan: sixteen digits that no other export has."""
        return self.digest[:16]

    @property
    def complete(self) -> bool:
        """Whether the folder holds this export whole."""
        return (self.folder / self._last).is_file() and self._finished(self._last)[0] == self.mark

    @property
    def _format(self) -> str:
        """What `--restart` may replace: an export of this format."""
        return self._about.format if self._about else self._last

    def _inside(self) -> list[str]:
        files = (path for path in self.folder.rglob("*") if not path.is_dir() and not path.name.startswith("."))
        names = (path.relative_to(self.folder).as_posix() for path in files)
        return [name for name in names if not name.startswith(f"{JOURNAL}/")]

    # what is in the folder

    def check(self) -> None:
        self._look()

    def _is_over(self) -> bool:
        return self.complete or not self._inside()

    def _look(self) -> Next:
        """What is to be done with what the folder holds. Nothing is changed."""
        refuse_address(self.folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: is a file. Give a folder.")
        if self.folder.is_dir():
            check_places(self.folder, {self._last, *PLACES}, self.folder)
            refuse_links(self._journal.folder)
        inside = self._inside()
        if foreign := sorted(name for name in inside if not any(fnmatch(name, pattern) for pattern in self._owns)):
            raise InputError(
                f"{self.folder}: holds {in_words(self.folder)}, expected an export as {self._format} or nothing: {foreign[0]} is no part "
                "of this format. Give a new folder; this one was left as it is."
            )
        note, plans, formats, damaged = self._note(), set[str](), set[str](), False
        for name in {self._last, *PLACES} & set(inside):
            plan, format = self._finished(name)
            damaged |= plan is None
            plans |= {plan} if plan is not None else set()
            formats |= {format} if plan is not None else set()
        if note.get("clearing") and plans <= {self.mark} and note["plan"] == self.mark:
            return Next.CLEAR  # it was asked for, and killed on the way
        plans |= {receipt.plan_digest[:16] for receipt in self._journal.receipts()}
        if note:
            plans.add(note["plan"])
            formats.add(note["format"])
        damaged |= not plans and (self._journal.folder / NOTE).exists()
        if plans == {self.mark}:
            whole = self.complete and (not damaged or not self._about)
            return Next.CHECK if whole else Next.CLEAR if self._restart else Next.RESUME
        if not plans and not damaged:
            if inside or not is_bare_journal(self.folder):  # whoever wrote them, it was not this class
                example = next(iter(sorted(inside)), JOURNAL)
                raise InputError(f"{self.folder}: holds files of which there is no record ({example}, …). Give a new folder.")
            return Next.RESUME
        if not plans:
            return Next.CLEAR if self._restart else Next.RESUME
        if formats - {self._format}:
            raise PlanMismatch(
                f"{self.folder}: holds another export (found {', '.join(sorted(formats))}, expected {self._format}). --restart deletes "
                "only an export of the format that is written. Give another folder, or remove this one yourself."
            )
        if self._restart:
            return Next.CLEAR
        raise PlanMismatch(
            f"{self.folder}: holds another export. Give --restart to throw it away, or another folder to keep it."
        )

    def _finished(self, name: str) -> tuple[str | None, str]:
        """Plan and format of the export that the file `name` ends; no plan where a power cut has left the file empty or cut. The
        format is none of ours where the export was not written by arrowbank."""
        path = self.folder / name
        if name in PLACES:
            try:
                sidecar = read_sidecar(path)
            except UnsafeName:
                raise
            except CorruptBank:
                return None, ""
            return str(sidecar["plan"]), str(sidecar["format"])
        if readable_json(path) is None:
            return None, ""
        plan = _plan_in(path)
        return (plan, self._format) if plan else ("", f"{name} of another program")

    def _note(self) -> dict[str, Any]:
        """What the journal says of the export that is on its way; empty where it says nothing."""
        note = readable_json(self._journal.folder / NOTE)
        typed = isinstance(note, dict) and isinstance(note.get("plan"), str) and isinstance(note.get("format"), str)
        return note if typed else {}

    # what becomes of it

    def _open(self) -> None:
        step = self._look()
        self._journal.sweep(*self._folders())
        if step is Next.CHECK:
            return
        if step is Next.CLEAR:
            self._clear()
        receipts = self._journal.read(deep=True)
        listed = self._listed() if not receipts else []
        inside = set(self._inside())
        unproven = bool(self._note().get("unproven")) or (
            not self._note() and not receipts and not listed and not self.complete
        )
        self._unproven = inside - {self._last, *PLACES, *receipts} if unproven else set()
        self._write_note(unproven=bool(self._unproven))
        damaged = self._journal.damaged(listed, deep=True)
        self.receipts = receipts | {
            receipt.name: self._journal.sign(receipt) for receipt in listed if receipt.name not in damaged
        }
        if self.complete:  # but its sidecar is damaged: it is written again, and this file is the one that ends an export
            (self.folder / self._last).unlink()

    def _write_note(self, **facts: bool) -> None:
        publish_json(self._journal.folder / NOTE, {"plan": self.mark, "format": self._format, **facts})

    def _clear(self) -> None:
        """Throw away the export that is here, what ends it first. Killed on the way, the same command goes on with it."""
        listed = {entry["name"] for place in PLACES if (found := self._sidecar_at(place)) for entry in found["files"]}
        inside = self._inside()
        if listed and (strays := sorted(set(inside) - listed - {self._last, *PLACES})):
            raise self._stray(strays[0])
        self._write_note(clearing=True)
        for name in (self._last, *PLACES, *inside):
            (self.folder / name).unlink(missing_ok=True)
        self._journal.forget_all()
        self._write_note()

    def _sidecar_at(self, place: str) -> Sidecar:
        """The sidecar at `place`; empty where there is none that can be read."""
        try:
            return read_sidecar(self.folder / place)
        except (FileNotFoundError, CorruptBank):
            return {}

    def _listed(self) -> list[Receipt]:
        """The files that a sidecar of this very export lists, as receipts: those went when it was complete."""
        entries = [entry for place in PLACES for entry in self._sidecar_at(place).get("files", ())]
        return [
            Receipt(rows=None, sha256="", plan_digest=self.digest, **entry) for entry in entries if entry["name"] != self._last
        ]

    def _stray(self, name: str) -> InputError:
        return InputError(
            f"{self.folder / name}: no file of this export, and a trainer would read it. Move it away and run the same command again; "
            "it was left as it is."
        )

    def _folders(self) -> list[str]:
        """The folders that this format has in its own, as far as they exist."""
        patterns = {pattern.rpartition("/")[0] for pattern in self._owns}
        places = (place for pattern in patterns if pattern for place in self.folder.glob(pattern))
        return [place.relative_to(self.folder).as_posix() for place in places]

    def write(self, name: str, write: Callable[[HashedFile], object]) -> Receipt:
        """Publish the file `name` (a relative path) through `write`; one with a receipt is kept."""
        if name not in self.receipts:
            self._make_parent(name)
            checked = partial(self._write_the_same, name, write) if name in self._unproven else write
            self.receipts[name] = self._writer.write_file(name, checked, hash="xxh3_128")
        return self.receipts[name]

    def write_group(self, files: Iterable[tuple[str, Callable[[HashedFile], object]]]) -> None:
        """Publish many small files, each through its writer; those with a receipt are kept. They are synced by groups, not one by one: a
        crash costs the group that is being written."""
        with PublishingGroup() as group:
            waiting: dict[str, HashedFile] = {}
            for name, write in files:
                if name in self._unproven:
                    self.write(name, write)
                elif name not in self.receipts:
                    self._make_parent(name)
                    with group.file(self.folder / name, hash="xxh3_128") as file:
                        write(file)
                    waiting[name] = file
                    if len(group) >= GROUP_FILES or group.bytes >= GROUP_BYTES:
                        self._sign(group, waiting)
            self._sign(group, waiting)

    def _sign(self, group: PublishingGroup, waiting: dict[str, HashedFile]) -> None:
        """Publish a group's files and then their receipts."""
        group.publish()
        receipts = [
            Receipt(name=name, rows=None, bytes=file.bytes, sha256="", plan_digest=self.digest, xxh3_128=file.digest)
            for name, file in waiting.items()
        ]
        self._journal.sign_all(receipts)
        self.receipts |= {receipt.name: receipt for receipt in receipts}
        waiting.clear()

    def _write_the_same(self, name: str, write: Callable[[HashedFile], object], file: HashedFile) -> None:
        """Write what is there already. PlanMismatch where it is something else: nothing says that it may be replaced."""
        write(file)
        path = self.folder / name
        if (file.bytes, file.digest) != (path.stat().st_size, digest_of(path, "xxh3_128")):
            raise PlanMismatch(
                f"{path}: not of this export, and what said of which one it is ({SIDECAR}) is damaged. Give --restart to throw that export "
                "away, or another folder to keep it."
            )

    def _make_parent(self, name: str) -> None:
        """Make the folder of the file `name`, once. UnsafeName where a link would lead out of the export."""
        parent = name.rpartition("/")[0]
        if parent not in self._made:
            with explained(self.folder / name):
                own_folder(self.folder, parent)
            self._made.add(parent)

    def finish(self, facts: Mapping[str, Any] | None = None, *, last: bytes = b"") -> Sidecar:
        """Publish the sidecar, with `facts` in it, and then the format's own last file, if it has one. What the sidecar says.

        InputError where a file is in the folder that this export did not write.
        """
        if strays := sorted(set(self._inside()) - {self._last, *PLACES, *self.receipts}):
            raise self._stray(strays[0])
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


def _plan_in(path: Path) -> str | None:
    """The plan that the last file of an export names: sixteen digits. None where it names none."""
    found = re.search(rb'\bplan(": ")? ?([0-9a-f]{16})', path.read_bytes())
    return found[2].decode() if found else None
