"""Checkpoints with another draft in them: by every codec, in the checkpoint's own names, and never over the source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from arrowbank.errors import InputError
from arrowbank.mtp.checkpoint import CODECS, NF4_TABLE, Checkpoint, decode, encode, is_router, stored_bytes
from arrowbank.mtp.draft import Draft
from arrowbank.mtp.draft_files import init_from_last_block, load_draft, save_draft
from tests import drafts, kill
from tests.drafts import FAMILIES, LAYERS, Made

RECORD = {"steps": 25, "data": {"set": "a b ü"}, "lr": 2e-5}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as the safetensors library reads them."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def moved(made: Made, dtype: torch.dtype | None = None) -> Draft:
    """The checkpoint's draft with other weights."""
    draft = load_draft(made.trunk(), made.folder, dtype=dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for tensor in draft.tensors().values():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return draft


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return drafts.make(request.param, tmp_path_factory.mktemp("draft"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return drafts.make("llama, canonical", tmp_path_factory.mktemp("llama"))


def test_an_unchanged_draft_is_written_back_byte_for_byte(made: Made, tmp_path: Path) -> None:
    draft = load_draft(made.trunk(), made.folder)
    saved = save_draft(draft, made.folder, tmp_path / "copy", provenance=RECORD)
    before, after = tensors(made.folder), tensors(tmp_path / "copy")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert saved.draft_bytes == sum(made_one.nbytes for made_one in made.stored.values())


def test_only_the_drafts_tensors_change_in_their_own_names_and_dtypes(made: Made, tmp_path: Path) -> None:
    draft = moved(made)
    save_draft(draft, made.folder, tmp_path / "copy", provenance=RECORD)
    before, after = tensors(made.folder), tensors(tmp_path / "copy")
    assert {name: tensor.dtype for name, tensor in before.items()} == {name: tensor.dtype for name, tensor in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(made.stored)
    again = load_draft(made.trunk(), tmp_path / "copy")
    for name, tensor in draft.tensors().items():
        assert torch.equal(again.tensors()[name].float(), tensor.to(torch.bfloat16).float()), name


@pytest.mark.slow
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "keep"])
def test_every_codec_is_read_back_as_it_is_stored(made: Made, tmp_path: Path, codec: str) -> None:
    draft = moved(made)
    saved = save_draft(draft, made.folder, tmp_path / "copy", codec=codec, provenance=RECORD)
    checkpoint = Checkpoint(tmp_path / "copy")
    again = load_draft(made.trunk(), tmp_path / "copy", dtype=torch.float32)
    own, bits = draft.tensors(), {"bf16": 8, "fp16": 11, "int8": 7, "nf4": 2.4}[codec]
    for name, tensor in again.tensors().items():
        error = (tensor - own[name]).abs().max() / own[name].abs().max()
        assert error <= 2.0 ** -(8 if is_router(name) else bits), name  # routers keep their bfloat16
    found = checkpoint.layout()
    assert checkpoint.codec(found.stored("eh_proj.weight")) == (codec if codec in ("int8", "nf4") else "keep")
    assert checkpoint.codec(found.stored("norm.weight")) == "keep"
    parts = [part for name in found.own_tensors(checkpoint.names) for part in checkpoint.parts(name)]
    assert saved.draft_bytes == sum(checkpoint.raw(part).nbytes for part in parts)
    untouched = set(tensors(made.folder)) - set(made.stored)
    before, after = tensors(made.folder), tensors(tmp_path / "copy")
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    routers = [name for name in made.stored if is_router(name)]
    assert {name.rpartition(".mlp.")[2] for name in routers} <= {
        "gate.weight",
        "gate.e_score_correction_bias",
        "shared_expert_gate.weight",
    }
    assert all(after[name].dtype == torch.bfloat16 for name in routers)


@given(
    st.sampled_from(["w.weight", "mlp.gate.weight", "norm.weight"]),
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.sampled_from(CODECS),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60)
def test_what_a_tensor_takes_is_known_before(name: str, shape: list[int], codec: str, dtype: torch.dtype) -> None:
    stored = encode(name, torch.full(shape, 0.5, dtype=dtype), codec, dtype)
    assert sum(tensor.nbytes for tensor in stored.values()) == stored_bytes(name, shape, codec, dtype.itemsize)


@pytest.mark.parametrize("codec", ["int8", "nf4"])
def test_an_encoded_draft_is_kept_encoded_and_can_be_decoded_again(llama: Made, tmp_path: Path, codec: str) -> None:
    save_draft(moved(llama), llama.folder, tmp_path / "small", codec=codec, provenance=RECORD)
    draft = load_draft(llama.trunk(), tmp_path / "small")
    save_draft(draft, tmp_path / "small", tmp_path / "same", provenance=RECORD)
    small, same = tensors(tmp_path / "small"), tensors(tmp_path / "same")
    assert all(torch.equal(small[name], same[name]) for name in small)
    save_draft(draft, tmp_path / "small", tmp_path / "wide", codec="bf16", provenance=RECORD)
    wide = tensors(tmp_path / "wide")
    assert not any(name.endswith((".scale", ".absmax", ".shape")) for name in wide)
    assert torch.equal(wide["model.mtp.eh_proj.weight"], draft.tensors()["eh_proj.weight"].to(torch.bfloat16))
    with torch.no_grad():
        draft.eh_proj.weight.mul_(2)
    save_draft(draft, tmp_path / "small", tmp_path / "moved", provenance=RECORD)
    assert Checkpoint(tmp_path / "moved").codec("model.mtp.eh_proj.weight") == codec


def test_a_sharded_checkpoint_keeps_its_shards_and_links_those_without_a_draft(tmp_path: Path) -> None:
    made = drafts.make("qwen3-next", tmp_path / "source", shards=True)
    saved = save_draft(moved(made), made.folder, tmp_path / "copy", codec="int8", provenance=RECORD)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(saved.sha256) == names[1:]
    assert (made.folder / names[0]).samefile(tmp_path / "copy" / names[0])
    assert not (made.folder / "config.json").samefile(tmp_path / "copy" / "config.json")
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    stored = {name: file.name for file in (tmp_path / "copy").glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(tmp_path / "copy").values())
    load_draft(drafts.load_trunk(tmp_path / "copy"), tmp_path / "copy")


@pytest.mark.parametrize("shards", [False, True])
def test_a_new_draft_gets_canonical_names(tmp_path: Path, shards: bool) -> None:
    made = drafts.make("glm-4.5", tmp_path / "source", draft=False, shards=shards)
    draft = init_from_last_block(made.trunk())
    saved = save_draft(draft, made.folder, tmp_path / "copy", provenance=RECORD)
    assert saved.family == "canonical"
    assert list(saved.sha256) == ["model-mtp.safetensors" if shards else "model.safetensors"]
    again = load_draft(drafts.load_trunk(tmp_path / "copy"), tmp_path / "copy")
    assert again.origin.family == "canonical"
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in draft.tensors().items())
    assert "model.mtp.layers.0.mlp.experts.3.up_proj.weight" in tensors(tmp_path / "copy")


def test_a_draft_from_another_checkpoint_takes_the_targets_names(tmp_path: Path, llama: Made) -> None:
    target = drafts.make("llama, canonical", tmp_path / "target", draft=False)
    draft = load_draft(target.trunk(), llama.folder)
    save_draft(draft, target.folder, tmp_path / "copy", provenance=RECORD)
    assert all(torch.equal(tensors(tmp_path / "copy")[name], tensor) for name, tensor in llama.stored.items())


def test_the_record_stands_in_the_metadata_beside_what_was_there(llama: Made, tmp_path: Path) -> None:
    save_draft(moved(llama), llama.folder, tmp_path / "copy", provenance=RECORD)
    own = {"family": "canonical", "codec": "keep", "hidden": "post", "recycle": "post", "init": "checkpoint"}
    assert Checkpoint(tmp_path / "copy").record() == RECORD | {"draft": own}
    assert Checkpoint(llama.folder).record() is None
    with safe_open(tmp_path / "copy" / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    assert (tmp_path / "copy" / "config.json").read_bytes() == (llama.folder / "config.json").read_bytes()


def test_the_source_is_not_written_to_and_nothing_is_overwritten(llama: Made, tmp_path: Path) -> None:
    draft, before = moved(llama), (llama.folder / "model.safetensors").read_bytes()
    for target in (llama.folder, llama.folder / "inside", llama.folder.parent):
        with pytest.raises(InputError, match="found its source"):
            save_draft(draft, llama.folder, target, provenance=RECORD)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(InputError, match="is there already and not empty"):
        save_draft(draft, llama.folder, tmp_path / "full", provenance=RECORD)
    with pytest.raises(InputError, match="codec is 'int4'; expected one of keep, bf16, fp16, int8, nf4"):
        save_draft(draft, llama.folder, tmp_path / "new", codec="int4", provenance=RECORD)
    assert (llama.folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


@pytest.mark.slow
def test_a_copy_that_is_killed_is_whole_or_not_there(
    llama: Made,
    tmp_path: Path,
    kill_at: Callable[..., kill.Outcome],
    tree_bytes: Callable[[Path | str], dict[str, str]],
) -> None:
    drafts.save_from(str(llama.folder), str(tmp_path / "whole"))
    expected = tree_bytes(tmp_path / "whole")
    died = 0
    for moment in range(1, 60):
        target = tmp_path / "out" / "copy"
        target.parent.mkdir(exist_ok=True)
        outcome = kill_at(moment, drafts.save_from, str(llama.folder), str(target))
        if not outcome.killed:
            assert not outcome.error, outcome.error
            break
        died += 1
        if target.exists():
            assert tree_bytes(target) == expected
            shutil.rmtree(target)
    assert died >= 6
    assert [path.name for path in target.parent.iterdir()] == ["copy"]  # and nothing of those that died
    assert tree_bytes(target) == expected


def test_strange_tensors_where_a_new_draft_would_go_are_refused(tmp_path: Path) -> None:
    made = drafts.make("llama, canonical", tmp_path / "source", draft=False)
    draft = init_from_last_block(made.trunk())
    drafts.write(made.folder, tensors(made.folder) | {"model.mtp.layers.3.enorm.weight": torch.ones(2)})
    with pytest.raises(InputError, match=r"has model\.mtp\.layers\.3\.enorm\.weight, which is no draft"):
        save_draft(draft, made.folder, tmp_path / "copy", provenance=RECORD)


def test_a_broken_draft_is_not_written(llama: Made, tmp_path: Path) -> None:
    draft = moved(llama)
    with torch.no_grad():
        draft.norm.weight[3] = float("nan")
    with pytest.raises(InputError, match=r"model\.mtp\.norm\.weight has values that are Inf or NaN"):
        save_draft(draft, llama.folder, tmp_path / "copy", provenance=RECORD)
    with torch.no_grad():
        draft.norm.weight[3] = 1e6
    with pytest.raises(InputError, match="too large for float16"):
        save_draft(draft, llama.folder, tmp_path / "copy", codec="fp16", provenance=RECORD)
    assert not list(tmp_path.iterdir())


shapes = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 150)), st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
)


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(0, 1000), st.sampled_from([1e-20, 1.0, 1e4]))
def test_int8_is_within_half_a_step_of_its_row_and_stays_there(shape: tuple[int, ...], seed: int, scale: float) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    values[0] = 0
    stored = encode("x.weight", values, "int8", torch.float32)
    assert stored["x.weight"].dtype == torch.int8
    assert stored["x.weight.scale"].shape == shape[:-1]
    again = decode("x.weight", stored, "int8")
    step = values.abs().amax(-1, keepdim=True) / 127
    assert bool(((again - values).abs() <= step * 0.5001).all())
    assert torch.equal(encode("x.weight", again, "int8", torch.float32)["x.weight"], stored["x.weight"])


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(0, 1000), st.sampled_from([1e-20, 1.0, 1e4]))
def test_nf4_takes_the_nearest_of_its_sixteen_values(shape: tuple[int, ...], seed: int, scale: float) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    stored = encode("x.weight", values, "nf4", torch.float32)
    assert stored["x.weight"].numel() == -(-values.numel() // 2)
    again = decode("x.weight", stored, "nf4").flatten()
    assert decode("x.weight", stored, "nf4").shape == shape
    flat = values.flatten()
    for start in range(0, flat.numel(), 64):
        block = flat[start : start + 64]
        levels = torch.tensor(NF4_TABLE) * block.abs().max()
        nearest = (block[:, None] - levels).abs().amin(1)
        torch.testing.assert_close((again[start : start + 64] - block).abs(), nearest, rtol=1e-3, atol=1e-6 * scale)


def test_nf4_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values = torch.randn(8, 128, generator=torch.Generator().manual_seed(2))
    packed, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=False)
    stored = encode("x.weight", values, "nf4", torch.float32)
    assert torch.equal(packed.flatten(), stored["x.weight"])
    torch.testing.assert_close(state.absmax, stored["x.weight.absmax"])


