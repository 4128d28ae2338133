"""Examples as rows: what a worker makes of a shard, and the columns of the bank.

input_ids       T ids                           answer_mask    uint8, T: 1 at the tokens of answers
needle_start, probe_start, answer_start, distance   lists of K, in the order of the sites (empty in arm a)
decoy_start     a list                          decoys_placed  how many there are
filler          number of the filler file       filler_start   where in it the example's T tokens begin
arm, example"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

from arrowbank import engine
from arrowbank.bank import open_bank
from arrowbank.bank.columns import fixed_list_column, list_column, number_column, string_column
from arrowbank.bank.files import publishing, require_space
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.bank.remote.addresses import is_address
from arrowbank.engine import Report
from arrowbank.engine.plan import Shard, shard_ranges
from arrowbank.errors import InputError
from arrowbank.in2.config import In2Config
from arrowbank.in2.fillers import Filler, TextFiller, check_names, open_filler, open_fillers, unread_beside
from arrowbank.in2.placement import KeyCounter, Placement, Planted
from arrowbank.in2.raw_shards import Counts, FollowedWriter, RawShards, count_rows, fields, shard_entries
from arrowbank.models import local_model
from arrowbank.progress import SILENT, Progress, tell_unread
from arrowbank.settings import Count, checked

REPORT_EVERY = 64
Starts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ArmJob:
    """How a process becomes a worker. Everything here pickles; the fillers are opened by the worker itself."""

    config: In2Config
    fillers: tuple[str, ...]

    def __call__(self, number: int) -> ArmRows:
        return ArmRows(self.config, [open_filler(path) for path in self.fillers])


class ArmRows:
    """Makes shards of one arm."""

    def __init__(self, config: In2Config, fillers: Sequence[Filler]) -> None:
        self.config = config
        self._fillers = fillers
        self._placement = Placement(config)
        self._keys = KeyCounter(config.vocab, config.key_len)

    def __call__(self, shard: Shard, report: Report) -> pa.RecordBatch:
        config = self.config
        ids, mask = np.empty((shard.rows, config.length), config.dtype), np.zeros((shard.rows, config.length), np.uint8)
        starts = np.empty(shard.rows, np.int64)
        planted: list[Planted] = []
        for row, example in enumerate(range(shard.start, shard.stop)):
            filler = self._fillers[example % len(self._fillers)]
            starts[row] = self._placement.filler_start(example, len(filler))
            ids[row] = filler.window(int(starts[row]), config.length)
            planted.append(self._placement.place(example))
            if row % REPORT_EVERY == REPORT_EVERY - 1:
                report(REPORT_EVERY)
        report(shard.rows % REPORT_EVERY)
        columns = self._plant(ids, mask, planted)
        examples = np.arange(shard.start, shard.stop)
        if config.unique_keys:
            self._refuse_repeated_keys(ids, planted, examples)
        columns["filler"] = number_column((examples % len(self._fillers)).astype(np.int32))
        columns["filler_start"] = number_column(starts)
        columns["arm"] = string_column([config.arm] * shard.rows)
        columns["example"] = number_column(examples)
        return pa.record_batch(columns)

    def _plant(
        self, ids: npt.NDArray[np.unsignedinteger], mask: npt.NDArray[np.uint8], planted: Sequence[Planted]
    ) -> dict[str, pa.Array]:
        """Write what is planted over the filler in `ids`, and 1 into `mask` at answers; the columns that say where."""
        config = self.config
        sites, needles, decoys = [
            _joined([getattr(one, name) for one in planted], config.length) for name in ("sites", "needles", "decoys")
        ]
        spans = np.concatenate([one.spans for one in planted])
        decoy_spans = np.concatenate([one.decoy_spans for one in planted])
        places = sliding_window_view(ids.reshape(-1), config.span, writeable=True)
        for starts, tokens in ((sites.flat, spans), (needles.flat, spans), (decoys.flat, decoy_spans)):
            places[starts] = tokens
        sliding_window_view(mask.reshape(-1), config.val_len, writeable=True)[sites.flat + config.key_len] = 1
        return {
            "input_ids": fixed_list_column(ids),
            "answer_mask": fixed_list_column(mask),
            "needle_start": list_column(needles.starts, needles.offsets),
            "probe_start": list_column(sites.starts, sites.offsets),
            "answer_start": list_column(sites.starts + np.int32(config.key_len), sites.offsets),
            "distance": list_column(sites.starts - needles.starts, sites.offsets),
            "decoy_start": list_column(decoys.starts, decoys.offsets),
            "decoys_placed": number_column(np.diff(decoys.offsets)),
        }

    def _refuse_repeated_keys(
        self, ids: npt.NDArray[np.unsignedinteger], planted: Sequence[Planted], examples: npt.NDArray[np.int64]
    ) -> None:
        for row, one in enumerate(planted):
            if not one.sites:
                continue
            keys = np.concatenate([one.spans, one.decoy_spans])[:, : self.config.key_len]
            twice, stray = self._keys.count(ids[row], keys, np.array(one.sites + one.needles + one.decoys))
            if twice or stray:
                raise InputError(
                    f"example {examples[row]}: {twice} keys are there twice, {stray} times one stands in the filler, and "
                    "--unique-keys is given. Give longer keys (--key-len), a larger --alphabet, or another --seed."
                )


@dataclass(frozen=True)
class _Joined:
    """Starts of many rows: within their row, and in all rows laid end to end."""

    starts: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    flat: Starts


def _joined(lists: Sequence[list[int]], length: int) -> _Joined:
    counts = [len(one) for one in lists]
    starts = np.fromiter(chain.from_iterable(lists), np.int32, sum(counts))
    rows = np.repeat(np.arange(len(lists), dtype=np.int64), counts)
    return _Joined(starts, np.cumsum([0, *counts]).astype(np.int32), rows * length + starts)


KIND = "in2"
METHOD = 1  # raise it when the same options would give other bytes
WORTH_A_PROCESS = 16  # Arrow shards: below that, starting a process takes longer than it saves


@explains("out")
@checked
def build_in2(
    config: In2Config,
    fillers: Sequence[str | Path],
    out: str | Path,
    *,
    workers: Count | None = None,
    restart: bool = False,
    progress: Progress = SILENT,
) -> Manifest:
    """Build one arm from `fillers` (see `arrowbank.in2.fillers`) into the bank `out`; its manifest.

    The same options give the same bytes, on one process or several (`workers`; None: as many as pay). What is finished from an
    earlier run is kept.

    Raises InputError (options, fillers, no place for something), PlanMismatch, BankLocked, CorruptBank, DiskFull, WorkerDied.
    """
    check_names(fillers, config.split)
    require_separate(
        [("--out", out)], [*(("--filler", filler) for filler in fillers), ("--tokenizer", local_model(config.tokenizer))]
    )
    opened, entries = open_fillers(fillers, length=config.length, vocab=config.vocab, tokenizer=config.tokenizer)
    tell_unread(progress, "--filler", files=unread_beside(fillers))
    shards = arm_shards(config)
    if (files := len(config.shard_examples)) < config.shards and config.mirror:
        progress.message(
            f"--shards {config.shards}: only {files} files are written, which {config.examples:,} examples fill with "
            f"{config.per_shard:,} each"
        )
    said = {
        "arm": config.arm,
        "examples": config.examples,
        "text_count": config.examples,
        "tokenizer": config.tokenizer,
        "fillers": filler_paths(entries, out),
    }
    with FollowedWriter(out, kind=KIND, recipe=recipe_of(config, entries), restart=restart, manifest=said) as bank:
        if bank.committed:
            progress.message(f"{bank.folder}: already complete, nothing to do")
            return open_bank(bank.folder).manifest.json
        require_space(bank.folder, _bytes_to_write(config, bank.done_rows), "the arm")
        todo = [shard for shard in shards if shard.index not in bank.done_shards]
        if workers is None:
            workers = max(1, min(len(os.sched_getaffinity(0)), len(todo) // WORTH_A_PROCESS))
        named = [{**entry, "path": Path(entry["path"]).name} for entry in entries]
        with RawShards(bank, config, named) if config.mirror else nullcontext() as raw:
            if todo:
                job = ArmJob(config, _mapped_files(fillers, opened, bank.work_dir))
                with progress.phase("build", sum(shard.rows for shard in todo), unit="examples") as phase:
                    engine.run(todo, job, bank, workers=min(workers, len(todo)), report=phase.advance, progress=progress)
            if raw:
                with progress.phase("mirror", config.examples, unit="examples") as phase:
                    raw.finish(phase.advance)
        return _commit(config, bank, (raw and raw.counts) or count_rows(bank, config))


def arm_shards(config: In2Config) -> list[Shard]:
    """The Arrow shards of an arm."""
    return shard_ranges([config.examples], config.rows_a_shard)


def recipe_of(config: In2Config, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything that decides the files; fillers by content, whatever their names are."""
    filler = [{"tokens": entry["tokens"], "sha256": entry["sha256"]} for entry in entries]
    return {"method": METHOD, **config.recipe(), "fillers": filler}


