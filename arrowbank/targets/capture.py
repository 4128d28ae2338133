"""The stage `targets capture`: samples and a frozen model in, a target bank of hidden states out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import BankWriter
from arrowbank.bank.bad_states import refuse_bad_states
from arrowbank.bank.floats import Bits
from arrowbank.bank.kinds.targets_bank import TargetFacts, TargetSample, manifest_of, needed_positions
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.places import Named
from arrowbank.bank.refusals import explains
from arrowbank.engine.plan import SHARD_BYTES, BatchRules, Shard, batches, gather
from arrowbank.engine.stage import Estimate, RunOptions
from arrowbank.errors import InputError
from arrowbank.inputs.lines import MAX_LINE_BYTES, MaxLineBytes, OnBadLine
from arrowbank.inputs.records import Records
from arrowbank.inputs.sources import source_places
from arrowbank.models import ModelConfig, describe, load_tokenizer, local_model, tokenizer_fingerprint
from arrowbank.models.vllm_engine import MOST_TOKENS, EngineConfig, Vllm
from arrowbank.models.vllm_runner import Runner, VllmJob, VllmStates, check_runner, find_engine, prepare_vllm
from arrowbank.models.vllm_server import serve_command
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Count, Flag, Help, Natural, Old, Part, Place, Settings, checked, refuse_unread
from arrowbank.targets.conversations import ChatTokenizer
from arrowbank.targets.shards import (
    ShardColumns,
    StoredAs,
    StoredSpans,
    TargetStage,
    check_layers,
    publish_tally,
    target_shards,
)
from arrowbank.targets.target_rows import (
    ASSISTANT_TOKENS,
    PreparedRows,
    RowMaker,
    RowRules,
    loss_mask_rule,
    prepare,
    samples_at,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from arrowbank.models import ModelConfig, ModelInfo
    from arrowbank.models.taps import HiddenStates


Report = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class CaptureJob:
    """How a process becomes a worker. Everything here pickles; the model is loaded by the worker itself.

    rows      the file of prepared rows
    tallies   the folder for the counts of shards
    vllm      how a worker gets its vLLM; None where transformers runs the model
    """

    model: ModelConfig
    info: ModelInfo
    facts: TargetFacts
    rules: BatchRules
    rows: Path
    tallies: Path
    vllm: VllmJob | None = None

    def __call__(self, number: int) -> ShardCapturer:
        from arrowbank.models import load_taps

        if self.vllm is not None:
            return ShardCapturer(self, self.vllm.load(number))
        layers = self.facts.target_layer_ids or ()
        states = load_taps(self.model, layers, self.facts.last_hidden_norm, worker=number, info=self.info)
        return ShardCapturer(self, states)


class ShardCapturer:
    """A worker that holds the model and the prepared rows."""

    def __init__(self, job: CaptureJob, states: HiddenStates | VllmStates) -> None:
        self.job, self.states = job, states
        self._rows = PreparedRows(job.rows)

    def __call__(self, shard: Shard, report: Report) -> pa.RecordBatch:
        """The columns of a target bank for the shard's rows, all in memory; its counts are published. Reports tokens.

        Raises BadVector for hidden states that are NaN, Inf, zero or constant.
        """
        facts = self.job.facts
        rows = CapturedRows(facts, *self._rows.of(shard), place=self.job.info.model)
        columns = ShardColumns(rows, Shard(shard.index, 0, shard.rows), facts, keep_nonfinite=False)
        if facts.codec == "bf16" and facts.spans == "all":  # straight into the columns' memory
            rows.taps, rows.last = columns.taps, columns.last
            self._capture(rows, report)
        else:
            tokens = len(rows.input_ids)
            rows.taps = np.empty((tokens, facts.layers * facts.hidden_size), np.uint16)
            rows.last = np.empty((tokens, facts.hidden_size), np.uint16)
            self._capture(rows, report)
            columns.fill()
        publish_tally(self.job.tallies, shard.index, columns.tally)
        return columns.batch()

    def _capture(self, rows: CapturedRows, report: Report) -> None:
        """Fill `rows` with their hidden states."""
        import torch

        plan = list(batches(np.diff(rows.offsets), self.job.rules))
        streamed = self.states.stream(gather(rows.input_ids, rows.offsets, batch) for batch in plan)
        for batch, states in zip(plan, streamed, strict=True):
            bits = states.view(torch.int16).numpy().view(np.uint16)
            for row, hidden in zip(batch.rows, bits, strict=True):
                tokens = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
                self._look(rows.names[row], hidden, rows.input_ids[tokens])
                rows.taps[tokens] = hidden[:, :-1].reshape(batch.length, -1)
                rows.last[tokens] = hidden[:, -1]
            report(len(batch.rows) * batch.length)

    def _look(self, name: str, hidden: Bits, ids: npt.NDArray[np.int32]) -> None:
        """BadVector for the hidden states of a sample [S, L + 1, H] that are NaN, Inf, zero or constant."""
        refuse_bad_states(
            f"sample {name}: model {self.job.info.model!r}, computing in {self.job.info.dtype}",
            hidden.reshape(len(hidden), -1),
            [*self.job.facts.layer_names, "last"],
            ids,
            remedy="Nothing of this shard was kept. Such values come from the model or its dtype: try --dtype bfloat16 or float32, "
            "check the weights, or leave the sample out.",
        )


@dataclass
class CapturedRows:
    """The rows of a shard in memory, as `TargetRows`: flat tokens, and a token's hidden states as a row of `taps` and of `last`."""

    facts: TargetFacts
    names: list[str]
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int32]
    place: str
    taps: Bits = field(default_factory=lambda: np.empty((0, 0), np.uint16))  # until they are captured
    last: Bits = field(default_factory=lambda: np.empty((0, 0), np.uint16))
    digest: str = ""  # they live too briefly to be told from others

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets).astype(np.int64)

    def read(self, row: int) -> TargetSample:
        tokens = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return TargetSample(
            self.names[row], self.input_ids[tokens], self.loss_mask[tokens], self.taps[tokens], self.last[tokens]
        )


