"""How long work reports itself: a stage opens a phase and advances it; how that is shown is the caller's business."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

NAMED = 8  # names of things that are not read, in a message


class Phase(Protocol):
    """One phase of work, closed by leaving its `with` block."""

    def advance(self, done: int, *, texts: int | None = None) -> None:
        """`done` more units are done; `texts` more texts, where the unit is not texts and they do not come in proportion."""

    def __enter__(self) -> Phase: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Progress(Protocol):
    """Where stages report to."""

    def phase(self, name: str, total: int | None, *, unit: str = "texts", texts: int | None = None) -> Phase:
        """Open the phase `name` of `total` units (None: not known). `texts` is how many texts these are, where they come in
        proportion to the units."""

    def message(self, text: str) -> None:
        """A line for the person who watches (standard error on the command line)."""


class _Silent:
    def phase(self, name: str, total: int | None, *, unit: str = "texts", texts: int | None = None) -> Phase:
        return self

    def message(self, text: str) -> None:
        pass

    def advance(self, done: int, *, texts: int | None = None) -> None:
        pass

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


SILENT: Progress = _Silent()


def tell_unread(progress: Progress, place: object, **kinds: Iterable[str]) -> None:
    """One message that names what `place` holds and nothing reads, by kind (such as files=…); none where there is nothing."""
    said = []
    for kind, names in kinds.items():
        listed = list(dict.fromkeys(names))
        more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
        said += [f"{kind} {', '.join(listed[:NAMED])}{more}"] if listed else []
    if said:
        progress.message(f"{place}: not read: {'; '.join(said)}")
