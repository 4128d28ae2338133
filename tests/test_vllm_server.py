"""`targets capture --vllm-url` against an HTTP server that answers as vLLM's does. With the real vLLM: tests/peers/test_vllm.py."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.numpy import save_file

from arrowbank import CaptureConfig, EngineConfig, ModelConfig, capture, open_bank
from arrowbank.cli import main
from arrowbank.errors import InputError, PlanMismatch
from tests import tiny

LAYERS = (-1, 1)
KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_qwen3(tmp_path_factory.mktemp("served") / "model", layers=3)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"input_ids": random.integers(2, 256, 20 + 7 * (i % 5)).tolist()}) for i in range(24)]
    path.write_text("\n".join(lines) + "\n")
    return path


Serve = Callable[..., str]


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts a server for the bank `tmp_path / "bank"`, wrong in one way, and gives its address."""
    started: list[ThreadingHTTPServer] = []

    def start(fault: str = "none", max_model_len: int = 2000) -> str:
        handler = type(
            "Handler", (Vllm,), {"model": model, "states": tmp_path / "bank.states", "fault": fault, "most": max_model_len}
        )
        started.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{started[-1].server_port}/"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


class Vllm(BaseHTTPRequestHandler):
    """What vLLM's server does for a request, with a model of transformers behind it."""

    model: Path
    states: Path
    fault: str
    most: int
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.fault == "is none":
            return self.answer({"hello": "world"})
        if self.path == "/version":
            return self.answer({"version": "9.9.9"})
        return self.answer({"data": [{"id": "served", "max_model_len": self.most}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["model"], asked["max_tokens"], self.path) == ("served", 1, "/v1/completions")
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.answer({"error": "Unauthorized"}, 401)
        if self.fault == "fails":
            return self.answer({"error": {"message": "The engine is dead"}}, 500)
        if self.fault == "closes":
            return self.connection.close()
        if self.fault == "answers text":
            return self.answer("an ordinary page")
        if self.fault == "writes nothing":
            return self.answer({"choices": [], "kv_transfer_params": None})
        folder = self.states.parent if self.fault == "writes elsewhere" else self.states
        folder.mkdir(exist_ok=True)
        file = folder / f"cmpl-{os.urandom(4).hex()}.safetensors"
        with self.lock:
            ids = np.array(asked["prompt"], np.int64)
            every = states_of(self.model, ids)
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if self.fault == "never finishes":
            return self.answer({"kv_transfer_params": {"hidden_states_path": str(file)}})
        layers = [0, 2] if self.fault == "other layers" else [0, 2, 3]
        threading.Thread(target=write_later, args=(file, lock, every[:, layers], ids)).start()
        return self.answer({"kv_transfer_params": {"hidden_states_path": str(file)}})

    def answer(self, value: Any, code: int = 200) -> None:
        data = json.dumps(value).encode() if not isinstance(value, str) else value.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def write_later(file: Path, lock: int, states: np.ndarray, ids: np.ndarray) -> None:
    """The answer comes before the file, as from vLLM: part of it, then the rest, then the lock is let go."""
    save_file({"hidden_states": np.ascontiguousarray(states), "token_ids": ids}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    time.sleep(0.02)
    file.write_bytes(whole)
    os.close(lock)


_MODELS: dict[Path, Any] = {}


def states_of(folder: Path, ids: np.ndarray) -> np.ndarray:
    """[S, all layers, H], the last before the final norm."""
    whole = _MODELS.setdefault(folder, tf.AutoModelForCausalLM.from_pretrained(folder).eval())
    caught: list[torch.Tensor] = []
    hook = whole.model.layers[-1].register_forward_hook(lambda module, args, output: caught.append(output))
    with torch.inference_mode():
        found = whole(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([*(layer[0] for layer in found[:-1]), caught[0][0]], dim=1).numpy()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def make(model: Path, rows: Path, url: str | None, **options: Any) -> CaptureConfig:
    engine: dict[str, Any] = {"runner": "vllm", "engine": EngineConfig(vllm_url=url, **options)} if url else {}
    given: dict[str, Any] = {"target_layer_ids": LAYERS, "max_shard_bytes": 40_000, "min_loss_tokens": 1, **engine}
    return CaptureConfig(model=ModelConfig(model=str(model), device="cpu"), data=rows, **given)


def test_states_are_those_that_the_server_writes(model: Path, rows: Path, serve: Serve, tmp_path: Path) -> None:
    manifest = capture(make(model, rows, serve()), tmp_path / "bank")
    capture(make(model, rows, None), tmp_path / "transformers")
    found, expected = open_bank(tmp_path / "bank"), open_bank(tmp_path / "transformers")
    for row in range(len(expected)):
        mine, theirs = found.read(row), expected.read(row)
        for bits, true in ((mine.taps, theirs.taps), (mine.last, theirs.last)):
            values, wanted = (torch.from_numpy(one.view(np.int16).copy()).view(torch.bfloat16).float() for one in (bits, true))
            assert torch.allclose(values, wanted, rtol=2**-7, atol=1e-4)
    assert (manifest["engine"]["version"], manifest["engine"]["device"]) == ("9.9.9", "server")
    assert manifest["engine"]["probe"]["cosine"] > 0.999999
    assert not list((tmp_path / "bank.states").iterdir())
    assert "127.0.0.1" not in (tmp_path / "bank" / "manifest.json").read_text()
    with pytest.raises(PlanMismatch, match="engine"):
        capture(make(model, rows, None), tmp_path / "bank")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (
            "is none",
            r"does not say its version; expected a vLLM server\. Start it with the command that --print-serve-command prints",
        ),
        ("fails", r"refused /v1/completions with 500: .*The engine is dead"),
        ("closes", r"does not answer /v1/completions \(.*\)\. Start it with"),
        ("answers text", r"answered /v1/completions with 'an ordinary page', expected JSON"),
        ("writes nothing", r"vLLM 9\.9\.9 does not write hidden states\. Start it with the command"),
        ("writes elsewhere", r"vLLM 9\.9\.9 writes hidden states to .*, expected .*bank\.states\. Start it"),
        ("never finishes", r"vLLM 9\.9\.9 did not write .*\.safetensors of row 0 within 3 s \(--vllm-patience\)"),
        (
            "other layers",
            r"vLLM 9\.9\.9 gave row 0 states that are torch.float32 of shape \(1024, 2, 32\), expected float32 of shape \(1024, 3, 32\)",
        ),
    ],
)
def test_what_a_server_does_wrong_is_one_error(
    model: Path, rows: Path, serve: Serve, tmp_path: Path, fault: str, expected: str
) -> None:
    with pytest.raises(InputError, match=rf"^--vllm-url http://127\.0\.0\.1:\d+/: {expected}"):
        capture(make(model, rows, serve(fault), vllm_patience=3), tmp_path / "bank")
    assert not list((tmp_path / "bank").glob("data-*.arrow"))


def test_a_server_with_too_little_room_or_another_key_or_none_at_all_is_refused(
    model: Path, rows: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"takes 900 tokens per request, needed are 1025 \(--max-model-len\)"):
        capture(make(model, rows, serve(max_model_len=900)), tmp_path / "bank")
    with pytest.raises(
        InputError, match=r"--vllm-url http://127\.0\.0\.1:1: does not answer /version \(.*refused\)\. Start it with"
    ):
        capture(make(model, rows, "http://127.0.0.1:1"), tmp_path / "other")
    monkeypatch.setenv("VLLM_API_KEY", "another-key-of-this-test")
    with pytest.raises(InputError, match=r"refused /v1/completions with 401: .*Unauthorized") as raised:
        capture(make(model, rows, serve()), tmp_path / "bank")
    assert "another-key" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--vllm-url", "localhost:8000"], "--vllm-url 'localhost:8000': expected an address such as http://127.0.0.1:8000"),
        (
            ["--vllm-url", "http://h", "--tensor-parallel", "2"],
            "--tensor-parallel (tensor_parallel): has no effect with --vllm-url",
        ),
        (["--vllm-url", "http://h", "--vllm-option", "a=1"], "--vllm-option (vllm_options): has no effect with --vllm-url"),
    ],
)
def test_options_that_a_server_does_not_take(
    model: Path, rows: Path, tmp_path: Path, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tiny.capture_command(model, rows, tmp_path / "bank")
    assert main([*command, "--runner", "vllm", *options]) == 2
    assert expected in capsys.readouterr().err


def test_the_command_of_a_server(model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "python"
    said = {"version": "9.9.9", "torch": "2", "device": "cpu", "devices": 1, "gives_states": {"Qwen3ForCausalLM": True}}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    python.chmod(0o755)
    command = [
        "targets",
        "capture",
        "--model",
        str(model),
        "--source",
        str(rows),
        "--layers=-1,1",
        "--out",
        str(tmp_path / "bank"),
    ]
    options = ["--runner", "vllm", "--vllm-python", str(python), "--vllm-option", "max_num_seqs=8", "--max-length", "700"]
    assert main([*command, *options, "--print-serve-command"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "env"
    code = next(Path(word.removeprefix("PYTHONPATH=")) for word in words if word.startswith("PYTHONPATH="))
    assert [path.name for path in code.iterdir()] == ["arrowbank_vllm_child.py"]
    given = dict(pairwise(words))
    assert given[str(python)] == "-m"
    assert (given["--model"], given["--max-model-len"], given["--max-num-seqs"]) == (str(model), "1025", "8")
    extraction = json.loads(given["--speculative-config"])["draft_model_config"]["hf_config"]
    assert extraction == {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    assert json.loads(given["--kv-transfer-config"])["kv_connector_extra_config"]["shared_storage_path"] == str(
        tmp_path / "bank.states"
    )
    assert not (tmp_path / "bank").exists()
    assert main([*command, "--print-serve-command"]) == 2
    assert "--print-serve-command: is for --runner vllm without --vllm-url" in capsys.readouterr().err
