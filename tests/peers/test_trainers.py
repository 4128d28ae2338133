"""The data sets and collators of specforge, speculators and nvidia-modelopt read our exports: every tensor is the bank's.

`make test-peers` makes an environment for each program whose requirements clash, and runs these. DeepSpec is in no registry: its data
set is modelled here from deepspec/data/target_cache_dataset.py (deepseek-ai/DeepSpec, commit 4351696e)."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arrowbank import ExportConfig, export, open_bank
from arrowbank.bank.kinds.targets_bank import TargetBank, TargetSample
from tests.target_banks import make_target_bank

PYTHONS = {
    "speculators": os.environ.get("ARROWBANK_SPECULATORS_PYTHON", ""),
    "modelopt": os.environ.get("ARROWBANK_MODELOPT_PYTHON", ""),
    "specforge": os.environ.get("ARROWBANK_SPECFORGE_PYTHON", ""),
}
READER = Path(__file__).with_name("read_exports.py")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TargetBank]:
    """Banks of both norms, of samples with two loss tokens in a row at least, which dflash asks for."""
    folder = tmp_path_factory.mktemp("banks")
    for norm in ("post", "pre"):
        make_target_bank(
            folder / norm, dump={"lengths": (9, 33, 12, 17) * 3}, last_hidden_norm=norm, loss_mask="ones_except_first"
        )
    found = {norm: open_bank(folder / norm) for norm in ("post", "pre")}
    assert all(isinstance(bank, TargetBank) for bank in found.values())
    return found  # type: ignore[return-value]


def read_by(program: str, folder: Path, out: Path) -> Any:
    """What the program itself reads of an export."""
    python = PYTHONS[program.partition("-")[0]]
    if not python:
        pytest.skip(f"needs {program.partition('-')[0]}: run `make test-peers`")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [python, str(READER), program, str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(out, weights_only=True)


def tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16).copy()).view(torch.bfloat16)


def tokens(sample: TargetSample) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(sample.input_ids.astype(np.int64)), torch.from_numpy(sample.loss_mask.astype(np.int64))


def by_place(bank: TargetBank, names: list[str]) -> list[TargetSample]:
    """The bank's samples in the order in which a loader sorts their files."""
    order = sorted(range(len(bank)), key=lambda row: names[row])
    samples = []
    for row in order:
        one = bank.read(row)
        samples.append(TargetSample(one.name, one.input_ids.copy(), one.loss_mask.copy(), one.taps.copy(), one.last.copy()))
    return samples


def same(found: Tensors, expected: Tensors) -> None:
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name].to(value.dtype), value), name


@pytest.mark.parametrize("strategy", ["eagle3", "dflash", "dspark"])
def test_specforge(strategy: str, banks: dict[str, TargetBank], tmp_path: Path) -> None:
    bank = banks["post"]
    export(ExportConfig(format=f"specforge-{strategy}"), bank.folder, tmp_path / "out")
    read = read_by(f"specforge-{strategy}", tmp_path / "out", tmp_path / "read.pt")
    samples = by_place(bank, [f"data_{row}.ckpt" for row in range(len(bank))])
    assert len(read["samples"]) == len(samples)
    longest = max(len(sample.input_ids) for sample in samples)
    for row, (found, sample) in enumerate(zip(read["samples"], samples, strict=True)):
        ids, mask = tokens(sample)
        taps, last = tensor(sample.taps)[None], tensor(sample.last)[None]
        if strategy == "eagle3":
            mask[-1] = 0  # its own rule: nothing follows the last token
            expected = {"target": last, "hidden_state": taps, "attention_mask": torch.ones_like(mask)[None]}
        else:
            expected = {"hidden_states": taps} | ({"target_last_hidden_states": last} if strategy == "dspark" else {})
        expected |= {"input_ids": ids[None], "loss_mask": mask[None]}
        same(found, expected)
        assert found.keys() == expected.keys()
        in_batch = {name: read["batch"][name][row : row + 1, : len(ids)] for name in ("input_ids", "loss_mask")}
        same(in_batch, {"input_ids": ids[None], "loss_mask": mask[None]})
        for name in ("target", "hidden_state") if strategy == "eagle3" else ("hidden_states",):
            assert torch.equal(read["batch"][name][row, : len(ids)], expected[name][0])
            assert read["batch"][name].shape[1] >= longest