def test_parts_that_do_not_belong_together_are_refused() -> None:
    stored = encode("x.weight", torch.ones(4, 8), "int8", torch.float32)
    with pytest.raises(InputError, match=r"x\.weight\.scale has shape \(3,\); expected \(4,\)"):
        decode("x.weight", stored | {"x.weight.scale": torch.ones(3)}, "int8")
    stored = encode("x.weight", torch.ones(4, 64), "nf4", torch.float32)
    with pytest.raises(InputError, match=r"x\.weight\.absmax has shape \(3,\); expected \(4,\)"):
        decode("x.weight", stored | {"x.weight.absmax": torch.ones(3)}, "nf4")


def test_packed_experts_are_read_and_written_packed(tmp_path: Path) -> None:
    made = drafts.make("qwen3-next", tmp_path / "source")
    block, all_tensors = "mtp.layers.0.mlp.experts", tensors(made.folder)
    expected = load_draft(made.trunk(), made.folder).weights()

    def stack(part: str) -> torch.Tensor:
        return torch.stack([all_tensors[f"{block}.{expert}.{part}_proj.weight"] for expert in range(4)])

    packed = {f"{block}.gate_up_proj": torch.cat([stack("gate"), stack("up")], 1), f"{block}.down_proj": stack("down")}
    drafts.write(made.folder, packed | {name: tensor for name, tensor in all_tensors.items() if not name.startswith(block)})
    draft = load_draft(made.trunk(), made.folder)
    assert all(torch.equal(draft.tensors()[name], tensor) for name, tensor in expected.items())
    with torch.no_grad():
        draft.tensors()["block.mlp.experts.down_proj"].add_(1)
    save_draft(draft, made.folder, tmp_path / "copy", provenance=RECORD)
    before, after = tensors(made.folder), tensors(tmp_path / "copy")
    assert [name for name in before if not torch.equal(before[name], after[name])] == [f"{block}.down_proj"]


