"""Drafts out of checkpoints of every family: what they compute, what trains of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from arrowbank.errors import InputError
from arrowbank.mtp.draft import Draft, chain, round_steps, rounds, step_tokens
from arrowbank.mtp.draft_files import init_from_last_block, load_draft
from tests import drafts
from tests.drafts import FAMILIES, LAYERS, H, Made, V

IDS = torch.randint(0, V, (2, 11), generator=torch.Generator().manual_seed(3))
HIDDEN = torch.randn(2, 11, H, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return drafts.make(request.param, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return drafts.make("llama, canonical", tmp_path_factory.mktemp("llama"))


def run(draft: Draft, ids: torch.Tensor = IDS, hidden: torch.Tensor = HIDDEN) -> Any:
    with torch.no_grad():
        return draft(ids, hidden)


def test_a_draft_computes_what_a_model_of_its_one_layer_does(made: Made) -> None:
    trunk = made.trunk()
    draft = load_draft(trunk, made.folder)
    output = run(draft)
    torch.testing.assert_close(output.post, made.expected(trunk, IDS, HIDDEN), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.post, made.rms(output.pre, "norm"), rtol=1e-4, atol=1e-5)
    assert draft.origin.record() == {"init": "checkpoint", "family": made.family.family}
    assert draft.origin.notes == ()


def test_a_row_sees_nothing_of_later_rows(made: Made) -> None:
    draft = load_draft(made.trunk(), made.folder)
    other_ids, other_hidden = IDS.clone(), HIDDEN.clone()
    other_ids[:, 6:], other_hidden[:, 6:] = 1, 0.5
    before, after = run(draft).post, run(draft, other_ids, other_hidden).post
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-2)


def rotate(x: torch.Tensor, width: int, theta: float = 10000.0) -> torch.Tensor:
    """Rotary embeddings on the first `width` dimensions of [N, heads, T, D], halves rotated against each other."""
    angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    cos, sin = angles.cos(), angles.sin()
    one, two, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [N, heads, T, D] over fewer heads of keys and values; [N, T, heads · D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    late = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
    mixed = scores.masked_fill(late, float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2)


def heads(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def test_a_qwen35_draft_is_the_plain_formula(tmp_path: Path) -> None:
    made = drafts.make("qwen3.5", tmp_path)
    trunk = made.trunk()
    draft, w, eps = load_draft(trunk, tmp_path), load_file(tmp_path / "model.safetensors"), trunk.config.rms_norm_eps
    block = "mtp.layers.0."
    embedded = w["model.embed_tokens.weight"][IDS]
    first = rms(embedded, 1 + w["mtp.pre_fc_norm_embedding.weight"], eps)
    second = rms(HIDDEN, 1 + w["mtp.pre_fc_norm_hidden.weight"], eps)
    x = torch.cat([first, second], -1) @ w["mtp.fc.weight"].T
    inner = rms(x, 1 + w[block + "input_layernorm.weight"], eps)
    q, gate = (inner @ w[block + "self_attn.q_proj.weight"].T).unflatten(-1, (-1, 16)).chunk(2, -1)
    q = rms(q, 1 + w[block + "self_attn.q_norm.weight"], eps).transpose(1, 2)
    k = rms(heads(inner @ w[block + "self_attn.k_proj.weight"].T, 8), 1 + w[block + "self_attn.k_norm.weight"], eps)
    v = heads(inner @ w[block + "self_attn.v_proj.weight"].T, 8)
    theta = trunk.config.rope_parameters["rope_theta"]
    mixed = attend(rotate(q, 2, theta), rotate(k, 2, theta), v) * gate.flatten(2).sigmoid()
    x = x + mixed @ w[block + "self_attn.o_proj.weight"].T
    inner = rms(x, 1 + w[block + "post_attention_layernorm.weight"], eps)
    wide = functional.silu(inner @ w[block + "mlp.gate_proj.weight"].T) * (inner @ w[block + "mlp.up_proj.weight"].T)
    x = x + wide @ w[block + "mlp.down_proj.weight"].T
    output = run(draft)
    torch.testing.assert_close(output.pre, x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.post, rms(x, 1 + w["mtp.norm.weight"], eps), rtol=1e-4, atol=1e-5)


def experts(x: torch.Tensor, w: dict[str, torch.Tensor], block: str, config: Any) -> torch.Tensor:
    """GLM's expert layer, row by row: sigmoid scores, chosen with their correction, weighted without it."""

    def mlp(row: torch.Tensor, at: str) -> torch.Tensor:
        gate, up, down = (w[f"{block}mlp.{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (functional.silu(row @ gate.T) * (row @ up.T)) @ down.T

    rows = []
    for row in x.flatten(0, 1):
        scores = (row @ w[block + "mlp.gate.weight"].T).sigmoid()
        chosen = (scores + w[block + "mlp.gate.e_score_correction_bias"]).topk(config.num_experts_per_tok).indices.tolist()
        share = scores[chosen] / scores[chosen].sum() * config.routed_scaling_factor
        routed = [share[i] * mlp(row, f"experts.{expert}") for i, expert in enumerate(chosen)]
        rows.append(torch.stack(routed).sum(0) + mlp(row, "shared_experts"))
    return torch.stack(rows).view_as(x)


def test_a_glm_draft_is_the_plain_formula(tmp_path: Path) -> None:
    made = drafts.make("glm-4.5", tmp_path)
    trunk = made.trunk()
    draft, w, eps = load_draft(trunk, tmp_path), load_file(tmp_path / "model.safetensors"), trunk.config.rms_norm_eps
    block = f"model.layers.{LAYERS}."
    embedded = w["model.embed_tokens.weight"][IDS]
    x = torch.cat([rms(embedded, w[block + "enorm.weight"], eps), rms(HIDDEN, w[block + "hnorm.weight"], eps)], -1)
    x = x @ w[block + "eh_proj.weight"].T
    inner = rms(x, w[block + "input_layernorm.weight"], eps)
    attention = block + "self_attn."
    q, k, v = (heads(inner @ w[f"{attention}{n}_proj.weight"].T + w[f"{attention}{n}_proj.bias"], 8) for n in "qkv")
    q, k = (rms(each, w[f"{attention}{name}_norm.weight"], eps) for each, name in ((q, "q"), (k, "k")))
    x = x + attend(rotate(q, 4), rotate(k, 4), v) @ w[attention + "o_proj.weight"].T
    x = x + experts(rms(x, w[block + "post_attention_layernorm.weight"], eps), w, block, trunk.config)
    output = run(draft)
    torch.testing.assert_close(output.pre, x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.post, rms(x, w[block + "shared_head.norm.weight"], eps), rtol=1e-4, atol=1e-5)


def test_sharded_checkpoints_are_read_as_single_ones(tmp_path: Path) -> None:
    made = drafts.make("qwen3-next", tmp_path, shards=True)
    draft = load_draft(made.trunk(), tmp_path)
    torch.testing.assert_close(run(draft).post, made.expected(made.trunk(), IDS, HIDDEN), rtol=1e-4, atol=1e-5)


def test_conventions_are_the_familys_until_they_are_set(tmp_path: Path) -> None:
    sides = {}
    for name in ("qwen3.5", "glm-4.5", "mimo", "llama, canonical"):
        made = drafts.make(name, tmp_path / name)
        draft = load_draft(made.trunk(), made.folder)
        sides[name] = (draft.hidden, draft.recycle)
    assert sides == {
        "qwen3.5": ("post", "post"),
        "glm-4.5": ("post", "pre"),
        "mimo": ("pre", "post"),
        "llama, canonical": ("post", "post"),
    }
    assert draft.feed(hidden="pre").hidden == "pre"
    with pytest.raises(InputError, match="recycle is 'both'; expected post or pre"):
        draft.feed(recycle="both")  # type: ignore[arg-type]


@pytest.mark.parametrize("projection", [False, True])
def test_only_block_and_norms_train_and_the_projection_when_asked(llama: Made, projection: bool) -> None:
    trunk = llama.trunk()
    draft = load_draft(trunk, llama.folder)
    parameters = draft.train_only(projection=projection)
    draft(IDS, HIDDEN).post.square().sum().backward()
    moved = {name for name, parameter in draft.named_parameters() if parameter.grad is not None}
    assert {name for name, parameter in draft.named_parameters() if any(parameter is each for each in parameters)} == moved
    assert ("eh_proj.weight" in moved) == projection
    assert {"enorm.weight", "hnorm.weight", "norm.weight"} <= moved
    assert len(moved) == len(list(draft.parameters())) - (not projection)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in trunk.parameters())
    assert not any("embed" in name or "head" in name for name in draft.state_dict())


def test_a_snapshot_goes_back(llama: Made) -> None:
    draft = load_draft(llama.trunk(), llama.folder)
    before, expected = draft.weights(), run(draft).post
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1)
    assert not torch.equal(run(draft).post, expected)
    draft.set_weights(before)
    assert torch.equal(run(draft).post, expected)
    with pytest.raises(InputError, match=r"differ in enorm\.weight"):
        draft.set_weights({name: value for name, value in before.items() if name != "enorm.weight"})