def filler_paths(entries: Sequence[dict[str, Any]], out: str | Path) -> list[dict[str, Any]]:
    """Fillers for a manifest: with their paths as seen from the bank, so that both can move together."""
    return [entry if is_address(entry["path"]) else {**entry, "path": os.path.relpath(entry["path"], out)} for entry in entries]


def _mapped_files(paths: Sequence[str | Path], opened: Sequence[Filler], folder: Path) -> tuple[str, ...]:
    """Fillers as paths that every worker can map: texts that were tokenized are kept in a file while the build is on."""
    named = []
    for number, (path, filler) in enumerate(zip(paths, opened, strict=True)):
        if isinstance(filler, TextFiller):
            folder.mkdir(exist_ok=True)
            path = folder / f"filler-{number}.npy"
            with publishing(path) as file:
                np.lib.format.write_array_header_1_0(file, {"descr": "<u4", "fortran_order": False, "shape": (len(filler),)})
                for block in filler.blocks():
                    file.write(block)
        named.append(str(path))
    return tuple(named)


def _bytes_to_write(config: In2Config, done: int) -> int:
    width = np.dtype(config.dtype).itemsize
    row = config.length * (width + 1) + 16 * config.triples
    mirror = config.length * width + 110 * config.triples if config.mirror else 0
    return (config.examples - done) * row + config.examples * mirror


def _commit(config: In2Config, bank: FollowedWriter, counts: Counts) -> Manifest:
    said = {name: value for name, value in fields(config, counts).items() if name != "answer_start_hist"}
    said |= {"triples": counts.triples, "survivors": counts.survivors}
    if config.mirror:
        said["raw_shards"] = shard_entries(config)
    return bank.commit(rows=config.examples, manifest=said)


def config_of(recipe: dict[str, Any]) -> In2Config:
    """The options that an arm's recipe holds. InputError for an arm of another method."""
    if recipe.get("method") != METHOD:
        raise InputError(f"an arm of method {recipe.get('method')}, this version knows {METHOD}. Build it again.")
    return In2Config(**{name: value for name, value in recipe.items() if name not in ("method", "fillers")})
