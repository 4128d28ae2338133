"""The page of the Python names, made from what `arrowbank` exports: signature and docstring of each, by what it is for."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import arrowbank

# part of the package → heading; a name whose part is not here comes last, so that none is left out
GROUPS = {
    "bank": "Open and verify a bank",
    "features": "Feature banks",
    "combine": "Banks out of banks",
    "report": "Look into a bank",
    "models": "Models and batches",
    "engine": "Models and batches",
    "targets": "Target banks",
    "in2": "IN2 arms",
    "mtp": "Trunk banks and healing",
    "formats": "Hand a bank on",
    "share": "Hand a bank on",
}
OTHER = "More"
INTRODUCTION = """\
# Python

Everything here is imported from `arrowbank`. Each name loads what it needs when it is first used, so `import arrowbank` itself loads no
torch. A stage is a function that takes one frozen dataclass of options; the verbs of the [command line](cli/index.md) call the same
functions. Errors are those of [errors and what to do](errors.md): all are `arrowbank.errors.ArrowbankError`."""


def page() -> str:
    """The page as Markdown: first functions, then classes, in each group."""
    groups: dict[str, list[str]] = {title: [] for title in (*GROUPS.values(), OTHER)}
    for name in arrowbank.__all__:
        home = getattr(arrowbank, name).__module__.split(".")
        groups[GROUPS.get(home[1], OTHER)].append(name)
    lines = [INTRODUCTION]
    for title, names in groups.items():
        if names:
            lines += ["", f"## {title}"]
        for name in sorted(names, key=lambda one: (inspect.isclass(getattr(arrowbank, one)), one)):
            lines += _entry(name, getattr(arrowbank, name))
    return "\n".join([*lines, "", "## Errors", "", *_errors()])


def _entry(name: str, value: Any) -> Iterator[str]:
    yield from ("", f"### `{name}` {{ #{name} }}", "")
    yield from ("```python", _signature(name, value), "```", "", prose(inspect.getdoc(value)))
    if inspect.isclass(value):
        for member, of in _members(value):
            yield from ("", f"`{_one_line(member, of)}`", f":   {_indented(prose(inspect.getdoc(of)))}")


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring, the class's own and those of its bases in this package."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    seen = set(fields)
    for owner in kind.__mro__:
        if owner.__module__.split(".")[0] != "arrowbank":
            continue
        for name, value in vars(owner).items():
            if not name.startswith("_") and name not in seen and inspect.getdoc(value) and not isinstance(value, str):
                seen.add(name)
                yield name, value


def _one_line(name: str, value: Any) -> str:
    if not callable(value):
        return name
    return name + re.sub(r"\bself(, )?", "", _annotations(str(inspect.signature(value))), count=1)


def _signature(name: str, value: Any) -> str:
    """`name(…)` with a parameter a line where it does not fit one."""
    signature = inspect.signature(value)
    silent = inspect.isclass(value) or signature.return_annotation is signature.empty
    result = "" if silent else f" -> {signature.return_annotation}"
    parts, starred = [], False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        parts.append(_annotations(str(one)))
    line = f"{name}({', '.join(parts)}){_annotations(result)}"
    if len(line) <= 76:  # what the page shows without scrolling
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){_annotations(result)}"])


def _annotations(text: str) -> str:
    """Annotations as they are in the source: without quotes and marks of dataclasses' factories."""
    text = re.sub(r"<factory>|<class '[\w.]*?(\w+)'>", lambda found: found.group(1) or "…", text)
    text = re.sub(r"<[\w.]*?\b_?(\w+) object at 0x[0-9a-f]+>", lambda found: found.group(1).upper(), text)  # SILENT
    return re.sub(r"(?<=[:>] )'([^']*)'", r"\1", text)


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: outside of code, brackets are brackets; "Raises …" is a paragraph that stands out."""
    parts = re.split(r"(`[^`]*`)", docstring or "")
    text = "".join(part if part.startswith("`") else part.replace("[", "\\[").replace("*", "\\*") for part in parts)
    return re.sub(r"^(Raises?)\b", r"**\1**", text, flags=re.MULTILINE)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _errors() -> Iterator[str]:
    errors = importlib.import_module("arrowbank.errors")
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.ArrowbankError):
            yield from (f"`arrowbank.errors.{name}`", f":   {_indented(prose(inspect.getdoc(value)))}", "")
