"""What a command reads and what it writes are different places: an output is never an input.

Every function that writes calls `require_separate` first, before it creates, locks, sweeps or deletes anything, with all of its
outputs and all of its inputs. What the inputs were made from counts as an input as well: the texts behind tokens, the fillers of
an arm.

Places are told apart by what is on the disk, not by how they are spelled: by the device and inode numbers of a folder and of all
folders above it. So symbolic links, `..`, bind mounts and the case of names make no difference. Files in a bank are not compared,
because banks that `merge` and `select` made share their shards by hard links."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arrowbank.bank.kinds import kind_of
from arrowbank.bank.manifest import CARD, FORMAT, INFO, JOURNAL, LOG, MANIFEST, SHARD_NAME, STATE, readable_json
from arrowbank.bank.remote.addresses import is_address, parse_address
from arrowbank.errors import InputError

if TYPE_CHECKING:
    from arrowbank.bank.reader import Bank

# an option or argument as the user knows it, and the place that it names; None: not given
Named = tuple[str, "str | Path | Bank | None"]

OWN_FILES = (MANIFEST, STATE, INFO, CARD, LOG, JOURNAL)  # of every bank, beside its shards and what its manifest lists


def require_separate(outputs: Iterable[Named], inputs: Iterable[Named], *, files: Iterable[Named] = ()) -> None:
    """InputError where an output is, contains, or is inside an input or another output.

    `outputs` are folders, `files` single files that are written. A file may be put beside the files of a bank, but not over one of
    them. Addresses other than file:// are no places on this machine, and are skipped.
    """
    folders, singles = list(_places(outputs)), list(_places(files))
    read = list(_with_their_inputs(_places(inputs)))
    for output in folders:
        for place in read:
            _refuse(output, place)
    for number, output in enumerate(folders):
        for other in folders[:number]:
            if output.spot.inside(other.spot) or other.spot.inside(output.spot):
                raise InputError(
                    f"{output.shown}: overlaps another output of the same command (found {other.shown}, expected separate folders). "
                    f"Give {output.name} a folder of its own."
                )
    for file in singles:
        for place in read:
            if not place.path.is_dir() and place.spot.inside(file.spot):
                raise _refusal(file, "the output is an input file", place)
        _refuse_file_of_a_bank(file)


def beside(folder: str | Path, suffix: str) -> Path:
    """The folder beside `folder` whose name ends in `suffix`; "." and ".." have no name of their own, their folders have."""
    path = Path(folder)
    whole = path if path.name not in ("", "..") else path.resolve()
    if not whole.name:
        raise InputError(f"{folder}: has no name to put {suffix} behind. Give another folder.")
    return whole.with_name(f"{whole.name}{suffix}")


@dataclass(frozen=True)
class _Spot:
    """Where a path leads: (device, inode) of what exists there and above, nearest first, and the names below it that do not exist."""

    ids: tuple[tuple[int, int], ...]
    missing: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> _Spot:
        ids, missing = list[tuple[int, int]](), list[str]()
        at = Path(os.path.realpath(path))
        for place in (at, *at.parents):
            try:
                found = place.stat()
            except OSError:
                missing.insert(0, place.name)
                continue
            if not ids and missing and _folds_case(place):
                missing = [name.casefold() for name in missing]
            ids.append((found.st_dev, found.st_ino))
        return cls(tuple(ids), tuple(missing))

    def inside(self, other: _Spot) -> bool:
        """Whether this is the other place, or inside it."""
        if other.missing:
            return self.ids[:1] == other.ids[:1] and self.missing[: len(other.missing)] == other.missing
        return other.ids[0] in self.ids


def _folds_case(folder: Path) -> bool:
    """Whether the disk takes names that differ only in case for one."""
    other = folder.with_name(folder.name.swapcase()) if folder.name else folder
    with suppress(OSError):
        return other.name != folder.name and other.samefile(folder)
    return False


@dataclass(frozen=True)
class _NamedPlace:
    """A place of this machine: the option that named it, and where it is."""

    name: str
    path: Path
    spot: _Spot

    @classmethod
    def at(cls, name: str, path: Path) -> _NamedPlace:
        return cls(name, path, _Spot.of(path))

    @property
    def shown(self) -> str:
        """As the user wrote it: --out DIR, --source NAME=PATH."""
        return f"{self.name}{self.path}" if self.name.endswith("=") else f"{self.name} {self.path}"


def _places(named: Iterable[Named]) -> Iterator[_NamedPlace]:
    for name, value in named:
        if not isinstance(value, str | Path | None):
            yield _NamedPlace.at(name, value.folder)
        elif is_address(value):
            address = parse_address(str(value)).local
            if address is not None:
                yield _NamedPlace.at(name, address)
        elif value is not None:
            yield _NamedPlace.at(name, Path(value))


def _with_their_inputs(places: Iterable[_NamedPlace]) -> Iterator[_NamedPlace]:
    """The places, and what they were made from, and what that was made from."""
    waiting, seen = list(places), set[_Spot]()
    while waiting:
        place = waiting.pop(0)
        yield place
        if place.spot not in seen:
            seen.add(place.spot)
            waiting += [_NamedPlace.at(f"{what} {place.shown},", path) for what, path in _made_from(place.path)]


def _made_from(folder: Path) -> Iterator[tuple[str, Path]]:
    """What the bank in `folder` says that it was made from, where that is. Nothing for a folder that is no bank."""
    manifest = manifest_in(folder)
    if manifest is None:
        return
    texts, fillers = manifest.get("texts"), manifest.get("fillers")
    if isinstance(texts, dict) and isinstance(texts.get("path"), str):
        yield "the texts behind", folder / texts["path"]
    for filler in fillers if isinstance(fillers, list) else ():
        if isinstance(filler, dict) and isinstance(filler.get("path"), str):
            yield "a filler of", folder / filler["path"]
    parent = Path(os.path.realpath(folder)).parent
    for name in kind_of(str(manifest.get("kind"))).behind:
        if (parent / name / MANIFEST).exists():
            yield f"the {name} behind", parent / name


def manifest_in(folder: Path) -> dict[str, Any] | None:
    """The manifest of the bank in `folder` as it is, unchecked; None where there is none that can be read."""
    with suppress(OSError):
        manifest = readable_json(folder / MANIFEST)
        if isinstance(manifest, dict) and manifest.get("format") == FORMAT:
            return manifest
    return None


def _refuse(output: _NamedPlace, place: _NamedPlace) -> None:
    """InputError where the folder `output` is, contains or is inside the input `place`."""
    contains, inside = place.spot.inside(output.spot), output.spot.inside(place.spot)
    if contains and inside:
        raise _refusal(output, "input and output are the same", place)
    if inside:
        raise _refusal(output, "the output is inside an input", place)
    if contains:
        raise _refusal(output, "the output contains an input", place)
    if place.path.is_file() and _has_hard_link(output.path, place.spot):
        raise _refusal(output, "the output contains an input file under another name", place)


def _has_hard_link(folder: Path, file: _Spot) -> bool:
    """Whether a file right inside `folder`, and no shard, is the given one."""
    with suppress(OSError), os.scandir(folder) as entries:
        named = (entry for entry in entries if entry.inode() == file.ids[0][1] and not SHARD_NAME.fullmatch(entry.name))
        return any(entry.stat().st_dev == file.ids[0][0] for entry in named)
    return False


def _refusal(output: _NamedPlace, what: str, place: _NamedPlace) -> InputError:
    return InputError(
        f"{output.shown}: {what} (found {place.shown.rstrip(',')}; expected separate places). Give {output.name} another place: a "
        "command never writes to what it reads. Nothing was changed."
    )


def _refuse_file_of_a_bank(file: _NamedPlace) -> None:
    """InputError where a single file would take the place of one that belongs to a bank."""
    real = Path(os.path.realpath(file.path))
    in_journal = real.parent.name == JOURNAL
    folder = real.parent.parent if in_journal else real.parent
    if not ((folder / MANIFEST).exists() or (folder / STATE).exists()):  # a saved dataset has no manifest
        return
    listed = (manifest_in(folder) or {}).get("files")
    names = {entry.get("name") for entry in listed if isinstance(entry, dict)} if isinstance(listed, list) else set()
    if in_journal or real.name in (*OWN_FILES, *names) or real.suffix == ".arrow":
        raise InputError(
            f"{file.shown}: {real.name} is a file of the bank in {folder}. Give {file.name} another name: files of a bank are never "
            "overwritten. Nothing was changed."
        )


# a file that tells what a folder is, and the words for it; the first one that is there counts
SIGNS = (
    ("arrowbank-export.json", "an export"),
    (".arrowbank/arrowbank-export.json", "an export"),
    ("arrowbank.json", "an export"),
    ("samples.idx", "a DeepSpec cache"),
    ("scores.json", "scores of IN2 probes"),
    ("plan.json", "the state of a healing"),
    ("config.json", "a model"),
    ("index.jsonl", "a dump of hidden states"),
    (STATE, "a saved dataset"),
    (f"features/{MANIFEST}", "a folder of `arrowbank build`"),
    (f"texts/{MANIFEST}", "a folder of `arrowbank build`"),
)
NAMED = 3


class Next(Enum):
    """What a writer does with what its folder holds."""

    RESUME = auto()  # keep what has receipts, if anything is there
    CLEAR = auto()  # delete the old work and begin anew
    CHECK = auto()  # it is complete
    COMMIT = auto()  # only the commit is missing


def visible(folder: Path) -> set[str]:
    """The names in `folder` that are not hidden; empty where there is no folder."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()


def in_words(folder: Path) -> str:
    """What is in `folder`: "a bank of tokens", "a model (config.json, …)"."""
    manifest = readable_json(folder / MANIFEST)
    if isinstance(manifest, dict) and manifest.get("format") == FORMAT:
        return f"a bank of {manifest.get('kind')}"
    names = sorted(visible(folder))
    sign = next((words for name, words in SIGNS if (folder / name).is_file()), "files that are not arrowbank's")
    return f"{sign} ({', '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''})"


def is_bare_journal(folder: Path) -> bool:
    """Whether the `journal/` in `folder` is what a writer that was killed at its start leaves: locks, and no more. So is none at all."""
    journal = folder / JOURNAL
    if not journal.exists():
        return True
    return journal.is_dir() and all(
        path.name.startswith("lock") or (path.name.startswith(".") and path.name.endswith(".tmp")) for path in journal.iterdir()
    )
