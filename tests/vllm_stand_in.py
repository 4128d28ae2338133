"""Stands for a Python with vLLM: a process of its own that speaks the file protocol of `arrowbank/models/vllm_child.py`, right or wrong.

    stand_in.py STATES FAULT CODE describe ARCHITECTURE
    stand_in.py STATES FAULT CODE serve

STATES is a folder with a .npy file [S, all layers, H] for each row that may come, named by the sha1 of its ids; layer 0 is the embeddings,
as vLLM counts. FAULT is NAME or NAME:N, then in the N-th request for rows (0 is the probe). It imports neither arrowbank nor torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

STATES, FAULT = Path(sys.argv[1]), sys.argv[2].partition(":")


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def states_of(ids: np.ndarray) -> np.ndarray:
    return np.load(STATES / f"{hashlib.sha1(ids.astype(np.int32).tobytes()).hexdigest()}.npy")


def write(row: int, ids: np.ndarray, layers: list[int], folder: str, fault: str) -> Path:
    """The file of a row, with what is wrong with it."""
    every, ids = states_of(ids), ids.astype(np.int64)
    if fault == "layers lower":
        layers = [max(layer - 1, 0) for layer in layers]
    if fault == "layers reversed":
        layers = layers[::-1]
    states = every[:, layers]
    if fault == "later positions":  # of a wrong kernel: what is beyond a block of the cache
        states[128:] = states[128:][::-1]
    if fault == "noise":
        states = states + np.random.default_rng(0).normal(size=states.shape).astype(states.dtype) * 0.3 * states.std()
    if fault == "zeros":
        states = np.zeros_like(states)
    if fault == "NaN":
        states[-1, 0, 0] = np.nan
    if fault == "other ids" and len(ids) > 1:
        ids[1] = (ids[1] + 1) % 256
    if fault == "fewer tokens":
        ids, states = ids[:-1], states[:-1]
    if fault == "fewer states":
        states = states[:-1]
    if fault == "fewer layers":
        states = states[:, :-1]
    if fault == "float16":
        states = states.astype(np.float16)
    path = Path(folder) / f"{row}-{os.urandom(2).hex()}.safetensors"
    tensors = {"hidden_states": np.ascontiguousarray(states), "token_ids": ids}
    if fault == "no states":
        del tensors["hidden_states"]
    save_file(tensors, path)
    if fault == "torn file":
        os.truncate(path, path.stat().st_size // 2)
    if fault == "no file":
        path.unlink()
    if fault == "file elsewhere":
        path = path.rename(Path(folder).parent / path.name)
    return path


def receive(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os.killpg(0, signal.SIGKILL)  # as the real one: it ends with its input, whatever it is doing


def serve() -> None:
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=receive, args=(requests,), daemon=True).start()
    start = json.loads(requests.get())
    (STATES / "started.json").write_text(json.dumps(start))
    print("Loading the model: 1 of 1", file=sys.stderr, flush=True)
    if FAULT[0] == "does not start":
        time.sleep(3600)
    if FAULT[0] == "fails to start":
        print("ValueError: no memory for the cache", file=sys.stderr, flush=True)
        say(failed="ValueError: no memory for the cache, token=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH")
        sys.exit(1)
    say(ready={"version": "0.0.1" if FAULT[0] == "another version" else "9.9.9", "block_size": 128})
    for number, line in enumerate(iter(requests.get, None)):
        given = load_file(json.loads(line)["rows"])
        rows = np.split(given["input_ids"], given["offsets"][1:-1])
        fault = FAULT[0] if not FAULT[2] or number == int(FAULT[2]) else ""
        order = range(len(rows)) if number % 2 else reversed(range(len(rows)))  # vLLM finishes rows as it likes
        for row in order:
            if row == len(rows) // 2:
                if fault == "is killed":
                    print("Killed process", file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "leaves":
                    print("EngineDeadError: see above", file=sys.stderr, flush=True)
                    sys.exit(7)
                if fault == "hangs":
                    time.sleep(3600)
                if fault == "writes nonsense":
                    print("a line of a library", flush=True)
                if fault == "leaves a row out":
                    continue
            path = write(row, rows[row], start["layers"], start["folder"], fault)
            say(row=row if fault != "unknown row" else row + len(rows), file=str(path))
            if fault == "a row twice":
                say(row=row, file=str(path))
        say(done=len(rows))


if sys.argv[4] == "serve":
    serve()
elif FAULT[0] == "no vllm":
    say(failed="ModuleNotFoundError: No module named 'vllm'")
    sys.exit(1)
elif FAULT[0] == "broken vllm":
    print("ImportError: libcudart.so.13: cannot open shared object file", file=sys.stderr)
    sys.exit(1)
else:
    gives = {"unknown": None, "without states": False}.get(FAULT[0], True)
    say(version="9.9.9", torch="2", device="cpu", devices=1, gives_states={sys.argv[5]: gives})
