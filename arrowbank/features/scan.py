"""Episodes → the bank of their unique texts, in first-seen order.

Files are cut into blocks of whole lines; workers (scan_worker.py) turn a block into texts and keys; this process asks, block by block
in order, which keys are new (key_table.py) and gathers the new texts into shards. Only the keys stay in memory. An
unfinished scan starts from the first line again: it is quick, and it writes the same bytes over what is there. So a scan is the one
stage that is not made in parts: whether a text is new depends on all texts before it."""

from __future__ import annotations

import math
import mmap
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import Bank, BankWriter, open_bank
from arrowbank.bank.columns import binary_column, fixed_bytes
from arrowbank.bank.files import free_bytes
from arrowbank.bank.kinds.texts_bank import TextsBank
from arrowbank.bank.manifest import Manifest, joint_sha256
from arrowbank.bank.manifest_checks import read_manifest
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explains
from arrowbank.engine.plan import SHARD_ROWS
from arrowbank.engine.stage import PARTED, Estimate, RunOptions, require_budget
from arrowbank.errors import CorruptBank, InputError
from arrowbank.features.key_table import WORDS, KeyTable
from arrowbank.features.scan_pool import Extracted, ScanWorkers
from arrowbank.inputs.bad_lines import BadLine
from arrowbank.inputs.extract import SHA1_BYTES, Counts, Extract, Extractor, Rules, extract_of
from arrowbank.inputs.fields import parse_path
from arrowbank.inputs.formats import PLAIN, TEXT, Reading
from arrowbank.inputs.lines import MAX_LINE_BYTES, MaxLineBytes, OnBadLine, Span
from arrowbank.inputs.sources import (
    Print,
    Source,
    SourceFile,
    check_unchanged,
    find_sources,
    fingerprint,
    named_source,
    read_blocks,
    size_of,
)
from arrowbank.progress import SILENT, Progress, tell_unread
from arrowbank.settings import Flag, Help, Place, Settings, checked, refuse_unread

DEFAULT_FIELDS = (("query", "query"), ("candidate", "candidates[].text"))
Prints = Mapping[Any, Print]  # by the path
METHOD = 1  # raise it when the same recipe would give other rows

SMALL_BYTES = 1 << 25  # less than this is done before a process is up
MOST_WORKERS = 2  # they make about as many texts as this process can merge; each takes some 20 MB
EXPANSION = 6  # of compressed text, roughly
SAMPLED_BYTES, SAMPLED_FILES = 1 << 25, 64  # of the sources, for an estimate; a block of each file at the least
ROW_BYTES = 40  # of a row beside its text and names: offsets of four columns, and the key
ONE_PROCESS = "scan, whose table of keys is in one process (whether a text is new depends on all texts before it)"


@dataclass(frozen=True, kw_only=True)
class ScanConfig(Settings):
    """What to scan, and how.

    `sources` are (split name, path) pairs. `fields` are (kind, field path) pairs, taken in this order in every record (None:
    DEFAULT_FIELDS). `on_bad_line` is refused where all sources are tables, which have no lines. `max_line_bytes` bounds the memory that
    a line may take and decides no row.
    """

    sources: Annotated[
        tuple[tuple[str, Place], ...],
        Flag("--source"),
        Help(
            "A split and its file, folder, dataset or address; repeat it.",
            "NAME=PATH",
            example="train=train.jsonl",
            read=named_source,
        ),
    ]
    fields: (
        Annotated[
            tuple[tuple[str, str], ...],
            Flag("--field"),
            Help(
                "Where texts of a kind are; repeat it. Default: query=query, candidate=candidates[].text",
                "KIND=PATH",
                example="query=query",
            ),
        ]
        | None
    ) = None
    strict: Annotated[bool, Help("A query or text that is not a string is an error.")] = False
    on_bad_line: OnBadLine | None = None
    onto: Annotated[Place, Help("A texts bank whose rows stay; unseen texts are added behind.", "DIR")] | None = None
    max_line_bytes: MaxLineBytes = MAX_LINE_BYTES

    def check(self) -> None:
        if not self.sources:
            raise InputError("No source is given. Name at least one, such as --source train=train.jsonl.")
        if not self.paths:
            raise InputError("No field is given. Name at least one, such as --field query=query.")
        for option, pairs in (("--source", self.sources), ("--field", self.paths)):
            for name, value in pairs:
                if not name or not value or name != name.strip():
                    raise InputError(
                        f"{option} {name}={value}: a name and a value are needed on either side of the equals sign."
                    )
        for _, path in self.paths:
            parse_path(path)
        if len(set(self.paths)) < len(self.paths):
            raise InputError(
                f"--field: one field is given twice in {', '.join(f'{kind}={path}' for kind, path in self.paths)}."
            )
        if len({kind for kind, _ in self.paths}) > 255:
            raise InputError("--field: more than 255 kinds.")

    @property
    def paths(self) -> tuple[tuple[str, str], ...]:
        """`fields`, their default in place."""
        return DEFAULT_FIELDS if self.fields is None else self.fields

    @property
    def rules(self) -> Rules:
        return Rules(
            fields=self.paths,
            strict=self.strict,
            skip_bad_lines=self.on_bad_line == "skip",
            max_line_bytes=self.max_line_bytes,
        )


