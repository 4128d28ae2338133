"""Damage: one byte, one value or one file of a bank or an export is changed, and `verify` must find it.

Free to change are whitespace in JSON, the card and the log of the build.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.soak.children import Child, Ended, Trial, command_line, run_many, said, wrong_with
from tests.soak.mutate import edit_json, flip
from tests.soak.tally import Try
from tests.soak.world import SUBJECTS, World

INPUTS = 60  # per round: one folder
FREE = ("README.md", "build.jsonl")


def attack(world: World, rng: random.Random) -> Iterator[Try]:
    """INPUTS changes of one folder, one at a time."""
    name = rng.choice([name for name in SUBJECTS if _verifies(world, name)])
    files = {path: path.read_bytes() for path in sorted((world.folder / name).rglob("*")) if _is_checked(path)}
    seed = rng.getrandbits(64)
    for kind, wrong, detail in run_many(INPUTS, partial(_trial, name, files, seed), world.scratch, world.folder):
        yield Try("damage", kind, wrong, detail)
        if wrong:
            _restore(files)
    world.before = world.stamps()  # every file has been written anew


def _verifies(world: World, name: str) -> bool:
    """Whether `verify` passes the folder undamaged: one that it never passes shows nothing."""
    known: dict[str, bool] = world.__dict__.setdefault("verifies", {})
    if name not in known:
        argv = SUBJECTS[name].format(name).split()
        ended = Child(partial(command_line, argv), world.folder, world.output).wait()
        known[name] = ended.code == 0
        if ended.code:
            print(f"not damaged, since it does not pass undamaged: {name}\n{ended.output[-500:]}", flush=True)
    return known[name]


def _trial(name: str, files: dict[Path, bytes], seed: int, number: int) -> Trial:
    rng = random.Random(f"{seed}/{number}")
    path = rng.choice([path for path in files if files[path]])
    data = files[path]
    what, changed = _changed(rng, path, data)
    if changed is not None and _is_free(path, data, changed):
        changed = flip(rng, data) if path.suffix not in (".json", ".jsonl") else _cut(rng, data)

    def trial() -> tuple[str, str]:
        _write(path, changed)
        try:
            code = command_line(SUBJECTS[name].format(name).split())
        finally:
            _write(path, data)
        return wrong_with(Ended(code, said()), (1, 2)), f"{what} of {path.name}\n{_difference(data, changed)}\n{said()}"

    return f"{_kind_of(path, name)}", trial


def _changed(rng: random.Random, path: Path, data: bytes) -> tuple[str, bytes | None]:
    """What is done, and the file's new bytes (None: the file is gone)."""
    way = rng.random()
    if way < 0.02:
        return "removal", None
    if way < 0.08:
        return "cut", _cut(rng, data)
    if way < 0.12:
        return "longer", data + rng.choice((b"\0", b"\n", data[:9]))
    if way < 0.5 and path.suffix == ".json":
        return "edit", json.dumps(edit_json(rng, json.loads(data)), indent=1).encode("utf-8", "replace")
    return "flip", flip(rng, data)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data.rstrip()))]


def _is_free(path: Path, data: bytes, changed: bytes) -> bool:
    """Whether the change is none: the same JSON, written in another way."""
    if data == changed:
        return True
    if path.suffix not in (".json", ".jsonl"):
        return False
    return _parsed(path, data) == _parsed(path, changed)


def _parsed(path: Path, data: bytes) -> Any:
    try:
        if path.suffix == ".jsonl":
            return [json.dumps(json.loads(line)) for line in data.decode().splitlines() if line.strip()]
        return json.dumps(json.loads(data))  # 1, 1.0 and true are three things
    except (ValueError, RecursionError):
        return data


def _difference(data: bytes, changed: bytes | None) -> str:
    if changed is None:
        return "gone"
    at = next(
        (at for at, (one, other) in enumerate(zip(data, changed, strict=False)) if one != other), min(len(data), len(changed))
    )
    return f"at byte {at}: {data[max(0, at - 60) : at + 60]!r} → {changed[max(0, at - 60) : at + 60]!r}"


def _kind_of(path: Path, name: str) -> str:
    kind = "a bank" if not name.startswith("export") else "an export"
    file = {".arrow": "shard", ".json": path.name, ".jsonl": path.name}.get(path.suffix, path.suffix)
    return f"{kind}, {file}"


def _is_checked(path: Path) -> bool:
    return path.is_file() and path.name not in FREE and not path.name.startswith(".") and path.suffix != ".lock"


def _write(path: Path, data: bytes | None) -> None:
    """A new file in the old one's place: a mapping of the old one stays what it was."""
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)


def _restore(files: dict[Path, bytes]) -> None:
    for path, data in files.items():
        if not path.exists() or path.read_bytes() != data:
            _write(path, data)
