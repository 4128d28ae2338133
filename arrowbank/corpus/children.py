"""Child processes that end with this one, even when it is killed.

A pool's workers notice by themselves, after the work in hand, that their parent is gone; the manager process that `Dataset.map` starts beside them never
does. On Linux the kernel is asked to kill both. Elsewhere they are left to themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1

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
    """Processes forked inside this block are killed when this process ends."""
    global _parent
    before, _parent = _parent, os.getpid()
    try:
        yield
    finally:
        _parent = before
