"""Capture through vLLM: a worker of the pool is a child process with vLLM in it, and what reads, checks and converts its files.

vLLM has an environment of its own, so it runs under `--vllm-python` and shares nothing but files with this process; `vllm_child` is what
runs there. It gives states before the final norm, with layer ids one higher than ours; the norm is applied here. Every child is probed
before its first shard (see `engine_probe`).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.files import publish_json, sweep_temporaries
from arrowbank.bank.manifest import readable_json
from arrowbank.bank.processes import temporary_beside
from arrowbank.errors import InputError
from arrowbank.models.model_config import ModelConfig
from arrowbank.progress import Progress
from arrowbank.settings import EXECUTION, Count, Flag, Help, Place, Settings
from arrowbank.targets import vllm_child
from arrowbank.targets.target_rows import PreparedRows

if TYPE_CHECKING:
    import torch

    from arrowbank.models import ModelInfo
    from arrowbank.targets.engine_probe import Reference

    Ids = npt.NDArray[np.int32]

METHOD = 1  # raise it when the same engine would give other bytes
LAST_LINES, LINE_CHARACTERS = 8, 300  # of a child's output, in an error
OURS = (  # what `capture` decides itself
    *("model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "runner", "convert", "dtype", "seed", "max_model_len"),
    *("trust_remote_code", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_prefix_caching"),
    *("speculative_config", "kv_transfer_config"),
)
# arguments that say where and how fast, not what: another value resumes the same bank
EXECUTION_ONLY = ("gpu_memory_utilization", "kv_cache_memory_bytes", "cpu_offload_gb", "disable_log_stats", "load_format")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """How a serving engine is run. Raises InputError for an option that `capture` sets itself."""

    vllm_python: Annotated[Place, Help("The Python that has vLLM. Default: this one.", "PATH"), EXECUTION] | None = None
    tensor_parallel: Annotated[Count, Help("GPUs that one vLLM shares a model over.")] = 1
    vllm_options: Annotated[
        tuple[str, ...],
        Flag("--vllm-option"),
        Help("Another argument of vLLM. Repeatable.", "NAME=VALUE", example="max_num_seqs=64"),
    ] = ()
    vllm_patience: Annotated[Count, Help("Seconds of silence after which vLLM is given up.", "SECONDS"), EXECUTION] = 900

    def check(self) -> None:
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
    device   what it runs on, "cuda" or "cpu", and how many `devices` of it there are
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

    def scratch_bytes(self, tokens: int) -> int:
        """What the files of states take while the children work on shards of `tokens` tokens."""
        value = 4 if self.info.dtype == "float32" else 2
        return self.workers * tokens * len(self.engine_layers) * self.info.hidden_size * value

    def recipe(self) -> dict[str, Any]:
        """What of the engine decides bytes."""
        options = {name: value for name, value in self.config.arguments.items() if name not in EXECUTION_ONLY}
        parallel = self.config.tensor_parallel
        return {"name": "vllm", "version": self.version, "method": METHOD, "tensor_parallel": parallel, "options": options}

    def facts(self, folder: Path | None = None) -> dict[str, Any]:
        """The manifest's field `engine`. `folder`: where children have left what their probes gave; the worst of them is noted."""
        files = [] if folder is None else sorted(folder.glob("probe-result-*.json"))
        if folder is not None:
            sweep_temporaries(folder, "vllm.*")  # of workers that have ended
        probes = [found for file in files if isinstance(found := readable_json(file), dict)]
        return {
            "name": "vllm",
            "version": self.version,
            "device": self.device,
            "dtype": self.info.dtype,
            "tensor_parallel": self.config.tensor_parallel,
            "options": self.config.arguments,
            "probe": min(probes, key=lambda one: float(one["cosine"])) if probes else None,
        }

    def prepare(self, folder: Path, digest: str, rows: PreparedRows, progress: Progress) -> VllmJob:
        """Have transformers run the probe, where that has not been done for the plan `digest`; the job of the workers."""
        from arrowbank.targets.engine_probe import MOST_TOKENS, make_reference, probe_rows

        path = folder / f"probe-{digest[:16]}.safetensors"
        longest = int(rows.lengths.max())
        probe = probe_rows(rows.first_tokens(MOST_TOKENS), longest, self.info.max_positions)
        if not path.exists():
            progress.message(
                f"vLLM {self.version}: transformers runs {sum(map(len, probe)):,} tokens to hold vLLM's states against"
            )
        make_reference(path, self.model, self.info, self.layers, probe)
        longest = max(longest, *map(len, probe))
        return VllmJob(
            engine=self, folder=folder, reference=path, max_model_len=longest + 1
        )  # room for the one token that it makes


