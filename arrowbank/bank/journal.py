"""The journal of a build: a receipt for every finished file, beside the build's locks, in `journal/`. There is no other.

A receipt is written after its file is in place, and believed only after the file has been looked at again. One that a power cut has left
empty or cut is none: its file is made again.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from arrowbank.bank.files import (
    Hash,
    PublishingGroup,
    digest_of,
    json_without_secrets,
    open_to_append,
    publish_json,
    sweep_temporaries,
)
from arrowbank.bank.locks import OWNER
from arrowbank.bank.manifest import JOURNAL, LOG, MAX_COUNT, MAX_RECEIPT_BYTES, RESERVED, Receipt, readable_json
from arrowbank.bank.names import check_names, check_places, checked_place, own_folder
from arrowbank.bank.refusals import explained
from arrowbank.errors import CorruptBank
from arrowbank.secrets import hide


@dataclass(frozen=True)
class Journal:
    """The receipts of plan `plan_digest` for files of the bank in `bank`. `nested`: of an export whose files are in folders."""

    bank: Path
    plan_digest: str
    nested: bool = False

    @property
    def folder(self) -> Path:
        return self.bank / JOURNAL

    @property
    def work_dir(self) -> Path:
        """A folder for what a stage keeps only while it builds."""
        return self.folder / "work"

    @property
    def parts_dir(self) -> Path:
        """A folder for files on their way from a remote place."""
        return self.folder / "parts"

    def make(self) -> None:
        """Make the journal's folder where it does not exist. UnsafeName where it, or anything in it, is a symbolic link."""
        with explained(self.bank):
            own_folder(self.bank, JOURNAL)

    def sign(self, receipt: Receipt) -> Receipt:
        """Write the receipt of a file that is in place."""
        publish_json(self._path(receipt), receipt.to_json())
        return receipt

    def sign_all(self, receipts: Iterable[Receipt]) -> None:
        """Write the receipts of files that are in place, synced together."""
        with PublishingGroup() as group:
            for receipt in receipts:
                with group.file(self._path(receipt), hash=None) as file:
                    file.write(json_without_secrets(self._path(receipt), receipt.to_json()))
            group.publish()

    def forget(self, receipts: Iterable[Receipt]) -> None:
        """Take receipts back: their files are to be made again."""
        for receipt in receipts:
            self._path(receipt).unlink(missing_ok=True)

    def read(self, *, deep: bool, redo: Collection[int] = ()) -> dict[str, Receipt]:
        """The receipts of this plan by file name, their files checked (`deep`: with their hashes).

        Receipts of damaged shards in `redo` are forgotten; any other damage raises CorruptBank.
        """
        own = [receipt for receipt in self.receipts() if receipt.plan_digest == self.plan_digest]
        return self.checked(own, deep=deep, redo=redo)

    def receipts(self) -> list[Receipt]:
        """The receipts of every plan that can be read. UnsafeName where one is of a file outside of the bank."""
        found = [receipt for path in sorted(self.folder.glob("*.json")) if (receipt := self._receipt(path)) is not None]
        reserved = () if self.nested else RESERVED
        names = check_names((receipt.name for receipt in found), self.folder, nested=self.nested, reserved=reserved)
        if not self.nested:  # else each is checked when its file is: there may be very many
            check_places(self.bank, names, self.folder)
        return found

    def _receipt(self, path: Path) -> Receipt | None:
        """The receipt in `path`; None where it is none, or not of the file that `path` is named after."""
        found = readable_json(path, max_bytes=MAX_RECEIPT_BYTES)
        try:
            receipt = Receipt(**found) if isinstance(found, dict) else None
        except TypeError:  # other fields
            return None
        return receipt if receipt is not None and _is_typed(receipt) and self._path(receipt) == path else None

    def checked(self, receipts: Collection[Receipt], *, deep: bool, redo: Collection[int] = ()) -> dict[str, Receipt]:
        """Those of `receipts` whose files are whole, by name; see `read`."""
        damaged = self.damaged(receipts, deep=deep)
        for receipt in receipts:
            if receipt.name in damaged and (receipt.shard is None or receipt.shard not in redo):
                raise CorruptBank(f"{damaged[receipt.name]} {_remedy(receipt)}")
        self.forget(receipt for receipt in receipts if receipt.name in damaged)
        return {receipt.name: receipt for receipt in receipts if receipt.name not in damaged}

    def damaged(self, receipts: Collection[Receipt], *, deep: bool) -> dict[str, str]:
        """What is wrong with the files of `receipts`, by name; those that are whole are left out."""
        with ThreadPoolExecutor() as pool:
            damages = list(pool.map(lambda receipt: damage(self.bank, receipt, deep=deep), receipts))
        return {receipt.name: found for receipt, found in zip(receipts, damages, strict=True) if found}

    def forget_all(self) -> None:
        """Take back the receipts of every plan."""
        for path in self.folder.glob("*.json"):
            path.unlink()

    def is_empty(self) -> bool:
        """Whether nothing finished is noted here, readable or not, and nothing that a pull has fetched is kept."""
        return not any(self.folder.glob("*.json")) and not any(self.parts_dir.glob("*"))

    def sweep(self, *inside: str) -> None:
        """Remove what killed writers left half-written, here, in the bank, and in its folders `inside`; in no other folder, and never
        through a link to one."""
        for folder in (self.bank, self.folder, *(self.bank / name for name in inside)):
            if folder == self.bank or (folder.is_dir() and not folder.is_symlink()):
                sweep_temporaries(folder)

    def drop(self) -> None:
        """Remove the journal of a bank that is committed. A folder in it that is not its own stays, and it with that."""
        self.forget_work()
        for path in self.folder.glob("*"):
            if path.name.endswith(OWNER):  # its holder takes it away, and with the last one the folder
                continue
            with suppress(FileNotFoundError, IsADirectoryError, PermissionError):  # the last one: a folder, on some systems
                path.unlink()
        with suppress(OSError):  # another worker of a job array still has its lock there
            self.folder.rmdir()

    def forget_work(self) -> None:
        """Remove what a stage or a pull keeps only while it is under way."""
        for folder in (self.work_dir, self.parts_dir):
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, receipt: Receipt) -> Path:
        return self.folder / f"{receipt.name.replace('/', '%2F')}.json"


