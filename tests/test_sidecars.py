"""`verify` of exports and caches: every changed byte is found, of files and sidecars; what no sidecar vouches for is read again.

The flips come from a seed that the failure prints. Which files a loader takes is said here once more, after each loader's own code.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

from arrowbank import Check, ExportConfig, ImportConfig, export, import_targets, import_to_deepspec, open_bank, verify
from arrowbank.cli import main
from arrowbank.errors import CorruptBank
from arrowbank.formats.export_checks import LAYOUTS, layout_of
from arrowbank.formats.sidecar import read_sidecar
from arrowbank.formats.torchfile import TorchFile
from arrowbank.targets.vocab import write_vocab_map
from tests.exports import EVERY, TARGETS, TOKENS, export_everything, sidecar_of, write_sidecar
from tests.kill import kill_at, tree_bytes
from tests.target_banks import import_config, make_target_bank

GOLDEN = Path(__file__).parent / "golden" / "targets"
FLIPS = 12  # of each file of an export; every byte of its sidecar besides
# what loaders take of a folder; what is not named here takes only files that it is given by name
LOADERS = {
    "specforge-eagle3": ["*.ckpt", "*.ckpt.gz"],
    "specforge-dflash": ["*.ckpt", "*.ckpt.gz"],
    "specforge-dspark": ["*.ckpt", "*.ckpt.gz"],
    "modelopt": ["*.pt"],
    "speculators": ["data_*.pt", "*hs_*.safetensors", "*.arrow"],
    "raw": ["*.bin"],
    "llmc": ["*.bin"],
    "nanogpt-npy": ["*train*", "*val*"],
    "megatron": ["*.bin", "*.idx"],
    "nanotron": ["*.ds", "*.ds.*"],
    "npy": ["*.npy"],
    "deepspec": ["*.bin", "*.idx", "manifest.json"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return export_everything(tmp_path_factory.mktemp("exports"))


@pytest.fixture
def folder(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies of the exports, to be damaged."""

    def copy(name: str) -> Path:
        shutil.copytree(made[name], tmp_path / name)
        return tmp_path / name

    return copy


def failed(folder: Path) -> dict[str, str]:
    return {check.name: check.detail for check in verify(folder) if not check.ok}


