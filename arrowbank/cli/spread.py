"""Options that verbs share, as dataclasses: a verb takes one as an argument, and Typer sees its fields as options of the verb.

On the way every option gets what people see of it: a name for its value, and the values that a shell may offer.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from arrowbank.settings import Old


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose dataclass parameters are replaced by their fields; it builds the dataclasses again when it is called."""
    parameters = inspect.signature(verb, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: parameter.annotation for name, parameter in parameters.items() if dataclasses.is_dataclass(parameter.annotation)
    }

    @functools.wraps(verb)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        verb(**given)

    shown = [parameter for name, parameter in parameters.items() if name not in groups]
    shown += [parameter for group in groups.values() for parameter in _parameters(group)]
    for parameter in shown:
        _complete(parameter)
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]
    )
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    run.renamed = {old: new for parameter in shown for old, new in _renamed(parameter)}  # type: ignore[attr-defined]
    return run


def _renamed(parameter: inspect.Parameter) -> list[tuple[str, str]]:
    """The earlier spellings of an option, each with the one of today."""
    marks = get_args(parameter.annotation)[1:]
    names = [str(name) for info in marks if isinstance(info, OptionInfo) for name in (info.default, *(info.param_decls or ()))]
    today = next((name for name in names if name.startswith("-")), "")
    return [(old, today) for mark in marks if isinstance(mark, Old) for old in mark.names]


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]


def _complete(parameter: inspect.Parameter) -> None:
    """Name the value of an option that has no name for it, and let shells offer what its name lists (`post|pre`)."""
    kind, *infos = get_args(parameter.annotation)
    for info in infos:
        if isinstance(info, OptionInfo) and info.metavar is None:
            kinds = {kind, *get_args(kind)}
            info.metavar = "N" if int in kinds else "X" if float in kinds else None if bool in kinds else "TEXT"
        if isinstance(info, OptionInfo | ArgumentInfo) and "|" in (info.metavar or ""):
            info.autocompletion = _offer(str(info.metavar).split("|"))


def _offer(values: list[str]) -> Callable[[str], list[str]]:
    def offer(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return offer
