"""The verbs that make banks: scan, tokenize, encode, build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arrowbank.cli import options as o
from arrowbank.cli.show import showing
from arrowbank.errors import InputError

if TYPE_CHECKING:
    from arrowbank.corpus.scan import ScanConfig
    from arrowbank.encoding import EncodeConfig, RunOptions

DEFAULT_FIELDS = (("query", "query"), ("candidate", "candidates[].text"))


def scan(
    source: o.Source,
    out: o.Out,
    field: o.Field = None,
    strict: o.Strict = False,
    on_bad_line: o.OnBadLine = "error",
    onto: o.Onto = None,
    restart: o.Restart = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Collect the unique texts of episode files, in first-seen order.

    Example: arrowbank scan --source train=train.jsonl --source eval=eval.jsonl --out router/texts
    """
    from arrowbank.corpus.scan import scan as run

    with showing(json) as (progress, end):
        manifest = run(_scan_config(source, field, strict, on_bad_line, onto), out, restart=restart, progress=progress)
        end(manifest, f"{out}: {manifest['rows']:,} unique texts. Next: arrowbank tokenize {out} --tokenizer M --out DIR")


def tokenize(
    texts: Annotated[str, typer.Argument(metavar="TEXTS", help="A bank that `scan` made.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", metavar="M", help="A folder or hub name; a fast tokenizer.")],
    out: o.Out,
    max_tokens: o.MaxTokens = 256,
    special_tokens: o.SpecialTokens = False,
    on_long: o.OnLong = "truncate",
    prompt: o.Prompt = "",
    num_proc: o.NumProc = None,
    trust_remote_code: o.TrustRemoteCode = False,
    restart: o.Restart = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Turn a texts bank into a tokens bank of the same rows.

    Example: arrowbank tokenize router/texts --tokenizer Qwen/Qwen3-4B --out router/tokens
    """
    from arrowbank.corpus.tokenize import TokenizeConfig
    from arrowbank.corpus.tokenize import tokenize as run

    config = TokenizeConfig(
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        special_tokens=special_tokens,
        on_long=on_long,
        prompt=prompt,
        trust_remote_code=trust_remote_code,
    )
    with showing(json) as (progress, end):
        manifest = run(config, texts, out, num_proc=num_proc, restart=restart, progress=progress)
        counts = manifest["counts"]
        end(
            manifest,
            f"{out}: {counts['tokens']:,} tokens of {manifest['rows']:,} texts, {counts['truncated']:,} truncated. "
            f"Next: arrowbank encode {out} --model M --out DIR",
        )


def encode(
    tokens: Annotated[str, typer.Argument(metavar="TOKENS", help="A bank that `tokenize` made.")],
    out: o.Out,
    model: o.Model = None,
    encoder: o.EncoderSpec = None,
    pooling: o.Pooling = "auto",
    layer: o.Layer = -1,
    no_normalize: o.NoNormalize = False,
    backbone: o.Backbone = "inner",
    dtype: o.Dtype = "auto",
    load_in_4bit: o.LoadIn4bit = False,
    max_batch: o.MaxBatch = 128,
    token_budget: o.TokenBudget = 8192,
    shard_rows: o.ShardRows = 65_536,
    limit: o.Limit = None,
    no_mirror: o.NoMirror = False,
    trust_remote_code: o.TrustRemoteCode = False,
    texts: o.TextsFolder = None,
    device: o.Device = "auto",
    gpu_memory_gb: o.GpuMemory = None,
    rows: o.RowRange = None,
    shards: o.ShardList = None,
    engine: o.Engine = "local",
    workers: o.Workers = None,
    worker: o.WorkerPart = None,
    ray_address: o.RayAddress = None,
    restart: o.Restart = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Encode a tokens bank with a frozen model into a feature bank. The same command again goes on after a crash.

    Example: arrowbank encode router/tokens --model Qwen/Qwen3-4B --load-in-4bit --out router/features
    """
    from arrowbank.encoding import encode as run

    config = encode_config(**subset(locals(), ENCODE_NAMES))
    with showing(json) as (progress, end):
        manifest = run(config, tokens, out, texts=texts, options=_run_options(**subset(locals(), RUN_NAMES)), progress=progress)
        end(manifest, _encoded(out, manifest))


def build(
    source: o.Source,
    out: o.Out,
    model: o.Model = None,
    encoder: o.EncoderSpec = None,
    tokenizer: o.Tokenizer = None,
    field: o.Field = None,
    strict: o.Strict = False,
    on_bad_line: o.OnBadLine = "error",
    onto: o.Onto = None,
    max_tokens: o.MaxTokens = 256,
    special_tokens: o.SpecialTokens = False,
    on_long: o.OnLong = "truncate",
    prompt: o.Prompt = "",
    num_proc: o.NumProc = None,
    pooling: o.Pooling = "auto",
    layer: o.Layer = -1,
    no_normalize: o.NoNormalize = False,
    backbone: o.Backbone = "inner",
    dtype: o.Dtype = "auto",
    load_in_4bit: o.LoadIn4bit = False,
    max_batch: o.MaxBatch = 128,
    token_budget: o.TokenBudget = 8192,
    shard_rows: o.ShardRows = 65_536,
    limit: o.Limit = None,
    no_mirror: o.NoMirror = False,
    trust_remote_code: o.TrustRemoteCode = False,
    device: o.Device = "auto",
    gpu_memory_gb: o.GpuMemory = None,
    rows: o.RowRange = None,
    shards: o.ShardList = None,
    engine: o.Engine = "local",
    workers: o.Workers = None,
    ray_address: o.RayAddress = None,
    restart: o.Restart = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Scan, tokenize and encode into DIR/texts, DIR/tokens and DIR/features.

    Example: arrowbank build --source train=train.jsonl --model Qwen/Qwen3-4B --out router
    """
    from arrowbank.building import BuildConfig
    from arrowbank.building import build as run
    from arrowbank.corpus.tokenize import TokenizeConfig

    if not (tokenizer or model):
        raise InputError("--encoder needs --tokenizer as well: there is no --model whose tokenizer could be used.")
    config = BuildConfig(
        scan=_scan_config(source, field, strict, on_bad_line, onto),
        tokenize=TokenizeConfig(
            tokenizer=tokenizer or str(model),
            max_tokens=max_tokens,
            special_tokens=special_tokens,
            on_long=on_long,
            prompt=prompt,
            trust_remote_code=trust_remote_code,
        ),
        encode=encode_config(**subset(locals(), ENCODE_NAMES)),
    )
    settings = subset(locals(), RUN_NAMES - {"worker"})
    with showing(json) as (progress, end):
        manifest = run(config, out, options=_run_options(worker=None, **settings), num_proc=num_proc, progress=progress)
        end(manifest, _encoded(str(Path(out) / "features"), manifest))


ENCODE_NAMES = frozenset(
    {
        *("model", "encoder", "pooling", "layer", "no_normalize", "backbone", "dtype", "load_in_4bit", "trust_remote_code"),
        *("max_batch", "token_budget", "shard_rows", "limit", "no_mirror", "device", "gpu_memory_gb"),
    }
)
RUN_NAMES = frozenset(("engine", "workers", "worker", "ray_address", "rows", "shards", "restart"))


def encode_config(
    *,
    model: str | None,
    encoder: str | None,
    max_batch: int,
    token_budget: int,
    no_normalize: bool,
    shard_rows: int,
    limit: int | None,
    no_mirror: bool,
    **of_the_model: Any,
) -> EncodeConfig:
    """The configuration that the options of `encode` spell."""
    from arrowbank.encoding import EncodeConfig
    from arrowbank.models import ModelConfig
    from arrowbank.plan import BatchRules

    return EncodeConfig(
        model=ModelConfig(model=model, **of_the_model) if model else None,
        encoder=encoder,
        rules=BatchRules(max_batch=max_batch, token_budget=token_budget),
        normalize=not no_normalize,
        shard_rows=shard_rows,
        limit=limit,
        mirror=not no_mirror,
    )


def _run_options(*, rows: str | None, shards: str | None, worker: str | None, **rest: Any) -> RunOptions:
    from arrowbank.encoding import RunOptions

    return RunOptions(rows=o.row_range(rows), shards=o.shard_list(shards), worker=o.worker_part(worker), **rest)


def _scan_config(source: list[str], field: list[str] | None, strict: bool, on_bad_line: str, onto: str | None) -> ScanConfig:
    from arrowbank.corpus.scan import ScanConfig

    return ScanConfig(
        sources=o.pairs("--source", source),
        fields=o.pairs("--field", field) or DEFAULT_FIELDS,
        strict=strict,
        on_bad_line=on_bad_line,  # type: ignore[arg-type]  # checked there
        onto=onto,
    )


def subset(values: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """The options of these names, out of a verb's arguments."""
    return {name: values[name] for name in names}


def _encoded(out: str, manifest: dict[str, Any]) -> str:
    if not manifest["complete"]:
        return f"{out}: {manifest['encoded_rows']:,} rows encoded, not committed."
    return (
        f"{out}: {manifest['rows']:,} vectors of width {manifest['hidden_size']:,}, committed.\n"
        f"Open it:  from arrowbank import open_bank; bank = open_bank({out!r})"
    )