def flipped(data: bytes, at: int, bit: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", EVERY)
def test_every_export_has_a_sidecar_and_passes(name: str, made: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(sidecar_of(made[name]).read_text())
    files = {path.relative_to(made[name]).as_posix() for path in files_of(made[name])}
    assert {entry["name"] for entry in said["files"]} | {sidecar_of(made[name]).relative_to(made[name]).as_posix()} == files
    for entry in said["files"]:
        assert (made[name] / entry["name"]).stat().st_size == entry["bytes"]
    checks = verify(made[name])
    assert [check for check in checks if not check.ok] == []
    assert {"sidecar", "files", "digests", "strays", "layout"} <= {check.name for check in checks}
    assert main(["verify", str(made[name]), "--quick"]) == 0
    assert main(["verify", str(made[name])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(checks)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_flipped_byte_is_found(name: str, folder: Callable[[str], Path]) -> None:
    seed = random.randrange(1 << 32)
    dice, out = random.Random(seed), folder(name)
    for path in files_of(out):
        data, is_sidecar = path.read_bytes(), path == sidecar_of(out)
        places = range(len(data)) if is_sidecar else [dice.randrange(len(data)) for _ in range(FLIPS)]
        for at in places:
            changed = flipped(data, at, dice.randrange(8))
            path.write_bytes(changed)
            if not (is_sidecar and is_same_json(data, changed)):
                assert failed(out), f"seed {seed}: byte {at} of {path.relative_to(out)}"
        path.write_bytes(data)
    assert not failed(out)


def is_same_json(data: bytes, changed: bytes) -> bool:
    """Whether only whitespace differs."""
    return data.split() == changed.split()


def edit(change: Callable[[dict[str, Any]], object], *, sealed: bool = False) -> Callable[[Path], None]:
    def run(out: Path) -> None:
        said = json.loads(sidecar_of(out).read_text())
        change(said)
        if sealed:
            write_sidecar(out, said)
        else:
            sidecar_of(out).write_text(json.dumps(said))

    return run


def first_file(out: Path) -> Path:
    return next(path for path in files_of(out) if path != sidecar_of(out))


EDITS: dict[str, Callable[[Path], object]] = {
    "another format": edit(lambda said: said.update(format="raw")),
    "another origin": edit(lambda said: said["made_from"].update(kind="texts")),
    "another file's digest": edit(lambda said: said["files"][0].update(xxh3_128="0" * 32)),
    "a field more": edit(lambda said: said.update(more=1)),
    "no digest": edit(lambda said: said.pop("digest")),
    "not an object": lambda out: sidecar_of(out).write_text("[]"),
    "not JSON": lambda out: sidecar_of(out).write_bytes(b"\xff\0"),
    "deep JSON": lambda out: sidecar_of(out).write_text("[" * 100_000),
    "no bytes": lambda out: sidecar_of(out).write_bytes(b""),
    "a number that JSON has not": edit(lambda said: said.update(more=float("nan"))),
    "a lone surrogate": edit(lambda said: said.update(more="\ud800")),
    "sealed: a file less": edit(lambda said: said["files"].pop(), sealed=True),
    "sealed: no files": edit(lambda said: said.update(files=None), sealed=True),
    "sealed: a size that is none": edit(lambda said: said["files"][0].update(bytes="9"), sealed=True),
    "sealed: a size past all disks": edit(lambda said: said["files"][0].update(bytes=10**400), sealed=True),
    "sealed: a negative size": edit(lambda said: said["files"][0].update(bytes=-1), sealed=True),
    "sealed: a file twice": edit(lambda said: said["files"].append(said["files"][0]), sealed=True),
    "sealed: a name above the folder": edit(lambda said: said["files"][0].update(name="../x"), sealed=True),
    "sealed: an absolute name": edit(lambda said: said["files"][0].update(name="/etc/passwd"), sealed=True),
    "sealed: an unknown format": edit(lambda said: said.update(format="parchment"), sealed=True),
    "sealed: another digest": edit(lambda said: said["files"][0].update(xxh3_128="0" * 32), sealed=True),
    "a missing file": lambda out: first_file(out).unlink(),
    "a cut file": lambda out: os.truncate(first_file(out), first_file(out).stat().st_size - 1),
    "an empty file": lambda out: os.truncate(first_file(out), 0),
    "a folder in its place": lambda out: put_a_folder(first_file(out)),
}


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", EDITS)
@pytest.mark.parametrize("name", ["deepspec", "modelopt", "megatron", "parquet"])
def test_every_edit_is_found_and_none_is_a_traceback(damage: str, name: str, folder: Callable[[str], Path]) -> None:
    out = folder(name)
    EDITS[damage](out)
    assert failed(out)
    assert main(["verify", str(out)]) == 1


def test_nothing_of_a_sidecar_reaches_the_terminal_unprintable(
    folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder("raw")
    edit(lambda said: said["made_from"].update(kind="\x1b[2J", plan_digest="\x1b]0;x"), sealed=True)(out)
    for verb in ("verify", "info"):
        main([verb, str(out)])
    assert "\x1b" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("deepspec", "shard-00009.bin"),
        ("specforge-eagle3", "rows_0-2000/data_9.ckpt"),
        ("speculators", "hidden_states/hs_9.safetensors"),
        ("modelopt", "other.pt"),
        ("llmc", "in2c_train_00009.bin"),
        ("nanotron", "more/in2c_train_00009.ds"),
        ("npy", "keys.npy"),
        ("parquet", "data-00009.parquet"),
        ("parquet", "notes.json"),
    ],
)
def test_a_file_that_a_loader_would_take_is_a_stray(name: str, stray: str, folder: Callable[[str], Path]) -> None:
    out = folder(name)
    (out / "notes.txt").write_text("mine")
    assert not failed(out)
    (out / stray).parent.mkdir(exist_ok=True)
    (out / stray).write_bytes(first_file(out).read_bytes())
    assert stray in failed(out)["strays"]


def test_a_link_out_of_the_folder_is_not_followed(folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = folder("raw")
    path = first_file(out)
    path.rename(tmp_path / "elsewhere.bin")
    path.symlink_to(tmp_path / "elsewhere.bin")
    assert "a symbolic link out of the folder" in failed(out)["files"]


def test_a_bank_stays_a_bank_whatever_sidecar_is_put_into_it(folder: Callable[[str], Path], tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank")
    shutil.copy(sidecar_of(folder("raw")), tmp_path / "bank")
    assert {"opens", "hashes"} <= {check.name for check in verify(tmp_path / "bank")}


# what no sidecar vouches for


@pytest.mark.parametrize("name", EVERY)
def test_a_cache_without_a_sidecar_is_read_again_and_the_result_says_so(name: str, folder: Callable[[str], Path]) -> None:
    out = folder(name)
    sidecar_of(out).unlink()
    checks = verify(out)
    assert [check for check in checks if not check.ok] == []
    assert layout_of(out) == ("deepspec" if name == "deepspec-import" else name)
    assert (checks[0].name, "without digests nothing vouches for the bytes" in checks[0].detail) == ("sidecar", True)
    assert "layout" in {check.name for check in checks}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_no_damage_to_a_cache_without_a_sidecar_is_a_traceback(name: str, folder: Callable[[str], Path]) -> None:
    seed = random.randrange(1 << 32)
    dice, out = random.Random(seed), folder(name)
    sidecar_of(out).unlink()
    for path in files_of(out):
        data = path.read_bytes()
        heads = [dice.randrange(min(len(data), 200)) for _ in range(FLIPS)]
        for at in [*heads, *(dice.randrange(len(data)) for _ in range(FLIPS))]:
            path.write_bytes(flipped(data, at, dice.randrange(8)))
            assert all(isinstance(check, Check) for check in verify(out)), f"seed {seed}: byte {at} of {path}"
        for torn in (b"", data[: len(data) // 2], data + b"\0"):
            path.write_bytes(torn)
            verify(out)
        path.write_bytes(data)


TORN: dict[str, list[tuple[str, int]]] = {  # a byte of structure: file, place
    "deepspec": [("samples.idx", 0), ("samples.idx", 12), ("samples.idx", 16), ("shard-00000.bin", 3)],
    "specforge-eagle3": [("rows_0-2000/data_0.ckpt", 100)],
    "modelopt": [("sample-0000.safetensors.pt", 100)],
    "speculators": [("hidden_states/hs_0.safetensors", 20), ("data-00000-of-00001.arrow", 100), ("token_freq.pt", 100)],
    "llmc": [("in2c_train_00000.bin", 8)],
    "nanogpt-npy": [("in2c_train_00000.npy", 1)],
    "megatron": [("in2c_train_00000.idx", 40)],
    "nanotron": [("in2c_train_00000.ds.index", 1)],
    "npy": [("index.json", 10), ("texts.jsonl", 5)],
    "parquet": [("data-00000.parquet", -2)],
}


@pytest.mark.parametrize(("name", "file", "at"), [(name, *place) for name, places in TORN.items() for place in places])
def test_torn_structure_is_found_without_a_sidecar(name: str, file: str, at: int, folder: Callable[[str], Path]) -> None:
    out = folder(name)
    sidecar_of(out).unlink()
    path = out / file
    path.write_bytes(flipped(path.read_bytes(), at, 7))
    assert failed(out)


def test_an_offset_out_of_range_is_not_followed(folder: Callable[[str], Path]) -> None:
    out = folder("speculators")
    sidecar_of(out).unlink()
    path = out / "data-00000-of-00001.arrow"
    offsets = np.array([0, 5, 6, 15, 18], "<i4").tobytes()
    data = path.read_bytes()
    assert data.count(offsets) == 2  # of ids and mask
    path.write_bytes(data.replace(offsets, np.array([0, 5, 6, 15, 1 << 30], "<i4").tobytes()))
    assert "not a whole dataset" in failed(out)["layout"]


@pytest.mark.parametrize("cache", ["cache_all_ones", "cache_from_dump", "cache_ones_except_first"])
def test_the_golden_caches_pass_by_their_structure(cache: str, tmp_path: Path) -> None:
    checks = verify(GOLDEN / cache)
    assert all(check.ok for check in checks)
    assert "no arrowbank-export.json" in checks[0].detail


def test_a_folder_of_specforges_own_script_passes(tmp_path: Path) -> None:
    for row in range(3):
        path = tmp_path / "out" / "rows_0-2000" / f"data_{row}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = torch.randn(1, 5, 32, dtype=torch.bfloat16)
        sample = {"input_ids": torch.arange(5), "loss_mask": torch.ones(5, dtype=torch.long)}
        torch.save({**sample, "hidden_state": hidden[..., :8], "aux_hidden_state": hidden[..., 8:].clone()}, path)
    assert layout_of(tmp_path / "out") == "specforge-eagle3"
    assert not failed(tmp_path / "out")
    path.unlink()
    torch.save({**sample, "hidden_state": hidden[..., :7], "aux_hidden_state": hidden[..., 8:].clone()}, path)
    assert "hidden_state is bfloat16 of shape [1, 5, 7]" in failed(tmp_path / "out")["layout"]


class Hostile:
    """What a pickle may do when it is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("hostile",)


def test_a_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with zipfile.ZipFile(tmp_path / "out" / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"input_ids": Hostile()}, protocol=2))
    assert "expected plain values and tensors" in failed(tmp_path / "out")["layout"]
    assert not (tmp_path / "hostile").exists()


def test_tensors_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    values = torch.arange(24.0).reshape(4, 6)
    saved = {
        "view": values[1:, ::2].t(),
        "scalar": torch.tensor(3),
        "none": torch.zeros(0),
        "text": "a",
        5: 70_000,
        "yes": True,
    }
    torch.save(saved, tmp_path / "a.pt")
    with TorchFile(tmp_path / "a.pt") as file:
        assert {name: file.value[name] for name in ("text", 5, "yes")} == {"text": "a", 5: 70_000, "yes": True}
        for name in ("view", "scalar", "none"):
            assert np.array_equal(file.array(file.value[name]), saved[name].numpy())  # type: ignore[attr-defined]


def test_what_is_nothing_that_can_be_verified_is_one_failed_check(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"\0" * 10)
    for place in ("empty", "file.bin", "missing"):
        assert len(failed(tmp_path / place)) == 1
        assert main(["verify", str(tmp_path / place)]) == 1


# loaders, and what export and info do


@pytest.mark.parametrize("name", LOADERS)
def test_no_loader_takes_the_sidecar(name: str, made: dict[str, Path]) -> None:
    taken = [path.name for path in files_of(made[name]) if any(fnmatch(path.as_posix(), pattern) for pattern in LOADERS[name])]
    assert taken
    for pattern in (*LOADERS[name], *LAYOUTS[name].takes):
        assert not fnmatch("arrowbank-export.json", pattern)


def test_every_reader_of_a_folder_of_parquet_finds_the_rows_alone(made: dict[str, Path], tmp_path: Path) -> None:
    out, bank = made["parquet"], open_bank(made["parquet"].parents[1] / "features")
    cache = {"split": "train", "cache_dir": str(tmp_path / "cache")}
    for loaded in (
        datasets.load_dataset(str(out), **cache),
        datasets.load_dataset("parquet", data_dir=str(out), **cache),
        datasets.load_dataset("parquet", data_files=str(out / "**"), **cache),
    ):
        assert loaded.features == bank.dataset.features
        assert loaded.to_dict() == bank.dataset.to_dict()
    streamed = datasets.load_dataset(str(out), split="train", streaming=True)
    assert len(list(streamed)) == len(bank)
    assert pq.read_table(out).num_rows == ds.dataset(out, format="parquet").count_rows() == len(bank)


@pytest.mark.parametrize("name", EVERY)
def test_info_says_format_and_counts_and_suggests_verify(
    name: str, made: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(made[name]), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert f"arrowbank verify {made[name]}" in facts["next"].splitlines()
    assert facts["format"] == ("deepspec" if name == "deepspec-import" else name)
    assert {"num_samples", "rows", "examples"} & facts.keys()
    assert facts["made_from"]


def test_the_same_export_elsewhere_has_the_same_bytes(made: dict[str, Path], tmp_path: Path) -> None:
    bank = made["deepspec"].parents[1] / "post"
    export(ExportConfig(format="deepspec", max_shard_bytes=500), bank, tmp_path / "again")
    assert tree_bytes(tmp_path / "again") == tree_bytes(made["deepspec"])


@pytest.mark.slow
def test_a_cache_in_one_step_that_was_killed_goes_on_to_the_same_sidecar(made: dict[str, Path], tmp_path: Path) -> None:
    dump, wanted = made["deepspec"].parents[1] / "post-dump", tree_bytes(made["deepspec-import"])
    for moment in range(1, 1000):
        out = tmp_path / f"out-{moment}"
        outcome = kill_at(moment, import_to_deepspec, import_config(), dump, out)
        assert not outcome.error
        if not outcome.killed:
            break
        if (out / "manifest.json").exists():  # a cache that a trainer opens has its sidecar
            assert not failed(out)
        elif out.exists():
            assert failed(out)
        import_to_deepspec(import_config(), dump, out)
        assert tree_bytes(out) == wanted
    assert moment > 20


@pytest.mark.slow
def test_a_file_that_rotted_before_the_export_went_on_is_found(made: dict[str, Path], tmp_path: Path) -> None:
    bank, out, moment = made["modelopt"].parents[1] / "post", tmp_path / "out", 20
    while not (receipts := sorted((out / "journal").glob("*.json"))):  # how many moments come before the first differs
        assert kill_at(moment, export, ExportConfig(format="modelopt"), bank, out).killed
        moment += 1
    receipt = receipts[0]
    path = out / json.loads(receipt.read_text())["name"]
    path.write_bytes(flipped(path.read_bytes(), 90, 0))
    with pytest.raises(CorruptBank, match="xxh3_128 differs"):
        export(ExportConfig(format="modelopt"), bank, out)
    export(ExportConfig(format="modelopt"), bank, out, restart=True)
    assert tree_bytes(out) == tree_bytes(made["modelopt"])


def test_readers_of_a_sidecar_do_not_take_an_edited_one(folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = folder("speculators")
    edit(lambda said: said.update(loss_mask="all_ones"))(out)
    with pytest.raises(CorruptBank, match="its digest is not that of its fields"):
        read_sidecar(sidecar_of(out))
    with pytest.raises(CorruptBank, match="its digest is not that of its fields"):
        import_targets(ImportConfig(), out, tmp_path / "back")
    assert main(["info", str(out)]) == 2


# the vocabulary map: one file, its digest in its metadata


@pytest.mark.parametrize(
    ("name", "file"), [("deepspec", "manifest.json"), ("deepspec", "samples.idx"), ("speculators", "state.json")]
)
def test_an_edited_cache_is_not_imported(name: str, file: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = folder(name)
    path = out / file
    data = path.read_bytes()
    edited = data[:-1] + bytes([data[-1] ^ 1]) if file == "samples.idx" else data.replace(b"{", b"{ ", 1)
    path.write_bytes(edited)
    with pytest.raises(CorruptBank, match=re.escape(file)):
        import_targets(ImportConfig(), out, tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_every_flipped_byte_of_a_vocabulary_map_is_found(tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank", vocab_size=50)
    path = tmp_path / "map.safetensors"
    write_vocab_map(tmp_path / "bank", 7, out=path)
    (check,) = verify(path)
    assert check.ok
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(flipped(data, at, at % 8))
        assert failed(path), f"byte {at}"


def test_the_maps_in_a_banks_folder_are_verified_with_it(tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank", vocab_size=50)
    write_vocab_map(tmp_path / "bank", 7)
    assert not failed(tmp_path / "bank")
    path = tmp_path / "bank" / "vocab-7.safetensors"
    path.write_bytes(flipped(path.read_bytes(), -1, 0))
    assert "vocab-7.safetensors" in failed(tmp_path / "bank")["map"]


def test_every_format_of_export_can_be_verified() -> None:
    assert set(LAYOUTS) == {*TARGETS, "speculators", *TOKENS, "npy", "parquet"}
