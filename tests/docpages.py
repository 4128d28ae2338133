"""The pages of the site as a reader would follow them: what they show is run in their order, in a folder of its own.

    ```bash                      commands of ours, each of which ends with exit code 0
    ```console title="exit code 1"   commands behind "$ " with what they print ("…" stands for anything); without a title the code is 0
    ```python                    run, all of a page with the same names
    ```json title="a.jsonl"      a file of that name, in any language but console
    ```sh                        not run (a cluster, a GPU, the hub): what begins with arrowbank is parsed

Other languages are only shown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from arrowbank.cli import app, main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^([ ]*)```(\w+)(?: title=\"([^\"]*)\")?[^\n]*\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
METER = re.compile(r"[\w-]+: [\d,]+( of [\d,]+)? \w+ in [\d.,]+ s")  # how far long work is: another line each time


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the line that it begins in."""

    place: str
    language: str
    title: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        indent, language, title, body = found.groups()
        lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
        yield Block(f"{page}:{text.count(chr(10), 0, found.start()) + 1}", language, title or "", "".join(lines))


def commands(text: str) -> list[list[str]]:
    """The commands of ours in a block of shell, as words; behind "$ " where it has such lines."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line, comments=True)[1:] for line in joined.splitlines() if line.split()[:1] == ["arrowbank"]]


def read_page(page: str, capsys: pytest.CaptureFixture[str], replaced: Mapping[str, str]) -> None:
    """Do what `page` says, in the current folder; `replaced` are texts of its blocks and what stands in for them here."""
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page):
        text = block.text
        for old, new in replaced.items():
            text = text.replace(old, new)
        if block.title and block.language != "console":
            Path(block.title).write_text(text, encoding="utf-8")
        elif block.language in READERS:
            READERS[block.language](block, text, capsys, names)


def _run(block: Block, text: str, capsys: pytest.CaptureFixture[str], names: dict[str, Any]) -> None:
    assert commands(text), f"{block.place}: no command of ours in it"
    for words in commands(text):
        code = main(words)
        assert code == 0, f"{block.place}: arrowbank {shlex.join(words)} ended with {code}:\n{capsys.readouterr()}"


def _compare(block: Block, text: str, capsys: pytest.CaptureFixture[str], names: dict[str, Any]) -> None:
    code = int(block.title.removeprefix("exit code ") or 0)
    for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        capsys.readouterr()
        found = main(shlex.split(command, comments=True)[1:])
        said = capsys.readouterr()
        lines = [line.rstrip() for line in (said.out + said.err).splitlines() if not METER.match(line)]
        printed = "".join(f"{line}\n" for line in lines)
        assert found == code, f"{block.place}: {command} ended with {found}:\n{printed}"
        pattern = re.escape("".join(f"{line.rstrip()}\n" for line in shown.splitlines())).replace("…", ".*?")
        assert re.fullmatch(pattern, printed, flags=re.DOTALL), f"{block.place}: {command} printed\n{printed}"


def _execute(block: Block, text: str, capsys: pytest.CaptureFixture[str], names: dict[str, Any]) -> None:
    exec(compile(text, block.place, "exec"), names)


def _parse(block: Block, text: str, capsys: pytest.CaptureFixture[str], names: dict[str, Any]) -> None:
    parse(text)


def parse(text: str) -> int:
    """How many commands of ours are in a block of shell. Every option in them is one, and those that must be given are."""
    for words in (found := commands(text)):
        command: Any = app
        rest = list(words)
        while group := getattr(command, "commands", None):
            command = group[rest.pop(0)]
        command.make_context(command.name, rest)
    return len(found)


Reader = Callable[[Block, str, pytest.CaptureFixture[str], dict[str, Any]], None]
READERS: dict[str, Reader] = {"bash": _run, "console": _compare, "python": _execute, "sh": _parse}
