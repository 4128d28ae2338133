"""The pages of the command line, made from the program itself: a page a verb, so that none is forgotten and none is out of date.

`pages()` gives the text of each page by its name under `cli/`. Nothing here needs mkdocs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from arrowbank.cli import GROUPS, VERBS, app

ALIKE = "`--json` and `--debug` are the same for every verb: see [the command line](index.md)."
COMMON = ("json", "debug")


def verbs() -> dict[str, list[tuple[str, Any]]]:
    """Panel → (words, command) of its verbs, as `arrowbank --help` shows them; a group is a panel of its own."""
    root: Any = app
    panels: dict[str, list[tuple[str, Any]]] = {}
    for panel, functions in VERBS.items():
        names = [function.__name__ for function in functions]
        panels[panel] = [(name, root.commands[name]) for name in names]
    for group, (_, members) in GROUPS.items():
        panels[group] = [(f"{group} {name}", root.commands[group].commands[name]) for name in members]
    return panels


def page_name(words: str) -> str:
    return f"{words.replace(' ', '-')}.md"


def pages() -> dict[str, str]:
    """Page name → Markdown: index.md, and a page for each verb."""
    return {"index.md": _index()} | {
        page_name(words): "\n".join(_page(words, command)) for found in verbs().values() for words, command in found
    }


def _index() -> str:
    lines = ["# The command line", "", INTRODUCTION]
    for panel, found in verbs().items():
        title, meaning = (f"`{panel}`", GROUPS[panel][0]) if panel in GROUPS else (panel, "")
        lines += ["", f"## {title}", "", *([meaning, ""] if meaning else []), "| verb | does |", "|---|---|"]
        lines += [f"| [`arrowbank {words}`]({page_name(words)}) | {_prose(_meaning(command))} |" for words, command in found]
    return "\n".join([*lines, "", BEHAVIOUR])


def _page(words: str, command: Any) -> Iterator[str]:
    meaning, example = _meaning(command), _example(command)
    yield from (f"# `arrowbank {words}`", "", _prose(meaning), "")
    yield from ("```output", _usage(words, command), "```", "")
    if example:
        yield from ("For example:", "", "```sh", example, "```", "")
    shown = [one for one in command.params if not getattr(one, "hidden", False) and one.name not in (*COMMON, "help")]
    panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}  # then the named ones, as on a terminal
    for one in sorted(shown, key=lambda one: not one.required):
        panels.setdefault(one.rich_help_panel or ("Options" if _is_option(one) else "Arguments"), []).append(one)
    for panel, found in panels.items():
        if found:
            yield from (f"## {panel}", "", "| | |", "|---|---|", *map(_row, found), "")
    yield ALIKE


def _row(one: Any) -> str:
    """An option and its value, then what it means, whether it must be given, its default."""
    name = " ".join(part for part in (one.opts[0] if _is_option(one) else "", _value(one)) if part)
    told = [_prose(one.help or "")]
    if one.required:
        told.append("**Required.**")
    default = one.show_default if isinstance(getattr(one, "show_default", None), str) else one.default
    if default not in (None, "", ()) and not isinstance(default, bool) and not callable(default):
        told.append(f"Default: `{default}`.")
    return f"| `{name}` | {' '.join(part for part in told if part)} |"


def _usage(words: str, command: Any) -> str:
    needed = [one for one in command.params if one.required]
    options = [f"{one.opts[0]} {_value(one)}".strip() for one in needed if _is_option(one)]
    arguments = [_value(one) for one in needed if not _is_option(one)]
    return " ".join(["arrowbank", words, *arguments, *options, "[OPTIONS]"])


def _is_option(one: Any) -> bool:
    return str(one.opts[0]).startswith("-")


def _value(one: Any) -> str:
    """What stands behind an option; nothing behind a switch."""
    return "" if getattr(one, "is_flag", False) else str(one.metavar or "TEXT").replace("...", "…")


def _meaning(command: Any) -> str:
    return " ".join(str(command.help).partition("\n\nExample: ")[0].split())


def _example(command: Any) -> str:
    return " ".join(str(command.help).partition("\n\nExample: ")[2].split())


def _prose(text: str) -> str:
    """Help text as Markdown: no bracket becomes a link, and no line a table's border."""
    return text.replace("[", "\\[").replace("|", "\\|").replace("*", "\\*")


INTRODUCTION = """\
One program, `arrowbank`. This part of the site is made from the program when the site is built, so it says what `--help` says.
`arrowbank VERB --help` has the same on a terminal."""

BEHAVIOUR = """\
## What all verbs do alike

- **A verb that makes something can be run again.** The same command keeps what is finished and does the rest. `--restart` throws away
  what the folder holds. See [errors and what to do](../errors.md).
- **Long work shows how far it is**: a bar on a terminal, now and then a line on standard error where there is none.
- `--json` prints one JSON event a line on standard output instead, and ends with `{"phase": "done", …}`. Messages go to standard error.
- `--debug` shows the traceback of an error.
- `arrowbank` alone says what to do next, and which banks lie in the current folder.
- `arrowbank --version` also names the packages that decide values, for a report of a problem.
- `arrowbank --install-completion` teaches your shell the verbs, options and values.

| exit code | means |
|---|---|
| 0 | done |
| 1 | a check failed, or a size does not fit: [which checks](../errors.md) |
| 2 | bad arguments or input; what is wrong stands on standard error |
| 70 | an internal error, which is a bug: [what to do](../errors.md) |
| 130 | interrupted |"""
