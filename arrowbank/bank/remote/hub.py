"""A dataset repository on the Hugging Face Hub, read through its own client: token, cache of chunks and xet are the client's business.

The token comes from where the client looks for it (HF_TOKEN, the login's file). It is never an argument here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arrowbank.bank.refusals import explain
from arrowbank.bank.remote.addresses import Address
from arrowbank.bank.remote.stores import Report, StoredFile
from arrowbank.errors import ArrowbankError, InputError, RemoteError
from arrowbank.secrets import know_hub_token

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

TYPE = "dataset"
MAIN = "main"


class HubStore:
    """The repository at one commit: what `revision` meant when it was first looked at."""

    def __init__(self, address: Address) -> None:
        from huggingface_hub import HfApi

        know_hub_token()
        self.address = address
        self.repo = address.repo
        self.api: HfApi = HfApi(library_name="arrowbank")

    @property
    def shown(self) -> str:
        return self.address.shown

    @cached_property
    def commit(self) -> str:
        """The commit that is read."""
        with hub_errors(self.shown):
            info = self.api.repo_info(self.repo, repo_type=TYPE, revision=self.address.revision)
            return str(info.sha)

    def listing(self) -> dict[str, StoredFile]:
        from huggingface_hub.hf_api import RepoFile

        with hub_errors(self.shown):
            entries = list(self.api.list_repo_tree(self.repo, repo_type=TYPE, revision=self.commit, recursive=True))
        return {entry.path: _stored(entry) for entry in entries if isinstance(entry, RepoFile)}

    def read(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="arrowbank-") as folder:
            return self._download(name, Path(folder)).read_bytes()

    def fetch(self, name: str, size: int, work: Path, report: Report) -> Path:
        return self._download(name, work, report)

    def _download(self, name: str, folder: Path, report: Report = lambda count: None) -> Path:
        with hub_errors(f"{self.shown}: {name}"):
            found = self.api.hf_hub_download(
                self.repo, name, repo_type=TYPE, revision=self.commit, local_dir=folder, tqdm_class=_bar_that_tells(report)
            )
        return Path(found)


def _stored(entry: RepoFile) -> StoredFile:
    return StoredFile(
        size=entry.size, sha256=entry.lfs.sha256 if entry.lfs else None, blob=None if entry.lfs else entry.blob_id
    )


def _bar_that_tells(report: Report) -> Any:
    """A class of progress bars for the client that draw nothing and tell `report` how many bytes came."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            report(int(n or 0))

    return Bar


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep the client from drawing bars of its own in this block."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def hub_errors(shown: str) -> Iterator[None]:
    """Tell the client's errors as ours, with what to do, in one line and without the token."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalEntryNotFoundError as error:  # what a download says of whatever kept it from asking
        raise _told(error.__cause__ or error, shown) from None
    except (errors.HTTPError, OSError, ValueError, RuntimeError) as error:  # type: ignore[attr-defined]  # the HTTP client's; xet's
        raise _told(error, shown) from None


def _told(error: BaseException, shown: str) -> ArrowbankError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return InputError(f"{shown}: access to this repository has to be asked for on its page. {_first_line(error)}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return InputError(
            f"{shown}: there is no such dataset repository, or this login may not see it. Check the name, then `hf auth login` "
            "or HF_TOKEN."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"{shown}: has no such revision. Give a branch, a tag or a commit of this repository.")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return RemoteError(
            f"{shown}: HF_HUB_OFFLINE is set, so the hub is not asked. Unset it, or open a folder on this machine."
        )
    if isinstance(error, errors.HFValidationError):
        return InputError(f"{shown}: not a name for a repository: {_first_line(error)}")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return RemoteError(
            f"{shown}: this login may not do that ({_first_line(error)}). `hf auth login` with a token that may."
        )
    if isinstance(error, OSError) and (explained := explain(error, Path(shown))):
        return explained
    if error.__cause__ and isinstance(error, RuntimeError):  # an upload's: the client says of which file
        return _told(error.__cause__, f"{shown}: {_first_line(error)}")
    return RemoteError(f"{shown}: {_first_line(error)}. What is finished is kept: the same command goes on from there.")


def _first_line(error: BaseException) -> str:
    line = next((part.strip() for part in str(error).splitlines() if part.strip()), type(error).__name__)
    return line.rstrip(".")
