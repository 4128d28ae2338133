"""The options of a verb, made from what its function takes.

    def scan(config: ScanConfig, out: Out, options: Annotated[RunOptions, WHOLE], common: Common) -> None: ...

A parameter that is a config (`Settings`) stands for its fields: each is an option, with the name, help, bounds and default that the
class declares, also those of configs inside it. The verb gets the config made of the options that were given; an option that no
config takes is refused. Other parameters are options by the same marks (`Help`, `Flag`, `Old`), or arguments of Typer's.

Annotations are read when a verb is asked for; names that its module does not have are those of `arrowbank`, so that no config is
imported before.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

import arrowbank
from arrowbank.errors import InputError
from arrowbank.settings import (
    CONTENT,
    EXECUTION,
    Group,
    Help,
    Old,
    Part,
    Settings,
    checked_value,
    core_of,
    default_of,
    flag_of,
    hints_of,
    mark,
    marks,
    settings_in,
)

Config = TypeVar("Config")
EMPTY = inspect.Parameter.empty
PLAIN, NO_HELP, PLAIN_PART = Group(""), Help(""), Part()
MOST_NUMBERS = 1_000_000  # of a range such as 7-9


# one option


@dataclass(frozen=True)
class Option:
    """A field of a config, or a parameter of a verb, on the command line. `repeated`: it stands for several configs;
    `hidden`: help leaves it out."""

    name: str
    hint: Any
    default: Any = MISSING
    help: Help = NO_HELP
    group: str = ""
    repeated: bool = False
    hidden: bool = False

    @property
    def flag(self) -> str:
        return flag_of(self.name, self.hint, self.default)

    @property
    def _item(self) -> Any:
        """The type of a value that may be given several times; None for one that may not."""
        kind = core_of(self.hint)
        if self.repeated:
            return self.hint
        several = get_origin(kind) in (tuple, list) and (get_origin(kind) is list or get_args(kind)[1:] == (Ellipsis,))
        return get_args(kind)[0] if several and core_of(get_args(kind)[0]) not in (int, float) else None

    def parameter(self) -> inspect.Parameter:
        """The parameter that Typer makes an option of. Its default is always None, for "not given"."""
        kind = core_of(self.hint)
        typed = list[str] if self._item is not None else kind if kind in (bool, int, float) and not self.help.read else str
        info = typer.Option(
            self.flag,
            metavar=self._value(),
            help=self.help.text,
            rich_help_panel=self.group or None,
            hidden=self.hidden,
            show_default=self._shown() or False,
            autocompletion=_offer(self.help.choices or self._value().split("|")),
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=EMPTY if self.default is MISSING else None,
            annotation=Annotated[typed if self.default is MISSING else typed | None, info],
        )

    def read(self, given: Any) -> Any:
        """What was given as a value of the field, still to be checked. InputError where it cannot be read."""
        if self._item is not None:
            return tuple(self._read(one, self._item) for one in given)
        is_flag = core_of(self.hint) is bool and not self.help.read
        return not self.default if is_flag and self.default is True else self._read(given, self.hint)

    def _read(self, text: Any, hint: Any) -> Any:
        kind = core_of(hint)
        if self.help.read is not None:
            return self.help.read(text)
        if get_origin(kind) is not tuple:
            return text
        if get_args(kind)[1:] == (Ellipsis,):
            return tuple(self._numbers(text, core_of(get_args(kind)[0])))
        first, _, second = text.partition(re.sub(r"\w", "", self._value()))  # of A:B at a colon
        try:
            parts = tuple(
                int(part) if core_of(arg) is int else part for part, arg in zip((first, second), get_args(kind), strict=True)
            )
        except ValueError:
            parts = ()
        if not (first and second and parts):
            raise self._unread(text, self._value())
        return parts

    def _numbers(self, text: str, kind: type) -> Iterator[float]:
        """The numbers of 1,11,21 or 3,7-9 or 0.5,1."""
        expected = "numbers and ranges" if kind is int else "numbers"
        for part in text.split(","):
            span = re.fullmatch(r"\s*(\d{1,9})-(\d{1,9})\s*", part) if kind is int else None
            if span and not 0 <= int(span[2]) - int(span[1]) < MOST_NUMBERS:
                raise self._unread(text, expected)
            try:
                yield from range(int(span[1]), int(span[2]) + 1) if span else (kind(part.replace("−", "-")),)
            except ValueError:
                raise self._unread(text, expected) from None

    def _unread(self, text: str, expected: str) -> InputError:
        example = f", as in {self.flag} {self.help.example}" if self.help.example else ""
        return InputError(f"{self.flag} {text!r}: expected {expected}{example}.")

    def _value(self) -> str:
        """How a value is written."""
        kind = core_of(self.hint if self._item is None else self._item)
        if get_origin(kind) is Literal:
            return self.help.value or "|".join(get_args(kind))
        return self.help.value or {int: "N", float: "X", bool: ""}.get(kind, "LIST" if get_origin(kind) is tuple else "TEXT")

    def _shown(self) -> str:
        """The default as help shows it."""
        if self.default is None or self.default is MISSING or isinstance(self.default, bool):
            return self.help.default
        if isinstance(self.default, tuple):
            return ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in self.default)
        return str(self.default)


# configs and their options


class Later(Generic[Config]):
    """A config that the verb makes itself, where it makes one at all: `given` are the options, and a call makes the config."""

    def __init__(self, kind: type[Config], given: dict[str, Any]) -> None:
        self._kind, self.given = kind, given

    def __call__(self) -> Config:
        config, taken = make(self._kind, self.given)
        _refuse_lost([name for name in self.given if name not in taken], [self._kind])
        return config

    def refuse(self, mode: str) -> None:
        """InputError for an option that was given, in a mode in which none has an effect."""
        for name in self.given:
            _refuse(options_of(self._kind)[name], mode)


@dataclass(frozen=True, kw_only=True)
class Common(Settings):
    """What every verb takes."""

    json: Annotated[bool, Help("One JSON event per line on standard output."), PLAIN] = False
    debug: Annotated[bool, Help("Show the traceback of an error."), PLAIN] = False


Out = Annotated[str, Help("The bank's folder.", "DIR")]
Restart = Annotated[bool, Help("Throw away what the folder holds and begin again."), EXECUTION]
DryRun = Annotated[bool, Help("Only print the size. Exit code 1 if it does not fit."), EXECUTION]
WHOLE = Part(hidden=("engine", "ray_address", "worker", "shards", "rows"))  # RunOptions of a bank that is not made in parts
Texts = Annotated[str, Help("The texts bank, if it was moved.", "DIR"), EXECUTION]


def options_of(kind: Any, part: Part = PLAIN_PART, base: Any = None) -> dict[str, Option]:
    """The options of a config and of those inside it, by the names of the fields. `base` is a config with its defaults."""
    found: dict[str, Option] = {}
    own = {one.name for one in fields(kind) if _inner(hints_of(kind)[one.name]) is None}
    for one in fields(kind):
        hint, default = hints_of(kind)[one.name], default_of(kind, one.name)
        inner = _inner(hint)
        if one.name in part.without:
            continue
        if inner is None:
            default = default if base is None or default is MISSING else getattr(base, one.name)
            about = part.help.get(one.name) or mark(hint, Help, NO_HELP)
            option = Option(one.name, hint, default, about, mark(hint, Group, CONTENT).name, hidden=one.name in part.hidden)
            if option.flag:
                found.setdefault(one.name, option)
            continue
        within = mark(hint, Part, PLAIN_PART)
        several, optional = get_origin(core_of(hint)) is tuple, default is None
        for option in options_of(inner, within, default if isinstance(default, Settings) else None).values():
            needed = option.default is MISSING
            if needed and (optional or option.name in within.follows):
                option = replace(option, default=None)
            elif needed and several:
                option = replace(option, repeated=True)
            if option.name not in own:
                found.setdefault(option.name, option)
    return found


def make(kind: type[Config], values: Mapping[str, Any], part: Part = PLAIN_PART, base: Any = None) -> tuple[Config, set[str]]:
    """The config of the values of options, and the names of those that it took. InputError for one that is missing or out of bounds."""
    arguments: dict[str, Any] = {}
    taken: set[str] = set()
    hints = hints_of(kind)
    own = {one.name for one in fields(kind) if _inner(hints[one.name]) is None}  # type: ignore[arg-type]
    for one in fields(kind):  # type: ignore[arg-type]
        inner = _inner(hints[one.name])
        default = default_of(kind, one.name)
        if inner is None:
            if one.name in values and one.name not in part.without:
                arguments[one.name] = values[one.name]
                taken.add(one.name)
            elif base is not None:
                arguments[one.name] = getattr(base, one.name)
            elif default is MISSING:
                flag, of = flag_of(one.name, hints[one.name]), part.follows.get(one.name)
                raise InputError(f"{flag} is missing{f', and there is no --{of} to take it from' if of else ''}. Give {flag}.")
            continue
        within = mark(hints[one.name], Part, PLAIN_PART)
        names = options_of(inner, within)
        mine = {name: value for name, value in values.items() if name in names and name not in own}
        mine |= {name: values[of] for name, of in within.follows.items() if name not in mine and of in values}
        needed = [name for name, option in names.items() if option.default is MISSING]
        if get_origin(core_of(hints[one.name])) is tuple:
            many = [make(inner, mine | {needed[0]: value}, within) for value in mine.get(needed[0], ())]
            arguments[one.name] = tuple(config for config, _ in many)
            taken.update(*(took for _, took in many))
        elif default is not None or set(needed) & set(mine):
            arguments[one.name], took = make(inner, mine, within, default if isinstance(default, Settings) else None)
            taken |= took
    return kind(**arguments), taken


def _refuse_lost(names: Iterable[str], kinds: Iterable[Any]) -> None:
    """InputError for an option that no config took, since the one that would was not made."""
    for name in names:
        for kind in kinds:
            if option := options_of(kind).get(name):
                _refuse(option, f"no {_lead(kind, name)}")


def _refuse(option: Option, mode: str) -> None:
    raise InputError(f"{option.flag}: has no effect with {mode}: leave {option.flag} out.")


def _lead(kind: Any, name: str) -> str:
    """The option without which no config is made that would take the option `name`."""
    for one in fields(kind):
        inner = _inner(hints_of(kind)[one.name])
        if inner and name in options_of(inner):
            return _lead(inner, name)
    return next((option.flag for option in options_of(kind).values() if option.default is MISSING), "")


# verbs


def runnable(function: Callable[..., None]) -> Callable[..., None]:
    """The function of a verb with a signature that Typer makes a command of: options in place of configs."""
    parameters = inspect.signature(function, eval_str=True, locals=_Names(function)).parameters
    typers: list[inspect.Parameter] = []
    own: dict[str, Option] = {}
    configs: dict[str, Any] = {}  # parameter → its class
    for name, one in parameters.items():
        hint = one.annotation
        if any(isinstance(said, OptionInfo | ArgumentInfo) for said in marks(hint)):
            typers.append(one)
        elif about := mark(hint, Help, None):
            own[name] = Option(
                name, hint, MISSING if one.default is EMPTY else one.default, about, mark(hint, Group, PLAIN).name
            )
        else:
            configs[name] = get_args(hint)[0] if get_origin(hint) is Later else settings_in(hint)
    options: dict[str, Option] = {}
    for name in parameters:
        if name in own:
            options[name] = own[name]
        if (kind := configs.get(name)) is None:
            continue
        made_later = get_origin(parameters[name].annotation) is Later or parameters[name].default is None
        for option in options_of(kind, _part(parameters[name])).values():
            optional = made_later and option.default is MISSING
            options.setdefault(option.name, replace(option, default=None) if optional else option)

    def arguments(**given: Any) -> dict[str, Any]:
        """What the function is called with."""
        values = {
            name: options[name].read(value)
            for name, value in given.items()
            if name in options and value is not None and value is not False and value not in ([], ())
        }
        called = {one.name: given[one.name] for one in typers}
        for name, option in own.items():
            called[name] = checked_value(values[name], option.hint, option.flag) if name in values else option.default
        taken = set(own)
        for name, kind in configs.items():
            part = _part(parameters[name])
            names = options_of(kind, part)
            mine = {one: values[one] for one in names if one in values}
            if get_origin(parameters[name].annotation) is Later:
                called[name] = Later(kind, mine)
                taken |= set(mine)
            elif parameters[name].default is None and not any(one in mine for one in names if names[one].default is MISSING):
                called[name] = None
            else:
                called[name], took = make(kind, mine, part)
                taken |= took
        _refuse_lost([name for name in values if name not in taken], configs.values())
        return called

    def run(**given: Any) -> None:
        function(**arguments(**given))

    for one in typers:
        _complete(one)
    shown = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in typers]
    shown += [option.parameter() for option in options.values()]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown}
    run.arguments = arguments  # type: ignore[attr-defined]
    run.configs = configs  # type: ignore[attr-defined]
    run.renamed = {  # type: ignore[attr-defined]
        old: f"{option.flag}={said.value}" if said.value else option.flag
        for option in options.values()
        for said in marks(option.hint)
        if isinstance(said, Old)
        for old in said.names
    }
    return run


def _part(parameter: inspect.Parameter) -> Part:
    return mark(parameter.annotation, Part, PLAIN_PART)


class _Names(dict[str, Any]):
    """The names in a verb's annotations that its module does not have when it runs: those of `arrowbank`."""

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__()
        self._module = function.__globals__

    def __missing__(self, name: str) -> Any:
        if name in self._module or name not in arrowbank.__all__:
            raise KeyError(name)
        return getattr(arrowbank, name)


def _inner(hint: Any) -> type[Settings] | None:
    """The class of the configs in a field that has options for their fields."""
    return None if mark(hint, Help, NO_HELP).read else settings_in(hint)


def _complete(parameter: inspect.Parameter) -> None:
    """Let shells offer what the name of a value lists (`post|pre`)."""
    for info in marks(parameter.annotation):
        if isinstance(info, OptionInfo | ArgumentInfo) and info.autocompletion is None:
            info.autocompletion = _offer((info.metavar or "").split("|"))


def _offer(choices: Sequence[str]) -> Callable[[str], list[str]] | None:
    """Completions for an option that takes one of several values."""
    return (lambda incomplete: [one for one in choices if one.startswith(incomplete)]) if len(choices) > 1 else None
