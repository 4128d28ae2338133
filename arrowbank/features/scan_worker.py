"""A worker process of the scan: blocks of JSON lines come in on standard input, what is known of their texts goes out on standard output.

The texts themselves are asked for afterwards, block by block: about half of them are old by then, and stay where they are.

A message is the number of its parts, their lengths, and the parts; numbers are eight little-endian bytes. The first message
has the rules, the others a request each. The worker imports nothing heavier than msgspec. It ends when its input does, which is
also what the death of its parent looks like."""

from __future__ import annotations

import gc
import io
import signal
from collections import deque
from contextlib import suppress

import msgspec

from arrowbank.inputs.bad_lines import BadLine
from arrowbank.inputs.extract import Buffer, Counts, Extract, Extractor, Rules, picked
from arrowbank.inputs.lines import Span

NUMBER_BYTES = 8


class _Head(msgspec.Struct):
    """What of an extract is not one of its buffers."""

    lines: int
    counts: Counts
    error: tuple[int, str, int, str, bool] | None


def send(pipe: io.RawIOBase, *parts: Buffer) -> None:
    """Write a message. BrokenPipeError: the other side is gone."""
    numbers = b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in (len(parts), *map(len, parts)))
    for part in (numbers, *parts):
        view = memoryview(part)
        while len(view):
            view = view[pipe.write(view) :]


def receive(pipe: io.RawIOBase) -> list[bytearray]:
    """Read a message. EOFError: the other side is gone."""
    count = int.from_bytes(_read(pipe, NUMBER_BYTES), "little")
    lengths = memoryview(_read(pipe, NUMBER_BYTES * count))
    return [
        _read(pipe, int.from_bytes(lengths[at : at + NUMBER_BYTES], "little")) for at in range(0, len(lengths), NUMBER_BYTES)
    ]


def _read(pipe: io.RawIOBase, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while len(view):
        got = pipe.readinto(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


# The requests. Each is answered before the next one is read.


def ask_block(block: Buffer | Span) -> tuple[Buffer, ...]:
    """To extract a block, which is sent as it is or as its place in a file."""
    return (b"span", msgspec.json.encode(block)) if isinstance(block, Span) else (b"block", block)


def ask_texts(fresh: bytes) -> tuple[Buffer, ...]:
    """For the texts, as `picked` by `fresh`, of the oldest block that has not been asked for."""
    return b"texts", fresh


def answer(request: list[bytearray], extractor: Extractor, kept: deque[list[bytes]]) -> tuple[Buffer, ...]:
    """The parts of the answer. `kept` are the texts of blocks that have not been asked for."""
    name, body = request
    if name == b"texts":
        return (picked(kept.popleft(), body),)
    extract = extractor.block(msgspec.json.decode(body, type=Span) if name == b"span" else body)
    kept.append(extract.texts)
    return pack(extract)


def pack(extract: Extract) -> tuple[Buffer, ...]:
    """An extract without its texts as the parts of a message."""
    error = extract.error
    head = _Head(
        extract.lines, extract.counts, (error.line, error.what, error.column, error.remedy, error.skippable) if error else None
    )
    return msgspec.json.encode(head), extract.lengths, extract.digests, extract.kinds


def unpack(parts: list[bytearray]) -> Extract:
    """The inverse of `pack`."""
    head = msgspec.json.decode(parts[0], type=_Head)
    return Extract(
        lengths=parts[1],
        digests=parts[2],
        kinds=parts[3],
        counts=head.counts,
        lines=head.lines,
        error=BadLine(*head.error) if head.error else None,
    )


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    gc.disable()  # nothing here makes cycles
    with suppress(EOFError, BrokenPipeError), open(0, "rb", 0) as requests, open(1, "wb", 0) as answers:
        extractor = Extractor(msgspec.json.decode(receive(requests)[0], type=Rules))
        kept: deque[list[bytes]] = deque()
        while True:
            send(answers, *answer(receive(requests), extractor, kept))


if __name__ == "__main__":
    main()