def test_several_drafts_are_told_apart_by_number(tmp_path: Path) -> None:
    made = drafts.make("mimo", tmp_path / "source")
    second = {name.replace("mtp_layers.0", "mtp_layers.1"): tensor + 1 for name, tensor in made.stored.items()}
    drafts.write(made.folder, tensors(made.folder) | second)
    first, other = (load_draft(made.trunk(), made.folder, number=number) for number in (0, 1))
    assert torch.equal(first.enorm.weight + 1, other.enorm.weight)
    with torch.no_grad():
        other.enorm.weight.add_(1)
    save_draft(other, made.folder, tmp_path / "copy", provenance=RECORD, number=1)
    before, after = tensors(made.folder), tensors(tmp_path / "copy")
    assert [n for n in before if not torch.equal(before[n], after[n])] == ["model.mtp_layers.1.token_layernorm.weight"]


def test_drafts_beyond_the_first_layer_do_not_disturb_it(tmp_path: Path) -> None:
    made = drafts.make("glm-4.5", tmp_path / "source")
    old, new = f"model.layers.{LAYERS}.", f"model.layers.{LAYERS + 1}."
    drafts.write(
        made.folder, tensors(made.folder) | {name.replace(old, new): tensor + 1 for name, tensor in made.stored.items()}
    )
    first, other = (load_draft(made.trunk(), made.folder, number=number) for number in (0, 1))
    assert torch.equal(first.hnorm.weight + 1, other.hnorm.weight)
