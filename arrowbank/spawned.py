"""Scripts without a main guard: a worker process that is started afresh imports the script again, and must not run its builds.

Where a worker still imports the script and comes to a build that its parent is at, it ends with the code NO_MAIN_GUARD, and the
parent says what to do about it.
"""

from __future__ import annotations

import os
import sys

NO_MAIN_GUARD = 71
REMEDY = 'Worker processes import the script that starts them. Put what it runs under `if __name__ == "__main__":`, or use one process.'
KINDS = ("multiprocessing", "multiprocess")  # the standard library's, and the one that `datasets` uses


def leave_while_importing_main() -> None:
    """End this process where it is a worker that imports the main script of its parent: what is about to run is the parent's work."""
    for kind in KINDS:
        module = sys.modules.get(f"{kind}.process")
        if module is not None and getattr(module.current_process(), "_inheriting", False):
            os._exit(NO_MAIN_GUARD)


def main_script() -> str:
    """The script that this process runs, for people."""
    return str(getattr(sys.modules.get("__main__"), "__file__", None) or "the main module")
