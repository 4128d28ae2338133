"""Damaged and hostile files end in a FAIL line or in an error that names the file: never in a traceback, a crash or a hang.

Where a crash is possible, a real process runs the reader. Kinds of damage at scale are tried in tests/soak.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import resource
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arrowbank import RunOptions, ScanConfig, open_bank, scan, verify
from arrowbank.bank import Bank, FeatureBank
from arrowbank.bank.checks import Check, run_check
from arrowbank.bank.kinds.targets_bank import TargetBank
from arrowbank.bank.kinds.trunk_bank import TrunkBank
from arrowbank.bank.mapped import map_npy
from arrowbank.cli import main
from arrowbank.errors import ArrowbankError, CorruptBank, InputError
from arrowbank.formats.safetensors import SafetensorsFile, write_safetensors
from arrowbank.inputs.records import Records
from arrowbank.targets.chat_template import Renderer, TemplateError
from tests import every_bank, tiny
from tests.feature_banks import save_features
from tests.kill import kill_at
from tests.mutations import mutate, put, reseal

ROOT = Path(__file__).parents[1]
KINDS = ("texts", "tokens", "features", "targets", "targets-fp8", "in2-c", "probes", "trunk", "trunk-taps")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> every_bank.Banks:
    return every_bank.Banks(tmp_path_factory.mktemp("banks"))


@pytest.fixture
def copy(every: every_bank.Banks, tmp_path: Path) -> Callable[[str], Path]:
    """copy(name): a copy of one of the banks, to be damaged."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(every[name], tmp_path / name))

    return copied


