"""The Arrow shards of a build as they are finished, for threads that make more of them while others are still being made."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import BankWriter, Receipt
from arrowbank.bank.columns import fixed_lists, list_values, values_of
from arrowbank.bank.files import HashedFile
from arrowbank.bank.manifest import shard_name
from arrowbank.bank.mapped import map_shard
from arrowbank.errors import ArrowbankError
from arrowbank.formats.tokens import STRIDES
from arrowbank.in2.arm_config import PAD_TAIL, In2Config


class Abandoned(ArrowbankError):
    """The build has failed elsewhere: that error is the one to read."""


class FollowedWriter(BankWriter):
    """A writer whose finished shards can be waited for."""

    changed: threading.Condition
    abandoned = False

    def __enter__(self) -> FollowedWriter:
        self.changed = threading.Condition()
        super().__enter__()
        return self

    def accept(self, receipt: Receipt) -> Receipt:
        with self.changed:
            accepted = super().accept(receipt)
            self.changed.notify_all()
        return accepted

    def abandon(self) -> None:
        """Let those who wait go: there will be no more shards."""
        with self.changed:
            self.abandoned = True
            self.changed.notify_all()

    def wait_for(self, index: int) -> Path:
        """The file of shard `index`, once it is finished. Raises Abandoned where it never will be."""
        name = shard_name(index)
        with self.changed:
            self.changed.wait_for(lambda: name in self.receipts or self.abandoned)
            if name not in self.receipts:
                raise Abandoned(f"{self.folder}: the build was given up.")
        return self.folder / name

    def wait_for_all(self, shards: int) -> None:
        """Wait until `shards` shards are finished: only then may a file that is none of them have its receipt."""
        for index in range(shards):
            self.wait_for(index)


THREADS = 4
RECORD = '{"needle_start": #, "probe_start": #, "answer_start": #, "distance": #, "csv_first": #}, '
FIELDS = "], "  # what the last line begins with
PLACES = ("needle_start", "probe_start", "answer_start", "distance")


def stem(config: In2Config) -> str:
    """What the names of an arm's mirror begin with."""
    return f"in2{config.arm}_{config.split}"


def raw_names(config: In2Config) -> list[str]:
    return [f"{stem(config)}_{index:05d}.bin" for index in range(len(config.shard_examples))]


def manifest_name(config: In2Config) -> str:
    return f"{stem(config)}_00000.json"


@dataclass
class ArmCounts:
    """What was really placed, over all rows."""

    examples: int = 0
    tokens: int = 0
    triples: int = 0
    answer_tokens: int = 0
    synthetic_tokens: int = 0
    decoys_placed: int = 0
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    survivors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STRIDES, 0))

    def add(self, batch: pa.RecordBatch, config: In2Config) -> None:
        """Count the rows of `batch`."""
        answers, offsets = list_values(batch.column("answer_start"))
        needles, _ = list_values(batch.column("needle_start"))
        decoys, _ = list_values(batch.column("decoy_start"))
        self.examples += batch.num_rows
        self.tokens += batch.num_rows * batch.column("input_ids").type.list_size
        self.triples += len(answers)
        if len(answers) and not 0 <= answers.min() <= answers.max() < config.length:  # else the histogram would take any memory
            raise ValueError(f"answer_start from {answers.min()} to {answers.max()}, expected 0 to {config.length - 1}")
        self.answer_tokens += int(np.count_nonzero(fixed_lists(batch.column("answer_mask"))))
        self.synthetic_tokens += (len(answers) + len(needles) + len(decoys)) * config.span
        self.decoys_placed += int(values_of(batch.column("decoys_placed")).sum())
        seen = np.bincount(answers, minlength=len(self.histogram))
        seen[: len(self.histogram)] += self.histogram
        self.histogram = seen
        examples = np.repeat(values_of(batch.column("example")), np.diff(offsets))
        for stride, whole in survive(config, examples, needles, answers).items():
            self.survivors[stride] += int(np.count_nonzero(whole))

    def answer_start_hist(self) -> dict[str, int]:
        """How many answers start at each place, by place, ascending."""
        return {str(place): int(self.histogram[place]) for place in np.flatnonzero(self.histogram)}


