"""The stage `pull`: a bank from the hub or any fsspec address into a folder."""

from __future__ import annotations

from pathlib import Path

from arrowbank.bank.manifest import Manifest
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.bank.remote.addresses import parse_address
from arrowbank.bank.remote.cache import store_of
from arrowbank.bank.remote.fetch import fetch_bank
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked


@explains("folder")
@checked
def pull(repo: str, folder: str | Path, *, revision: str | None = None, progress: Progress = SILENT) -> Manifest:
    """Bring the bank at `repo` (OWNER/NAME on the hub, or an address) into `folder`; its manifest.

    `revision` is a branch, tag or commit of a repository (default: main). The same call again goes on where it stopped, keeps what is
    there and right, and brings what is not. Until all is there, and right by size and sha256, the folder does not open.

    Raises InputError (no bank there, or `folder` holds something else), IncompleteBank (its push has not ended), CorruptBank (a file
    is not the one that the manifest vouches for), RemoteError, DiskFull, BankLocked, MissingDependency.
    """
    address = parse_address(repo, revision)
    require_separate([("DIR", folder)], [("REPO", address.local)])
    return fetch_bank(store_of(address), Path(folder), progress=progress)
