"""One shard of a feature bank: tokens in, a record batch of float16 vectors out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from arrowbank import engine
from arrowbank.bank import Bank, BankWriter, FeatureBank, open_bank
from arrowbank.bank.columns import fixed_list_column, one_array
from arrowbank.bank.files import require_space
from arrowbank.bank.kinds.tokens import TokensBank
from arrowbank.bank.manifest import LOG, Manifest, ranges
from arrowbank.bank.mirror import mirror_fields, write_keys, write_mirror
from arrowbank.bank.opening import open_texts_behind
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explains
from arrowbank.engine.plan import Batch, Shard, rows_a_shard, shard_ranges
from arrowbank.errors import BadVector, InputError
from arrowbank.features.config import (
    DRIFT_SAMPLE,
    ENCODING_METHOD,
    MIN_COSINE,
    EncodeConfig,
    Encoder,
    RunOptions,
    check_options,
    load_custom_encoder,
)
from arrowbank.features.grow import DriftCheck, adopt, check_fits, open_old, told_since
from arrowbank.features.vectors import encoded, finish
from arrowbank.models import local_model
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
    processes: int = 1
    drift: DriftCheck | None = None

    def __call__(self, number: int) -> ShardEncoder:
        if self.processes > 1:  # they share the cores; the bits of a vector do not depend on how many there are
            torch.set_num_threads(max(1, torch.get_num_threads() // self.processes))
        encoder = self.encoder(number)
        if self.drift:
            self.drift(encoder, self.tokens)
        return ShardEncoder(self.config, encoder, self.tokens, self.texts)

    def encoder(self, number: int) -> Encoder:
        """The frozen model of worker `number`."""
        if self.config.model is None:
            return load_custom_encoder(str(self.config.encoder))
        from arrowbank.models import load_encoder  # transformers is not needed for an encoder of the user's own

        return load_encoder(self.config.model, worker=number, info=self.info)


class ShardEncoder:
    """A worker that holds the model and the two banks it reads."""

    def __init__(self, config: EncodeConfig, encoder: Encoder, tokens: Bank, texts: Bank) -> None:
        self._config, self._encoder, self._tokens, self._texts = config, encoder, tokens, texts

    def __call__(self, shard: Shard, report: Callable[[int], None]) -> pa.RecordBatch:
        """Columns text, kind, sha1, length, features (fixed_size_list<float16>[D]) of the shard's rows. Reports tokens."""
        columns: dict[str, pa.Array] = {
            name: one_array(self._texts.slice(shard.start, shard.stop, [name])[name]) for name in TEXT_COLUMNS
        }
        tokens = self._tokens.slice(shard.start, shard.stop, ["input_ids", "length"])
        columns["length"] = one_array(tokens["length"])
        vectors = self._vectors(shard, one_array(tokens["input_ids"]), report)
        columns["features"] = fixed_list_column(vectors)
        return pa.record_batch(columns)

    def _vectors(self, shard: Shard, input_ids: pa.Array, report: Callable[[int], None]) -> npt.NDArray[np.float16]:
        out = np.empty((shard.rows, self._encoder.hidden_size), np.float16)
        for batch, vectors in encoded(self._encoder, input_ids, self._config.rules):
            half, good = finish(vectors, normalize=self._config.normalize)
            if not good.all():
                self._refuse(shard, batch, vectors, good)
            out[batch.rows] = half
            report(len(batch.rows) * batch.length)
        return out

    def _refuse(self, shard: Shard, batch: Batch, vectors: npt.NDArray[np.float32], good: npt.NDArray[np.bool_]) -> None:
        bad = np.flatnonzero(~good)
        rows = shard.start + batch.rows[bad]
        what = "all zero" if not vectors[bad[0]].any() else "not finite in float16 (NaN, Inf or past 65504)"
        shown = [
            f"\n  row {row}: {self._texts.slice(int(row), int(row) + 1, ['text'])['text'][0].as_py()[:80]!r}"
            for row in rows[:SHOWN_TEXTS]
        ]
        layer = self._config.model.layer if self._config.model else "the encoder's"
        raise BadVector(
            f"shard {shard.index}: {len(bad)} vectors of {batch.length} tokens are {what} (layer {layer}):{''.join(shown)}\n"
            "Nothing of this shard was kept. Such a vector comes from the model or its dtype: try --dtype float32 or bfloat16, "
            "or check the weights."
        )


