"""Texts bank → tokens bank: one row a text, its `input_ids` (list<int32>) and `length` (int32), in the texts' order.

The work is a `Dataset.map` over one shard of rows at a time, so that a crash loses one shard. Inside it a Python process does
as little as it can: texts go into the Rust tokenizer as a list, ids come out as lists and go into one Arrow array. The
tokenizer is read before the map forks, so that no worker reads it again. What a shard holds depends on its texts and the
recipe alone, not on how many processes made it.

What `map` keeps on disk meanwhile lies in the bank's journal under the recipe's hash *and* the number of processes (datasets
takes the number of pieces from files that are there already), and is never believed by a later run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pyarrow as pa

from arrowbank import models
from arrowbank.bank import Bank, BankWriter, open_bank
from arrowbank.bank.files import publish_bytes, publish_json
from arrowbank.bank.kinds.features_bank import FeatureManifest
from arrowbank.bank.kinds.tokens_bank import TokensManifest
from arrowbank.bank.manifest import Manifest, readable_json
from arrowbank.bank.places import Named
from arrowbank.bank.processes import REMEDY
from arrowbank.bank.refusals import explains, refusal_behind
from arrowbank.engine.plan import SHARD_ROWS, Shard, shard_ranges
from arrowbank.engine.pool import Report
from arrowbank.engine.stage import Estimate, RunOptions, Stage
from arrowbank.errors import InputError, WorkerDied
from arrowbank.features.bound_children import bound_children
from arrowbank.models.model_config import TrustRemoteCode
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Count, Flag, Help, Place, Settings, checked

if TYPE_CHECKING:
    import datasets
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast


METHOD = 2  # raise it when the same recipe would give other ids
BATCH_ROWS = 1000
PIECE_BYTES = 1 << 24  # of texts that are strings of Python at the same time, about
ROWS_WORTH_A_PROCESS = 2000
SAMPLES, SAMPLED_TEXTS = 20, 50  # an estimate looks at so many places of the texts, and so many texts at each
COUNTED_CHARS = 1 << 18  # of a text whose tokens are counted for a message: a longer one would take hundreds of megabytes
MAX_LIST_VALUES = 2**31 - 1  # 32-bit offsets
CARRIED = ("sources", "fields", "kinds", "text_count")
DECISIVE = ("tokenizer_fingerprint", "max_tokens", "special_tokens", "on_long", "prompt", "prompts", "generations")
COUNTS = ("truncated", "empty", "tokens")  # of a shard, and of the bank

BANK_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "length": pa.int32()})
RESULT_SCHEMA = pa.unify_schemas([BANK_SCHEMA, pa.schema({"truncated": pa.bool_(), "empty": pa.bool_()})])


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(Settings):
    """How texts become tokens."""

    tokenizer: Annotated[Place, Help("A folder or hub name; a fast tokenizer.", "M")]
    max_tokens: Annotated[Count, Help("Tokens kept of a text.", default="the folder's, else 256")] | None = None
    special_tokens: Annotated[Literal["auto", "on", "off"], Help("auto: as the model's folder asks.")] = "auto"
    on_long: Annotated[Literal["truncate", "error"], Help("What a text of more tokens does.")] = "truncate"
    prompt: Annotated[
        tuple[str, ...],
        Help("Put before texts; KIND=… of a kind; repeat it.", "NAME|TEXT"),
    ] = ()
    model: Annotated[Place, Flag("")] | None = None
    trust_remote_code: TrustRemoteCode = False
    shard_rows: Annotated[Count, Flag("")] = SHARD_ROWS

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):  # one prompt for all texts
            object.__setattr__(self, "prompt", (self.prompt,) if self.prompt else ())
        if isinstance(self.special_tokens, bool):
            object.__setattr__(self, "special_tokens", "on" if self.special_tokens else "off")
        super().__post_init__()

    def check(self) -> None:
        if not self.tokenizer:
            raise InputError("tokenizer is empty. Give a model folder or name.")

    @property
    def as_asked(self) -> bool:
        """Whether the user decides something that the model's folder decides otherwise."""
        return self.max_tokens is not None or self.special_tokens != "auto" or bool(self.prompt)


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """How texts become tokens: what the options and the model's folder come to. `prompts` are by kind of text, "" of all others."""

    max_tokens: int
    special_tokens: bool
    prompts: Mapping[str, str] = field(default_factory=lambda: {"": ""})

    def prompt(self, kind: str) -> str:
        return self.prompts.get(kind, self.prompts[""])

    @property
    def by_kind(self) -> bool:
        """Whether texts of different kinds have different prompts."""
        return len(set(self.prompts.values())) > 1


