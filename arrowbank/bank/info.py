"""What a folder is, in a few facts, also when it is unfinished, and what to run next."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from arrowbank.bank.kinds import kind_of
from arrowbank.bank.manifest import JOURNAL, MANIFEST, STATE, Manifest, Receipt, read_json, readable_json
from arrowbank.bank.manifest_checks import read_manifest, vouched_fields
from arrowbank.errors import CorruptBank

PARTS = ("texts", "tokens", "features")  # of a folder that `build` made
SHOWN = ("kinds", "counts")  # of the manifest of every kind; each kind has more


def describe_folder(folder: str | Path) -> dict[str, Any]:
    """Facts about the bank in `folder`, or about each bank of a folder that `build` made. InputError where there is none."""
    folder = Path(folder)
    parts = [] if (folder / MANIFEST).exists() else [part for part in PARTS if (folder / part / MANIFEST).exists()]
    if parts:
        return {part: describe_folder(folder / part) for part in parts}
    manifest = read_manifest(folder)
    committed = (folder / STATE).exists() and bool(manifest["complete"])
    rows = manifest["rows"] if committed else _receipt_rows(folder, manifest)
    total = manifest.get("text_count")
    kind = kind_of(manifest["kind"])
    vouched = vouched_fields(readable_json(folder / STATE)) if committed else []
    extra = sorted(set(manifest) - set(vouched)) if vouched else []
    return {
        "folder": str(folder),
        "kind": manifest["kind"],
        "state": "committed" if committed else "not committed: trainers refuse it",
        "rows": rows,
        **({"rows_in_all": total} if not committed and total is not None else {}),
        "bytes": _bytes(folder),
        **{name: manifest[name] for name in (*SHOWN, *kind.shown) if manifest.get(name) is not None},
        **({"extra_fields": extra} if extra else {}),
        "plan_digest": manifest["plan_digest"],
        "next": kind.next.format(folder=shlex.quote(str(folder)))
        if committed
        else "the command that began it, again: it goes on where it stopped",
    }


# A build may be at work here: what a listing names, it may have put elsewhere a moment later.


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _receipt_rows(folder: Path, manifest: Manifest) -> int:
    """The rows of finished shards. A receipt that cannot be read counts for nothing: the next run makes that shard again."""
    rows = 0
    for path in (folder / JOURNAL).glob("data-*.json"):
        with suppress(FileNotFoundError, CorruptBank, TypeError):
            receipt = Receipt(**read_json(path))
            rows += (receipt.rows or 0) if receipt.plan_digest == manifest["plan_digest"] else 0
    return rows
