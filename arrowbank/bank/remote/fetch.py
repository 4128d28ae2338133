"""A bank from where it lies into a folder of this machine.

The manifest comes first, so that the folder says what it is going to be; every other file goes through `journal/`, and into its
place only when its size and sha256 are the manifest's; `state.json` comes last: before it is there, `load_from_disk` and
`open_bank` refuse the folder. What an earlier call brought, and is right, is kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from arrowbank.bank.files import (
    publish_bytes,
    publish_json,
    refuse_address,
    require_space,
    sha256_of,
    sweep_temporaries,
    sync_folder,
)
from arrowbank.bank.journal import Journal
from arrowbank.bank.locks import FolderLock
from arrowbank.bank.manifest import CARD, JOURNAL, MANIFEST, MAX_JSON_BYTES, SHA256, STATE, Manifest, parsed_json, readable_json
from arrowbank.bank.manifest_checks import check_manifest, checked_manifest, refuse_changed
from arrowbank.bank.names import checked_place, own_folder, refuse_links
from arrowbank.bank.places import in_words, is_bare_journal, visible
from arrowbank.bank.refusals import explained
from arrowbank.bank.remote.stores import Report, Store, StoredFile, side_by_side
from arrowbank.errors import CorruptBank, IncompleteBank, InputError
from arrowbank.progress import SILENT, Phase, Progress

PLOT = "plot.svg"
EXTRAS = (CARD, PLOT)  # for people: they come along, and nothing vouches for them
EXTRA_BYTES = 10_000_000


def fetch_bank(store: Store, folder: Path, *, progress: Progress = SILENT) -> Manifest:
    """Bring the bank at `store` into `folder`; its manifest. Goes on where an earlier call stopped.

    Raises InputError (no bank there, or `folder` holds something else), IncompleteBank (what was pushed is not whole),
    CorruptBank (a file is not the manifest's), DiskFull, BankLocked, RemoteError.
    """
    there = store.listing()
    data = read_remote_manifest(store, there)
    manifest = parsed_manifest(data, store.shown)
    state = _require_whole(store, manifest, there)
    _refuse_another_bank(folder, data, manifest, store.shown)
    with explained(folder):
        work = own_folder(folder, JOURNAL)
    lock = FolderLock(work)
    try:
        sweep_temporaries(folder)
        publish_bytes(folder / MANIFEST, data)
        _fetch_files(store, folder, manifest, progress)
        _fetch_extras(store, folder, there)
        publish_json(folder / STATE, state)
        Journal(folder, manifest["plan_digest"]).drop()
    finally:
        lock.release()
    return manifest


def read_remote_manifest(store: Store, there: Mapping[str, StoredFile]) -> bytes:
    """The manifest's bytes. InputError where there is none."""
    if MANIFEST not in there:
        raise InputError(
            f"{store.shown}: no bank there (no {MANIFEST}). Give the address that `arrowbank push` has written to."
        )
    return _read_json_of(store, MANIFEST, there)


def _read_json_of(store: Store, name: str, there: Mapping[str, StoredFile]) -> bytes:
    """The bytes of a JSON file at the place. CorruptBank where it lists more than such a file may have."""
    if (size := there[name].size or 0) > MAX_JSON_BYTES:  # a listing may have no sizes
        raise CorruptBank(f"{store.shown}/{name}: {size:,} bytes, expected at most {MAX_JSON_BYTES:,}. Push the bank again.")
    return store.read(name)


def parsed_manifest(data: bytes, shown: str) -> Manifest:
    """The manifest in `data`, with names of files that stay in their folder. InputError, CorruptBank."""
    where = f"{shown}/{MANIFEST}"
    try:
        value = parsed_json(data)
    except ValueError as error:
        raise CorruptBank(f"{where}: not readable as JSON ({error}). Push the bank again.") from None
    manifest = checked_manifest(value, where, "Push the bank again.")
    if not SHA256.fullmatch(manifest["plan_digest"]):
        raise CorruptBank(f"{where}: says nothing usable of plan_digest. Push the bank again.")
    return manifest


def _require_whole(store: Store, manifest: Manifest, there: Mapping[str, StoredFile]) -> Any:
    """What state.json holds, which vouches for the manifest. IncompleteBank, CorruptBank."""
    if STATE not in there or not manifest.get("complete"):
        raise IncompleteBank(
            f"{store.shown}: not whole (no {STATE}): a push to it has not ended. Run that push again; it goes on where it stopped."
        )
    check_manifest(f"{store.shown}/{MANIFEST}", manifest)
    for entry in manifest["files"]:
        found = there.get(entry["name"])
        if found is None or found.size not in (None, entry["bytes"]) or found.sha256 not in (None, entry["sha256"]):
            raise wrong_file(store.shown, entry, found)
    try:
        state = parsed_json(_read_json_of(store, STATE, there))
    except ValueError:
        state = None
    if not refuse_changed(store.shown, manifest, state):
        raise CorruptBank(f"{store.shown}/{STATE}: is not that of the shards in {MANIFEST}. Push the bank again.")
    return state


def wrong_file(shown: str, entry: Mapping[str, Any], found: StoredFile | None) -> CorruptBank:
    """The error for a file that lies there otherwise than the manifest says."""
    says = f"{entry['bytes']:,} bytes of sha256 {entry['sha256'][:12]}…"
    size = "no size" if found is None or found.size is None else f"{found.size:,} bytes"
    has = "it is missing" if found is None else f"{size} of {_named(found)}"
    return CorruptBank(
        f"{shown}/{entry['name']}: {has}, the manifest says {says}. Push the bank again: what is right there is not sent again."
    )


def _named(found: StoredFile) -> str:
    return f"sha256 {found.sha256[:12]}…" if found.sha256 else "other contents"


def _refuse_another_bank(folder: Path, data: bytes, manifest: Manifest, shown: str) -> None:
    refuse_address(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file. Give a folder for the bank.")
    inside = visible(folder)
    refuse_links(folder / JOURNAL)
    if MANIFEST not in inside:
        if inside - {JOURNAL} or not is_bare_journal(folder):
            raise InputError(f"{folder}: holds {in_words(folder)}, expected this bank or nothing. Give a new or empty folder.")
        return
    if (folder / MANIFEST).read_bytes() == data:
        return
    there = [entry for entry in manifest["files"] if (folder / entry["name"]).exists()]
    damaged = readable_json(folder / MANIFEST) is None  # as a power cut leaves it: then every file must be this bank's
    if not damaged or not all(_is_right(folder, entry) for entry in there):
        raise InputError(f"{folder}: holds another bank than {shown}, and was left as it is. Give another folder.")


def _fetch_files(store: Store, folder: Path, manifest: Manifest, progress: Progress) -> None:
    """Bring what is not there or not right. A committed bank is one no longer from the first file that is replaced on."""
    with progress.phase("check", sum(entry["bytes"] for entry in manifest["files"]), unit="bytes") as phase:
        missing = []
        for entry in manifest["files"]:
            missing += [] if _is_right(folder, entry) else [entry]
            phase.advance(entry["bytes"])
    if not missing:
        return
    total = sum(entry["bytes"] for entry in missing)
    require_space(folder, total, f"what is missing of {store.shown}")
    (folder / STATE).unlink(missing_ok=True)
    work = own_folder(folder, f"{JOURNAL}/parts")
    shutil.rmtree(work / ".cache", ignore_errors=True)  # a killed client's halves, which it cannot go on with

    with progress.phase("pull", total, unit="bytes") as phase:
        meter = _FetchMeter(phase)

        def bring(entry: Mapping[str, Any]) -> None:
            path = store.fetch(entry["name"], entry["bytes"], work, meter.of(entry))
            found = StoredFile(size=path.stat().st_size, sha256=sha256_of(path))
            if (found.size, found.sha256) != (entry["bytes"], entry["sha256"]):
                path.unlink()
                raise wrong_file(store.shown, entry, found)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.replace(folder / entry["name"])
            meter.finish(entry)

        side_by_side(bring, missing, lambda _: None, stop=meter.stop)
    sync_folder(folder)


class _Stopped(Exception):
    """Raised where bytes are told of, in the middle of a file that nobody waits for any longer."""


class _FetchMeter:
    """Bytes that come in several threads, for one phase; a file that is done counts whole, however much of it was told."""

    def __init__(self, phase: Phase) -> None:
        self._phase, self._lock = phase, Lock()
        self._told: dict[str, int] = {}
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def of(self, entry: Mapping[str, Any]) -> Report:
        return lambda count: self._tell(entry, count)

    def finish(self, entry: Mapping[str, Any]) -> None:
        self._tell(entry, entry["bytes"] - self._told.get(entry["name"], 0))

    def _tell(self, entry: Mapping[str, Any], count: int) -> None:
        if self._stopped:
            raise _Stopped
        with self._lock:
            told = self._told.get(entry["name"], 0)
            count = min(count, entry["bytes"] - told)  # a client that begins again tells bytes twice
            self._told[entry["name"]] = told + count
            self._phase.advance(count)


def _is_right(folder: Path, entry: Mapping[str, Any]) -> bool:
    path = checked_place(folder, entry["name"], folder)
    return path.is_file() and path.stat().st_size == entry["bytes"] and sha256_of(path) == entry["sha256"]


def _fetch_extras(store: Store, folder: Path, there: Mapping[str, StoredFile]) -> None:
    """Card and plot, where they are not here already."""
    for name in EXTRAS:
        if name in there and (there[name].size or 0) <= EXTRA_BYTES and not (folder / name).exists():
            publish_bytes(folder / name, store.read(name))
