"""The worker processes of a scan: blocks go to them in turns, and what is in each comes back in order."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar, cast

import msgspec

import arrowbank
from arrowbank.errors import WorkerDied
from arrowbank.features.scan_worker import ask_block, ask_texts, receive, send, unpack
from arrowbank.inputs.extract import Buffer, Extract, Extractor, Rules, picked
from arrowbank.inputs.lines import Span

PATIENCE_S = 10
PIPE_BYTES = 1 << 20
# To glibc: what a block needed is kept for the next one. Giving it back and asking again takes a sixth of a worker's time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 24), "MALLOC_TRIM_THRESHOLD_": str(1 << 24)}
F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", None)  # Linux

Tag = TypeVar("Tag")
Value = TypeVar("Value")
Texts = Callable[[bytes], Future[bytes]]


class Extracted(NamedTuple):
    """An extract, and how to get at its texts: a function from n bytes, not 0 for each text that is wanted, to those texts on end."""

    extract: Extract
    texts: Texts


class ScanWorkers:
    """`count` worker processes, or none: then this process does it as it is asked. A context manager."""

    def __init__(self, rules: Rules, count: int) -> None:
        self._extractor = Extractor(rules)
        self._processes = [_ScanProcess(rules) for _ in range(count)]

    def __enter__(self) -> ScanWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.close()

    @property
    def ahead(self) -> int:
        """How many blocks are in work while another is looked at."""
        return len(self._processes) + 1 if self._processes else 0

    def map(self, work: Iterable[tuple[Tag, bytes | Span | Extract]]) -> Iterator[tuple[Tag, Extracted]]:
        """What is in each block beside the block's tag, in order; an extract that is one already passes through.

        The texts have to be asked for in the same order, each block's once. Raises WorkerDied.
        """
        turns = itertools.cycle(self._processes)
        window: deque[tuple[Tag, Future[Extract], Texts]] = deque()
        for tag, block in work:
            if isinstance(block, Extract) or not self._processes:
                extract = block if isinstance(block, Extract) else self._extractor.block(block)
                window.append((tag, _done(extract), partial(_picked, extract.texts)))
            else:
                process = next(turns)
                window.append((tag, process.extract(block), process.texts))
            if len(window) > self.ahead:
                tag, future, texts = window.popleft()
                yield tag, Extracted(future.result(), texts)
        for tag, future, texts in window:
            yield tag, Extracted(future.result(), texts)


def _picked(texts: list[bytes], fresh: bytes) -> Future[bytes]:
    return _done(picked(texts, fresh))


def _done(value: Value) -> Future[Value]:
    future: Future[Value] = Future()
    future.set_result(value)
    return future


class _ScanProcess:
    """A worker process, the pipes to it, and the thread that speaks with it."""

    def __init__(self, rules: Rules) -> None:
        package = Path(arrowbank.__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, "-m", "arrowbank.features.scan_worker"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=package.parent,  # -m puts the current folder first among those to import from
            env={**os.environ, **KEEP_MEMORY, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._requests = cast(io.RawIOBase, self._process.stdin)
        self._answers = cast(io.RawIOBase, self._process.stdout)
        for pipe in (self._requests, self._answers):
            _widen(pipe)
        self._thread = ThreadPoolExecutor(1, "scan")
        self._greeting = self._thread.submit(self._send, msgspec.json.encode(rules))

    def extract(self, block: bytes | Span) -> Future[Extract]:
        """Have a block's texts taken out."""
        return self._thread.submit(lambda: unpack(self._ask(*ask_block(block))))

    def texts(self, fresh: bytes) -> Future[bytes]:
        """The texts, as picked by `fresh`, of the oldest block that has not been asked for."""
        return self._thread.submit(lambda: bytes(self._ask(*ask_texts(fresh))[0]))

    def _ask(self, *request: Buffer) -> list[bytearray]:
        self._greeting.result()
        self._send(*request)
        try:
            return receive(self._answers)
        except EOFError:
            raise WorkerDied(self._obituary()) from None

    def _send(self, *parts: Buffer) -> None:
        try:
            send(self._requests, *parts)
        except BrokenPipeError:
            raise WorkerDied(self._obituary()) from None

    def _obituary(self) -> str:
        code = self._process.wait(PATIENCE_S)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return (
            f"A worker process of the scan (process {self._process.pid}) {how}. The system may have run out of "
            "memory. Run the same command again: the scan starts over and gives the same files."
        )

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the end and let go of the pipes."""
        self._process.wait()
        self._thread.shutdown(cancel_futures=True)
        self._requests.close()
        self._answers.close()


def _widen(pipe: io.RawIOBase) -> None:
    """Let the pipe hold a block, where the system lets us: fewer changes from process to process."""
    if F_SETPIPE_SZ is not None:
        with suppress(OSError):
            fcntl.fcntl(pipe.fileno(), F_SETPIPE_SZ, PIPE_BYTES)
