"""Examples as rows: what a worker makes of a shard, and the columns of the bank.

input_ids       T ids                           answer_mask    uint8, T: 1 at the tokens of answers
needle_start, probe_start, answer_start, distance   lists of K, in the order of the sites (empty in arm a)
decoy_start     a list                          decoys_placed  how many there are
filler          number of the filler file       filler_start   where in it the example's T tokens begin
arm, example"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

from arrowbank.bank import BankWriter
from arrowbank.bank.columns import fixed_list_column, list_column, number_column, string_column
from arrowbank.bank.files import publishing
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.places import Named
from arrowbank.bank.refusals import explains
from arrowbank.bank.remote.addresses import is_address
from arrowbank.engine import Report
from arrowbank.engine.plan import Shard, shard_ranges
from arrowbank.engine.stage import Estimate, RunOptions, Stage
from arrowbank.errors import InputError
from arrowbank.in2.arm_config import READING, FillerTexts, In2Config
from arrowbank.in2.fillers import Filler, TextFiller, check_names, open_filler, open_fillers, unread_beside
from arrowbank.in2.placement import KeyCounter, Placement, Planted
from arrowbank.in2.raw_shards import ArmCounts, FollowedWriter, RawShards, count_rows, fields, shard_entries
from arrowbank.models import local_model
from arrowbank.progress import SILENT, Progress, tell_unread
from arrowbank.settings import checked, given

REPORT_EVERY = 64
RowStarts = npt.NDArray[np.int64]


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
    flat: RowStarts


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
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Build one arm from `fillers` (see `arrowbank.in2.fillers`) into the bank `out`; its manifest, `complete` or not.

    The same options give the same bytes, on one process or several (`options.workers` None: as many as are worth starting). What is
    finished from an earlier run is kept. `options.shards` are those of the bank, not the raw ones.

    Raises InputError (options, fillers, no place for something), PlanMismatch, BankLocked, CorruptBank, DiskFull, WorkerDied.
    """
    return In2Stage(config, fillers, out).run(out, options, progress)


