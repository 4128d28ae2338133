"""Kills: a command, its workers or both die by SIGKILL at random moments, several times; then the same command finishes.

What it wrote must then be, byte for byte, what an undisturbed run writes, and what was finished must have been kept.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kill import tree_bytes
from tests.soak.children import Child, Ended, empty, kill, wrong_with
from tests.soak.tally import Try
from tests.soak.world import COMMANDS, Command, World

MOST_KILLS = 8  # before a command may finish
SLOW_S, MOST_KILLS_SLOW = 3, 2
WORKER_KILLED = "a worker"


@dataclass(frozen=True)
class Undisturbed:
    """What a run that nobody disturbs writes, in how many seconds, with how many publish steps."""

    files: dict[str, str]
    bytes: int
    seconds: float
    moments: int


def attack(world: World, rng: random.Random) -> Iterator[Try]:
    """One command, killed up to MOST_KILLS times, and then finished; a try per kill, and one for what became of it."""
    command = rng.choices(COMMANDS, [command.weight for command in COMMANDS])[0]
    expected = undisturbed(world, command)
    empty(world.run)
    ways, wrong, detail, kept = [], "", "", dict[str, int]()
    for _ in range(rng.randint(1, MOST_KILLS if expected.seconds < SLOW_S else MOST_KILLS_SLOW)):
        way, ended = _killed(world, command, expected, rng)
        if way:
            ways.append(way)
        if not wrong and not (way and ended.killed):
            wrong, detail = wrong_with(ended, (command.code, 2)), ended.output
        kept = _finished(world.run) if command.keeps else {}
        if ended.code == command.code:
            break
    last = world.start(command).wait()
    if not wrong:
        wrong, detail = wrong_with(last, (command.code,)) or differs(world, expected), last.output
    redone = [name for name, inode in kept.items() if _inode(world.run / "out" / name) != inode]
    if not wrong and len(redone) > 1:  # a crash costs one shard at most
        wrong = f"finished work was done again or lost: {redone}"
    if world.stamps() != world.before:
        wrong = "an input was changed"
        world.before = world.stamps()
    yield from (Try("kills", way) for way in ways)
    yield Try("resumed", command.name, wrong, f"{detail}\nkilled: {ways}")


def undisturbed(world: World, command: Command) -> Undisturbed:
    """Made once per command."""
    known: dict[str, Undisturbed] = world.__dict__.setdefault("undisturbed", {})
    if command.name not in known:
        empty(world.run)
        started = time.monotonic()
        ended = world.start(command, die_at=0).wait()
        if ended.code != command.code:
            raise SystemExit(f"{command.name} fails undisturbed (exit code {ended.code}):\n{ended.output}")
        known[command.name] = Undisturbed(
            tree_bytes(world.run),
            sum(path.stat().st_size for path in world.run.rglob("*") if path.is_file()),
            time.monotonic() - started,
            int(world.moments.read_text()),
        )
    return known[command.name]


def differs(world: World, expected: Undisturbed) -> str:
    """How the result differs from that of an undisturbed run, "" if it does not."""
    found = tree_bytes(world.run)
    if found == expected.files:
        return ""
    names = sorted(name for name in found.keys() | expected.files.keys() if found.get(name) != expected.files.get(name))
    return f"another result: {names}"


def _killed(world: World, command: Command, expected: Undisturbed, rng: random.Random) -> tuple[str, Ended]:
    """Start the command and kill; what was killed ("" if it ended before), and how it ended."""
    all_ways = [WORKER_KILLED] * 6 + ["the command", "all at once"] if command.workers else ["at a step", "the command"]
    if not expected.moments:  # it publishes through a library
        all_ways = ["the command"]
    way, seconds = rng.choice(all_ways), rng.uniform(0, 1.1 * expected.seconds)
    if way == "at a step":
        ended = world.start(command, die_at=rng.randint(1, expected.moments)).wait()
        return ("the command, at a publish step" if ended.killed else ""), ended
    child = world.start(command)
    if way == WORKER_KILLED:
        return _worker_killed(child, seconds, rng)
    if child.ended(seconds):
        return "", child.wait()
    family = child.family() if way == "all at once" else []
    for pid in (child.pid, *family):
        kill(pid)
    ended = child.wait()
    return (("the command and its workers" if family else "the command") if ended.killed else ""), ended


def _worker_killed(child: Child, seconds: float, rng: random.Random) -> tuple[str, Ended]:
    """Kill one process that the command started, then leave the command to itself."""
    deadline = time.monotonic() + seconds
    killed = False
    while not killed and not child.ended(0.002):
        family = child.family()
        if family and time.monotonic() >= deadline:
            killed = kill(rng.choice(family))
    ended = child.wait()
    return (WORKER_KILLED if killed else ""), ended


def _finished(run: Path) -> dict[str, int]:
    """Name → inode of the Arrow shards that have a receipt."""
    out = run / "out"
    receipts = [path.name for path in (out / "journal").glob("data-*.json")]
    shards = [shard for shard in out.glob("data-*.arrow") if any(name.startswith(shard.stem) for name in receipts)]
    return {shard.name: shard.stat().st_ino for shard in shards}


def _inode(path: Path) -> int:
    return path.stat().st_ino if path.exists() else 0
