"""Verbs that take groups of options (not yet config classes)."""

from __future__ import annotations

from collections.abc import Callable


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    return verb
