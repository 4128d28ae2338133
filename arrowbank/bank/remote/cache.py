"""Where banks that were opened by address are kept: `$ARROWBANK_CACHE`, or `~/.cache/arrowbank`.

A folder a bank, named by the address, the plan digest and a hash of address and manifest. A bank is fetched, and every byte of it
checked, once; later openings ask the place for its manifest only, and open the folder of that manifest. Any folder here may be deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from arrowbank.bank.files import explained, waiting_lock
from arrowbank.bank.manifest import MANIFEST, STATE
from arrowbank.bank.remote.addresses import Address, parse_address
from arrowbank.bank.remote.fetching import fetch_bank, parsed_manifest, read_remote_manifest
from arrowbank.bank.remote.stores import Store, store_of
from arrowbank.errors import InputError
from arrowbank.progress import SILENT, Progress

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
    store = store_of(parsed)
    data = read_remote_manifest(store, store.listing())
    folder = cache_folder() / _name(parsed, data, store)
    if not _is_there(folder, data):
        with explained(cache_folder()):
            cache_folder().mkdir(parents=True, exist_ok=True)
        with waiting_lock(cache_folder() / f".{folder.name}.lock"):  # of several processes one fetches, the others wait
            if not _is_there(folder, data):
                fetch_bank(store, folder, progress=progress)
    return folder


def _name(address: Address, data: bytes, store: Store) -> str:
    digest = str(parsed_manifest(data, store.shown)["plan_digest"])
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise InputError(
            f"{store.shown}: its plan digest {digest[:80]!r} is not a sha256. Give a bank that arrowbank has written."
        )
    words = re.sub(r"[^A-Za-z0-9.]+", "-", address.shown.partition("://")[2]).strip("-.")[-60:]
    return f"{words}-{digest[:16]}-{hashlib.sha256(address.shown.encode() + data).hexdigest()[:12]}"


def _is_there(folder: Path, data: bytes) -> bool:
    return (folder / STATE).is_file() and (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() == data
