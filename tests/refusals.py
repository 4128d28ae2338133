"""Refusals of a real operating system: commands whose calls on chosen files fail with a chosen errno, in them and in their workers.

A small C library (`refusals.c`), compiled when it is first needed, is loaded before the system's own. The commands run in forks of a
process that has it and has imported the heavy packages: a run costs a tenth of a second, not seconds.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.kill import PRELOAD

CALLS = {
    "open": 1,
    "write": 2,
    "read": 4,
    "sync": 8,
    "rename": 16,
    "link": 32,
    "unlink": 64,
    "mkdir": 128,
    "flock": 256,
    "create": 512,
}
ORDERS = struct.Struct("@iilii4096s")  # struct orders of refusals.c
STATE = "ARROWBANK_REFUSALS"
ROOT = Path(__file__).parents[1]
PATIENCE_S = 120


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The `nth` of `calls` on files under `under` fails with `error` ("" : it does nothing and says that it is done), and all
    later ones unless `once`."""

    under: Path
    calls: tuple[str, ...]
    error: str
    nth: int = 1
    once: bool = False

    def packed(self) -> bytes:
        calls = sum(CALLS[name] for name in self.calls)
        number = getattr(errno, self.error) if self.error else 0
        return ORDERS.pack(calls, number, self.nth, self.once, 0, os.fsencode(self.under.resolve()))


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a command ended. `calls` counts those that the refusal looked at, `hits` those that were refused."""

    code: int
    out: str
    err: str
    calls: int
    hits: int


class Machine:
    """A process with the library in it, which runs commands in forks of its own."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="refusals-"))
        library = _compiled(self._folder)
        orders = self._folder / "orders"
        orders.write_bytes(bytes(ORDERS.size))
        with orders.open("r+b") as file:
            self._orders = mmap.mmap(file.fileno(), 0)
        self.environment = {**os.environ, "LD_PRELOAD": str(library), STATE: str(orders)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.refusals"],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *argv: object, refusal: Refusal | None = None, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> Ran:
        """`arrowbank ARGV` while `refusal` holds."""
        outputs = [self._folder / "out", self._folder / "err"]
        self.order(refusal)
        order = {
            "argv": [str(word) for word in argv],
            "cwd": str(cwd or ROOT),
            "env": env or {},
            "outputs": [str(o) for o in outputs],
        }
        requests, answers = _pipes(self._process)
        requests.write(json.dumps(order) + "\n")
        requests.flush()
        answer = answers.readline()
        _, _, left, _, hits, _ = ORDERS.unpack(self._orders[: ORDERS.size])
        calls = refusal.nth - left if refusal else 0
        self.order(None)
        if not answer:
            raise RuntimeError("the process with the library in it is gone")
        out, err = (path.read_text("utf-8", "replace") for path in outputs)
        return Ran(code=json.loads(answer), out=out, err=err, calls=calls, hits=hits)

    def order(self, refusal: Refusal | None) -> None:
        """Have `refusal` hold from now on, for every process with the library in it."""
        self._orders[: ORDERS.size] = refusal.packed() if refusal else bytes(ORDERS.size)

    def close(self) -> None:
        requests, answers = _pipes(self._process)
        requests.close()
        self._process.wait(PATIENCE_S)
        answers.close()
        self._orders.close()
        shutil.rmtree(self._folder)


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("started without pipes")
    return process.stdin, process.stdout


def _why_not() -> str:
    if sys.platform != "linux":
        return "LD_PRELOAD is Linux's"
    if shutil.which("cc") is None:
        return "no C compiler here"
    return ""


def _compiled(folder: Path) -> Path:
    library = folder / "refusals.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(Path(__file__).with_suffix(".c")), "-ldl"], check=True
    )
    return library


def machine_or_skip() -> Machine:
    """A machine that refuses; skips the test where there can be none."""
    if why := _why_not():
        pytest.skip(why)
    return Machine()


def _serve(requests: IO[str], answers: IO[str]) -> None:
    import importlib

    for name in PRELOAD:
        importlib.import_module(name)
    for line in requests:
        order = json.loads(line)
        child = os.fork()
        if not child:
            _obey(order)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _obey(order: dict[str, Any]) -> None:
    from arrowbank.cli import main

    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in enumerate(order["outputs"], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    code = 1
    try:
        code = main(order["argv"])
    except BaseException:  # as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    requests = os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(requests, answers)