def text_bytes(texts: Bank) -> int:
    """The bytes that the text columns take on disk."""
    names: list[dict[str, Any]] = texts.manifest["files"]
    return sum(int(entry["bytes"]) for entry in names if entry["rows"] is not None)


CARRIED = ("sources", "fields", "kinds", "tokenizer", "tokenizer_fingerprint", "special_tokens", "prompt")


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

    `texts` is the texts bank, where it no longer lies where `tokens` says. What is finished from an earlier run of the same
    plan is kept. The bank is committed when every shard is there, by whichever run makes the last one.

    Raises InputError, IncompleteBank or CorruptBank for the banks read, PlanMismatch and BankLocked for `out`, DiskFull,
    BadVector (NaN, Inf, all zero), WorkerDied; for a bank that grows also PlanMismatch where the old one (`config.onto`) was made
    otherwise, and ContractError where this environment no longer gives its vectors.
    """
    options = options or RunOptions()
    check_options(options, grows=config.onto is not None)
    plan = EncodePlan(config, open_bank(tokens, kind=TokensBank), texts)
    require_separate([("--out", out)], [("TOKENS", plan.tokens), ("--texts", plan.texts_folder), *inputs_of(config)])
    if plan.old:
        check_fits(plan.old, plan.recipe, plan.manifest, texts=plan.texts, tokens=plan.tokens)
    chosen = plan.chosen(options)
    with BankWriter(
        out,
        kind="features",
        recipe=plan.recipe,
        manifest=plan.manifest,
        restart=options.restart,
        worker=options.worker[0] if options.worker else None,
        redo=options.shards or (),
    ) as bank:
        if bank.committed:
            progress.message(f"{bank.folder}: already complete, nothing to do")
            return open_bank(bank.folder).manifest.json
        if plan.old and (count := adopt(plan.old, bank, chosen)):
            progress.message(f"{bank.folder}: {count:,} rows are those of {plan.old.folder}")
        bank.save_progress(encoded_rows=bank.done_rows)
        require_space(bank.folder, plan.bytes_to_write(bank), f"the bank of {plan.rows:,} × {plan.hidden_size} vectors")
        _make_shards(plan, chosen, bank, options, progress)
        return _finish(plan, bank, options, progress)


def inputs_of(config: EncodeConfig) -> list[Named]:
    """What an encoding reads beside the tokens and their texts."""
    return [("--model", local_model(config.model.model) if config.model else None), ("--onto", config.onto)]


@dataclass
class EncodePlan:
    """Everything that is fixed before the first forward pass: shards, recipe, and what the manifest says of them."""

    config: EncodeConfig
    tokens: TokensBank
    texts_folder: str | Path | None = None

    @cached_property
    def texts(self) -> Bank:
        """The texts bank behind the tokens; InputError when it is gone or another one."""
        return open_texts_behind(self.tokens, self.texts_folder)

    @cached_property
    def info(self) -> ModelInfo | None:
        """What is known of the transformers model; None for a user's own encoder."""
        if self.config.model is None:
            return None
        from arrowbank.models import describe

        return describe(self.config.model)

    @cached_property
    def old(self) -> FeatureBank | None:
        """The bank that grows, where one does."""
        return open_old(self.config.onto) if self.config.onto is not None else None

    @property
    def hidden_size(self) -> int:
        return self.info.hidden_size if self.info else int(load_custom_encoder(self.config.model_path).hidden_size)

    @property
    def rows(self) -> int:
        """How many rows the bank will have."""
        return min(len(self.tokens), self.config.limit or len(self.tokens))

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden_size

    @cached_property
    def shards(self) -> list[Shard]:
        ends = sorted({min(end, self.rows) for end in self.tokens.manifest.generations or ()})
        return shard_ranges(ends, rows_a_shard(self.config.shard_rows, self.row_bytes))

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Everything that decides the bytes; hashed into the plan digest."""
        return {
            "encoding_method": ENCODING_METHOD,
            "tokens": self.tokens.content_digest,
            "texts": self.texts.content_digest,
            "model": self.info.recipe() if self.info else self._own_recipe(),
            "hidden_size": self.hidden_size,
            "normalize": self.config.normalize,
            "batches": self._batch_rules,
            "shard_rows": rows_a_shard(self.config.shard_rows, self.row_bytes),
            "generations": self.tokens.manifest.generations,
            "limit": self.config.limit,
            "mirror": self.config.mirror,
            **({"onto": {"content": self.old.content_digest, "rows": len(self.old)}} if self.old else {}),
        }

    def _own_recipe(self) -> dict[str, str]:
        return {"name": self.config.model_path, "version": str(load_custom_encoder(self.config.model_path).version)}

    @property
    def _batch_rules(self) -> dict[str, Any]:
        rules = self.config.rules
        return {"max_batch": rules.max_batch, "token_budget": rules.token_budget, "grouping": "exact_token_length"}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The fields that trainers check, known before the work."""
        source = self.tokens.manifest.json
        model = self.config.model
        carried = {name: source[name] for name in (*CARRIED, *_hash_fields(source)) if name in source}
        return {
            **carried,
            "format_version": 2,
            "model_path": self.config.model_path,
            "max_key_tokens": source["max_tokens"],
            "hidden_size": self.hidden_size,
            "text_count": len(self.tokens),
            "generations": source["generations"],
            "limit": self.config.limit,
            "dtype": "float16_memmap",
            **(mirror_fields(self.rows) if self.config.mirror else {}),
            "encoded_rows": 0,
            "encoding": {
                **self._batch_rules,
                "backbone": model.backbone if model else "encoder",
                "normalize": self.config.normalize,
                **(self.info.recipe() if self.info else {}),
            },
        }

    def chosen(self, options: RunOptions) -> list[Shard]:
        """The shards that this run is to make, where they are not there yet."""
        shards = self.shards
        if options.shards is not None:
            if unknown := sorted(set(options.shards) - set(range(len(shards)))):
                raise InputError(f"--shards: there is no shard {unknown[0]}; this plan has shards 0 to {len(shards) - 1}.")
            shards = [shard for shard in shards if shard.index in options.shards]
        if options.rows is not None:
            start, stop = options.rows
            if not 0 <= start < stop <= self.rows:
                raise InputError(f"--rows {start}:{stop}: must lie within 0:{self.rows}, start before end.")
            shards = [shard for shard in shards if shard.start < stop and start < shard.stop]
        if options.worker is not None:
            number, count = options.worker
            shards = [shard for shard in shards if shard.index % count == number]
        return shards

    def token_count(self, shard: Shard) -> int:
        """The tokens of a shard: what its time goes by."""
        return int(pc.sum(self.tokens.slice(shard.start, shard.stop, ["length"])["length"]).as_py())

    def job(self, *, processes: int = 1, drift: DriftCheck | None = None) -> EncodeJob:
        """What a worker needs, `processes` of which share this machine's cores."""
        return EncodeJob(self.config, self.tokens, self.texts, self.info, processes, drift)

    def drift_check(self, out: Path, options: RunOptions) -> DriftCheck | None:
        """What workers measure first, where the bank grows."""
        sample = DRIFT_SAMPLE if options.drift_sample is None else options.drift_sample
        if self.old is None or not sample:
            return None
        return DriftCheck(
            config=self.config,
            old=self.old,
            out=str(out.resolve()),
            sample=sample,
            min_cosine=MIN_COSINE if options.min_cosine is None else options.min_cosine,
        )

    def bytes_to_write(self, bank: BankWriter) -> int:
        """About how much `bank` still lacks: shards, mirror, keys."""
        missing = self.rows - bank.done_rows
        texts = text_bytes(self.texts)
        shards = missing * self.row_bytes + texts * missing // len(self.tokens)
        beside = 16 * self.rows + (self.rows * self.row_bytes + 2 * texts if self.config.mirror else 0)
        there = sum(receipt.bytes for receipt in bank.receipts.values() if receipt.shard is None)
        return shards + max(0, beside - there)


