"""Banks as Parquet, and feature banks as the mirror that trainers map."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import List, Value, load_dataset

from arrowbank import EncodeConfig, ExportConfig, FeatureBank, encode, export, open_bank
from arrowbank.cli import main
from arrowbank.errors import CorruptBank, InputError, PlanMismatch
from tests import arms
from tests.banks import make_texts, make_tokens
from tests.kill import Outcome


@pytest.fixture
def features(tmp_path: Path) -> Path:
    """A feature bank of 40 rows in three shards, without and with its mirror."""
    make_texts(tmp_path / "texts")
    make_tokens(tmp_path / "tokens", tmp_path / "texts")
    for name, mirror in (("bare", False), ("bank", True)):
        config = EncodeConfig(encoder="tests.banks:TableEncoder", shard_rows=16, mirror=mirror)
        encode(config, tmp_path / "tokens", tmp_path / name)
    return tmp_path / "bare"


def test_npy_is_the_mirror_that_the_bank_was_built_without(features: Path, tmp_path: Path) -> None:
    export(ExportConfig(format="npy"), features, tmp_path / "out")
    for name in ("features.f16.npy", "index.json", "texts.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "bank" / name).read_bytes()


def test_parquet_gives_rows_and_types_back(features: Path, tmp_path: Path) -> None:
    note = export(ExportConfig(format="parquet"), features, tmp_path / "out")
    names = [entry["name"] for entry in note["files"]]
    assert names == ["data-00000.parquet", "data-00001.parquet", "data-00002.parquet"]
    loaded = load_dataset(
        "parquet", data_files=str(tmp_path / "out" / "*.parquet"), split="train", cache_dir=str(tmp_path / "c")
    )
    bank = open_bank(features)
    assert isinstance(bank, FeatureBank)
    assert loaded.features["features"] == List(Value("float16"), length=bank.hidden_size)
    assert loaded.features == bank.dataset.features
    assert loaded.to_dict() == bank.dataset.to_dict()


def test_parquet_of_an_arm(tmp_path: Path) -> None:
    from arrowbank import build_in2

    build_in2(arms.small(examples=3, raw_shards=1), [arms.save_filler(tmp_path / "filler.bin")], tmp_path / "arm")
    assert main(["export", str(tmp_path / "arm"), "--to", "parquet", "--out", str(tmp_path / "out")]) == 0
    loaded = load_dataset(
        "parquet", data_files=str(tmp_path / "out" / "*.parquet"), split="train", cache_dir=str(tmp_path / "c")
    )
    assert loaded.to_dict() == open_bank(tmp_path / "arm").dataset.to_dict()


def test_a_killed_export_goes_on_to_the_same_files(
    features: Path, tmp_path: Path, kill_at: Callable[..., Outcome], tree_bytes: Callable[[Path], dict[str, str]]
) -> None:
    config = ExportConfig(format="parquet")
    export(config, features, tmp_path / "whole")
    for moment in (1, 3, 5):
        assert kill_at(moment, export, config, features, tmp_path / f"out-{moment}").killed
        assert not (tmp_path / f"out-{moment}" / ".arrowbank" / "arrowbank-export.json").exists()
        export(config, features, tmp_path / f"out-{moment}")
        assert tree_bytes(tmp_path / f"out-{moment}") == tree_bytes(tmp_path / "whole")


def test_what_does_not_fit_is_refused(features: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a bank of texts; npy takes one of features"):
        export(ExportConfig(format="npy"), tmp_path / "texts", tmp_path / "out")
    for options in ({"stride": "T"}, {"last_hidden_norm": "post"}, {"max_shard_bytes": 5}):
        with pytest.raises(InputError, match="leave --"):
            ExportConfig(format="parquet", **options)  # type: ignore[arg-type]
    export(ExportConfig(format="npy"), features, tmp_path / "out")
    with pytest.raises(PlanMismatch, match="another export"):
        export(ExportConfig(format="parquet"), features, tmp_path / "out")


def test_a_damaged_bank_is_not_exported(features: Path, tmp_path: Path) -> None:
    shutil.copytree(features, tmp_path / "damaged")
    with (tmp_path / "damaged" / "data-00001.arrow").open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CorruptBank, match="not those that were committed"):
        export(ExportConfig(format="parquet"), tmp_path / "damaged", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.parquet"))
