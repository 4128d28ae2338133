"""The stage `trunk build`: rows are a plain forward pass's own, to the bit; its resumes, its key, its sizes and its refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import arrowbank
from arrowbank import RunOptions, TrunkConfig, TrunkData, build_trunk, open_bank, verify
from arrowbank.bank.kinds.trunk_bank import TrunkBank
from arrowbank.cli import main
from arrowbank.engine.plan import BatchRules
from arrowbank.errors import ArrowbankError, BadVector, ContractError, DiskFull, InputError, PlanMismatch
from arrowbank.models import ModelConfig, describe
from arrowbank.models.load import cpu_has_bfloat16
from arrowbank.models.passes import CpuPasses, DevicePasses
from arrowbank.mtp.trunk_build import estimate_trunk
from arrowbank.mtp.trunk_passes import HEAD_ROWS, TrunkPasses, load_trunk
from tests import tiny
from tests.kill import kill_at, tree_bytes
from tests.test_capture import save
from tests.test_models_families import FAMILIES
from tests.trunk_banks import TOPK, WINDOW, direct, make, packed_by_hand, write_ids

TRUNKS: dict[str, Callable[[], Any]] = {
    name: FAMILIES[name] for name in ("qwen3, tied", "llama", "qwen3-next", "glm-4-moe", "gemma3 text")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of three blocks, H = 32, with a tokenizer."""
    return tiny.save_qwen3(tmp_path_factory.mktemp("trunk") / "model", layers=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrunkData, TrunkData]:
    """Two sets: one of more tokens than are taken, one that gives a short last window."""
    folder = tmp_path_factory.mktemp("data")
    write_ids(folder / "a.jsonl", 60)
    write_ids(folder / "b.jsonl", 40)
    return TrunkData("a", folder / "a.jsonl"), TrunkData("b", folder / "b.jsonl", 5 * WINDOW + 20)


@pytest.fixture(scope="module")
def config(model: Path, data: tuple[TrunkData, TrunkData]) -> TrunkConfig:
    """17 windows in three shards or so, two of them short, two layers tapped."""
    return make(model, *data, tokens=10 * WINDOW + 30, layers=(0, 2), max_shard_bytes=40_000)


