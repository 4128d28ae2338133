"""Real deaths: run a callable in a process of its own that is SIGKILLed at a chosen publish step, or after a chosen time.

A publish step is a call that makes written bytes durable or visible, or takes them away: `os.fsync`, `os.replace`,
`os.rename`, `os.link`, `os.unlink`, `os.remove`, `os.rmdir`. Each gives two moments, just before it and just after it. A test
counts n = 1, 2, … until a run survives, and has then died at every one of them.

The processes come from a fork server that has the heavy packages imported already: a run costs about a tenth of a second, not
seconds. Only the process itself counts steps; the workers that it starts do not (their deaths are another test).
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import pathlib
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PUBLISH_STEPS = ("fsync", "replace", "rename", "link", "unlink", "remove", "rmdir")
PRELOAD = [
    "pytest",
    "numpy",
    "pyarrow",
    "datasets",
    "torch",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.modeling_auto",
    "multiprocess.pool",
    "arrowbank.cli",
    "arrowbank.features.tokenize",
    "arrowbank.features.scan",
    "arrowbank.features.encode",
    "arrowbank.in2.arm",
    "arrowbank.combine.merge",
    "arrowbank.targets.capture",
    "arrowbank.models.taps",
    "arrowbank.mtp.trunk_passes",
    "arrowbank.mtp.trunk_build",
    "arrowbank.mtp.trunk_build",
]
PATIENCE_S = 120


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: killed; or survived, with the `moments` it passed and the traceback it may have ended with."""

    killed: bool
    moments: int = 0
    error: str = ""


def kill_at(moment: int, target: Callable[..., object], *args: object, **kwargs: object) -> Outcome:
    """Run target(*args, **kwargs), importable by name, in a real process that dies at its `moment`-th moment (0: never)."""
    return _run(moment, None, target, args, kwargs)


def kill_after(seconds: float, target: Callable[..., object], *args: object, **kwargs: object) -> Outcome:
    """Run target(*args, **kwargs) in a real process that is killed from outside after `seconds`, counted from its start."""
    return _run(0, seconds, target, args, kwargs)


def cli(*argv: str) -> None:
    """A target: the command line in this process. Raises SystemExit with the exit code if that is not 0."""
    from arrowbank.cli import main

    code = main(list(argv))
    if code:
        raise SystemExit(code)


def tree_bytes(folder: Path | str) -> dict[str, str]:
    """Relative name → sha256 of every file under `folder`, but for `build.jsonl`, which holds times and hosts."""
    root = Path(folder)
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "build.jsonl")
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _run(
    moment: int, seconds: float | None, target: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> Outcome:
    reader, writer = _context().Pipe(duplex=False)
    process = _context().Process(target=_child, args=(writer, moment, target, args, kwargs))
    process.start()
    writer.close()
    try:
        if not reader.poll(PATIENCE_S):  # its first word: it is up and about to call the target
            raise TimeoutError("the process did not start")
        reader.recv()
        # Its end is waited for as well: workers that outlive it hold the pipe open, so the pipe alone would not tell.
        if wait([reader, process.sentinel], PATIENCE_S if seconds is None else seconds):
            return _last_word(reader)
        if seconds is None:
            raise TimeoutError(f"{target} took longer than {PATIENCE_S} s")
        return Outcome(killed=True)
    finally:
        process.kill()
        process.join()
        reader.close()


def _last_word(reader: Connection) -> Outcome:
    if not reader.poll():  # it died before it could say anything
        return Outcome(killed=True)
    try:
        moments, error = reader.recv()
    except EOFError:
        return Outcome(killed=True)
    return Outcome(killed=False, moments=moments, error=error)


def _child(
    writer: Connection, moment: int, target: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    counter = count_moments(moment)
    writer.send("up")
    error = ""
    try:
        target(*args, **kwargs)
    except BaseException:  # whatever it is, the test wants to read it
        error = traceback.format_exc()
    writer.send((counter[0], error))


def count_moments(moment: int) -> list[int]:
    """Wrap the publish steps of `os` so that this process dies at its `moment`-th moment; gives the running count."""
    me, counter = os.getpid(), [0]

    def pass_moment() -> None:
        if os.getpid() != me:
            return
        counter[0] += 1
        if counter[0] == moment:
            os.kill(me, signal.SIGKILL)

    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            pass_moment()
            result = step(*args, **kwargs)
            pass_moment()
            return result

        return stepped

    # until Python 3.11, a Path calls what `os` had when pathlib was imported
    accessor = getattr(pathlib, "_normal_accessor", None)
    for name in PUBLISH_STEPS:
        step = wrap(getattr(os, name))
        setattr(os, name, step)
        if hasattr(accessor, name):
            setattr(accessor, name, step)
    return counter
