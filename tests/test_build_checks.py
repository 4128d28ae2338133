"""`build` refuses what its stages would refuse, before the first of them writes anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from arrowbank.errors import ArrowbankError, InputError
from arrowbank.features.encode import encode
from arrowbank.features.encode_config import EncodeConfig
from arrowbank.features.pipeline import BuildConfig, build
from arrowbank.features.scan import ScanConfig
from arrowbank.features.tokenize import TokenizeConfig, tokenize
from arrowbank.models import ModelConfig
from tests import tiny

Change = Callable[[Path], object]


def source(folder: Path, lines: int = 20) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"query": f"what is thing {i}?"}) + "\n" for i in range(lines)))
    return path


def config(model: Path, train: Path, *, tokenize: dict[str, Any] | None = None, **options: Any) -> BuildConfig:
    settings = {"model": str(model), "device": "cpu"} | options
    return BuildConfig(
        scan=ScanConfig(sources=(("train", str(train)),)),
        tokenize=TokenizeConfig(**{"tokenizer": str(model)} | (tokenize or {})),
        encode=EncodeConfig(model=ModelConfig(**settings)),
    )


def in_config(**fields: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def in_weights(change: Callable[[dict[str, Any]], object]) -> Change:
    def changed(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return changed


def without_a_layer(tensors: dict[str, Any]) -> None:
    del tensors["encoder.layer.1.attention.self.query.weight"]


def of_another_shape(tensors: dict[str, Any]) -> None:
    tensors["encoder.layer.0.intermediate.dense.weight"] = np.zeros((48, 32), np.float32)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def with_module(kind: str, **settings: object) -> Change:
    """A folder of sentence-transformers: transformer, pooling, and a module of that kind in 2_Dense."""

    def change(folder: Path) -> None:
        places = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": kind}
        steps = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(places.items())
        ]
        (folder / "modules.json").write_text(json.dumps(steps))
        for name, said in (
            ("1_Pooling", {"pooling_mode_mean_tokens": True}),
            ("2_Dense", {"in_features": 32, "out_features": 8, "bias": False} | settings),
        ):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(said))

    return change


FOLDERS: dict[str, tuple[Change, str]] = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "model type unknown": (in_config(model_type="no-such-model"), "no-such-model"),
    "class unknown": (in_config(architectures=["NoSuchModel"]), "NoSuchModel"),
    "not a text model": (in_config(model_type="vit", architectures=["ViTModel"]), "ViTModel needs"),
    "pickled weights": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickled"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither"),
    "weights cut off": (cut, "file not fully covered"),
    "a weight is missing": (in_weights(without_a_layer), "1 weights that BertModel needs"),
    "a weight has another shape": (in_weights(of_another_shape), "cannot be loaded as BertModel"),
    "more layers than weights": (in_config(num_hidden_layers=3), "BertModel needs"),
    "index of a file that is not there": (
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}})),
        ),
        "gone.safetensors",
    ),
    "no tokenizer": (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "tokenizer"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_used_is_refused_before_the_scan(tmp_path: Path, tiny_bert: Path, name: str) -> None:
    change, said = FOLDERS[name]
    model = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    change(model)
    options = {"backbone": "outer"} if name == "class unknown" else {}  # the class matters where the whole model is run
    with pytest.raises(InputError, match=said):
        build(config(model, source(tmp_path), **options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({"device": "cuda:7"}, "cuda:7"),
    "layer": ({"layer": 3}, "has 2 layers"),
    "negative layer": ({"layer": -4}, "has 2 layers"),
    "positions": ({"tokenize": {"max_tokens": 513}}, "--max-tokens 512 or less"),
    "special tokens": ({"tokenize": {"max_tokens": 2, "special_tokens": "on"}}, "max_tokens is 2"),
    "tokenizer": ({"tokenize": {"tokenizer": "./no-such-folder"}}, "no such folder"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_the_model_does_not_have_is_refused_before_the_scan(tmp_path: Path, tiny_bert: Path, name: str) -> None:
    options, said = OPTIONS[name]
    with pytest.raises(InputError, match=said):
        build(config(tiny_bert, source(tmp_path), **options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_encoder_that_is_none_is_refused_before_the_scan(tmp_path: Path, tiny_bert: Path) -> None:
    own = replace(config(tiny_bert, source(tmp_path)), encode=EncodeConfig(encoder="no.such.module:Encoder"))
    with pytest.raises(InputError, match="cannot be imported"):
        build(own, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def disk_of(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))


def test_a_disk_without_room_is_refused_before_the_scan(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tiny_bert, source(tmp_path, 1000))  # 1,000 texts of 64 bytes a vector, twice
    disk_of(128_000, monkeypatch)
    with pytest.raises(ArrowbankError, match=r"a bank of 1,000 texts takes .*, the disk has 128.0 kB free"):
        build(asked, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    disk_of(1 << 30, monkeypatch)
    assert build(asked, tmp_path / "out")["rows"] == 1000


def test_encode_refuses_texts_past_the_positions_before_it_writes(tmp_path: Path, tiny_bert: Path) -> None:
    texts = tiny.save_texts_bank(tmp_path / "texts", ["short", "long " * 600])
    tokenize(TokenizeConfig(tokenizer=str(tiny_bert), max_tokens=600), texts, tmp_path / "tokens")
    asked = EncodeConfig(model=ModelConfig(model=str(tiny_bert), device="cpu"))
    with pytest.raises(InputError, match=r"a text of 600 tokens, but model .* has 512 positions"):
        encode(asked, tmp_path / "tokens", tmp_path / "out")
    assert not (tmp_path / "out").exists()


HEADS: dict[str, tuple[Change, str]] = {
    "no weights": (lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), "2_Dense has no model.safetensors"),
    "weights cut off": (lambda folder: (folder / "2_Dense" / "model.safetensors").write_bytes(b"\x10"), "2_Dense"),
    "another shape": (
        lambda folder: save_file({"linear.weight": np.zeros((3, 3))}, folder / "2_Dense" / "model.safetensors"),
        "Dense",
    ),
    "another model's": (
        lambda folder: (
            with_module("Dense", in_features=64)(folder),
            save_file({"linear.weight": np.ones((8, 64), np.float32)}, folder / "2_Dense" / "model.safetensors"),
        ),
        "in_features is 64, what comes in has 32",
    ),
    "an unknown module": (with_module("CNN"), "CNN"),
    "a dimension too many": (with_module("Dense", in_features=999), "2_Dense"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_module_that_cannot_be_loaded_is_refused_before_the_scan(tmp_path: Path, tiny_bert: Path, name: str) -> None:
    change, said = HEADS[name]
    model = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    with_module("Dense")(model)
    weights = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)  # not ones: Bert's vectors add up to 0
    save_file({"linear.weight": weights}, model / "2_Dense" / "model.safetensors")
    assert build(config(model, source(tmp_path)), tmp_path / "good")["hidden_size"] == 8
    change(model)
    with pytest.raises(InputError, match=said):
        build(config(model, source(tmp_path)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
