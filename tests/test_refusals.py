"""What the operating system refuses, in every stage and its workers: an error with a remedy, and the same command resumes.

The refusals are real: a library under the command makes its calls fail (tests/refusals.py), disks are small, limits are low.
"""

from __future__ import annotations

import errno
import importlib
import os
import random
import re
import resource
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from arrowbank.bank.refusals import explain
from arrowbank.cli import main
from arrowbank.errors import ArrowbankError, DiskFull, InputError, StorageError
from tests import tiny
from tests.kill import kill_at, tree_bytes
from tests.refusals import Machine, Ran, Refusal, machine_or_skip
from tests.soak.world import COMMANDS, Command, World

WRITES = ("write", "create", "sync", "rename", "link", "unlink", "mkdir")
READS = ("read", "open")
IN_THIS_PROCESS = [command for command in COMMANDS if not command.workers]
# what is written differs from run to run, or is measured
FREE = ("report.json", "page.html")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    machine = machine_or_skip()
    yield machine
    machine.close()


def run(machine: Machine, world: World, command: Command, refusal: Refusal | None = None) -> Ran:
    argv = command.line.format(run=world.run, out=world.run / "out", world=world.folder).split()
    return machine.run(*argv, refusal=refusal, cwd=world.folder)


def result(world: World) -> dict[str, str]:
    return {name: digest for name, digest in tree_bytes(world.run).items() if not name.endswith(FREE)}


def empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def drawn(command: Command, salt: str) -> random.Random:
    return random.Random(zlib.crc32(f"{command.name} {salt}".encode()))


@pytest.mark.slow
@pytest.mark.parametrize("command", IN_THIS_PROCESS, ids=lambda command: command.name)
def test_a_refused_write_is_an_error_and_the_same_command_resumes(command: Command, world: World, machine: Machine) -> None:
    empty(world.run)
    counted = run(machine, world, command, Refusal(under=world.run, calls=WRITES, error="EIO", nth=1 << 30))
    assert counted.code == command.code, counted.err
    whole, rng = result(world), drawn(command, "writes")
    empty(world.run)
    once = rng.random() < 0.5
    error = rng.choice(["EIO", "ESTALE"] if once else ["ENOSPC", "EDQUOT", "EROFS"])
    nth = rng.randint(1, counted.calls)
    done = run(machine, world, command, Refusal(under=world.run, calls=WRITES, error=error, nth=nth, once=once))
    where = f"{error} at call {nth} of {counted.calls}: {done.err}"
    assert done.hits, where
    assert done.code in (command.code, 2), where
    assert "Traceback" not in done.err, where
    if done.code == 2:
        assert os.strerror(getattr(errno, error)) in done.err, where
        assert re.search("run the same command again|the same command goes on", done.err), where  # the second: to a store
        assert str(world.run) in done.err, where
    again = run(machine, world, command)
    assert again.code == command.code, f"{where}\nthen {again.err}"
    assert result(world) == whole, where
    assert world.stamps() == world.before


@pytest.mark.slow
@pytest.mark.parametrize("command", IN_THIS_PROCESS[::2], ids=lambda command: command.name)
def test_a_refused_read_of_an_input_is_an_error_and_the_same_command_resumes(
    command: Command, world: World, machine: Machine
) -> None:
    empty(world.run)
    counted = run(machine, world, command, Refusal(under=world.folder, calls=READS, error="EIO", nth=1 << 30))
    whole, rng = result(world), drawn(command, "reads")
    empty(world.run)
    error, nth = rng.choice(["EIO", "EACCES", "ESTALE", "ELOOP"]), rng.randint(1, max(1, counted.calls))
    done = run(machine, world, command, Refusal(under=world.folder, calls=READS, error=error, nth=nth, once=True))
    where = f"{error} at call {nth} of {counted.calls}: {done.err}"
    assert done.code in (0, 1, 2), where
    assert "Traceback" not in done.err, where
    again = run(machine, world, command)
    assert again.code == command.code, f"{where}\nthen {again.err}"
    assert result(world) == whole, where


@pytest.mark.slow
@pytest.mark.parametrize("command", IN_THIS_PROCESS[1::6], ids=lambda command: command.name)
def test_too_many_open_files_are_an_error(command: Command, world: World, machine: Machine) -> None:
    empty(world.run)
    counted = run(machine, world, command, Refusal(under=Path("/"), calls=("open",), error="EMFILE", nth=1 << 30))
    assert counted.code == command.code, counted.err
    whole, nth = result(world), drawn(command, "files").randint(1, counted.calls)
    empty(world.run)
    done = run(machine, world, command, Refusal(under=Path("/"), calls=("open",), error="EMFILE", nth=nth))
    where = f"call {nth} of {counted.calls}: {done.err}"
    assert done.code in (command.code, 2), where
    assert "Traceback" not in done.err, where
    again = run(machine, world, command)
    assert again.code == command.code, f"{where}\nthen {again.err}"
    assert result(world) == whole, where


