"""A check of a verification, and the runner that turns whatever goes wrong inside one into that check's FAIL line.

`attempt` is one of the two broad handlers of the package; the other is the outer net of the command line. A folder may come from
a stranger, and no list of exception types covers what NumPy, Arrow and JSON raise for damaged bytes. What is caught is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from arrowbank.errors import ArrowbankError

SHOWN = 5
NOTHING = "there is none, so nothing was verified"  # what a check of no rows, samples or examples says: it fails


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    ok: bool
    detail: str


def found_wrong(name: str, wrong: Sequence[str], good: str, bad: str) -> Check:
    """A check that passes where nothing is wrong, and else says what is."""
    shown = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
    return Check(name, not wrong, f"{bad} {shown}".strip() if wrong else good)


@contextmanager
def attempt(where: Path) -> Iterator[list[str]]:
    """Run the block; the yielded list then holds why it failed, if it did: one message that names a file.

    An error of arrowbank names its file itself. For any other exception the file is `where`: what the block reads.
    """
    failures: list[str] = []
    try:
        yield failures
    except ArrowbankError as error:
        failures.append(str(error))
    except Exception as error:  # noqa: BLE001  # reported as a failed check
        failures.append(f"{where}: cannot be checked ({reason(error)}). Restore the file or rebuild the bank.")


def run_check(name: str, where: Path, check: Callable[[], Check | Sequence[Check]]) -> list[Check]:
    """The checks that `check` returns. Where it raises: one failed check of that name, with the file."""
    with attempt(where) as failures:
        found = check()
    if failures:
        return [Check(name, False, failures[0])]
    return [found] if isinstance(found, Check) else list(found)


def reason(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
