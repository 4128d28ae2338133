"""Exports of arms, read as each trainer's loader reads them: the same examples, and as many whole triples as the note says."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pytest

from arrowbank import ExportConfig, build_in2, export, verify
from arrowbank.cli import main
from arrowbank.errors import InputError
from tests import arms
from tests.kill import kill_at, tree_bytes

T, SPAN = 600, 5
Ids = npt.NDArray[Any]
CASES = [
    ("raw", "T"),
    ("raw", "T+1"),
    ("llmc", "T"),
    ("llmc", "T+1"),
    ("nanogpt", "T"),
    ("nanogpt-npy", "T"),
    ("nanogpt-npy", "T+1"),
    ("megatron", "T"),
    ("nanotron", "T+1"),
    ("nanotron", "T"),
]
BEHIND = {
    "raw": 1,
    "llmc": 1,
    "nanogpt": 1,
    "nanogpt-npy": 1,
    "megatron": 0,
    "nanotron": 0,
}  # tokens behind a file's last example

# readers, after each format's own description


def read_raw(folder: Path) -> list[Ids]:
    return [np.fromfile(path, "<u2") for path in sorted(folder.glob("*.bin"))]


def read_llmc(folder: Path) -> list[Ids]:
    shards = []
    for path in sorted(folder.glob("*.bin")):
        header = np.fromfile(path, "<i4", 256)
        tokens = np.fromfile(path, "<u2", offset=1024)
        assert header.tolist() == [20240520, 1, len(tokens)] + [0] * 253
        shards.append(tokens)
    return shards


def read_npy(folder: Path) -> list[Ids]:
    shards = [np.load(path) for path in sorted(folder.glob("*.npy"))]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 for shard in shards)
    return shards


def read_megatron(folder: Path) -> list[Ids]:
    shards = []
    for path in sorted(folder.glob("*.idx")):
        data = path.read_bytes()
        assert data[:9] == b"MMIDIDX\0\0"
        version, code, count, documents = struct.unpack_from("<QBQQ", data, 9)
        assert (version, code, documents) == (1, 8, count + 1)
        at = 9 + 25
        lengths = np.frombuffer(data, "<i4", count, at)
        pointers = np.frombuffer(data, "<i8", count, at + 4 * count)
        ends = np.frombuffer(data, "<i8", documents, at + 12 * count)
        assert len(data) == at + 12 * count + 8 * documents
        assert ends.tolist() == list(range(count + 1))  # a document an example
        assert set(lengths.tolist()) == {T}
        tokens = path.with_suffix(".bin").read_bytes()
        shards.append(
            np.concatenate(
                [np.frombuffer(tokens, "<u2", n, p) for n, p in zip(lengths.tolist(), pointers.tolist(), strict=True)]
            )
        )
        assert len(shards[-1]) * 2 == len(tokens)
    return shards


def read_nanotron(folder: Path) -> list[Ids]:
    shards = []
    for path in sorted(folder.glob("*.ds")):
        tokens = np.fromfile(path, "<u2")
        ends = np.fromfile(f"{path}.index", "<u8")
        assert (ends[-1], set(np.diff(ends).tolist())) == (len(tokens), {int(ends[0])})
        tokenizer, count = Path(f"{path}.metadata").read_text().split("\n")[:2]
        assert (tokenizer.split("|")[1], int(count)) == ("2", len(tokens))
        shards.append(tokens)
    return shards


READERS: dict[str, Callable[[Path], list[Ids]]] = {
    "raw": read_raw,
    "nanogpt": read_raw,
    "llmc": read_llmc,
    "nanogpt-npy": read_npy,
    "megatron": read_megatron,
    "nanotron": read_nanotron,
}


def llmc_windows(shards: list[Ids], width: int, batch: int, ranks: int) -> Iterator[tuple[int, int]]:
    """(file, start) of every row that llm.c's C loader delivers to all ranks in an epoch, step by step as it goes."""
    for number, shard in enumerate(shards):
        assert len(shard) >= batch * ranks * width + 1
        position = 0
        while position + batch * ranks * width + 1 <= len(shard):
            yield from ((number, position + row * width) for row in range(batch * ranks))
            position += batch * ranks * width