@pytest.mark.slow
@pytest.mark.parametrize("error", ["EIO", "EMFILE", "ESTALE"])
@pytest.mark.parametrize("name", ["data-00001.arrow", "state.json", "manifest.json", "keys.npy"])
def test_what_cannot_be_read_is_not_called_damaged(world: World, machine: Machine, error: str, name: str) -> None:
    refusal = Refusal(under=world.folder / "features" / name, calls=("open",), error=error)
    done = machine.run("lookup", "features", "a text", refusal=refusal, cwd=world.folder)
    assert (done.code, bool(done.hits), "Traceback" in done.err) == (2, True, False), done.err
    assert f"{name}: cannot be read ({os.strerror(getattr(errno, error))})" in done.err


# workers


@pytest.fixture(scope="module")
def many_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A texts bank of so many texts that several processes tokenize it."""
    return tiny.save_texts_bank(tmp_path_factory.mktemp("many") / "texts", tiny.texts(5000))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "calls"),
    [("ENOSPC", ("write",)), ("EROFS", ("create", "mkdir")), ("EIO", ("rename", "sync")), ("ESTALE", ("write",))],
)
def test_processes_that_tokenize_and_are_refused_end_the_stage_with_an_error(
    many_texts: Path, bpe_tokenizer: Path, machine: Machine, tmp_path: Path, error: str, calls: tuple[str, ...]
) -> None:
    argv = ["tokenize", many_texts, "--tokenizer", bpe_tokenizer, "--workers", "2", "--out", tmp_path / "out"]
    counted = machine.run(*argv, refusal=Refusal(under=tmp_path, calls=calls, error=error, nth=1 << 30))
    assert counted.code == 0
    whole = tree_bytes(tmp_path / "out")
    for nth in sorted({max(1, counted.calls // 3), max(1, 2 * counted.calls // 3)}):
        shutil.rmtree(tmp_path / "out")
        done = machine.run(*argv, refusal=Refusal(under=tmp_path, calls=calls, error=error, nth=nth))
        assert done.code == 2, f"call {nth} of {counted.calls}: {done.err}"
        assert "Traceback" not in done.err
        assert os.strerror(getattr(errno, error)) in done.err
        assert machine.run(*argv).code == 0
        assert tree_bytes(tmp_path / "out") == whole


def test_a_library_that_trips_over_its_closed_file_hides_no_refusal(
    bpe_tokenizer: Path, machine: Machine, tmp_path: Path
) -> None:
    texts = tiny.save_texts_bank(tmp_path / "texts", tiny.texts(60))
    argv = ["tokenize", texts, "--tokenizer", bpe_tokenizer, "--workers", "1", "--out", tmp_path / "out"]
    rows = tmp_path / "out" / "journal" / "work" / "map"  # which datasets writes
    counted = machine.run(*argv, refusal=Refusal(under=rows, calls=("write",), error="ENOSPC", nth=1 << 30))
    for nth in range(1, counted.calls + 1):
        shutil.rmtree(tmp_path / "out")
        done = machine.run(*argv, refusal=Refusal(under=rows, calls=("write",), error="ENOSPC", nth=nth))
        assert (done.code, bool(done.hits), "Traceback" in done.err) == (2, True, False), f"write {nth}: {done.err}"
        assert "no room left" in done.err
    assert machine.run(*argv).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_workers_with_a_model_that_are_refused_end_the_stage_with_an_error(world: World, machine: Machine, error: str) -> None:
    (command,) = (command for command in COMMANDS if command.name == "encode, processes")
    empty(world.run)
    refusal = Refusal(under=world.run, calls=("write", "sync"), error=error, nth=60)
    done = run(machine, world, command, refusal)
    assert (done.code, "Traceback" in done.err) == (2, False), done.err
    assert os.strerror(getattr(errno, error)) in done.err
    assert run(machine, world, command).code == 0
    resumed = result(world)
    empty(world.run)
    assert run(machine, world, command).code == 0
    assert result(world) == resumed


# real disks and limits


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A file system of its own at `folder`; skips the test where this process may not mount one."""
    folder.mkdir(exist_ok=True)
    if shutil.which("mount") is None or mount(folder, options).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mount(folder: Path, options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("size=40k", "the disk has"),  # for a bank that is known to take more
        ("size=900k", "The disk is full"),  # room for the bank, and not for what datasets writes meanwhile
        ("size=1100k", "The disk is full"),
        ("size=64m,nr_inodes=4", "no inode left"),
        ("size=64m,nr_inodes=9", "no inode left"),
    ],
)
def test_a_disk_without_room_or_inodes_is_said_and_with_more_of_it_the_command_resumes(
    many_texts: Path, bpe_tokenizer: Path, machine: Machine, tmp_path: Path, options: str, words: str
) -> None:
    out = tmp_path / "disk" / "out"
    argv = ["tokenize", many_texts, "--tokenizer", bpe_tokenizer, "--workers", "2", "--out", out]
    with small_disk(tmp_path / "disk", options):
        done = machine.run(*argv)
        assert (done.code, "Traceback" in done.err) == (2, False), done.err
        assert words in done.err
        assert mount(tmp_path / "disk", "remount,size=64m,nr_inodes=0").returncode == 0
        assert machine.run(*argv).code == 0
        resumed = tree_bytes(out)
        shutil.rmtree(out)
        assert machine.run(*argv).code == 0
        assert tree_bytes(out) == resumed


