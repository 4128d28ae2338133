"""The one writer of a folder: it looks at what the folder holds before anything is changed, takes the lock, and looks again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from arrowbank.bank.journal import Journal
from arrowbank.bank.locks import FolderLock
from arrowbank.bank.manifest import differing_fields, short_json
from arrowbank.errors import PlanMismatch

Writer = TypeVar("Writer", bound="FolderWriter")


class FolderWriter:
    """A context manager around the work in `folder`, whose receipts, locks and notes are in the folder's journal until it is complete.

    A kind of folder says what it refuses (`check`), what it does with what an earlier run has left (`_open`), and when the journal
    is not needed any more (`_is_over`). Raises BankLocked where another process writes there.
    """

    def __init__(self, folder: Path, digest: str, *, nested: bool = False, worker: int | None = None) -> None:
        self.folder = folder
        self._journal = Journal(folder, digest, nested=nested)
        self._worker = worker
        self._lock: FolderLock | None = None

    def check(self) -> None:
        """Raise what entering raises for what the folder holds. Nothing is changed."""
        raise NotImplementedError

    def _open(self) -> None:
        """Do what is to be done: what was there before the lock was taken may be another thing by now."""
        raise NotImplementedError

    def _is_over(self) -> bool:
        """Whether the journal can go."""
        raise NotImplementedError

    def __enter__(self: Writer) -> Writer:
        self.check()
        self._journal.make()
        self._lock = FolderLock(self._journal.folder, self._worker)
        try:
            self._open()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_over():
            self._journal.drop()
        if self._lock:
            self._lock.release()
            self._lock = None


def plan_mismatch(
    folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], *, what: str = "work of another plan", note: str = ""
) -> PlanMismatch:
    """The error of a folder with work of the recipe `found` where `wanted` is asked for: it names every field that differs."""
    fields = differing_fields(found, wanted)
    said = {name: [short_json(value, ascii=False) for value in values] for name, values in fields.items()}
    lines = "".join(f"\n  {name}: found {old}, wanted {new}" for name, (old, new) in said.items())
    return PlanMismatch(
        f"{folder}: holds {what}; these fields differ:{lines}\n"
        f"{note}Give --restart to throw that work away, or another folder to keep it.",
        fields,
    )
