"""The verb `verify`, whatever it is given: a bank, an export or a cache, or a vocabulary map."""

from __future__ import annotations

from pathlib import Path

from arrowbank.bank.checks import Check
from arrowbank.bank.manifest import JOURNAL
from arrowbank.bank.refusals import explains
from arrowbank.bank.remote.addresses import is_address, parse_address
from arrowbank.bank.verify import verify as verify_bank
from arrowbank.formats.export_checks import layout_of, verify_export
from arrowbank.formats.sidecar import find_sidecar
from arrowbank.progress import SILENT, Progress
from arrowbank.report.folders import is_bank, is_ours
from arrowbank.settings import checked
from arrowbank.targets.vocab import MAPS, verify_vocab_map


@explains("place", "read")
@checked
def verify(place: str | Path, *, quick: bool = False, progress: Progress = SILENT) -> list[Check]:
    """All checks of the bank, the export or cache, or the vocabulary map (a file) at `place`: a path, or the address of a bank.

    `quick` looks at sizes and row counts only. What is at fault is a failed check, never an exception.
    """
    path = _local(place)
    if path is None:
        return verify_bank(place, quick=quick, progress=progress)
    if path.is_file():
        return [verify_vocab_map(path)]
    if path.is_dir() and _is_export(path):
        return verify_export(path, quick=quick, progress=progress)
    maps = [] if quick or not path.is_dir() else sorted(path.glob(MAPS))  # the bank's manifest does not list them
    return [*verify_bank(place, quick=quick, progress=progress), *map(verify_vocab_map, maps)]


def _local(place: str | Path) -> Path | None:
    """The path of a place on this machine; None for an address elsewhere."""
    return parse_address(str(place)).local if is_address(place) else Path(place)


def _is_export(folder: Path) -> bool:
    """Whether `folder` is to be verified as an export or cache: a bank that a sidecar was put into stays a bank."""
    if find_sidecar(folder):
        return not is_ours(folder)
    return not is_bank(folder) and ((folder / JOURNAL).is_dir() or layout_of(folder) is not None)
