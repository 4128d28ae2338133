"""The child process in which vLLM runs: token rows in, files of hidden states out.

A copy of this file is run by the Python that has vLLM, which need not have arrowbank: it imports vLLM, torch, safetensors and the
standard library. `vllm_runner` is the other side.

    describe ARCHITECTURE…   one JSON line: versions, devices, and whether each architecture gives out hidden states
    serve                    a JSON line per request on standard input, JSON lines as answers on standard output

Requests of `serve`. The first one starts the engine; the process ends with its input.

    {"engine": {…}, "layers": [1, 3], "folder": DIR}    arguments of `vllm.LLM`, vLLM's layer ids, where files of states go
    {"rows": FILE}                                      a safetensors file: input_ids [K], offsets [N + 1]

Answers. Whatever else vLLM prints goes to standard error.

    {"ready": {…}}              the engine is up
    {"row": 0, "file": FILE}    a safetensors file: hidden_states [S, layers, H], token_ids [S]; it is complete
    {"done": N}                 no more rows follow; a row without a file was not written
    {"failed": REASON}          an exception; its traceback is on standard error
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

SECONDS_TO_WRITE = 120  # what the engine may take to write a file after it has said that the row is finished
MODULE = "arrowbank_vllm_child"  # under this name the processes of vLLM import this file


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM and its libraries print to standard output
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        sys.__excepthook__(kind, error, trace)
        say(answers, failed=f"{kind.__name__}: {error}")

    sys.excepthook = tell
    if sys.argv[1] == "describe":
        say(answers, **description(sys.argv[2:]))
    else:
        serve(answers)


def say(answers: Any, **answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")


def settings(device: str) -> dict[str, str]:
    """The variables that vLLM reads and that this needs."""
    found = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    if device == "cpu":
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "4"}
    return found


def set_defaults() -> str:
    """Set these where the user has not set them; "cuda" or "cpu"."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in settings(device).items():
        os.environ.setdefault(name, value)
    # The scheduler in this process has all rows before its first step: its batches, and so the bytes, do not depend on timing.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return device


def extraction(device: str, layers: list[int], folder: str) -> dict[str, Any]:
    """The arguments with which vLLM writes the states of `layers` to files in `folder`."""
    connector: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder, "use_synchronization_lock": True},
    }
    if device == "cpu":
        connector |= {"kv_connector": "HostHiddenStatesConnector", "kv_connector_module_path": MODULE}
    return {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # otherwise a row's states may come from another row's pass
        "seed": 0,
        "enforce_eager": device == "cpu",
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": connector,
    }


def description(architectures: list[str]) -> dict[str, Any]:
    """What this environment has. `gives_states`: architecture → whether vLLM's class gives out hidden states; null: it has none."""
    device = set_defaults()
    import torch
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    gives = {}
    for name in architectures:
        known = ModelRegistry.models.get(name)
        gives[name] = None if known is None else bool(supports_eagle3(known.load_model_cls()))
    devices = torch.cuda.device_count() if device == "cuda" else 1
    return {
        "version": vllm_version(),
        "torch": str(torch.__version__),
        "device": device,
        "devices": devices,
        "gives_states": gives,
    }


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def serve(answers: Any) -> None:
    requests: list[str] = []
    there = threading.Condition()
    threading.Thread(target=receive, args=(requests, there), daemon=True).start()
    engine = None
    while True:
        with there:
            while not requests:
                there.wait()
            request = json.loads(requests.pop(0))
        if engine is None:
            engine = Engine(request)
            say(answers, ready=engine.facts())
        else:
            engine.run(Path(request["rows"]), answers)


def receive(requests: list[str], there: threading.Condition) -> None:
    """Take requests in; when there can be no more, end this process and those that vLLM has started, whatever they are doing."""
    for line in sys.stdin:
        with there:
            requests.append(line)
            there.notify()
    os.killpg(0, signal.SIGKILL)  # the parent made this process the leader of a group of its own


class Engine:
    """vLLM with hidden states of `layers` going to files in `folder`."""

    def __init__(self, request: dict[str, Any]) -> None:
        device = set_defaults()
        from vllm import LLM, SamplingParams

        self.llm = LLM(**{**extraction(device, request["layers"], request["folder"]), **request["engine"]})
        self.params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def facts(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        return {"version": vllm_version(), "block_size": config.cache_config.block_size}

    def run(self, rows: Path, answers: Any) -> None:
        """Have the states of `rows` written, and name each file when it is complete."""
        from safetensors.torch import load_file
        from vllm import TokensPrompt

        given = load_file(rows)
        ids, offsets = given["input_ids"].tolist(), given["offsets"].tolist()
        engine = self.llm.llm_engine
        for row, (start, stop) in enumerate(pairwise(offsets)):
            engine.add_request(str(row), TokensPrompt(prompt_token_ids=ids[start:stop]), self.params)
        written: dict[int, Path] = {}  # finished rows whose files may still be incomplete
        deadline = 0.0
        while engine.has_unfinished_requests() or (written and time.monotonic() < deadline):
            for output in engine.step():
                deadline = time.monotonic() + SECONDS_TO_WRITE
                if output.finished and output.kv_transfer_params:
                    written[int(output.request_id)] = Path(output.kv_transfer_params["hidden_states_path"])
            for row in [row for row, file in written.items() if complete(file)]:
                say(answers, row=row, file=str(written.pop(row)))
            if written and not engine.has_unfinished_requests():
                time.sleep(0.002)  # the engine is stepped on: it writes the last files after its last row
        say(answers, done=len(offsets) - 1)


def complete(file: Path) -> bool:
    """Whether the writer of a file has finished: it holds a lock on another one until then."""
    lock = file.with_name(file.name + ".lock")
    try:
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    if not file.exists():
        return False
    lock.unlink()
    return True


def __getattr__(name: str) -> Any:
    """The connector, for vLLM, which imports it from this module: its base class is not there before vLLM is."""
    if name != "HostHiddenStatesConnector":
        raise AttributeError(name)
    import torch
    from safetensors.torch import save_file
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
        extract_from_kv_cache,
    )

    class Written:
        """Stands for the event that tells when a copy from the GPU is complete."""

        def query(self) -> bool:
            return True

    class HostHiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]  # of a package without types here
        """vLLM's own, for a CPU: that one copies through pinned memory and CUDA streams."""

        def _submit_async_write(self, pending: Any) -> None:
            if not self._is_tp_rank_zero:
                return
            blocks = torch.tensor(pending.block_ids, dtype=torch.long)
            slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
            states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0])
            file = Path(pending.filename)
            part = file.with_suffix(".part")
            try:
                save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, part)
                part.rename(file)
            finally:
                self._req_copy_events[pending.req_id] = Written()
                if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
                    os.close(lock)

    globals()[name] = HostHiddenStatesConnector
    return HostHiddenStatesConnector


if __name__ == "__main__":
    main()