def _hash_fields(manifest: Manifest) -> list[str]:
    return [name for name in manifest if name.endswith("_sha256")]


def _make_shards(plan: EncodePlan, chosen: Sequence[Shard], bank: BankWriter, options: RunOptions, progress: Progress) -> None:
    done = bank.done_shards
    todo = [shard for shard in chosen if shard.index not in done]
    if not todo:
        return
    adopted = len(plan.old.shard_names) if plan.old else 0
    if kept := [shard for shard in chosen if shard.index in done and shard.index >= adopted]:
        progress.message(f"{bank.folder}: {len(kept)} of {len(chosen)} shards are there, going on with the rest")
    plan.tokens.check_hashes()
    plan.texts.check_hashes()
    for note in plan.info.notes if plan.info else ():
        progress.message(note)
    workers = min(options.workers or (plan.info.devices if plan.info else 1), len(todo))
    drift = plan.drift_check(bank.folder, options)
    job = plan.job(processes=workers if options.engine == "local" else 1, drift=drift)
    logged = (bank.folder / LOG).stat().st_size if drift else 0
    tokens = sum(plan.token_count(shard) for shard in todo)
    with progress.phase("encode", tokens, unit="tokens", texts=sum(shard.rows for shard in todo)) as phase:
        engine.run(
            todo,
            job,
            bank,
            engine=options.engine,
            workers=workers,
            ray_address=options.ray_address,
            gpus=1 if plan.info and plan.info.device.startswith("cuda") else 0,
            report=phase.advance,
            progress=progress,
        )
    for told in told_since(bank.folder, logged) if drift else ():
        progress.message(told)


