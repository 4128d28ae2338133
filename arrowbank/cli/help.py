"""How help looks: a line an option, under headings, so that a verb's help fits a screen."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import typer

ALSO = {"json": "--json (events, a line each)", "debug": "--debug (tracebacks)"}
HELP = "-h, --help"
NARROW, WIDE = 26, 38  # the left column, at most, on terminals of 80 and of 100 columns
PLAIN = "Options"


class Verb(typer.core.TyperCommand):
    """A verb whose help has a line per option, and that takes earlier spellings of its options (`Old`) with a warning."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        renamed: dict[str, str] = getattr(self.callback, "renamed", {})
        with_value = {
            name
            for param in self.params
            if param.param_type_name == "option" and not getattr(param, "is_flag", False)
            for name in param.opts
        }
        words, is_value = list(args), False
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            if word == "--":
                break
            if not is_value and name in renamed:
                typer.echo(f"arrowbank: {name} is now {renamed[name]}", err=True)
                words[at] = f"{renamed[name]}{equals}{value}"
            is_value = not is_value and words[at] in with_value
        return super().parse_args(ctx, words)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        params: list[Any] = list(self.params)
        arguments = [param for param in params if param.param_type_name == "argument"]
        options = [param for param in params if param.param_type_name == "option"]
        shown = [option for option in options if option.name not in ALSO]
        shown.sort(key=lambda option: not option.required)
        needed = [_left(option) for option in shown if option.required]
        usage = " ".join([ctx.command_path, *map(_name, arguments), *needed, "[options]"])
        formatter.write(textwrap.fill(f"Usage: {usage}", formatter.width, subsequent_indent="    ") + "\n\n")
        formatter.write(paragraphs(self.help or "", formatter.width))
        rows = [("", [(_name(param), param.help) for param in arguments if param.help])]
        panels = sorted(dict.fromkeys(_panel(option) for option in shown), key=lambda panel: panel != PLAIN)
        rows += [(panel, [(_left(o), _right(o, ctx)) for o in shown if _panel(o) == panel]) for panel in panels]
        formatter.write(table(rows, formatter.width))
        also = [words for name, words in ALSO.items() if any(option.name == name for option in options)]
        formatter.write(f"\nAlso: {', '.join([*also, HELP])}\n")


class Verbs(typer.core.TyperGroup):
    """A group of verbs whose help has a line a verb."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"Usage: {ctx.command_path} VERB …\n\n")
        formatter.write(paragraphs(self.help or "", formatter.width))
        members = [self.commands[name] for name in self.list_commands(ctx)]
        panels = dict.fromkeys(_panel(member, "Verbs") for member in members)
        rows = [
            (panel, [(str(m.name), _first_sentence(m)) for m in members if _panel(m, "Verbs") == panel]) for panel in panels
        ]
        params: list[Any] = [option for option in self.params if option.name not in ALSO]
        options = [(PLAIN, [(_left(option), option.help or "") for option in params])] if params else []
        formatter.write(table([*rows, *options], formatter.width))
        formatter.write(f"\n{ctx.command_path} VERB --help has a verb's options and an example.\n")


def paragraphs(text: str, width: int) -> str:
    """The paragraphs of a docstring, wrapped, each followed by an empty line."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "".join(textwrap.fill(" ".join(part.split()), width, break_on_hyphens=False) + "\n\n" for part in parts if part)


def table(sections: list[tuple[str, list[tuple[str, str]]]], width: int) -> str:
    """Rows of two columns under headings, wrapped to `width`."""
    most = max((len(left) for _, rows in sections for left, _ in rows), default=0)
    column = min(most, WIDE if width >= 96 else NARROW) + 4
    lines = []
    for heading, rows in sections:
        lines += [typer.style(heading, bold=True)] if heading else []
        for left, right in rows:
            begin = f"  {left}".ljust(column) if len(left) + 4 <= column else f"  {left}\n{'':{column}}"
            body = textwrap.wrap(right, max(20, width - column), break_on_hyphens=False) or [""]
            lines += [(begin + body[0]).rstrip(), *(" " * column + line for line in body[1:])]
    return "\n".join(lines) + "\n" if lines else ""


def _name(argument: Any) -> str:
    name = (argument.metavar or str(argument.name).upper()).removesuffix("...")
    name = f"{name} …" if argument.nargs == -1 else name
    return name if argument.required else f"[{name}]"


def _left(option: Any) -> str:
    """An option as it is typed, with what it takes."""
    names = ", ".join(option.opts)
    return names if option.is_flag else f"{names} {option.metavar or 'TEXT'}"


def _right(option: Any, ctx: Any) -> str:
    """What an option means, and its default."""
    default = option.show_default if isinstance(option.show_default, str) else option.get_default(ctx, call=False)
    said = "" if option.required or option.is_flag or default in (None, (), [], "") else f"  [{default}]"
    return f"{option.help or ''}{said}"


def _panel(what: Any, otherwise: str = PLAIN) -> str:
    panel = getattr(what, "rich_help_panel", None)
    return panel if isinstance(panel, str) else otherwise


def _first_sentence(command: Any) -> str:
    text = " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".") + "."