@pytest.fixture(scope="module")
def whole(config: TrunkConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank made in one go."""
    folder = tmp_path_factory.mktemp("whole") / "bank"
    build_trunk(config, folder)
    return folder


def both_banks(folder: Path) -> dict[str, dict[str, str]]:
    return {name: tree_bytes(folder.with_name(folder.name + name)) for name in ("", "-taps")}


# what is kept


BFLOAT16 = pytest.param("bfloat16", marks=pytest.mark.skipif(not cpu_has_bfloat16(), reason="products are widened here"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
@pytest.mark.parametrize("hidden", ["post", "pre"])
@pytest.mark.parametrize("family", TRUNKS)
def test_rows_are_those_of_a_plain_forward_pass_to_the_bit(family: str, hidden: str, dtype: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = TRUNKS[family]()
        for weight in made.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
    made.save_pretrained(tmp_path / "model")
    rows = write_ids(tmp_path / "a.jsonl", 40)
    config = make(tmp_path / "model", TrunkData("a", tmp_path / "a.jsonl"), last_hidden_norm=hidden, dtype=dtype)
    manifest = build_trunk(config, tmp_path / "bank")
    windows = packed_by_hand(rows, 560)
    bank = open_bank(tmp_path / "bank")
    assert len(bank) == len(windows) == 12
    assert [len(one) for one in windows[-2:]] == [WINDOW, 560 % WINDOW]
    for row, (ids, expected) in enumerate(zip(windows, direct(tmp_path / "model", windows, dtype=dtype), strict=True)):
        found = bank.read(row)
        assert found.input_ids[: found.length].tolist() == ids
        for name in ("topk_ids", "topk_probs", "tail_mass"):
            assert np.array_equal(getattr(found, name), expected[name]), (row, name)
        assert np.array_equal(found.hidden, expected[hidden])
    assert not np.array_equal(expected["post"], expected["pre"])
    assert (manifest["hidden_norm"], manifest["hidden_dtype"], manifest["dtype"]) == (hidden, "bfloat16", dtype)


def test_a_cap_on_logits_and_their_scale_are_the_models_own(tmp_path: Path) -> None:
    """Gemma 2 squeezes its logits after the head, and Cohere scales them."""
    small: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    models = {
        "gemma2": tf.Gemma2ForCausalLM(tf.Gemma2Config(**small, final_logit_softcapping=0.5)),
        "cohere": tf.CohereForCausalLM(tf.CohereConfig(**small, logit_scale=3.0, eos_token_id=5)),
    }
    rows = write_ids(tmp_path / "a.jsonl", 40)
    for name, made in models.items():
        made.save_pretrained(tmp_path / name)
        build_trunk(make(tmp_path / name, TrunkData("a", tmp_path / "a.jsonl")), tmp_path / f"{name}-bank")
        windows = packed_by_hand(rows, 560)
        bank = open_bank(tmp_path / f"{name}-bank")
        for row, expected in enumerate(direct(tmp_path / name, windows)):
            assert np.array_equal(bank.read(row).topk_probs, expected["topk_probs"])
    assert (bank.read(11).input_ids[560 % WINDOW :] == 5).all()  # padded with the end of a text
    assert bank.manifest["pad_id"] == 5


@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
def test_a_head_that_runs_in_parts_gives_the_bits_of_one_that_does_not(model: Path, dtype: Any) -> None:
    length = 2 * HEAD_ROWS[torch.float32] + 3  # a last part of three rows would have other bits
    ids = np.random.default_rng(0).integers(0, 500, (1, length), dtype=np.int32)
    trunk = load_trunk(ModelConfig(model=str(model), device="cpu", backbone="outer", dtype=dtype), 8, "post")
    [found] = trunk.stream([ids])
    [expected] = direct(model, ids.tolist(), topk=8, dtype=dtype)
    assert np.array_equal(found.topk_ids[0].numpy(), expected["topk_ids"])
    assert np.array_equal(found.topk_probs[0].numpy(), expected["topk_probs"])


def test_windows_of_all_sets_are_there_in_their_order(
    config: TrunkConfig, whole: Path, data: tuple[TrunkData, TrunkData]
) -> None:
    bank = open_bank(whole)
    assert len(bank.shard_names) > 2
    expected = []
    for one, tokens in zip(data, (10 * WINDOW + 30, 5 * WINDOW + 20), strict=True):
        rows = [json.loads(line)["input_ids"] for line in Path(one.path).read_text().splitlines()]
        expected += [(one.name, number, ids) for number, ids in enumerate(packed_by_hand(rows, tokens))]
    read = [bank.read(row) for row in range(len(bank))]
    assert [(one.set, one.window, one.input_ids[: one.length].tolist()) for one in read] == expected
    assert [one.length for one in read if one.length < WINDOW] == [30, 20]
    assert [one.held_out for one in read] == [row % 10 == 9 for row in range(17)] == bank.held_out.tolist()
    for one in read:
        assert one.input_ids.shape == (WINDOW,)
        assert (one.input_ids[one.length :] == bank.manifest["pad_id"]).all()
        assert one.topk_ids.shape == one.topk_probs.shape == (one.length, TOPK)
        assert one.hidden.shape == (one.length, 32)
        assert one.tail_mass.shape == (one.length,)
        assert not one.hidden.flags.owndata  # it lies over the mapped file
        tensor = one.hidden_tensor()
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, one.hidden.shape)
    assert all(check.ok for check in verify(whole)), verify(whole)
    assert isinstance(open_bank(whole), TrunkBank)
    plain = bank.dataset[10]  # the short window of the first set, without anything of ours
    assert np.array_equal(np.array(plain["topk_ids"], np.int32), read[10].topk_ids)
    assert np.array_equal(np.array(plain["hidden"], np.uint16), read[10].hidden)
    assert (plain["set"], plain["window"], plain["held_out"], plain["length"]) == ("a", 10, False, 30)


def test_the_manifest_says_what_was_computed_of_what(whole: Path, model: Path) -> None:
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["counts"] == {"windows": 17, "held_out": 1, "tokens": 15 * WINDOW + 50, "bad_lines": 0}
    assert (manifest["window"], manifest["topk"], manifest["chain"], manifest["hidden_size"]) == (WINDOW, TOPK, 3, 32)
    assert (manifest["model_path"], manifest["vocab_size"]) == (str(model), 512)
    assert manifest["model_fingerprint"] == manifest["recipe"]["model"]["model_sha256"]
    assert manifest["sets"]["b"]["first"] == manifest["sets"]["a"]["windows"] == 11
    assert str(model.parent) not in json.dumps(manifest["recipe"])


def test_taps_are_the_held_out_windows_layers(config: TrunkConfig, whole: Path, model: Path) -> None:
    taps = open_bank(whole.with_name("bank-taps"))
    bank = open_bank(whole)
    assert (taps.kind, len(taps), taps.manifest["layers"]) == ("taps", 1, [0, 2])
    window = bank.read(9)
    row = taps.dataset[0]
    assert row["row"] == 9
    assert row["input_ids"] == window.input_ids.tolist()
    assert row["next_ids"] == window.topk_ids[:, 0].tolist()
    [expected] = direct(model, [window.input_ids.tolist()])
    assert np.array_equal(np.array(row["layer_0"], np.float16), expected["layers"][1])
    pre = build_trunk(dataclasses.replace(config, last_hidden_norm="pre", layers=()), whole.with_name("pre"))
    assert pre["hidden_norm"] == "pre"
    last = torch.from_numpy(np.array(row["layer_2"], np.float16)).to(torch.bfloat16)
    torch.testing.assert_close(last, open_bank(whole.with_name("pre")).read(9).hidden_tensor(), rtol=2**-7, atol=1e-3)
    assert all(check.ok for check in verify(whole.with_name("bank-taps")))
    with pytest.raises(
        PlanMismatch, match=r"layers: found \[0, 2\], wanted \[1\]\n[\s\S]*remove .*bank-taps to have these taps"
    ):
        build_trunk(dataclasses.replace(config, layers=(1,)), whole)


def test_hold_all_holds_every_window_out(config: TrunkConfig, tmp_path: Path) -> None:
    chosen = dataclasses.replace(config, hold_all=True, sources=config.sources[1:], tokens=None, layers=(1,))
    manifest = build_trunk(chosen, tmp_path / "bank")
    assert manifest["counts"]["held_out"] == 6  # fewer than ten will do
    bank = open_bank(tmp_path / "bank")
    assert bank.held_out_rows.tolist() == list(range(6))
    assert len(open_bank(tmp_path / "bank-taps")) == 6
    with pytest.raises(InputError, match="6 windows, 0 of them to train on"):
        bank.training_rows(1)


def test_training_needs_ten_windows_a_window_of_the_batch(whole: Path) -> None:
    bank = open_bank(whole)
    assert bank.training_rows(1).tolist() == [row for row in range(17) if row != 9]
    with pytest.raises(
        InputError, match="17 windows, 16 of them to train on; training with 2 windows a batch needs at least 20"
    ):
        bank.training_rows(2)


# the passes


def test_a_stream_of_several_tensors_is_the_same_on_both_paths_and_for_any_threads(model: Path) -> None:
    shapes = [(3, 7), (1, 300), (40, 60), (2, 24)]
    batches = [np.random.default_rng(n * t).integers(0, 500, (n, t), dtype=np.int32) for n, t in shapes]
    config, before = ModelConfig(model=str(model), device="cpu", backbone="outer"), torch.get_num_threads()
    seen = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            trunk = load_trunk(config, 4, "pre")
            streamed = list(trunk.stream(batches))
            assert [tuple(one.hidden.shape) for one in streamed] == [(*shape, 32) for shape in shapes]
            assert [tuple(one.topk_ids.shape) for one in streamed] == [(*shape, 4) for shape in shapes]
            seen.add(b"".join(one.topk_probs.numpy().tobytes() + one.tail_mass.numpy().tobytes() for one in streamed))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1
    reader, info = trunk.passes.module, describe(config)
    ahead = TrunkPasses(DevicePasses(reader, info, torch.device("cpu"))).stream(batches)
    for found, expected in zip(ahead, TrunkPasses(CpuPasses(reader, info)).stream(batches), strict=True):
        torch.testing.assert_close(found.topk_probs, expected.topk_probs)
        torch.testing.assert_close(found.hidden.float(), expected.hidden.float(), rtol=2**-6, atol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu(model: Path) -> None:
    ids = [np.random.default_rng(0).integers(0, 500, (2, 300), dtype=np.int32)]
    [on_gpu], [on_cpu] = (
        list(load_trunk(ModelConfig(model=str(model), device=device, backbone="outer"), 4, "post").stream(ids))
        for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(on_gpu.topk_probs, on_cpu.topk_probs, rtol=1e-3, atol=1e-4)


# models that are no trunk


MASKED: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (FAMILIES["bert"], "BertForMaskedLM.*no causal language model with its head"),
    "t5": (FAMILIES["t5"], "it has an encoder and a decoder"),
    "headless": (lambda: tf.Qwen3Model(FAMILIES["qwen3, tied"]().config), "no causal language model with its head"),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_model_that_is_no_causal_one_is_refused(name: str, data: tuple[TrunkData, TrunkData], tmp_path: Path) -> None:
    make_model, expected = MASKED[name]
    save(make_model(), tmp_path / "model")
    with pytest.raises(InputError, match=expected):
        build_trunk(make(tmp_path / "model", *data), tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


@pytest.mark.parametrize(
    ("name", "expected"), [("bert", "depend on the tokens behind it"), ("headless", "no LM head over a decoder of its own")]
)
def test_what_only_running_it_tells_is_found_out_when_it_is_loaded(name: str, expected: str, tmp_path: Path) -> None:
    config = dataclasses.replace(save(MASKED[name][0](), tmp_path / "model"), backbone="outer")
    with pytest.raises(InputError, match=expected):
        load_trunk(config, 4, "post")


def test_a_model_without_blocks_to_tap_is_a_trunk_too(data: tuple[TrunkData, TrunkData], tmp_path: Path) -> None:
    """Mamba's list of hidden states begins elsewhere, so that its layers cannot be tapped; after its norm it is like any other."""
    save(tf.MambaForCausalLM(tf.MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=3)), tmp_path / "model")
    build_trunk(make(tmp_path / "model", *data), tmp_path / "bank")
    assert all(check.ok for check in verify(tmp_path / "bank"))
    with pytest.raises(InputError, match="this model cannot be tapped"):
        build_trunk(make(tmp_path / "model", *data, last_hidden_norm="pre"), tmp_path / "pre")


