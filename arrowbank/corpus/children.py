"""Child processes that end with this one, even when it is killed, and that cannot hang it, even when they are killed.

A pool's workers notice by themselves, after the work in hand, that their parent is gone; the manager process that `Dataset.map`
starts beside them never does. On Linux the kernel is asked to kill both. Elsewhere they are left to themselves.

A worker killed while it waits for work takes the lock of the pool's queue with it, and the pool would wait for that lock for
ever when it is closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PR_SET_PDEATHSIG = 1
LOCK_PATIENCE_S = 3.0  # a live worker lets go of the queue at once when the pool closes

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_parent = 0  # the process whose forks are bound, 0: none


def _bind() -> None:
    if _libc is None or not _parent:
        return
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != _parent:  # it died before we asked
        os._exit(1)


os.register_at_fork(after_in_child=_bind)


@contextmanager
def bound_children() -> Iterator[None]:
    """Processes forked inside this block are killed when this process ends; a pool of datasets' ends even if some died."""
    global _parent
    from multiprocess.pool import Pool  # what datasets makes its pools with

    finish = Pool._help_stuff_finish

    def finish_without_the_dead(inqueue: Any, task_handler: Any, size: int) -> None:
        inqueue._rlock.acquire(timeout=LOCK_PATIENCE_S)
        inqueue._rlock.release()
        finish(inqueue, task_handler, size)

    before, _parent = _parent, os.getpid()
    Pool._help_stuff_finish = staticmethod(finish_without_the_dead)
    try:
        yield
    finally:
        Pool._help_stuff_finish = staticmethod(finish)
        _parent = before
