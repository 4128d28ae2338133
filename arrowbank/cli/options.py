"""The options that several verbs share: one declaration each, so that they mean and say the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from arrowbank.errors import InputError

BUILD = "What is in the bank"
RUN = "How it is made"

Json = Annotated[bool, typer.Option("--json", help="One JSON event a line on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="The bank's folder.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Throw away what the folder holds and begin again.", rich_help_panel=RUN)
]

Source = Annotated[
    list[str],
    typer.Option(
        "--source",
        metavar="NAME=PATH",
        help="A split and its file or folder; repeat it. .jsonl (.gz, .zst), Parquet, Arrow, saved dataset.",
    ),
]
Field = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="KIND=PATH",
        help="Where texts of a kind are; repeat it. Default: query=query, candidate=candidates[].text",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="A query or text that is not a string is an error, not skipped.")]
OnBadLine = Annotated[str, typer.Option("--on-bad-line", metavar="error|skip", help="What a line that is not JSON does.")]
Onto = Annotated[
    str | None, typer.Option("--onto", metavar="DIR", help="A texts bank whose rows stay; unseen texts are added behind.")
]

Tokenizer = Annotated[str | None, typer.Option("--tokenizer", metavar="M", help="A folder or hub name. Default: the model's.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens kept of a text.")]
SpecialTokens = Annotated[bool, typer.Option("--special-tokens", help="Add the tokenizer's special tokens.")]
OnLong = Annotated[str, typer.Option("--on-long", metavar="truncate|error", help="What a text of more tokens does.")]
Prompt = Annotated[str, typer.Option("--prompt", help="Put before every text.")]
NumProc = Annotated[
    int | None, typer.Option("--num-proc", help="Processes that tokenize. Default: one a core.", rich_help_panel=RUN)
]

Model = Annotated[
    str | None, typer.Option("--model", metavar="M", help="A folder or hub name; safetensors only.", rich_help_panel=BUILD)
]
EncoderSpec = Annotated[
    str | None,
    typer.Option(
        "--encoder", metavar="MODULE:FACTORY", help="An encoder of your own instead of --model.", rich_help_panel=BUILD
    ),
]
Pooling = Annotated[
    str,
    typer.Option(
        "--pooling", metavar="auto|mean|last|cls|max", help="auto: the model's own, else mean.", rich_help_panel=BUILD
    ),
]
Layer = Annotated[
    int, typer.Option("--layer", help="Hidden state that is pooled: 0 the embeddings, -1 the last.", rich_help_panel=BUILD)
]
NoNormalize = Annotated[bool, typer.Option("--no-normalize", help="Keep the vectors' length.", rich_help_panel=BUILD)]
Backbone = Annotated[
    str, typer.Option("--backbone", metavar="inner|outer", help="Without or with the LM head.", rich_help_panel=BUILD)
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", metavar="auto|float32|bfloat16|float16", help="The model's, while it runs.", rich_help_panel=BUILD),
]
LoadIn4bit = Annotated[bool, typer.Option("--load-in-4bit", help="bitsandbytes NF4.", rich_help_panel=BUILD)]
MaxBatch = Annotated[int, typer.Option("--max-batch", help="Rows a forward pass.", rich_help_panel=BUILD)]
TokenBudget = Annotated[int, typer.Option("--token-budget", help="Tokens a forward pass.", rich_help_panel=BUILD)]
ShardRows = Annotated[int, typer.Option("--shard-rows", help="Rows a shard (at most 1 GiB of vectors).", rich_help_panel=BUILD)]
NoMirror = Annotated[
    bool, typer.Option("--no-mirror", help="Leave out the .npy, index.json and texts.jsonl.", rich_help_panel=BUILD)
]
Limit = Annotated[
    int | None, typer.Option("--limit", help="Only the first N rows: a trial, never committed.", rich_help_panel=BUILD)
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=BUILD)
]

TextsFolder = Annotated[
    str | None, typer.Option("--texts", metavar="DIR", help="The texts bank, if it was moved.", rich_help_panel=RUN)
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 …", rich_help_panel=RUN)]
GpuMemory = Annotated[
    float | None, typer.Option("--gpu-memory-gb", help="A hard cap; what does not fit runs from the CPU.", rich_help_panel=RUN)
]
RowRange = Annotated[
    str | None, typer.Option("--rows", metavar="A:B", help="Only the shards that hold these rows.", rich_help_panel=RUN)
]
ShardList = Annotated[
    str | None, typer.Option("--shards", metavar="LIST", help="Only these shards: 3,7-9.", rich_help_panel=RUN)
]
Engine = Annotated[str, typer.Option("--engine", metavar="local|ray", help="Where workers run.", rich_help_panel=RUN)]
Workers = Annotated[int | None, typer.Option("--workers", help="Processes. Default: one a GPU, or one.", rich_help_panel=RUN)]
WorkerPart = Annotated[
    str | None, typer.Option("--worker", metavar="I/N", help="This job's part in a job array.", rich_help_panel=RUN)
]
RayAddress = Annotated[str | None, typer.Option("--ray-address", help="A cluster; default a local Ray.", rich_help_panel=RUN)]


def pairs(option: str, values: list[str] | None) -> tuple[tuple[str, str], ...]:
    """NAME=PATH values as pairs."""
    found = []
    for value in values or ():
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            raise InputError(f"{option} {value!r}: expected NAME=PATH, as in {option} train=train.jsonl.")
        found.append((name, path))
    return tuple(found)


def row_range(value: str | None) -> tuple[int, int] | None:
    """A:B as numbers."""
    if value is None:
        return None
    start, colon, stop = value.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise InputError(f"--rows {value!r}: expected START:END, as in --rows 0:131072.")
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
