"""Model families, tiny and random: every layer is, to the bit, the one that transformers counts, and the backbones agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from arrowbank.errors import InputError
from arrowbank.models import ModelConfig, describe, load_encoder
from arrowbank.models.load import load_hidden_states
from arrowbank.models.taps import load_taps_reader

IDS = np.random.default_rng(0).integers(2, 256, (5, 11), dtype=np.int32)
CPU = torch.device("cpu")

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
SLIDING = GROUPED | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LINEAR = GROUPED | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
CLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
T5 = {"vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
BART = {
    "vocab_size": 256,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
BART_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}

FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SMALL)),
    "albert": lambda: tf.AlbertForMaskedLM(tf.AlbertConfig(**SMALL, embedding_size=16)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=256, n_embd=32, n_layer=3, n_head=4, n_positions=64)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "qwen3, tied": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, tie_word_embeddings=True)),
    "qwen3.5 text": lambda: tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**LINEAR)),
    "qwen3.5 vision": lambda: tf.Qwen3_5ForConditionalGeneration(
        tf.Qwen3_5Config(text_config=LINEAR, vision_config=QWEN_VISION)
    ),
    "qwen3-next": lambda: tf.Qwen3NextForCausalLM(
        tf.Qwen3NextConfig(**LINEAR, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16)
    ),
    "qwen2.5-vl": lambda: tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(
            text_config=SMALL | MROPE | {"num_key_value_heads": 2}, vision_config=QWEN_VISION | {"fullatt_block_indexes": [0]}
        )
    ),
    "gemma3 text": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SLIDING)),
    "gemma3 vision": lambda: tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(text_config=SLIDING, vision_config=CLIP, mm_tokens_per_image=1)
    ),
    "llava": lambda: tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(text_config=tf.LlamaConfig(**GROUPED), vision_config=tf.CLIPVisionConfig(**CLIP))
    ),
    "glm-4-moe": lambda: tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(**GROUPED, **ROUTED, n_group=1)),
    "deepseek-v3": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**SMALL, **ROUTED, **LATENT, num_key_value_heads=4)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5, num_decoder_layers=2)),
    "t5 encoder": lambda: tf.T5EncoderModel(tf.T5Config(**T5)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART, **BART_HEADS)),
}
ENCODER_DECODERS = {"t5", "bart"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(name, folder) of a family's model, with weights large enough that its layers differ."""
    folder = tmp_path_factory.mktemp("family")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = FAMILIES[request.param]()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    return request.param, folder


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def transformers_states(name: str, folder: Path) -> list[torch.Tensor]:
    """All hidden states of the whole model with its head, as its own class gives them."""
    architecture = describe(ModelConfig(model=str(folder))).architecture
    model = getattr(tf, architecture).from_pretrained(folder).eval()
    part = model.get_encoder() if name in ENCODER_DECODERS else model
    with one_thread():
        return list(part(input_ids=torch.from_numpy(IDS).long(), output_hidden_states=True).hidden_states)


@pytest.mark.slow
def test_every_layer_to_the_bit_and_the_backbones_agree(family: tuple[str, Path]) -> None:
    name, folder = family
    states = transformers_states(name, folder)
    assert len(states) == 4
    for layer, expected in enumerate(states):
        config = ModelConfig(model=str(folder), layer=layer)
        reader = load_hidden_states(config, describe(config), CPU)
        with one_thread():
            found = reader(torch.from_numpy(IDS).long())
        assert torch.equal(found, expected), (layer, (found - expected).abs().max())
    inner = load_encoder(ModelConfig(model=str(folder))).encode(IDS)
    assert inner.shape == (5, 32)
    assert inner.dtype == np.float32
    np.testing.assert_allclose(inner, states[-1].mean(dim=1).numpy(), rtol=0, atol=1e-6)
    if name in ENCODER_DECODERS:
        with pytest.raises(InputError, match="use --backbone inner"):
            describe(ModelConfig(model=str(folder), backbone="outer"))
        return
    outer = load_encoder(ModelConfig(model=str(folder), backbone="outer")).encode(IDS)
    cosine = (inner * outer).sum(1) / np.linalg.norm(inner, axis=1) / np.linalg.norm(outer, axis=1)
    assert cosine.min() >= 0.99999


@pytest.mark.slow
def test_only_what_reads_text_is_kept(family: tuple[str, Path]) -> None:
    """No head, no vision tower, no decoder of an encoder-decoder; and of the blocks, none above the wanted layer's."""
    _, folder = family
    config = ModelConfig(model=str(folder))
    reader = load_hidden_states(config, describe(config), CPU)
    names = [name for name, _ in reader.named_parameters()]
    assert not [name for name in names if "lm_head" in name or "vis" in name or "pooler" in name or "decoder" in name]
    assert not any(parameter.requires_grad for parameter in reader.parameters())
    assert not reader.training
    below = ModelConfig(model=str(folder), layer=1)
    lower = load_hidden_states(below, describe(below), CPU)
    if not lower.selects:
        assert sum(weight.numel() for weight in lower.parameters()) < sum(weight.numel() for weight in reader.parameters())


@pytest.mark.slow
def test_every_block_is_tapped_to_the_bit(family: tuple[str, Path]) -> None:
    name, folder = family
    config = ModelConfig(model=str(folder))
    if name == "albert":  # one block, run three times
        with pytest.raises(InputError, match="this model cannot be tapped: it has no list of 3 blocks"):
            load_taps_reader(config, describe(config), CPU, (0,), "post")
        return
    states = transformers_states(name, folder)
    post, pre = (load_taps_reader(config, describe(config), CPU, (-1, 0, 1, 2), norm) for norm in ("post", "pre"))
    with one_thread():
        found, before = post(torch.from_numpy(IDS).long()), pre(torch.from_numpy(IDS).long())
    for layer in (-1, 0, 1):
        assert torch.equal(found[:, :, layer + 1], states[layer + 1]), layer
    assert torch.equal(found[:, :, 4], states[-1])
    assert torch.equal(found[:, :, 3], before[:, :, 3])
    assert torch.equal(before[:, :, 4], before[:, :, 3])
    unnormed = name in ("bert", "bart")  # their blocks end in a norm of their own
    assert torch.equal(before[:, :, 4], states[-1]) == unnormed


@pytest.mark.parametrize("family", ["albert"], indirect=True)
def test_shared_blocks_are_run_whole(family: tuple[str, Path]) -> None:
    config = ModelConfig(model=str(family[1]), layer=1)
    assert load_hidden_states(config, describe(config), CPU).selects


def test_a_model_that_counts_its_layers_otherwise(tmp_path: Path) -> None:
    """Mamba's list of hidden states begins with the first block's output: stopping before a block would be one off."""
    model = tf.MambaForCausalLM(tf.MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=3)).eval()
    model.save_pretrained(tmp_path)
    with one_thread():
        states = model(torch.from_numpy(IDS).long(), output_hidden_states=True, use_cache=False).hidden_states
    for layer in range(3):
        config = ModelConfig(model=str(tmp_path), layer=layer)
        reader = load_hidden_states(config, describe(config), CPU)
        assert reader.selects
        with one_thread():
            torch.testing.assert_close(reader(torch.from_numpy(IDS).long()), states[layer])
