"""`targets capture --runner vllm` against a stand-in for vLLM, a process of its own: what it gives is kept, whatever it does wrong is one
error, and nothing of it is kept. With the real vLLM: tests/peers/test_vllm.py."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from arrowbank import (
    BuildConfig,
    CaptureConfig,
    EncodeConfig,
    EngineConfig,
    ModelConfig,
    RunOptions,
    ScanConfig,
    TokenizeConfig,
    capture,
    encode,
    estimate_capture,
    open_bank,
    tokenize,
    verify,
)
from arrowbank.cli import main
from arrowbank.errors import BadVector, InputError, PlanMismatch
from arrowbank.models.engine_probe import LENGTHS, MOST_TOKENS, Reference, compare, probe_rows
from tests import tiny
from tests.kill import tree_bytes

LAYERS = (-1, 1)
BLOCKS = 3
STAND_IN = Path(__file__).with_name("vllm_stand_in.py")
Engine = Callable[[str], EngineConfig]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_qwen3(tmp_path_factory.mktemp("vllm") / "model", layers=BLOCKS)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [json.dumps({"input_ids": random.integers(2, 256, 20 + 7 * (i % 5)).tolist()}) for i in range(24)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def states(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = [np.array(json.loads(line)["input_ids"], np.int32) for line in rows.read_text().splitlines()]
    return save_states(tmp_path_factory.mktemp("states"), model, given)


def save_states(folder: Path, model: Path, given: Sequence[np.ndarray]) -> Path:
    """What transformers gives for every row, and for the rows of the probe: as vLLM counts layers, the last before the final norm."""
    whole = tf.AutoModelForCausalLM.from_pretrained(model).eval()
    longest = whole.config.max_position_embeddings
    probe = np.resize(np.concatenate(given), min(LENGTHS[0], longest) + LENGTHS[1])
    caught: list[torch.Tensor] = []
    whole.model.layers[-1].register_forward_hook(lambda module, args, output: caught.append(output))
    for ids in [*given, *np.split(probe, [min(LENGTHS[0], longest)])]:
        with torch.inference_mode():
            found = whole(torch.from_numpy(ids).long()[None], output_hidden_states=True).hidden_states
        every = torch.stack([*(layer[0] for layer in found[:-1]), caught.pop()[0]], dim=1)
        np.save(folder / f"{hashlib.sha1(ids.astype(np.int32).tobytes()).hexdigest()}.npy", every.numpy())
    return folder


@pytest.fixture
def engine(states: Path, tmp_path: Path) -> Engine:
    return partial(stand_in, tmp_path, states)


@pytest.fixture(scope="module")
def whole(model: Path, rows: Path, states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank made in one go."""
    folder = tmp_path_factory.mktemp("whole")
    capture(make(model, rows, stand_in(folder, states, "none")), folder / "bank")
    return folder / "bank"


def stand_in(folder: Path, states: Path, fault: str, **options: Any) -> EngineConfig:
    """A config whose Python is the stand-in with a fault."""
    python = folder / f"python-{fault.replace(' ', '-')}"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "{states}" "{fault}" "$@"\n')
    python.chmod(0o755)
    return EngineConfig(vllm_python=python, **{"vllm_patience": 60, **options})


def make(model: Path, rows: Path, engine: EngineConfig | None = None, **options: Any) -> CaptureConfig:
    given: dict[str, Any] = {"target_layer_ids": LAYERS, "max_shard_bytes": 40_000, "min_loss_tokens": 1, **options}
    if engine is not None:
        given |= {"runner": "vllm", "engine": engine}
    return CaptureConfig(model=ModelConfig(model=str(model), device="cpu"), data=rows, **given)


