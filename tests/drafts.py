"""Tiny random checkpoints with an MTP draft in each family's own names, written here tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

H, V, LAYERS = 32, 96, 2
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = EXPERTS | {"n_routed_experts": 4, "topk_group": 1, "n_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "head_dim": 4}
MIXED = ["linear_attention", "full_attention"]
NEXT = SMALL | LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}

QWEN = {
    "eh_proj": "mtp.fc.weight",
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "norm": "mtp.norm.weight",
    "block": "mtp.layers.0.",
}
DEEPSEEK = {
    "eh_proj": f"model.layers.{LAYERS}.eh_proj.weight",
    "enorm": f"model.layers.{LAYERS}.enorm.weight",
    "hnorm": f"model.layers.{LAYERS}.hnorm.weight",
    "norm": f"model.layers.{LAYERS}.shared_head.norm.weight",
    "block": f"model.layers.{LAYERS}.",
}
CANONICAL = {
    **{role: f"model.mtp.{role}.weight" for role in ("eh_proj", "enorm", "hnorm", "norm")},
    "block": "model.mtp.layers.0.",
}
MIMO = {
    "eh_proj": "model.mtp_layers.0.input_proj.weight",
    "enorm": "model.mtp_layers.0.token_layernorm.weight",
    "hnorm": "model.mtp_layers.0.hidden_layernorm.weight",
    "norm": "model.mtp_layers.0.final_layernorm.weight",
    "block": "model.mtp_layers.0.",
}


@dataclass(frozen=True)
class Family:
    """A trunk of so many layers (and a model of one layer of the draft's kind), and the names of the draft's tensors."""

    trunk: Callable[[], Any]
    donor: Callable[[], Any]
    names: dict[str, str]
    offset: float = 0.0  # a norm multiplies by offset + w
    hidden_first: bool = False
    family: str = ""


def _qwen35(kinds: list[str]) -> Any:
    return tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**SMALL, **LINEAR, num_hidden_layers=len(kinds), layer_types=kinds))


def _next(kinds: list[str]) -> Any:
    return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**NEXT, num_hidden_layers=len(kinds), layer_types=kinds))


def _glm(layers: int, dense: int) -> Any:
    options = SMALL | ROUTED | {"use_qk_norm": True, "attention_bias": True}
    return tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(**options, num_hidden_layers=layers, first_k_dense_replace=dense))


def _deepseek(layers: int, dense: int) -> Any:
    options = SMALL | ROUTED | LATENT
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**options, num_hidden_layers=layers, first_k_dense_replace=dense))


def _plain(kind: str, layers: int) -> Any:
    config, model = getattr(tf, f"{kind}Config"), getattr(tf, f"{kind}ForCausalLM")
    options = SMALL if kind != "Qwen2" else {key: value for key, value in SMALL.items() if key != "head_dim"}
    return model(config(**options, num_hidden_layers=layers))


FAMILIES = {
    "qwen3.5": Family(lambda: _qwen35(MIXED), lambda: _qwen35(["full_attention"]), QWEN, 1.0, family="qwen3-next"),
    "qwen3-next": Family(lambda: _next(MIXED), lambda: _next(["full_attention"]), QWEN, 1.0, family="qwen3-next"),
    "deepseek-v3": Family(lambda: _deepseek(LAYERS, 1), lambda: _deepseek(1, 0), DEEPSEEK, family="deepseek-v3"),
    "glm-4.5": Family(lambda: _glm(LAYERS, 1), lambda: _glm(1, 0), DEEPSEEK, family="deepseek-v3"),
    "llama, canonical": Family(lambda: _plain("Llama", LAYERS), lambda: _plain("Llama", 1), CANONICAL, family="canonical"),
    "qwen3, canonical": Family(lambda: _plain("Qwen3", LAYERS), lambda: _plain("Qwen3", 1), CANONICAL, family="canonical"),
    "mimo": Family(lambda: _plain("Qwen2", LAYERS), lambda: _plain("Qwen2", 1), MIMO, hidden_first=True, family="mimo"),
}


@dataclass(frozen=True)
class Made:
    """A checkpoint on disk, and what was put into it."""

    folder: Path
    family: Family
    stored: dict[str, torch.Tensor]  # the draft's tensors, under the checkpoint's names
    eh_proj: torch.Tensor  # [H, 2H], the embedding's half first
    norms: dict[str, torch.Tensor]
    donor: Any  # a model of one layer: the draft's block, and the draft's last norm as its final one

    def trunk(self, dtype: torch.dtype = torch.float32) -> Any:
        """The model as transformers loads it, without its draft."""
        return load_trunk(self.folder, dtype)

    def expected(self, trunk: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[N, T, H] after the draft's norm, by a whole one-layer model of transformers' own and plain formulas around it."""
        embedded = torch.nn.functional.embedding(ids, trunk.get_input_embeddings().weight)
        x = torch.cat([self.rms(embedded, "enorm"), self.rms(hidden, "hnorm")], -1) @ self.eh_proj.T
        with torch.no_grad():
            return self.donor.model(inputs_embeds=x, use_cache=False).last_hidden_state

    def rms(self, x: torch.Tensor, role: str) -> torch.Tensor:
        eps = self.donor.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (self.family.offset + self.norms[role])


def load_trunk(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from arrowbank.models.device import quiet

    with quiet():  # transformers says that it leaves the draft's tensors out
        return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def make(name: str, folder: Path, *, shards: bool = False, draft: bool = True, dtype: torch.dtype = torch.float32) -> Made:
    """A checkpoint of the family `name` in `folder`; with `shards` in three files, the draft's tensors in two of them."""
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        trunk, donor = _shaken(family.trunk()), _shaken(family.donor())
        halves = torch.randn(H, 2 * H) / 6
        norms = {role: torch.randn(H) * 0.3 + (1 - family.offset) for role in ("enorm", "hnorm", "norm")}
        donor.model.norm.weight.copy_(norms["norm"])
    halves, norms = halves.to(dtype).float(), {role: norm.to(dtype).float() for role, norm in norms.items()}
    trunk.to(dtype).save_pretrained(folder)
    donor.to(dtype).save_pretrained(folder / "donor")
    tensors, block = load_file(folder / "model.safetensors"), load_file(folder / "donor" / "model.safetensors")
    for path in (folder / "donor").iterdir():
        path.unlink()
    (folder / "donor").rmdir()
    stored_proj = halves.roll(H, dims=1) if family.hidden_first else halves
    stored = {family.names["eh_proj"]: stored_proj.to(dtype).contiguous()}
    stored |= {family.names[role]: norm.to(dtype) for role, norm in norms.items()}
    base = "model.layers.0."
    stored |= {family.names["block"] + key.removeprefix(base): value for key, value in block.items() if key.startswith(base)}
    shared = {}
    if family.names is DEEPSEEK:
        shared[f"model.layers.{LAYERS}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        shared[f"model.layers.{LAYERS}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    write(folder, tensors | (stored | shared if draft else {}), shards=shards, draft=set(stored))
    return Made(folder, family, stored, halves, norms, donor.float().eval())


def write(folder: Path, tensors: dict[str, torch.Tensor], *, shards: bool = False, draft: set[str] | None = None) -> None:
    """Write the weights of a model folder anew, in one file or in three."""
    if not shards:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{_shard(name, draft or set())}-of-00003.safetensors" for name in tensors}
    for file in sorted(set(names.values())):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file, {"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shard(name: str, draft: set[str]) -> int:
    if name not in draft:
        return 1 if "embed" in name else 2
    return 3 if "norm" in name else 2


def _shaken(model: Any) -> Any:
    """Weights large enough that layers and experts differ; vectors near what they were."""
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.25)
        else:
            weight.add_(torch.randn_like(weight) * 0.1)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model


def save_from(source: str, target: str) -> None:
    """A target for tests/kill.py: the draft of `source`, doubled, as a copy of its checkpoint."""
    from arrowbank.mtp.draft_files import load_draft, save_draft

    draft = load_draft(load_trunk(Path(source)), Path(source))
    with torch.no_grad():
        draft.eh_proj.weight.mul_(2)
    save_draft(draft, Path(source), Path(target), provenance={})