def test_speculators(banks: dict[str, TargetBank], tmp_path: Path) -> None:
    bank = banks["pre"]
    export(ExportConfig(format="speculators"), bank.folder, tmp_path / "out")
    read = read_by("speculators", tmp_path / "out", tmp_path / "read.pt")
    assert len(read["samples"]) == len(bank)
    flat = {"input_ids": [], "hidden_states": [], "verifier_last_hidden_states": []}
    for row, found in enumerate(read["samples"]):
        sample = bank.read(row)
        ids, mask = tokens(sample)
        expected = {
            "input_ids": ids,
            "loss_mask": mask,
            "hidden_states": tensor(sample.taps),
            "verifier_last_hidden_states": tensor(sample.last),
            "lengths": torch.tensor([len(ids)]),
        }
        same(found, expected)
        for name, parts in flat.items():
            parts.append(expected[name])
    for name, parts in flat.items():  # packed one behind the other, up to its limit
        packed = torch.cat(parts)[:64]
        assert torch.equal(read["batch"][name][0], packed), name


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_modelopt(norm: str, banks: dict[str, TargetBank], tmp_path: Path) -> None:
    bank = banks[norm]
    export(ExportConfig(format="modelopt"), bank.folder, tmp_path / "out")
    read = read_by("modelopt", tmp_path / "out", tmp_path / "read.pt")
    samples = by_place(bank, [bank.read(row).name for row in range(len(bank))])
    assert len(read["samples"]) == len(samples)
    for row, (found, sample) in enumerate(zip(read["samples"], samples, strict=True)):
        ids, mask = tokens(sample)
        states = {"base_model_hidden_states": tensor(sample.last), "aux_hidden_states": tensor(sample.taps)}
        same(found, {"input_ids": ids, "loss_mask": mask, **states})
        assert found["base_hidden_prenorm"] is (norm == "pre")
        same(
            {name: read["batch"][name][row, : len(ids)] for name in ("input_ids", "loss_mask")},
            {"input_ids": ids, "loss_mask": mask},
        )
        outputs = read["batch"]["base_model_outputs"]
        same({name: outputs[name][row, : len(ids)] for name in states}, states)


def test_deepspec(banks: dict[str, TargetBank], tmp_path: Path) -> None:
    """`CacheDataset.__getitem__` and `validate_target_cache_manifest`, as the source has them: a record, five offsets, five reads."""
    bank = banks["post"]
    export(ExportConfig(format="deepspec", max_shard_bytes=9000), bank.folder, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    index = (tmp_path / "out" / "samples.idx").read_bytes()
    record = struct.Struct("<QIIQQQQQ")
    assert len(index) == manifest["num_samples"] * record.size == len(bank) * manifest["index_record_size"]
    assert [shard["shard_id"] for shard in manifest["shards"]] == list(range(manifest["num_shards"]))
    assert manifest["num_shards"] > 1
    layers, width = len(manifest["target_layer_ids"]), manifest["hidden_size"]
    for row in range(len(bank)):
        sample_id, shard_id, length, *offsets = record.unpack_from(index, row * record.size)
        data = (tmp_path / "out" / manifest["shards"][shard_id]["file_name"]).read_bytes()
        kinds: list[tuple[str, Any, tuple[int, ...]]] = [
            ("input_ids", "<i4", (length,)),
            ("attention_mask", "u1", (length,)),
            ("loss_mask", "u1", (length,)),
            ("taps", "<u2", (length, layers * width)),
            ("last", "<u2", (length, width)),
        ]
        read = {
            name: np.frombuffer(data, kind, int(np.prod(shape)), offset).reshape(shape)
            for (name, kind, shape), offset in zip(kinds, offsets, strict=True)
        }
        sample = bank.read(row)
        assert sample_id == row
        assert read["attention_mask"].all()
        assert all(np.array_equal(read[name], getattr(sample, name)) for name in ("input_ids", "loss_mask", "taps", "last"))
