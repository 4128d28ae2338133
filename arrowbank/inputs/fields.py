"""Field paths: where in an episode the texts are. `candidates[].text` = in every element of the list `candidates`, the key `text`."""

from __future__ import annotations

import re

from arrowbank.errors import InputError

EACH = None  # the step into every element of a list; any other step is a key
Step = str | None
FieldPath = tuple[Step, ...]

_SEGMENT = re.compile(r"([^.\[\]]+)((?:\[\])*)")


def parse_path(text: str) -> FieldPath:
    """The steps of a field path; InputError when it is not one."""
    steps: list[Step] = []
    for segment in text.split("."):
        match = _SEGMENT.fullmatch(segment)
        if match is None:
            raise InputError(
                f"--field path {text!r}: {segment!r} is not a key, nor a key and `[]`. "
                "Give keys joined by dots, with `[]` behind a key that holds a list, such as candidates[].text."
            )
        steps += [match[1], *[EACH] * (len(match[2]) // 2)]
    return tuple(steps)


def spell_path(steps: FieldPath) -> str:
    """The path as it is written: the inverse of `parse_path`."""
    return "".join("[]" if step is EACH else f".{step}" for step in steps).removeprefix(".")