def lite_windows(shards: list[Ids], width: int, batch: int, ranks: int) -> Iterator[tuple[int, int]]:
    """The same of DataLoaderLite, each of whose ranks moves on by itself."""
    for rank in range(ranks):
        for number, shard in enumerate(shards):
            position = rank * batch * width
            while True:
                yield from ((number, position + row * width) for row in range(batch))
                position += batch * width * ranks
                if position + batch * width * ranks + 1 > len(shard):
                    break


def plain_windows(shards: list[Ids], width: int, read: int) -> Iterator[tuple[int, int]]:
    for number, shard in enumerate(shards):
        yield from ((number, start) for start in range(0, len(shard) - read + 1, width))


def survivors(
    shards: list[Ids], rows: datasets.Dataset, per_shard: int, width: int, read: int, windows: Iterator[tuple[int, int]]
) -> int:
    """Triples whose needle and probe both stand, token for token, in one window of a loader."""
    starts = set(windows)
    count = 0
    for example, row in enumerate(rows):
        number, place = divmod(example, per_shard)
        for needle, probe in zip(row["needle_start"], row["probe_start"], strict=True):
            planted = row["input_ids"][probe : probe + SPAN]
            begin, end = place * width + needle, place * width + probe + SPAN
            found = [start for file, start in starts if file == number and start <= begin and end <= start + read]
            for start in found[:1]:
                window = shards[number][start : start + read]
                assert window[begin - start :][:SPAN].tolist() == planted
                assert window[end - SPAN - start :][:SPAN].tolist() == planted
            count += bool(found)
    return count


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return arms.build_small(tmp_path_factory.mktemp("arm"))


@pytest.mark.parametrize(("format", "stride"), CASES)
def test_examples_lie_where_a_loader_of_that_stride_starts(format: str, stride: str, arm: Path, tmp_path: Path) -> None:
    note = export(ExportConfig(format=format, stride=stride), arm, tmp_path / "out")
    ids = np.array(datasets.load_from_disk(str(arm))["input_ids"])
    shards = READERS[format](tmp_path / "out")
    width = T if stride == "T" else T + 1
    counts = [7] if format == "nanogpt" else [4, 3]
    assert [len(shard) for shard in shards] == [count * width + BEHIND[format] for count in counts]
    assert [shard["tokens"] for shard in note["shards"]] == [len(shard) for shard in shards]
    example = 0
    for shard, count in zip(shards, counts, strict=True):
        for row in range(count):
            assert shard[row * width :][:T].tolist() == ids[example + row].tolist()
            if width > T:
                assert shard[row * width + T] == ids[(example + row + 1) % 7, 0]
        example += count
        assert shard[count * width :].tolist() == ids[example % 7, : BEHIND[format]].tolist()
    files_each = {"megatron": 2, "nanotron": 3}.get(format, 1)
    assert len(list((tmp_path / "out").iterdir())) == len(note["shards"]) * files_each + 1
    assert [check for check in verify(tmp_path / "out") if not check.ok] == []