def prompts_of(manifest: TokensManifest | FeatureManifest) -> dict[str, str]:
    """The prompts that the texts of a bank have, by kind; "" of all others."""
    return manifest.prompts or {"": manifest.prompt or ""}


def asked_of(config: TokenizeConfig) -> models.TextRules:
    """What the model's folder asks of texts. InputError for a folder that cannot be read."""
    return models.text_rules(config.model or config.tokenizer, trust_remote_code=config.trust_remote_code)


def token_rules(config: TokenizeConfig, asked: models.TextRules, kinds: Collection[str] = ()) -> TokenRules:
    """What `config` and its folder come to for texts of these kinds. Raises InputError for a prompt or a kind that there is not."""
    most = config.max_tokens or asked.max_tokens or (models.NO_LIMIT if asked.sentence else models.DEFAULT_TOKENS)
    special = asked.special_tokens if config.special_tokens == "auto" else config.special_tokens == "on"
    return TokenRules(max_tokens=most, special_tokens=special, prompts=_prompts(config.prompt, asked, kinds))


def _prompts(given: Sequence[str], asked: models.TextRules, kinds: Collection[str]) -> dict[str, str]:
    prompts = {"": asked.default_prompt}
    for one in given:
        kind, equals, value = one.partition("=")
        of_kind = bool(equals) and (kind in kinds or (kind.isidentifier() and bool(kinds) and value in asked.prompts))
        kind, value = (kind, value) if of_kind else ("", one)
        if of_kind and kind not in kinds:
            raise InputError(f"--prompt {one}: there are no texts of kind {kind!r}. Their kinds are {', '.join(kinds)}.")
        if value not in asked.prompts and value.isidentifier() and asked.prompts:
            raise InputError(
                f"--prompt {one}: the model's folder has no prompt {value!r}. Its prompts are {', '.join(asked.prompts)}; a text of "
                "your own ends in a space or a colon."
            )
        prompts[kind] = asked.prompts.get(value, value)
    return prompts