def test_nf4(config: TrunkConfig, model: Path, whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    quantised = ModelConfig(model=str(model), load_in_4bit=True, device="cpu")
    manifest = build_trunk(dataclasses.replace(config, model=quantised, layers=()), tmp_path / "bank")
    assert manifest["quantisation"]["type"] == "nf4"
    assert all(check.ok for check in verify(tmp_path / "bank"))
    exact, found = (open_bank(folder).read(0).hidden_tensor().float() for folder in (whole, tmp_path / "bank"))
    assert not torch.equal(exact, found)


# the same bytes, however it is made


@pytest.mark.slow
def test_two_workers_write_the_same_bytes(config: TrunkConfig, whole: Path, tmp_path: Path) -> None:
    build_trunk(config, tmp_path / "bank", options=RunOptions(workers=2))
    assert both_banks(tmp_path / "bank") == both_banks(whole)


@pytest.mark.slow
def test_every_moment_of_death_is_made_good_by_the_same_command(config: TrunkConfig, whole: Path, tmp_path: Path) -> None:
    for moment in range(1, 1000, 5):  # before one step, after another
        out = tmp_path / f"killed-{moment}" / "bank"
        outcome = kill_at(moment, build_trunk, config, out)
        assert outcome.error == ""
        if not outcome.killed:
            break
        if not (out / "state.json").exists():
            with pytest.raises(ArrowbankError):
                open_bank(out)
        build_trunk(config, out)
        assert both_banks(out) == both_banks(whole), f"killed at moment {moment}"
        shutil.rmtree(out.parent)
    assert moment > 60


@pytest.mark.slow
def test_the_same_key_is_read_back_and_finished_shards_are_kept(
    config: TrunkConfig, whole: Path, data: tuple[TrunkData, TrunkData], model: Path, tmp_path: Path
) -> None:
    out, moment = tmp_path / "bank", 0
    while not (out / "data-00001.arrow").exists():
        shutil.rmtree(out, ignore_errors=True)
        moment += 8
        assert kill_at(moment, build_trunk, config, out).killed
    first = (out / "data-00000.arrow").stat().st_ino
    build_trunk(config, out)
    assert (out / "data-00000.arrow").stat().st_ino == first
    before = both_banks(out), (out / "data-00001.arrow").stat().st_mtime_ns
    moved = [dataclasses.replace(one, path=shutil.copy(one.path, tmp_path / f"moved-{one.name}.jsonl")) for one in data]
    elsewhere = Path(shutil.copytree(model, tmp_path / "another-name"))
    again = make(elsewhere, *moved, tokens=10 * WINDOW + 30, layers=(0, 2), max_shard_bytes=40_000, chain=4)
    shutil.move(tmp_path / "another-name" / "model.safetensors", tmp_path / "weights")
    with pytest.raises(InputError):
        build_trunk(again, out)
    shutil.move(tmp_path / "weights", tmp_path / "another-name" / "model.safetensors")
    assert build_trunk(again, out)["complete"]  # the same tokens and weights, wherever they lie; chain changed no window
    assert (both_banks(out), (out / "data-00001.arrow").stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"topk": 5}, "topk: found 6, wanted 5"),
        ({"window": 40}, "window: found 48, wanted 40"),
        ({"last_hidden_norm": "pre"}, "hidden_norm"),
        ({"hold_all": True}, "hold_all"),
        ({"tokens": 520}, "sets.a.tokens"),
        ({"rules": BatchRules(max_batch=2)}, "batches.max_batch"),
        ({"max_shard_bytes": 100_000}, "shard_bytes"),
    ],
)
def test_what_decides_bytes_is_in_the_key(config: TrunkConfig, whole: Path, change: dict[str, Any], field: str) -> None:
    before = both_banks(whole)
    with pytest.raises(PlanMismatch) as refused:
        build_trunk(dataclasses.replace(config, **change), whole)
    assert field in str(refused.value)
    assert both_banks(whole) == before


