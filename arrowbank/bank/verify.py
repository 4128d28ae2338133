"""Verifying a bank: everything that opening it takes on trust is read and checked.

Each check has its own line. A check that fails says where. A bank that cannot be opened and an exception inside a check are
failed checks with the file, never an exception of `verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from arrowbank.bank.checks import NOTHING, Check, attempt, found_wrong, run_check
from arrowbank.bank.files import sha256_of
from arrowbank.bank.kinds import kind_of
from arrowbank.bank.manifest import MANIFEST, SHARD_NAME, STATE, short_json
from arrowbank.bank.manifest_checks import same_json
from arrowbank.bank.open import open_bank
from arrowbank.bank.reader import Bank
from arrowbank.bank.refusals import explains
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

# float16 keeps 11 bits: each of D rounded components is off by at most 2^-12 of itself, and so is the norm
NORM_TOLERANCE = 2.0**-11


@explains("folder", "read")
@checked
def verify(folder: str | Path, *, quick: bool = False, progress: Progress = SILENT) -> list[Check]:
    """All checks of the bank in `folder`. `quick` looks at sizes and row counts only."""
    with attempt(Path(folder) / MANIFEST) as failures:
        bank = open_bank(folder, progress=progress)
    if failures:
        return [Check("opens", False, failures[0])]
    manifest = bank.folder / MANIFEST
    checks = [
        Check("opens", True, f"committed, {len(bank):,} rows in {len(bank.shard_names)} shards, sizes and row counts right")
    ]
    if not len(bank):
        checks.append(Check("rows", False, NOTHING))
    if quick or not len(bank):
        return checks
    with progress.phase("verify", sum(entry.bytes for entry in bank.manifest.files), unit="bytes") as phase:
        checks += run_check("hashes", manifest, lambda: _hashes(bank, phase.advance))
    checks += run_check("shards", manifest, lambda: _strays(bank))
    if unreadable := _unreadable(bank):
        return [*checks, unreadable]
    checks += run_check("types", manifest, lambda: _types(bank))
    checks += run_check("manifest", manifest, lambda: manifest_check(bank))
    checks += run_check("dataset", bank.folder / STATE, lambda: _dataset(bank))
    for name, check in kind_of(bank.kind).checks(bank).items():
        checks += run_check(name, manifest, check)
    return checks


def _hashes(bank: Bank, report: Callable[[int], None]) -> Check:
    wrong = []
    for entry in bank.manifest.files:
        if sha256_of(bank.folder / entry.name) != entry.sha256:
            wrong.append(entry.name)
        report(entry.bytes)
    return found_wrong(
        "hashes", wrong, f"sha256 of {len(bank.manifest.files)} files", "bytes differ from the manifest's sha256 in"
    )


def _strays(bank: Bank) -> Check:
    found = {path.name for path in bank.folder.iterdir() if SHARD_NAME.fullmatch(path.name)}
    return found_wrong("shards", sorted(found - set(bank.shard_names)), "no file beside the manifest's", "not in the manifest:")


def _types(bank: Bank) -> Check:
    wrong = [name for name, batch in zip(bank.shard_names, bank.shards(), strict=True) if batch.schema != bank.schema]
    return found_wrong("types", wrong, f"columns {', '.join(bank.columns)}", "other column types in")


def _unreadable(bank: Bank) -> Check | None:
    """The failed check of a bank with a shard whose bytes are not values of its columns' types (an offset out of range, text
    that is not UTF-8): each of the other checks would say the same. None where there is none."""
    wrong: list[str] = []
    for index, name in enumerate(bank.shard_names):
        with attempt(bank.folder / name) as failures:
            bank.shard(index)
        wrong += failures
    return found_wrong("values", wrong, "", "") if wrong else None


def _dataset(bank: Bank) -> Check:
    """What a trainer does first: `load_from_disk`, and a row from either end."""
    dataset = bank.dataset
    for row in (0, len(bank) - 1) if len(bank) else ():
        dataset[row]
    found, wanted = (dataset.num_rows, dataset.column_names), (len(bank), bank.columns)
    return Check("dataset", found == wanted, f"load_from_disk gives {found[0]:,} rows of {', '.join(found[1])}")


def manifest_check(bank: Bank) -> Check:
    """Provenance, the list of files, and every field that the rows decide. Says which fields a trainer has added."""
    manifest, wrong = bank.manifest, list[str]()
    wrong += _wrong_files(bank)
    for name, counted in kind_of(bank.kind).recounted(bank).items():
        if name in manifest:
            found = manifest.get(name)
            if not same_json(found, counted):
                wrong.append(f"{name} is {_short(found)}, counted {_short(counted)}")
    wrong += _inconsistent(bank)
    good = "as it was committed; every count is that of the rows"
    good += f"; extra fields: {', '.join(manifest.extra)}" if manifest.extra else ""
    return found_wrong("manifest", wrong, good, "not what was committed:")


def _wrong_files(bank: Bank) -> Iterator[str]:
    """Where the list of files is not that of the writer: names in order, and the files that belong to such a bank."""
    entries = [(entry.name, entry.rows) for entry in bank.manifest.files]
    if entries != sorted(entries):
        yield "files are not in the order of their names"
    if (beside := kind_of(bank.kind).files_beside(bank)) is None:
        return
    wanted = dict(zip(bank.shard_names, bank.shard_rows, strict=True)) | beside
    found = dict(entries)
    for name in sorted({*found, *wanted}):
        if name not in found:
            yield f"{name} is not in the list of files"
        elif name not in wanted:
            yield f"{name} is in the list of files, and no file of such a bank"
        elif found[name] != wanted[name]:
            yield f"rows of {name} is {found[name]}, expected {wanted[name]}"


def _inconsistent(bank: Bank) -> Iterator[str]:
    """Fields that the rows do not decide, but bound."""
    manifest, rows = bank.manifest, len(bank)
    if (ends := manifest.generations) is not None and not _are_ends(ends, bank):
        yield f"generations is {_short(ends)}, expected ends of shards up to {rows}"
    if merged := manifest.merged:
        new, there = (sum(part[name] for part in merged.parts) for name in ("new", "rows"))
        if (new, merged.shared) != (rows, there - rows):
            yield f"merged adds up to {new} new and {merged.shared} shared rows, expected {rows} and {there - rows}"
    yield from kind_of(bank.kind).bounds(bank)


def _are_ends(ends: Sequence[int], bank: Bank) -> bool:
    starts = bank.starts.tolist()
    return ends == sorted(ends) and bool(ends) and ends[-1] == len(bank) and set(ends) <= set(starts[1:])


def _short(value: object) -> str:
    return short_json(value, 80)
