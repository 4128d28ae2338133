"""How help looks: a line an option, under headings, so that a verb's help fits a screen."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer

from arrowbank.cli.options import runnable

ALSO = {"json": "--json (events, a line each)", "debug": "--debug (tracebacks)"}
HELP = "-h, --help"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
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
        arguments = [param for param in params if param.param_type_name == "argument" and not param.hidden]
        options = [param for param in params if param.param_type_name == "option" and not param.hidden]
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


class Commands(Mapping[str, Any]):
    """The commands of a group by name. Each is made when it is asked for, so that none loads what another one needs."""

    def __init__(self) -> None:
        self.members: dict[str, tuple[str, Any]] = {}  # panel, and the function of a verb or a group
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            panel, member = self.members[name]
            self._made[name] = member if isinstance(member, Verbs) else _command(name, member, panel)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)


class Verbs(typer.core.TyperGroup):
    """A group of verbs whose help has a line per verb."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = Commands()

    def add(self, name: str, member: Callable[..., None] | Verbs, panel: str) -> None:
        self.commands.members[name] = (panel, member)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"Usage: {ctx.command_path} VERB …\n\n")
        formatter.write(paragraphs(self.help or "", formatter.width))
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, (panel, member) in self.commands.members.items():
            text = member.help if isinstance(member, Verbs) else member.__doc__
            panels.setdefault(panel, []).append((name, _first_sentence(text or "")))
        params: list[Any] = [option for option in self.params if option.name not in ALSO]
        options = [(PLAIN, [(_left(option), option.help or "") for option in params])] if params else []
        formatter.write(table([*panels.items(), *options], formatter.width))
        formatter.write(f"\n{ctx.command_path} VERB --help has a verb's options and an example.\n")


def _command(name: str, function: Callable[..., None], panel: str) -> Any:
    """The command of a verb's function."""
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=CONTEXT)
    one.command(name, cls=Verb, rich_help_panel=panel)(runnable(function))
    return typer.main.get_command(one)


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


def _panel(what: Any) -> str:
    panel = getattr(what, "rich_help_panel", None)
    return panel if isinstance(panel, str) else PLAIN


def _first_sentence(text: str) -> str:
    first = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".") + "."