def test_another_token_and_another_model_are_another_key(
    config: TrunkConfig, whole: Path, data: tuple[TrunkData, TrunkData], tmp_path: Path
) -> None:
    lines = Path(data[0].path).read_text().splitlines()
    for at, line in enumerate(lines):
        ids = json.loads(line)["input_ids"]
        lines[at] = json.dumps({"input_ids": [ids[0] ^ 1, *ids[1:]]}) if at == 30 else line
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(PlanMismatch, match=r"sets\.a\.ids_sha256"):
        build_trunk(dataclasses.replace(config, sources=(TrunkData("a", tmp_path / "a.jsonl"), data[1])), whole)
    other = tiny.save_qwen3(tmp_path / "other", layers=2)
    with pytest.raises(PlanMismatch, match=r"model\.model_sha256"):
        build_trunk(dataclasses.replace(config, model=ModelConfig(model=str(other), device="cpu"), layers=()), whole)
    with pytest.raises(ContractError, match="topk is 6, expected 64"):
        open_bank(whole, {"topk": 64})
    with pytest.raises(ContractError, match="model_fingerprint"):
        open_bank(whole, {"model_fingerprint": describe(ModelConfig(model=str(other))).fingerprint})
    assert open_bank(whole, {"topk": 6, "window": WINDOW, "model": config.model.model}).topk == 6
    with pytest.raises(InputError, match="a bank of taps, expected a trunk bank"):
        open_bank(whole.with_name("bank-taps"), kind=TrunkBank)


