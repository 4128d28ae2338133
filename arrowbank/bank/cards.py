"""stub"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Description:
    title: str
    facts: dict[str, object]
    tags: tuple[str, ...]
    snippet: str


def describe_bank(manifest: dict[str, Any]) -> Description:
    return Description(
        f"A bank of {manifest['kind']}",
        {"kind": manifest["kind"]},
        (),
        'from arrowbank import open_bank\n\nbank = open_bank("path/to/this/folder")',
    )
