"""vLLM as capture sees it: how it is asked for, whether it is there, which of its options decide bytes, and the files that it writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.files import sweep_temporaries
from arrowbank.bank.manifest import readable_json
from arrowbank.errors import InputError
from arrowbank.models import vllm_child
from arrowbank.models.model_config import ModelConfig
from arrowbank.settings import EXECUTION, Count, Flag, Help, Place, Settings, refuse_unread

if TYPE_CHECKING:
    import torch

    from arrowbank.models import ModelInfo

    Ids = npt.NDArray[np.int32]

GROUP_BYTES = 1 << 29  # of the states of rows that an engine is given at once
MOST_TOKENS = 4096  # of a row of the probe: where the data have longer ones, it is as long as the longest of them, up to this
METHOD = 1  # raise it when the same engine would give other bytes
LAST_LINES, LINE_CHARACTERS = 8, 300  # of a child's output, in an error
OURS = (  # what `capture` decides itself
    *("model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "runner", "convert", "dtype", "seed", "max_model_len"),
    *("trust_remote_code", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_prefix_caching"),
    *("speculative_config", "kv_transfer_config", "hf_token"),  # the manifest has all others
)
# arguments that say where and how fast, not what: another value resumes the same bank
EXECUTION_ONLY = ("gpu_memory_utilization", "kv_cache_memory_bytes", "cpu_offload_gb", "disable_log_stats", "load_format")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """How a serving engine is run. Raises InputError for an option that `capture` sets itself."""

    vllm_python: Annotated[Place, Help("The Python that has vLLM. Default: this one.", "PATH"), EXECUTION] | None = None
    vllm_url: Annotated[str, Help("A running vLLM server; see --print-serve-command.", "URL"), EXECUTION] | None = None
    tensor_parallel: Annotated[Count, Help("GPUs that one vLLM shares a model over.")] = 1
    vllm_options: Annotated[
        tuple[str, ...],
        Flag("--vllm-option"),
        Help("Another argument of vLLM. Repeatable.", "NAME=VALUE", example="max_num_seqs=64"),
    ] = ()
    vllm_patience: Annotated[Count, Help("Seconds of silence after which vLLM is given up.", "SECONDS"), EXECUTION] = 900

    def check(self) -> None:
        if self.vllm_url is not None:
            refuse_unread("--vllm-url", self, ["vllm_python", "tensor_parallel", "vllm_options"])
            if not self.vllm_url.startswith(("http://", "https://")):
                raise InputError(f"--vllm-url {self.vllm_url!r}: expected an address such as http://127.0.0.1:8000.")
        for name in self.arguments:
            if name in OURS:
                raise InputError(f"--vllm-option {name}: `capture` sets this argument of vLLM itself. Leave it out.")

    @property
    def arguments(self) -> dict[str, Any]:
        """`vllm_options` as keyword arguments."""
        found: dict[str, Any] = {}
        for option in self.vllm_options:
            name, equals, value = option.partition("=")
            if not equals or not name.isidentifier():
                raise InputError(f"--vllm-option {option!r}: expected NAME=VALUE, as in --vllm-option max_num_seqs=64.")
            try:
                found[name] = json.loads(value)
            except ValueError:
                found[name] = value
        return found

    @property
    def python(self) -> str:
        given = self.vllm_python or sys.executable
        return str(Path(given).absolute()) if os.sep in given else given  # a child has a folder of its own


@dataclass(frozen=True, kw_only=True)
class Vllm:
    """vLLM as it is found on this machine, for one model and its layers. Everything here pickles.

    layers   block ids that are captured (−1: the embeddings)
    device   what it runs on, "cuda" or "cpu", and how many `devices` of it there are; "server" is one that somebody else has started
    """

    config: EngineConfig
    model: ModelConfig
    info: ModelInfo
    layers: tuple[int, ...]
    norm: str
    version: str
    device: str
    devices: int

    @property
    def workers(self) -> int:
        """How many children the GPUs hold."""
        if self.device != "cuda" or ":" in self.model.device:
            return 1
        return max(1, self.devices // self.config.tensor_parallel)

    @property
    def engine_layers(self) -> list[int]:
        """vLLM's ids of what is asked of it, ascending; the last is what the last block puts out."""
        return sorted({layer + 1 for layer in self.layers} | {self.info.num_layers})

    @property
    def token_bytes(self) -> int:
        """What the states of a token take in a file."""
        return len(self.engine_layers) * self.info.hidden_size * (4 if self.info.dtype == "float32" else 2)

    def scratch_bytes(self, tokens: int) -> int:
        """What the files of states take while the workers are at shards of `tokens` tokens."""
        return self.workers * min(tokens * self.token_bytes, GROUP_BYTES)

    def recipe(self) -> dict[str, Any]:
        """What of the engine decides bytes."""
        if self.device == "server":
            return {"name": "vllm", "version": self.version, "method": METHOD, "server": True}
        options = {name: value for name, value in self.config.arguments.items() if name not in EXECUTION_ONLY}
        parallel = self.config.tensor_parallel
        return {"name": "vllm", "version": self.version, "method": METHOD, "tensor_parallel": parallel, "options": options}

    def facts(self, folder: Path | None = None) -> dict[str, Any]:
        """The manifest's field `engine`. `folder`: where children have left what their probes gave; the worst of them is noted."""
        files = [] if folder is None else sorted(folder.glob("probe-result-*.json"))
        if folder is not None:
            sweep_temporaries(folder, "vllm.*")  # of workers that have ended
        probes = [found for file in files if isinstance(found := readable_json(file), dict)]
        served = self.device == "server"
        return {
            "name": "vllm",
            "version": self.version,
            "device": self.device,
            "dtype": self.info.dtype,
            "tensor_parallel": None if served else self.config.tensor_parallel,
            "options": None if served else self.config.arguments,
            "probe": min(probes, key=lambda one: float(one["cosine"])) if probes else None,
        }


