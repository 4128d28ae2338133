"""Child processes of `Dataset.map` that end with this one, even when it is killed, and that cannot hang it, even when they are killed.

A pool's workers notice by themselves, after the work in hand, that their parent is gone; the manager process that `Dataset.map`
starts beside them never does. So every child waits, in a thread, for the end of a pipe that only this process can write to.

A worker killed while it waits for work takes the lock of the pool's queue with it. Nothing public lets a pool be closed without that
lock: `_help_stuff_finish`, which would wait for it for ever, is replaced for the time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOCK_PATIENCE_S = 3.0  # a live worker lets go of the queue at once when the pool closes

_life: tuple[int, int] | None = None  # the pipe that ends with the process whose forks are bound


def _bind() -> None:
    if _life is not None:
        reader, writer = _life
        os.close(writer)
        threading.Thread(target=_end_with, args=(reader,), daemon=True).start()


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written
    os._exit(1)


os.register_at_fork(after_in_child=_bind)


@contextmanager
def bound_children() -> Iterator[None]:
    """Processes forked inside this block end when the block does, or this process; a pool of datasets' ends even if some died."""
    global _life
    from multiprocess.pool import Pool  # what datasets makes its pools with

    finish = Pool._help_stuff_finish

    def finish_without_the_dead(inqueue: Any, task_handler: Any, size: int) -> None:
        inqueue._rlock.acquire(timeout=LOCK_PATIENCE_S)
        inqueue._rlock.release()
        finish(inqueue, task_handler, size)

    _life = os.pipe()
    Pool._help_stuff_finish = staticmethod(finish_without_the_dead)
    try:
        yield
    finally:
        Pool._help_stuff_finish = staticmethod(finish)
        ends, _life = _life, None
        for end in ends:
            os.close(end)