def test_a_read_only_disk_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.jsonl").write_text('{"query": "a text"}\n')
    with small_disk(tmp_path / "disk", "size=1m,ro"):
        assert main(["scan", "--source", f"t={tmp_path / 'file.jsonl'}", "--out", str(tmp_path / "disk" / "out")]) == 2
    assert "Read-only file system" in capsys.readouterr().err


def scan_with_few_files(source: Path, out: Path) -> None:
    """A target for a child process that may have few files open."""
    from arrowbank import ScanConfig, scan

    scan(ScanConfig(sources=(("t", str(source)),)), out.with_name("before"))  # imports what it needs
    with Path("/dev/null").open() as next_file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_file.fileno() + 1, 4096))
    with pytest.raises(StorageError, match=r"Too many open files.*ulimit -n.*run the same command again"):
        scan(ScanConfig(sources=(("t", str(source)),)), out)


def test_a_process_that_may_open_no_more_files_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").write_text('{"query": "a text"}\n')
    outcome = kill_at(0, scan_with_few_files, tmp_path / "file.jsonl", tmp_path / "out")
    assert outcome.error == ""


def test_a_folder_that_disappears_is_said(world: World, machine: Machine) -> None:
    (command,) = (command for command in COMMANDS if command.name == "scan")
    for nth in (3, 9, 20):
        empty(world.run)
        done = run(machine, world, command, Refusal(under=world.run, calls=("create", "rename"), error="ENOENT", nth=nth))
        assert (done.code, "Traceback" in done.err) == (2, False), done.err
        assert "was removed, or its disk was unmounted" in done.err
        assert run(machine, world, command).code == 0


@pytest.mark.parametrize("name", ["a" * 300, "loop/out", "file/out", "\udcff" * 200])
def test_names_that_no_file_system_takes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "file.jsonl").write_text('{"query": "a text"}\n')
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert main(["scan", "--source", f"t={tmp_path / 'file.jsonl'}", "--out", str(tmp_path / name)]) == 2
    assert re.search("cannot be|not valid UTF-8", capsys.readouterr().err)


# the words


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_refusal_has_words_or_is_left_to_who_knows_better(number: int, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number))
    said = explain(error, tmp_path / "file")
    if said is None:
        assert isinstance(error, ConnectionError | TimeoutError | BrokenPipeError) or number in (
            errno.EINVAL,
            errno.EBADF,
            errno.EFAULT,
        )
        return
    assert str(said).startswith(f"{tmp_path / 'file'}: ")
    assert os.strerror(number) in str(said)
    assert str(said).endswith(".")


def test_the_file_that_the_system_names_is_named(tmp_path: Path) -> None:
    inside = FileNotFoundError(errno.ENOENT, "gone", str(tmp_path / "out" / "journal" / "lock"))
    assert str(explain(inside, tmp_path / "out")).startswith(f"{tmp_path}/out/journal/lock: cannot be written (No such file")
    elsewhere = PermissionError(errno.EACCES, "no", str(tmp_path / "texts" / "manifest.json"))
    said = explain(elsewhere, tmp_path / "out")
    assert isinstance(said, InputError)
    assert str(said).startswith(f"{tmp_path}/texts/manifest.json: cannot be used (Permission denied)")
    temporary = OSError(errno.ENOSPC, "full", str(tmp_path / "out" / ".data-00000.arrow.host-01234567-1-2-01234567.tmp"))
    said = explain(temporary, tmp_path / "out")
    assert isinstance(said, DiskFull)
    assert str(said).startswith(f"{tmp_path}/out/data-00000.arrow: ")


@pytest.mark.slow
def test_what_is_no_refusal_of_the_system_is_left_alone(tmp_path: Path) -> None:
    import ssl
    from concurrent.futures import ThreadPoolExecutor

    for error in (
        OSError("not an errno"),
        ssl.SSLError(1, "bad certificate"),
        ConnectionRefusedError(errno.ECONNREFUSED, "no"),
    ):
        assert explain(error, tmp_path) is None
    with ThreadPoolExecutor(1) as pool, pytest.raises(ArrowbankError):
        pool.submit(importlib.import_module("arrowbank").open_bank, tmp_path / ("a" * 300)).result()