METHOD = 1  # raise it when the same samples and weights would give other bytes


@dataclass(frozen=True, kw_only=True)
class CaptureConfig(Settings):
    """What is captured of which samples. Raises InputError for a value that no capture could take."""

    model: Annotated[ModelConfig, Part(without=("pooling", "layer", "backbone"))]
    data: Annotated[
        str | Path,
        Flag("--source"),
        Help("Conversations or token rows: a file, folder, saved dataset or address.", "[NAME=]PATH"),
        Old("--data"),
    ]
    target_layer_ids: Annotated[
        tuple[int, ...],
        Flag("--layers"),
        Help("Blocks whose output is in the taps: 1,17,32 (−1: embeddings).", example="1,17,32"),
    ]
    tokenizer: Annotated[Place, Help("A folder or hub name. Default: the model's.", "M")] | None = None
    target_model: (
        Annotated[str, Help("Name of the target model, exactly as the trainer will be given it. Default: --model's.", "NAME")]
        | None
    ) = None
    max_length: Annotated[Count, Help("Tokens kept of a sample.")] = 2048
    min_loss_tokens: Annotated[Natural, Help("Samples with fewer are dropped.")] = 14
    last_hidden_norm: Annotated[Literal["post", "pre"], Help("Last states: after or before final norm.")] = "post"
    runner: Runner = "transformers"
    engine: EngineConfig = field(default_factory=EngineConfig)
    codec: StoredAs = "bf16"
    spans: StoredSpans = "all"
    rules: BatchRules = field(default_factory=BatchRules)
    limit: Annotated[Count, Help("Only the first N samples.")] | None = None
    max_shard_bytes: Annotated[Count, Help("Largest size of a shard. Default: 512 MiB.")] | None = None
    max_line_bytes: MaxLineBytes = MAX_LINE_BYTES
    on_bad_line: OnBadLine | None = None
    source_name: Annotated[str, Flag("")] | None = None

    def check(self) -> None:
        check_layers(self.target_layer_ids)
        check_runner(self.runner, self.engine, self.model, self.rules)