def leftovers(bank: Path) -> list[str]:
    """What is left of scratch folders."""
    return [
        str(path) for path in bank.rglob("*") if ".vllm." in path.name or path.name.endswith((".safetensors.lock", ".part"))
    ]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_states_are_those_that_transformers_gives(model: Path, rows: Path, engine: Engine, tmp_path: Path, norm: Any) -> None:
    """Exactly the same rows, so nothing but the passes' shapes differs from the transformers runner."""
    manifest = capture(make(model, rows, engine("none"), last_hidden_norm=norm, target_layer_ids=(-1, 0, 2)), tmp_path / "vllm")
    capture(make(model, rows, last_hidden_norm=norm, target_layer_ids=(-1, 0, 2)), tmp_path / "transformers")
    found, expected = open_bank(tmp_path / "vllm"), open_bank(tmp_path / "transformers")
    for row in range(len(expected)):
        mine, theirs = found.read(row), expected.read(row)
        assert np.array_equal(mine.input_ids, theirs.input_ids)
        for bits, true in ((mine.taps, theirs.taps), (mine.last, theirs.last)):
            values, wanted = (torch.from_numpy(one.view(np.int16).copy()).view(torch.bfloat16).float() for one in (bits, true))
            assert torch.allclose(values, wanted, rtol=2**-7, atol=1e-4)
    said = manifest["engine"]
    assert (said["name"], said["version"], said["dtype"], said["tensor_parallel"]) == ("vllm", "9.9.9", "float32", 1)
    assert said["probe"]["cosine"] > 0.999999
    assert said["probe"]["tokens"] == 1024 + LENGTHS[1]
    assert all(check.ok for check in verify(tmp_path / "vllm"))
    assert not leftovers(tmp_path / "vllm")
    assert "engine" not in open_bank(tmp_path / "transformers").manifest


def test_the_engine_is_asked_for_ascending_layers_and_given_what_the_user_says(
    model: Path, rows: Path, states: Path, engine: Engine, tmp_path: Path
) -> None:
    options = {"tensor_parallel": 2, "vllm_options": ("max_num_seqs=8", "quantization=fp8", 'compilation_config={"level": 0}')}
    capture(make(model, rows, engine("none", **options), target_layer_ids=(0, 1, 2)), tmp_path / "bank")
    asked = json.loads((states / "started.json").read_text())
    assert asked["layers"] == [1, 2, 3]
    assert asked["engine"] == {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1025,
        "tensor_parallel_size": 2,
        "trust_remote_code": False,
        "max_num_seqs": 8,
        "quantization": "fp8",
        "compilation_config": {"level": 0},
    }


