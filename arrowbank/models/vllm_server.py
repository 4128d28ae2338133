"""Capture through a vLLM server that the user has started: requests over HTTP, files of states in a folder that both can reach.

The server must have been started to write hidden states: `serve_command` makes the command. It writes to a folder beside the bank, and
nothing else that a server names is read.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from arrowbank.errors import InputError
from arrowbank.models import vllm_child
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.vllm_engine import LINE_CHARACTERS, EngineConfig, Vllm, json_object, read_states

if TYPE_CHECKING:
    import torch

    from arrowbank.models import ModelInfo

    Ids = npt.NDArray[np.int32]

AT_A_TIME = 32  # requests that the server has
STARTED = "Start it with the command that --print-serve-command prints for the same --out."


def states_folder(out: str | Path) -> Path:
    """Where a server writes states for the bank `out`."""
    out = Path(out).absolute()
    return out.with_name(f"{out.name}.states")


def serve_command(vllm: Vllm, out: str | Path, max_model_len: int) -> str:
    """A shell command that starts a server for `VllmServer`. On a CPU, the code that it needs is written to its folder."""
    states = states_folder(out)
    variables = dict(vllm_child.settings(vllm.device))
    if vllm.device == "cpu":
        (states / "code").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(vllm_child.__file__, states / "code" / f"{vllm_child.MODULE}.py")
        variables["PYTHONPATH"] = str(states / "code")
    arguments: dict[str, Any] = {
        "model": str(vllm.info.folder.absolute()),
        "host": "127.0.0.1",
        "dtype": vllm.info.dtype,
        "max_model_len": max_model_len,
        "tensor_parallel_size": vllm.config.tensor_parallel,
        "trust_remote_code": vllm.model.trust_remote_code,
        **vllm_child.extraction(vllm.device, vllm.engine_layers, str(states)),
        **vllm.config.arguments,
    }
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), vllm.config.python]
    words += ["-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


def find_server(config: EngineConfig, model: ModelConfig, info: ModelInfo, layers: Sequence[int], norm: str) -> Vllm:
    """The vLLM at `config.vllm_url`. Raises InputError where none answers."""
    version = ask(config, "/version").get("version")
    if not isinstance(version, str):
        raise InputError(f"--vllm-url {config.vllm_url}: does not say its version; expected a vLLM server. {STARTED}")
    return Vllm(
        config=config,
        model=model,
        info=info,
        layers=tuple(layers),
        norm=norm,
        version=version,
        device="server",
        devices=1,
    )


def ask(config: EngineConfig, path: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the server at `config.vllm_url` answers. Raises InputError."""
    url = f"{str(config.vllm_url).rstrip('/')}{path}"
    data = None if request is None else json.dumps(request).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **_key()})
        with opener.open(asked, timeout=config.vllm_patience) as response:
            text = response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:LINE_CHARACTERS]
        raise InputError(f"--vllm-url {config.vllm_url}: refused {path} with {error.code}: {said}") from error
    except (
        OSError,
        ValueError,
    ) as error:  # a timeout and a broken connection are OSErrors, an address that is none a ValueError
        reason = getattr(error, "reason", None) or error
        raise InputError(f"--vllm-url {config.vllm_url}: does not answer {path} ({reason}). {STARTED}") from error
    answer = json_object(text)
    if answer is None:
        raise InputError(
            f"--vllm-url {config.vllm_url}: answered {path} with {text[:LINE_CHARACTERS]!r}, expected JSON. {STARTED}"
        )
    return answer


def _key() -> dict[str, str]:
    """The header for a server with `--api-key`, from the variable that vLLM itself reads."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


class VllmServer:
    """A server, as `VllmChild` is a child. Raises InputError for whatever it does not do."""

    block_size = None  # no server says it

    def __init__(self, engine: Vllm, states: Path, max_model_len: int) -> None:
        self._engine, self._states = engine, states
        models = ask(engine.config, "/v1/models").get("data")
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        self._name, most = first.get("id"), first.get("max_model_len")
        if not isinstance(most, int) or most < max_model_len:
            raise self._failure(f"takes {most} tokens per request, needed are {max_model_len} (--max-model-len)")

    def run(self, rows: Sequence[Ids]) -> Iterator[torch.Tensor]:
        """The states of `rows` as the engine gives them, [S, ids, H] each, in order; a file is removed when it is read."""
        from arrowbank.models.passes import in_flight

        with ThreadPoolExecutor(AT_A_TIME, "vllm") as pool:
            files = in_flight(
                enumerate(rows),
                lambda one: pool.submit(self._written, *one),
                Future.result,
                ahead=AT_A_TIME,
                cancel=Future.cancel,
            )
            for number, (row, file) in enumerate(zip(rows, files, strict=True)):
                yield read_states(self._engine, file, number, row, self._failure)

    def _written(self, number: int, row: Ids) -> Path:
        """The complete file of a row's states."""
        request = {"model": self._name, "prompt": row.tolist(), "max_tokens": 1, "temperature": 0}
        given = ask(self._engine.config, "/v1/completions", request).get("kv_transfer_params")
        path = given.get("hidden_states_path") if isinstance(given, dict) else None
        if not isinstance(path, str):
            raise self._failure(f"does not write hidden states. {STARTED}")
        file, deadline = Path(path), time.monotonic() + self._engine.config.vllm_patience
        if file.parent != self._states:
            raise self._failure(f"writes hidden states to {file.parent}, expected {self._states}. {STARTED}")
        while not vllm_child.complete(file):
            if time.monotonic() >= deadline:
                raise self._failure(
                    f"did not write {file} of row {number} within {self._engine.config.vllm_patience} s (--vllm-patience)"
                )
            time.sleep(0.01)
        return file

    def _failure(self, what: str) -> InputError:
        return InputError(
            f"--vllm-url {self._engine.config.vllm_url}: vLLM {self._engine.version} {what.rstrip('.')}. Finished shards are kept."
        )