def test_a_draft_in_bfloat16_over_a_bfloat16_trunk_and_a_wide_one_agree(tmp_path: Path) -> None:
    made = drafts.make("glm-4.5", tmp_path, dtype=torch.bfloat16)
    trunk = made.trunk(torch.bfloat16)
    narrow, wide = load_draft(trunk, tmp_path), load_draft(trunk, tmp_path, dtype=torch.float32)
    assert narrow.dtype == run(narrow).post.dtype == torch.bfloat16
    assert wide.dtype == run(wide).post.dtype == torch.float32
    kept = narrow.tensors()["block.mlp.gate.e_score_correction_bias"]
    assert kept.dtype == torch.float32  # as transformers keeps it
    error = (run(narrow).post.float() - run(wide).post).abs().mean() / run(wide).post.abs().mean()
    assert error < 0.1


def test_a_trunk_without_a_draft_says_init(tmp_path: Path) -> None:
    made = drafts.make("llama, canonical", tmp_path, draft=False)
    with pytest.raises(InputError, match=r"no tensors of an MTP draft.*--init"):
        load_draft(made.trunk(), tmp_path)


@pytest.mark.parametrize("name", ["llama, canonical", "qwen3.5", "glm-4.5"])
def test_a_draft_from_the_last_block_has_its_weights(tmp_path: Path, name: str) -> None:
    made = drafts.make(name, tmp_path, draft=False)
    trunk = made.trunk()
    draft = init_from_last_block(trunk)
    assert draft.origin.record() == {"init": "last block", "family": "canonical"}
    block = trunk.model.layers[-1].state_dict()
    own = draft.tensors()
    assert {f"block.{name}" for name in block} == {name for name in own if name.startswith("block.")}
    assert all(torch.equal(own[f"block.{name}"], value) for name, value in block.items())
    assert own["block.self_attn.o_proj.weight"].data_ptr() != trunk.model.layers[-1].self_attn.o_proj.weight.data_ptr()
    norm = trunk.model.norm
    with torch.no_grad():
        x = (norm(trunk.get_input_embeddings()(IDS)) + norm(HIDDEN)) / 2
        expected = norm(draft.body(inputs_embeds=x, use_cache=False).last_hidden_state)
    torch.testing.assert_close(run(draft).post, expected, rtol=1e-5, atol=1e-5)


