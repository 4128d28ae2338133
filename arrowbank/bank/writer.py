"""Writing a bank: take the lock, check the plan, keep what is good, write shards with receipts, commit last.

`state.json` is the commit: before it is there, `datasets.load_from_disk` fails and `open_bank` refuses. `manifest.json` is
there from the start of a build, with `complete: false`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrowbank.bank.cards import card
from arrowbank.bank.files import (
    READ_BYTES,
    Hash,
    HashedFile,
    json_bytes,
    publish_bytes,
    publish_json,
    publishing,
    refuse_address,
    sweep_temporaries,
    sync_folder,
)
from arrowbank.bank.folder_writer import FolderWriter, plan_mismatch
from arrowbank.bank.journal import Journal, append_log
from arrowbank.bank.kinds import typed
from arrowbank.bank.locks import waiting_lock
from arrowbank.bank.manifest import (
    CARD,
    FAMILY,
    FORMAT,
    INFO,
    JOURNAL,
    LOG,
    MANIFEST,
    SHARD_NAME,
    STATE,
    Manifest,
    Receipt,
    canonical_json,
    dataset_info,
    plan_digest,
    ranges,
    readable_json,
    shard_name,
)
from arrowbank.bank.manifest_checks import check_manifest, is_state_of, read_manifest, refuse_changed, state_of
from arrowbank.bank.names import UnsafeName, refuse_links
from arrowbank.bank.places import Next, in_words, is_bare_journal, visible
from arrowbank.bank.processes import temporary_beside
from arrowbank.bank.refusals import explained
from arrowbank.errors import ArrowbankError, CorruptBank, IncompleteBank, InputError, PlanMismatch


@dataclass(frozen=True)
class ShardWriter:
    """Writes finished files and their receipts; what a worker process gets instead of the whole writer."""

    folder: Path
    plan_digest: str

    def write_shard(self, index: int, batch: pa.RecordBatch) -> Receipt:
        """Publish shard `index` as an IPC stream of the one record batch, then its receipt."""

        def write(file: HashedFile) -> None:
            with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), batch.schema) as stream:
                stream.write_batch(batch)

        return self.write_file(shard_name(index), write, rows=batch.num_rows)

    def write_file(
        self, name: str, write: Callable[[HashedFile], object], *, rows: int | None = None, hash: Hash = "sha256"
    ) -> Receipt:
        """Publish the file `name` of the bank through `write`, then its receipt."""
        start = time.monotonic()
        with publishing(self.folder / name, hash=hash) as file:
            write(file)
        seconds = round(time.monotonic() - start, 6)
        receipt = Receipt(
            name=name, rows=rows, bytes=file.bytes, plan_digest=self.plan_digest, seconds=seconds, **{hash: file.digest}
        )
        return Journal(self.folder, self.plan_digest).sign(receipt)


class BankWriter(FolderWriter):
    """The one writer of a bank folder, as a context manager.

    `kind` and `recipe` (a JSON value of everything that decides the rows) make the plan digest. `manifest` holds the fields
    that are known before the work. `worker` is this job's number in a job array, whose writers share the folder. Shards
    in `redo` may be damaged or missing, even in a committed bank: they lose their receipts and are to be written again.

    Raises PlanMismatch when the folder holds work of another recipe and `restart` is false, BankLocked when another process
    writes there, CorruptBank when a receipt and its file disagree, InputError for a folder that holds something else.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        kind: str,
        recipe: Mapping[str, Any],
        restart: bool = False,
        manifest: Mapping[str, Any] | None = None,
        worker: int | None = None,
        redo: Collection[int] = (),
    ) -> None:
        self.kind = kind
        self.recipe = json.loads(json.dumps(recipe))
        self.plan_digest = plan_digest(kind, self.recipe)
        super().__init__(Path(folder), self.plan_digest, worker=worker)
        self.shards = ShardWriter(self.folder, self.plan_digest)
        self.receipts: dict[str, Receipt] = {}
        self.committed = False
        self._fields = dict(manifest or {})
        self._restart, self._redo = restart, frozenset(redo)

    def check(self) -> None:
        self._look()

    def _look(self) -> tuple[Next, Manifest]:
        """What is to be done with what the folder holds, and its manifest."""
        refuse_address(self.folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: is a file. Give a folder for the bank.")
        names = visible(self.folder)
        refuse_links(self._journal.folder)
        stated = readable_json(self.folder / MANIFEST) if MANIFEST in names else None
        foreign = stated is not None and not (isinstance(stated, dict) and str(stated.get("format")).startswith(FAMILY))
        if MANIFEST not in names or foreign:
            if names - {JOURNAL} or not is_bare_journal(self.folder):
                raise InputError(
                    f"{self.folder}: holds {in_words(self.folder)}, expected a bank of {self.kind} or nothing. Give a new or empty "
                    "folder; this one was left as it is."
                )
            return Next.RESUME, {}
        try:
            found = read_manifest(self.folder)
        except UnsafeName:  # a folder to be left alone, whatever is asked for
            raise
        except CorruptBank as error:
            return self._look_without_manifest(names, error), {}
        if found["kind"] != self.kind and (self._restart or self._has_work(names)):
            raise PlanMismatch(
                f"{self.folder}: holds a bank of {found['kind']}, this command writes one of {self.kind}. --restart deletes only a bank "
                "of the kind that is written. Give another folder, or remove this one yourself.",
                {"kind": (found["kind"], self.kind)},
            )
        if self._restart:
            return Next.CLEAR, found
        if found["plan_digest"] != self.plan_digest:
            if self._worker is not None or self._has_work(names):
                raise self._mismatch(found)
            return Next.CLEAR, found
        if not found["complete"]:
            return Next.RESUME, found
        return Next.CHECK if self._has_its_state(found) else Next.COMMIT, found

    def _look_without_manifest(self, names: set[str], error: CorruptBank) -> Next:
        """What is to be done where a power cut has left the manifest empty or cut: a bank of this very plan is known by its receipts
        and its commit. `error` is raised where nothing says whose the files are."""
        digests = {receipt.plan_digest[:16] for receipt in self._journal.receipts()}
        state = readable_json(self.folder / STATE)
        if isinstance(state, dict):
            digests.add(str(state.get("_fingerprint")))
        if digests == {self.plan_digest[:16]}:
            return Next.CLEAR if self._restart else Next.RESUME
        begun = not (self.folder / MANIFEST).stat().st_size or bool(names & {JOURNAL, LOG})
        if begun and not digests and not self._has_work(names):
            return Next.RESUME
        raise CorruptBank(
            f"{error} Nothing else in the folder says that it is this bank, so it was left as it is, also under --restart. Restore "
            f"{MANIFEST} from a copy, give another folder, or remove this one yourself."
        )

    def _has_work(self, names: set[str]) -> bool:
        """Whether anything is in the folder but what a build has before it finishes its first file."""
        return bool(names - {MANIFEST, LOG, JOURNAL}) or not self._journal.is_empty()

    def _has_its_state(self, found: Manifest) -> bool:
        """Whether `state.json`, the commit, is there, and the one of the bank's manifest `found`."""
        return bool(found["complete"]) and is_state_of(readable_json(self.folder / STATE), found)

    def _is_over(self) -> bool:
        return self._is_committed()

    def _is_committed(self) -> bool:
        """Whether there is a committed bank by now."""
        try:
            return self._has_its_state(read_manifest(self.folder))
        except (InputError, CorruptBank):
            return False

    def _mismatch(self, found: Manifest) -> PlanMismatch:
        copied = (
            f"Its {STATE} is missing or damaged: a pull or a copy of it is under way, or was interrupted. Finish that to keep it. "
            if found["complete"] and not self._has_its_state(found)
            else ""
        )
        theirs, ours = {"kind": found["kind"], **found["recipe"]}, {"kind": self.kind, **self.recipe}
        return plan_mismatch(self.folder, theirs, ours, note=copied)

    def _open(self) -> None:
        step, found = self._look()
        if self._worker is None:
            self._journal.sweep()
        if step is Next.CLEAR:
            self._clear(found)
        elif step is Next.CHECK:
            self._open_committed(found)
        elif step is Next.COMMIT:
            self._commit_again(found)
        else:
            # each worker of a job array would read every shard of the others: it checks sizes only
            self.receipts = self._journal.read(deep=self._worker is None, redo=self._redo)
        if not self.committed:
            self.save_progress()

    def _clear(self, found: Manifest) -> None:
        """Throw away the bank that is here: its commit first, so that no moment shows a committed bank with files missing."""
        names = [STATE, *(entry["name"] for entry in found.get("files", ())), INFO, CARD, LOG]
        names += [receipt.name for receipt in self._journal.receipts()]
        names += [path.name for path in self.folder.iterdir() if SHARD_NAME.fullmatch(path.name)]
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        self._journal.forget_all()
        self._journal.forget_work()
        (self.folder / MANIFEST).unlink()
        sync_folder(self.folder)

    def _listed(self, found: Manifest) -> list[Receipt]:
        return [Receipt(plan_digest=self.plan_digest, **entry) for entry in found["files"]]

    def _open_committed(self, found: Manifest) -> None:
        """Check a committed bank's manifest and files; reopen it where shards that are to be redone are damaged."""
        check_manifest(self.folder / MANIFEST, found)
        listed = self._listed(found)
        self.receipts = self._journal.checked(listed, deep=bool(self._redo), redo=self._redo)
        self.committed = len(self.receipts) == len(listed)
        if not self.committed:
            self._reopen()

    def _reopen(self) -> None:
        """Turn a committed bank back into a build. Receipts before the commit goes: nothing good is ever without one."""
        self.receipts = {name: receipt for name, receipt in self.receipts.items() if receipt.shard is not None}
        for receipt in self.receipts.values():
            self._journal.sign(receipt)
        (self.folder / STATE).unlink()
        sync_folder(self.folder)

    def _commit_again(self, found: Manifest) -> None:
        """Commit a bank that lacks only a `state.json` that can be read: a pull or a copy, or a writer, was stopped before it.

        Files that are not as the manifest lists them are made again; those that are get their receipts back.
        """
        check_manifest(self.folder / MANIFEST, found)
        manifest = typed(found, self.folder / MANIFEST)
        refuse_changed(self.folder, found, readable_json(self.folder / STATE))
        with self._commit_lock():
            listed = self._listed(found)
            damaged = {} if self._is_committed() else self._journal.damaged(listed, deep=True)
            if not damaged:
                self.receipts, self.committed = {receipt.name: receipt for receipt in listed}, True
                if not (self.folder / CARD).exists():
                    publish_bytes(self.folder / CARD, card(manifest).encode())
                publish_json(self.folder / STATE, state_of(found))
                return
            self.log("redo", damaged=damaged)
            whole = [receipt for receipt in listed if receipt.name not in {*damaged, INFO}]
            if any(receipt.shard is not None for receipt in listed if receipt.name in damaged):
                whole = [receipt for receipt in whole if receipt.shard is not None]  # the others are made from all shards
            self.receipts = {receipt.name: self._journal.sign(receipt) for receipt in whole}

    # writing

    @property
    def work_dir(self) -> Path:
        """A folder for what a stage keeps only while it builds; removed by the commit."""
        return self._journal.work_dir

    @property
    def done_shards(self) -> dict[int, Receipt]:
        """The receipts of finished shards, by shard number."""
        return {receipt.shard: receipt for receipt in self.receipts.values() if receipt.shard is not None}

    @property
    def done_rows(self) -> int:
        return sum(receipt.rows or 0 for receipt in self.done_shards.values())

    def write_shard(self, index: int, batch: pa.RecordBatch) -> Receipt:
        """Publish shard `index` and its receipt."""
        return self.accept(self.shards.write_shard(index, batch))

    def accept(self, receipt: Receipt) -> Receipt:
        """Enter a finished shard that was written here or by a worker."""
        made_too_early = [other for other in self.receipts.values() if other.shard is None]
        self._journal.forget(made_too_early)
        for other in made_too_early:  # from shards that were not all there
            del self.receipts[other.name]
        self.receipts[receipt.name] = receipt
        self.log("shard", shard=receipt.shard, rows=receipt.rows, bytes=receipt.bytes, seconds=receipt.seconds)
        return receipt

    def adopt_shard(self, index: int, source: Path, *, rows: int, sha256: str) -> Receipt:
        """Take the shard file `source` of another bank, of bytes of this `sha256`, as shard `index`: by a hard link, or as a copy
        where the disks do not allow it."""
        path = self.folder / shard_name(index)
        temporary = temporary_beside(path)
        try:
            os.link(source.resolve(), temporary)  # else a symbolic link, as in a hub's cache, would be linked as such
        except OSError:
            with publishing(path) as file, source.open("rb") as old:
                shutil.copyfileobj(old, file, READ_BYTES)
        else:
            with explained(path):
                temporary.replace(path)
                temporary.unlink(missing_ok=True)  # where the two were one file already, replace does nothing
                sync_folder(self.folder)
        receipt = Receipt(name=path.name, rows=rows, bytes=path.stat().st_size, sha256=sha256, plan_digest=self.plan_digest)
        return self.accept(self._journal.sign(receipt))

    def write_file(self, name: str, write: Callable[[HashedFile], object], *, rows: int | None = None) -> Receipt:
        """Publish a file that is no shard and its receipt; a whole one from an earlier run is kept."""
        if name not in self.receipts:
            self.receipts[name] = self.shards.write_file(name, write, rows=rows)
        return self.receipts[name]

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Hold the right to finish a bank that a job array makes, with the receipts of all its workers: of those that see the last
        one, the first commits, and the others find the bank `committed`."""
        with ExitStack() as stack:
            if not self._is_committed():
                try:
                    stack.enter_context(waiting_lock(self._journal.folder / "lock-finish"))
                except (OSError, ArrowbankError):
                    if not self._is_committed():  # else the journal was removed just now
                        raise
            self.committed = self._is_committed()
            if not self.committed:
                self.receipts = self._journal.read(deep=False)
            yield

    def save_progress(self, **fields: object) -> None:
        """Write the manifest of the unfinished bank, with `complete: false` and `fields` brought up to date."""
        self._fields |= fields
        with self._commit_lock():  # another worker of a job array may have committed meanwhile
            if not self._is_committed():
                publish_json(self.folder / MANIFEST, self._manifest(complete=False, files=[]))
                (self.folder / STATE).unlink(missing_ok=True)  # one that a power cut has left behind

    def log(self, event: str, **facts: object) -> None:
        """Append a line to build.jsonl, the file for times, hosts and rates."""
        append_log(self.folder, event, **facts)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the bank as it stands."""
        return read_manifest(self.folder)

    def _manifest(self, *, complete: bool, files: list[dict[str, Any]]) -> Manifest:
        return {
            **self._fields,
            "format": FORMAT,
            "kind": self.kind,
            "plan_digest": self.plan_digest,
            "recipe": self.recipe,
            "rows": self.done_rows,
            "complete": complete,
            "files": files,
        }

    # committing

    def commit(self, *, rows: int, manifest: Mapping[str, Any] | None = None) -> Manifest:
        """Make the bank one that opens: column types, card, manifest, and last `state.json`. The manifest.

        Raises IncompleteBank when the shards' receipts do not add up to `rows`.
        """
        shards = self.done_shards
        if not shards or sorted(shards) != list(range(len(shards))) or self.done_rows != rows:
            raise IncompleteBank(
                f"{self.folder}: {self.done_rows} of {rows} rows are there, in shards {ranges(shards)}. "
                "Run the same command again for the rest."
            )
        with self._commit_lock():  # of the workers that see the last receipt, one commits
            if not (self.folder / STATE).exists():
                self._fields |= manifest or {}
                self._write_commit([shards[index].name for index in sorted(shards)])
        self.committed = True
        return self.manifest

    def _write_commit(self, shards: list[str]) -> None:
        with pa.memory_map(str(self.folder / shards[0])) as source, pa.ipc.open_stream(source) as stream:
            info = json_bytes(dataset_info(stream.schema), sort_keys=False)
        sha256 = publish_bytes(self.folder / INFO, info)
        self.receipts[INFO] = Receipt(name=INFO, rows=None, bytes=len(info), sha256=sha256, plan_digest=self.plan_digest)
        sweep_temporaries(self.folder)
        self.log("commit", rows=self.done_rows)
        files = [self.receipts[name].entry() for name in sorted(self.receipts)]
        manifest: Manifest = json.loads(canonical_json(self._manifest(complete=True, files=files)))
        publish_bytes(self.folder / CARD, card(typed(manifest, self.folder / MANIFEST)).encode())
        publish_json(self.folder / MANIFEST, manifest)
        publish_json(self.folder / STATE, state_of(manifest))

    def _commit_lock(self) -> AbstractContextManager[None]:
        return waiting_lock(self._journal.folder / "lock-commit")
