"""Damage: one byte, one value or one file of a bank or an export is changed, and `verify` must find it.

What is changed, and what is free to change, is decided in tests/mutations.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.mutations import Mutation, files_of, mutate, put
from tests.soak.children import Child, Ended, Trial, command_line, run_many, said, wrong_with
from tests.soak.tally import Try
from tests.soak.world import SUBJECTS, World

INPUTS = 60  # per round: one folder


def attack(world: World, rng: random.Random) -> Iterator[Try]:
    """INPUTS changes of one folder, one at a time."""
    name = rng.choice([name for name in SUBJECTS if _verifies(world, name)])
    folder, seed = world.folder / name, rng.getrandbits(64)
    files = {path: path.read_bytes() for path in files_of(folder)}
    for kind, wrong, detail in run_many(INPUTS, partial(_trial, folder, seed), world.scratch, world.folder):
        yield Try("damage", kind, wrong, detail)
        for path, data in files.items():
            if wrong and (not path.exists() or path.read_bytes() != data):  # the child died over it
                put(path, data)
    world.before = world.stamps()  # every file has been written anew


def _verifies(world: World, name: str) -> bool:
    """Whether `verify` passes the folder undamaged: one that it never passes shows nothing."""
    known: dict[str, bool] = world.__dict__.setdefault("verifies", {})
    if name not in known:
        ended = Child(partial(command_line, ["verify", name]), world.folder, world.output).wait()
        known[name] = ended.code == 0
        if ended.code:
            print(f"not damaged, since it does not pass undamaged: {name}\n{ended.output[-500:]}", flush=True)
    return known[name]


def _trial(folder: Path, seed: int, number: int) -> Trial:
    rng = random.Random(f"{seed}/{number}")
    mutation = mutate(folder, rng)
    while mutation.free:
        mutation.undo()
        mutation = mutate(folder, rng)

    def trial() -> tuple[str, str]:
        shown = f"{folder.name}: {mutation}\n{_difference(mutation)}"
        try:
            code = command_line(["verify", str(folder)])
        finally:
            mutation.undo()
        return wrong_with(Ended(code, said()), (1, 2)), f"{shown}\n{said()}"

    return _kind_of(folder, mutation), trial


def _kind_of(folder: Path, mutation: Mutation) -> str:
    kind = "a cache or an export" if folder.name.startswith("export") else "a bank"
    if mutation.path.suffix in (".json", ".jsonl", ".metadata"):
        return f"{kind}, JSON"
    return f"{kind}, {'shards' if mutation.path.suffix == '.arrow' else 'other files'}"


def _difference(mutation: Mutation) -> str:
    before, after = mutation.before or b"", mutation.path.read_bytes() if mutation.path.exists() else b""
    pairs = enumerate(zip(before, after, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(before), len(after)))
    shown = slice(max(0, at - 60), at + 60)
    return f"at byte {at}: {before[shown]!r} → {after[shown]!r}"