@dataclass(frozen=True)
class Batches:
    """What `map` calls with a table of texts (and their kinds, where prompts differ), here or in a worker process: a table of
    RESULT_SCHEMA comes back."""

    tokenizer_file: Path
    rules: TokenRules
    split_special_tokens: bool

    @property
    def columns(self) -> list[str]:
        return ["text", "kind"] if self.rules.by_kind else ["text"]

    def backend(self) -> Tokenizer:
        """The Rust tokenizer, truncation set."""
        return _read_backend(self.tokenizer_file, self.split_special_tokens)

    def __call__(self, table: pa.Table) -> pa.Table:
        backend, rules, column = self.backend(), self.rules, table.column("text")
        encodings: list[Encoding] = []
        for start, stop in _pieces(column):  # so that long texts are not all in memory at once
            texts = column.slice(start, stop - start).to_pylist()
            kinds = table.column("kind").slice(start, stop - start).to_pylist() if rules.by_kind else [""] * len(texts)
            prompted = [rules.prompt(kind) + text for kind, text in zip(kinds, texts, strict=True)]
            encodings += models.encode_texts(backend, prompted, special_tokens=rules.special_tokens)
        ids = [encoding.ids for encoding in encodings]
        truncated = [len(i) >= rules.max_tokens and bool(e.overflowing) for i, e in zip(ids, encodings, strict=True)]
        added = backend.num_special_tokens_to_add(False) if rules.special_tokens else 0
        empty = [len(i) <= added for i in ids]
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        offsets = np.zeros(len(ids) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        values = np.fromiter(chain.from_iterable(ids), np.int32, int(offsets[-1]))
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        return pa.Table.from_arrays([column, pa.array(lengths), pa.array(truncated), pa.array(empty)], schema=RESULT_SCHEMA)


def _pieces(column: pa.ChunkedArray) -> Iterator[tuple[int, int]]:
    """Ranges of texts that have at most PIECE_BYTES together, or are one text."""
    import pyarrow.compute as pc

    sizes = np.asarray(pc.binary_length(column).to_pylist())
    start, size = 0, 0
    for row in np.flatnonzero(sizes > PIECE_BYTES // BATCH_ROWS).tolist() if sizes.sum() > PIECE_BYTES else ():
        if size + sizes[row] > PIECE_BYTES and row > start:
            yield start, row
            start, size = row, 0
        size += int(sizes[row])
    yield start, len(column)


@explains("out")
@checked
def tokenize(
    config: TokenizeConfig,
    texts: str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Tokenize the texts bank `texts` into the tokens bank `out`; its manifest, `complete` or not.

    On this machine `Dataset.map` does it, in `options.workers` processes (None: one per core). Resumes where an earlier run of the same
    recipe stopped. Raises InputError (a tokenizer that is not fast; a text that is too long, under `on_long="error"`), CorruptBank (the
    texts), PlanMismatch, BankLocked, DiskFull, WorkerDied.
    """
    return TokenizeStage(config, open_bank(texts), out).run(out, options, progress)


@checked
def estimate_tokenize(
    config: TokenizeConfig,
    texts: str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Estimate:
    """What `tokenize` with the same arguments makes, from some of the texts. Nothing is written."""
    return TokenizeStage(config, open_bank(texts), out).estimate(out, options, progress=progress)


class TokenizeStage(Stage):
    """The texts, the tokenizer, and the shards of rows."""

    kind, phase, unit, what = "tokens", "tokenize", "texts", "the tokens bank"
    remedy = "Give a smaller --max-tokens, or"
    splits_threads = False

    def __init__(self, config: TokenizeConfig, source: Bank, out: str | Path) -> None:
        self.config, self.source, self.out = config, source, out

    @property
    def inputs(self) -> list[Named]:
        return [("TEXTS", self.source), ("--tokenizer", models.local_model(self.config.tokenizer))]

    def check(self) -> None:
        """InputError for a bank without texts."""
        if "text" not in self.source.columns:
            raise InputError(
                f"{self.source.folder}: a bank of kind {self.source.kind!r} without a text column. Give a texts bank (arrowbank scan)."
            )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return models.load_tokenizer(self.config.tokenizer, trust_remote_code=self.config.trust_remote_code)

    @cached_property
    def rules(self) -> TokenRules:
        return token_rules(self.config, self._asked, self.source.manifest.json.get("kinds", ()))

    @cached_property
    def _asked(self) -> models.TextRules:
        return asked_of(self.config)

    @property
    def rows_a_shard(self) -> int:
        """`shard_rows`, or as many as keep a shard's ids within 32-bit offsets."""
        return max(1, min(self.config.shard_rows, MAX_LIST_VALUES // self.rules.max_tokens))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        source, rules = self.source, self.rules
        carried = {name: value for name, value in source.manifest.json.items() if name in CARRIED or name.endswith("_sha256")}
        return {
            **carried,
            "tokenizer": self.config.tokenizer,
            "tokenizer_fingerprint": models.tokenizer_fingerprint(self.tokenizer),
            "max_tokens": rules.max_tokens,
            "special_tokens": rules.special_tokens,
            "on_long": self.config.on_long,
            "prompt": rules.prompts[""],
            **({"prompts": dict(rules.prompts)} if rules.by_kind else {}),
            "prompt_tokens": 0 if rules.by_kind else prompt_tokens(self.tokenizer, rules),
            "generations": _generations(source),
            "texts": {"path": os.path.relpath(source.folder, self.out), "plan_digest": source.plan_digest},
        }

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return {
            "method": METHOD,
            "texts": self.manifest["texts"]["plan_digest"],
            "shard_rows": self.rows_a_shard,
            "split_special_tokens": bool(self.tokenizer.split_special_tokens),
            **{name: self.manifest[name] for name in DECISIVE if name in self.manifest},
        }

    @cached_property
    def shards(self) -> list[Shard]:
        return shard_ranges(_generations(self.source), self.rows_a_shard)

    @cached_property
    def _tokens_per_text(self) -> float:
        """From texts of all parts of the bank."""
        rows = len(self.source)
        texts: list[str] = []
        for start in range(0, rows, max(SAMPLED_TEXTS, rows // SAMPLES)):
            texts += self.source.slice(start, min(start + SAMPLED_TEXTS, rows), ["text"])["text"].to_pylist()
        return sum(map(len, token_rows(self.tokenizer, self.rules, texts))) / len(texts)

    def tokens(self, shard: Shard) -> int:
        return round(shard.rows * self._tokens_per_text)

    def shard_bytes(self, shard: Shard) -> int:
        return 4 * self.tokens(shard) + 8 * shard.rows

    def prepare(self, bank: BankWriter, options: RunOptions, progress: Progress) -> None:
        self.source.check_hashes()
        self._tell_unused_prompts(progress)
        own = "" if options.worker is None else f"-{options.worker[0]}"
        self._cache = bank.work_dir / f"map{own}"
        shutil.rmtree(self._cache, ignore_errors=True)  # a killed run's: to datasets a file that exists is a good one
        self._cache.mkdir(parents=True)
        self._batches = Batches(
            _save_backend(self.tokenizer, self.rules, self._cache / f"tokenizer-{bank.plan_digest[:16]}.json"),
            self.rules,
            bool(self.tokenizer.split_special_tokens),
        )

    def _tell_unused_prompts(self, progress: Progress) -> None:
        asked = self._asked
        unused = [name for name, text in asked.prompts.items() if text and text not in self.rules.prompts.values()]
        if unused and len(unused) == sum(map(bool, asked.prompts.values())):
            progress.message(
                f"the model's folder has prompts that no text gets: {', '.join(unused)}. Give --prompt NAME for all texts, or --prompt "
                "KIND=NAME for those of a kind, where the model was trained so"
            )

    def is_done(self, bank: BankWriter, shard: Shard) -> bool:
        return super().is_done(bank, shard) and _counts_of(bank.work_dir, shard.index) is not None

    def workers(self, bank: BankWriter) -> TokenizeJob:
        return TokenizeJob(self.config, self.source, self._batches, bank.work_dir)

    def make_here(self, todo: Sequence[Shard], bank: BankWriter, options: RunOptions, report: Report) -> bool:
        """`Dataset.map` over one shard at a time."""
        tokenizer, processes = self.workers(bank)(0), options.workers or os.cpu_count() or 1
        self._batches.backend()  # read it before the forks
        with quiet_datasets(), bound_children():
            for shard in todo:
                table = self._map(shard, bank, processes).data.table
                bank.write_shard(shard.index, tokenizer.counted(shard, table))
                for piece in self._cache.glob("*.arrow"):
                    piece.unlink()
                report(shard.rows)
        return True

    def _map(self, shard: Shard, bank: BankWriter, most: int) -> datasets.Dataset:
        import multiprocess  # what datasets starts its processes with
        from datasets import Features

        processes = min(most, max(1, shard.rows // ROWS_WORTH_A_PROCESS))
        name = f"{bank.plan_digest[:32]}-{shard.index:05d}-{processes}"
        rows = (
            self.source.dataset.select_columns(self._batches.columns)
            .select(range(shard.start, shard.stop))
            .with_format("arrow")
        )
        try:
            return rows.map(
                self._batches,
                batched=True,
                batch_size=BATCH_ROWS,
                remove_columns=self._batches.columns,
                features=Features.from_arrow_schema(RESULT_SCHEMA),
                num_proc=processes if processes > 1 else None,
                cache_file_name=str(self._cache / f"{name}.arrow"),
                load_from_cache_file=False,
                new_fingerprint=name,
                writer_batch_size=shard.rows,
            )
        except ValueError as error:  # datasets closes its file, refused by the disk, and trips over that
            refusal = refusal_behind(error)
            if refusal is None:
                raise
            raise refusal from None
        except (RuntimeError, EOFError, ConnectionError) as error:
            if isinstance(error, RuntimeError) and "abruptly died" not in str(error):
                raise
            raise WorkerDied(
                f"{bank.folder}: a tokenizer process died on rows {shard.start}–{shard.stop - 1} (killed, or out of "
                "memory?). Finished shards are kept: run the same command again, with a smaller --workers if memory is short."
                + ("" if multiprocess.get_start_method() == "fork" else f" {REMEDY}")
            ) from error

    def finish(self, bank: BankWriter, progress: Progress) -> Manifest:
        every = [_counts_of(bank.work_dir, shard.index) or {} for shard in self.shards]
        counts = {name: sum(counts[name] for counts in every) for name in COUNTS}
        if counts["empty"]:
            left = "its special tokens only" if self.rules.special_tokens else "no token: `encode` refuses them"
            progress.message(f"{bank.folder}: of {counts['empty']:,} texts the tokenizer leaves {left}")
        return bank.commit(rows=len(self.source), manifest={"counts": counts})


@dataclass(frozen=True)
class TokenizeJob:
    """How a process becomes a worker. Everything here pickles. `counts` is the folder for the counts of shards."""

    config: TokenizeConfig
    source: Bank
    batches: Batches
    counts: Path

    def __call__(self, number: int) -> ShardTokenizer:
        return ShardTokenizer(self)


class ShardTokenizer:
    """Makes shards of a tokens bank."""

    def __init__(self, job: TokenizeJob) -> None:
        self.job = job

    def __call__(self, shard: Shard, report: Report) -> pa.RecordBatch:
        """The columns of the shard; its counts are published. Reports texts."""
        tables = []
        for start in range(shard.start, shard.stop, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, shard.stop)
            tables.append(self.job.batches(self.job.source.slice(start, stop, self.job.batches.columns)))
            report(stop - start)
        return self.counted(shard, pa.concat_tables(tables))

    def counted(self, shard: Shard, table: pa.Table) -> pa.RecordBatch:
        """The columns of the shard from a table of RESULT_SCHEMA; its counts are published."""
        table = table.combine_chunks()
        truncated = table.column("truncated").to_numpy()
        if self.job.config.on_long == "error" and truncated.any():
            raise self._too_long(shard.start + int(truncated.argmax()))
        counts = {
            "truncated": int(truncated.sum()),
            "empty": int(table.column("empty").to_numpy().sum()),
            "tokens": int(table.column("length").to_numpy().sum(dtype=np.int64)),
        }
        self.job.counts.mkdir(exist_ok=True)
        publish_json(
            _counts_file(self.job.counts, shard.index), counts
        )  # before the shard: a receipt then always has its counts
        # to_batches gives one batch for what combine_chunks made one; the schema loses datasets' own metadata
        (batch,) = table.select(BANK_SCHEMA.names).replace_schema_metadata(None).to_batches()
        return batch

    def _too_long(self, row: int) -> InputError:
        batches, column = self.job.batches, self.job.source.slice(row, row + 1, ["text", "kind"])
        text, rules = column["text"][0].as_py(), self.job.batches.rules
        said = f"of {len(text):,} characters has more tokens than"
        if len(text) <= COUNTED_CHARS:
            backend = _read_backend(batches.tokenizer_file, batches.split_special_tokens, truncation=False)
            prompted = rules.prompt(column["kind"][0].as_py()) + text
            said = f"has {len(backend.encode(prompted, add_special_tokens=rules.special_tokens).ids)} tokens, more than"
        return InputError(
            f"{self.job.source.folder}: row {row} {said} --max-tokens {rules.max_tokens}: "
            f"{text[:80]!r}. Raise --max-tokens, shorten the text, or give --on-long truncate."
        )


def _counts_file(folder: Path, shard: int) -> Path:
    return folder / f"counts-{shard:05d}.json"


def _counts_of(folder: Path, shard: int) -> dict[str, int] | None:
    """The counts of a shard; None where a power cut took them: the shard is made again."""
    found = readable_json(_counts_file(folder, shard))
    return found if isinstance(found, dict) and found.keys() == set(COUNTS) else None


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """No bars of datasets' own, one thread a tokenizer, and the environment afterwards as it was."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    name = "TOKENIZERS_PARALLELISM"
    environment, before, were_on = os.environ, os.environ.get(name), not are_progress_bars_disabled()
    if were_on:
        disable_progress_bars()
    environment[name] = "false"
    try:
        yield
    finally:
        os.environ = environment  # noqa: B003 - map puts a copy in its place and leaves it there
        if before is None:
            environment.pop(name, None)
        else:
            environment[name] = before
        if were_on:
            enable_progress_bars()


@lru_cache(maxsize=2)
def _read_backend(path: Path, split_special_tokens: bool, truncation: bool = True) -> Tokenizer:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))
    backend.encode_special_tokens = split_special_tokens
    if not truncation:
        backend.no_truncation()
    return backend


def _save_backend(tokenizer: PreTrainedTokenizerFast, rules: TokenRules, path: Path) -> Path:
    """Write the Rust tokenizer, set for this run's processes."""
    publish_bytes(path, truncating_backend(tokenizer, rules).to_str().encode())
    return path


def truncating_backend(tokenizer: PreTrainedTokenizerFast, rules: TokenRules) -> Tokenizer:
    """The Rust tokenizer, set as `tokenizer(text, truncation=True, max_length=…)` sets it. InputError where nothing would be left."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    added = backend.num_special_tokens_to_add(False) if rules.special_tokens else 0
    if rules.max_tokens <= added:
        raise InputError(f"max_tokens is {rules.max_tokens}, the tokenizer's own special tokens take {added}. Give more.")
    backend.no_padding()
    backend.enable_truncation(rules.max_tokens, stride=0, strategy="longest_first", direction=tokenizer.truncation_side)
    return backend


def token_rows(tokenizer: PreTrainedTokenizerFast, rules: TokenRules, texts: Sequence[str], kind: str = "") -> list[list[int]]:
    """The ids of a few texts of one kind, here and at once: what `tokenize` with this tokenizer and these rules stores for them."""
    backend = truncating_backend(tokenizer, rules)
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    encodings = models.encode_texts(backend, [rules.prompt(kind) + text for text in texts], special_tokens=rules.special_tokens)
    return [encoding.ids for encoding in encodings]


def _generations(source: Bank) -> list[int]:
    return [int(end) for end in source.manifest.generations or [len(source)]]


def prompt_tokens(tokenizer: PreTrainedTokenizerFast, rules: TokenRules) -> int:
    """How many tokens of each text are the prompt's, as sentence-transformers counts them: those of the prompt alone, less a special token
    behind it."""
    if not rules.prompts[""]:
        return 0
    [ids] = token_rows(tokenizer, rules, [""])
    return len(ids) - (bool(ids) and ids[-1] in tokenizer.all_special_ids)
