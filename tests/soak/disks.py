"""Full disks: a command writes to a file system of a random size, in bytes or in files; with more room the same command finishes.

Where this process may not mount one, files are limited in size instead.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.soak.children import Ended, empty, wrong_with
from tests.soak.kills import differs, undisturbed
from tests.soak.tally import Try
from tests.soak.world import COMMANDS, Command, World

ENOUGH = "size=512m,nr_inodes=0"


def attack(world: World, rng: random.Random) -> Iterator[Try]:
    """One command on one small disk."""
    command = rng.choice([command for command in COMMANDS if not command.workers])
    expected = undisturbed(world, command)
    room = rng.randint(4096, 8192 + int(1.5 * expected.bytes))
    empty(world.run)
    if _may_mount(world):
        files = rng.choice([0, 0, rng.randint(2, len(expected.files) + 12)])
        with _mounted(world, f"size={room},nr_inodes={files}"):
            first = world.start(command).wait()
            _mount(world, f"remount,{ENOUGH}")
            yield _judged(world, command, "no inodes left" if files else "no space left", first)
    else:
        first = world.start(command, most_bytes=room).wait()
        yield _judged(world, command, "file too large", first)


def _judged(world: World, command: Command, kind: str, first: Ended) -> Try:
    """A command that had no room says so in an error of ours; the same one with room finishes."""
    wrong, detail = wrong_with(first, (command.code, 2)), first.output
    if not wrong:
        last = world.start(command).wait()
        wrong = wrong_with(last, (command.code,)) or differs(world, undisturbed(world, command))
        detail = f"{command.name}\n{first.output}\nthen:\n{last.output}"
    if world.stamps() != world.before:
        wrong = "an input was changed"
        world.before = world.stamps()
    return Try("disks", kind, wrong and f"{command.name}: {wrong}", detail)


def _may_mount(world: World) -> bool:
    known: bool | None = world.__dict__.get("may_mount")
    if known is None:
        known = (
            shutil.which("mount") is not None and subprocess.run(_mounting(world, ENOUGH), capture_output=True).returncode == 0
        )
        if known:
            subprocess.run(["umount", str(world.run)], check=True)
        world.__dict__["may_mount"] = known
    return known


@contextmanager
def _mounted(world: World, options: str) -> Iterator[None]:
    _mount(world, options)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(world.run)], check=True)


def _mount(world: World, options: str) -> None:
    subprocess.run(_mounting(world, options), check=True)


def _mounting(world: World, options: str) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(world.run)]
