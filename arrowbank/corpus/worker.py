"""A worker process of the scan: blocks of JSON lines come in on standard input, their texts go out on standard output.

A message is the number of its parts, their lengths, and the parts; numbers are eight little-endian bytes. The first message
has the rules, the others a block each. The worker imports nothing heavier than msgspec. It ends when its input does, which is
also what the death of its parent looks like.
"""

from __future__ import annotations

import gc
import io
import signal
from contextlib import suppress

import msgspec

from arrowbank.corpus.badlines import BadLine
from arrowbank.corpus.extract import Buffer, Counts, Extract, Extractor, Rules, Span

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


def pack_block(block: Buffer | Span) -> tuple[Buffer, ...]:
    """A block as the parts of a message: its bytes, or its place and nothing."""
    return (msgspec.json.encode(block), b"") if isinstance(block, Span) else (block,)


def unpack_block(parts: list[bytearray]) -> Buffer | Span:
    """The inverse of `pack_block`."""
    return msgspec.json.decode(parts[0], type=Span) if len(parts) > 1 else parts[0]


def pack(extract: Extract) -> tuple[Buffer, ...]:
    """An extract as the parts of a message."""
    error = extract.error
    head = _Head(
        extract.lines, extract.counts, (error.line, error.what, error.column, error.remedy, error.skippable) if error else None
    )
    return msgspec.json.encode(head), extract.data, extract.lengths, extract.digests, extract.kinds


def unpack(parts: list[bytearray]) -> Extract:
    """The inverse of `pack`."""
    head = msgspec.json.decode(parts[0], type=_Head)
    return Extract(
        data=parts[1],
        lengths=parts[2],
        digests=parts[3],
        kinds=parts[4],
        counts=head.counts,
        lines=head.lines,
        error=BadLine(*head.error) if head.error else None,
    )


def main() -> None:
    """Answer blocks until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    gc.disable()  # nothing here makes cycles
    with suppress(EOFError, BrokenPipeError), open(0, "rb", 0) as blocks, open(1, "wb", 0) as extracts:
        extractor = Extractor(msgspec.json.decode(receive(blocks)[0], type=Rules))
        while True:
            block = unpack_block(receive(blocks))
            send(extracts, *pack(extractor.block(block)))


if __name__ == "__main__":
    main()