def rewrite(made: Made, folder: Path, change: Any) -> Path:
    """A copy of the checkpoint whose tensors are changed."""
    folder.mkdir()
    (folder / "config.json").write_bytes((made.folder / "config.json").read_bytes())
    drafts.write(folder, change(load_file(made.folder / "model.safetensors")))
    return folder


def test_a_layout_that_is_not_known_is_refused_by_its_names(llama: Made, tmp_path: Path) -> None:
    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("model.mtp.", "model.mtp.layers.3."): tensor for name, tensor in tensors.items()}

    folder = rewrite(llama, tmp_path / "renamed", renamed)
    with pytest.raises(InputError, match=r"layout that is not known: model\.mtp\.layers\.3\.eh_proj\.weight.*--init"):
        load_draft(llama.trunk(), folder)


def test_a_wrong_shape_is_refused_by_tensor_found_and_expected(llama: Made, tmp_path: Path) -> None:
    folder = rewrite(llama, tmp_path / "narrow", lambda w: w | {"model.mtp.eh_proj.weight": torch.zeros(H, H)})
    with pytest.raises(InputError, match=r"model\.mtp\.eh_proj\.weight has shape \(32, 32\); expected \(32, 64\)"):
        load_draft(llama.trunk(), folder)


def test_missing_and_surplus_tensors_are_named(llama: Made, tmp_path: Path) -> None:
    gone = "model.mtp.layers.0.mlp.up_proj.weight"
    folder = rewrite(llama, tmp_path / "less", lambda w: {name: tensor for name, tensor in w.items() if name != gone})
    with pytest.raises(InputError, match=rf"lacks {gone}"):
        load_draft(llama.trunk(), folder)
    folder = rewrite(llama, tmp_path / "more", lambda w: w | {"model.mtp.layers.1.x": torch.zeros(1)})
    with pytest.raises(InputError, match=r"has model\.mtp\.layers\.1\.x too many"):
        load_draft(llama.trunk(), folder)


