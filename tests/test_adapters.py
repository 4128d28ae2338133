"""Adapters of peft in a model folder: applied as peft itself applies them, part of the fingerprint, or refused."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from arrowbank import FeatureBank, open_bank
from arrowbank.errors import InputError
from arrowbank.features.encode import encode
from arrowbank.features.encode_config import EncodeConfig
from arrowbank.features.tokenize import TokenizeConfig, tokenize
from arrowbank.models import ModelConfig, describe, load_encoder, require_loadable
from arrowbank.models.vllm_engine import EngineConfig
from arrowbank.models.vllm_runner import find_engine
from tests import tiny

peft = pytest.importorskip("peft")

IDS = np.random.default_rng(0).integers(0, 400, (6, 9), dtype=np.int32)
TARGETS = {"bert": ["query", "value"], "qwen3": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def folders(tiny_bert: Path, tiny_qwen3: Path) -> dict[str, Path]:
    return {"bert": tiny_bert, "qwen3": tiny_qwen3}


def adapted(base: Path, out: Path, targets: list[str], *, seed: int = 0, head: bool = False, **options: Any) -> Path:
    """An adapter of random weights for the model in `base`, saved alone by peft."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
        config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=targets, init_lora_weights=False, **options)
        peft.get_peft_model(kind.from_pretrained(base), config).save_pretrained(out)
    return out


def beside(base: Path, adapter: Path, out: Path) -> Path:
    """A folder of the model and the adapter."""
    shutil.copytree(base, out)
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, out)
    return out


