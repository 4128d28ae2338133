"""The stage `targets capture`: its hidden states are transformers' own, to the bit; its resumes, its sizes and its refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers.modeling_outputs import BaseModelOutput

import arrowbank
from arrowbank import CaptureConfig, ModelConfig, RunOptions, capture, open_bank, verify
from arrowbank.bank.kinds.targets_bank import needed_positions
from arrowbank.cli import main
from arrowbank.cli.show import progress_for
from arrowbank.engine.plan import BatchRules
from arrowbank.errors import ArrowbankError, BadVector, CorruptBank, DiskFull, InputError, PlanMismatch
from arrowbank.models import describe, load_taps
from arrowbank.models.load import cpu_has_bfloat16
from arrowbank.models.passes import PASS_TOKENS, CpuPasses, DevicePasses
from arrowbank.models.taps import HiddenStates, Rounded, TapReader, load_taps_reader
from arrowbank.targets.capture import estimate_capture
from tests import tiny
from tests.kill import kill_at, tree_bytes
from tests.test_models_families import FAMILIES, SLIDING

LAYERS = (-1, 0, 2)
ROWS, LENGTH = 5, 11
TAPPED: dict[str, Callable[[], Any]] = {
    **{
        name: FAMILIES[name]
        for name in ("llama", "qwen3, tied", "qwen3-next", "qwen3.5 text", "glm-4-moe", "deepseek-v3", "gemma3 text")
    },
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SLIDING)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of three blocks, H = 32, with a chat template."""
    return tiny.save_qwen3(tmp_path_factory.mktemp("chat") / "model", layers=3, chat_template=tiny.TAGGED_TEMPLATE)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("data") / "chats.jsonl", tiny.conversations(24))


@pytest.fixture(scope="module")
def config(model: Path, chats: Path) -> CaptureConfig:
    """Three shards or so."""
    return make(model, chats, max_length=90, max_shard_bytes=150_000)


