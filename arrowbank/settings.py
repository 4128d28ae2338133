"""Checked options: config classes and public functions whose values are held against their own annotations.

    class TokenizeConfig(Settings):            # a frozen dataclass
        max_tokens: Count = 256                # Annotated[int, Range(least=1)]
        on_long: Literal["truncate", "error"] = "truncate"

    TokenizeConfig(max_tokens="256")           # InputError: TokenizeConfig: max_tokens is '256'; expected a whole number, …

What an annotation says is the one rule: types, bounds and choices need no code of their own. Values that mean the same are
stored in one form (a NumPy integer as an int, a list as a tuple, a path as a str where the annotation is `Place`).

An option that only some inputs or modes read has the default None, "not given"; `refuse_unread` then refuses it where it would
have no effect.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from arrowbank.errors import InputError

SHOWN = 60  # characters of a value in a message
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN
LISTS = (list, Sequence, Iterable)
NAMES = {str: "a string", bool: "True or False", int: "a whole number", float: "a number", Path: "a path", type(None): "None"}

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """Bounds of a number: `least` and `most` are allowed, `above` and `below` are not. A NaN is in no range."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        said = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{words} {bound:g}" for words, bound in said.items() if bound is not None)


@dataclass(frozen=True)
class Help:
    """What the command line says of a field.

    text     its meaning
    value    how a value is written (default: by the type), such as M, A:B or NAME=PATH
    example  a value for error messages
    default  what None stands for
    choices  values that a shell may offer
    read     makes the value of what is typed, where the type does not say how; raises InputError
    """

    text: str
    value: str = ""
    _: KW_ONLY
    example: str = ""
    default: str = ""
    choices: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None


@dataclass(frozen=True)
class Flag:
    """The option of a field, where it is not the field's name with dashes (after `no-` where the default is True); "": there is none."""

    name: str


@dataclass(frozen=True)
class Group:
    """The heading in a verb's help that an option is under."""

    name: str


CONTENT, EXECUTION = Group("Content options"), Group("Execution options")


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """How a config inside another one is given there.

    without  its fields that keep their defaults: the outer config refuses other values, and the command line has no options for them
    help     what the command line says of its fields here, by name
    follows  field → option of the verb whose value it has where it is not given
    hidden   its fields that the verb refuses, saying why: options that help leaves out
    """

    without: tuple[str, ...] = ()
    help: Mapping[str, Help] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()


class Old:
    """Earlier spellings of an option: they still work, and say on standard error how it is spelled now; of a flag that has become an option
    with a value, `value`."""

    def __init__(self, *names: str, value: str = "") -> None:
        self.names, self.value = names, value


class _PlaceMark:
    """Marks a string that may be given as a path."""


Place = Annotated[str, _PlaceMark()]
Count = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(least=0, most=1)]
Cosine = Annotated[float, Range(least=-1, most=1)]


class Settings:
    """Base of the frozen dataclasses of options. InputError, when one is made, for a value that its annotation does not allow."""

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for one in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            hint, name = hints[one.name], f"{type(self).__name__}: {one.name}"
            flag = "" if settings_in(hint) else flag_of(one.name, hint, one.default)
            value = checked_value(getattr(self, one.name), hint, name, flag)
            object.__setattr__(self, one.name, value)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Settings):
                    _require_defaults(part, mark(hint, Part, Part()).without, name)
        self.check()

    def check(self) -> None:
        """Raise InputError for what no annotation of one field can say."""


def checked_value(value: Any, hint: Any, name: str, flag: str = "") -> Any:
    """`value` in the form in which it is stored. InputError, naming `name` and the option `flag`, where `hint` does not allow it."""
    try:
        return _taken(value, hint)
    except _Unfit as unfit:
        inside = f" at {unfit.inside}" if unfit.inside else ""
        option = f" ({flag})" if flag else ""
        raise InputError(f"{name} is {_shown(unfit.found)}{inside}; expected {unfit.expected}{option}.{unfit.remedy}") from None