def refused(*argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says when it refuses; it must do so without a traceback."""
    code = main(list(argv))
    said = capsys.readouterr()
    assert code in (1, 2), said.err
    assert "Traceback" not in said.err
    return said.out + said.err


# the outer net, and the runner of checks


@pytest.mark.parametrize("debug", [False, True])
def test_an_unexpected_exception_is_one_line_and_exit_code_70(debug: bool) -> None:
    code = (
        "import sys; from arrowbank import cli; from arrowbank.cli.options import Common\n"
        "def stumble(common: Common) -> None:\n    '''Fail.'''\n    raise ZeroDivisionError('by zero\\nand more')\n"
        "cli.app.add('stumble', stumble, ''); cli.VERB_NAMES.add('stumble')\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, "stumble", *(["--debug"] if debug else [])]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 70
    last = done.stderr.splitlines()[-1]
    assert last.startswith("arrowbank: internal error in stumble: ZeroDivisionError: by zero. This is a bug in arrowbank.")
    assert "--debug" in last or debug
    assert ("Traceback" in done.stderr) is debug
    assert debug or len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RecursionError("too deep"),
        KeyError("kinds"),
        struct.error("unpack requires"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        pa.ArrowInvalid("offset out of range"),
        FileNotFoundError(2, "gone"),
        CorruptBank("some/manifest.json: damaged."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_inside_a_check_is_its_fail_line_with_the_file(error: Exception) -> None:
    def check() -> Check:
        raise error

    (found,) = run_check("keys", Path("some/manifest.json"), check)
    assert (found.name, found.ok) == ("keys", False)
    assert found.detail.startswith("some/manifest.json: ")
    assert type(error).__name__ in found.detail or isinstance(error, ArrowbankError)


# shards: each reader in a process of its own


def use(folder: str, name: str) -> None:
    """Read a bank in one way; a target for a process of its own."""
    bank = open_bank(folder)
    WAYS[name](bank)


def _dataset(bank: Bank) -> None:
    for row in bank.dataset:
        str(row)


def _rows(bank: Bank) -> None:
    assert isinstance(bank, TargetBank | TrunkBank | FeatureBank)
    if isinstance(bank, FeatureBank):
        bank.rows(["what is 1?"])
        bank.of_kind("query")
    else:
        for row in range(len(bank)):
            bank.read(row)


WAYS: dict[str, Callable[[Bank], Any]] = {
    "shard": lambda bank: bank.shard(0).to_pylist(),
    "shards": lambda bank: [batch.to_pylist() for batch in bank.shards()],
    "parts": lambda bank: [part.to_pylist() for name in bank.columns for part in bank.parts(name)],
    "slice": lambda bank: bank.slice(0, len(bank)).to_pylist(),
    "dataset": _dataset,
    "rows": _rows,
    "verify": lambda bank: [verify(bank.folder)],
}


def offsets_place(shard: Path, column: str) -> tuple[int, int]:
    """Where the offsets of a column of variable length begin in a shard's file, and how many bytes they have."""
    source = pa.memory_map(str(shard))
    offsets = pa.ipc.open_stream(source).read_next_batch().column(column).buffers()[1]
    source.seek(0)
    return offsets.address - source.read_buffer().address, offsets.size


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shard", "shards", "parts", "slice", "dataset"])
@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("texts", "text"),
        ("texts", "sha1"),
        ("tokens", "input_ids"),
        ("features", "kind"),
        ("targets-other", "target_hidden_states"),
        ("in2-c", "needle_start"),
        ("trunk", "topk_ids"),
    ],
)
def test_an_offset_out_of_range_is_a_corrupt_bank_before_it_is_followed(
    copy: Callable[[str], Path], kind: str, column: str, way: str
) -> None:
    folder = copy(kind)
    shard = folder / "data-00000.arrow"
    at, size = offsets_place(shard, column)
    data = bytearray(shard.read_bytes())
    data[at + size // 2 // 8 * 8 : at + size // 2 // 8 * 8 + 4] = struct.pack("<i", 2**31 - 8)
    put(shard, bytes(data))
    open_bank(folder)  # its values are not looked at yet
    ended = kill_at(0, use, str(folder), way)
    assert not ended.killed
    assert "CorruptBank" in ended.error.splitlines()[-1]
    assert "data-00000.arrow" in ended.error.splitlines()[-1]
    (found,) = [check for check in verify(folder) if check.name == "values"]
    assert "data-00000.arrow" in found.detail


def test_text_that_is_not_utf8_is_named_and_other_columns_stay_usable(copy: Callable[[str], Path]) -> None:
    folder = copy("features")
    shard = folder / "data-00000.arrow"
    put(shard, shard.read_bytes().replace(b"what is 1?", b"what \xff\xfe 1?", 1))
    bank = open_bank(folder)
    assert isinstance(bank, FeatureBank)
    assert bank.take([0]).shape == (1, bank.hidden_size)  # reads no text
    assert bank.rows(["what is 2?"])[0] >= 0
    with pytest.raises(CorruptBank, match=r"data-00000\.arrow: column text: "):
        bank.shard(0)
    with pytest.raises(CorruptBank, match=r"data-00000\.arrow: column text: "):
        _ = bank.dataset


def rewrite(folder: Path, batches: list[pa.RecordBatch], **options: Any) -> None:
    """Put a stream of these batches in the place of shard 0, as somebody who has made a consistent bank of it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        for batch in batches:
            stream.write_batch(batch)
    put(folder / "data-00000.arrow", sink.getvalue().to_pybytes())
    fit(folder, "data-00000.arrow")


def fit(folder: Path, file: str) -> None:
    """Make the manifest list the bytes that a file has."""

    def edit(manifest: dict[str, Any]) -> None:
        next(entry for entry in manifest["files"] if entry["name"] == file)["bytes"] = (folder / file).stat().st_size

    reseal(folder, edit)


def _without(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.drop_columns([batch.schema.names[0]])]


def _other_type(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.set_column(1, batch.schema.names[1], pa.array(range(len(batch))))]


def _dictionary(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.set_column(2, "kind", batch.column("kind").dictionary_encode())]


def _nulls(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.set_column(2, "kind", pa.array([None, *batch.column("kind").to_pylist()[1:]], pa.string()))]


def _several(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch, batch.slice(0, 1)]


def _split(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.slice(0, 3), batch.slice(3)]


def _twice(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.append_column("kind", batch.column("kind"))]


def _nested(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.append_column("more", pa.array([{"a": 1}] * len(batch)))]


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (_without, {}, "no column text"),
        (_other_type, {}, "column sha1 is int64, expected binary"),
        (_dictionary, {}, "column kind is dictionary"),
        (_nulls, {}, "column kind has nulls"),
        (_several, {}, "a record batch behind the first record batch"),
        (_split, {}, r"data-00000\.arrow: "),
        (_twice, {}, "kind is there twice"),
        (_nested, {}, "column more is struct"),
        (lambda batch: [batch], {"compression": "zstd"}, "or a compressed one"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_stream_that_no_writer_of_banks_gives_is_refused_on_opening(
    copy: Callable[[str], Path], change: Callable[[pa.RecordBatch], list[pa.RecordBatch]], options: dict[str, Any], words: str
) -> None:
    folder = copy("texts")
    rewrite(folder, change(open_bank(folder).shard(0)), **options)
    with pytest.raises(CorruptBank, match=words) as error:
        open_bank(folder)
    assert str(error.value).startswith(str(folder / "data-00000.arrow"))
    assert not verify(folder)[0].ok


@pytest.mark.parametrize("at", [4, 0])
def test_lengths_of_metadata_that_are_absurd_are_refused(copy: Callable[[str], Path], at: int) -> None:
    folder = copy("texts")
    shard = folder / "data-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[at : at + 4] = struct.pack("<i", 2**31 - 1)
    put(shard, bytes(data))
    with pytest.raises(CorruptBank, match=r"data-00000\.arrow: not readable as an Arrow stream"):
        open_bank(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_of_shards_crashes_no_reader(copy: Callable[[str], Path], kind: str) -> None:
    folder, rng = copy(kind), random.Random(kind)
    ended = kill_at(0, damage_and_read, str(folder), rng.randrange(2**32))
    assert not ended.killed
    assert not ended.error


def damage_and_read(folder: str, seed: int) -> None:
    """Damage a shard, read it in every way, and put it back, some times over."""
    rng = random.Random(seed)
    for _ in range(12):
        shard = rng.choice(sorted(Path(folder).glob("data-*.arrow")))
        before = shard.read_bytes()
        data = bytearray(before)
        for _ in range(rng.choice([1, 2, 8])):
            at = rng.randrange(min(len(data), 3000) if rng.random() < 0.5 else len(data))
            data[at] = rng.randrange(256)
        put(shard, bytes(data))
        for way in WAYS:
            try:
                use(folder, way)
            except ArrowbankError:
                pass
            except AssertionError:
                assert way == "rows"  # a kind that has none
        put(shard, before)


# .npy files of a bank, and of fillers


def damaged_npy() -> list[tuple[str, bytes]]:
    """Files that are no array of the expected kind, each in its own way."""

    def saved(array: Any) -> bytes:
        import io

        out = io.BytesIO()
        np.save(out, array, allow_pickle=True)
        return out.getvalue()

    whole = saved(np.arange(20, dtype="<u8").reshape(2, 10))
    cases = {
        "objects": saved(np.array([{"a": 1}, None], object)),
        "fields": saved(np.zeros(3, [("a", "<i4"), ("b", "<f4")])),
        "text": saved(np.array(["a", "b"])),
        "Fortran order": saved(np.asfortranarray(np.ones((3, 4)))),
        "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00",
        "zip": b"PK\x03\x04" + bytes(60),
        "nothing": b"",
        "cut": whole[:-9],
        "longer": whole + b"x",
        "deep": whole[:10] + b"(" * (len(whole) - 10),
        "huge": whole.replace(b"(2, 10)", b"(2, 10**9)"),
        "negative": whole.replace(b"(2, 10)", b"(-2,10)"),
        "version 9": whole[:6] + b"\x09" + whole[7:],
    }
    return list(cases.items())


@pytest.mark.slow
@pytest.mark.parametrize("file", ["keys.npy", "features.f16.npy"])
@pytest.mark.parametrize(("name", "data"), damaged_npy(), ids=[name for name, _ in damaged_npy()])
def test_a_damaged_npy_of_a_feature_bank_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, file: str
) -> None:
    bank = save_features(tmp_path / "bank", np.ones((10, 4), np.float16))
    put(bank.folder / file, data)
    fit(bank.folder, file)
    assert file in refused("verify", str(bank.folder), capsys=capsys)
    if file == "keys.npy":
        assert "keys.npy: " in refused("lookup", str(bank.folder), "text 1", capsys=capsys)
    else:
        with pytest.raises(CorruptBank, match=r"features\.f16\.npy: "):
            _ = open_bank(bank.folder).matrix  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", [10, 2**40, 2**63, 2**64 - 1])
def test_a_row_out_of_range_in_the_keys_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: int) -> None:
    bank = save_features(tmp_path / "bank", np.ones((10, 4), np.float16))
    keys = np.load(bank.folder / "keys.npy")
    keys[1] = row
    np.save(bank.folder / "keys.npy", keys)
    said = refused("lookup", str(bank.folder), "text 3", capsys=capsys)
    assert f"keys.npy: names row {row} of a bank of 10 rows" in said


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 127), value=st.integers(0, 255), cut=st.integers(0, 300))
def test_no_header_of_an_npy_raises_anything_but_a_value_error(tmp_path: Path, at: int, value: int, cut: int) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(60, dtype="<u2"))
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(bytes(data[: len(data) - cut] if cut < 100 else data))
    try:
        ids = map_npy(path)
    except ValueError:
        return
    assert ids.nbytes <= 120


@pytest.mark.parametrize(("name", "data"), damaged_npy(), ids=[name for name, _ in damaged_npy()])
def test_a_damaged_filler_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes) -> None:
    (tmp_path / "filler.npy").write_bytes(data)
    options = ["--length", "64", "--examples", "1", "--triples", "1", "--workers", "1", "--out", str(tmp_path / "out")]
    said = refused("in2", "build", "--arm", "a", "--filler", str(tmp_path / "filler.npy"), *options, capsys=capsys)
    assert "filler.npy: " in said


# an open bank and a writer


def other_bank(folder: Path) -> None:
    """Another bank of the same shape in the folder, as `--restart` writes it."""
    save_features(folder, np.full((10, 4), 2, np.float16), fields={"note": "other"}, model={"name": "other"})


LAZY: dict[str, Callable[[FeatureBank], Any]] = {
    "matrix": lambda bank: bank.matrix,
    "keys": lambda bank: bank.rows(["text 1"]),
    "dataset": lambda bank: bank.dataset,
    "hashes": lambda bank: bank.check_hashes(),
}


@pytest.mark.parametrize("when", ["written", "being written", "removed"])
@pytest.mark.parametrize("name", LAZY)
def test_files_opened_after_a_restart_are_refused(tmp_path: Path, name: str, when: str) -> None:
    bank = save_features(tmp_path / "bank", np.ones((10, 4), np.float16))
    opened = open_bank(bank.folder)
    assert isinstance(opened, FeatureBank)
    other_bank(bank.folder)
    if when != "written":
        (bank.folder / "state.json").unlink()
    if when == "removed":
        shutil.rmtree(bank.folder)
    with pytest.raises(CorruptBank, match="changed since it was opened"):
        LAZY[name](opened)
    assert (opened.take(range(10)) == 1).all()  # its shards are the old bank's


def test_a_bank_that_was_copied_back_over_itself_is_the_same_commit(tmp_path: Path) -> None:
    bank = save_features(tmp_path / "bank", np.ones((10, 4), np.float16))
    opened = open_bank(bank.folder)
    shutil.copytree(bank.folder, tmp_path / "copy")
    shutil.rmtree(bank.folder)
    shutil.copytree(tmp_path / "copy", bank.folder)
    for read in LAZY.values():
        read(opened)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_restart_while_a_bank_is_being_opened_is_noticed(tmp_path: Path) -> None:
    """Many openings beside a writer: each gives one bank or an error, never two in one."""
    folder = tmp_path / "bank"
    save_features(folder, np.ones((10, 4), np.float16))
    ended = kill_at(0, open_beside_a_writer, str(folder))
    assert not ended.error
    assert not ended.killed


def open_beside_a_writer(folder: str) -> None:
    import threading
    import time

    ones, twos = np.ones((10, 4), np.float16), np.full((10, 4), 2, np.float16)
    done = threading.Event()

    def write() -> None:
        for turn in range(12):
            save_features(Path(folder), twos if turn % 2 == 0 else ones, model={"name": str(turn)})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    whole = 0
    while not done.is_set():
        try:
            bank = open_bank(folder)
            assert isinstance(bank, FeatureBank)
            stored = bank.take(range(10))
            time.sleep(0.005)
            assert np.array_equal(bank.matrix, stored)
            assert np.array_equal(np.array(bank.dataset["features"][:], np.float16), stored)
            whole += 1
        except ArrowbankError:
            pass
    writer.join()
    bank = open_bank(folder)
    assert np.array_equal(bank.matrix, ones)  # type: ignore[attr-defined]


def test_a_bank_goes_to_another_process_as_its_folder_and_its_commit(tmp_path: Path) -> None:
    bank = open_bank(save_features(tmp_path / "bank", np.ones((10, 4), np.float16)).folder)
    dataset = open_bank(bank.folder).to_torch()
    pickled = [pickle.dumps(bank), pickle.dumps(dataset)]
    assert max(map(len, pickled)) < 1000
    assert len(pickle.loads(pickled[0])) == len(pickle.loads(pickled[1])) == 10  # noqa: S301  # made two lines above
    other_bank(bank.folder)
    for data in pickled:
        with pytest.raises(CorruptBank, match="changed since it was opened"):
            pickle.loads(data)  # noqa: S301


# lines

LONG = b'{"query": "' + b"x" * 3000 + b'", "messages": []}'
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


@pytest.mark.slow
@pytest.mark.parametrize("block", ["one block", "several blocks"])
@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("verb", ["scan", "scan --on-bad-line skip", "capture", "trunk", "audit"])
def test_a_line_longer_than_the_limit_is_named(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str], verb: str, ending: str, block: str
) -> None:
    path = tmp_path / f"lines.jsonl{ending}"
    short = b'{"query": "short", "input_ids": [1, 2, 3, 4], "text": "a"}\n'
    before = 3 if block == "one block" else 40_000  # more than 2 MiB
    path.write_bytes(COMPRESS[ending](short * before + LONG + b"\n" + short))
    out, limit = str(tmp_path / "out"), ("--max-line-bytes", "1000")
    argv = {
        "capture": (
            "targets",
            "capture",
            "--model",
            str(tiny_qwen3),
            "--source",
            str(path),
            "--layers",
            "0",
            "--min-loss-tokens",
            "1",
        ),
        "trunk": ("trunk", "build", "--model", str(tiny_qwen3), "--source", f"a={path}", "--window", "8", "--topk", "2"),
    }.get(verb, (*verb.split(), "--source", f"train={path}"))
    if verb == "audit":
        bank = save_features(tmp_path / "bank", np.eye(2, 4, dtype=np.float16), texts=["short", "a"])
        argv = ("audit", str(bank.folder), "--source", f"train={path}", "--source", f"eval={path}", "--field", "query=query")
    said = refused(*argv, *limit, *(() if verb == "audit" else ("--out", out)), capsys=capsys)
    assert f"{path}, line {before + 1}: longer than 1,000 bytes" in said
    assert "--max-line-bytes" in said


@pytest.mark.parametrize("ending", COMPRESS)
def test_worker_processes_refuse_a_long_line(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"lines.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](b'{"query": "short"}\n' * 150_000 + LONG + b"\n"))
    config = ScanConfig(sources=(("train", str(path)),), max_line_bytes=1000)
    with pytest.raises(InputError, match="line 150001: longer than 1,000 bytes"):
        scan(config, tmp_path / "out", options=RunOptions(workers=2))


@pytest.mark.parametrize(("size", "fits"), [(1000, True), (1001, False)])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_the_limit_counts_the_bytes_of_a_line_without_its_end(tmp_path: Path, size: int, end: bytes, fits: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"x" * size + end)
    if fits:
        assert [record.value for record in Records(path, ["text"], max_line_bytes=1000)] == [{"text": "x" * size}]
    else:
        with pytest.raises(ArrowbankError, match="line 1: longer than 1,000 bytes"):
            list(Records(path, ["text"], max_line_bytes=1000))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["scan", "capture", "trunk"])
def test_a_small_file_with_a_huge_line_takes_little_memory(tmp_path: Path, tiny_qwen3: Path, verb: str) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    squeeze = zlib.compressobj(1, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        for _ in range(600):
            file.write(squeeze.compress(b"x" * (1 << 20)))
        file.write(squeeze.flush())
    ended = kill_at(0, read_bomb, verb, str(path), str(tiny_qwen3), str(tmp_path / "out"))
    assert not ended.killed
    assert not ended.error


def read_bomb(verb: str, path: str, model: str, out: str) -> None:
    """Read a line of 600 MB with a limit of 20 MB; the process may not grow by more than a few times that."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    argv = {
        "scan": ["scan", "--source", f"train={path}"],
        "capture": ["targets", "capture", "--model", model, "--source", path, "--layers", "0"],
        "trunk": ["trunk", "build", "--model", model, "--source", f"a={path}", "--window", "8", "--topk", "2"],
    }[verb]
    assert main([*argv, "--out", out, "--max-line-bytes", "20000000"]) == 2
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 250_000, f"{grown} kB"  # torch and transformers among it


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_a_limit_that_no_line_can_keep_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    argv = ("scan", "--source", f"a={tmp_path / 'a.jsonl'}", "--out", str(tmp_path / "out"), "--max-line-bytes", limit)
    assert "max_line_bytes" in refused(*argv, capsys=capsys)


