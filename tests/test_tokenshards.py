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

from arrowbank import ExportConfig, build_in2, export
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
    ("nanogpt-npy", "T"),
    ("nanogpt-npy", "T+1"),
    ("megatron", "T"),
    ("nanotron", "T+1"),
    ("nanotron", "T"),
]

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
    "llmc": read_llmc,
    "nanogpt-npy": read_npy,
    "megatron": read_megatron,
    "nanotron": read_nanotron,
}


def windows(shard: Ids, read: int, step: int) -> Iterator[Ids]:
    """What a loader cuts."""
    for start in range(0, len(shard) - read + 1, step):
        yield shard[start : start + read]


def survivors(shards: list[Ids], rows: datasets.Dataset, per_shard: int, width: int, read: int, step: int) -> int:
    """Triples whose needle and probe both stand, token for token, in one window of a loader."""
    count = 0
    for number, shard in enumerate(shards):
        found = list(windows(shard, read, step))
        for example in range(number * per_shard, min((number + 1) * per_shard, len(rows))):
            row = rows[example]
            for needle, probe in zip(row["needle_start"], row["probe_start"], strict=True):
                place = (example - number * per_shard) * width + needle
                window, at = divmod(place, step)
                planted = row["input_ids"][probe : probe + SPAN]
                if window < len(found) and at + probe - needle + SPAN <= read:
                    assert found[window][at : at + SPAN].tolist() == planted
                    assert found[window][at + probe - needle :][:SPAN].tolist() == planted
                    count += 1
    return count


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return arms.build_small(tmp_path_factory.mktemp("arm"))


@pytest.mark.parametrize(("format", "stride"), CASES)
def test_a_loader_of_that_stride_gets_the_examples_whole(format: str, stride: str, arm: Path, tmp_path: Path) -> None:
    note = export(ExportConfig(format=format, stride=stride), arm, tmp_path / "out")
    rows = datasets.load_from_disk(str(arm))
    ids = np.array(rows["input_ids"])
    shards = READERS[format](tmp_path / "out")
    width, step = (T, T) if stride == "T" else (T + 1, T + 1)
    read = step if format == "raw" else T + 1
    assert [len(shard) for shard in shards] == [4 * width, 3 * width]
    assert [shard["tokens"] for shard in note["shards"]] == [4 * width, 3 * width]
    example = 0
    for shard, count in zip(shards, (4, 3), strict=True):
        cut = list(windows(shard, read, step))
        assert len(cut) == (count - 1 if (read, step) == (T + 1, T) else count)  # no token is behind the last one's labels
        for number, window in enumerate(cut):
            assert window[:T].tolist() == ids[example + number].tolist()
            if read > T:
                assert window[T] == ids[(example + number + 1) % 7, 0]
        example += count
    assert (
        len(list((tmp_path / "out").iterdir()))
        == 2 * (len(note["shards"]) and {"megatron": 2, "nanotron": 3}.get(format, 1)) + 1
    )


@pytest.mark.parametrize(("format", "stride"), CASES)
def test_the_note_counts_the_triples_that_survive_each_cut(format: str, stride: str, arm: Path, tmp_path: Path) -> None:
    note = export(ExportConfig(format=format, stride=stride), arm, tmp_path / "out")
    rows, shards = datasets.load_from_disk(str(arm)), READERS[format](tmp_path / "out")
    width = T if stride == "T" else T + 1
    for name, step in (("T", T), ("T+1", T + 1)):
        read = step if format == "raw" else T + 1
        assert note["survivors"][name] == survivors(shards, rows, 4, width, read, step)
    assert note["triples"] == 42
    whole = note["survivors"][stride]
    assert whole == (42 if format == "raw" or stride == "T+1" else 30)  # a step of T leaves the last of each file unread
    assert stride == "T+1" or note["survivors"]["T+1"] < 42


def test_the_default_is_the_formats_own_stride(arm: Path, tmp_path: Path) -> None:
    for format, stride in (("raw", "T"), ("llmc", "T"), ("nanogpt-npy", "T"), ("megatron", "T"), ("nanotron", "T+1")):
        assert export(ExportConfig(format=format), arm, tmp_path / format)["stride"] == stride
    for name in ("in2c_train_00000.bin", "in2c_train_00001.bin"):
        assert (tmp_path / "raw" / name).read_bytes() == (arm / name).read_bytes()
    assert (tmp_path / "llmc" / name).read_bytes()[1024:] == (arm / name).read_bytes()


def test_large_ids_go_where_they_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "large.npy", np.random.default_rng(3).integers(60_000, 100_000, 3000))
    build_in2(arms.small(vocab=100_000, dtype="uint32"), [tmp_path / "large.npy"], tmp_path / "arm")
    ids = np.array(datasets.load_from_disk(str(tmp_path / "arm"))["input_ids"])
    for format, dtype in (("raw", "<u4"), ("megatron", "<i4")):
        export(ExportConfig(format=format), tmp_path / "arm", tmp_path / format)
        found = np.concatenate([np.fromfile(path, dtype) for path in sorted((tmp_path / format).glob("*.bin"))])
        assert np.array_equal(found.reshape(-1, T), ids)
    assert struct.unpack_from("<B", (tmp_path / "megatron" / "in2c_train_00000.idx").read_bytes(), 17) == (4,)
    for format in ("llmc", "nanogpt-npy", "nanotron"):
        with pytest.raises(InputError, match=f"its ids are uint32, {format} holds uint16"):
            export(ExportConfig(format=format), tmp_path / "arm", tmp_path / "no")


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
    assert (note["stride"], note["survivors"]["T+1"]) == ("T+1", 42)
    assert json.loads((out / "arrowbank-export.json").read_text()) == note
    assert main(["export", str(arm), "--to", "megatron", "--stride", "T+1", "--out", str(tmp_path / "no")]) == 2


def test_one_train_shard_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = arms.build_small(tmp_path, raw_shards=1)
    assert main(["export", str(one), "--to", "llmc", "--out", str(tmp_path / "out")]) == 0
    assert "wants two" in capsys.readouterr().err
