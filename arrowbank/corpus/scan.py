"""Episodes → the bank of their unique texts, in first-seen order.

Files are cut into blocks of whole lines; workers (corpus/extract.py) turn a block into texts and keys; this process asks, block by block
in order, which keys are new (corpus/keys.py) and gathers the new texts into shards (corpus/shards.py). Only the keys stay in memory. An
unfinished scan starts from the first line again: it is quick, and it writes the same bytes over what is there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from arrowbank.bank import Bank, BankWriter, open_bank
from arrowbank.bank.columns import fixed_bytes
from arrowbank.bank.files import sha256_of
from arrowbank.bank.manifest import Manifest, read_manifest
from arrowbank.corpus.badlines import BadLine
from arrowbank.corpus.extract import SHA1_BYTES, Counts, Extract, Rules
from arrowbank.corpus.fields import parse_path
from arrowbank.corpus.keys import WORDS, KeyTable
from arrowbank.corpus.shards import SHARD_TEXT_BYTES, ShardBuilder
from arrowbank.corpus.sources import Print, Source, SourceFile, find_sources, fingerprint, joint_sha256, line_blocks
from arrowbank.corpus.workers import Workers
from arrowbank.errors import CorruptBank, InputError
from arrowbank.plan import SHARD_ROWS
from arrowbank.progress import SILENT, Progress

METHOD = 1  # raise it when the same recipe would give other rows
COLUMNS = ["text", "sha1", "kind", "source"]

BLOCK_BYTES = 1 << 20
SMALL_BYTES = 1 << 25  # less than this is done before a process is up
MOST_WORKERS = 3  # beyond, the merging of blocks in this process is the slowest part, and memory grows
EXPANSION = 6  # of compressed text, roughly


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """What to scan. `sources`: (split name, path) pairs; `fields`: (kind, field path) pairs, taken in this order in every episode.

    `strict`: a number, bool, list or object in place of a text is an error. `on_bad_line`: what to do with lines that are no JSON
    object in UTF-8. `onto`: a committed texts bank whose rows stay ahead of the new ones.
    """

    sources: tuple[tuple[str, str], ...]
    fields: tuple[tuple[str, str], ...] = (("query", "query"), ("candidate", "candidates[].text"))
    strict: bool = False
    on_bad_line: Literal["error", "skip"] = "error"
    onto: str | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise InputError("No source is given. Name at least one, such as --source train=train.jsonl.")
        if not self.fields:
            raise InputError("No field is given. Name at least one, such as --field query=query.")
        for option, pairs in (("--source", self.sources), ("--field", self.fields)):
            for name, value in pairs:
                if not name or not value or name != name.strip():
                    raise InputError(f"{option} {name}={value}: a name and a value are needed on either side of the equals sign.")
        for _, path in self.fields:
            parse_path(path)
        if len(set(self.fields)) < len(self.fields):
            raise InputError(f"--field: one field is given twice in {', '.join(f'{kind}={path}' for kind, path in self.fields)}.")
        if len({kind for kind, _ in self.fields}) > 255:
            raise InputError("--field: more than 255 kinds.")
        if self.on_bad_line not in ("error", "skip"):
            raise InputError(f"--on-bad-line {self.on_bad_line}: it is error or skip.")

    @property
    def rules(self) -> Rules:
        return Rules(fields=self.fields, strict=self.strict, skip_bad_lines=self.on_bad_line == "skip")


def scan(
    config: ScanConfig,
    out: str | Path,
    *,
    workers: int | None = None,
    restart: bool = False,
    progress: Progress = SILENT,
    block_bytes: int = BLOCK_BYTES,
) -> Manifest:
    """Write the texts bank `out` and give its manifest; if it is there already, only that.

    Columns: text (large_string), sha1 (binary, 20 bytes), kind (string), source (string). `workers` processes read the lines (0: none,
    None: as suits the input); the files are the same for any number.

    Raises InputError (a source or line that is not usable), PlanMismatch, BankLocked, DiskFull, CorruptBank (`onto`), WorkerDied.
    """
    sources = find_sources(config.sources)
    old = _old_bank(config.onto, Path(out))
    files = [file for source in sources for file in source.files]
    with ExitStack() as stack:
        # before the hashing, which takes about as long as they take to start
        crew = stack.enter_context(Workers(config.rules, _worker_count(files) if workers is None else workers))
        prints = fingerprint(files, progress)
        entries = _source_entries(sources, prints)
        bank = stack.enter_context(BankWriter(out, kind="texts", recipe=_recipe(config, entries, old), restart=restart))
        if bank.committed:
            return read_manifest(bank.folder)
        run = _Scan(config, bank, old)
        run.read(crew, sources, prints, progress, block_bytes)
        fields = _manifest_fields(config, run, sources, prints, entries, old)
        _tell(fields, progress)
        return bank.commit(rows=run.rows, card=_card(fields), manifest=fields)
