"""Damage to a bank on disk, one mutation at a time: a byte flipped, a file cut or swapped, a value of its JSON edited.

`mutate(folder, random)` changes one file of the bank in `folder` and returns a `Mutation`; `undo()` puts the file back. Where
`Mutation.free` is empty, `verify` has to fail; else it says why nothing has to be found. What is free is decided in `free_reason`, and
nowhere else. Nothing of the package is used here: what a check looks for must not come from the check.

`reseal` is for tests that need a consistent lie: an edited manifest with digests that fit it again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOR_PEOPLE = ("README.md", "build.jsonl", "plot.svg")  # nothing vouches for them
SIDECAR = "arrowbank-export.json"
JSON_FILES = ("manifest.json", "state.json", "dataset_info.json")
WRITERS = {"format", "kind", "plan_digest", "recipe", "rows", "complete", "files"}


@dataclass(frozen=True)
class Mutation:
    """What was done to which file; `free`: why it need not be found, or nothing."""

    path: Path
    before: bytes | None
    what: str
    free: str

    def undo(self) -> None:
        put(self.path, self.before)

    def __str__(self) -> str:
        return f"{self.path.name}: {self.what}"


def files_of(folder: Path) -> list[Path]:
    """The files of a bank that are vouched for."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in FOR_PEOPLE)


def put(path: Path, data: bytes | None) -> None:
    """Replace a file as a whole, so that hard links to it and maps of it keep what they have. None: it is gone."""
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)


def mutate(folder: Path, rng: random.Random, name: str | None = None) -> Mutation:
    """One random mutation of a random file, or of the file `name`. Half of those of JSON are edits, half flips."""
    path = folder / name if name else rng.choice(files_of(folder))
    before = path.read_bytes()
    ways: list[Callable[[bytes, random.Random], tuple[str, bytes | None]]] = [flip_byte, flip_byte, cut, lengthen, zero, remove]
    if path.name in JSON_FILES:
        ways = [flip_byte, edit_json]
    elif path.suffix == ".json":
        ways = [flip_byte, edit_json, cut, remove]
    elif path.suffix == ".jsonl":
        ways = [flip_byte, edit_lines, cut, remove]
    while True:
        what, after = rng.choice(ways)(before, rng)
        if after != before:
            put(path, after)
            return Mutation(path, before, what, free_reason(path.name, before, after))


def free_reason(name: str, before: bytes, after: bytes | None) -> str:
    """Why nothing has to find that a file became what it is, or an empty string.

    Whitespace and spelling of manifest.json, state.json and the sidecar of an export are free (files that the manifest lists are hashed),
    and so are fields that are added to the manifest: trainers do that.
    """
    if name == SIDECAR and after is None:
        return "a cache without a sidecar, which verify says"
    if name not in ("manifest.json", "state.json", SIDECAR) or after is None:
        return ""
    old = json.loads(before)
    try:
        new = json.loads(after, object_pairs_hook=_strict)
    except (ValueError, RecursionError):
        return ""
    if canonical(new) == canonical(old):
        return "the same values"
    if name == "manifest.json" and isinstance(new, dict):
        known = WRITERS | set(old)
        if canonical({key: value for key, value in new.items() if key in known}) == canonical(old):
            return "a field added"
    return ""


def _strict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)  # tells true, 1 and 1.0 apart


# bytes


