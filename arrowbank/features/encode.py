"""The stage `encode`: a token bank and a frozen model in, a feature bank of float16 vectors out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arrowbank.bank import Bank, BankWriter, FeatureBank, open_bank
from arrowbank.bank.columns import fixed_list_column, list_column_of, list_values, one_array
from arrowbank.bank.kinds.tokens_bank import TokensBank
from arrowbank.bank.manifest import LOG, Manifest
from arrowbank.bank.mirror import mirror_fields, write_keys, write_mirror
from arrowbank.bank.open import open_texts_behind
from arrowbank.bank.places import Named
from arrowbank.bank.refusals import explains
from arrowbank.engine.plan import Batch, Shard, batch_counts, batches, gather, rows_a_shard, shard_ranges
from arrowbank.engine.stage import Estimate, RunOptions, Stage
from arrowbank.errors import BadVector, InputError
from arrowbank.features.encode_config import (
    DRIFT_SAMPLE,
    ENCODING_METHOD,
    MIN_COSINE,
    EncodeConfig,
    Encoder,
    check_growth,
    load_custom_encoder,
    width_of,
)
from arrowbank.features.grow import DriftCheck, adopt, check_fits, open_old, told_since
from arrowbank.features.stored_vectors import encoded, fault_of, finish
from arrowbank.features.tokenize import prompts_of
from arrowbank.models import local_model
from arrowbank.models.vllm_engine import MOST_TOKENS, Vllm
from arrowbank.models.vllm_runner import VllmJob, find_engine, prepare_vllm
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

if TYPE_CHECKING:
    from arrowbank.models import ModelInfo


TEXT_COLUMNS = ["text", "kind", "sha1"]
SHOWN_TEXTS = 3


@dataclass(frozen=True)
class EncodeJob:
    """How a process becomes a worker. Everything here pickles; the model is loaded by the worker itself."""

    config: EncodeConfig
    tokens: TokensBank
    texts: Bank
    info: ModelInfo | None = None
    skip: int = 0  # tokens of the prompt, where they are not pooled
    drift: DriftCheck | None = None
    vllm: VllmJob | None = None

    def __call__(self, number: int) -> ShardEncoder:
        encoder = self.encoder(number)
        if self.drift:
            self.drift(encoder, self.tokens)
        return ShardEncoder(self.config, encoder, self.tokens, self.texts)

    def encoder(self, number: int) -> Encoder:
        """The frozen model of worker `number`."""
        if self.config.model is None:
            return load_custom_encoder(str(self.config.encoder))
        if self.vllm is not None:
            return self.vllm.load_encoder(number)
        from arrowbank.models import load_encoder  # transformers is not needed for an encoder of the user's own

        return load_encoder(self.config.model, worker=number, info=self.info, skip=self.skip)


class ShardEncoder:
    """A worker that holds the model and the two banks it reads."""

    def __init__(self, config: EncodeConfig, encoder: Encoder, tokens: Bank, texts: Bank) -> None:
        self._config, self._encoder, self._tokens, self._texts = config, encoder, tokens, texts

    def __call__(self, shard: Shard, report: Callable[[int], None]) -> pa.RecordBatch:
        """The shard's columns text, kind, sha1, length, features (fixed_size_list<float16>[D], or a list of these). Reports tokens."""
        columns: dict[str, pa.Array] = {
            name: one_array(self._texts.slice(shard.start, shard.stop, [name])[name]) for name in TEXT_COLUMNS
        }
        tokens = self._tokens.slice(shard.start, shard.stop, ["input_ids", "length"])
        columns["length"] = one_array(tokens["length"])
        columns["features"] = self._features(shard, one_array(tokens["input_ids"]), report)
        return pa.record_batch(columns)

    def _features(self, shard: Shard, input_ids: pa.Array, report: Callable[[int], None]) -> pa.Array:
        offsets, per_token, config = list_values(input_ids)[1], self._config.per_token, self._config
        count = int(offsets[-1]) if per_token else shard.rows
        out = np.empty((count, width_of(config, self._encoder.hidden_size)), np.float16)
        for batch, vectors in encoded(self._encoder, input_ids, config.rules, config.dim, per_token=per_token):
            half, good = finish(vectors, normalize=config.normalize)
            if not good.all():
                self._refuse(shard, batch, vectors, good)
            places = np.add.outer(offsets[batch.rows], np.arange(batch.length)).ravel() if per_token else batch.rows
            out[places] = half
            report(len(batch.rows) * batch.length)
        return list_column_of(fixed_list_column(out), offsets) if per_token else fixed_list_column(out)

    def _refuse(self, shard: Shard, batch: Batch, vectors: npt.NDArray[np.float32], good: npt.NDArray[np.bool_]) -> None:
        bad = np.flatnonzero(~good)
        rows = shard.start + np.unique(batch.rows[bad * len(batch.rows) // len(vectors)])
        what = fault_of(vectors[bad[0]])
        layer = self._config.model.layer if self._config.model else "the encoder's"
        remedy = "Such a vector comes from the model or its dtype: try --dtype float32 or bfloat16, or check the weights."
        if what.startswith("too small") and not self._config.normalize:
            remedy = "Leave out --normalize off: vectors of norm 1 fit float16."
        raise BadVector(
            f"shard {shard.index}: {len(bad)} vectors of {batch.length} tokens are {what} (layer {layer}):"
            f"{shown_texts(self._texts, rows)}\nNothing of this shard was kept. {remedy}"
        )


def shown_texts(texts: Bank, rows: Sequence[int] | npt.NDArray[np.int64]) -> str:
    """The first of these rows, a line each."""
    found = [(int(row), texts.slice(int(row), int(row) + 1, ["text"])["text"][0].as_py()) for row in rows[:SHOWN_TEXTS]]
    return "".join(f"\n  row {row}: {text[:80]!r}" for row, text in found)


CARRIED = ("sources", "fields", "kinds", "tokenizer", "tokenizer_fingerprint", "special_tokens", "prompt", "prompts")
SAMPLED_BATCHES = 8


@explains("out")
@checked
def encode(
    config: EncodeConfig,
    tokens: str | Path,
    out: str | Path,
    *,
    texts: str | Path | None = None,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Encode the token bank `tokens` into the feature bank `out`; its manifest, `complete` or not.

    `texts` is the texts bank, where it is no longer stored where `tokens` says. Shards that an earlier run of the same plan has
    finished are kept. The run that makes the last shard commits the bank.

    Raises InputError, IncompleteBank or CorruptBank for the banks read, PlanMismatch and BankLocked for `out`, DiskFull,
    BadVector (NaN, Inf, all zero), WorkerDied; for a bank that grows also PlanMismatch where the old one (`config.onto`) was made
    otherwise, and ContractError where this environment no longer gives its vectors.
    """
    check_growth(config, grows=config.onto is not None)
    return stage_of(config, open_bank(tokens, kind=TokensBank), texts).run(out, options, progress)


@explains("tokens", "read")
@checked
def estimate_encode(
    config: EncodeConfig,
    tokens: str | Path,
    out: str | Path = ".",
    *,
    texts: str | Path | None = None,
    options: RunOptions | None = None,
    timed: bool = True,
    progress: Progress = SILENT,
) -> Estimate:
    """What `encode` with the same arguments makes; with `timed`, load the model and time a few of its batches."""
    check_growth(config, grows=config.onto is not None)
    return stage_of(config, open_bank(tokens, kind=TokensBank), texts).estimate(out, options, timed=timed, progress=progress)


def inputs_of(config: EncodeConfig) -> list[Named]:
    """What an encoding reads beside the tokens and their texts."""
    return [("--model", local_model(config.model.model) if config.model else None), ("--onto", config.onto)]


class EncodeStage(Stage):
    """Everything that is fixed before the first forward pass, and what the stage adds to the skeleton."""

    kind, phase, remedy = "features", "encode", "Give --no-mirror, --limit, or"

    def __init__(self, config: EncodeConfig, tokens: TokensBank, texts_folder: str | Path | None = None) -> None:
        self.config, self.token_bank, self.texts_folder = config, tokens, texts_folder
        self.vllm_job: VllmJob | None = None  # until the work begins

    # the plan

    @cached_property
    def texts(self) -> Bank:
        """The texts bank behind the tokens; InputError when it is gone or another one."""
        return open_texts_behind(self.token_bank, self.texts_folder)

    @cached_property
    def model(self) -> ModelInfo | None:
        """What is known of the transformers model; None for a user's own encoder."""
        if self.config.model is None:
            return None
        from arrowbank.models import describe

        return describe(self.config.model)

    @cached_property
    def vllm(self) -> Vllm | None:
        """The serving engine, where one runs the model; InputError where it is not there, or gives no such vectors."""
        if self.config.runner != "vllm" or self.config.model is None or self.model is None:
            return None
        if self.model.layer != self.model.num_layers:
            raise InputError(
                f"--layer {self.model.layer}: vLLM gives vectors of the last layer ({self.model.num_layers}). Leave --layer out, or use "
                "--runner transformers."
            )
        return find_engine(self.config.engine, self.config.model, self.model, (), "post")

    def default_workers(self, todo: Sequence[Shard]) -> int:
        return super().default_workers(todo) if self.vllm is None else self.vllm.workers

    @property
    def gpus(self) -> int:
        if self.vllm is None:
            return super().gpus
        return self.config.engine.tensor_parallel if self.vllm.device == "cuda" else 0

    @cached_property
    def old(self) -> FeatureBank | None:
        """The bank that grows, where one does."""
        if self.config.onto is None:
            return None
        old = open_old(self.config.onto)
        self.adopted = len(old.shard_names)
        return old

    @property
    def what(self) -> str:
        return f"the bank of {self.rows:,} × {self.hidden_size} vectors"

    @property
    def inputs(self) -> list[Named]:
        return [("TOKENS", self.token_bank), ("--texts", self.texts_folder), *inputs_of(self.config)]

    @property
    def hidden_size(self) -> int:
        """How many numbers a stored vector has."""
        found = self.model.width if self.model else int(load_custom_encoder(self.config.model_path).hidden_size)
        return width_of(self.config, found)

    @property
    def rows(self) -> int:
        """How many rows are encoded."""
        return min(wanted for wanted in (len(self.token_bank), self.config.limit, self.config.trial) if wanted is not None)

    @property
    def row_bytes(self) -> int:
        """What the vectors of a row take, at most."""
        return 2 * self.hidden_size

    @property
    def mirrored(self) -> bool:
        return self.config.mirror

    @property
    def generations(self) -> list[int]:
        """The cumulative row ends of the bank."""
        ends = [end for end in self.token_bank.manifest.generations or () if end <= self.rows]
        return ends if self.rows in ends else [*ends, self.rows]  # one that brought nothing new has the end of the one before

    @cached_property
    def shards(self) -> list[Shard]:
        return shard_ranges(self.generations, rows_a_shard(self.config.shard_rows, self.row_bytes))

    def shard_bytes(self, shard: Shard) -> int:
        return shard.rows * self.row_bytes + self._text_bytes * shard.rows // len(self.token_bank)

    @cached_property
    def _text_bytes(self) -> int:
        """The bytes that all text columns take on disk."""
        files: list[dict[str, Any]] = self.texts.manifest["files"]
        return sum(int(entry["bytes"]) for entry in files if entry["rows"] is not None)

    @property
    def beside(self) -> dict[str, int]:
        texts = self._text_bytes * self.rows // len(self.token_bank)
        keys = {"keys": 16 * self.rows}
        return keys | ({"mirror": self.rows * self.row_bytes + 2 * texts} if self.mirrored else {})

    @property
    def _lengths(self) -> npt.NDArray[np.int64]:
        """The tokens of every row."""
        return np.diff(self._offsets)

    @cached_property
    def _offsets(self) -> npt.NDArray[np.int64]:
        """Where the tokens of every row begin in those of all rows, and where the last ones end."""
        lengths = one_array(self.token_bank.slice(0, self.rows, ["length"])["length"]).to_numpy()
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def tokens(self, shard: Shard) -> int:
        return int(self._offsets[shard.stop] - self._offsets[shard.start])

    @property
    def counts(self) -> dict[str, int]:
        passes, ideal = batch_counts(self._lengths.astype(np.int32), self.shards, self.config.rules)
        return {"hidden_size": self.hidden_size, "forward_passes": passes, "forward_passes_with_one_sort": ideal}

    def seconds(self, progress: Progress) -> float | None:
        """Seconds for the whole plan, from batches spread evenly over the tokens of its first shard; a serving engine is not timed."""
        if self.vllm is not None:
            return None
        first = self.shards[0]
        values, offsets = list_values(one_array(self.token_bank.slice(0, first.stop, ["input_ids"])["input_ids"]))
        sample = _spread(list(batches(np.diff(offsets), self.config.rules)))
        with progress.phase("estimate", SAMPLED_BATCHES, unit="batches") as phase:
            encoder = self.job().encoder(0)
            encoder.encode(gather(values, offsets, sample[0]))  # the first pass pays for buffers and kernels
            start = time.perf_counter()
            for batch in sample:
                encoder.encode(gather(values, offsets, batch))
                phase.advance(1)
            spent = time.perf_counter() - start
        return spent / sum(len(batch.rows) * batch.length for batch in sample) * int(self._offsets[-1])

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return {
            "encoding_method": ENCODING_METHOD,
            "tokens": self.token_bank.content_digest,
            "texts": self.texts.content_digest,
            "model": self.model.recipe() if self.model else self._own_recipe(),
            "hidden_size": self.hidden_size,
            "normalize": self.config.normalize,
            "batches": self.config.rules.recipe(),
            "shard_rows": rows_a_shard(self.config.shard_rows, self.row_bytes),
            "generations": self.generations,
            "limit": self.config.limit,
            "mirror": self.mirrored,
            **self._dim,
            **({} if self.vllm is None else {"engine": self.vllm.recipe()}),
            **({"prompt_tokens_left_out": self.skip} if self.skip else {}),
            **({} if self.config.trial is None else {"trial": self.config.trial}),
            **({"onto": {"content": self.old.content_digest, "rows": len(self.old)}} if self.old else {}),
        }

    @property
    def _dim(self) -> dict[str, int]:
        return {} if self.config.dim is None else {"dim": self.config.dim}

    def _own_recipe(self) -> dict[str, str]:
        return {"name": self.config.model_path, "version": str(load_custom_encoder(self.config.model_path).version)}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The fields that trainers check, known before the work."""
        source, model = self.token_bank.manifest.json, self.config.model
        carried = {name: source[name] for name in CARRIED if name in source}
        if self.rows == len(self.token_bank):  # a part of a source never has the source's digest
            carried |= {name: value for name, value in source.items() if name.endswith("_sha256")}
        elif "kinds" in carried:
            found = pc.value_counts(self.texts.slice(0, self.rows, ["kind"])["kind"]).to_pylist()
            carried["kinds"] = {**dict.fromkeys(carried["kinds"], 0), **{one["values"]: one["counts"] for one in found}}
        return {
            **carried,
            "format_version": 2,
            "model_path": self.config.model_path,
            "max_key_tokens": source["max_tokens"],
            "hidden_size": self.hidden_size,
            "text_count": self.rows,
            "generations": self.generations,
            "limit": self.config.limit,
            "dtype": "float16_memmap",
            **(mirror_fields(self.rows) if self.mirrored else {}),
            "encoded_rows": 0,
            **({} if self.vllm is None else {"engine": self.vllm.facts()}),
            "effective_recipe": self.effective,
            "encoding": {
                **self.config.rules.recipe(),
                "backbone": model.backbone if model else "encoder",
                "normalize": self.config.normalize,
                **(self.model.recipe() if self.model else {}),
                **self._dim,
            },
        }

    @cached_property
    def skip(self) -> int:
        """The first tokens of each text that are not pooled: those of the prompt, where the model's folder leaves them out."""
        sentence = self.model.sentence if self.model else None
        return self.token_bank.manifest.prompt_tokens if sentence and not sentence.include_prompt else 0

    @cached_property
    def effective(self) -> str:
        """What the vectors are, in a line."""
        tokens, info = self.token_bank.manifest, self.model
        prompts = prompts_of(tokens)
        said = [
            f"{kind or 'other'}={prompt!r}" if tokens.prompts else repr(prompt) for kind, prompt in prompts.items() if prompt
        ]
        facts = [
            f"special tokens {'on' if tokens.special_tokens else 'off'}",
            f"prompt {', '.join(said) or 'none'}" + (" (not pooled)" if self.skip else ""),
            f"at most {tokens.max_tokens} tokens",
        ]
        if info is not None:
            modules = info.sentence.named_modules if info.sentence else []
            facts.append(f"pooling {info.pooling}")
            facts.append(f"modules {', '.join(modules)}" if modules else "no modules")
        facts += [f"normalized {'on' if self.config.normalize else 'off'}", f"{self.hidden_size} dimensions"]
        return "; ".join([*facts, *([info.dtype] if info else [])])

    def _check_as_asked(self) -> None:
        """InputError for tokens that were made otherwise than the model's folder asks for."""
        if self.config.model is None or self.config.as_tokenized:
            return
        from arrowbank.models import text_rules

        model, tokens = self.config.model, self.token_bank.manifest
        asked = text_rules(model.model, trust_remote_code=model.trust_remote_code)
        wrong = []
        if tokens.special_tokens != asked.special_tokens:
            found, wanted = ("with", "without") if tokens.special_tokens else ("without", "with")
            wrong.append(f"were made {found} special tokens, expected {wanted} (--special-tokens)")
        used, known = (
            set(prompts_of(tokens).values()),
            {*asked.prompts.values(), asked.default_prompt},
        )
        if asked.prompts and not used <= (known if asked.default_prompt else known | {""}):
            wrong.append(
                f"have the prompt {min(used - known)!r}, expected one of {', '.join(map(repr, sorted(known)))} (--prompt)"
            )
        longest = int(self._lengths.max(initial=0))
        if asked.max_tokens is not None and longest > asked.max_tokens:
            wrong.append(f"have up to {longest} in a text, expected at most {asked.max_tokens} (--max-tokens)")
        if (
            asked.max_tokens is not None
            and (tokens.max_tokens or 0) < asked.max_tokens
            and (tokens.counts or {}).get("truncated")
        ):
            wrong.append(f"were cut to {tokens.max_tokens} a text, expected {asked.max_tokens} (--max-tokens)")
        if wrong:
            raise InputError(
                f"{self.token_bank.folder}: its tokens {'; they '.join(wrong)}. {self.config.model_path!r} would give other vectors than "
                f"it was trained for. Tokenize with --tokenizer {self.config.model_path}, or take them as they are: --as-tokenized."
            )

    def check(self) -> None:
        self._check_as_asked()
        sentence = self.model.sentence if self.model else None
        if self.config.runner == "vllm" and sentence and (sentence.static or not sentence.include_prompt):
            raise InputError(
                f"--runner vllm: {self.config.model_path!r} is a table of vectors, or does not pool the tokens of a prompt, which is done "
                "by transformers only. Leave --runner out."
            )
        if sentence and not sentence.include_prompt and self.token_bank.manifest.prompts:
            raise InputError(
                f"{self.config.model_path}: does not pool the tokens of a prompt, and the kinds of texts in {self.token_bank.folder} have "
                "different prompts. Make a bank of each kind: arrowbank select TEXTS --where kind=KIND."
            )
        if len(empty := np.flatnonzero(self._lengths == 0)):
            raise InputError(
                f"{self.token_bank.folder}: {len(empty):,} texts have no token, since the tokenizer drops all their characters; a text "
                f"without tokens has no vector:{shown_texts(self.texts, empty)}\nTokenize with --special-tokens on, or leave them out: "
                f"arrowbank select {self.token_bank.folder} --where 'length>=1' --out DIR, then encode DIR."
            )
        limit, longest = self.model.max_positions if self.model else None, int(self._lengths.max(initial=0))
        if limit is not None and longest > limit:
            raise InputError(
                f"{self.token_bank.folder}: a text of {longest} tokens, but model {self.config.model_path!r} has {limit} positions. "
                f"Tokenize with --max-tokens {limit} or less."
            )
        if self.old:
            check_fits(self.old, self.recipe, self.manifest, texts=self.texts, tokens=self.token_bank)

    # the work

    def prepare(self, bank: BankWriter, options: RunOptions, progress: Progress) -> None:
        progress.message(f"{bank.folder}: {self.effective}")
        sentence = self.model.sentence if self.model else None
        if sentence and not sentence.normalizes and self.config.normalize:
            progress.message(
                "the model's folder does not normalize; vectors are stored with norm 1 (same cosine). --normalize off keeps its scale"
            )
        if self.old and (count := adopt(self.old, bank, options.chosen(self.shards))):
            progress.message(f"{bank.folder}: {count:,} rows are those of {self.old.folder}")
        if self.vllm is not None:
            enough = int(np.searchsorted(self._offsets, MOST_TOKENS))  # rows
            tokens = list_values(one_array(self.token_bank.slice(0, min(enough, self.rows), ["input_ids"])["input_ids"]))[0]
            longest = int(np.diff(self._offsets).max())
            self.vllm_job = prepare_vllm(self.vllm, bank, tokens[:MOST_TOKENS], longest, options, progress)

    def so_far(self, bank: BankWriter) -> dict[str, Any]:
        return {"encoded_rows": bank.done_rows}

    def job(self, drift: DriftCheck | None = None) -> EncodeJob:
        """The factory of workers."""
        return EncodeJob(self.config, self.token_bank, self.texts, self.model, self.skip, drift, self.vllm_job)

    def workers(self, bank: BankWriter) -> EncodeJob:
        self.token_bank.check_hashes()
        self.texts.check_hashes()
        return self.job(self._drift_check(bank.folder))

    def _drift_check(self, out: Path) -> DriftCheck | None:
        """What workers measure first, where the bank grows."""
        sample = DRIFT_SAMPLE if self.config.drift_sample is None else self.config.drift_sample
        if self.old is None or not sample:
            return None
        return DriftCheck(
            config=self.config,
            old=self.old,
            out=str(out.resolve()),
            sample=sample,
            min_cosine=MIN_COSINE if self.config.min_cosine is None else self.config.min_cosine,
        )

    @contextmanager
    def around(self, bank: BankWriter, *, last: bool, progress: Progress) -> Iterator[None]:
        """Say what workers have measured."""
        logged = (bank.folder / LOG).stat().st_size if self.old else 0
        yield
        if self.old and self.config.drift_sample != 0:
            for told in told_since(bank.folder, logged):
                progress.message(told)

    def never_committed(self, bank: BankWriter) -> str | None:
        if self.config.trial is None:
            return None
        return (
            f"a trial of {bank.done_rows:,} of {len(self.token_bank):,} rows, not committed; trainers refuse it. "
            "For the bank, run without --trial in another folder or with --restart."
        )

    def finish(self, bank: BankWriter, progress: Progress) -> Manifest:
        with progress.phase("mirror", self.rows) as phase:
            write_keys(bank, rows=self.rows)
            if self.mirrored:
                write_mirror(bank, rows=self.rows, width=self.hidden_size, report=phase.advance)
        engine = {} if self.vllm is None else {"engine": self.vllm.facts(bank.work_dir)}
        return bank.commit(rows=self.rows, manifest={"encoded_rows": self.rows, **engine})


class TokenEncodeStage(EncodeStage):
    """An encoding with a vector per token: other columns, no mirror, shards of fewer rows."""

    kind, mirrored = "token-features", False

    @property
    def what(self) -> str:
        return f"the bank of {self.rows:,} texts, {int(self._offsets[-1]):,} × {self.hidden_size} vectors"

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden_size * max(1, int(np.diff(self._offsets).max(initial=1)))

    def shard_bytes(self, shard: Shard) -> int:
        texts = self._text_bytes * shard.rows // len(self.token_bank)
        return self.tokens(shard) * 2 * self.hidden_size + 4 * shard.rows + texts

    @cached_property
    def manifest(self) -> dict[str, Any]:
        trainers = ("format_version", "dtype")  # of the mirror
        found = {name: value for name, value in super().manifest.items() if name not in trainers}
        return {**found, "tokens": int(self._offsets[-1])}


def stage_of(config: EncodeConfig, tokens: TokensBank, texts: str | Path | None = None) -> EncodeStage:
    """The encoding that `config` asks for."""
    return (TokenEncodeStage if config.per_token else EncodeStage)(config, tokens, texts)


def _spread(planned: list[Batch]) -> list[Batch]:
    """Batches at evenly spaced places of the tokens, so that short and long ones have their share."""
    ends = np.cumsum([len(batch.rows) * batch.length for batch in planned])
    places = (np.arange(SAMPLED_BATCHES) + 0.5) / SAMPLED_BATCHES * ends[-1]
    return [planned[index] for index in np.searchsorted(ends, places)]