def checked(function: Function) -> Function:
    """A public function whose arguments are checked as the fields of `Settings` are."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        hints = hints_of(function)
        for name, value in given.arguments.items():
            if name in hints:
                given.arguments[name] = checked_value(value, hints[name], f"{function.__qualname__}: {name}")
        return function(*given.args, **given.kwargs)

    return cast(Function, run)


def given(options: Any, names: Iterable[str]) -> dict[str, Any]:
    """The fields of a dataclass among `names` that are not what they are where nobody gives them."""
    defaults = {one.name: one.default for one in fields(options)}
    return {name: value for name in names if (value := getattr(options, name)) != defaults[name]}


def refuse_unread(mode: str, options: Any = None, names: Iterable[str] = (), **loose: object) -> None:
    """InputError for the first option that was given and has no effect in `mode`, in words: a field of `options` among `names`,
    or one of `loose` that is not None or False."""
    found = given(options, names) if names else {}
    found |= {name: value for name, value in loose.items() if value is not None and value is not False}
    hints = hints_of(type(options)) if found else {}
    for name in found:
        flag = flag_of(name, hints.get(name), default_of(type(options), name) if name in hints else None)
        shown = flag if flag == f"--{name}" else f"{flag} ({name})"
        raise InputError(f"{shown}: has no effect with {mode}: leave {flag} out.")


def require_one(options: Any, names: tuple[str, str], *, needed: bool = True) -> None:
    """InputError unless exactly one of two fields of `options` was given (at most one, where none is `needed`)."""
    found = [name for name in names if name in given(options, names)]
    if len(found) > 1 or (needed and not found):
        hints = hints_of(type(options))
        flags = [_flag_inside(name, hints[name]) for name in names]
        how, found_word = "exactly" if needed else "at most", "both were" if found else "neither was"
        raise InputError(f"Pass {how} one of {' and '.join(flags)} ({found_word} given).")


def _flag_inside(name: str, hint: Any) -> str:
    """The option of a field; of one that is a config, the option that this config cannot be without."""
    kind = settings_in(hint)
    if kind is None:
        return flag_of(name, hint)
    lead = next(one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING)  # type: ignore[arg-type]
    return _flag_inside(lead, hints_of(kind)[lead])


_HINTS: dict[Any, dict[str, Any]] = {}


def hints_of(what: Any) -> dict[str, Any]:
    """The annotations of a class or function, resolved once."""
    if what not in _HINTS:
        _HINTS[what] = get_type_hints(what, include_extras=True)
    return _HINTS[what]


def default_of(kind: type, name: str) -> Any:
    """The default of a field of a dataclass; MISSING where it must be given."""
    one = next(one for one in fields(kind) if one.name == name)
    return one.default_factory() if one.default_factory is not MISSING else one.default


def settings_in(hint: Any) -> type[Settings] | None:
    """The class of options whose objects a field takes, alone or in a tuple: its fields are options, the field itself is none."""
    kind = core_of(hint)
    if get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,):
        kind = core_of(get_args(kind)[0])
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def core_of(hint: Any) -> Any:
    """The type in a hint, without marks and None: of `Annotated[int, …] | None` it is int."""
    while get_origin(hint) in (Annotated, Union, types.UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


def flag_of(name: str, hint: Any = None, default: Any = None) -> str:
    """The option of the field `name` on the command line; "" where it has none."""
    words = name.strip("_").replace("_", "-")
    return mark(hint, Flag, Flag(f"--no-{words}" if default is True else f"--{words}")).name


Mark = TypeVar("Mark")
Otherwise = TypeVar("Otherwise")


def mark(hint: Any, kind: type[Mark], otherwise: Otherwise) -> Mark | Otherwise:
    """The mark of that kind in a hint; the outermost, where there are several."""
    return next((one for one in marks(hint) if isinstance(one, kind)), otherwise)


def marks(hint: Any) -> Iterator[Any]:
    """What `Annotated` says, here or inside a union; the last said first."""
    if get_origin(hint) is Annotated:
        yield from reversed(get_args(hint)[1:])
        yield from marks(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from marks(member)


def _require_defaults(options: Settings, names: Iterable[str], name: str) -> None:
    for inner in names:
        found, expected = getattr(options, inner), default_of(type(options), inner)
        if found != expected:
            raise InputError(
                f"{name}.{inner} is {_shown(found)}, which has no effect here; expected the default, {expected!r}."
            )


class _Unfit(Exception):
    """A value, or one inside it, that a hint does not allow. `near`: it is of the right type, and out of bounds."""

    def __init__(self, found: Any, expected: str, inside: str = "", remedy: str = "", *, near: bool = False) -> None:
        self.found, self.expected, self.inside, self.remedy, self.near = found, expected, inside, remedy, near


def _taken(value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it. Raises _Unfit."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _marked(value, hint)
    if origin in (Union, types.UnionType):
        return _one_of(value, hint, args)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return str(value)
        raise _Unfit(value, _words(hint))
    if origin is tuple:
        return _tuple(value, hint, args)
    if origin in LISTS:
        return [_inside(item, args[0], at) for at, item in enumerate(_items(value, hint, args[0]))]
    kind = origin or hint
    if kind in _PLAIN:
        return _PLAIN[kind](value)
    checkable = isinstance(kind, type) and not getattr(kind, "_is_protocol", False) and kind is not object
    if checkable and not isinstance(value, kind):
        raise _Unfit(value, _words(hint), remedy=_call(kind))
    return value


def _marked(value: Any, hint: Any) -> Any:
    inner, *said = get_args(hint)
    given = value
    if isinstance(value, os.PathLike) and any(isinstance(one, _PlaceMark) for one in said):
        value = os.fspath(value)
    try:
        value = _taken(value, inner)
    except _Unfit as unfit:
        if unfit.inside or unfit.near:
            raise
        raise _Unfit(unfit.found, _words(hint), remedy=unfit.remedy) from None
    for one in said:
        if isinstance(one, Range) and value is not None and value not in one:
            raise _Unfit(given, str(one), near=True)
    return value


def _one_of(value: Any, hint: Any, members: Sequence[Any]) -> Any:
    if Path in members and isinstance(value, str | Path) and "\0" in str(value):
        raise _Unfit(value, "a path without a null character", near=True)
    unfit: list[_Unfit] = []
    for member in sorted(members, key=lambda member: type(value) is not member):
        try:
            return _taken(value, member)
        except _Unfit as error:
            unfit.append(error)
    closest = next((error for error in unfit if error.inside or error.near), None)
    if closest is not None:
        raise closest
    raise _Unfit(value, _words(hint), remedy=next((error.remedy for error in unfit if error.remedy), ""))


def _tuple(value: Any, hint: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_inside(item, args[0], at) for at, item in enumerate(_items(value, hint, args[0])))
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise _Unfit(value, _words(hint))
    items = list(value)
    if len(items) != len(args):
        raise _Unfit(value, _words(hint))
    return tuple(_inside(item, arg, at) for at, (item, arg) in enumerate(zip(items, args, strict=True)))


def _items(value: Any, hint: Any, item: Any) -> list[Any]:
    """The members of a list. A lone string or path is a list of one, where such are listed."""
    if isinstance(value, str | os.PathLike):
        try:
            return [_taken(value, item)]
        except _Unfit:
            raise _Unfit(value, _words(hint)) from None
    if isinstance(value, bytes | bytearray | Mapping | Set) or not isinstance(value, Iterable):
        raise _Unfit(value, _words(hint))
    try:
        return list(value)
    except TypeError:  # an array of no dimensions
        raise _Unfit(value, _words(hint)) from None


def _inside(value: Any, hint: Any, at: int) -> Any:
    try:
        return _taken(value, hint)
    except _Unfit as unfit:
        raise _Unfit(unfit.found, unfit.expected, f"[{at}]{unfit.inside}", unfit.remedy) from None


def _bool(value: Any) -> bool:
    if type(value).__name__ in ("bool", "bool_"):  # Python's and NumPy's, whose name depends on its version
        return bool(value)
    raise _Unfit(value, NAMES[bool])


def _int(value: Any) -> int:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
        if -(1 << 63) <= number < 1 << 63:
            return number
        raise _Unfit(value, "a whole number of 64 bits", near=True)
    raise _Unfit(value, NAMES[int])


def _float(value: Any) -> float:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # a whole number past all floats
            if math.isfinite(value):
                return float(value)
    raise _Unfit(value, NAMES[float])


def _str(value: Any) -> str:
    if isinstance(value, str):
        return str.__str__(value)
    raise _Unfit(value, NAMES[str])


def _path(value: Any) -> Path:
    if isinstance(value, str | os.PathLike):
        return Path(value)
    raise _Unfit(value, NAMES[Path])


def _none(value: Any) -> None:
    if value is not None:
        raise _Unfit(value, NAMES[type(None)])


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    Path: _path,
    type(None): _none,
    Any: lambda value: value,
}


def _words(hint: Any) -> str:
    """What a hint allows, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = "".join(f", {one}" for one in args[1:] if isinstance(one, Range))
        place = " or a path" if any(isinstance(one, _PlaceMark) for one in args[1:]) else ""
        return f"{_words(args[0])}{bounds}{place}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(arg) for arg in args if arg is not type(None)))
    if origin is Literal:
        return f"one of {', '.join(args)}" if len(args) > 1 else f"{args[0]}"
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return f"({', '.join(map(_words, args))})"
    if origin is tuple or origin in LISTS:
        return f"a list, each {_words(args[0])}"
    kind = origin or hint
    return NAMES.get(kind) or f"a {getattr(kind, '__name__', kind)}"


def _call(kind: type) -> str:
    """What to do about a value where an object of options is meant."""
    return f" Give {kind.__name__}(…)." if issubclass(kind, Settings) else ""


def _shown(value: Any) -> str:
    try:
        short = _SHORT.repr(value)
    except (ValueError, RecursionError):  # a whole number of more digits than Python writes out, a list within itself
        short = "…"
    return short if value is None or type(value) in (bool, int, float, str) else f"{short} ({type(value).__name__})"