def directly(base: Path, adapter: Path | None, *, head: bool = False) -> torch.Tensor:
    """The mean of the last hidden states by peft and transformers alone."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model: Any = (transformers.AutoModelForCausalLM if head else transformers.AutoModel).from_pretrained(base)
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, adapter).get_base_model()
        inner = model.model if head else model
        return inner.eval()(input_ids=torch.from_numpy(IDS.astype(np.int64))).last_hidden_state.mean(1)  # type: ignore[no-any-return]


def cosine(vectors: Any, expected: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(torch.as_tensor(vectors), expected, dim=1).min())


@pytest.mark.parametrize("name", ["bert", "qwen3"])
@pytest.mark.parametrize("place", ["alone", "beside"])
def test_three_adapters_have_three_fingerprints_and_pefts_own_vectors(
    tmp_path: Path, folders: dict[str, Path], name: str, place: str
) -> None:
    base = folders[name]
    fingerprints = {describe(ModelConfig(model=str(base))).fingerprint}
    for seed in range(3):
        alone = adapted(base, tmp_path / f"alone-{seed}", TARGETS[name], seed=seed)
        folder = alone if place == "alone" else beside(base, alone, tmp_path / f"beside-{seed}")
        config = ModelConfig(model=str(folder), device="cpu", dtype="float32")
        info = describe(config)
        require_loadable(config, info)
        assert info.recipe()["adapter"] == "LORA"
        fingerprints.add(info.fingerprint)
        vectors = load_encoder(config, info=info).encode(IDS)
        assert cosine(vectors, directly(base, alone)) >= 0.99999
        assert cosine(vectors, directly(base, None)) < 0.999
    assert len(fingerprints) == 4


def test_an_adapter_has_one_fingerprint_wherever_its_base_is(tmp_path: Path, tiny_bert: Path) -> None:
    alone = adapted(tiny_bert, tmp_path / "alone", ["query"])
    both = beside(tiny_bert, alone, tmp_path / "both")
    assert len({describe(ModelConfig(model=str(folder))).fingerprint for folder in (alone, both)}) == 1


@pytest.mark.parametrize("backbone", ["inner", "outer"])
@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["k_proj", "lm_head"]])
def test_an_adapter_of_the_model_with_its_head(tmp_path: Path, tiny_qwen3: Path, backbone: Any, targets: list[str]) -> None:
    alone = adapted(tiny_qwen3, tmp_path / "alone", targets, head=True, task_type="CAUSAL_LM")
    config = ModelConfig(model=str(alone), device="cpu", dtype="float32", backbone=backbone)
    assert cosine(load_encoder(config).encode(IDS), directly(tiny_qwen3, alone, head=True)) >= 0.99999


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["norm"]}, {"bias": "lora_only"}]
)
def test_other_forms_of_adapters(tmp_path: Path, tiny_qwen3: Path, options: dict[str, Any]) -> None:
    alone = adapted(tiny_qwen3, tmp_path / "alone", TARGETS["qwen3"], **options)
    config = ModelConfig(model=str(alone), device="cpu", dtype="float32")
    assert cosine(load_encoder(config).encode(IDS), directly(tiny_qwen3, alone)) >= 0.99999


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return apply


def another_base(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (changed(lambda tensors: tensors.popitem()), "1 tensors are not in the file"),
    "a tensor is too many": (
        changed(lambda tensors: tensors.update({"base_model.model.encoder.layer.9.x.lora_A.weight": torch.ones(2)})),
        "1 tensors have no place in the model",
    ),
    "pickled": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "pickled weights are not read",
    ),
    "no base": (another_base, "base_model_name_or_path is None"),
    "cut off": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0"),
        "adapter_model.safetensors|cannot be loaded",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_adapter_that_cannot_be_applied_whole_is_refused(tmp_path: Path, tiny_bert: Path, name: str) -> None:
    change, said = WRONG[name]
    alone = adapted(tiny_bert, tmp_path / "alone", ["query"])
    change(alone)
    config = ModelConfig(model=str(alone), device="cpu")
    for load in (load_encoder, lambda config: require_loadable(config, describe(config))):
        with pytest.raises(InputError, match=said):
            load(config)


def test_another_models_adapter_is_refused(tmp_path: Path, tiny_bert: Path, tiny_qwen3: Path) -> None:
    both = beside(tiny_bert, adapted(tiny_qwen3, tmp_path / "alone", ["q_proj"]), tmp_path / "both")
    with pytest.raises(InputError, match="cannot be loaded as BertModel"):
        load_encoder(ModelConfig(model=str(both), device="cpu"))


def test_without_peft_a_folder_with_an_adapter_is_refused(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = adapted(tiny_bert, tmp_path / "alone", ["query"])
    monkeypatch.setitem(sys.modules, "peft", None)  # what Python takes for a package that is not there
    with pytest.raises(InputError, match=r"pip install 'arrowbank\[peft\]'"):
        describe(ModelConfig(model=str(alone)))


def test_a_serving_engine_which_would_leave_the_adapter_out_is_not_used(tmp_path: Path, tiny_qwen3: Path) -> None:
    config = ModelConfig(model=str(adapted(tiny_qwen3, tmp_path / "alone", ["q_proj"])), device="cpu")
    with pytest.raises(InputError, match="holds an adapter, which the engine would leave out"):
        find_engine(EngineConfig(), config, describe(config), (), "post")


def test_an_adapter_of_prompts_is_refused(tmp_path: Path, tiny_bert: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=4)
        model = transformers.AutoModel.from_pretrained(tiny_bert)
        peft.get_peft_model(model, config).save_pretrained(tmp_path / "alone")
    with pytest.raises(InputError, match="PROMPT_TUNING, which adds tokens"):
        load_encoder(ModelConfig(model=str(tmp_path / "alone"), device="cpu"))


def test_a_bank_of_an_adapter(tmp_path: Path, tiny_bert: Path) -> None:
    texts = tiny.save_texts_bank(tmp_path / "texts", tiny.texts(20))
    alone = adapted(tiny_bert, tmp_path / "alone", ["query"])
    tokenize(TokenizeConfig(tokenizer=str(alone)), texts, tmp_path / "tokens")
    digests = set()
    for seed in range(2):
        alone = adapted(tiny_bert, tmp_path / f"alone-{seed}", ["query"], seed=seed)
        made = encode(
            EncodeConfig(model=ModelConfig(model=str(alone), device="cpu")), tmp_path / "tokens", tmp_path / f"out-{seed}"
        )
        assert made["encoding"]["adapter"] == "LORA"
        digests.add(made["plan_digest"])
    assert len(digests) == 2


def test_an_adapter_in_a_folder_of_sentence_transformers(tmp_path: Path, tiny_bert: Path) -> None:
    peer = pytest.importorskip("sentence_transformers")
    texts, fingerprints = tiny.texts(20), set()
    for seed in range(3):
        folder, alone = tmp_path / f"model-{seed}", adapted(tiny_bert, tmp_path / f"alone-{seed}", ["query"], seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = peer.SentenceTransformer(str(tiny_bert), device="cpu")
            plain.save(str(folder))
            for name in ("model.safetensors", "config.json"):  # as it saves a model that has an adapter
                (folder / name).unlink()
            for file in alone.glob("adapter_*"):
                shutil.copy(file, folder)
            expected, without = peer.SentenceTransformer(str(folder), device="cpu").encode(texts), plain.encode(texts)
        bank = tiny.save_texts_bank(tmp_path / f"texts-{seed}", texts)
        tokenize(TokenizeConfig(tokenizer=str(tmp_path / f"model-{seed}")), bank, tmp_path / f"tokens-{seed}")
        config = ModelConfig(model=str(tmp_path / f"model-{seed}"), device="cpu", dtype="float32")
        encode(EncodeConfig(model=config), tmp_path / f"tokens-{seed}", tmp_path / f"out-{seed}")
        vectors = np.array(open_bank(tmp_path / f"out-{seed}", kind=FeatureBank).matrix, np.float32)
        assert cosine(vectors, torch.from_numpy(expected)) >= 0.99999
        assert cosine(vectors, torch.from_numpy(without)) < 0.999
        fingerprints.add(describe(config).fingerprint)
    assert len(fingerprints) == 3
