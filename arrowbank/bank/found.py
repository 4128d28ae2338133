"""What a folder holds before something is written into it: whose it is, in words, and whether any work is in it.

Nothing here writes. A writer looks before it makes its lock, so that a folder that it refuses stays as it is.
"""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path

from arrowbank.bank.manifest import FORMAT, JOURNAL, MANIFEST, STATE, readable_json

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
