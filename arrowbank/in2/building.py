"""The stage `in2 build`: fillers go in, one arm comes out, as a bank and as raw shards with their manifest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from arrowbank import engine
from arrowbank.bank import open_bank
from arrowbank.bank.files import publishing, require_space
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.errors import InputError
from arrowbank.in2.config import In2Config
from arrowbank.in2.fillers import Filler, TextFiller, check_names, open_fillers, unread_beside
from arrowbank.in2.following import FollowedWriter
from arrowbank.in2.rawshards import Counts, RawShards, count_rows, fields, shard_entries
from arrowbank.in2.rows import ArmJob
from arrowbank.models import local_model
from arrowbank.plan import Shard, shard_ranges
from arrowbank.progress import SILENT, Progress, tell_unread
from arrowbank.settings import Count, checked

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
            return open_bank(bank.folder).manifest
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
    return [{**entry, "path": os.path.relpath(entry["path"], out)} for entry in entries]


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
