"""Forward passes of one module over batches of token ids, all rows of a batch of one length: a stream in, a stream out.

On a GPU a pass is launched, not waited for: while it runs, the next batches are copied and launched, and results come back
through pinned memory, so the GPU does not wait for Python.

On a CPU a batch is cut into passes of about PASS_TOKENS tokens (what stays in the caches), and each pass runs on one core. That
is as fast as all cores on one pass (no barriers, no padding between them), and it makes the bits of a result depend on the
batch's shape alone: with several cores on one matrix product they would depend on how many. Each core's thread has its own copy
of the modules (not of the weights), since modules may keep state (rotary caches, say) that two passes must not share.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import nn

from arrowbank.errors import InputError
from arrowbank.models.describe import ModelInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int32]

# Tokens of one CPU pass. It decides the shape of the matrix products, hence last bits: FORWARD_VERSION changes with it.
PASS_TOKENS = 1024

_LARGE_BUFFER = 1 << 20

# Batches launched on a GPU beyond the one that is waited for.
GPU_AHEAD = 2


def passes_on(device: torch.device, module: nn.Module, info: ModelInfo) -> Passes:
    """The passes of `module`, which stands on `device`."""
    return DevicePasses(module, info, device) if device.type == "cuda" else CpuPasses(module, info)


Outputs = tuple[torch.Tensor, ...]


class Passes(ABC):
    """`module`, a map from (N, T) int64 token ids to a tensor of N rows, or to a tuple of such tensors, over many batches."""

    def __init__(self, module: nn.Module, info: ModelInfo) -> None:
        self.module = module
        self.info = info

    @abstractmethod
    def stream_all(self, batches: Iterable[Ids]) -> Iterator[Outputs]:
        """All tensors that the module gives for each (N, T) batch, on the CPU, in order; the same to the bit for a batch whatever
        comes before and after it. Later batches are started before a result is waited for.

        Raises InputError for an id outside the vocabulary, or a row longer than the model's positions.
        """

    def stream(self, batches: Iterable[Ids]) -> Iterator[torch.Tensor]:
        """`stream_all` of a module that gives one tensor."""
        for (only,) in self.stream_all(batches):
            yield only

    def _check(self, input_ids_NT: Ids) -> None:
        if input_ids_NT.ndim != 2 or not input_ids_NT.size or not np.issubdtype(input_ids_NT.dtype, np.integer):
            raise InputError(f"token ids are {input_ids_NT.dtype} of shape {input_ids_NT.shape}; expected (N, T) integers")
        length, limit = input_ids_NT.shape[1], self.info.max_positions
        if limit is not None and length > limit:
            raise InputError(
                f"a text of {length} tokens, but model {self.info.model!r} has {limit} positions; tokenize with --max-tokens "
                f"{limit} or less"
            )
        for token in (int(input_ids_NT.min()), int(input_ids_NT.max())):
            if not 0 <= token < self.info.vocab_size:
                raise InputError(
                    f"token id {token}, but model {self.info.model!r} has a vocabulary of {self.info.vocab_size} (0 to "
                    f"{self.info.vocab_size - 1}); the tokens are another model's: tokenize with this model's tokenizer"
                )


class CpuPasses(Passes):
    """Passes on the cores of a CPU, one thread each; as many threads as torch.get_num_threads() says when it is made."""

    def __init__(self, module: nn.Module, info: ModelInfo) -> None:
        super().__init__(module, info)
        self._threads = torch.get_num_threads()
        self._mine = threading.local()
        self._pool = ThreadPoolExecutor(self._threads, "pass", initializer=torch.set_num_threads, initargs=(1,))

    def stream_all(self, batches: Iterable[Ids]) -> Iterator[Outputs]:
        counts: deque[int] = deque()  # how many passes make each batch that is on its way

        def passes() -> Iterator[Ids]:
            for batch in batches:
                parts = self._split(batch)
                counts.append(len(parts))
                yield from parts

        # passes ahead, not batches: results wait, and some are large
        results = in_flight(passes(), self._start, Future.result, ahead=self._threads + 1, cancel=Future.cancel)
        with _one_thread_an_operation(), closing(results):
            for first in results:
                parts = [first, *islice(results, counts.popleft() - 1)]
                yield tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))

    def _split(self, input_ids_NT: Ids) -> list[Ids]:
        self._check(input_ids_NT)
        rows, length = input_ids_NT.shape
        return np.array_split(input_ids_NT, -(-rows // max(1, PASS_TOKENS // length)))

    def _start(self, input_ids_NT: Ids) -> Future[Outputs]:
        return self._pool.submit(self._pass, input_ids_NT)

    def _pass(self, input_ids_NT: Ids) -> Outputs:
        module: nn.Module | None = getattr(self._mine, "module", None)
        if module is None:
            module = self._mine.module = _copy_modules(self.module)
        with torch.inference_mode():
            return _as_tuple(module(torch.from_numpy(input_ids_NT.astype(np.int64))))


def _as_tuple(given: torch.Tensor | Outputs) -> Outputs:
    return given if isinstance(given, tuple) else (given,)


def _copy_modules(module: nn.Module) -> nn.Module:
    """The module tree copied, with small buffers (rotary frequencies, say); what is large, above all the weights, is shared."""
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.nbytes > _LARGE_BUFFER)]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


@contextmanager
def _one_thread_an_operation() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Launched:
    """A batch on its way: the host buffers must outlive the copies, which `done` marks the end of."""

    ids: torch.Tensor
    results: Outputs
    done: torch.cuda.Event | None


class DevicePasses(Passes):
    """Batches on one GPU, launched ahead. (Any torch device works; only a CUDA device has anything to overlap.)"""

    def __init__(self, module: nn.Module, info: ModelInfo, device: torch.device) -> None:
        super().__init__(module, info)
        self._device = device
        self._pinned = device.type == "cuda"

    def stream_all(self, batches: Iterable[Ids]) -> Iterator[Outputs]:
        yield from in_flight(batches, self._launch, self._collect, ahead=GPU_AHEAD)

    def _launch(self, input_ids_NT: Ids) -> _Launched:
        self._check(input_ids_NT)
        ids = torch.empty(input_ids_NT.shape, dtype=torch.int64, pin_memory=self._pinned)
        ids.numpy()[...] = input_ids_NT
        try:
            with torch.inference_mode():
                there = _as_tuple(self.module(ids.to(self._device, non_blocking=True)))
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{self._device} has no memory left for a batch of {' x '.join(map(str, input_ids_NT.shape))} tokens: {error}\n"
                "Lower --token-budget (and --max-batch), raise --gpu-memory-gb, or use --load-in-4bit."
            ) from error
        results = tuple(torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pinned) for part in there)
        for result, part in zip(results, there, strict=True):
            result.copy_(part, non_blocking=True)
        if not self._pinned:
            return _Launched(ids, results, None)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        return _Launched(ids, results, done)

    def _collect(self, launched: _Launched) -> Outputs:
        if launched.done is not None:
            launched.done.synchronize()
        return launched.results


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