RUNS_ON = r"Finished shards are kept"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("is killed:2", r"was killed by SIGKILL\. Its last lines:\n.*Loading the model.*\n  Killed process\n" + RUNS_ON),
        ("leaves:2", r"ended with exit code 7\. Its last lines:\n(.*\n)*  EngineDeadError: see above\n" + RUNS_ON),
        ("writes nonsense:2", r"answered b'a line of a library'\."),
        ("leaves a row out:2", r"gave no states for 1 of \d+ rows, row \d+ is the first of them\. Its last lines:"),
        ("no file:2", r"left no readable file of row 0 \(\[Errno 2\] No such file"),
        ("torn file:2", r"left no readable file of row 0 \("),
        ("file elsewhere:2", r'answered \{"row": '),
        ("unknown row:2", r'answered \{"row": '),
        ("a row twice:1", r'answered \{"row": '),
        ("other ids:2", r"gave row 0 states of other tokens than its \d+\."),
        ("fewer tokens:2", r"gave row 0 states of other tokens than its \d+\."),
        (
            "fewer states:2",
            r"gave row 0 states that are torch.float32 of shape \(\d+, 3, 32\), expected float32 of shape \(\d+, 3, 32\)",
        ),
        (
            "fewer layers:2",
            r"gave row 0 states that are torch.float32 of shape \(\d+, 2, 32\), expected float32 of shape \(\d+, 3, 32\)",
        ),
        ("float16:2", r"gave row 0 states that are torch.float16 of shape .*, expected float32"),
        ("no states:2", r"gave row 0 states that are none, expected"),
        ("fails to start", r"failed: ValueError: no memory for the cache, token=\*\*\*\. Its last lines:"),
        ("another version", r"is version 0\.0\.1, and was 9\.9\.9 a moment ago"),
    ],
)
def test_what_an_engine_does_wrong_is_one_error(
    model: Path,
    rows: Path,
    engine: Engine,
    whole: Path,
    tmp_path: Path,
    fault: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Finished shards are kept, nothing of the one at work, and no scratch; an engine that works goes on from there."""
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH")
    with pytest.raises(InputError, match=rf"^vLLM 9\.9\.9 \(.*\): {expected}") as raised:
        capture(make(model, rows, engine(fault)), tmp_path / "bank")
    assert "hf_abcdefghij" not in str(raised.value)
    assert len(list((tmp_path / "bank").glob("data-*.arrow"))) == (1 if fault.endswith(":2") else 0)
    assert not leftovers(tmp_path / "bank")
    capture(make(model, rows, engine("none")), tmp_path / "bank")
    assert tree_bytes(tmp_path / "bank") == tree_bytes(whole)


@pytest.mark.parametrize("fault", ["hangs:1", "does not start"])
def test_an_engine_that_says_nothing_is_given_up(model: Path, rows: Path, engine: Engine, tmp_path: Path, fault: str) -> None:
    with pytest.raises(InputError, match=r"(did not start|gave no states for row \d+ of \d+) within 3 s \(--vllm-patience\)"):
        capture(make(model, rows, engine(fault, vllm_patience=3)), tmp_path / "bank")
    assert not leftovers(tmp_path / "bank")


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "workers"), [(signal.SIGINT, 1), (signal.SIGKILL, 1), (signal.SIGKILL, 2)])
def test_an_engine_ends_with_the_run(
    model: Path, rows: Path, engine: Engine, whole: Path, tmp_path: Path, stop: signal.Signals, workers: int
) -> None:
    """By Ctrl-C, and when the run is killed; its scratch is removed at once, or by the next run."""
    python = engine("hangs:2").vllm_python
    command = [
        *[
            sys.executable,
            "-m",
            "arrowbank",
            "targets",
            "capture",
            "--model",
            str(model),
            "--source",
            str(rows),
            "--layers=-1,1",
        ],
        *["--max-shard-bytes", "40000", "--min-loss-tokens", "1", "--device", "cpu", "--out", str(tmp_path / "bank")],
        *["--runner", "vllm", "--vllm-python", str(python), "--workers", str(workers)],
    ]
    run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list((tmp_path / "bank").glob("data-*.arrow"))) >= workers)
    assert run.poll() is None
    assert len(engines_of(tmp_path)) == workers
    run.send_signal(stop)
    assert run.wait(30) == (130 if stop is signal.SIGINT else -stop)
    wait_until(lambda: not engines_of(tmp_path))
    if stop is signal.SIGINT:
        assert not leftovers(tmp_path / "bank")
    capture(make(model, rows, engine("none")), tmp_path / "bank")
    assert tree_bytes(tmp_path / "bank") == tree_bytes(whole)
    assert not leftovers(tmp_path / "bank")


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    pytest.fail("does not come true within a minute")


def engines_of(folder: Path) -> list[Path]:
    """The processes that run the child's file of a bank in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            command = (process / "cmdline").read_text()
            if str(folder) in command and "arrowbank_vllm_child.py" in command:
                found.append(process)
    return found


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("layers lower:0", r"layer \d: "),
        ("layers reversed:0", r"layer -1: tokens 0 to 15 "),
        (
            "later positions:0",
            r"layer -1: tokens 128 to 143 of a probe row of 1024 tokens have cosine .* \(expected at least 0\.9999",
        ),
        ("noise:0", r"layer -1: tokens 0 to 15 "),
        ("zeros:0", r"layer -1: tokens 0 to 15 of a probe row of 1024 tokens have cosine 0\.00000"),
        ("NaN:0", r"layer -1: NaN or Inf in row 0"),
    ],
)
def test_an_engine_that_computes_something_else_is_refused_before_the_first_shard(
    model: Path, rows: Path, engine: Engine, tmp_path: Path, fault: str, expected: str
) -> None:
    with pytest.raises(InputError, match=rf"vLLM 9\.9\.9 does not compute what transformers computes: {expected}"):
        capture(make(model, rows, engine(fault)), tmp_path / "bank")
    assert not list((tmp_path / "bank").glob("data-*.arrow"))
    assert not leftovers(tmp_path / "bank")


# vectors of texts