def find_vllm(config: EngineConfig, model: ModelConfig, info: ModelInfo, layers: Sequence[int], norm: str) -> Vllm:
    """vLLM under `config.python`. Raises InputError where it is not there, or does not give out this model's hidden states."""
    where = f"vLLM ({config.python})"
    with _code() as code:
        command = [config.python, str(code), "describe", info.architecture]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=config.vllm_patience,
                env=_environment(code),
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
    answer = _json(answers[-1]) if answers else None
    if answer is None or "gives_states" not in answer:
        if answer and "No module named 'vllm'" in str(answer.get("failed")):
            raise InputError(
                f"--runner vllm: {config.python} has no vLLM. Install it (pip install vllm) in an environment of its own, and give its "
                "Python as --vllm-python PATH."
            )
        why = answer["failed"] if answer and "failed" in answer else f"ended with exit code {done.returncode}"
        raise InputError(f"{where}: {why}. {_last_lines(log)}")
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


@dataclass(frozen=True, kw_only=True)
class VllmJob:
    """How a worker gets its child. Everything here pickles.

    folder          where scratch folders and results of probes go
    reference       the file of the probe
    max_model_len   tokens that a row may have, and one
    """

    engine: Vllm
    folder: Path
    reference: Path
    max_model_len: int

    def load(self, number: int) -> VllmStates:
        """The states that worker `number`'s child gives: started, and probed. Raises InputError."""
        from arrowbank.targets.engine_probe import read_reference

        reference = read_reference(self.reference, self.engine.model, self.engine.info)
        states = VllmStates(self, VllmChild(self, number), reference)
        publish_json(self.folder / f"probe-result-{os.getpid()}-{number}.json", states.probe())
        return states


class VllmStates:
    """(N, T) int32 token ids → (N, T, L + 1, H) bfloat16 hidden states on the CPU: L tapped layers, then the last ones."""

    def __init__(self, job: VllmJob, child: VllmChild, reference: Reference) -> None:
        self._child, self._reference, self._engine = child, reference, job.engine
        ids = self._engine.engine_layers
        self._places = [ids.index(layer + 1) for layer in self._engine.layers]

    def stream(self, batches: Iterable[Ids]) -> Iterator[torch.Tensor]:
        """The hidden states of each batch, in order. All of them are given to the child at once, which schedules them as it likes.

        Raises InputError where the child dies, hangs, or gives anything else than the states of each row.
        """
        import torch

        plan = list(batches)
        files = self._child.run([row for batch in plan for row in batch])
        with torch.inference_mode():
            for batch in plan:
                yield torch.stack([self._placed(next(files)) for _ in batch])
        next(files, None)  # waits until the child says that it has finished

    def probe(self) -> dict[str, Any]:
        """Hold the child's states against transformers': what `compare` gives. Raises InputError."""
        from arrowbank.targets.engine_probe import compare

        found = [states.float().numpy() for states in self._child.run(self._reference.rows)]
        layers = [layer - 1 for layer in self._engine.engine_layers]
        try:
            result = compare(self._reference, found, layers, self._engine.info.dtype)
        except InputError as error:
            raise InputError(
                f"model {self._engine.info.model!r}: vLLM {self._engine.version} does not compute what transformers computes: {error} "
                "Nothing was kept. A kernel of vLLM may be wrong on this device: try another version, device or --dtype, or use "
                "--runner transformers."
            ) from None
        return {**result, "block_size": self._child.block_size}

    def _placed(self, states: torch.Tensor) -> torch.Tensor:
        """[S, ids, H] as the engine gives them → [S, L + 1, H]."""
        import torch

        last = states[:, -1:]
        if self._engine.norm == "post":
            last = self._reference.norm(last.transpose(0, 1)).transpose(0, 1)
        return torch.cat([states[:, self._places], last], dim=1).to(torch.bfloat16)