@pytest.mark.parametrize(("batch", "ranks"), [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("stride", ["T", "T+1"])
@pytest.mark.parametrize(("format", "loader"), [("llmc", "llm.c"), ("nanogpt-npy", "build-nanogpt"), ("raw", "build-nanogpt")])
def test_the_note_counts_what_loaders_deliver(
    format: str, loader: str, stride: str, batch: int, ranks: int, tmp_path: Path
) -> None:
    arm = arms.build_small(tmp_path, examples=24, raw_shards=1 if batch * ranks == 8 else 2)
    config = ExportConfig(format=format, stride=stride, global_batch=batch * ranks, ranks=ranks)
    note = export(config, arm, tmp_path / "out")
    shards, width = READERS[format](tmp_path / "out"), T if stride == "T" else T + 1
    deliver = llmc_windows if loader == "llm.c" else lite_windows
    windows = deliver(shards, width, batch, ranks)
    counted = survivors(shards, datasets.load_from_disk(str(arm)), note["shards"][0]["examples"], width, width + 1, windows)
    assert note["survivors"][loader] == counted
    assert (note["global_batch"], note["ranks"], note["triples"]) == (batch * ranks, ranks, 24 * 6)
    if loader == "llm.c" or ranks == 1:
        assert counted == 24 * 6


@pytest.mark.parametrize(
    ("format", "stride", "loader", "whole"),
    [
        ("nanotron", "T+1", "nanotron", 42),
        ("nanotron", "T", "nanotron", 42),
        ("raw", "T", "olmo-core", 42),
        ("megatron", "T", "megatron-core", 30),
    ],
)
def test_loaders_without_batches(format: str, stride: str, loader: str, whole: int, arm: Path, tmp_path: Path) -> None:
    """megatron-core leaves a document of each file out: it wants a token behind the last one."""
    note = export(ExportConfig(format=format, stride=stride), arm, tmp_path / "out")
    shards, width = READERS[format](tmp_path / "out"), T if stride == "T" else T + 1
    read = width + (loader == "megatron-core")
    assert survivors(shards, datasets.load_from_disk(str(arm)), 4, width, read, plain_windows(shards, width, read)) == whole
    assert note["survivors"][loader] == whole


def test_nanogpt_reads_one_file_from_anywhere(arm: Path, tmp_path: Path) -> None:
    note = export(ExportConfig(format="nanogpt"), arm, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.bin")) == ["train.bin"]
    [shard], rows = read_raw(tmp_path / "out"), datasets.load_from_disk(str(arm))
    starts = range(len(shard) - T)  # what torch.randint(len(data) - block_size) can give
    each = [survivors([shard], rows, 7, T, T + 1, iter([(0, start)])) for start in starts]
    assert note["survivors"]["nanoGPT"] == round(7 * sum(each) / len(each)) < 42


def test_files_of_less_than_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arm = arms.build_small(tmp_path, examples=7, raw_shards=2)  # 4 and 3
    assert main(["export", str(arm), "--to", "llmc", "--global-batch", "4", "--out", str(tmp_path / "out"), "--json"]) == 0
    said = capsys.readouterr()
    note = json.loads(said.out.splitlines()[-1])["manifest"]
    assert note["survivors"]["llm.c"] == 0
    assert "llm.c stops with an error: a file of 1,801 tokens, fewer than batch × ranks × T + 1 = 2,401" in said.err
    assert main(["export", str(arm), "--to", "llmc", "--global-batch", "3", "--out", str(tmp_path / "no")]) == 2
    assert "shard 0 holds 4 examples, not a multiple of --global-batch 3" in capsys.readouterr().err
    assert main(["export", str(arm), "--to", "llmc", "--global-batch", "4", "--ranks", "3", "--out", str(tmp_path / "no")]) == 2
    assert "not a multiple of --ranks 3" in capsys.readouterr().err


def test_the_default_is_the_formats_own_stride(arm: Path, tmp_path: Path) -> None:
    for format, stride in (("raw", "T"), ("llmc", "T"), ("nanogpt-npy", "T"), ("megatron", "T"), ("nanotron", "T+1")):
        assert export(ExportConfig(format=format), arm, tmp_path / format)["stride"] == stride
    for name in ("in2c_train_00000.bin", "in2c_train_00001.bin"):
        assert (tmp_path / "raw" / name).read_bytes()[:-2] == (arm / name).read_bytes()
    assert (tmp_path / "llmc" / name).read_bytes()[1024:-2] == (arm / name).read_bytes()


def test_large_ids_go_where_they_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "large.npy", np.random.default_rng(3).integers(60_000, 100_000, 3000))
    build_in2(arms.small(vocab=100_000, dtype="uint32"), [tmp_path / "large.npy"], tmp_path / "arm")
    ids = np.array(datasets.load_from_disk(str(tmp_path / "arm"))["input_ids"])
    for format, dtype in (("raw", "<u4"), ("megatron", "<i4"), ("llmc", "<u4"), ("nanotron", "<u4"), ("nanogpt-npy", "<u4")):
        export(ExportConfig(format=format, stride="T"), tmp_path / "arm", tmp_path / format)
        paths = sorted(path for path in (tmp_path / format).iterdir() if path.suffix in (".bin", ".npy", ".ds"))
        header = {"llmc": 1024, "nanogpt-npy": 128}.get(format, 0)
        parts = [np.fromfile(path, dtype, offset=header) for path in paths]
        assert np.array_equal(np.concatenate([part[: len(part) - BEHIND[format]] for part in parts]).reshape(-1, T), ids)
    assert struct.unpack_from("<B", (tmp_path / "megatron" / "in2c_train_00000.idx").read_bytes(), 17) == (4,)
    header = np.fromfile(tmp_path / "llmc" / "in2c_train_00000.bin", "<i4", 256)  # as train_llama3.py asks for
    assert header[:3].tolist() == [20240801, 7, len(parts[0])]
    assert np.load(tmp_path / "nanogpt-npy" / "in2c_train_00000.npy").dtype == np.uint32
    assert (tmp_path / "nanotron" / "in2c_train_00000.ds.metadata").read_text().split("\n")[0].endswith("|4")
    with pytest.raises(InputError, match="its ids are uint32, nanogpt holds uint16"):
        export(ExportConfig(format="nanogpt"), tmp_path / "arm", tmp_path / "no")


def test_what_does_not_fit_is_refused(arm: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--stride T\+1: megatron knows T"):
        export(ExportConfig(format="megatron", stride="T+1"), arm, tmp_path / "out")
    with pytest.raises(InputError, match=r"stride is '2T'; expected one of T, T\+1 \(--stride\)"):
        ExportConfig(format="raw", stride="2T")
    with pytest.raises(InputError, match="leave --max-shard-bytes out"):
        ExportConfig(format="raw", max_shard_bytes=5)
    with pytest.raises(InputError, match="leave --stride out"):
        ExportConfig(format="deepspec", stride="T")
    with pytest.raises(InputError, match="a bank of in2, expected targets"):
        export(ExportConfig(format="deepspec"), arm, tmp_path / "out")
    from tests import banks

    banks.make_texts(tmp_path / "texts", 3)
    with pytest.raises(InputError, match="a bank of texts; raw takes an arm"):
        export(ExportConfig(format="raw"), tmp_path / "texts", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_export_that_was_killed_goes_on(arm: Path, tmp_path: Path) -> None:
    config = ExportConfig(format="nanotron")
    export(config, arm, tmp_path / "whole")
    for moment in range(3, 60, 8):
        out = tmp_path / f"killed-{moment}"
        outcome = kill_at(moment, export, config, arm, out)
        assert outcome.error == ""
        assert (out / "arrowbank-export.json").exists() != outcome.killed or moment > 40
        export(config, arm, out)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")


def test_the_command_line(arm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(arm), "--to", "llmc", "--stride", "T+1", "--out", str(out), "--json"]) == 0
    note = json.loads(capsys.readouterr().out.splitlines()[-1])["manifest"]
    assert (note["stride"], note["survivors"]["llm.c"]) == ("T+1", 42)
    assert json.loads((out / "arrowbank-export.json").read_text()) == note
    assert main(["export", str(arm), "--to", "megatron", "--stride", "T+1", "--out", str(tmp_path / "no")]) == 2


def test_one_train_shard_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = arms.build_small(tmp_path, raw_shards=1)
    assert main(["export", str(one), "--to", "llmc", "--out", str(tmp_path / "out")]) == 0
    assert "wants two" in capsys.readouterr().err
