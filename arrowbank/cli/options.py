"""The options of the verbs, in groups that several verbs share: one declaration each, so that they mean and say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from arrowbank.cli.parameters import Common as Common
from arrowbank.errors import InputError
from arrowbank.inputs.lines import MAX_LINE_BYTES
from arrowbank.settings import Old, Positive, checked_value, refuse_unread

if TYPE_CHECKING:
    from arrowbank.engine.stage import RunOptions as Run
    from arrowbank.features.config import EncodeConfig
    from arrowbank.features.scan import ScanConfig
    from arrowbank.features.tokenize import TokenizeConfig
    from arrowbank.models import ModelConfig
    from arrowbank.targets.capture import CaptureConfig
    from arrowbank.targets.importer import ImportConfig

BUILD = "Content options"
RUN = "Execution options"

Config = TypeVar("Config")


def _build(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=BUILD, **settings)


def _run(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=RUN, **settings)


Out = Annotated[str, typer.Option("--out", metavar="DIR", help="The bank's folder.")]
Restart = Annotated[bool, _run("--restart", help="Throw away what the folder holds and begin again.")]
Tokenizer = Annotated[str | None, _build("--tokenizer", metavar="M", help="A folder or hub name. Default: the model's.")]
OntoTexts = Annotated[
    str | None, _build("--onto", metavar="DIR", help="A texts bank whose rows stay; unseen texts are added behind.")
]
OntoFeatures = Annotated[
    str | None, _build("--onto", metavar="DIR", help="A feature bank of the first rows: its shards are taken over.")
]
OntoBuild = Annotated[
    str | None, _build("--onto", metavar="DIR", help="A folder that build made: only texts that it lacks are encoded.")
]
TextsFolder = Annotated[str | None, _run("--texts", metavar="DIR", help="The texts bank, if it was moved.")]
TrustRemoteCode = Annotated[bool, _build("--trust-remote-code", help="Run code that comes with the model.")]
DryRun = Annotated[bool, _run("--dry-run", help="Only say how much it will take. Exit code 1 if it does not fit.")]
Workers = Annotated[int | None, _run("--workers", help="Number of worker processes. Default: automatic, such as one per GPU.")]
WorkerPart = Annotated[str | None, _run("--worker", metavar="I/N", help="This job's part in a job array.")]
BudgetGb = Annotated[float | None, _run("--budget-gb", help="Refuse to start if the bank takes more (10^9 bytes).")]


OnBadLine = Annotated[
    str | None, _build("--on-bad-line", metavar="error|skip", show_default="error", help="What a line does that is no record.")
]


MaxLineBytes = Annotated[
    int | None, _run("--max-line-bytes", show_default=str(MAX_LINE_BYTES), help="A longer line of a source is an error.")
]


@dataclass
class ScanOptions:
    """What decides a texts bank."""

    source: Annotated[
        list[str],
        _build(
            "--source",
            metavar="NAME=PATH",
            help="A split, and a file, folder, saved dataset or address of records; repeat it.",
        ),
    ]
    field: Annotated[
        list[str] | None,
        _build(
            "--field",
            metavar="KIND=PATH",
            help="Where texts of a kind are; repeat it. Default: query=query, candidate=candidates[].text",
        ),
    ] = None
    strict: Annotated[bool, _build("--strict", help="A query or text that is not a string is an error, not skipped.")] = False
    on_bad_line: OnBadLine = None
    max_line_bytes: MaxLineBytes = None

    def config(self, onto: str | None = None) -> ScanConfig:
        from arrowbank.features.scan import ScanConfig

        return make(
            ScanConfig,
            self,
            sources=sources(self.source),
            fields=pairs("--field", self.field) or None,
            onto=onto,
        )


@dataclass
class TokenizeOptions:
    """What decides a tokens bank, beside the tokenizer."""

    max_tokens: Annotated[int, _build("--max-tokens", help="Tokens kept of a text.")] = 256
    special_tokens: Annotated[bool, _build("--special-tokens", help="Add the tokenizer's special tokens.")] = False
    on_long: Annotated[str, _build("--on-long", metavar="truncate|error", help="What a text of more tokens does.")] = "truncate"
    prompt: Annotated[str, _build("--prompt", help="Put before every text.")] = ""

    def config(self, tokenizer: str, *, trust_remote_code: bool) -> TokenizeConfig:
        from arrowbank.features.tokenize import TokenizeConfig

        return make(TokenizeConfig, self, tokenizer=tokenizer, trust_remote_code=trust_remote_code)


Dtype = Annotated[
    str | None,
    _build("--dtype", metavar="auto|float32|bfloat16|float16", show_default="auto", help="The model's, while it runs."),
]
LoadIn4Bit = Annotated[bool, _build("--load-in-4bit", help="bitsandbytes NF4.")]
Device = Annotated[str | None, _run("--device", show_default="auto", help="auto, cpu, cuda, cuda:1 …")]
GpuMemory = Annotated[float | None, _run("--gpu-memory-gb", help="A hard cap; what does not fit runs from the CPU.")]
MODEL_ONLY = ("pooling", "layer", "backbone", "dtype", "load_in_4bit", "device", "gpu_memory_gb")


@dataclass(kw_only=True)
class Running:
    """How a model is run that is only asked for its answers."""

    dtype: Dtype = None
    load_in_4bit: LoadIn4Bit = False
    device: Device = None


@dataclass
class EncodeOptions:
    """What decides a feature bank, beside its tokens, and where the model runs."""

    model: Annotated[str | None, _build("--model", metavar="M", help="A folder or hub name; safetensors only.")] = None
    encoder: Annotated[
        str | None, _build("--encoder", metavar="MODULE:FACTORY", help="An encoder of your own instead of --model.")
    ] = None
    pooling: Annotated[
        str | None,
        _build(
            "--pooling",
            metavar="auto|mean|last|cls|max",
            show_default="auto",
            help="auto: the model's own, else mean.",
        ),
    ] = None
    layer: Annotated[
        int | None, _build("--layer", show_default="-1", help="Hidden state that is pooled: 0 the embeddings, -1 the last.")
    ] = None
    no_normalize: Annotated[bool, _build("--no-normalize", help="Keep the vectors' length.")] = False
    backbone: Annotated[
        str | None,
        _build("--backbone", metavar="inner|outer", show_default="inner", help="Without or with the LM head."),
    ] = None
    dtype: Dtype = None
    load_in_4bit: LoadIn4Bit = False
    max_batch: Annotated[int, _build("--max-batch", help="Rows a forward pass.")] = 128
    token_budget: Annotated[int, _build("--token-budget", help="Tokens a forward pass.")] = 8192
    shard_rows: Annotated[int, _build("--shard-rows", help="Rows a shard (at most 1 GiB of vectors).")] = 65_536
    limit: Annotated[int | None, _build("--limit", help="Only the first N rows.")] = None
    trial: Annotated[
        int | None, _build("--trial", help="Encode N rows to see speed and vectors; the bank is never committed.")
    ] = None
    no_mirror: Annotated[bool, _build("--no-mirror", help="Leave out the .npy, index.json and texts.jsonl.")] = False
    device: Device = None
    gpu_memory_gb: GpuMemory = None

    def config(self, *, trust_remote_code: bool, onto: str | None = None, growth: GrowthOptions | None = None) -> EncodeConfig:
        from arrowbank.engine.plan import BatchRules
        from arrowbank.features.config import EncodeConfig
        from arrowbank.models import ModelConfig

        if self.encoder is not None:
            refuse_unread("--encoder", self, MODEL_ONLY)
        return EncodeConfig(
            model=make(ModelConfig, self, trust_remote_code=trust_remote_code) if self.model else None,
            encoder=self.encoder,
            rules=make(BatchRules, self),
            normalize=not self.no_normalize,
            shard_rows=self.shard_rows,
            limit=self.limit,
            trial=self.trial,
            mirror=not self.no_mirror,
            onto=onto,
            drift_sample=growth.drift_sample if growth else None,
            min_cosine=growth.min_cosine if growth else None,
        )


@dataclass
class StoreOptions:
    """How a target bank keeps hidden states, and how large it may get."""

    codec: Annotated[str, _build("--codec", metavar="bf16|fp8", help="fp8: half the size, the error measured.")] = "bf16"
    spans: Annotated[
        str, _build("--spans", metavar="all|supervised", help="supervised: hidden states only where a loss token needs them.")
    ] = "all"


@dataclass
class ImportOptions(StoreOptions):
    """What decides an imported target bank, beside its source."""

    budget_gb: BudgetGb = None

    target_model: Annotated[
        str | None, _build("--target-model", metavar="NAME", help="The very string that the trainer will be given.")
    ] = None
    layers: Annotated[
        str | None, _build("--layers", metavar="LIST", help="Blocks whose output is in the taps: 1,11,21 (−1: embeddings).")
    ] = None
    hidden_size: Annotated[int | None, _build("--hidden-size", help="Checked on all samples. Default: the first one's.")] = None
    vocab_size: Annotated[int | None, _build("--vocab-size", help="Token ids from here on are an error.")] = None
    last_hidden_norm: Annotated[
        str | None,
        _build(
            "--last-hidden-norm",
            metavar="post|pre|unknown",
            show_default="post",
            help="Last hidden states: after or before the final norm.",
        ),
    ] = None
    loss_mask: Annotated[
        str | None,
        _build(
            "--loss-mask",
            metavar="auto|ones_except_first|all_ones|from_dump",
            show_default="auto",
            help="Which tokens count in the loss. auto: the dump's masks where every sample has one, else ones_except_first.",
        ),
    ] = None
    on_nonfinite: Annotated[str, _build("--on-nonfinite", metavar="error|keep|drop", help="What NaN and Inf do.")] = "error"
    on_bad_sample: Annotated[
        str | None,
        _build(
            "--on-bad-sample",
            metavar="error|quarantine",
            show_default="error",
            help="quarantine: leave it out and note why.",
        ),
    ] = None
    allow_outside: Annotated[bool, _build("--allow-outside", help="Follow paths and links out of the dump.")] = False
    limit: Annotated[int | None, _build("--limit", help="Only the first N samples.")] = None
    max_shard_bytes: Annotated[
        int | None, _build("--max-shard-bytes", help="Default: 512 MiB for a bank, 64 GiB for a cache.")
    ] = None

    def config(self) -> ImportConfig:
        from arrowbank.targets.importer import ImportConfig

        return make(
            ImportConfig,
            self,
            target_layer_ids=layer_list(self.layers),
            budget_bytes=billions("--budget-gb", self.budget_gb),
        )


@dataclass(kw_only=True)
class ModelOptions:
    """A frozen model and where it runs, for the stages that take its hidden states."""

    model: Annotated[str, _build("--model", metavar="M", help="A folder or hub name; safetensors only.")]
    dtype: Dtype = None
    load_in_4bit: LoadIn4Bit = False
    device: Device = None
    gpu_memory_gb: GpuMemory = None

    def model_config(self, *, trust_remote_code: bool) -> ModelConfig:
        from arrowbank.models import ModelConfig

        return make(ModelConfig, self, trust_remote_code=trust_remote_code)


@dataclass(kw_only=True)
class CaptureOptions(ModelOptions, StoreOptions):
    """What decides a captured target bank, and where the model runs."""

    source: Annotated[
        str,
        _build(
            "--source", metavar="[NAME=]PATH", help="Conversations or token rows: a file, folder, saved dataset or address."
        ),
        Old("--data"),
    ]
    layers: Annotated[
        str, _build("--layers", metavar="LIST", help="Blocks whose output is in the taps: 1,17,32 (−1: embeddings).")
    ]
    tokenizer: Tokenizer = None
    target_model: Annotated[
        str | None, _build("--target-model", metavar="NAME", help="The very string for the trainer. Default: --model's.")
    ] = None
    max_length: Annotated[int, _build("--max-length", help="Tokens kept of a sample.")] = 2048
    min_loss_tokens: Annotated[int, _build("--min-loss-tokens", help="Samples with fewer are dropped.")] = 14
    last_hidden_norm: Annotated[
        str, _build("--last-hidden-norm", metavar="post|pre", help="Last hidden states: after or before the final norm.")
    ] = "post"
    max_batch: Annotated[int, _build("--max-batch", help="Rows a forward pass.")] = 128
    token_budget: Annotated[int, _build("--token-budget", help="Tokens a forward pass.")] = 8192
    limit: Annotated[int | None, _build("--limit", help="Only the first N samples.")] = None
    max_shard_bytes: Annotated[int | None, _build("--max-shard-bytes", help="Default: 512 MiB.")] = None
    on_bad_line: OnBadLine = None
    max_line_bytes: MaxLineBytes = None

    def config(self, *, trust_remote_code: bool) -> CaptureConfig:
        from arrowbank.engine.plan import BatchRules
        from arrowbank.targets.capture import CaptureConfig

        ((name, place),) = sources([self.source])

        return make(
            CaptureConfig,
            self,
            model=self.model_config(trust_remote_code=trust_remote_code),
            data=place,
            source_name=None if place == self.source else name,
            target_layer_ids=layer_list(self.layers),
            rules=make(BatchRules, self),
        )


@dataclass
class RunOptions:
    """How a bank is made and which part of it. Every stage that makes a bank shard by shard takes these."""

    engine: Annotated[str, _run("--engine", metavar="local|ray", help="Where workers run.")] = "local"
    ray_address: Annotated[str | None, _run("--ray-address", help="Address of a Ray cluster. Default: a local Ray.")] = None
    workers: Workers = None
    worker: WorkerPart = None
    shards: Annotated[str | None, _run("--shards", metavar="LIST", help="Only these shards: 3,7-9.")] = None
    rows: Annotated[str | None, _run("--rows", metavar="A:B", help="Only the shards that hold these rows.")] = None
    dry_run: DryRun = False
    budget_gb: BudgetGb = None
    restart: Restart = False

    def options(self) -> Run:
        from arrowbank.engine.stage import RunOptions as Run

        return make(
            Run,
            self,
            worker=worker_part(self.worker),
            rows=row_range(self.rows),
            shards=shard_list(self.shards),
            budget_bytes=billions("--budget-gb", self.budget_gb),
        )


@dataclass
class TextRunOptions(RunOptions):
    """The same for `tokenize` and `build`."""

    workers: Annotated[
        int | None,
        _run("--workers", help="Number of worker processes. Default: automatic; to tokenize, one per core."),
        Old("--num-proc"),
    ] = None


@dataclass
class GrowthOptions:
    """What is checked before a feature bank grows."""

    drift_sample: Annotated[
        int | None,
        _run("--drift-sample", show_default="64", help="With --onto: how many old texts are encoded again first; 0: none."),
    ] = None
    min_cosine: Annotated[
        float | None,
        _run("--min-cosine", show_default="0.999", help="With --onto: the least cosine of these to their vectors."),
    ] = None


def make(kind: Callable[..., Config], options: object, **others: Any) -> Config:
    """A config of those of its fields that `options` has by the same names, and of `others`. What is None is left to its default."""
    named = {field.name: getattr(options, field.name, None) for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: value for name, value in (named | others).items() if value is not None})


def billions(option: str, value: float | None) -> int | None:
    """A number of 10^9 bytes as bytes."""
    return None if value is None else int(checked_value(value, Positive, option) * 1e9)


def sources(values: list[str] | None) -> tuple[tuple[str, str], ...]:
    """NAME=PATH values, or paths alone, as pairs."""
    from arrowbank.inputs.sources import named_source

    return tuple(map(named_source, values or ()))


def pairs(option: str, values: list[str] | None) -> tuple[tuple[str, str], ...]:
    """NAME=PATH values as pairs."""
    found = []
    for value in values or ():
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            raise InputError(f"{option} {value!r}: expected NAME=PATH, as in {option} train=train.jsonl.")
        found.append((name, path))
    return tuple(found)


def layer_list(value: str | None, option: str = "--layers") -> tuple[int, ...] | None:
    """1,11,21 as numbers."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise InputError(f"{option} {value!r}: expected numbers, as in {option} 1,11,21.") from None


def row_range(value: str | None) -> tuple[int, int] | None:
    """A:B as numbers."""
    if value is None:
        return None
    start, colon, stop = value.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise InputError(f"--rows {value!r}: expected A:B, as in --rows 0:131072.")
    return int(start), int(stop)


def shard_list(value: str | None) -> tuple[int, ...] | None:
    """3,7-9 as numbers."""
    if value is None:
        return None
    numbers: set[int] = set()
    for part in value.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise InputError(f"--shards {value!r}: expected numbers and ranges, as in --shards 3,7-9.")
        numbers |= set(range(int(low), int(high or low) + 1))
    return tuple(sorted(numbers))


def worker_part(value: str | None) -> tuple[int, int] | None:
    """I/N as numbers."""
    if value is None:
        return None
    number, slash, count = value.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise InputError(f"--worker {value!r}: expected I/N with I from 0 to N - 1, as in --worker 0/4.")
    return int(number), int(count)
