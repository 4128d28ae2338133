"""`targets capture --runner vllm` with the real vLLM, on a CPU: `make test-vllm` installs it and runs these."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from arrowbank import (
    CaptureConfig,
    EncodeConfig,
    EngineConfig,
    ModelConfig,
    TokenizeConfig,
    capture,
    encode,
    estimate_capture,
    open_bank,
    tokenize,
    verify,
)
from arrowbank.bank.floats import float32_of
from arrowbank.cli import main
from arrowbank.errors import InputError
from arrowbank.models import describe
from arrowbank.models.vllm_engine import find_vllm
from arrowbank.models.vllm_process import VllmChild
from tests import tiny
from tests.kill import tree_bytes

PYTHON = os.environ.get("ARROWBANK_VLLM_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="needs vLLM: run `make test-vllm`")]

LAYERS = (-1, 0, 1)
SIZES: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3},
}
DEEPSEEK: dict[str, Any] = {  # the heads that its kernels on a CPU take
    **{"kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
    **{"first_k_dense_replace": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 64},
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES, head_dim=32)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, head_dim=32)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SIZES, head_dim=32)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, head_dim=32, num_local_experts=2)),
    "deepseek": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**(SIZES | DEEPSEEK))),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                MODELS[name]().save_pretrained(folder / name)
        return folder / name

    return make


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 1 to 1,024 tokens, which is all that the models take: below, at and above the 128 tokens of a block of vLLM's cache."""
    random = np.random.default_rng(0)
    lengths = [1, 2, 127, 128, 129, 1024, *random.integers(3, 400, 24).tolist()]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": random.integers(2, 512, length).tolist()}) + "\n" for length in lengths))
    return path


def make(model: Path, rows: Path, **options: Any) -> CaptureConfig:
    runner, dtype = options.pop("runner", "vllm"), options.pop("dtype", "auto")
    engine = EngineConfig(vllm_python=PYTHON, **options.pop("engine", {})) if runner == "vllm" else EngineConfig()
    given: dict[str, Any] = {"target_layer_ids": LAYERS, "min_loss_tokens": 0, "max_shard_bytes": 500_000, **options}
    return CaptureConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype=dtype), data=rows, runner=runner, engine=engine, **given
    )


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_states_are_those_of_the_transformers_runner(
    models: Callable[[str], Path], rows: Path, tmp_path: Path, name: str, norm: str
) -> None:
    manifest = capture(make(models(name), rows, last_hidden_norm=norm), tmp_path / "vllm")
    capture(make(models(name), rows, last_hidden_norm=norm, runner="transformers"), tmp_path / "transformers")
    found, expected = open_bank(tmp_path / "vllm"), open_bank(tmp_path / "transformers")
    equal = total = 0
    for row in range(len(expected)):
        mine, theirs = found.read(row), expected.read(row)
        assert np.array_equal(mine.input_ids, theirs.input_ids)
        for bits, true in ((mine.taps, theirs.taps), (mine.last, theirs.last)):
            # bfloat16 of values that differ by less than 2e-3 (peaks are near 120): by one step, at most
            assert np.allclose(float32_of(bits), float32_of(true), rtol=2**-7, atol=2e-3)
            equal, total = equal + int((bits == true).sum()), total + bits.size
    assert equal / total > 0.998
    assert manifest["engine"]["version"] == "0.32.0"
    assert manifest["engine"]["probe"]["cosine"] > 1 - 1e-8
    assert manifest["engine"]["probe"]["block_size"] == 128
    assert all(check.ok for check in verify(tmp_path / "vllm"))


def test_the_engine_gives_states_in_float32(models: Callable[[str], Path], rows: Path, tmp_path: Path) -> None:
    """Before they are rounded: within 2.3e-4 of what transformers gives, where values reach 110."""
    given = [np.array(json.loads(line)["input_ids"], np.int32) for line in rows.read_text().splitlines()]
    model = ModelConfig(model=str(models("qwen3")), device="cpu")
    vllm = find_vllm(EngineConfig(vllm_python=PYTHON), model, describe(model), LAYERS, "pre")
    child = VllmChild(vllm, tmp_path, 1025, 0)
    whole = tf.AutoModelForCausalLM.from_pretrained(models("qwen3"), dtype=torch.float32).eval()
    largest = 0.0
    for ids, states in zip(given, child.run(given), strict=True):
        with torch.inference_mode():
            expected = whole(torch.from_numpy(ids).long()[None], output_hidden_states=True).hidden_states
            last = whole.model.norm(states[:, -1])
        assert states.dtype is torch.float32
        found = torch.cat([states[:, [0, 1, 2]], last[:, None]], dim=1)
        largest = max(largest, float((found - torch.stack([layer[0] for layer in expected], dim=1)).abs().max()))
    assert largest < 2.3e-4


def test_a_killed_engine_ends_the_run_and_the_next_run_gives_the_same_bytes(
    models: Callable[[str], Path], rows: Path, tmp_path: Path
) -> None:
    config = make(models("qwen3"), rows)
    command = [
        *[sys.executable, "-m", "arrowbank", "targets", "capture", "--model", str(models("qwen3")), "--source", str(rows)],
        *["--layers=-1,0,1", "--min-loss-tokens", "0", "--max-shard-bytes", "500000", "--out", str(tmp_path / "bank")],
        *["--device", "cpu", "--runner", "vllm", "--vllm-python", PYTHON],
    ]
    run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "bank" / "data-00001.arrow").exists():
        assert run.poll() is None
        time.sleep(0.001)
    killed = [pid for pid in children() if str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text()]
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "was killed by SIGKILL. Its last lines:" in error
    assert not list((tmp_path / "bank").rglob(".vllm.*"))
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "bank").glob("data-*.arrow")}
    capture(config, tmp_path / "bank")
    assert all(path.stat().st_mtime_ns == when for path, when in finished.items())
    capture(config, tmp_path / "in one go")
    assert tree_bytes(tmp_path / "bank") == tree_bytes(tmp_path / "in one go")


