"""A child process with vLLM in it: started, asked for the states of rows, and ended with whatever it has started.

vLLM has an environment of its own, so it runs under `--vllm-python` and shares nothing but files with this process; `vllm_child` is what
runs there.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.files import sweep_temporaries
from arrowbank.bank.processes import temporary_beside
from arrowbank.errors import InputError
from arrowbank.models import vllm_child
from arrowbank.models.vllm_engine import LINE_CHARACTERS, Vllm, child_environment, json_object, last_lines, read_states

if TYPE_CHECKING:
    import torch

    Ids = npt.NDArray[np.int32]


class VllmChild:
    """A child process with vLLM, its scratch folder, and the protocol of `vllm_child`. It ends with this object.

    Raises InputError, with the last lines that the child has printed, for whatever it does not do.
    """

    def __init__(self, engine: Vllm, folder: Path, max_model_len: int, number: int) -> None:
        self._engine, self._patience = engine, engine.config.vllm_patience
        sweep_temporaries(folder, "vllm.*")  # of runs that were killed
        self._scratch = temporary_beside(folder.absolute() / "vllm")
        self._states = self._scratch / "states"
        self._states.mkdir(parents=True)
        code = self._scratch / f"{vllm_child.MODULE}.py"
        shutil.copyfile(vllm_child.__file__, code)
        self._log, self._buffer = self._scratch / "log", b""
        environment = (
            child_environment(code) | self._gpus(number) | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", _threads())}
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
                shutil.rmtree(self._scratch, ignore_errors=True)
                raise InputError(f"--vllm-python {self._engine.config.python!r}: cannot be run ({error.strerror}).") from error
        self._end = weakref.finalize(self, _end, self._process, self._scratch)
        model, info = self._engine.model, self._engine.info
        arguments = {
            "model": str(info.folder.absolute()),
            "dtype": info.dtype,
            "max_model_len": max_model_len,
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
            yield read_states(self._engine, arrived.pop(number), number, row, self._failure)
        if "done" not in (answer := self._receive("did not say that it has finished")):
            raise self._failure(f"answered {json.dumps(answer)[:LINE_CHARACTERS]}")

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
        answer = json_object(line.decode(errors="replace"))
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
        self._end()
        return InputError(
            f"vLLM {self._engine.version} ({self._engine.config.python}): {what}. {last_lines(log)}\nFinished shards are kept: run the "
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


def _threads() -> str:
    import torch

    return str(torch.get_num_threads())
