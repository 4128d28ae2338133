"""What was tried and what failed, per kind, added up over runs in a JSON file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEPT_ALIKE = 3  # failures that end alike, with their details; all are counted


@dataclass(frozen=True)
class Try:
    """One input: its attack and kind, and what was wrong with how it ended ("": nothing), with what was said."""

    attack: str
    kind: str
    wrong: str = ""
    detail: str = ""


@dataclass
class Tally:
    """Counts per "attack: kind", and the failures themselves."""

    tried: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, one: Try, where: str) -> None:
        """Count one input, tried in the round `where` ("--seed S --only attack:number")."""
        kind = f"{one.attack}: {one.kind}"
        self.tried[kind] += 1
        if one.wrong:
            self.failed[kind] += 1
            entry = {"kind": kind, "wrong": one.wrong, "round": where, "detail": one.detail[-3000:]}
            if sum(_end_alike(entry, other) for other in self.failures) < KEPT_ALIKE:
                self.failures.append(entry)

    def merge(self, other: Tally) -> None:
        self.tried.update(other.tried)
        self.failed.update(other.failed)
        self.failures = self.failures + other.failures
        self.seconds += other.seconds

    def total(self, prefix: str) -> int:
        return sum(count for kind, count in self.tried.items() if kind.startswith(prefix))

    def table(self) -> str:
        """A Markdown table, a line per kind and one per attack."""
        lines = ["| attack | inputs | failures |", "|---|---:|---:|"]
        for attack, kinds in _grouped(self.tried):
            for kind in kinds:
                lines.append(f"| {kind} | {self.tried[kind]:,} | {self.failed[kind]:,} |")
            failed = sum(self.failed[kind] for kind in kinds)
            lines.append(f"| **{attack}** | **{sum(self.tried[kind] for kind in kinds):,}** | **{failed:,}** |")
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Replace the file, in one step: a soak that is killed loses its last minutes, not the figures of earlier runs."""
        temporary = path.with_name(f".{path.name}.tmp")
        fields = {"seconds": round(self.seconds), "tried": self.tried, "failed": self.failed, "failures": self.failures}
        temporary.write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")
        temporary.replace(path)


def load(path: Path | None) -> Tally:
    """The figures of earlier runs; none if there is no such file."""
    if path is None or not path.exists():
        return Tally()
    found = json.loads(path.read_text())
    return Tally(Counter(found["tried"]), Counter(found["failed"]), found["failures"], found["seconds"])


def _grouped(kinds: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    attacks: dict[str, list[str]] = {}
    for kind in sorted(kinds):
        attacks.setdefault(kind.split(": ")[0], []).append(kind)
    yield from attacks.items()


def machine() -> str:
    """The machine in a few words, for the table's heading."""
    import platform

    return f"Python {platform.python_version()}, Linux {platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _end_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    last = [entry["detail"].strip().splitlines()[-1:] for entry in (one, other)]
    return (one["kind"], one["wrong"], last[0]) == (other["kind"], other["wrong"], last[1])