def _finish(plan: EncodePlan, bank: BankWriter, options: RunOptions, progress: Progress) -> Manifest:
    """Commit when every row is there; else say what is missing. The manifest."""
    if options.worker is not None:
        bank.refresh()
    if bank.done_rows < plan.rows or plan.config.limit is not None:
        bank.save_progress(encoded_rows=bank.done_rows)
        progress.message(_unfinished(plan, bank.done_shards, bank))
        return bank.manifest
    with progress.phase("mirror", plan.rows) as phase:
        write_keys(bank, rows=plan.rows)
        if plan.config.mirror:
            write_mirror(bank, rows=plan.rows, width=plan.hidden_size, report=phase.advance)
    return bank.commit(rows=plan.rows, manifest={"encoded_rows": plan.rows})


def _unfinished(plan: EncodePlan, done: Collection[int], bank: BankWriter) -> str:
    if plan.config.limit is not None:
        return (
            f"{bank.folder}: a trial of {bank.done_rows:,} of {len(plan.tokens):,} rows, not committed; trainers refuse it. "
            "For the bank, run without --limit in another folder or with --restart."
        )
    missing = [shard.index for shard in plan.shards if shard.index not in done]
    return (
        f"{bank.folder}: {bank.done_rows:,} of {plan.rows:,} rows are there; shards {ranges(missing)} of {len(plan.shards)} "
        "are missing. The bank is committed by the run that makes the last one."
    )