@checked
def estimate_in2(
    config: In2Config,
    fillers: Sequence[str | Path],
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Estimate:
    """What `build_in2` with the same arguments makes. Nothing is written. Raises what `build_in2` raises before it writes."""
    return In2Stage(config, fillers, out).estimate(out, options, progress=progress)


class Filled(Protocol):
    """What options say of fillers."""

    @property
    def length(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def texts(self) -> FillerTexts: ...


class FilledStage(Stage):
    """A stage that plants something in fillers, which are opened once."""

    splits_threads = False

    def __init__(self, config: Filled, fillers: Sequence[str | Path], out: str | Path) -> None:
        self.config, self.fillers, self.out = config, fillers, out

    @property
    def inputs(self) -> list[Named]:
        return [*(("--filler", filler) for filler in self.fillers), ("--tokenizer", local_model(self.config.texts.tokenizer))]

    @cached_property
    def opened(self) -> tuple[list[Filler], list[dict[str, Any]]]:
        """The fillers, and what the manifest says of each."""
        config = self.config
        return open_fillers(self.fillers, length=config.length, vocab=config.vocab, texts=config.texts)

    def check(self) -> None:
        """InputError for fillers that are no good."""
        _ = self.opened

    def prepare(self, bank: BankWriter, options: RunOptions, progress: Progress) -> None:
        tell_unread(progress, "--filler", files=unread_beside(self.fillers))
        for entry in self.opened[1]:
            if count := entry.get("bad_lines"):
                progress.message(f"{entry['path']}: skipped {count:,} of its lines, which are no records")


class In2Stage(FilledStage):
    """An arm, its fillers open."""

    config: In2Config
    kind, phase, unit, what = KIND, "build", "examples", "the arm"
    remedy = "Give fewer --examples, --no-mirror, or"
    writer = FollowedWriter
    shards_hint = "The number of raw files is --raw-shards."

    def __init__(self, config: In2Config, fillers: Sequence[str | Path], out: str | Path) -> None:
        check_names(fillers, config.split)
        super().__init__(config, fillers, out)
        self._mirrored = not config.mirror
        self._counts: ArmCounts | None = None

    @cached_property
    def shards(self) -> list[Shard]:
        return arm_shards(self.config)

    def shard_bytes(self, shard: Shard) -> int:
        width = np.dtype(self.config.dtype).itemsize
        return shard.rows * (self.config.length * (width + 1) + 16 * self.config.triples)

    def tokens(self, shard: Shard) -> int:
        return shard.rows * self.config.length

    @property
    def beside(self) -> dict[str, int]:
        if not self.config.mirror:
            return {}
        each = self.config.length * np.dtype(self.config.dtype).itemsize + 110 * self.config.triples
        return {"mirror": self.config.examples * each}

    @property
    def recipe(self) -> dict[str, Any]:
        return recipe_of(self.config, self.opened[1])

    @property
    def manifest(self) -> dict[str, Any]:
        return {
            "arm": self.config.arm,
            "examples": self.config.examples,
            "text_count": self.config.examples,
            "tokenizer": self.config.tokenizer,
            **reading_fields(self.config.texts),
            "fillers": filler_paths(self.opened[1], self.out),
        }

    def default_workers(self, todo: Sequence[Shard]) -> int:
        return max(1, min(len(os.sched_getaffinity(0)), len(todo) // WORTH_A_PROCESS))

    def prepare(self, bank: BankWriter, options: RunOptions, progress: Progress) -> None:
        super().prepare(bank, options, progress)
        config = self.config
        if (files := len(config.shard_examples)) < config.raw_files and config.mirror:
            progress.message(
                f"--raw-shards {config.raw_files}: only {files} files are written, which {config.examples:,} examples fill with "
                f"{config.per_shard:,} each"
            )

        if lost := config.examples_lost:
            progress.message(
                f"--global-batch {config.global_batch}: the last raw shard holds {len(config.shard_examples[-1])} examples, and a loader "
                f"drops {lost} of them ({lost * config.triples:,} triples)"
            )

    def workers(self, bank: BankWriter) -> ArmJob:
        return ArmJob(self.config, mapped_files(self.fillers, self.opened[0], bank.work_dir))

    @contextmanager
    def around(self, bank: BankWriter, *, last: bool, progress: Progress) -> Iterator[None]:
        """Write the raw shards while the Arrow shards are made."""
        with self._mirroring(bank, progress) if last else nullcontext():
            yield

    @contextmanager
    def _mirroring(self, bank: BankWriter, progress: Progress) -> Iterator[None]:
        if self._mirrored:
            yield
            return
        named = [{**entry, "path": Path(entry["path"]).name} for entry in self.opened[1]]
        with RawShards(cast(FollowedWriter, bank), self.config, named) as raw:
            yield
            with progress.phase("mirror", self.config.examples, unit="examples") as phase:
                raw.finish(phase.advance)
        self._mirrored, self._counts = True, raw.counts

    def finish(self, bank: BankWriter, progress: Progress) -> Manifest:
        with self._mirroring(bank, progress):  # where no run made all shards
            pass
        counts = self._counts or count_rows(cast(FollowedWriter, bank), self.config)
        said = {name: value for name, value in fields(self.config, counts).items() if name != "answer_start_hist"}
        said |= {"triples": counts.triples, "survivors": counts.survivors}
        if self.config.mirror:
            said["raw_shards"] = shard_entries(self.config)
        return bank.commit(rows=self.config.examples, manifest=said)


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


def reading_fields(texts: FillerTexts) -> dict[str, Any]:
    """What a manifest says of how fillers of records were read, beside the tokenizer: what is not the default."""
    return {name: value for name, value in given(texts, READING).items() if name != "tokenizer"}


def mapped_files(paths: Sequence[str | Path], opened: Sequence[Filler], folder: Path) -> tuple[str, ...]:
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


def config_of(recipe: dict[str, Any]) -> In2Config:
    """The options that an arm's recipe holds. InputError for an arm of another method."""
    if recipe.get("method") != METHOD:
        raise InputError(f"an arm of method {recipe.get('method')}, this version knows {METHOD}. Build it again.")
    options = {name: value for name, value in recipe.items() if name not in ("method", "fillers", "shards")}
    return In2Config(**options, raw_shards=recipe["shards"] if options.get("mirror") else None)