class VllmChild:
    """A child process with vLLM, its scratch folder, and the protocol of `vllm_child`. It ends with this object.

    Raises InputError, with the last lines that the child has printed, for whatever it does not do.
    """

    def __init__(self, job: VllmJob, number: int) -> None:
        self._engine, self._patience = job.engine, job.engine.config.vllm_patience
        sweep_temporaries(job.folder, "vllm.*")  # of runs that were killed
        self._scratch = temporary_beside(job.folder.absolute() / "vllm")
        self._states = self._scratch / "states"
        self._states.mkdir(parents=True)
        code = self._scratch / f"{vllm_child.MODULE}.py"
        shutil.copyfile(vllm_child.__file__, code)
        self._log, self._buffer = self._scratch / "log", b""
        environment = (
            _environment(code) | self._gpus(number) | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", _threads())}
        )
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [self._engine.config.python, str(code), "serve"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._scratch,
                    env=environment,
                    start_new_session=True,  # what vLLM starts is ended with it
                )
            except OSError as error:
                raise InputError(f"--vllm-python {self._engine.config.python!r}: cannot be run ({error.strerror}).") from error
        weakref.finalize(self, _end, self._process, self._scratch)
        model, info = self._engine.model, self._engine.info
        arguments = {
            "model": str(info.folder.absolute()),
            "dtype": info.dtype,
            "max_model_len": job.max_model_len,
            "tensor_parallel_size": self._engine.config.tensor_parallel,
            "trust_remote_code": model.trust_remote_code,
            **self._engine.config.arguments,
        }
        self._send({"engine": arguments, "layers": self._engine.engine_layers, "folder": str(self._states)})
        ready = self._receive("did not start", starting=True).get("ready")
        if not isinstance(ready, dict):
            raise self._failure("answered something else than that it is ready")
        if ready.get("version") != self._engine.version:
            raise self._failure(f"is version {ready.get('version')}, and was {self._engine.version} a moment ago")
        self.block_size = ready.get("block_size")

    def run(self, rows: Sequence[Ids]) -> Iterator[torch.Tensor]:
        """The states of `rows` as the engine gives them, [S, ids, H] each, in order; a file is removed when it is read."""
        import torch
        from safetensors.torch import save_file

        request = self._scratch / "rows.safetensors"
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        flat = np.concatenate(rows).astype(np.int32)
        save_file({"input_ids": torch.from_numpy(flat), "offsets": torch.from_numpy(offsets)}, request)
        self._send({"rows": str(request)})
        arrived: dict[int, Path] = {}
        for number, row in enumerate(rows):
            while number not in arrived:
                answer = self._receive(f"gave no states for row {number} of {len(rows)}")
                if "done" in answer:
                    missing = len(rows) - number - len(arrived)
                    raise self._failure(f"gave no states for {missing} of {len(rows)} rows, row {number} is the first of them")
                which, file = answer.get("row"), Path(str(answer.get("file")))
                if (
                    not isinstance(which, int)
                    or not number <= which < len(rows)
                    or which in arrived
                    or file.parent != self._states
                ):
                    raise self._failure(f"answered {json.dumps(answer)[:LINE_CHARACTERS]}")
                arrived[which] = file
            yield self._read(arrived.pop(number), number, row)
        if "done" not in (answer := self._receive("did not say that it has finished")):
            raise self._failure(f"answered {json.dumps(answer)[:LINE_CHARACTERS]}")

    def _read(self, file: Path, number: int, row: Ids) -> torch.Tensor:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(file.read_bytes())
            file.unlink()
        except (OSError, SafetensorError) as error:
            raise self._failure(f"left no readable file of row {number} ({error})") from error
        ids, states = tensors.get("token_ids"), tensors.get("hidden_states")
        if ids is None or not np.array_equal(ids.numpy(), row):
            raise self._failure(f"gave row {number} states of other tokens than its {len(row)}")
        shape = (len(row), len(self._engine.engine_layers), self._engine.info.hidden_size)
        if states is None or states.shape != shape or states.dtype is not getattr(torch, self._engine.info.dtype):
            found = "none" if states is None else f"{states.dtype} of shape {tuple(states.shape)}"
            raise self._failure(
                f"gave row {number} states that are {found}, expected {self._engine.info.dtype} of shape {shape}"
            )
        return states

    def _gpus(self, number: int) -> dict[str, str]:
        """Which GPUs child `number` sees."""
        if self._engine.device != "cuda":
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(self._engine.devices)]
        size, named = self._engine.config.tensor_parallel, self._engine.model.device.partition(":")[2]
        first = int(named) if named else number % self._engine.workers * size
        if first + size > len(names):
            raise InputError(
                f"--device {self._engine.model.device}: vLLM needs GPUs {first} to {first + size - 1} of {len(names)}."
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + size])}

    def _send(self, request: dict[str, Any]) -> None:
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(json.dumps(request).encode() + b"\n")
                pipe.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None

    def _receive(self, otherwise: str, *, starting: bool = False) -> dict[str, Any]:
        """The next answer. While the engine starts, what it prints is a sign of life, too."""
        pipe = self._process.stdout
        handle = pipe.fileno() if pipe is not None else -1
        printed, deadline = self._log.stat().st_size, time.monotonic() + self._patience
        while b"\n" not in self._buffer:
            if select.select([handle], [], [], min(5.0, max(0.0, deadline - time.monotonic())))[0]:
                if not (some := os.read(handle, 1 << 16)):
                    raise self._failure("ended")
                self._buffer += some
                continue
            if starting and self._log.stat().st_size > printed:
                printed, deadline = self._log.stat().st_size, time.monotonic() + self._patience
            if time.monotonic() >= deadline:
                raise self._failure(f"{otherwise} within {self._patience} s (--vllm-patience)")
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = _json(line.decode(errors="replace"))
        if answer is None:
            raise self._failure(f"answered {line[:LINE_CHARACTERS]!r}")
        if "failed" in answer:
            raise self._failure(f"failed: {str(answer['failed']).rstrip('.')[:LINE_CHARACTERS]}")
        return answer

    def _failure(self, what: str) -> InputError:
        """The error of a child that did `what`; it is ended."""
        if what == "ended":
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            code = self._process.poll()
            what = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        log = self._log.read_bytes()[-(1 << 16) :].decode(errors="replace")
        _end(self._process, self._scratch)
        return InputError(
            f"vLLM {self._engine.version} ({self._engine.config.python}): {what}. {_last_lines(log)}\nFinished shards are kept: run the "
            "same command again, with other --vllm-option values where memory ran out, or start over with --runner transformers."
        )


def _end(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """End a child and all that it has started, and remove its scratch folder."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _code() -> Iterator[Path]:
    """The child's file in a folder where nothing else is, which the processes of vLLM may import from."""
    with tempfile.TemporaryDirectory(prefix="arrowbank-") as folder:
        code = Path(folder) / f"{vllm_child.MODULE}.py"
        shutil.copyfile(vllm_child.__file__, code)
        yield code


def _environment(code: Path) -> dict[str, str]:
    """The child's variables: ours, without those that lead to our packages."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH")}
    return {**ours, "PYTHONPATH": str(code.parent)}


def _threads() -> str:
    import torch

    return str(torch.get_num_threads())


def _json(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _last_lines(log: str) -> str:
    lines = [line.strip()[:LINE_CHARACTERS] for line in log.splitlines() if line.strip()][-LAST_LINES:]
    return "Its last lines:\n  " + "\n  ".join(lines) if lines else "It printed nothing."