# chat templates

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATES = {
    "endless": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "did not give a text within 1 sec",
    ),
    "memory": ("{{ 'a' * 10**10 }}", "takes more than 2,048 MiB of memory"),
    "recursion": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "maximum recursion depth"),
    "deep": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion|nested|Expected"),
    "unsafe": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "refuses": ("{{ raise_exception('not this one') }}", "not this one"),
    "division": ("{{ 1 // 0 }}", "division"),
    "attribute": ("{{ none.x() }}", "no attribute"),
}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(seconds=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_an_error_and_the_next_one_is_rendered(renderer: Renderer, name: str) -> None:
    template, words = TEMPLATES[name]
    with pytest.raises(TemplateError, match=words):
        renderer.render(template, messages=CHAT)
    text, spans = renderer.render(tiny.TAGGED_TEMPLATE, messages=CHAT)
    assert [text[start:end].strip("\n") for start, end in spans]


def test_an_endless_template_ends_the_capture_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_qwen3: Path
) -> None:
    tokenizer = tiny.save_bpe_tokenizer(tmp_path / "hostile", chat_template=TEMPLATES["memory"][0])
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    argv = ("targets", "capture", "--model", str(tiny_qwen3), "--tokenizer", str(tokenizer), "--layers", "0")
    said = refused(*argv, "--source", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "out"), capsys=capsys)
    assert f"line 1: the chat template of '{tokenizer}' takes more than" in said


