"""What every place that holds banks can do, and how its refusals are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

AT_ONCE = 4

Report = Callable[[int], object]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file as the place lists it: its bytes (None where it does not say), and the hash that it vouches for, where it has one.

    `sha256` is of the contents, `blob` is git's name of them (sha1 of "blob SIZE\\0" and the contents); both in hexadecimal.
    """

    size: int | None
    sha256: str | None = None
    blob: str | None = None


class Store(Protocol):
    """A place that a bank can be read from. All methods raise RemoteError where it refuses or cannot be reached."""

    @property
    def shown(self) -> str:
        """The address for messages."""

    def listing(self) -> Mapping[str, StoredFile]:
        """All files by name. InputError where there is no such place."""

    def read(self, name: str) -> bytes:
        """A small file."""

    def fetch(self, name: str, size: int, work: Path, report: Report) -> Path:
        """Bring the file `name` of `size` bytes into the folder `work`, telling `report` of bytes as they come; where it lies there."""


def side_by_side(
    call: Callable[[T], R], items: Iterable[T], then: Callable[[R], object], *, stop: Callable[[], object] = lambda: None
) -> None:
    """`call` for some `items` at once, `then` with each result in this thread.

    The first failure, or a Ctrl-C, ends it: what waits is dropped, and `stop` is to make an end of what runs.
    """
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="remote")
    try:
        for done in as_completed([pool.submit(call, item) for item in items]):
            then(done.result())
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
