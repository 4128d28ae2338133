"""What mkdocs does beside Markdown: pages made of the program, and parts of files at the root, each kept in one place.

- `cli/…` is made of the command line (pages_cli.py), `api.md` of the public names (pages_api.py): neither is a file.
- A line `<!-- include: FILE -->` is replaced by FILE of the repository, `<!-- include: FILE NAME -->` by what is between its marks
  `<!-- NAME:start -->` and `<!-- NAME:end -->`, `<!-- include: FILE ## Heading -->` by what stands under that heading,
  `<!-- include: FILE python -->` by FILE as a block of code.
- A line `<!-- scripts: FOLDER -->` is replaced by what the scripts of a folder say of themselves, `<!-- extras -->` by the extras of
  pyproject.toml, `<!-- benchmarks -->` by the table that `make bench` writes.
- `{{bench: WHAT}}` is replaced by what that table has under "ours" in the row that begins with WHAT.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pages_api
import pages_cli
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r"^<!-- include: (\S+)(?: (.+))? -->$", flags=re.MULTILINE)
SCRIPTS = re.compile(r"^<!-- scripts: (\w+) -->$", flags=re.MULTILINE)
FIGURE = re.compile(r"\{\{bench: (.+?)\}\}")
TABLE = ("README.md", "docs/benchmarks.md")  # where `make bench` may write it
# names of files at the root, as their links have them → pages
PAGES = {
    "FORMAT.md": "format.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "docs/reliability.md": "reliability.md",
    "README.md": "index.md",
    "recipes": "recipes.md",
    "examples": "examples.md",
    "docs/in2-worked-example.md": "in2-worked-example.md",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the command line into the navigation, where mkdocs.yml has `cli/`."""
    found = pages_cli.verbs()
    entries: list[Any] = ["cli/index.md"]
    for panel, verbs in found.items():
        entries.append({panel: [{f"{words}": f"cli/{pages_cli.page_name(words)}"} for words, _ in verbs]})
    config.nav = _replaced(config.nav, "cli/", entries)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of the program."""
    made = {f"cli/{name}": text for name, text in pages_cli.pages().items()} | {"api.md": pages_api.page()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what a page includes."""
    markdown = INCLUDE.sub(lambda found: included(found.group(1), found.group(2)), markdown)
    markdown = SCRIPTS.sub(lambda found: scripts(found.group(1)), markdown)
    markdown = FIGURE.sub(lambda found: figure(found.group(1)), markdown)
    return markdown.replace("<!-- extras -->", extras()).replace("<!-- benchmarks -->", benchmarks())


def included(name: str, part: str | None) -> str:
    """The text of a file of the repository, or the part of it that is asked for; KeyError where there is no such part."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if part == "python":
        return f"```python\n{text}```"
    if part:
        marks = (f"{part}\n", "(?=^## |\\Z)") if part.startswith("#") else (f"<!-- {part}:start -->\n", f"<!-- {part}:end -->")
        found = re.search(rf"^{marks[0]}(.*?){marks[1]}", text, flags=re.DOTALL | re.MULTILINE)
        if found is None:
            raise KeyError(f"{name} has no part {part}")
        text = found.group(1)
    text = text.replace("\\<", "&lt;").replace("\\>", "&gt;")  # Python-Markdown knows no such escapes
    return re.sub(r"\]\(([\w./-]+)\)", lambda link: f"]({PAGES.get(link.group(1).rstrip('/'), link.group(1))})", text)


def benchmarks() -> str:
    """The table of benchmarks, from wherever it lies; KeyError where there is none."""
    for name in TABLE:
        if (ROOT / name).exists() and "<!-- benchmarks:start -->" in (ROOT / name).read_text(encoding="utf-8"):
            return included(name, "benchmarks")
    raise KeyError(f"no table of benchmarks in {' or '.join(TABLE)}")


def figure(what: str) -> str:
    """What was measured, of the row that begins with `what`; KeyError where there is not one such row."""
    rows = [line.split(" | ") for line in benchmarks().splitlines() if line.startswith(f"| {what}")]
    if len(rows) != 1:
        raise KeyError(f"{len(rows)} rows of the benchmarks begin with {what!r}")
    return rows[0][1]


def scripts(folder: str) -> str:
    """What each script of a folder of the repository says of itself, under its name."""
    lines = []
    for path in sorted((ROOT / folder).glob("*.py")):
        if path.stem == "__init__":
            continue
        meaning = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        meaning = re.sub(r"(?:^    python .*\n?)+", _fenced, meaning, flags=re.MULTILINE)
        lines += [f"### `{path.stem}` {{ #{path.stem} }}", "", meaning, ""]
    return "\n".join(lines)


def _fenced(lines: re.Match[str]) -> str:
    """Indented commands as a block of shell."""
    return f"```sh\n{inspect.cleandoc(lines.group())}\n```\n"


def extras() -> str:
    """The extras that a user may want, with what they bring, as pyproject.toml has them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    rows = re.findall(r"^(\w+) = \[(.*)\]", table, flags=re.MULTILINE)
    shown = [f"| `{name}` | {_packages(wanted)} |" for name, wanted in rows]
    return "\n".join(["| extra | brings |", "|---|---|", *shown])


def _packages(requirements: str) -> str:
    """The names in a list of requirements."""
    return ", ".join(f"`{name}`" for name in re.findall(r'"([\w\[\],.-]+)', requirements))


def _replaced(nav: Any, mark: str, entries: list[Any]) -> Any:
    """`nav` with `entries` where it has `mark`."""
    if isinstance(nav, list):
        return [_replaced(one, mark, entries) for one in nav]
    if isinstance(nav, dict):
        return {name: _replaced(one, mark, entries) for name, one in nav.items()}
    return entries if nav == mark else nav