# JSON that is too deep, wherever it is read

DEEP = b"[" * 200_000


def _in_data(path: Path, tmp_path: Path, model: Path) -> Iterator[tuple[str, ...]]:
    path.write_bytes(DEEP + b"\n")
    yield ("scan", "--source", f"a={path}")
    yield ("targets", "capture", "--model", str(model), "--source", str(path), "--layers", "0")
    yield ("trunk", "build", "--model", str(model), "--source", f"a={path}", "--window", "8", "--topk", "2")


def test_deep_json_in_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_qwen3: Path) -> None:
    path = tmp_path / "deep.jsonl"
    for argv in _in_data(path, tmp_path, tiny_qwen3):
        assert f"{path}, line 1" in refused(*argv, "--out", str(tmp_path / "out"), capsys=capsys)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "dataset_info.json", "index.json", "texts.jsonl"])
def test_deep_json_in_a_bank_is_a_fail_line(
    copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str], name: str, tmp_path: Path
) -> None:
    folder = copy("features")
    put(folder / name, DEEP)
    assert name in refused("verify", str(folder), capsys=capsys)
    refused("report", str(folder), "--out", str(tmp_path / "page.html"), "--verify", capsys=capsys)


def test_deep_json_in_a_dump_and_in_an_audit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "index.jsonl").write_bytes(DEEP + b"\n")
    options = ("--target-model", "m", "--layers", "1", "--out", str(tmp_path / "out"))
    assert "index.jsonl line 1" in refused("targets", "import", str(dump), *options, capsys=capsys)
    bank = save_features(tmp_path / "bank", np.ones((2, 4), np.float16))
    (tmp_path / "audit.json").write_bytes(DEEP)
    said = refused(
        "report", str(bank.folder), "--out", str(tmp_path / "p.html"), "--audit", str(tmp_path / "audit.json"), capsys=capsys
    )
    assert "audit.json: not an audit" in said