# sizes and refusals


def test_the_estimate_is_what_is_written_within_two_in_a_hundred(config: TrunkConfig, tmp_path: Path) -> None:
    chosen = dataclasses.replace(config, topk=64, max_shard_bytes=None, hold_all=True)
    found = estimate_trunk(chosen, tmp_path / "nowhere" / "bank")
    assert not (tmp_path / "nowhere").exists()
    manifest = build_trunk(chosen, tmp_path / "bank")
    assert (found.rows, found.counts["held_out"], found.tokens) == (17, 17, manifest["counts"]["tokens"])
    taps = found.beside["taps"]
    for folder, stated in (("bank", found.total_bytes - taps), ("bank-taps", taps)):
        written = sum(path.stat().st_size for path in (tmp_path / folder).iterdir())
        assert abs(stated / written - 1) < 0.02, (folder, stated, written)
    assert found.counts["bytes_per_token"] == pytest.approx(4 + 64 * 8 + 4 + 2 * 32, abs=1)


def test_a_budget_is_kept_before_any_pass(config: TrunkConfig, tmp_path: Path) -> None:
    small = RunOptions(budget_gb=1e-5)
    with pytest.raises(DiskFull, match="the budget is"):
        build_trunk(config, tmp_path / "bank", options=small)
    assert not list(tmp_path.iterdir())
    assert not estimate_trunk(config, tmp_path / "bank", options=small).fits


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tokens": 9 * WINDOW, "only": 1}, r"too few windows: 9 \(a 9\) of 48 tokens; expected at least 10"),
        ({"window": 2048}, r"--window 2048: model .* has 1024 positions"),
        (
            {"window": 1000, "tokens": 18, "only": 1},
            r"too few windows: its 60 records give none of 1000 tokens, nor a short one",
        ),
        ({"topk": 513}, r"--topk 513: model .* has a vocabulary of 512"),
        ({"layers": (0, 3)}, r"--layers 0,3: there is no block 3"),
    ],
)
def test_what_cannot_be_built_is_refused_and_nothing_is_written(
    config: TrunkConfig, tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    sets = config.sources[: options.pop("only", 2)]
    with pytest.raises(InputError, match=expected):
        build_trunk(dataclasses.replace(config, sources=sets, **options), tmp_path / "bank")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"last_hidden_norm": "unknown"}, "expected one of post, pre"),
        ({"window": 0}, "window is 0; expected at least 1"),
        ({"topk": 0}, "topk is 0"),
        ({"tokens": 0}, "tokens is 0"),
        ({"chain": 0}, "chain is 0"),
        ({"layers": (2, 1)}, "--layers 2,1: expected ascending ids"),
        ({"sources": ()}, "expected at least one"),
        ({"sources": (TrunkData("a", "x"), TrunkData("a", "y"))}, "each name once"),
        ({"model": ModelConfig(model="m", layer=1)}, "model.layer is 1, which has no effect here"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as refused:
        TrunkConfig(**({"model": ModelConfig(model="m"), "sources": (TrunkData("a", "x"),)} | options))
    assert expected in str(refused.value)
    with pytest.raises(InputError, match="tokens is 0; expected at least 1"):
        TrunkData("a", "x", 0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_is_not_finite_is_never_kept(model: Path, data: tuple[TrunkData, TrunkData], tmp_path: Path, workers: int) -> None:
    config = make(broken(model, tmp_path / "model"), *data, max_shard_bytes=20_000)
    if not workers:
        with pytest.raises(InputError, match="workers is 0"):
            build_trunk(config, tmp_path / "bank", options=RunOptions(workers=0))
        return
    with pytest.raises(BadVector, match=r"window \d+ of [ab]: .* NaN or Inf"):
        build_trunk(config, tmp_path / "bank", options=RunOptions(workers=workers))
    with pytest.raises(ArrowbankError):
        open_bank(tmp_path / "bank")


def test_a_layer_that_float16_cannot_hold_is_refused(model: Path, data: tuple[TrunkData, TrunkData], tmp_path: Path) -> None:
    large = broken(model, tmp_path / "model", token=slice(None), value=1e5)
    with pytest.raises(BadVector, match=r"window 9 of a: .* float16 cannot hold \(\d+ in layer 0\)"):
        build_trunk(make(large, *data, layers=(0,)), tmp_path / "bank")
    assert all(check.ok for check in verify(tmp_path / "bank"))  # the trunk bank itself is kept


def broken(model: Path, folder: Path, token: Any = 77, value: float = float("inf")) -> Path:
    """A copy of the model with the embeddings of some tokens overwritten."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# proof


@pytest.mark.parametrize(
    ("column", "change", "check"),
    [
        ("topk_probs", lambda values: values[::-1], "probs"),
        ("topk_probs", lambda values: values * 0, "probs"),
        ("tail_mass", lambda values: values - 0.5, "probs"),
        ("topk_ids", lambda values: values * 0 + 600, "choices"),
        ("topk_ids", lambda values: values * 0 + 6, "choices"),
        ("hidden", lambda values: values * 0 + 0x7F80, "hidden"),
        ("input_ids", lambda values: values * 0 + 512, "ids"),
    ],
)
def test_a_bank_that_is_wrong_inside_is_found_out(
    whole: Path, tmp_path: Path, column: str, change: Callable[[np.ndarray], np.ndarray], check: str
) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "bank"))
    shard = copy / "data-00001.arrow"
    content = bytearray(shard.read_bytes())
    values = getattr(open_bank(copy).read(int(open_bank(copy).starts[1])), column)
    at = content.find(values.tobytes())
    content[at : at + values.nbytes] = np.ascontiguousarray(change(values.reshape(-1))).astype(values.dtype).tobytes()
    shard.write_bytes(content)
    failed = {one.name for one in verify(copy) if not one.ok}
    assert check in failed
    assert failed <= {check, "hashes"}


# the command line


def test_the_command_line(
    model: Path, data: tuple[TrunkData, TrunkData], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["trunk", "build", "--model", str(model), "--out", str(tmp_path / "bank"), "--device", "cpu"]
    argv += ["--source", f"a={data[0].path}", "--source", f"b={data[1].path}@{data[1].tokens}", "--window", str(WINDOW)]
    argv += ["--topk", str(TOPK), "--tokens", str(10 * WINDOW + 30), "--layers", "0,2", "--max-shard-bytes", "40000"]
    assert main([*argv, "--dry-run"]) == 0
    assert capsys.readouterr().out.split()[:9] == ["rows", "17", "(770", "tokens)", "shards", "3", "held", "out", "1"]
    assert main([*argv, "--dry-run", "--json", "--budget-gb", "0.00001"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert not list(tmp_path.iterdir())
    assert main(argv) == 0
    assert "17 windows of 48 tokens, 1 held out" in capsys.readouterr().out
    assert both_banks(tmp_path / "bank") == both_banks(whole)
    assert main(["info", str(tmp_path / "bank")]) == 0
    assert "topk               6\n" in capsys.readouterr().out
    assert main([*argv, "--json", "--hold-all"]) == 2
    assert "hold_all: found false, wanted true" in capsys.readouterr().err
    assert main([*argv, "--json", "--hold-all", "--restart"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["manifest"]["counts"]["held_out"] == 17
    swapped = [f"b@{data[1].tokens}={data[1].path}" if part.startswith("b=") else part for part in argv]
    assert main([*swapped, "--restart"]) == 0
    assert both_banks(tmp_path / "bank") == both_banks(whole)


def test_it_is_public() -> None:
    assert {"TrunkConfig", "TrunkData", "build_trunk", "open_bank"} <= set(arrowbank.__all__)
