"""Work that is started ahead of the point where its result is waited for; the results come in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Ticket = TypeVar("Ticket")
Result = TypeVar("Result")


def in_flight(
    items: Iterable[Item],
    start: Callable[[Item], Ticket],
    finish: Callable[[Ticket], Result],
    *,
    ahead: int,
    cancel: Callable[[Ticket], object] = lambda ticket: None,
) -> Generator[Result, None, None]:
    """`finish(start(item))` for each item, in order, with the next `ahead` items started before one is waited for.

    Tickets that are left when the iteration ends early, by an error or by close(), go to `cancel`.
    """
    pending: deque[Ticket] = deque()
    try:
        for item in items:
            pending.append(start(item))
            if len(pending) > ahead:
                yield finish(pending.popleft())
        while pending:
            yield finish(pending.popleft())
    finally:
        for ticket in pending:
            cancel(ticket)