class CaptureStage(TargetStage):
    """Everything that is fixed before the first forward pass. Raises InputError for a model or data that cannot be used."""

    phase = "capture"

    def __init__(self, config: CaptureConfig) -> None:
        self.config = config
        self.lengths = self.needed = np.empty(0, np.int64)  # until the rows are counted or prepared
        self.vllm_job: VllmJob | None = None

    @property
    def inputs(self) -> list[Named]:
        models = [("--model", local_model(self.config.model.model)), ("--tokenizer", local_model(self.config.tokenizer))]
        return [*source_places("--source", self.config.data), *models]

    @cached_property
    def model(self) -> ModelInfo:
        """The model; InputError where it lacks a layer that is asked for."""
        info = describe(self.config.model)
        if (highest := self.config.target_layer_ids[-1]) >= info.num_layers:
            raise InputError(
                f"--layers {','.join(map(str, self.config.target_layer_ids))}: there is no block {highest}, {info.model!r} has "
                f"{info.num_layers}; expected ids from 0 to {info.num_layers - 1}, or −1 for the embeddings."
            )
        return info

    @cached_property
    def vllm(self) -> Vllm | None:
        """The serving engine; InputError where it is not there, or cannot run this model."""
        if self.config.runner != "vllm":
            return None
        return find_engine(
            self.config.engine, self.config.model, self.model, self.config.target_layer_ids, self.config.last_hidden_norm
        )

    def check(self) -> None:
        _ = self.vllm

    def default_workers(self, todo: Sequence[Shard]) -> int:
        return super().default_workers(todo) if self.vllm is None else self.vllm.workers

    @property
    def gpus(self) -> int:
        if self.vllm is None:
            return super().gpus
        return self.config.engine.tensor_parallel if self.vllm.device == "cuda" else 0

    @cached_property
    def records(self) -> Records:
        config = self.config
        skips = config.on_bad_line == "skip"
        records = samples_at(config.data, name=config.source_name, max_line_bytes=config.max_line_bytes, skip_bad_lines=skips)
        records.refuse_unread(config)
        return records

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """What makes the tokens; None where the data are tokens already."""
        if self.facts.loss_mask != ASSISTANT_TOKENS:
            refuse_unread(f"{self.config.data}, which holds token rows", self.config, ["tokenizer"])
            return None
        return load_tokenizer(self._tokenizer_name, trust_remote_code=self.config.model.trust_remote_code)

    @cached_property
    def chat(self) -> ChatTokenizer | None:
        return None if self.tokenizer is None else ChatTokenizer(self.tokenizer, self._tokenizer_name)

    @property
    def _tokenizer_name(self) -> str:
        return self.config.tokenizer or self.config.model.model

    @cached_property
    def facts(self) -> TargetFacts:
        config, info = self.config, self.model
        return TargetFacts(
            target_layer_ids=config.target_layer_ids,
            layers=len(config.target_layer_ids),
            hidden_size=info.hidden_size,
            target_model_name_or_path=config.target_model or config.model.model,
            last_hidden_norm=config.last_hidden_norm,
            loss_mask=loss_mask_rule(self.records),
            codec=config.codec,
            spans=config.spans,
            vocab_size=info.vocab_size,
            num_hidden_layers=info.num_layers,
        )

    def maker(self) -> RowMaker:
        """What makes the token rows."""
        rules = RowRules(
            loss_mask=self.facts.loss_mask,
            max_length=self.config.max_length,
            min_loss_tokens=self.config.min_loss_tokens,
            limit=self.config.limit,
            vocab_size=self.model.vocab_size,
            max_positions=self.model.max_positions,
            model=self.model.model,
        )
        return RowMaker(self.records, rules, self.chat)

    @cached_property
    def sources(self) -> dict[str, Any]:
        """What the rows are made of and by, as the manifest names it."""
        return {
            "data_sha256": self.records.sha256,
            "tokenizer_fingerprint": None if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer),
            "chat_template_sha256": None if self.chat is None else self.chat.template_sha256,
            "max_length": self.config.max_length,
            "min_loss_tokens": self.config.min_loss_tokens,
            "limit": self.config.limit,
        }

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return {
            "method": METHOD,
            "model": {name: value for name, value in self.model.recipe().items() if name not in ("layer", "pooling")},
            "batches": self.config.rules.recipe(),
            "shard_bytes": self.config.max_shard_bytes or SHARD_BYTES,
            "on_bad_line": self.config.on_bad_line or "error",
            **self.sources,
            **manifest_of(self.facts),
            **({} if self.vllm is None else {"engine": self.vllm.recipe()}),
        }

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The fields that are known before the work."""
        return {
            **manifest_of(self.facts),
            **self.sources,
            "text_count": None,  # known when the rows are prepared
            "source": self.config.source_name or self.records.source.path.name,
            "model_fingerprint": self.model.fingerprint,
            "dtype": self.model.dtype,
            "quantisation": self.model.quantisation,
            **({} if self.vllm is None else {"engine": self.vllm.facts()}),
        }

    @cached_property
    def shards(self) -> list[Shard]:
        return target_shards(self.lengths, self.facts, self.config.max_shard_bytes)

    def measure(self, progress: Progress) -> None:
        """Count the tokens of every row, by the samples themselves."""
        lengths, needed = list[int](), list[int]()
        with progress.phase("measure", None, unit="samples") as phase:
            for row in self.maker():
                lengths.append(len(row.input_ids))
                needed.append(len(needed_positions(row.loss_mask)))
                phase.advance(1)
        self.lengths, self.needed = np.array(lengths, np.int64), np.array(needed, np.int64)

    def prepare(self, bank: BankWriter, options: RunOptions, progress: Progress) -> None:
        if self.chat and self.chat.dated:
            progress.message("the chat template writes today's date into samples: another day gives other tokens")
        self.rows, self.row_counts = prepare(bank.work_dir, bank.plan_digest, self.maker(), progress)
        self.lengths, self.needed = self.rows.lengths, self.rows.needed
        if self.vllm is not None:
            tokens, longest = self.rows.first_tokens(MOST_TOKENS), int(self.lengths.max())
            self.vllm_job = prepare_vllm(self.vllm, bank, tokens, longest, options, progress)

    def bytes_to_write(self, bank: BankWriter, todo: Sequence[Shard], *, last: bool) -> int:
        scratch = self.vllm.scratch_bytes(max(map(self.tokens, todo))) if self.vllm and todo else 0
        return super().bytes_to_write(bank, todo, last=last) + scratch

    def so_far(self, bank: BankWriter) -> dict[str, Any]:
        return {"text_count": len(self.rows)}

    def workers(self, bank: BankWriter) -> CaptureJob:
        return CaptureJob(
            model=self.config.model,
            info=self.model,
            facts=self.facts,
            rules=self.config.rules,
            rows=self.rows.path,
            tallies=bank.work_dir,
            vllm=self.vllm_job,
        )

    def finish(self, bank: BankWriter, progress: Progress) -> Manifest:
        counts = self.row_counts
        dropped, more = (
            {"few_loss_tokens": counts.few_loss_tokens},
            {"truncated": counts.truncated, "bad_lines": counts.bad_lines},
        )
        return self.commit(bank, dropped, **more)

    def decided(self, bank: BankWriter) -> dict[str, Any]:
        return {} if self.vllm is None else {"engine": self.vllm.facts(bank.work_dir)}


@explains("out")
@checked
def capture(
    config: CaptureConfig, out: str | Path, *, options: RunOptions | None = None, progress: Progress = SILENT
) -> Manifest:
    """Capture the hidden states of `config.model` for `config.data` into the target bank `out`; its manifest, `complete` or not.

    Resumes where an earlier run stopped.

    Raises InputError (model, data, a model that cannot be tapped), BadVector (NaN, Inf, zero or constant), PlanMismatch,
    BankLocked, DiskFull, WorkerDied.
    """
    return CaptureStage(config).run(out, options, progress)


@checked
def estimate_capture(
    config: CaptureConfig, out: str | Path, *, options: RunOptions | None = None, progress: Progress = SILENT
) -> Estimate:
    """What `capture` with the same arguments makes, by the samples themselves. Nothing is written, no weight is loaded.

    Raises what `capture` raises for a model or data that cannot be used.
    """
    return CaptureStage(config).estimate(out, options, progress=progress)


@checked
def capture_serve_command(config: CaptureConfig, out: str | Path) -> str:
    """The shell command of a vLLM server that `capture` with `vllm_url` can use for the bank `out`. A server on a CPU needs code, which is
    written to `OUT.states/code`.

    Raises InputError where vLLM is not there, or cannot run this model.
    """
    from arrowbank.models.engine_probe import LENGTHS

    stage = CaptureStage(config)
    if stage.vllm is None or config.engine.vllm_url is not None:
        raise InputError("--print-serve-command: is for --runner vllm without --vllm-url. Change these options.")
    vllm, most = stage.vllm, max(config.max_length, LENGTHS[0])
    return serve_command(vllm, out, min(most, vllm.info.max_positions or most) + 1)