def flip_byte(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One byte becomes another one, half of the time by one bit."""
    if not data:
        return "a byte added", b"\n"
    at = rng.randrange(len(data))
    flipped = data[at] ^ (1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256))
    return f"byte {at}: {data[at]} → {flipped}", data[:at] + bytes([flipped]) + data[at + 1 :]


def cut(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    size = rng.randrange(len(data)) if data else 0
    return f"cut to {size} of {len(data)} bytes", data[:size]


def lengthen(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    more = rng.randbytes(rng.randrange(1, 100))
    return f"{len(more)} bytes more", data + more


def zero(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    at, size = rng.randrange(len(data) + 1), rng.randrange(1, 600)
    return f"zeros from byte {at}", data[:at] + bytes(len(data[at : at + size])) + data[at + size :]


def remove(data: bytes, rng: random.Random) -> tuple[str, None]:
    return "the file is gone", None


def edit_lines(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A line twice, a line less, or two lines swapped."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return "a line added", b"{}\n"
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    way = rng.choice(["twice", "gone", "swapped"])
    if way == "twice":
        lines.insert(other, lines[one])
    elif way == "gone":
        del lines[one]
    else:
        lines[one], lines[other] = lines[other], lines[one]
    return f"lines {one} and {other}: {way}", b"".join(lines)


# JSON


def edit_json(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One structured edit of a JSON document: a key gone, renamed, added, there twice; a value changed, of another type, swapped with
    another one; an entry of a list gone, there twice, in another place."""
    document = json.loads(data)
    places = list(_places(document))
    if not places:
        return "another document", b"[]"
    container, key, where = rng.choice(places)
    old, duplicated = container[key], None
    ways: list[str] = ["gone", "another value", "another type", "swapped"]
    ways += ["twice", "moved"] if isinstance(container, list) else ["renamed", "key twice", "key added"]
    way = rng.choice(ways)
    if way == "gone":
        del container[key]
    elif way == "another value":
        container[key] = another(old, rng)
    elif way == "another type":
        container[key] = rng.choice([value for value in _TYPES if type(value) is not type(old)])
    elif way == "swapped":
        other_container, other, _ = rng.choice(places)
        # a value is not swapped with what holds it
        if not _holds(old, other_container) and not _holds(other_container[other], container):
            container[key], other_container[other] = other_container[other], old
    elif way == "twice":
        container.insert(rng.randrange(len(container) + 1), copy.deepcopy(old))
    elif way == "moved":
        container.insert(rng.randrange(len(container)), container.pop(key))
    elif way == "renamed":
        container[rng.choice([f"{key}x", key[:-1], key.upper()])] = container.pop(key)
    elif way == "key added":
        container[f"{key}_{rng.randrange(100)}"] = copy.deepcopy(old)
    else:
        duplicated = (container, key, another(old, rng))
    return f"{where}: {way}", _spelled(document, duplicated)


_TYPES: tuple[Any, ...] = (None, True, 0, 1.0, "", "1", [], {})


def another(value: Any, rng: random.Random) -> Any:
    """A value of the same type that is near by, as an honest mistake would be."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice([-1, 1, 2, 256, -value - 1, 10**20])
    if isinstance(value, float):
        return rng.choice([value + 0.5, -value - 1, value * 2 + 1, float("nan")])
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice(
            [value[:at] + "x" + value[at:], value[: at - 1] + value[at:] if at else value + "/", f"../{value}", "ä"]
        )
    if isinstance(value, list):
        return rng.choice([value + value[:1] if value else [0], value[1:] if value else [None], [*value, None]])
    if isinstance(value, dict):
        return {**value, "x": 0}
    return rng.choice([0, "null", False])


def _places(value: Any, where: str = "") -> Any:
    """Every (container, key, its path) in a document."""
    if isinstance(value, dict | list):
        for key, inside in list(value.items() if isinstance(value, dict) else enumerate(value)):
            path = f"{where}.{key}" if where else str(key)
            yield value, key, path
            yield from _places(inside, path)


def _holds(value: Any, container: Any) -> bool:
    return value is container or any(_holds(inside, container) for inside in _children(value))


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _spelled(document: Any, duplicated: tuple[Any, Any, Any] | None) -> bytes:
    """The document as text; with `duplicated` (container, key, value) the key stands in the container once more, first with that value."""
    if duplicated is None:
        return json.dumps(document, indent=2, sort_keys=True).encode("utf-8", "replace")
    container, key, value = duplicated
    mark = "\x00mark"
    container[mark] = value
    text = json.dumps(document)
    del container[mark]
    return text.replace(json.dumps(mark), json.dumps(key)).encode("utf-8", "replace")


# consistent lies


def reseal(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest in `folder` and make all of its digests fit again, as somebody who wants to deceive would."""
    path = folder / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text())
    edit(manifest)
    plan = {"format": manifest["format"], "kind": manifest["kind"], "recipe": manifest["recipe"]}
    manifest["plan_digest"] = _digest(plan)
    state = json.loads((folder / "state.json").read_text()) | {"_fingerprint": manifest["plan_digest"][:16]}
    names = [name for name in state["_manifest"]["fields"] if name in manifest]
    state["_manifest"] = {"fields": names, "sha256": _digest({name: manifest[name] for name in names})}
    for name, value in (("manifest.json", manifest), ("state.json", state)):
        put(folder / name, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()
