"""The mirror of an arm, for loaders that know only raw shards: `in2c_train_00000.bin` … and a manifest with every triple's record.

Both are made from the finished Arrow shards, a shard at a time; what the manifest counts is counted in the rows, never derived from
the options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import BankWriter
from arrowbank.bank.columns import fixed_lists, list_values, values_of
from arrowbank.bank.files import HashedFile
from arrowbank.bank.manifest import shard_name
from arrowbank.formats.windows import STRIDES, whole_in_a_window
from arrowbank.in2.config import PAD_TAIL, In2Config

THREADS = 4
RECORD = '{"needle_start": %d, "probe_start": %d, "answer_start": %d, "distance": %d, "csv_first": %d}'
PLACES = ("needle_start", "probe_start", "answer_start", "distance")


def stem(config: In2Config) -> str:
    """What the names of an arm's mirror begin with."""
    return f"in2{config.arm}_{config.split}"


def raw_names(config: In2Config) -> list[str]:
    return [f"{stem(config)}_{index:05d}.bin" for index in range(config.shards)]


def manifest_name(config: In2Config) -> str:
    return f"{stem(config)}_00000.json"


@dataclass
class Counts:
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
    return {
        name: whole_in_a_window(begin, end, in_file, read=step, step=step)
        for name, step in zip(STRIDES, (config.length, config.length + 1), strict=True)
    }


def arrow_shards(bank: BankWriter) -> list[Path]:
    """The finished shards of a bank that is being built, in order."""
    return [bank.folder / shard_name(index) for index in sorted(bank.done_shards)]


def read_shard(path: Path) -> pa.RecordBatch:
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_next_batch()


def count_rows(bank: BankWriter, config: In2Config) -> Counts:
    """The counts of all finished shards."""
    counts = Counts()
    for path in arrow_shards(bank):
        counts.add(read_shard(path), config)
    return counts


def write_raw_shards(
    bank: BankWriter,
    config: In2Config,
    counts: Counts,
    fillers: Sequence[dict[str, Any]],
    report: Callable[[int], None],
) -> None:
    """Write the raw shards and their manifest from the finished shards of `bank`; files with a receipt are kept."""
    paths, rows_a_shard = arrow_shards(bank), config.rows_a_shard

    def raw(examples: range, file: HashedFile) -> None:
        for number in range(examples.start // rows_a_shard, (examples.stop - 1) // rows_a_shard + 1):
            ids = fixed_lists(read_shard(paths[number]).column("input_ids"))
            low = number * rows_a_shard
            part = ids[max(0, examples.start - low) : examples.stop - low]
            file.write(part)
            report(len(part))

    with ThreadPoolExecutor(THREADS) as pool:  # hashing and writing let other threads run
        files = list(zip(raw_names(config), config.shard_examples, strict=True))
        written = [pool.submit(bank.write_file, name, partial(raw, examples)) for name, examples in files]
        records = pool.submit(bank.write_file, manifest_name(config), partial(_manifest, config, counts, fillers, paths))
        shards = [job.result() for job in written]
        records.result()
    bank.save_progress(raw_shards=[{"name": one.name, "tokens": one.bytes // _width(config)} for one in shards])


def _width(config: In2Config) -> int:
    return np.dtype(config.dtype).itemsize


def fields(config: In2Config, counts: Counts) -> dict[str, Any]:
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


def _manifest(
    config: In2Config, counts: Counts, fillers: Sequence[dict[str, Any]], paths: Sequence[Path], file: HashedFile
) -> None:
    head = {
        **fields(config, counts),
        "triples": counts.triples,
        "survivors": counts.survivors,
        "fillers": list(fillers),
        "shards": [
            {"name": name, "tokens": len(examples) * config.length}
            for name, examples in zip(raw_names(config), config.shard_examples, strict=True)
        ],
    }
    file.write(json.dumps(head)[:-1].encode() + b', "records": [\n')
    first = True
    for path in paths:
        lines = ",\n".join(record_lines(read_shard(path)))
        file.write((lines if first else f",\n{lines}").encode())
        first = False
    file.write(b"\n]}\n")


def record_lines(batch: pa.RecordBatch) -> Iterator[str]:
    """Each row's triples as JSON."""
    columns = [list_values(batch.column(name)) for name in PLACES]
    offsets = columns[0][1].tolist()
    values = np.stack([column for column, _ in columns], axis=1)
    table = np.concatenate([values, values[:, 2:3] - 1], axis=1)  # csv_first: the row of a loss table before the answer's first
    templates: dict[int, str] = {}
    for start, stop in pairwise(offsets):
        count = stop - start
        template = templates.setdefault(count, f"[{', '.join([RECORD] * count)}]")
        yield template % tuple(table[start:stop].reshape(-1).tolist())
