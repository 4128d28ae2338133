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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pyarrow as pa

from arrowbank import models
from arrowbank.bank import Bank, BankWriter, open_bank
from arrowbank.bank.files import publish_bytes, publish_json
from arrowbank.bank.manifest import Manifest, readable_json
from arrowbank.bank.places import require_separate
from arrowbank.bank.processes import REMEDY
from arrowbank.bank.refusals import explains, refusal_behind
from arrowbank.engine.plan import SHARD_ROWS, Shard, shard_ranges
from arrowbank.errors import InputError, WorkerDied
from arrowbank.features.bound_children import bound_children
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Count, Flag, Place, Settings, checked

if TYPE_CHECKING:
    import datasets
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast


METHOD = 1  # raise it when the same recipe would give other ids
BATCH_ROWS = 1000
ROWS_WORTH_A_PROCESS = 2000
MAX_LIST_VALUES = 2**31 - 1  # 32-bit offsets
NO_TOKENS = [0]  # stands for a text that gives none
CARRIED = ("sources", "fields", "kinds", "text_count")
COUNTS = ("truncated", "empty", "tokens")  # of a shard, and of the bank

BANK_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "length": pa.int32()})
RESULT_SCHEMA = pa.unify_schemas([BANK_SCHEMA, pa.schema({"truncated": pa.bool_(), "empty": pa.bool_()})])


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(Settings):
    """How texts become tokens. `tokenizer` is a folder or a name that transformers knows; it must be a fast one.

    `max_tokens` counts special tokens, where `special_tokens` asks for them. `prompt` goes before every text. `on_long` is what
    happens to a text of more tokens: "truncate" (on the tokenizer's own side, counted) or "error".
    """

    tokenizer: Place
    max_tokens: Count = 256
    special_tokens: bool = False
    on_long: Literal["truncate", "error"] = "truncate"
    prompt: str = ""
    trust_remote_code: bool = False
    shard_rows: Annotated[Count, Flag("")] = SHARD_ROWS

    def check(self) -> None:
        if not self.tokenizer:
            raise InputError("tokenizer is empty. Give a model folder or name.")

    @property
    def rows_a_shard(self) -> int:
        """`shard_rows`, or as many as keep a shard's ids within 32-bit offsets."""
        return max(1, min(self.shard_rows, MAX_LIST_VALUES // self.max_tokens))


@dataclass(frozen=True)
class Batches:
    """What `map` calls with a table of texts, here or in a worker process: a table of RESULT_SCHEMA comes back."""

    tokenizer_file: Path
    prompt: str
    max_tokens: int
    special_tokens: bool
    split_special_tokens: bool

    def backend(self) -> Tokenizer:
        """The Rust tokenizer, truncation set."""
        return _read_backend(self.tokenizer_file, self.split_special_tokens)

    def __call__(self, table: pa.Table) -> pa.Table:
        encodings = encode_texts(self.backend(), table.column("text").to_pylist(), self.prompt, self.special_tokens)
        ids = [encoding.ids for encoding in encodings]
        truncated = [len(i) >= self.max_tokens and bool(e.overflowing) for i, e in zip(ids, encodings, strict=True)]
        empty = [not i for i in ids]
        if any(empty):
            ids = [i or NO_TOKENS for i in ids]
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        offsets = np.zeros(len(ids) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        values = np.fromiter(chain.from_iterable(ids), np.int32, int(offsets[-1]))
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        return pa.Table.from_arrays([column, pa.array(lengths), pa.array(truncated), pa.array(empty)], schema=RESULT_SCHEMA)


@explains("out")
@checked
def tokenize(
    config: TokenizeConfig,
    texts: str | Path,
    out: str | Path,
    *,
    num_proc: Count | None = None,
    restart: bool = False,
    progress: Progress = SILENT,
) -> Manifest:
    """Tokenize the texts bank `texts` into the tokens bank `out`, in `num_proc` processes (None: one a core); its manifest.

    Goes on where an earlier run of the same recipe stopped. Raises InputError (a tokenizer that is not fast; a text that is too
    long, under `on_long="error"`), CorruptBank (the texts), PlanMismatch, BankLocked, DiskFull, WorkerDied.
    """
    source = open_bank(texts)
    require_separate([("--out", out)], [("TEXTS", source), ("--tokenizer", models.local_model(config.tokenizer))])
    if "text" not in source.columns:
        raise InputError(f"{texts}: a bank of kind {source.kind!r} without a text column. Give a texts bank (arrowbank scan).")
    tokenizer = models.load_tokenizer(config.tokenizer, trust_remote_code=config.trust_remote_code)
    fields = _manifest_fields(config, tokenizer, source, Path(out))
    with BankWriter(out, kind="tokens", recipe=_recipe(fields, config, tokenizer), restart=restart, manifest=fields) as bank:
        if not bank.committed:
            source.check_hashes()
            work = _Work(config, source, bank, tokenizer, num_proc or os.cpu_count() or 1)
            work.run(progress)
            counts = work.counts()
            bank.commit(rows=len(source), manifest={"counts": counts})
    return open_bank(out).manifest.json


class _Work:
    """One run over the shards that are missing."""

    def __init__(
        self, config: TokenizeConfig, source: Bank, bank: BankWriter, tokenizer: PreTrainedTokenizerFast, processes: int
    ) -> None:
        self._config, self._source, self._bank, self._processes = config, source, bank, processes
        self._shards = shard_ranges(_generations(source), config.rows_a_shard)
        self._cache = bank.work_dir / "map"
        shutil.rmtree(self._cache, ignore_errors=True)  # a killed run's: to datasets a file that exists is a good one
        self._cache.mkdir(parents=True)
        self._batches = Batches(
            _save_backend(tokenizer, config, self._cache / f"tokenizer-{bank.plan_digest[:16]}.json"),
            config.prompt,
            config.max_tokens,
            config.special_tokens,
            bool(tokenizer.split_special_tokens),
        )
        self._batches.backend()  # read it before the forks

    def run(self, progress: Progress) -> None:
        missing = [shard for shard in self._shards if not self._is_done(shard)]
        rows = sum(shard.rows for shard in missing)
        with progress.phase("tokenize", rows) as phase, quiet_datasets(), bound_children():
            for shard in missing:
                self._write(shard)
                phase.advance(shard.rows)

    def counts(self) -> dict[str, int]:
        """Truncated and empty texts and tokens, over all shards."""
        every = [self._counts_of(shard) or {} for shard in self._shards]
        return {name: sum(counts[name] for counts in every) for name in COUNTS}

    def _counts_file(self, shard: Shard) -> Path:
        return self._bank.work_dir / f"counts-{shard.index:05d}.json"

    def _counts_of(self, shard: Shard) -> dict[str, int] | None:
        """The counts of a shard; None where a power cut took them: the shard is made again."""
        found = readable_json(self._counts_file(shard))
        return found if isinstance(found, dict) and found.keys() == set(COUNTS) else None

    def _is_done(self, shard: Shard) -> bool:
        return shard.index in self._bank.done_shards and self._counts_of(shard) is not None

    def _write(self, shard: Shard) -> None:
        table = self._map(shard).data.table.combine_chunks()
        truncated = table.column("truncated").to_numpy()
        if self._config.on_long == "error" and truncated.any():
            raise self._too_long(shard.start + int(truncated.argmax()))
        counts = {
            "truncated": int(truncated.sum()),
            "empty": int(table.column("empty").to_numpy().sum()),
            "tokens": int(table.column("length").to_numpy().sum(dtype=np.int64)),
        }
        publish_json(self._counts_file(shard), counts)  # before the shard: a receipt then always has its counts
        # to_batches gives one batch for what combine_chunks made one; the schema loses datasets' own metadata
        (batch,) = table.select(BANK_SCHEMA.names).replace_schema_metadata(None).to_batches()
        self._bank.write_shard(shard.index, batch)
        for piece in self._cache.glob("*.arrow"):
            piece.unlink()

    def _map(self, shard: Shard) -> datasets.Dataset:
        import multiprocess  # what datasets starts its processes with
        from datasets import Features

        processes = min(self._processes, max(1, shard.rows // ROWS_WORTH_A_PROCESS))
        name = f"{self._bank.plan_digest[:32]}-{shard.index:05d}-{processes}"
        rows = self._source.dataset.select_columns(["text"]).select(range(shard.start, shard.stop)).with_format("arrow")
        try:
            return rows.map(
                self._batches,
                batched=True,
                batch_size=BATCH_ROWS,
                remove_columns=["text"],
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
                f"{self._bank.folder}: a tokenizer process died on rows {shard.start}–{shard.stop - 1} (killed, or out of "
                "memory?). Finished shards are kept: run the same command again, with a smaller --num-proc if memory is short."
                + ("" if multiprocess.get_start_method() == "fork" else f" {REMEDY}")
            ) from error

    def _too_long(self, row: int) -> InputError:
        text = self._source.slice(row, row + 1, ["text"]).column("text")[0].as_py()
        backend = _read_backend(self._batches.tokenizer_file, self._batches.split_special_tokens, truncation=False)
        length = len(backend.encode(self._config.prompt + text, add_special_tokens=self._config.special_tokens).ids)
        return InputError(
            f"{self._source.folder}: row {row} has {length} tokens, more than --max-tokens {self._config.max_tokens}: "
            f"{text[:80]!r}. Raise --max-tokens, shorten the text, or give --on-long truncate."
        )


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


def _save_backend(tokenizer: PreTrainedTokenizerFast, config: TokenizeConfig, path: Path) -> Path:
    """Write the Rust tokenizer, set for this run's processes."""
    publish_bytes(path, truncating_backend(tokenizer, config).to_str().encode())
    return path


def truncating_backend(tokenizer: PreTrainedTokenizerFast, config: TokenizeConfig) -> Tokenizer:
    """The Rust tokenizer, set as `tokenizer(text, truncation=True, max_length=…)` sets it. InputError where nothing would be left."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    added = backend.num_special_tokens_to_add(False) if config.special_tokens else 0
    if config.max_tokens <= added:
        raise InputError(f"max_tokens is {config.max_tokens}, the tokenizer's own special tokens take {added}. Give more.")
    backend.no_padding()
    backend.enable_truncation(config.max_tokens, stride=0, strategy="longest_first", direction=tokenizer.truncation_side)
    return backend


def encode_texts(backend: Tokenizer, texts: Sequence[str], prompt: str, special_tokens: bool) -> list[Encoding]:
    """What the Rust tokenizer makes of texts behind the prompt."""
    prompted = [prompt + text for text in texts] if prompt else list(texts)
    return list(backend.encode_batch_fast(prompted, add_special_tokens=special_tokens))


def token_rows(tokenizer: PreTrainedTokenizerFast, config: TokenizeConfig, texts: Sequence[str]) -> list[list[int]]:
    """The ids of a few texts, here and at once: what `tokenize` with this tokenizer and config stores for them."""
    backend = truncating_backend(tokenizer, config)
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    encodings = encode_texts(backend, texts, config.prompt, config.special_tokens)
    return [encoding.ids or NO_TOKENS for encoding in encodings]


def _generations(source: Bank) -> list[int]:
    return [int(end) for end in source.manifest.generations or [len(source)]]


def _manifest_fields(config: TokenizeConfig, tokenizer: PreTrainedTokenizerFast, source: Bank, out: Path) -> dict[str, Any]:
    carried = {name: value for name, value in source.manifest.json.items() if name in CARRIED or name.endswith("_sha256")}
    return {
        **carried,
        "tokenizer": config.tokenizer,
        "tokenizer_fingerprint": models.tokenizer_fingerprint(tokenizer),
        "max_tokens": config.max_tokens,
        "special_tokens": config.special_tokens,
        "on_long": config.on_long,
        "prompt": config.prompt,
        "generations": _generations(source),
        "texts": {"path": os.path.relpath(source.folder, out), "plan_digest": source.plan_digest},
    }


def _recipe(fields: dict[str, Any], config: TokenizeConfig, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    decisive = ("tokenizer_fingerprint", "max_tokens", "special_tokens", "on_long", "prompt", "generations")
    return {
        "method": METHOD,
        "texts": fields["texts"]["plan_digest"],
        "shard_rows": config.rows_a_shard,
        "split_special_tokens": bool(tokenizer.split_special_tokens),
        **{name: fields[name] for name in decisive},
    }