# mutated banks under the verbs that look at them


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "in2-bare", "features-bare", "targets-merged", "texts-grown"])
def test_no_mutated_bank_ends_a_verb_in_a_traceback(copy: Callable[[str], Path], kind: str) -> None:
    folder = copy(kind)
    ended = kill_at(0, mutate_and_look, str(folder), kind)
    assert not ended.killed
    assert not ended.error


def mutate_and_look(folder: str, seed: str) -> None:
    """Mutate one file, look at the bank with some verbs, put the file back; some times over."""
    rng = random.Random(seed)
    page = f"{folder}-page.html"
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  # the process ends with it
    for turn in range(10):
        mutation = mutate(Path(folder), rng, "manifest.json" if turn % 2 else None)
        for argv in (
            ["verify", folder],
            ["report", folder, "--out", page],
            ["info", folder],
            ["select", folder, "--limit", "1"],
        ):
            extra = ["--out", f"{folder}-out", "--restart"] if argv[0] == "select" else []
            code = main([*argv, *extra])
            assert code in (0, 1, 2), f"{mutation}: {argv} → {code}"
        mutation.undo()


def test_every_flip_of_the_texts_file_is_a_fail_line(copy: Callable[[str], Path]) -> None:
    folder, rng = copy("features"), random.Random(7)
    for _ in range(60):
        mutation = mutate(folder, rng, "texts.jsonl")
        found = {check.name: check for check in verify(folder)}
        assert not all(check.ok for check in found.values()), str(mutation)
        if "mirror" in found:  # opened: its size is right
            assert "texts.jsonl" in found["mirror"].detail, str(mutation)
        mutation.undo()


