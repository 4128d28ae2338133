"""Blocks in, extracts out, in the order of the blocks: in this process, or in a few processes that are as small as can be.

The processes are started by hand, not by multiprocessing, which would have each of them import the caller's main program. A thread here
speaks for each process: it sends a block, then waits for the extract, so neither side ever waits for the other to read first. A
process that ends early closes its pipes; its thread sees that at once, and nobody waits for ever.
"""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar, cast

import msgspec

import arrowbank
from arrowbank.corpus.extract import Extract, Extractor, Rules, Span
from arrowbank.corpus.worker import pack_block, receive, send, unpack
from arrowbank.errors import WorkerDied

PATIENCE_S = 10
PIPE_BYTES = 1 << 20
# To glibc: what a block needed is kept for the next one. Giving it back and asking again takes a sixth of a worker's time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 24), "MALLOC_TRIM_THRESHOLD_": str(1 << 24)}
F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", None)  # Linux

Tag = TypeVar("Tag")


class Workers:
    """`count` worker processes, or none: then the same is done by a thread of this process. A context manager."""

    def __init__(self, rules: Rules, count: int) -> None:
        self.count = count
        self._processes: list[_Process] = []
        self._idle: SimpleQueue[Callable[[bytes | Span], Extract]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(max(1, count), "scan")
        if count == 0:
            self._idle.put(Extractor(rules).block)
        for _ in range(count):
            process = _Process(rules)
            self._processes.append(process)
            self._idle.put(process.extract)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def map(self, work: Iterable[tuple[Tag, bytes | Span | Extract]]) -> Iterator[tuple[Tag, Extract]]:
        """The extract of each block beside the block's tag, in order; extracts pass through. Reads few blocks ahead. Raises WorkerDied."""
        window: deque[tuple[Tag, Future[Extract]]] = deque()
        for tag, block in work:
            window.append((tag, self._start(block)))
            if len(window) > (self.count + 1 if self.count else 0):  # one thread more would only wait for this one
                tag, future = window.popleft()
                yield tag, future.result()
        while window:
            tag, future = window.popleft()
            yield tag, future.result()

    def _start(self, block: bytes | Span | Extract) -> Future[Extract]:
        if not isinstance(block, Extract):
            return self._threads.submit(self._extract, block)
        done: Future[Extract] = Future()
        done.set_result(block)
        return done

    def _extract(self, block: bytes | Span) -> Extract:
        extract = self._idle.get()
        try:
            return extract(block)
        finally:
            self._idle.put(extract)


class _Process:
    """A worker process and the pipes to it."""

    def __init__(self, rules: Rules) -> None:
        package = Path(arrowbank.__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, "-m", "arrowbank.corpus.worker"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=package.parent,  # -m puts the current folder first among those to import from
            env={**os.environ, **KEEP_MEMORY, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._blocks = cast(io.RawIOBase, self._process.stdin)
        self._extracts = cast(io.RawIOBase, self._process.stdout)
        for pipe in (self._blocks, self._extracts):
            _widen(pipe)
        self._rules = msgspec.json.encode(rules)
        self._greeted = False

    def extract(self, block: bytes | Span) -> Extract:
        """Have a block's texts taken out."""
        try:
            if not self._greeted:
                send(self._blocks, self._rules)
                self._greeted = True
            send(self._blocks, *pack_block(block))
            return unpack(receive(self._extracts))
        except (BrokenPipeError, EOFError):
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
        self._blocks.close()
        self._extracts.close()


def _widen(pipe: io.RawIOBase) -> None:
    """Let the pipe hold a block, where the system lets us: fewer changes from process to process."""
    if F_SETPIPE_SZ is not None:
        with suppress(OSError):
            fcntl.fcntl(pipe.fileno(), F_SETPIPE_SZ, PIPE_BYTES)