def test_tensors_quantised_by_another_tool_are_refused(llama: Made, tmp_path: Path) -> None:
    name = "model.mtp.layers.0.mlp.up_proj.weight"
    folder = rewrite(llama, tmp_path / "fp8", lambda w: w | {name: w[name].to(torch.float8_e4m3fn)})
    with pytest.raises(InputError, match=rf"{name} is stored as F8_E4M3; expected F32, F16 or BF16"):
        load_draft(llama.trunk(), folder)


def test_the_draft_of_another_kind_of_trunk_is_refused(llama: Made, tmp_path: Path) -> None:
    other = drafts.make("glm-4.5", tmp_path)
    with pytest.raises(InputError, match=r"layout deepseek-v3 .* too many"):
        load_draft(llama.trunk(), other.folder)


def test_a_shared_head_that_is_not_the_trunks_is_noted(tmp_path: Path) -> None:
    made = drafts.make("glm-4.5", tmp_path / "one")
    name = f"model.layers.{LAYERS}.shared_head.head.weight"
    folder = rewrite(made, tmp_path / "two", lambda w: w | {name: w[name] + 1})
    assert load_draft(made.trunk(), folder).origin.notes == (
        f"{name} differs from lm_head.weight; the draft uses the trunk's, and its own stays as it is",
    )


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    import transformers as tf

    config = tf.Gemma2Config(**drafts.SMALL, num_hidden_layers=2, final_logit_softcapping=0.1)
    model = drafts._shaken(tf.Gemma2ForCausalLM(config).requires_grad_(False))
    with pytest.raises(InputError, match="logits after the head"):
        init_from_last_block(model)


def test_a_model_that_scales_its_inputs_is_refused(tmp_path: Path) -> None:
    import transformers as tf

    config = tf.GraniteConfig(**{k: v for k, v in drafts.SMALL.items() if k != "head_dim"}, num_hidden_layers=2)
    config.embedding_multiplier = 3.0
    with pytest.raises(InputError, match="more to its inputs"):
        init_from_last_block(tf.GraniteForCausalLM(config))


def test_a_chain_goes_on_from_the_drafts_own_state(llama: Made) -> None:
    draft = load_draft(llama.trunk(), llama.folder).feed(recycle="pre")
    with torch.no_grad():
        outputs = list(chain(draft, IDS, HIDDEN, steps=3, fill=7))
        hidden = HIDDEN
        for step, output in enumerate(outputs, start=1):
            tokens = torch.full_like(IDS, 7)
            tokens[:, : 11 - step] = IDS[:, step:]
            expected = draft(tokens, hidden)
            assert torch.equal(output.post, expected.post)
            hidden = expected.pre
    assert len(outputs) == 3


def test_tokens_past_the_end_are_the_fill() -> None:
    assert step_tokens(torch.tensor([[1, 2, 3]]), 2, 9).tolist() == [[3, 9, 9]]
    assert step_tokens(torch.tensor([[1, 2, 3]]), 5, 9).tolist() == [[9, 9, 9]]


def test_rounds_give_rows_the_draft_of_the_row_before(llama: Made) -> None:
    draft = load_draft(llama.trunk(), llama.folder)
    assert round_steps(11, steps=3, stride=4, offset=2).tolist() == [0, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    with torch.no_grad():
        fed, output = rounds(draft, IDS, HIDDEN, steps=3, stride=4, offset=2, fill=0)
        kept = [0, 1, 2, 5, 6, 9, 10]
        assert torch.equal(fed[:, kept], HIDDEN[:, kept])
        torch.testing.assert_close(output.post, draft(step_tokens(IDS, 1, 0), fed).post)
        ids, hidden = IDS[:, :7], HIDDEN[:, :6].clone()  # one round alone, row after row as a server runs it
        for row in (3, 4):
            hidden[:, row] = draft(ids[:, 1:], hidden).post[:, row - 1]
        torch.testing.assert_close(fed[:, :6], hidden)
        second = draft(
            step_tokens(IDS, 1, 0), torch.cat([HIDDEN[:, :3], fed[:, 3:4], HIDDEN[:, 4:7], fed[:, 7:8], HIDDEN[:, 8:]], 1)
        )
        torch.testing.assert_close(fed[:, 8], second.post[:, 7])
    with pytest.raises(InputError, match="stride is 2, shorter than the chain of 3"):
        round_steps(11, steps=3, stride=2, offset=0)