@pytest.mark.parametrize(
    ("log", "rows"),
    [
        (b'{"event": "shard", "time": "x", "rows": 1}\n', 0),
        (b'{"event": "shard", "time": 1e400, "rows": 1}\n', 0),
        (b'{"event": "shard", "rows": 1}\n', 0),
        (b'{"event": "shard", "time": 1, "rows": 100000000000000000000000}\n', 0),
        (b'{"event": "shard", "time": 1, "rows": 1}\n' + DEEP + b"\n\xff\xfe\n[]\n", 1),
    ],
)
def test_a_damaged_build_log_costs_its_line_only(tmp_path: Path, log: bytes, rows: int) -> None:
    from arrowbank.report.build_log import read_pace

    (tmp_path / "build.jsonl").write_bytes(log)
    assert len(read_pace(tmp_path / "build.jsonl").rows) == rows


# safetensors


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=4))
def test_no_safetensors_header_raises_anything_but_an_input_error(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        values = {"a": ("F32", (3, 4), np.ones(12, np.float32)), "b": ("BF16", (2, 2), np.ones(4, np.uint16))}
        write_safetensors(file, values, {"k": "v"})
    data = bytearray(path.read_bytes())
    for at, value in edits:
        data[at % len(data)] = value
    path.write_bytes(bytes(data))
    try:
        opened = SafetensorsFile(path)
        for tensor in opened.tensors.values():
            opened.raw(tensor).sum()
    except ArrowbankError:
        pass


# exports read back


@pytest.mark.slow
@pytest.mark.parametrize("format", ["raw", "llmc", "nanogpt-npy", "megatron", "nanotron"])
def test_a_damaged_export_is_a_fail_line(every: every_bank.Banks, tmp_path: Path, format: str) -> None:
    out = tmp_path / "export"
    assert main(["export", str(every["in2-c"]), "--to", format, "--out", str(out)]) == 0
    ended = kill_at(0, damage_export, str(out), str(every["in2-c"]))
    assert not ended.killed
    assert not ended.error


def damage_export(folder: str, arm: str) -> None:
    rng = random.Random(folder)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  # the process ends with it
    for _ in range(10):
        mutation = mutate(Path(folder), rng)
        for argv in (["verify", folder], ["in2", "verify", arm, folder], ["info", folder]):
            code = main(argv)
            assert code in (0, 1, 2), f"{mutation}: {argv} → {code}"
        mutation.undo()