@pytest.fixture(scope="module")
def tokens(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    texts = tiny.save_texts_bank(folder / "texts", tiny.texts(40))
    tokenize(TokenizeConfig(tokenizer=str(model)), texts, folder / "tokens")
    return folder / "tokens"


@pytest.fixture(scope="module")
def text_states(model: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bank = open_bank(tokens)
    given = [np.array(ids, np.int32) for ids in bank.slice(0, len(bank), ["input_ids"])["input_ids"].to_pylist()]
    return save_states(tmp_path_factory.mktemp("text-states"), model, given)


def encoding(model: Path, engine: EngineConfig | None = None, pooling: Any = "mean", **options: Any) -> EncodeConfig:
    given: dict[str, Any] = {"shard_rows": 16, **options, **({"runner": "vllm", "engine": engine} if engine else {})}
    return EncodeConfig(model=ModelConfig(model=str(model), device="cpu", pooling=pooling), **given)


@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
def test_vectors_of_texts_are_those_that_transformers_gives(
    model: Path, tokens: Path, text_states: Path, tmp_path: Path, pooling: Any
) -> None:
    manifest = encode(encoding(model, stand_in(tmp_path, text_states, "none"), pooling), tokens, tmp_path / "vllm")
    encode(encoding(model, None, pooling), tokens, tmp_path / "transformers")
    found, expected = (features_of(tmp_path / name) for name in ("vllm", "transformers"))
    assert np.allclose(found, expected, rtol=0, atol=2**-11)
    assert manifest["engine"]["probe"]["cosine"] > 0.999999
    assert all(check.ok for check in verify(tmp_path / "vllm"))
    assert not leftovers(tmp_path / "vllm")


def features_of(folder: Path) -> np.ndarray:
    """All vectors of a bank, one below another."""
    bank = open_bank(folder)
    column = bank.slice(0, len(bank), ["features"])["features"]
    return np.vstack([np.array(row, np.float32).reshape(-1, bank.manifest["hidden_size"]) for row in column.to_pylist()])


def test_an_engine_that_dies_while_it_encodes_is_one_error_and_the_next_run_resumes(
    model: Path, tokens: Path, text_states: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"vLLM 9\.9\.9 .* was killed by SIGKILL"):
        encode(encoding(model, stand_in(tmp_path, text_states, "is killed:2")), tokens, tmp_path / "bank")
    assert len(list((tmp_path / "bank").glob("data-*.arrow"))) == 1
    encode(encoding(model, stand_in(tmp_path, text_states, "none")), tokens, tmp_path / "bank")
    encode(encoding(model, stand_in(tmp_path, text_states, "none")), tokens, tmp_path / "in one go")
    assert tree_bytes(tmp_path / "bank") == tree_bytes(tmp_path / "in one go")
    with pytest.raises(PlanMismatch, match="engine"):
        encode(encoding(model), tokens, tmp_path / "bank")


def test_an_engine_gives_vectors_of_the_last_layer_of_a_model_only(
    model: Path, tokens: Path, text_states: Path, tmp_path: Path
) -> None:
    engine = stand_in(tmp_path, text_states, "none")
    with pytest.raises(InputError, match=r"--layer 1: vLLM gives vectors of the last layer \(3\)"):
        encode(replace(encoding(model, engine), model=ModelConfig(model=str(model), layer=1)), tokens, tmp_path / "bank")
    with pytest.raises(InputError, match=r"--runner vllm: runs a --model \(found --encoder\)"):
        EncodeConfig(encoder="a:b", runner="vllm")
    with pytest.raises(InputError, match="runner"):
        BuildConfig(
            scan=ScanConfig(sources=(("train", "a.jsonl"),)),
            tokenize=TokenizeConfig(tokenizer="m"),
            encode=encoding(model, engine),
        )


def made_reference(rows: int, layers: int, alike: float) -> Reference:
    """Random states in which what a layer adds to the one before it is `alike` of their size."""
    random = np.random.default_rng(0)
    states = []
    for _ in range(rows):
        added = random.normal(size=(64, layers, 32)) * alike
        added[:, 0] = random.normal(size=(64, 32))
        states.append(np.cumsum(added, axis=1).astype(np.float32))
    ids = [np.zeros(64, np.int32)] * rows
    return Reference(ids, tuple(range(layers)), states, torch.nn.Identity())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("alike", [1.0, 0.15])
def test_a_layer_is_told_from_the_next_one_though_they_are_nearly_alike(dtype: str, alike: float) -> None:
    """Of layers that differ by 15 %, cosines are 0.989: in bfloat16 no bound on a cosine alone tells them from each other."""
    reference = made_reference(2, 4, alike)
    rounded = [torch.from_numpy(states).to(getattr(torch, dtype)).float().numpy() for states in reference.states]
    result = compare(reference, [states[:, 1:3] for states in rounded], (1, 2), dtype)
    assert result["cosine"] > {"float32": 1 - 1e-12, "float16": 1 - 1e-6, "bfloat16": 1 - 1e-4}[dtype]
    for shift in (-1, 1):
        with pytest.raises(InputError, match=r"^layer [12]: "):
            compare(reference, [states[:, 1 + shift : 3 + shift] for states in rounded], (1, 2), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("start", [0, 24, 48])
def test_sixteen_wrong_tokens_of_one_layer_of_one_row_are_found(dtype: str, start: int) -> None:
    reference = made_reference(2, 4, 1.0)
    found = [states[:, 1:3].copy() for states in reference.states]
    found[1][start : start + 16, 1] = np.random.default_rng(1).normal(size=(16, 32))
    with pytest.raises(InputError, match=rf"layer 2: tokens {start // 16 * 16} to "):
        compare(reference, found, (1, 2), dtype)


def test_layers_that_add_nothing_are_no_fault() -> None:
    reference = made_reference(2, 4, 0.0)
    assert compare(reference, [states[:, 1:3] for states in reference.states], (1, 2), "float32")["cosine"] > 1 - 1e-12


def test_the_probe_is_as_long_as_the_longest_row() -> None:
    tokens = np.arange(40, dtype=np.int32)
    assert [len(row) for row in probe_rows(tokens, 30, None)] == list(LENGTHS)
    assert [len(row) for row in probe_rows(tokens, 2048, None)] == [2048, LENGTHS[1]]
    assert [len(row) for row in probe_rows(tokens, 100_000, None)] == [MOST_TOKENS, LENGTHS[1]]
    assert [len(row) for row in probe_rows(tokens, 30, 100)] == [100, 100]


def test_NaN_in_a_shard_is_refused_as_from_transformers(model: Path, rows: Path, engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(BadVector, match=r"sample row-.*NaN or Inf \(1 in layer -1\)|sample .*NaN or Inf"):
        capture(make(model, rows, engine("NaN:2")), tmp_path / "bank")
    assert len(list((tmp_path / "bank").glob("data-*.arrow"))) == 1


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("no vllm", r"--runner vllm: .* has no vLLM\. Install it \(pip install vllm\) in an environment of its own"),
        ("broken vllm", r"ended with exit code 1\. Its last lines:\n  ImportError: libcudart"),
        (
            "unknown",
            r"Qwen3ForCausalLM cannot be captured with vLLM 9\.9\.9: vLLM has no class of its own for it\. Use --runner transf",
        ),
        ("without states", r"Qwen3ForCausalLM cannot be captured .*: vLLM's class for it gives out no hidden states"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    model: Path, rows: Path, engine: Engine, tmp_path: Path, fault: str, expected: str
) -> None:
    config = make(model, rows, engine(fault))
    for run in (capture, estimate_capture):
        with pytest.raises(InputError, match=expected):
            run(config, tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_a_python_that_is_none_is_refused(model: Path, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a program")
    for place in (tmp_path / "missing", tmp_path / "notes.txt"):
        with pytest.raises(InputError, match=rf"--vllm-python '{re.escape(str(place))}': cannot be run"):
            capture(make(model, rows, EngineConfig(vllm_python=place)), tmp_path / "bank")


def test_runners_and_engine_options_are_different_plans(model: Path, rows: Path, engine: Engine, tmp_path: Path) -> None:
    capture(make(model, rows, engine("none")), tmp_path / "bank")
    for other in (None, engine("none", vllm_options=("block_size=32",)), engine("none", tensor_parallel=2)):
        with pytest.raises(PlanMismatch, match="engine"):
            capture(make(model, rows, other), tmp_path / "bank")
    memory = engine("none", vllm_options=("gpu_memory_utilization=0.5",))
    assert capture(make(model, rows, memory), tmp_path / "bank")["complete"]


@pytest.mark.slow
def test_every_worker_has_a_child(model: Path, rows: Path, engine: Engine, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vLLM 9\.9\.9 .* was killed by SIGKILL"):
        capture(make(model, rows, engine("is killed:2")), tmp_path / "two", options=RunOptions(workers=2))
    capture(make(model, rows, engine("none")), tmp_path / "two", options=RunOptions(workers=2))
    assert tree_bytes(tmp_path / "two") == tree_bytes(whole)
    assert not leftovers(tmp_path / "two")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--vllm-option", "max_model_len=7"], "--vllm-option max_model_len: `capture` sets this argument of vLLM itself"),
        (["--vllm-option", "eager"], "--vllm-option 'eager': expected NAME=VALUE, as in --vllm-option max_num_seqs=64"),
        (["--load-in-4bit"], "--load-in-4bit (load_in_4bit): has no effect with --runner vllm"),
        (["--max-batch", "4"], "--max-batch (max_batch): has no effect with --runner vllm"),
    ],
)
def test_options_that_the_engine_does_not_take(
    model: Path, rows: Path, tmp_path: Path, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tiny.capture_command(model, rows, tmp_path / "bank")
    assert main([*command, "--runner", "vllm", *options]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--vllm-python", "python"], ["--tensor-parallel", "2"], ["--vllm-option", "max_num_seqs=3"]]
)
def test_options_of_the_engine_need_it(
    model: Path, rows: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = tiny.capture_command(model, rows, tmp_path / "bank")
    assert main([*command, *options]) == 2
    assert f"{options[0]}" in (error := capsys.readouterr().err)
    assert "has no effect with --runner transformers" in error
