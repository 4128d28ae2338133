"""What a page is about: the folders that were given, opened, and what lies beside them and belongs to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from arrowbank.bank.info import PARTS
from arrowbank.bank.kinds import every_kind, kind_of
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.manifest import MANIFEST
from arrowbank.bank.open import open_bank
from arrowbank.bank.reader import Bank, local_folder
from arrowbank.errors import ArrowbankError, IncompleteBank, InputError
from arrowbank.progress import SILENT, Progress

B = TypeVar("B", bound=Bank)
HEAL_REPORT, HEAL_PLAN = "report.json", "plan.json"


@dataclass(frozen=True)
class Subject:
    """`banks` by the name that they have on the page, the main one first; `beside` by kind: what they were made from.

    For a healing there are no banks, and `folder` is its OUT.heal.
    """

    folder: Path
    banks: dict[str, Bank]
    beside: dict[str, Bank] = field(default_factory=dict)
    points: int = 0  # of the map
    neighbours: int = 0  # of each point
    progress: Progress = SILENT

    @property
    def main(self) -> Bank:
        return next(iter(self.banks.values()))

    @property
    def kind(self) -> str:
        return self.main.kind if self.banks else "heal"

    def bank_as(self, kind: type[B]) -> B:
        """The main bank, which is of this class."""
        if not isinstance(self.main, kind):
            raise InputError(f"{self.folder}: a bank of {self.kind}, expected a {kind.__name__}.")
        return self.main

    def bank(self, kind: type[B]) -> B | None:
        """The bank of that class, given or found beside the given one."""
        return next((bank for bank in (*self.banks.values(), *self.beside.values()) if isinstance(bank, kind)), None)


def open_subject(folders: Sequence[str | Path], progress: Progress = SILENT) -> Subject:
    """Open what was given: a bank or its address, several arms, a folder that `build` made, or a healing's OUT.heal.

    Raises what `open_bank` raises, InputError for several folders that are not all arms, IncompleteBank for a healing
    that is not done.
    """
    paths = [local_folder(folder, progress) for folder in folders]
    if not paths:
        raise InputError("no bank is given. Give a bank's folder.")
    if len(paths) > 1:
        return _arms(paths)
    (path,) = paths
    if (healing := _healing(path)) is not None:
        return Subject(healing, {})
    if not (path / MANIFEST).exists():
        parts = [path / part for part in reversed(PARTS) if (path / part / MANIFEST).exists()]
        if parts:
            return Subject(path, {part.name: open_bank(part) for part in parts})
    bank = open_bank(path)
    return Subject(path, {path.resolve().name: bank}, _found_beside(bank))


def _arms(paths: Sequence[Path]) -> Subject:
    banks: dict[str, Bank] = {}
    if len({path.resolve() for path in paths}) < len(paths):
        raise InputError(f"{', '.join(map(str, paths))}: a bank is given twice. Give each once.")
    for path in paths:
        bank = open_bank(path)
        if not kind_of(bank.kind).together:
            words = " or ".join(kind.words for kind in every_kind().values() if kind.together)
            raise InputError(
                f"{path}: a bank of {bank.kind}; several banks on one page must be {words}. Give the others a page each."
            )
        name = path.resolve().name
        banks[name if name not in banks else str(path)] = bank
    return Subject(paths[0], banks)


def _healing(path: Path) -> Path | None:
    """The folder of a healing's report, for it or for the checkpoint beside it."""
    whole = path.absolute()  # "." has no name of its own
    for folder in (path, whole.with_name(f"{whole.name}.heal")):
        if (folder / MANIFEST).exists():
            return None
        if (folder / HEAL_REPORT).is_file():
            return folder
        if (folder / HEAL_PLAN).is_file():
            raise IncompleteBank(
                f"{folder}: a healing that is not done (no {HEAL_REPORT}). Run `arrowbank heal` again: it goes on."
            )
    return None


def _found_beside(bank: Bank) -> dict[str, Bank]:
    """The texts and tokens that `bank` was made from, where `build` lays them and only if they are the very ones."""
    found: dict[str, Bank] = {}
    for kind in kind_of(bank.kind).behind:
        try:
            other = open_bank(bank.folder.absolute().parent / kind)
        except ArrowbankError:  # not there, unfinished or damaged: the page does without it
            continue
        if other.kind == kind and len(other) == len(bank) and _is_source(other, bank):
            found[kind] = other
    return found


def _is_source(other: Bank, bank: Bank) -> bool:
    if isinstance(bank, FeatureBank):
        return bool(bank.manifest.recipe.get(other.kind) == other.content_digest)
    return bool(bank.manifest.recipe.get(other.kind) == other.plan_digest)