def test_a_server_gives_the_same_states(
    models: Callable[[str], Path], rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started with the command that is printed, on a port of its own."""
    command = [
        "targets",
        "capture",
        "--model",
        str(models("qwen3")),
        "--source",
        str(rows),
        "--layers=-1,0,1",
        "--max-length",
        "1024",
    ]
    more = ["--runner", "vllm", "--vllm-python", PYTHON, "--print-serve-command", "--out", str(tmp_path / "bank")]
    assert main([*command, *more]) == 0
    words = shlex.split(capsys.readouterr().out)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*words, "--port", str(port)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(240):
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            assert server.poll() is None
            time.sleep(0.5)
        url = EngineConfig(vllm_url=f"http://127.0.0.1:{port}", vllm_patience=120)
        config = replace(make(models("qwen3"), rows, runner="transformers"), runner="vllm", engine=url)
        manifest = capture(config, tmp_path / "bank")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    capture(make(models("qwen3"), rows, runner="transformers"), tmp_path / "transformers")
    found, expected = open_bank(tmp_path / "bank"), open_bank(tmp_path / "transformers")
    for row in range(len(expected)):
        mine, theirs = found.read(row), expected.read(row)
        assert np.allclose(float32_of(mine.taps), float32_of(theirs.taps), rtol=2**-7, atol=2e-3)
        assert np.allclose(float32_of(mine.last), float32_of(theirs.last), rtol=2**-7, atol=2e-3)
    assert manifest["engine"]["probe"]["cosine"] > 1 - 1e-8
    assert [path.name for path in (tmp_path / "bank.states").iterdir()] == ["code"]


def test_vectors_of_texts_are_those_of_transformers(models: Callable[[str], Path], tmp_path: Path) -> None:
    tiny.save_bpe_tokenizer(tmp_path / "tokenizer")
    texts = tiny.save_texts_bank(tmp_path / "texts", tiny.texts(60))
    tokenize(TokenizeConfig(tokenizer=str(tmp_path / "tokenizer")), texts, tmp_path / "tokens")
    model, engine = ModelConfig(model=str(models("qwen3")), device="cpu"), EngineConfig(vllm_python=PYTHON)
    encode(EncodeConfig(model=model, runner="vllm", engine=engine), tmp_path / "tokens", tmp_path / "vllm")
    encode(EncodeConfig(model=model), tmp_path / "tokens", tmp_path / "transformers")
    found, expected = (np.asarray(open_bank(tmp_path / name).matrix, np.float32) for name in ("vllm", "transformers"))
    assert np.allclose(found, expected, rtol=0, atol=2**-11)
    assert (found == expected).mean() > 0.99


def children() -> list[int]:
    """The processes that run the child's file."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if "arrowbank_vllm_child" in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def test_a_killed_run_leaves_no_engine_behind(models: Callable[[str], Path], rows: Path, tmp_path: Path) -> None:
    command = [
        *[sys.executable, "-m", "arrowbank", "targets", "capture", "--model", str(models("qwen3")), "--source", str(rows)],
        *["--layers", "1", "--min-loss-tokens", "0", "--max-shard-bytes", "50000", "--out", str(tmp_path / "bank")],
        *["--device", "cpu", "--runner", "vllm", "--vllm-python", PYTHON],
    ]
    run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "bank" / "data-00000.arrow").exists():
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()
    run.wait()
    for _ in range(100):
        if not any(str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text() for pid in children()):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the engine still runs")


def test_a_wrong_kernel_is_found(models: Callable[[str], Path], rows: Path, tmp_path: Path) -> None:
    """Rotary embeddings of DeepSeek on a CPU, in vLLM 0.32: no error, other states."""
    config = make(models("deepseek"), rows, target_layer_ids=(0, 1), dtype="bfloat16")
    with pytest.raises(
        InputError, match=r"vLLM 0\.32\.0 does not compute what transformers computes: layer \d: tokens \d+ to \d+"
    ):
        capture(config, tmp_path / "bank")
    assert not list((tmp_path / "bank").glob("data-*"))


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
def test_a_model_whose_states_vllm_does_not_give_is_refused_early(
    models: Callable[[str], Path], rows: Path, tmp_path: Path, name: str
) -> None:
    for run in (capture, estimate_capture):
        with pytest.raises(
            InputError, match=r"cannot be captured with vLLM 0\.32\.0: vLLM's class for it gives out no hidden states"
        ):
            run(make(models(name), rows), tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_two_processes_share_a_model(models: Callable[[str], Path], rows: Path, tmp_path: Path) -> None:
    manifest = capture(make(models("llama"), rows, engine={"tensor_parallel": 2}, max_shard_bytes=5_000_000), tmp_path / "bank")
    assert manifest["engine"]["tensor_parallel"] == 2
    assert manifest["engine"]["probe"]["cosine"] > 1 - 1e-8


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("no_such_argument=1", r"failed: TypeError: .*no_such_argument"),
        ("max_num_batched_tokens=0", r"failed: \w+: "),
    ],
)
def test_an_argument_that_vllm_refuses_is_said(
    models: Callable[[str], Path], rows: Path, tmp_path: Path, option: str, expected: str
) -> None:
    with pytest.raises(InputError, match=rf"vLLM 0\.32\.0 .*: {expected}"):
        capture(make(models("qwen3"), rows, engine={"vllm_options": (option,)}), tmp_path / "bank")