def append_log(bank: Path, event: str, **facts: object) -> None:
    """Append a line to the build.jsonl of the bank in `bank`, the file for times, hosts and rates."""
    line = json.dumps({"time": round(time.time(), 3), "host": socket.gethostname(), "event": event, **facts})
    with explained(bank / LOG), open_to_append(bank / LOG) as file:
        file.write((hide(line) + "\n").encode())


def damage(bank: Path, receipt: Receipt, *, deep: bool) -> str:
    """What is wrong with the file of `receipt`, or nothing. `deep` reads it all."""
    path = checked_place(bank, receipt.name, bank, nested="/" in receipt.name)
    if not path.exists():
        return f"{path}: the file is missing; its receipt says {receipt.bytes} bytes."
    if (size := path.stat().st_size) != receipt.bytes:
        return f"{path}: {size} bytes on disk, its receipt says {receipt.bytes}: the file was cut or changed."
    hashes: dict[Hash, str] = {"sha256": receipt.sha256, "xxh3_128": receipt.xxh3_128}
    for hash, digest in hashes.items():
        if deep and digest and digest_of(path, hash) != digest:
            return f"{path}: its bytes are not those of its receipt ({hash} differs): it was changed, or the disk is failing."
    return ""


def _is_typed(receipt: Receipt) -> bool:
    """Whether the fields, which come from a file, are what they should be."""
    texts = (receipt.name, receipt.sha256, receipt.xxh3_128, receipt.plan_digest)
    counts = (receipt.bytes, 0 if receipt.rows is None else receipt.rows)
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(count) is int and 0 <= count < MAX_COUNT for count in counts)
        and isinstance(receipt.seconds, int | float)
    )


def _remedy(receipt: Receipt) -> str:
    if receipt.shard is None:
        return "Give --restart, or build the bank in another folder."
    return (
        f"The other shards are kept. Restore the file, or run the same command with --shards {receipt.shard} to make it "
        "again (a stage without --shards: --restart)."
    )
