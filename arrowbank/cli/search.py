"""The verb that asks a bank in words: search."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from arrowbank.cli import options as o
from arrowbank.cli.spread import spread
from arrowbank.errors import InputError

if TYPE_CHECKING:
    from arrowbank.searching import Searcher

PROMPT = "> "


@spread
def search(
    bank: Annotated[str, typer.Argument(metavar="BANK", help="A feature bank's folder.")],
    common: o.Common,
    text: Annotated[list[str] | None, typer.Argument(metavar="[TEXT...]", help="Default: a line of input at a time.")] = None,
    k: Annotated[int, typer.Option("-k", help="How many texts to show for each.")] = 10,
    where: Annotated[str | None, typer.Option("--where", metavar="kind=KIND", help="Only texts of this kind.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="Where the bank's model is now. Default: where it was.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", metavar="M", help="Its tokenizer, if apart.")] = None,
    encoder: Annotated[
        str | None, typer.Option("--encoder", metavar="MODULE:FACTORY", help="The bank's own encoder, if it was moved.")
    ] = None,
    faiss: Annotated[bool, typer.Option("--faiss", help="Keep the vectors in memory with faiss: for many questions.")] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 …")] = "auto",
    gpu_memory_gb: Annotated[float | None, typer.Option("--gpu-memory-gb", help="A hard cap.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")] = False,
) -> None:
    """The bank's nearest texts to each TEXT, through the very model that the bank was made with. Without TEXT it asks for lines.

    Example: arrowbank search router/features -k 5 "Where does Ada live?"
    """
    from arrowbank.searching import SearchConfig, Searcher

    config = SearchConfig(
        model=model,
        encoder=encoder,
        tokenizer=tokenizer,
        kind=kind_of(where),
        faiss=faiss,
        device=device,
        gpu_memory_gb=gpu_memory_gb,
        trust_remote_code=trust_remote_code,
    )
    searcher = Searcher(bank, config)
    if text:
        _show(searcher, text, k, common.json)
    else:
        for line in _lines():
            _show(searcher, [line], k, common.json)


def kind_of(where: str | None) -> str | None:
    """kind=KIND as the kind."""
    if where is None:
        return None
    name, _, kind = where.partition("=")
    if name != "kind" or not kind:
        raise InputError(f"--where {where!r}: expected kind=KIND, as in --where kind=query.")
    return kind


def _lines() -> Iterator[str]:
    """What comes in on standard input, a line at a time, with a prompt where a person types it."""
    asking = sys.stdin.isatty()
    if asking:
        import readline  # noqa: F401  (gives `input` a history and a cursor)

    while True:
        try:
            line = input(PROMPT if asking else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _show(searcher: Searcher, texts: list[str], k: int, as_json: bool) -> None:
    from arrowbank.searching import one_line

    for text, hits in zip(texts, searcher.search(texts, k), strict=True):
        if not as_json and len(texts) > 1:
            print(f"nearest to {one_line(text)!r}:")
        for rank, hit in enumerate(hits, 1):
            if as_json:
                print(json.dumps({"query": text, "rank": rank, **asdict(hit)}, ensure_ascii=False))
            else:
                print(f"{rank:3}  {hit.cosine:.4f}  row {hit.row:<8} {hit.kind:10} {one_line(hit.text)}")
    sys.stdout.flush()