def find_vllm(config: EngineConfig, model: ModelConfig, info: ModelInfo, layers: Sequence[int], norm: str) -> Vllm:
    """vLLM under `config.python`. Raises InputError where it is not there, or does not give out this model's hidden states."""
    where = f"vLLM ({config.python})"
    with child_code() as code:
        command = [config.python, str(code), "describe", info.architecture]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=config.vllm_patience,
                env=child_environment(code),
                check=False,
            )
        except OSError as error:
            raise InputError(
                f"--vllm-python {config.python!r}: cannot be run ({error.strerror}). Give the path of a Python with vLLM."
            ) from error
        except subprocess.TimeoutExpired as error:
            raise InputError(
                f"{where}: did not start within {config.vllm_patience} s. Raise --vllm-patience, or check that environment."
            ) from error
    log = done.stderr.decode(errors="replace")
    answers = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
    answer = json_object(answers[-1]) if answers else None
    if answer is None or "gives_states" not in answer:
        if answer and "No module named 'vllm'" in str(answer.get("failed")):
            raise InputError(
                f"--runner vllm: {config.python} has no vLLM. Install it (pip install vllm) in an environment of its own, and give its "
                "Python as --vllm-python PATH."
            )
        why = answer["failed"] if answer and "failed" in answer else f"ended with exit code {done.returncode}"
        raise InputError(f"{where}: {why}. {last_lines(log)}")
    if not (gives := answer["gives_states"][info.architecture]):
        why = "vLLM has no class of its own for it" if gives is None else "vLLM's class for it gives out no hidden states"
        raise InputError(
            f"model {info.model!r}: {info.architecture} cannot be captured with vLLM {answer['version']}: {why}. Use --runner transformers."
        )
    if config.tensor_parallel > answer["devices"] and answer["device"] == "cuda":
        raise InputError(
            f"--tensor-parallel {config.tensor_parallel}: {where} sees {answer['devices']} GPUs. Give as many or fewer."
        )
    if model.device == "cpu" and answer["device"] != "cpu":
        raise InputError(
            f"--device cpu: {where} runs on {answer['device']}. Leave --device out, or give a Python with vLLM for CPUs."
        )
    return Vllm(
        config=config,
        model=model,
        info=info,
        layers=tuple(layers),
        norm=norm,
        version=answer["version"],
        device=answer["device"],
        devices=answer["devices"],
    )


def read_states(engine: Vllm, file: Path, number: int, row: Ids, failure: Callable[[str], InputError]) -> torch.Tensor:
    """The states of `row` that the engine has written, [S, ids, H]; the file is removed. Raises what `failure` makes of a sentence's end
    where they are not those of the row."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(file.read_bytes())
        file.unlink()
    except (OSError, SafetensorError) as error:
        raise failure(f"left no readable file of row {number} ({error})") from error
    ids, states = tensors.get("token_ids"), tensors.get("hidden_states")
    if ids is None or not np.array_equal(ids.numpy(), row):
        raise failure(f"gave row {number} states of other tokens than its {len(row)}")
    shape = (len(row), len(engine.engine_layers), engine.info.hidden_size)
    if states is None or states.shape != shape or states.dtype is not getattr(torch, engine.info.dtype):
        found = "none" if states is None else f"{states.dtype} of shape {tuple(states.shape)}"
        raise failure(f"gave row {number} states that are {found}, expected {engine.info.dtype} of shape {shape}")
    return states


@contextmanager
def child_code() -> Iterator[Path]:
    """The child's file in a folder where nothing else is, which the processes of vLLM may import from."""
    with tempfile.TemporaryDirectory(prefix="arrowbank-") as folder:
        code = Path(folder) / f"{vllm_child.MODULE}.py"
        shutil.copyfile(vllm_child.__file__, code)
        yield code


def child_environment(code: Path) -> dict[str, str]:
    """The child's variables: ours, without those that lead to our packages."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH")}
    return {**ours, "PYTHONPATH": str(code.parent)}


def json_object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def last_lines(log: str) -> str:
    lines = [line.strip()[:LINE_CHARACTERS] for line in log.splitlines() if line.strip()][-LAST_LINES:]
    return "Its last lines:\n  " + "\n  ".join(lines) if lines else "It printed nothing."
