"""Where a model lies, what it is, and what is refused, all before a weight is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank.errors import InputError
from arrowbank.models import ModelConfig, describe, model_fingerprint, resolve_model
from arrowbank.models.model_folder import files_digest
from arrowbank.models.sentence_folder import read_sentence_folder


@pytest.fixture
def copied(tiny_bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Bert that a test may spoil."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "copied"))


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model", "", "model is empty"),
        ("pooling", "average", "'average'; expected one of auto, mean, last, cls, max"),
        ("backbone", "whole", "'whole'; expected one of inner, outer"),
        ("dtype", "fp16", "'fp16'; expected one of auto, float32, bfloat16, float16"),
        ("device", "gpu", "'gpu'; expected auto, cpu, cuda or cuda:N"),
        ("device", "cuda:", "expected auto, cpu, cuda or cuda:N"),
        ("gpu_memory_gb", 0.0, "gpu_memory_gb is 0.0"),
        ("gpu_memory_gb", float("nan"), "gpu_memory_gb is nan"),
    ],
)
def test_config_refuses_what_no_model_takes(field: str, value: object, expected: str) -> None:
    with pytest.raises(InputError, match=expected.replace("(", r"\(")):
        ModelConfig(**({"model": "m"} | {field: value}))


def test_importing_models_pulls_in_neither_torch_nor_transformers() -> None:
    code = "import sys, arrowbank.models; print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------------------- resolve_model


def test_a_folder_is_itself(tiny_bert: Path) -> None:
    assert resolve_model(str(tiny_bert)) == tiny_bert


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(InputError, match="no such folder"):
        resolve_model(name)


def test_a_hub_id_that_cannot_be_had_offline(tmp_path: Path) -> None:
    code = (
        "from arrowbank.models import resolve_model\nfrom arrowbank.errors import InputError\n"
        "for name in ('nobody/nothing', 'not a name!'):\n"
        "    try: resolve_model(name)\n    except InputError as error: print(error)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert "'nobody/nothing' is not a folder here" in found.stdout
    assert "'not a name!' is not a folder here" in found.stdout
    assert "HF_HUB_OFFLINE" in found.stdout
    assert not found.stderr


def test_a_hub_id_is_found_in_the_cache(tiny_bert: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_bert, snapshot)
    refs = tmp_path / "hub" / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    code = "from arrowbank.models import resolve_model; print(resolve_model('owner/name'))"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert Path(found.stdout.strip()) == snapshot


def test_a_file_is_not_a_model(copied: Path) -> None:
    with pytest.raises(InputError, match="is a file; expected the folder"):
        resolve_model(str(copied / "config.json"))


def test_pickled_weights_are_not_read(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin but no model\.safetensors: pickled weights are not read"):
        resolve_model(str(copied))


def test_no_weights_at_all(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    assert resolve_model(str(copied), weights=False) == copied
    with pytest.raises(InputError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        resolve_model(str(copied))


def test_a_missing_weight_shard_is_named(tiny_qwen3: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_qwen3).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert resolve_model(str(tmp_path)) == tmp_path
    shards[1].unlink()
    with pytest.raises(InputError, match=shards[1].name):
        resolve_model(str(tmp_path))


# ---------------------------------------------------------------------------------------------------------- fingerprints


def test_fingerprint_is_of_content_not_of_path_or_time(tiny_bert: Path, copied: Path) -> None:
    before = model_fingerprint(tiny_bert)
    os.utime(copied / "model.safetensors", (1, 1))
    (copied / "README.md").write_text("nothing that decides a vector")
    assert model_fingerprint(copied) == before
    assert len(before) == 64


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_fingerprint_sees_every_byte(copied: Path, name: str) -> None:
    before = model_fingerprint(copied)
    content = bytearray((copied / name).read_bytes())
    content[-2] ^= 1
    (copied / name).write_bytes(content)
    assert model_fingerprint(copied) != before


def test_code_beside_the_weights_counts_where_it_runs(copied: Path) -> None:
    before = model_fingerprint(copied, code=True)
    (copied / "modeling.py").write_text("x = 1")
    assert model_fingerprint(copied, code=True) != before
    assert model_fingerprint(copied) == before


def test_fingerprint_without_a_config(copied: Path) -> None:
    (copied / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        model_fingerprint(copied)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=40), min_size=1), st.data())
def test_digest_of_files_tells_contents_and_names_apart(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes], data: st.DataObject
) -> None:
    def digest(of: dict[str, bytes]) -> str:
        folder = tmp_path_factory.mktemp("files")
        for name, content in of.items():
            (folder / name).write_bytes(content)
        return files_digest(folder, reversed(list(folder.iterdir())))

    other = data.draw(st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=40), min_size=1))
    assert (digest(contents) == digest(other)) == (contents == other)


# ---------------------------------------------------------------------------------------------------------- describe


def test_describe_a_decoder(tiny_qwen3: Path) -> None:
    info = describe(ModelConfig(model=str(tiny_qwen3), device="cpu"))
    assert (info.hidden_size, info.num_layers, info.vocab_size, info.max_positions) == (32, 2, 512, 1024)
    assert (info.architecture, info.dtype, info.device, info.devices) == ("Qwen3ForCausalLM", "float32", "cpu", 1)
    assert (info.pooling, info.layer, info.backbone, info.quantisation, info.notes) == ("mean", 2, "inner", None, ())


def test_recipe_is_of_content_and_choices(tiny_qwen3: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(tiny_qwen3, tmp_path / "moved"))
    recipe = describe(ModelConfig(model=str(tiny_qwen3))).recipe()
    assert json.loads(json.dumps(recipe)) == recipe
    assert describe(ModelConfig(model=str(moved), layer=2, pooling="mean", dtype="float32")).recipe() == recipe
    choices: list[dict[str, Any]] = [
        {"layer": 1},
        {"pooling": "last"},
        {"dtype": "bfloat16"},
        {"load_in_4bit": True},
        {"backbone": "outer"},
    ]
    others = [describe(ModelConfig(model=str(moved), **choice)).recipe() for choice in choices]
    assert all(other != recipe for other in others)
    assert len({json.dumps(other) for other in others}) == len(choices)


@pytest.mark.parametrize(("layer", "expected"), [(0, 0), (1, 1), (2, 2), (-1, 2), (-3, 0)])
def test_layers_count_from_both_ends(tiny_qwen3: Path, layer: int, expected: int) -> None:
    assert describe(ModelConfig(model=str(tiny_qwen3), layer=layer)).layer == expected


@pytest.mark.parametrize("layer", [3, -4])
def test_layer_out_of_range(tiny_qwen3: Path, layer: int) -> None:
    with pytest.raises(InputError, match=rf"layer is {layer}, .* has 2 layers; expected 0 .* to 2"):
        describe(ModelConfig(model=str(tiny_qwen3), layer=layer))


def test_dtype_auto_is_the_checkpoints(tiny_qwen3: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert describe(ModelConfig(model=str(tmp_path))).dtype == "bfloat16"
    change_config(tmp_path, dtype=None)
    assert "dtype" not in (tmp_path / "config.json").read_text()
    assert describe(ModelConfig(model=str(tmp_path))).dtype == "bfloat16"  # from the headers of the weights
    assert describe(ModelConfig(model=str(tmp_path), dtype="float32")).dtype == "float32"


def test_float16_is_not_computed_in_on_a_cpu(tiny_qwen3: Path) -> None:
    info = describe(ModelConfig(model=str(tiny_qwen3), dtype="float16", device="cpu"))
    assert info.dtype == "float32"
    assert "computing in float32" in info.notes[0]
    assert describe(ModelConfig(model=str(tiny_qwen3), dtype="bfloat16", device="cpu")).dtype == "bfloat16"


def test_roberta_embeds_positions_behind_its_pad_token(tmp_path: Path) -> None:
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=20,
    )
    RobertaModel(config).save_pretrained(tmp_path)
    assert describe(ModelConfig(model=str(tmp_path))).max_positions == 18


def test_a_model_without_a_limit_of_positions(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    T5EncoderModel(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).save_pretrained(tmp_path)
    assert describe(ModelConfig(model=str(tmp_path))).max_positions is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_devices_without_a_gpu(tiny_qwen3: Path) -> None:
    assert describe(ModelConfig(model=str(tiny_qwen3))).device == "cpu"
    for device in ("cuda", "cuda:1"):
        with pytest.raises(InputError, match=f"'{device}', but torch .* finds no CUDA GPU"):
            describe(ModelConfig(model=str(tiny_qwen3), device=device))
    [note] = describe(ModelConfig(model=str(tiny_qwen3), gpu_memory_gb=10)).notes
    assert note == "gpu_memory_gb = 10 has no effect: the model runs on the CPU"


def test_a_quantised_checkpoint_is_not_quantised_again(copied: Path) -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    change_config(copied, quantization_config=stored)
    quantisation = describe(ModelConfig(model=str(copied))).quantisation
    assert quantisation is not None
    assert stored.items() <= quantisation.items()
    with pytest.raises(InputError, match=r"already quantised \(bitsandbytes\)"):
        describe(ModelConfig(model=str(copied), load_in_4bit=True))


def test_what_is_not_a_text_model(tmp_path: Path, copied: Path) -> None:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    ViTModel(config).save_pretrained(tmp_path / "vit")
    with pytest.raises(InputError, match="vocab_size = None; expected an integer: is this a text model"):
        describe(ModelConfig(model=str(tmp_path / "vit")))
    change_config(copied, model_type="of_tomorrow")
    with pytest.raises(InputError, match="not a model that transformers can build"):
        describe(ModelConfig(model=str(copied)))
    (copied / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json"):
        describe(ModelConfig(model=str(copied)))


def test_code_of_the_model_is_not_run_unasked(copied: Path) -> None:
    (copied / "configuration_own.py").write_text("raise SystemExit('this ran')")
    change_config(copied, model_type="own_kind", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    with pytest.raises(InputError, match="--trust-remote-code"):
        describe(ModelConfig(model=str(copied)))


# ---------------------------------------------------------------------------------------------------------- pooling "auto"


def sentence_transformers_files(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    kinds = ["Transformer", "Pooling", *more]
    paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(kinds) if at)]
    steps = zip(kinds, paths, strict=True)
    modules = [
        {"idx": at, "path": path, "type": f"sentence_transformers.models.{kind}"} for at, (kind, path) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max+mean"),
        ({"pooling_mode": "weightedmean"}, "weighted_mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_auto_pooling_is_what_sentence_transformers_would_do(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    sentence_transformers_files(tmp_path, pooling, "Normalize")
    found = read_sentence_folder(tmp_path)
    assert found is not None
    assert found.pooling == expected


def test_auto_pooling_without_their_files_is_the_mean(tmp_path: Path) -> None:
    assert read_sentence_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("pooling", "more", "expected"),
    [
        ({"pooling_mode": "median"}, (), "pooling 'median'; expected one of cls, max, mean"),
        ({"pooling_mode": "mean"}, ("CNN", "Normalize"), "lists CNN, which arrowbank does not apply"),
        ({"pooling_mode": "mean"}, ("Dense", "Normalize"), "a Dense without in_features"),
    ],
)
def test_auto_pooling_refuses_what_it_would_not_do(
    copied: Path, pooling: dict[str, Any], more: tuple[str, ...], expected: str
) -> None:
    sentence_transformers_files(copied, pooling, *more)
    with pytest.raises(InputError, match=expected):
        describe(ModelConfig(model=str(copied)))
    assert describe(ModelConfig(model=str(copied), pooling="last")).pooling == "last"
