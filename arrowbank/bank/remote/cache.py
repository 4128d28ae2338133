"""From an address to the place that it names."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from arrowbank.bank.locks import waiting_lock
from arrowbank.bank.manifest import MANIFEST, STATE
from arrowbank.bank.refusals import explained
from arrowbank.bank.remote.addresses import WEB, Address, parse_address
from arrowbank.bank.remote.fetch import fetch_bank, parsed_manifest, read_remote_manifest
from arrowbank.bank.remote.stores import Store
from arrowbank.errors import RemoteError
from arrowbank.progress import SILENT, Progress


def store_of(address: Address) -> Store:
    """The place at `address`. MissingDependency where fsspec needs a package for it."""
    if address.repo:
        from arrowbank.bank.remote.hub import HubStore

        return HubStore(address)
    if address.scheme in WEB:
        from arrowbank.bank.remote.web import WebStore

        return WebStore(address)
    from arrowbank.bank.remote.objects import ObjectStore

    return ObjectStore(address)


VARIABLE = "ARROWBANK_CACHE"


def cache_folder() -> Path:
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "arrowbank")


def local_bank(address: str, *, progress: Progress = SILENT) -> Path:
    """The folder on this machine with the bank at `address`, after fetching what is not there yet.

    Raises InputError, IncompleteBank and CorruptBank for what lies there, RemoteError, DiskFull, MissingDependency.
    """
    parsed = parse_address(address)
    if parsed.local is not None:
        return parsed.local
    try:
        return _asked(parsed, progress)
    except RemoteError:
        fetched = _fetched(parsed) if _offline() else None
        if fetched is None:
            raise
        return fetched


def _asked(address: Address, progress: Progress) -> Path:
    """The folder of the manifest that the place has now."""
    store = store_of(address)
    data = read_remote_manifest(store, store.listing())
    digest = parsed_manifest(data, store.shown)["plan_digest"]
    folder = cache_folder() / f"{_words(address)}-{digest[:16]}-{hashlib.sha256(data).hexdigest()[:8]}"
    if not _is_there(folder, data):
        with explained(cache_folder()):
            cache_folder().mkdir(parents=True, exist_ok=True)
        with waiting_lock(cache_folder() / f".{folder.name}.lock"):  # of several processes one fetches, the others wait
            if not _is_there(folder, data):
                fetch_bank(store, folder, progress=progress)
    return folder


def _offline() -> bool:
    """Whether the user wants nothing asked (machines without a network): what was fetched before is opened then."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _fetched(address: Address) -> Path | None:
    """The bank of the address that was fetched last."""
    commits = [path for path in cache_folder().glob(f"{_words(address)}-*/{STATE}") if path.is_file()]
    return max(commits, key=lambda path: path.stat().st_mtime).parent if commits else None


def _words(address: Address) -> str:
    """The address as the begin of a folder's name: readable, and its own."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", address.shown.partition("://")[2]).strip("-.")[-60:]
    return f"{words}-{hashlib.sha256(address.shown.encode()).hexdigest()[:8]}"


def _is_there(folder: Path, data: bytes) -> bool:
    return (folder / STATE).is_file() and (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() == data