@explains("out")
@checked
def scan(
    config: ScanConfig,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Write the texts bank `out` and give its manifest; if it is there already, only that.

    Columns: text (large_string), sha1 (binary, 20 bytes), kind (string), source (string). `options.workers` processes read the lines
    (1: this one, None: as suits the input); the files are the same for any number. Options that make a bank in parts are refused.

    Raises InputError (a source or line that is not usable), PlanMismatch, BankLocked, DiskFull, CorruptBank (`onto`), WorkerDied.
    """
    options = options or RunOptions()
    refuse_unread(ONE_PROCESS, options, PARTED)
    config, sources = find_texts(config, progress)
    require_separate([("--out", out)], inputs_of(config))
    old = _old_bank(config.onto)
    if options.budget_bytes is not None:
        needed = _estimate(config, sources, old, out, options).total_bytes
        require_budget(out, needed, options.budget_bytes, "the texts bank", "Give fewer sources, or")
    files = [file for source in sources for file in source.files]
    processes = _worker_count(files) if options.workers is None else options.workers if options.workers > 1 else 0
    with ExitStack() as stack:
        # before the hashing, which takes about as long as they take to start
        crew = stack.enter_context(ScanWorkers(config.rules, processes))
        prints = fingerprint(files, progress)
        entries = _source_entries(sources, prints)
        bank = stack.enter_context(BankWriter(out, kind="texts", recipe=_recipe(config, entries, old), restart=options.restart))
        if bank.committed:
            progress.message(f"{bank.folder}: already complete, nothing to do")
            return read_manifest(bank.folder)
        rows = _TextRows(bank, config, old)
        _read(crew, rows, config.rules, sources, prints, progress)
        fields = _manifest_fields(config, rows, sources, prints, entries, old)
        _tell(fields, progress)
        return bank.commit(rows=fields["text_count"], manifest=fields)


@checked
def estimate_scan(
    config: ScanConfig, out: str | Path, *, options: RunOptions | None = None, progress: Progress = SILENT
) -> Estimate:
    """What `scan` with the same arguments writes, from the first lines or rows of its files: all of them up to 32 MiB. Nothing is written.

    A text that repeats one which the sample does not have counts as new: a source of many repeats takes less. `counts` are the bytes of
    the sources, those of the sample, and those of all texts. Raises what `scan` raises for sources.
    """
    options = options or RunOptions()
    refuse_unread(ONE_PROCESS, options, PARTED)
    config, sources = find_texts(config, progress)
    require_separate([("--out", out)], inputs_of(config))
    return _estimate(config, sources, _old_bank(config.onto), out, options)


def _estimate(
    config: ScanConfig, sources: Sequence[Source], old: Bank | None, out: str | Path, options: RunOptions
) -> Estimate:
    rules, keys, extractor = config.rules, KeyTable(), Extractor(config.rules)
    for batch in old.shards() if old else ():
        keys.add(fixed_bytes(batch.column("sha1"), SHA1_BYTES).view(np.uint32))
    kind_bytes = np.array([len(kind.encode()) for kind in rules.kinds])
    files = [(source.name, file, size_of(file.path)) for source in sources for file in source.files]
    total = sum(size for _, _, size in files)
    looked_at = files if total <= SAMPLED_BYTES else files[:: math.ceil(len(files) / SAMPLED_FILES)]
    wanted = SAMPLED_BYTES / max(1, sum(size for _, _, size in looked_at))  # of each file
    rows = text_bytes = other_bytes = sampled = 0
    for name, file, size in looked_at:
        taken = lines = 0
        for block, block_bytes in _file_blocks(file, None, rules):
            extract = block if isinstance(block, Extract) else extractor.block(block)
            if extract.error:
                raise file.complaint(extract.error, lines)
            fresh = keys.add(np.frombuffer(extract.digests, np.uint32).reshape(-1, WORDS))
            rows += (new := int(fresh.sum()))
            text_bytes += int(np.frombuffer(extract.lengths, np.uint32)[fresh].sum(dtype=np.int64))
            other_bytes += int(kind_bytes[np.frombuffer(extract.kinds, np.uint8)[fresh]].sum())
            other_bytes += new * (ROW_BYTES + len(name.encode()))
            taken, lines = taken + block_bytes, lines + extract.lines
            if taken >= wanted * size:
                break
        else:
            taken = size
        sampled += min(taken, size)
    scale = total / sampled if sampled else 1.0
    return Estimate(
        rows=round(rows * scale),
        shards=max(1, math.ceil(rows * scale / SHARD_ROWS), math.ceil(text_bytes * scale / SHARD_TEXT_BYTES)),
        shard_bytes=round((text_bytes + other_bytes) * scale),
        free_bytes=free_bytes(Path(out)),
        budget_bytes=options.budget_bytes,
        counts={"input_bytes": total, "sampled_bytes": sampled, "text_bytes": round(text_bytes * scale)},
    )


# before the first line


def find_texts(config: ScanConfig, progress: Progress = SILENT) -> tuple[ScanConfig, list[Source]]:
    """The sources, and `config` with its fields. InputError for an option that nothing in them needs. What lies in their folders and is
    not read is named."""
    sources = find_sources(config.sources)
    files = [file for source in sources for file in source.files]
    if all(file.is_table for file in files):
        refuse_unread("tables (.parquet, .arrow), which have no lines", config, ["on_bad_line", "max_line_bytes"])
    plain = [file for file in files if file.format is PLAIN]
    if plain and config.fields is None:
        if len(plain) < len(files):
            raise InputError(
                f"{plain[0].path}: a text file, whose lines have the one field {TEXT}, beside files of other fields. Name all fields, as "
                f"in --field query=query --field {TEXT}={TEXT}."
            )
        config = replace(config, fields=((TEXT, TEXT),))
    for source in sources:
        tell_unread(progress, source.path, files=source.beside)
    return config, sources


def _worker_count(files: Sequence[SourceFile]) -> int:
    """How many processes the lines of `files` are worth."""
    size = sum(size_of(file.path) * (EXPANSION if file.compression else 1) for file in files if not file.is_table)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if size < SMALL_BYTES or processors == 1 else min(processors, MOST_WORKERS)


def inputs_of(config: ScanConfig) -> list[Named]:
    """What a scan reads."""
    return [*(place for source in find_sources(config.sources) for place in source.places), ("--onto", config.onto)]


def _old_bank(onto: str | None) -> Bank | None:
    if onto is None:
        return None
    return open_bank(onto, kind=TextsBank)


def _source_entries(sources: Sequence[Source], prints: Prints) -> list[dict[str, Any]]:
    """What the manifest says about each source. A path is no part of it: the same bytes elsewhere are the same source."""
    entries = []
    for source in sources:
        found = [prints[file.path] for file in source.files]
        sha256 = joint_sha256([one.sha256 for one in found])
        size = sum(one.bytes for one in found)
        path = source.path.resolve() if isinstance(source.path, Path) else source.path
        entries.append({"name": source.name, "file": path.name, "bytes": size, "sha256": sha256})
    return entries


def _recipe(config: ScanConfig, entries: Sequence[Mapping[str, Any]], old: Bank | None) -> dict[str, Any]:
    """All that decides the rows, and the two options that decide whether there is a bank at all."""
    return {
        "method": METHOD,
        "fields": [list(pair) for pair in config.paths],
        "strict": config.strict,
        "on_bad_line": config.on_bad_line or "error",
        "shard_rows": SHARD_ROWS,
        "shard_text_bytes": SHARD_TEXT_BYTES,
        "sources": {
            f"{number} {entry['name']}": {"bytes": entry["bytes"], "sha256": entry["sha256"]}
            for number, entry in enumerate(entries, 1)
        },
        "onto": {"plan_digest": old.plan_digest, "rows": len(old)} if old else None,
    }


# the rows


class _TextRows:
    """The rows of the bank so far: their keys, and the shards that they go to."""

    def __init__(self, bank: BankWriter, config: ScanConfig, old: Bank | None) -> None:
        self.kinds, self.names = config.rules.kinds, list(dict.fromkeys(name for name, _ in config.sources))
        self.counts = Counts()
        self.by_kind = np.zeros(len(self.kinds), np.int64)
        self.by_source = np.zeros(len(self.names), np.int64)
        self.repeated = np.zeros(len(self.names), np.int64)  # texts of a source that had a row already
        self._keys = KeyTable()
        # texts that a worker was asked for while it has its next block in hand
        self._coming: deque[tuple[Future[bytes], Callable[..., News]]] = deque()
        if old:
            _take_over(old, bank, self._keys)
        first = len(old.shard_names) if old else 0
        self.shards = ShardBuilder(bank.write_shard, first=first, kinds=self.kinds, sources=self.names)

    def add(self, extracted: Extracted, name: str) -> None:
        """Add what is new in a block of the source `name`."""
        extract, source = extracted.extract, self.names.index(name)
        self.counts.add(extract.counts)
        fresh = self._keys.add(np.frombuffer(extract.digests, np.uint32).reshape(-1, WORDS))
        places = np.flatnonzero(fresh)
        kinds = np.frombuffer(extract.kinds, np.uint8).take(places)
        self.by_kind += np.bincount(kinds, minlength=len(self.kinds))
        self.by_source[source] += len(places)
        self.repeated[source] += extract.counts.texts_seen - len(places)
        news = partial(
            News,
            lengths=np.frombuffer(extract.lengths, np.uint32).take(places),
            digests=np.frombuffer(extract.digests, np.uint8).reshape(-1, SHA1_BYTES).take(places, axis=0),
            kinds=kinds,
            source=source,
        )
        self._coming.append((extracted.texts(fresh.tobytes()), news))

    def settle(self, waiting: int = 0) -> None:
        """Put texts that have come into shards, until only `waiting` blocks' are still to come."""
        while len(self._coming) > waiting:
            text, news = self._coming.popleft()
            self.shards.add(news(text=text.result()))


def _take_over(old: Bank, bank: BankWriter, keys: KeyTable) -> None:
    """Make the shards of `old` the first ones of `bank`, and enter their keys."""
    old.check_hashes()
    for index, (name, batch) in enumerate(zip(old.shard_names, old.shards(), strict=True)):
        path = old.folder / name
        if not keys.add(fixed_bytes(batch.column("sha1"), SHA1_BYTES).view(np.uint32)).all():
            raise CorruptBank(f"{path}: has a key that an earlier row has. Scan the old bank again.")
        bank.adopt_shard(index, path, rows=batch.num_rows, sha256=old.entries[name].sha256)


@dataclass(frozen=True)
class _Origin:
    """Where a block is from: the source, the file (by its number, as one may be given twice), and how much of it that is."""

    name: str
    number: int
    file: SourceFile
    bytes: int


def _read(
    crew: ScanWorkers,
    rows: _TextRows,
    rules: Rules,
    sources: Sequence[Source],
    prints: Prints,
    progress: Progress,
) -> None:
    """Everything there is into `rows`. Raises InputError at the first line or row that is not usable."""
    total = sum(prints[file.path].bytes for source in sources for file in source.files)
    with progress.phase("scan", total, unit="bytes") as phase, rows.shards:
        for origin, extracted in _extracts(crew, rules, sources, prints):
            rows.add(extracted, origin.name)
            rows.settle(crew.ahead)
            phase.advance(origin.bytes, texts=extracted.extract.counts.texts_seen)
        rows.settle()
        check_unchanged(prints)
        rows.shards.finish()


def _extracts(
    crew: ScanWorkers, rules: Rules, sources: Sequence[Source], prints: Prints
) -> Iterator[tuple[_Origin, Extracted]]:
    """What is in each block, in order. Raises InputError at the first line or row that is not usable."""
    lines: Counter[int] = Counter()  # before the block, by file
    for origin, extracted in crew.map(_blocks(sources, prints, rules)):
        extract = extracted.extract
        if extract.error:
            raise origin.file.complaint(extract.error, lines[origin.number])
        lines[origin.number] += extract.lines
        yield origin, extracted


@dataclass(frozen=True)
class KeyBlock:
    """Some texts of the source `source`, in order, repeated ones included: keys [n, 20] uint8, and places in `Rules.kinds` [n]."""

    source: str
    digests: npt.NDArray[np.uint8]
    kinds: npt.NDArray[np.uint8]


def read_keys(config: ScanConfig, *, workers: int | None = None, progress: Progress = SILENT) -> Iterator[KeyBlock]:
    """The key and kind of every text that `scan` would meet, in order, and nothing written. Raises what `scan` raises for sources."""
    config, sources = find_texts(config, progress)
    files = [file for source in sources for file in source.files]
    with ScanWorkers(config.rules, _worker_count(files) if workers is None else workers) as crew:
        prints = fingerprint(files, progress)
        with progress.phase("read", sum(prints[file.path].bytes for file in files), unit="bytes") as phase:
            for origin, extracted in _extracts(crew, config.rules, sources, prints):
                extract = extracted.extract
                extracted.texts(bytes(len(extract.kinds)))  # a worker keeps a block's texts until it is asked; none is wanted
                digests = np.frombuffer(extract.digests, np.uint8).reshape(-1, SHA1_BYTES)
                yield KeyBlock(origin.name, digests, np.frombuffer(extract.kinds, np.uint8))
                phase.advance(origin.bytes, texts=extract.counts.texts_seen)
        check_unchanged(prints)


def _blocks(sources: Sequence[Source], prints: Prints, rules: Rules) -> Iterator[tuple[_Origin, bytes | Span | Extract]]:
    for number, (name, file) in enumerate((source.name, file) for source in sources for file in source.files):
        for block, size in _file_blocks(file, prints[file.path], rules):
            yield _Origin(name, number, file, size), block


def _file_blocks(file: SourceFile, known: Print | None, rules: Rules) -> Iterator[tuple[bytes | Span | Extract, int]]:
    """The blocks of a file, rows and refused lines as what is in them, and the bytes of the file that each took."""
    paths = [parse_path(path) for _, path in rules.fields]
    columns = list(dict.fromkeys(str(path[0]) for path in paths))
    reading = Reading(max_line_bytes=rules.max_line_bytes, nested=frozenset(str(path[0]) for path in paths if len(path) > 1))
    for block, size in read_blocks(file, reading, known, columns, spans=True):
        if isinstance(block, BadLine):
            yield extract_of(block, rules), size
        elif isinstance(block, bytes | Span):
            yield block, size
        else:
            from arrowbank.inputs.tables import extract_rows

            yield extract_rows(block.batch, rules), size


# after the last line


def _manifest_fields(
    config: ScanConfig,
    rows: _TextRows,
    sources: Sequence[Source],
    prints: Prints,
    entries: list[dict[str, Any]],
    old: Bank | None,
) -> dict[str, Any]:
    """What the manifest says beyond what every bank's does. In a grown bank all counts are of old and new together."""
    before: Mapping[str, Any] = old.manifest.json if old else {}
    old_rows = len(old) if old else 0
    total = old_rows + rows.shards.rows
    if not total:
        raise InputError(
            f"No text is in the sources: {rows.counts.episodes} episodes have none at "
            f"{' or '.join(path for _, path in config.paths)}. Give --field KIND=PATH for where the texts are."
        )
    counts = msgspec.to_builtins(rows.counts) | {"duplicates": rows.counts.texts_seen - rows.shards.rows}
    hashes = {
        f"{name}_sha256": joint_sha256(
            [prints[file.path].sha256 for source in sources if source.name == name for file in source.files]
        )
        for name in rows.names
    }
    named = (f"{entry['name']}_sha256" for entry in before.get("sources", ()))
    old_hashes = {name: before[name] for name in named if name in before}  # a selection has none
    return {
        **old_hashes,
        **hashes,
        "sources": [*before.get("sources", ()), *entries],
        "fields": [list(pair) for pair in config.paths],
        "text_count": total,
        "kinds": _sum(before.get("kinds", {}), dict(zip(rows.kinds, rows.by_kind.tolist(), strict=True))),
        "source_rows": _sum(before.get("source_rows", {}), dict(zip(rows.names, rows.by_source.tolist(), strict=True))),
        "source_duplicates": _sum(
            before.get("source_duplicates", {}), dict(zip(rows.names, rows.repeated.tolist(), strict=True))
        ),
        "counts": _sum(before.get("counts", {}), counts),
        "generations": [*before.get("generations", ()), total],
    }


def _sum(some: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {name: some.get(name, 0) + more.get(name, 0) for name in {**some, **more}}


SKIPPED = {
    "not_text": "a number, bool, list or object in place of a text",
    "not_object": "something else in place of an object",
    "not_list": "something else in place of a list",
    "lone_surrogates": "a text with a lone surrogate, now `?`",
    "bad_lines": "a line that is no JSON object in UTF-8",
}


def _tell(fields: Mapping[str, Any], progress: Progress) -> None:
    """Say what a person would want to know before going on."""
    for name, what in SKIPPED.items():
        if count := fields["counts"][name]:
            progress.message(f"{count} times {what}.")
    for kind, count in fields["kinds"].items():
        if not count:
            progress.message(f"No text has its first place in a field of kind {kind}: is its --field path right?")


SHARD_TEXT_BYTES = 12 << 20  # one fills while one is written, and the scan may take 150 MB in all

Write = Callable[[int, pa.RecordBatch], object]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class News:
    """New texts in row order: their UTF-8 on end and its lengths ([n]), digests ([n, 20]), numbers of their kinds ([n]) and source."""

    text: bytes
    lengths: npt.NDArray[np.uint32]
    digests: Bytes
    kinds: Bytes
    source: int


class ShardBuilder:
    """Writes rows of `text`, `sha1`, `kind`, `source` through `write` as shards `first`, `first` + 1, … A context manager."""

    def __init__(self, write: Write, *, first: int, kinds: Sequence[str], sources: Sequence[str]) -> None:
        self.rows = 0  # of all shards
        self._write, self._index = write, first
        self._names = {"kind": list(kinds), "source": list(sources)}
        self._writer = ThreadPoolExecutor(1, "shard")
        self._writing: Future[object] | None = None
        self._clear()

    def __enter__(self) -> ShardBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.shutdown()

    def _clear(self) -> None:
        self._text = _reserve(SHARD_TEXT_BYTES)
        self._text_bytes = 0
        self._shard_rows = 0
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._digests: list[Bytes] = []
        self._codes: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in self._names}

    def add(self, news: News) -> None:
        """Add rows behind those there are."""
        text = np.frombuffer(news.text, np.uint8)
        lengths = news.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        row = byte = 0
        while row < len(lengths):
            room = SHARD_TEXT_BYTES - self._text_bytes
            fitting = int(np.searchsorted(ends, byte + room, side="right")) - row
            count = min(fitting, SHARD_ROWS - self._shard_rows)
            if count == 0 and self._shard_rows:
                self._flush()
                continue
            stop = row + max(count, 1)  # a text that is larger than a shard is one
            end = int(ends[stop - 1])
            self._append_text(text[byte:end])
            self._lengths.append(lengths[row:stop])
            self._digests.append(news.digests[row:stop])
            self._codes["kind"].append(news.kinds[row:stop])
            self._codes["source"].append(np.full(stop - row, news.source, np.int32))
            self._shard_rows += stop - row
            row, byte = stop, end

    def _append_text(self, text: Bytes) -> None:
        end = self._text_bytes + len(text)
        if end > len(self._text):
            self._text = _reserve(end)
        self._text[self._text_bytes : end] = text
        self._text_bytes = end

    def finish(self) -> None:
        """Write what is left and wait for it."""
        if self._shard_rows:
            self._flush()
        self._wait()

    def _flush(self) -> None:
        batch = self._batch()
        self._clear()
        self._wait()
        self._writing = self._writer.submit(self._write, self._index, batch)
        self._index += 1
        self.rows += batch.num_rows

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
        self._writing = None

    def _batch(self) -> pa.RecordBatch:
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(self._lengths))]).astype(np.int64)
        text = pa.LargeStringArray.from_buffers(
            self._shard_rows, pa.py_buffer(offsets), pa.py_buffer(self._text[: self._text_bytes])
        )
        columns = {"text": text, "sha1": binary_column(np.concatenate(self._digests))}
        for name, codes in self._codes.items():
            columns[name] = _names_column(self._names[name], np.concatenate(codes))
        return pa.RecordBatch.from_pydict(columns)


def _reserve(size: int) -> Bytes:
    """Memory that is taken only as it fills, and given back to the system at once when dropped.

    Not malloc's: after it has seen a block of this size freed, glibc keeps all that are smaller, and scans grow by 40 MB.
    """
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _names_column(names: Sequence[str], codes: npt.NDArray[Any]) -> pa.Array:
    """A string column of `names[code]`."""
    encoded = [name.encode() for name in names]
    ends = np.cumsum(np.array([len(name) for name in encoded], np.int32)[codes], dtype=np.int32)
    data = b"".join([encoded[code] for code in codes.tolist()])
    return pa.StringArray.from_buffers(
        len(codes), pa.py_buffer(np.concatenate([[0], ends]).astype(np.int32)), pa.py_buffer(data)
    )