def survive(
    config: In2Config, examples: npt.NDArray[np.int64], needles: npt.NDArray[Any], answers: npt.NDArray[Any]
) -> dict[str, npt.NDArray[np.bool_]]:
    """For each triple, given its example and places, whether a loader that cuts a raw shard into windows keeps it whole.

    "T": windows of T tokens, one after another. "T+1": windows of T + 1, which drift a token a window; the rest of a file is dropped.
    """
    first = examples % config.per_shard * config.length
    begin, end = first + needles, first + answers + config.val_len - 1
    in_file = np.minimum(config.per_shard, config.examples - examples // config.per_shard * config.per_shard) * config.length
    window_ends = {
        name: (begin // step + 1) * step for name, step in zip(STRIDES, (config.length, config.length + 1), strict=True)
    }
    return {name: (end < window_end) & (window_end <= in_file) for name, window_end in window_ends.items()}


def count_rows(bank: FollowedWriter, config: In2Config) -> ArmCounts:
    """The counts of all shards."""
    counts = ArmCounts()
    for index in range(config.arrow_shards):
        counts.add(map_shard(bank.wait_for(index)), config)
    return counts


class RawShards:
    """Writes the raw shards and their manifest from the Arrow shards, while those are being made, in threads.

    Each file is published when all Arrow shards are there; files with a receipt are kept. As a context manager: leaving it by an
    error ends the threads.
    """

    def __init__(self, bank: FollowedWriter, config: In2Config, fillers: Sequence[dict[str, Any]]) -> None:
        self._bank, self._config, self._fillers = bank, config, fillers
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="raw-shards")
        self._lock, self._done = threading.Lock(), 0
        self._report: Callable[[int], None] | None = None
        self._jobs: list[Future[Receipt]] = []
        self.counts: ArmCounts | None = None  # of all rows, where the manifest was written by this run

    def __enter__(self) -> RawShards:
        config = self._config
        files: dict[str, Callable[[HashedFile], object]] = {manifest_name(config): self._write_manifest}
        for name, rows in zip(raw_names(config), config.shard_examples, strict=True):
            files[name] = partial(self._write_raw, rows)
        for name, write in files.items():
            self._jobs.append(self._pool.submit(self._bank.write_file, name, write))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._bank.abandon()
        self._pool.shutdown(cancel_futures=error is not None)

    def finish(self, report: Callable[[int], None]) -> None:
        """Wait for all files. `report` gets the examples that have been written."""
        with self._lock:
            self._report = report
            report(self._done)
        for job in self._jobs:
            job.result()

    def _advance(self, examples: int) -> None:
        with self._lock:
            self._done += examples
            if self._report:
                self._report(examples)

    def _write_raw(self, examples: range, file: HashedFile) -> None:
        rows = self._config.rows_a_shard
        for number in range(examples.start // rows, (examples.stop - 1) // rows + 1):
            ids = fixed_lists(map_shard(self._bank.wait_for(number)).column("input_ids"))
            part = ids[max(0, examples.start - number * rows) : examples.stop - number * rows]
            file.write(part)
            self._advance(len(part))
        self._bank.wait_for_all(self._config.arrow_shards)

    def _write_manifest(self, file: HashedFile) -> None:
        """The records first, an example a line; what they add up to is known, and stands, behind them."""
        counts = ArmCounts()
        for number in range(self._config.arrow_shards):
            batch = map_shard(self._bank.wait_for(number))
            counts.add(batch, self._config)
            file.write(b",\n" if number else b'{"records": [\n')
            file.write(record_lines(batch, self._config).reshape(-1)[:-2])  # its last comma comes with a next shard
        self._bank.wait_for_all(self._config.arrow_shards)
        said = {
            **fields(self._config, counts),
            "triples": counts.triples,
            "survivors": counts.survivors,
            "fillers": list(self._fillers),
            "shards": shard_entries(self._config),
        }
        file.write(f"\n{FIELDS}{json.dumps(said)[1:]}\n".encode())
        self.counts = counts


def shard_entries(config: In2Config) -> list[dict[str, Any]]:
    """Name and tokens of each raw shard."""
    return [
        {"name": name, "tokens": len(examples) * config.length}
        for name, examples in zip(raw_names(config), config.shard_examples, strict=True)
    ]


def fields(config: In2Config, counts: ArmCounts) -> dict[str, Any]:
    """What an arm's manifest says of its options, by trainers' names, and of what was placed."""
    return {
        "arm": config.arm,
        "T": config.length,
        "examples": counts.examples,
        "split": config.split,
        "K": config.triples,
        "key_len": config.key_len,
        "val_len": config.val_len,
        "span": config.span,
        "alphabet": config.alphabet,
        "decoys": config.decoy_count,
        "d_min": config.min_distance,
        "seed": config.seed,
        "vocab": config.vocab,
        "pad_tail": PAD_TAIL,
        "total_tokens": counts.tokens,
        "dtype": config.dtype,
        "answer_tokens": counts.answer_tokens,
        "answer_frac": counts.answer_tokens / counts.tokens,
        "synthetic_tokens": counts.synthetic_tokens,
        "synthetic_frac": counts.synthetic_tokens / counts.tokens,
        "decoys_placed": counts.decoys_placed,
        "answer_start_hist": counts.answer_start_hist(),
    }


def record_lines(batch: pa.RecordBatch, config: In2Config) -> npt.NDArray[np.uint8]:
    """Each row's triples as JSON, a comma and a line end, [rows, bytes]. Every row must have equally many triples.

    All numbers are as wide, right-aligned: so digits are written a place at a time, in all rows at once.
    """
    starts = [list_values(batch.column(name))[0] for name in PLACES]
    starts.append(starts[2] - 1)  # csv_first: the row of a loss table before the answer's first
    rows, triples = batch.num_rows, len(starts[0]) // batch.num_rows
    record = RECORD.replace("#", "#" * len(str(config.length)))
    line = f"[{(record * triples).removesuffix(', ')}],\n".encode()
    lines = np.tile(np.frombuffer(line, np.uint8), (rows, 1))
    records = lines[:, 1 : 1 + triples * len(record)].reshape(rows, triples, len(record))  # a view
    for number, values in zip(re.finditer("#+", record), starts, strict=True):
        left = values.reshape(rows, triples)
        for place in reversed(range(*number.span())):
            tens = left // 10
            digits = (left - 10 * tens + ord("0")).astype(np.uint8)
            records[..., place] = digits if place == number.end() - 1 else np.where(left, digits, np.uint8(ord(" ")))
            left = tens
    return lines
