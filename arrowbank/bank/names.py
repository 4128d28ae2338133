"""Names and links that come from files: the one place that decides whether they may be followed.

Banks, exports, checkpoints and dumps may come from strangers. Whatever such a folder lists (a manifest, an index, a receipt, a remote
listing) passes `name_fault` before it becomes a path, and `place_fault` before that path is opened, hashed, linked, sent or
deleted. A folder that arrowbank itself writes into (`journal/`) passes `own_folder`.

A folder may be a symbolic link, and so may a listed file whose target is inside the folder. Of links that leave the folder one kind
is followed: those of the Hugging Face Hub's cache, <repo>/snapshots/<revision>/… → <repo>/blobs/….
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from arrowbank.errors import CorruptBank

MAX_NAME_BYTES = 255  # of one part: what file systems take
FORBIDDEN = '\\:"'  # separators of other systems, and what would end a quoted name


class UnsafeName(CorruptBank):
    """A folder lists a file whose name or place is outside of it. Nothing was written or deleted."""


def name_fault(name: object, *, nested: bool = False) -> str:
    """Why `name` is no plain name of a file, or "" where it is one. `nested`: the format has folders, separated by "/"."""
    if not isinstance(name, str):
        return f"it is a {type(name).__name__}"
    parts = name.split("/")
    if len(parts) > 1 and not nested:
        return "it has the separator '/'"
    return next((fault for part in parts if (fault := _part_fault(part))), "")


def _part_fault(part: str) -> str:
    if not part:
        return "it is empty or has an empty part"
    if part.startswith("."):
        return "it begins with '.'"
    if not part.isprintable():  # controls, formats such as those that turn the direction of text, lone surrogates, line ends
        return "it has characters that cannot be printed"
    if part != part.strip() or part.endswith("."):
        return "it ends or begins with a space, or ends with '.'"
    if wrong := next((character for character in part if character in FORBIDDEN), ""):
        return f"it has the character {wrong!r}"
    if unicodedata.normalize("NFC", part) != part:
        return "it is not in the normal form NFC"
    if len(part.encode()) > MAX_NAME_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    return ""


def check_names(names: Iterable[object], where: object, *, nested: bool = False, reserved: Collection[str] = ()) -> list[str]:
    """`names` as a list. UnsafeName for the first that is no plain name, is `reserved`, or occurs twice (whatever case means)."""
    checked: dict[str, str] = {}
    taken = {name.casefold() for name in reserved}
    for name in names:
        fault = name_fault(name, nested=nested)
        if fault or not isinstance(name, str):
            raise unsafe(where, name, fault)
        key = unicodedata.normalize("NFKC", name).casefold()
        if key in taken:
            raise unsafe(where, name, "arrowbank writes that file itself")
        if key in checked:
            raise unsafe(where, name, f"it is listed twice, the first time as {checked[key]!r}")
        checked[key] = name
    return list(checked.values())


def unsafe(where: object, name: object, fault: str) -> UnsafeName:
    """The error for a listed name."""
    shown = repr(name) if len(repr(name)) <= 120 else f"{repr(name)[:117]}…"
    return UnsafeName(
        f"{where}: lists a file named {shown}, which is not a plain name in the bank's folder ({fault}). Nothing was written or "
        "deleted; do not trust this folder."
    )


def place_fault(folder: Path, name: str) -> str:
    """Why the file `name`, a name that has been checked, must not be followed; "" where it may be, and where there is none."""
    path, found = folder / name, None
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and "/" not in name:  # as nearly always: nothing to follow
                return ""
            found = path.stat()
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        return f"it cannot be followed ({error})"
    if not is_inside(root, target):
        return f"it is a symbolic link out of the folder, to {target}"
    if found is not None and not stat.S_ISREG(found.st_mode):
        return "it is a folder" if stat.S_ISDIR(found.st_mode) else "it is no regular file"
    return ""


def is_inside(root: Path, target: Path) -> bool:
    """Whether `target` is in the folder `root`, or `root` is (in) a snapshot of the hub's cache and `target` a blob of the same
    repository; both resolved."""
    return target.is_relative_to(root) or any(
        snapshot.parent.name == "snapshots" and target.parent == snapshot.parent.parent / "blobs"
        for snapshot in (root, *root.parents)
    )


def checked_place(folder: Path, name: object, where: object, *, nested: bool = False) -> Path:
    """The path of the listed file `name` in `folder`. UnsafeName where name or place are at fault; the file need not exist."""
    fault = name_fault(name, nested=nested)
    if not fault and isinstance(name, str):
        fault = place_fault(folder, name)
    if fault or not isinstance(name, str):
        raise unsafe(where, name, fault)
    return folder / name


def check_places(folder: Path, names: Collection[str], where: object) -> None:
    """UnsafeName for the first of `names` that is a link out of `folder`, or no regular file; a missing one is fine. The names have
    been checked, or are the program's own.

    One listing of the folder finds what is no regular file, which is rare; only that, and names in folders, are looked at further.
    """
    wanted = set(names)
    with os.scandir(folder) as entries:
        odd = [entry.name for entry in entries if entry.name in wanted and not entry.is_file(follow_symlinks=False)]
    for name in sorted([*odd, *(name for name in wanted if "/" in name)]):
        if fault := place_fault(folder, name):
            raise unsafe(where, name, fault)


def own_folder(root: Path, name: str) -> Path:
    """The folder `root`/`name` that arrowbank writes into and clears, made where it does not exist. `root` may be a link itself.

    UnsafeName where a part of `name`, or anything in the folder, is a symbolic link: what is written there would go elsewhere.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root
    for part in Path(name).parts:
        folder = folder / part
        if folder.is_symlink():
            raise _linked(folder)
        folder.mkdir(exist_ok=True)
    refuse_links(folder)
    return folder


def refuse_links(folder: Path) -> None:
    """UnsafeName where `folder`, or anything in it at any depth, is a symbolic link."""
    if folder.is_symlink():
        raise _linked(folder)
    pending = [folder]
    while pending:
        # it may not exist, and another worker of a job array may remove it
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    raise _linked(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))


def _linked(path: Path) -> UnsafeName:
    return UnsafeName(
        f"{path}: a symbolic link (to {path.readlink()}), expected a file or folder of its own. Nothing was written or deleted; "
        "remove the link, or do not trust this folder."
    )