@pytest.fixture(scope="module")
def whole(config: CaptureConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank made in one go."""
    folder = tmp_path_factory.mktemp("whole") / "bank"
    capture(config, folder)
    return folder


def make(model: Path, data: Path, *, dtype: Any = "auto", **options: Any) -> CaptureConfig:
    given: dict[str, Any] = {"target_layer_ids": LAYERS, "rules": BatchRules(max_batch=4, token_budget=300)}
    return CaptureConfig(model=ModelConfig(model=str(model), device="cpu", dtype=dtype), data=data, **(given | options))


def write_lines(path: Path, values: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def write_rows(path: Path, rows: int, length: int, vocabulary: int = 256) -> np.ndarray:
    """`rows` token rows of one length in the file `path`; the tokens."""
    ids = np.random.default_rng(rows).integers(2, vocabulary, (rows, length))
    write_lines(path, [{"input_ids": row} for row in ids.tolist()])
    return ids


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def transformers_bits(
    folder: Path, ids: np.ndarray, layers: Sequence[int], dtype: str = "auto"
) -> tuple[np.ndarray, np.ndarray]:
    """What the whole model's own class gives for a batch, as bfloat16 bits: taps [N, T, L·H] and last [N, T, H]."""
    architecture = describe(ModelConfig(model=str(folder))).architecture
    whole = getattr(tf, architecture).from_pretrained(folder, dtype=dtype).eval()
    with one_thread():
        states = whole(input_ids=torch.tensor(ids).long(), output_hidden_states=True, use_cache=False).hidden_states
    return bits(torch.cat([states[layer + 1] for layer in layers], dim=-1)), bits(states[-1])


def bits(values: torch.Tensor) -> np.ndarray:
    return values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def rows_of(folder: Path) -> list[Any]:
    bank = open_bank(folder)
    return [bank.read(row) for row in range(len(bank))]


# what is captured


@pytest.mark.slow
@pytest.mark.parametrize("family", TAPPED)
def test_the_bits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = TAPPED[family]()
        for weight in made.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
    made.save_pretrained(tmp_path / "model")
    ids = write_rows(tmp_path / "rows.jsonl", ROWS, LENGTH)
    layers = (-1, 0, 1)  # what block 2, the last, puts out, transformers does not tell: see the next test
    options: dict[str, Any] = {"target_layer_ids": layers, "min_loss_tokens": 1, "rules": BatchRules()}
    manifest = capture(make(tmp_path / "model", tmp_path / "rows.jsonl", **options), tmp_path / "bank")
    taps, last = transformers_bits(tmp_path / "model", ids, layers)
    found = rows_of(tmp_path / "bank")
    assert np.array_equal(np.stack([row.taps for row in found]), taps)
    assert np.array_equal(np.stack([row.last for row in found]), last)
    assert np.array_equal(np.stack([row.input_ids for row in found]), ids)
    assert (manifest["num_hidden_layers"], manifest["target_layer_ids"], manifest["vocab_size"]) == (3, list(layers), 256)
    assert manifest["loss_mask"] == "ones_except_first"
    assert found[0].loss_mask.tolist() == [0] + [1] * (LENGTH - 1)
    assert (manifest["tokenizer_fingerprint"], manifest["chat_template_sha256"]) == (None, None)


@pytest.mark.slow
def test_pre_is_what_the_last_block_puts_out(model: Path, tmp_path: Path) -> None:
    ids = write_rows(tmp_path / "rows.jsonl", ROWS, LENGTH)
    options: dict[str, Any] = {"target_layer_ids": (1, 2), "min_loss_tokens": 1, "rules": BatchRules()}
    for norm in ("post", "pre"):
        chosen = make(model, tmp_path / "rows.jsonl", last_hidden_norm=norm, **options)
        assert capture(chosen, tmp_path / norm)["last_hidden_norm"] == norm
    decoder = tf.Qwen3ForCausalLM.from_pretrained(model).eval().model
    before: list[torch.Tensor] = []
    decoder.norm.register_forward_pre_hook(lambda _module, args: before.append(args[0]))
    with one_thread():
        after = decoder(input_ids=torch.from_numpy(ids)).last_hidden_state
    post, pre = rows_of(tmp_path / "post"), rows_of(tmp_path / "pre")
    assert np.array_equal(np.stack([row.last for row in post]), bits(after))
    assert np.array_equal(np.stack([row.last for row in pre]), bits(before[0]))
    for row in (*post, *pre):
        assert np.array_equal(row.taps[:, 32:], pre[int(row.name.split(":")[1]) - 1].last)
    assert not np.array_equal(bits(after), bits(before[0]))


@pytest.mark.skipif(not cpu_has_bfloat16(), reason="products are widened here")
def test_a_bfloat16_model_to_the_bit(model: Path, tmp_path: Path) -> None:
    ids = write_rows(tmp_path / "rows.jsonl", ROWS, LENGTH)
    options: dict[str, Any] = {"target_layer_ids": (0, 1), "min_loss_tokens": 1, "rules": BatchRules()}
    manifest = capture(make(model, tmp_path / "rows.jsonl", dtype="bfloat16", **options), tmp_path / "bank")
    taps, last = transformers_bits(model, ids, (0, 1), dtype="bfloat16")
    found = rows_of(tmp_path / "bank")
    assert np.array_equal(np.stack([row.taps for row in found]), taps)
    assert np.array_equal(np.stack([row.last for row in found]), last)
    assert manifest["dtype"] == "bfloat16"


@pytest.mark.slow
def test_rows_of_many_lengths_are_back_in_their_order(config: CaptureConfig, whole: Path, model: Path) -> None:
    bank = open_bank(whole)
    tokenizer = tf.AutoTokenizer.from_pretrained(model)
    samples = [json.loads(line) for line in Path(config.data).read_text().splitlines()]
    by_name = {sample["id"]: sample for sample in samples}
    names = [bank.read(row).name for row in range(len(bank))]
    assert len(bank.shard_names) > 1
    assert names == [sample["id"] for sample in samples if sample["id"] in set(names)]
    for row in range(len(bank)):
        sample = bank.read(row)
        made = tokenizer.apply_chat_template(
            by_name[sample.name]["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        assert sample.input_ids.tolist() == made["input_ids"][: config.max_length]
        assert sample.loss_mask.tolist() == made["assistant_masks"][: config.max_length]
        taps, last = transformers_bits(model, sample.input_ids[None], LAYERS[:2])
        for found, expected in ((sample.taps[:, :64], taps[0]), (sample.last, last[0])):  # its batch had another shape
            wide, exact = ((side.astype(np.uint32) << 16).view(np.float32) for side in (found, expected))
            np.testing.assert_allclose(wide, exact, rtol=2**-6, atol=0.02)
    assert all(check.ok for check in verify(whole))
    assert open_bank(whole).to_torch()[0]["target_hidden_states"].shape == (bank.lengths[0], 96)


def test_the_manifest_says_what_was_kept_and_of_what(config: CaptureConfig, whole: Path, model: Path) -> None:
    manifest = json.loads((whole / "manifest.json").read_text())
    bank = open_bank(whole)
    counts = manifest["counts"]
    assert counts["kept"] == len(bank) == manifest["text_count"]
    assert counts["kept"] + counts["dropped"]["few_loss_tokens"] == 24
    assert counts["dropped"]["few_loss_tokens"] > 0
    assert counts["truncated"] == int((bank.lengths == 90).sum()) > 0
    assert counts["tokens"] == counts["hidden_tokens"] == int(bank.lengths.sum())
    assert manifest["nonfinite"] == dict.fromkeys(["-1", "0", "2", "last"], 0)
    assert manifest["target_model_name_or_path"] == str(model)
    assert (manifest["loss_mask"], manifest["last_hidden_norm"]) == ("assistant_tokens", "post")
    assert manifest["layer_id_convention"] == "block_output"
    assert (manifest["max_length"], manifest["min_loss_tokens"], manifest["source"]) == (90, 14, "chats.jsonl")
    for name in ("model_fingerprint", "tokenizer_fingerprint", "chat_template_sha256", "data_sha256"):
        assert len(manifest[name]) == 64
    assert str(model.parent) not in json.dumps(manifest["recipe"]).replace(str(model), "")


def test_fp8_is_close_and_the_manifest_says_how_close(config: CaptureConfig, whole: Path, tmp_path: Path) -> None:
    manifest = capture(dataclasses.replace(config, codec="fp8"), tmp_path / "fp8")
    assert all(error["cosine"] > 0.99 and 0 < error["relative"] < 0.1 for error in manifest["codec_error"].values())
    assert set(manifest["codec_error"]) == {"-1", "0", "2", "last"}
    for exact, found in zip(rows_of(whole), rows_of(tmp_path / "fp8"), strict=True):
        assert exact.name == found.name
        left, right = ((side.taps.astype(np.uint32) << 16).view(np.float32).ravel() for side in (exact, found))
        assert left @ right / np.linalg.norm(left) / np.linalg.norm(right) > 0.99
        assert not np.array_equal(left, right)


def test_supervised_spans_hold_what_the_loss_needs(config: CaptureConfig, whole: Path, tmp_path: Path) -> None:
    chosen = dataclasses.replace(config, spans="supervised")
    manifest = capture(chosen, tmp_path / "some")
    assert manifest["counts"]["hidden_tokens"] < manifest["counts"]["tokens"]
    by_name = {row.name: row for row in rows_of(whole)}
    for found in rows_of(tmp_path / "some"):
        exact = by_name[found.name]
        positions = needed_positions(exact.loss_mask)
        assert np.array_equal(found.positions, positions)
        assert found.taps.shape == (len(positions), 96)
    assert estimate_capture(chosen, tmp_path).total_bytes < estimate_capture(config, tmp_path).total_bytes


# the passes


def batches_of(*shapes: tuple[int, int]) -> list[np.ndarray]:
    return [np.random.default_rng(n * t).integers(0, 500, (n, t), dtype=np.int32) for n, t in shapes]


SHAPES = batches_of((3, 7), (1, 1), (40, 60), (2, 500), (64, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_neither_on_the_threads_nor_on_the_stream(model: Path, dtype: Any) -> None:
    config = ModelConfig(model=str(model), dtype=dtype, device="cpu")
    before, seen = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            states = load_taps(config, LAYERS, "pre")
            streamed = list(states.stream(iter(SHAPES)))
            assert [tuple(found.shape) for found in streamed] == [(*ids.shape, 4, 32) for ids in SHAPES]
            assert all(found.dtype is torch.bfloat16 for found in streamed)
            [alone] = states.stream(SHAPES[2:3])
            assert torch.equal(alone, streamed[2])
            seen.add(b"".join(bits(found).tobytes() for found in streamed))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1
    assert SHAPES[2].size > PASS_TOKENS  # several passes, on several threads' copies of the modules


def test_a_stream_may_be_left(model: Path) -> None:
    """No more batches are drawn than keep the threads at work, and the threads' setting is put back."""
    drawn: list[int] = []

    def draw() -> Iterator[np.ndarray]:
        for number in range(100):
            drawn.append(number)
            yield SHAPES[2]  # three passes

    before = torch.get_num_threads()
    stream = load_taps(ModelConfig(model=str(model), device="cpu"), LAYERS, "post").stream(draw())
    next(stream)
    assert len(drawn) <= 3 + before
    stream.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == before


def test_the_path_of_a_gpu_gives_the_same_states(model: Path) -> None:
    config, cpu = ModelConfig(model=str(model), device="cpu"), torch.device("cpu")
    info = describe(config)
    reader = Rounded(load_taps_reader(config, info, cpu, LAYERS, "post"))
    ahead = list(HiddenStates(DevicePasses(reader, info, cpu)).stream(SHAPES))
    for found, expected in zip(ahead, HiddenStates(CpuPasses(reader, info)).stream(SHAPES), strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu(model: Path) -> None:
    on_gpu = load_taps(ModelConfig(model=str(model), device="cuda"), LAYERS, "post").stream(SHAPES)
    on_cpu = load_taps(ModelConfig(model=str(model), device="cpu"), LAYERS, "post").stream(SHAPES)
    for found, expected in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-5, atol=0.05)


@pytest.mark.slow
def test_nf4(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    ids = write_rows(tmp_path / "rows.jsonl", ROWS, LENGTH)
    quantised = ModelConfig(model=str(model), load_in_4bit=True, device="cpu")
    config = CaptureConfig(model=quantised, data=tmp_path / "rows.jsonl", target_layer_ids=(-1, 0), min_loss_tokens=1)
    manifest = capture(config, tmp_path / "bank")
    assert manifest["quantisation"]["type"] == "nf4"
    exact, _ = transformers_bits(model, ids, (-1, 0))
    found = np.stack([row.taps for row in rows_of(tmp_path / "bank")])
    assert np.array_equal(found[..., :32], exact[..., :32])  # the embeddings are not quantised
    assert not np.array_equal(found[..., 32:], exact[..., 32:])


# models that cannot be tapped


def save(model: Any, folder: Path) -> ModelConfig:
    model.save_pretrained(folder)
    return ModelConfig(model=str(folder), device="cpu")


def test_shared_blocks_cannot_be_tapped(tmp_path: Path) -> None:
    config = save(FAMILIES["albert"](), tmp_path)
    with pytest.raises(InputError, match=r"this model cannot be tapped: it has no list of 3 blocks"):
        load_taps(config, (0,), "post")


def test_a_model_that_counts_its_layers_otherwise_cannot_be_tapped(tmp_path: Path) -> None:
    """Mamba's list of hidden states begins with the first block's output."""
    config = save(tf.MambaForCausalLM(tf.MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=3)), tmp_path)
    with pytest.raises(InputError, match=r"this model cannot be tapped: .* hidden_states\[0\]"):
        load_taps(config, (0,), "post")


class Decoder(torch.nn.Module):
    """A model of one's own, as `trust_remote_code` may bring it: three blocks, run in the order `runs`."""

    def __init__(self, runs: Sequence[int] = (0, 1, 2), width: int = 32, functional_norm: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(512, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.norm = torch.nn.LayerNorm(width)
        self.runs, self.functional_norm = runs, functional_norm

    def forward(self, input_ids: torch.Tensor, output_hidden_states: bool = False) -> BaseModelOutput:
        hidden = self.embed(input_ids)
        states = [hidden]
        for run in self.runs:
            hidden = self.blocks[run](hidden)
            states.append(hidden)
        last = torch.nn.functional.normalize(hidden) if self.functional_norm else self.norm(hidden)
        return BaseModelOutput(last_hidden_state=last, hidden_states=(*states[:3], last) if output_hidden_states else None)


@pytest.mark.parametrize(
    ("decoder", "layers", "norm", "expected"),
    [
        (Decoder(), (0, 2), "pre", None),
        (Decoder(runs=(0, 1)), (0,), "post", "it does not run all of its blocks"),
        (Decoder(runs=(0, 1, 1, 2)), (0,), "post", "it runs a block more than once"),
        (Decoder(runs=(0, 2, 1)), (0,), "post", r"what block 1 puts out is not what transformers gives as hidden_states\[2\]"),
        (Decoder(width=48), (0,), "post", r"its blocks pass on \(1, 5, 48\), not hidden states of shape \(1, 5, 32\)"),
        (Decoder(functional_norm=True), (0, 1), "post", None),
        (Decoder(functional_norm=True), (0, 1), "pre", "no module of its own leads from what its last block puts out"),
        (Decoder(functional_norm=True), (0, 2), "post", "no module of its own leads from what its last block puts out"),
    ],
)
def test_only_what_is_proved_is_tapped(
    model: Path, decoder: Decoder, layers: tuple[int, ...], norm: str, expected: str | None
) -> None:
    info = describe(ModelConfig(model=str(model), device="cpu"))
    if expected is not None:
        with pytest.raises(InputError, match=f"this model cannot be tapped: {expected}"):
            TapReader(decoder, info, torch.device("cpu"), layers, norm)
        return
    with torch.inference_mode():
        found = TapReader(decoder, info, torch.device("cpu"), layers, norm)(torch.arange(6)[None])
        assert torch.equal(found[:, :, 0], decoder.blocks[0](decoder.embed(torch.arange(6)[None])))
    assert found.shape == (1, 6, 3, 32)


# the same bytes, however it is made


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_several_processes_write_the_same_bytes(config: CaptureConfig, whole: Path, tmp_path: Path, workers: int) -> None:
    capture(config, tmp_path / "bank", options=RunOptions(workers=workers))
    assert tree_bytes(tmp_path / "bank") == tree_bytes(whole)


@pytest.mark.slow
def test_every_moment_of_death_is_made_good_by_the_same_command(model: Path, whole: Path, tmp_path: Path) -> None:
    """Of token rows: a process that renders conversations takes a second more to start."""
    rows = open_bank(whole).to_torch()
    lines = [{"input_ids": row["input_ids"].tolist(), "loss_mask": row["loss_mask"].tolist()} for row in rows]
    config = make(model, write_lines(tmp_path / "rows.jsonl", lines), max_length=90, max_shard_bytes=150_000)
    whole = tmp_path / "whole"
    capture(config, whole)
    for moment in range(1, 1000):
        out = tmp_path / f"killed-{moment}"
        outcome = kill_at(moment, capture, config, out)
        assert outcome.error == ""
        if not outcome.killed:
            break
        if not (out / "state.json").exists():
            with pytest.raises(ArrowbankError):
                open_bank(out).to_torch()
        capture(config, out)
        assert tree_bytes(out) == tree_bytes(whole), f"killed at moment {moment}"
        shutil.rmtree(out)
    assert moment > 60


@pytest.mark.slow
def test_finished_shards_and_prepared_rows_are_kept(config: CaptureConfig, whole: Path, tmp_path: Path) -> None:
    out, moment = tmp_path / "bank", 0
    while not (out / "data-00001.arrow").exists():
        shutil.rmtree(out, ignore_errors=True)
        moment += 8
        assert kill_at(moment, capture, config, out).killed
    kept = {path.name: path.stat().st_ino for path in [out / "data-00000.arrow", *(out / "journal" / "work").glob("rows-*")]}
    assert len(kept) == 3
    rows = next((out / "journal" / "work").glob("rows-*.arrow"))
    assert kill_at(9, capture, config, out).killed
    assert {path.name: path.stat().st_ino for path in [out / "data-00000.arrow", *rows.parent.glob("rows-*")]} == kept
    rows.write_bytes(rows.read_bytes()[:-100])  # a damaged one is made again
    capture(config, out)
    assert tree_bytes(out) == tree_bytes(whole)
    shard = out / "data-00000.arrow"
    before = (shard.stat().st_ino, shard.stat().st_mtime_ns)
    assert capture(config, out)["complete"]
    assert (shard.stat().st_ino, shard.stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    "change",
    [
        {"target_layer_ids": (0, 2)},
        {"last_hidden_norm": "pre"},
        {"max_length": 80},
        {"min_loss_tokens": 1},
        {"codec": "fp8"},
        {"spans": "supervised"},
        {"limit": 20},
        {"rules": BatchRules(max_batch=3, token_budget=300)},
        {"max_shard_bytes": 100_000},
        {"target_model": "another"},
    ],
)
def test_what_decides_bytes_is_in_the_plan(config: CaptureConfig, whole: Path, change: dict[str, Any]) -> None:
    with pytest.raises(PlanMismatch):
        capture(dataclasses.replace(config, **change), whole)


def test_other_data_and_another_template_are_another_plan(config: CaptureConfig, model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "chats.jsonl", tiny.conversations(6))
    mine = Path(shutil.copytree(model, tmp_path / "model"))
    config = make(mine, data)
    capture(config, tmp_path / "bank")
    (mine / "chat_template.jinja").write_text(tiny.TAGGED_TEMPLATE.replace("assistant\n", "model\n"))
    with pytest.raises(PlanMismatch, match="chat_template_sha256"):
        capture(config, tmp_path / "bank")
    shutil.copy(model / "chat_template.jinja", mine)
    write_lines(data, tiny.conversations(7))
    with pytest.raises(PlanMismatch, match="data_sha256"):
        capture(config, tmp_path / "bank")
    assert capture(config, tmp_path / "bank", options=RunOptions(restart=True))["counts"]["kept"] > 0


def test_a_template_that_writes_the_date_is_told(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Path(shutil.copytree(model, tmp_path / "model"))
    (mine / "chat_template.jinja").write_text("{{ strftime_now('%Y') }} " + tiny.TAGGED_TEMPLATE)
    capture(make(mine, chats), tmp_path / "bank", progress=progress_for(False))
    assert "writes today's date into samples" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_that_cannot_be_made_again_are_not_mixed(model: Path, chats: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(model, tmp_path / "model"))
    (mine / "chat_template.jinja").write_text("{{ strftime_now('%f') }} " + tiny.TAGGED_TEMPLATE)
    config, out, moment = make(mine, chats), tmp_path / "bank", 0
    while not list(out.glob("journal/work/rows-*.json")):
        shutil.rmtree(out, ignore_errors=True)
        moment += 2
        assert kill_at(moment, capture, config, out).killed
    (rows,) = out.glob("journal/work/rows-*.arrow")
    rows.write_bytes(b"")
    with pytest.raises(CorruptBank, match="do not give the same tokens again"):
        capture(config, out)
    assert capture(config, out, options=RunOptions(restart=True))["complete"]


# sizes and refusals


def test_the_estimate_is_what_is_written(config: CaptureConfig, whole: Path, tmp_path: Path) -> None:
    found = estimate_capture(config, tmp_path / "nowhere")
    manifest = json.loads((whole / "manifest.json").read_text())
    assert (found.rows, found.tokens) == (manifest["rows"], manifest["counts"]["tokens"])
    each = found.counts["bytes_per_token"]
    assert (each, found.shard_bytes) == (2 * 32 * 4 + 6, each * found.tokens)
    assert found.shards == len([entry for entry in manifest["files"] if entry["rows"]])
    written = sum(entry["bytes"] for entry in manifest["files"] if entry["rows"])
    assert found.shard_bytes <= written + found.tokens  # the attention mask, which a bank leaves out
    assert written < 1.2 * found.shard_bytes
    assert not (tmp_path / "nowhere").exists()


def test_a_budget_is_kept_before_any_pass(config: CaptureConfig, tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="the budget is"):
        capture(config, tmp_path / "bank", options=RunOptions(budget_gb=1e-5))
    assert not (tmp_path / "bank").exists()
    assert not estimate_capture(config, tmp_path / "bank", options=RunOptions(budget_gb=1e-5)).fits


def test_a_disk_without_room_is_told_before_any_pass(
    config: CaptureConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    with pytest.raises(DiskFull, match=r"the target bank takes \d+\.\d kB, the disk has 10\.0 kB free"):
        capture(config, tmp_path / "bank")
    assert not list((tmp_path / "bank").glob("data-*"))
    assert not estimate_capture(config, tmp_path).fits


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((2, 1), "--layers 2,1: expected ascending ids"),
        ((1, 1), "expected ascending ids"),
        ((-2, 1), "expected ascending ids"),
        ((), "expected ascending ids"),
        ((0, 3), "--layers 0,3: there is no block 3, "),
    ],
)
def test_wrong_layers_are_refused(model: Path, chats: Path, tmp_path: Path, layers: tuple[int, ...], expected: str) -> None:
    with pytest.raises(InputError) as refused:
        capture(make(model, chats, target_layer_ids=layers), tmp_path / "bank")
    assert expected in str(refused.value)
    assert not (tmp_path / "bank").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"last_hidden_norm": "unknown"}, "expected one of post, pre"),
        ({"codec": "int8"}, "expected one of bf16, fp8"),
        ({"spans": "some"}, "expected one of all, supervised"),
        ({"max_length": 0}, "max_length is 0; expected at least 1"),
        ({"min_loss_tokens": -1}, "min_loss_tokens is -1; expected at least 0"),
        ({"limit": 0}, "limit is 0"),
        ({"model": ModelConfig(model="m", layer=1)}, "model.layer is 1, which has no effect here"),
        ({"model": ModelConfig(model="m", backbone="outer")}, "model.backbone is 'outer'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as refused:
        CaptureConfig(**({"model": ModelConfig(model="m"), "data": "d", "target_layer_ids": (1,)} | options))
    assert expected in str(refused.value)


def test_workers_are_at_least_one(config: CaptureConfig, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="workers is 0"):
        capture(config, tmp_path / "bank", options=RunOptions(workers=0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_not_finite_is_never_kept(model: Path, tmp_path: Path, workers: int) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "model"))
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    lines = [{"input_ids": [number] * 8} for number in (10, 77, 12)]
    config = make(broken, write_lines(tmp_path / "rows.jsonl", lines), min_loss_tokens=1, max_shard_bytes=3000)
    with pytest.raises(BadVector, match=r"sample rows.jsonl:2: .* NaN or Inf \(256 in layer -1, 256 in layer 0"):
        capture(config, tmp_path / "bank", options=RunOptions(workers=workers))
    assert not (tmp_path / "bank" / "data-00001.arrow").exists()


# the command line


def test_the_command_line(model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "targets",
        "capture",
        "--model",
        str(model),
        "--source",
        str(chats),
        "--layers",
        "-1,0,2",
        "--out",
        str(tmp_path / "bank"),
    ]
    argv += [
        "--max-length",
        "90",
        "--max-batch",
        "4",
        "--token-budget",
        "300",
        "--max-shard-bytes",
        "150000",
        "--device",
        "cpu",
    ]
    assert main([*argv, "--dry-run"]) == 0
    assert "bytes per token  262\n" in capsys.readouterr().out
    assert main([*argv, "--dry-run", "--budget-gb", "0.00001", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fits"] is False
    assert not (tmp_path / "bank").exists()
    assert main([*argv, "--target-model", "Org/Big", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "left out (few loss tokens)" in out
    assert json.loads((tmp_path / "bank" / "manifest.json").read_text())["target_model_name_or_path"] == "Org/Big"
    assert main([*argv, "--json"]) == 2  # another plan: the target model's name
    assert main([*argv, "--json", "--restart"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["phase"], last["manifest"]["complete"]) == ("done", True)


def test_the_command_line_makes_what_python_makes(
    model: Path, chats: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "targets",
        "capture",
        "--model",
        str(model),
        "--source",
        str(chats),
        "--layers",
        "-1,0,2",
        "--out",
        str(tmp_path / "bank"),
    ]
    argv += ["--max-length", "90", "--max-batch", "4", "--token-budget", "300", "--max-shard-bytes", "150000"]
    argv += ["--min-loss-tokens", "14", "--last-hidden-norm", "post", "--dtype", "auto", "--codec", "bf16", "--spans", "all"]
    assert main([*argv, "--tokenizer", str(model)]) == 0
    assert tree_bytes(tmp_path / "bank") == tree_bytes(whole)


def test_it_is_public() -> None:
    assert {"CaptureConfig", "capture"} <= set(arrowbank.__all__)
