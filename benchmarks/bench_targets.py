"""Target banks: an engine's dump to a DeepSpec cache and to a bank, against `cp` and against the usual script; random samples.

The usual script reads each file with safetensors.torch.load_file and hands tensors through a queue to a thread that writes
`.tobytes()`. Each method runs in a process of its own, which says how long it took and how much memory it had at most above
what its interpreter had with its imports done; all end with an fsync of what they wrote. They take turns; the best time counts.

    python -m benchmarks.bench_targets
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES, TOKENS, LAYERS, WIDTH = 64, 512, 3, 4096  # 1.07 GB
SPEED, MEMORY, COPY, READS = 3.0, 0.25, 1.6, 0.8
TURNS = 3


def make_dump(folder: Path, samples: int = SAMPLES) -> None:
    """A dump of bfloat16 hidden states that no compression could shorten."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    with (folder / "index.jsonl").open("w") as index:
        for sample in range(samples):
            hidden = rng.standard_normal((LAYERS + 1) * TOKENS * WIDTH, dtype=np.float32).view(np.uint16)[1::2]
            parts = {
                "input_ids": ("I64", [TOKENS], rng.integers(0, 150_000, TOKENS).tobytes()),
                "target_hidden_states": ("BF16", [TOKENS, LAYERS, WIDTH], hidden[: LAYERS * TOKENS * WIDTH].tobytes()),
                "target_last_hidden_states": ("BF16", [TOKENS, WIDTH], hidden[LAYERS * TOKENS * WIDTH :].tobytes()),
            }
            name = f"sample-{sample:05d}.safetensors"
            _save(folder / name, parts)
            index.write(json.dumps({"file": name}) + "\n")


def _save(path: Path, parts: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, at = {}, 0
    for name, (dtype, shape, data) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in parts.values()))


def copy(dump: Path, out: Path) -> None:
    """`cp` of the dump, and a sync."""
    subprocess.run(["cp", "-r", dump, out], check=True)
    for path in [*out.iterdir(), out]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def script(dump: Path, out: Path) -> None:
    """The usual script: torch tensors through a queue to a writing thread."""
    import queue
    import threading

    import torch
    from safetensors.torch import load_file

    out.mkdir()
    waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def write() -> None:
        with (out / "shard-00000.bin").open("wb") as file:
            while tensors := waiting.get():
                ids = tensors["input_ids"].to(torch.int32)
                ones = torch.ones(len(ids), dtype=torch.uint8)
                for part in (ids, ones, ones):
                    file.write(part.numpy().tobytes())
                for name in ("target_hidden_states", "target_last_hidden_states"):
                    hidden = tensors[name].to(torch.bfloat16).contiguous()
                    file.write(hidden.view(torch.uint16).numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())

    thread = threading.Thread(target=write)
    thread.start()
    for line in (dump / "index.jsonl").read_text().splitlines():
        waiting.put(load_file(dump / json.loads(line)["file"]))
    waiting.put(None)
    thread.join()


def config() -> Any:
    from arrowbank import ImportConfig

    return ImportConfig(target_model="org/target", target_layer_ids=(1, 17, 32))


def ours(dump: Path, out: Path) -> None:
    """Straight to the cache."""
    from arrowbank import import_to_deepspec

    import_to_deepspec(config(), dump, out)


def ours_bank(dump: Path, out: Path) -> None:
    """To a bank."""
    from arrowbank import import_targets

    import_targets(config(), dump, out)


PEAK = "print([int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
RUN = f"""
import sys, time
from pathlib import Path
import benchmarks.bench_targets as b
way, dump, out = getattr(b, sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
begin = time.perf_counter()
way(dump, out)
print(time.perf_counter() - begin)
{PEAK}
"""


def once(way: Callable[[Path, Path], None], dump: Path, out: Path) -> tuple[float, float, float]:
    """Seconds of the work with its imports, seconds of the whole process, and the most memory it had in bytes."""
    command = [sys.executable, "-c", RUN, way.__name__, str(dump), str(out)]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    whole = time.perf_counter() - begin
    subprocess.run(["rm", "-r", out], check=True)
    seconds, memory = map(float, done.stdout.split())
    return seconds, whole, memory


def bare_memory() -> float:
    """The memory of an interpreter that does nothing."""
    return float(subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout)


def run() -> list[dict[str, Any]]:
    """The rows of this benchmark's table."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        dump = folder / "dump"
        make_dump(dump)
        ways = (ours, ours_bank, copy, script)
        found: dict[str, list[tuple[float, float, float]]] = {way.__name__: [] for way in ways}
        for _ in range(TURNS):
            for way in ways:
                found[way.__name__].append(once(way, dump, folder / "out"))
        size = sum(path.stat().st_size for path in dump.iterdir())
    seconds = {name: min(turn[0] for turn in turns) for name, turns in found.items()}
    bare = bare_memory()
    memory = {name: min(turn[2] for turn in turns) - bare for name, turns in found.items()}

    def row(what: str, way: str, peer: str, goal: object) -> dict[str, Any]:
        rates = size / seconds[way] / 1e6, size / seconds[peer] / 1e6
        return {
            "what": what,
            "ours": rates[0],
            "baseline": rates[1],
            "ratio": rates[0] / rates[1],
            "goal": goal,
            "unit": "MB/s",
        }

    what = f"dump of {size / 1e9:.2f} GB"
    return [
        row(f"{what} to a DeepSpec cache, against load_file, a queue and a writing thread", "ours", "script", SPEED),
        {
            "what": f"{what} to a DeepSpec cache, memory above the interpreter, against the same script",
            "ours": memory["ours"] / 1e6,
            "baseline": memory["script"] / 1e6,
            "ratio": memory["ours"] / memory["script"],
            "goal": f"at most {MEMORY}×",
            "unit": "MB",
        },
        row(f"{what} to a DeepSpec cache, against cp and sync", "ours", "copy", f"{1 / COPY:.3f}"),
        row(f"{what} to a bank, hashed, against cp and sync", "ours_bank", "copy", None),
        *reads(),
    ]


def reads() -> list[dict[str, Any]]:
    """Random samples from `to_torch()`, against copying the same bytes out of the mapped file."""
    from arrowbank import TargetBank, import_targets, open_bank

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_dump(folder / "dump", 32)
        import_targets(config(), folder / "dump", folder / "bank")
        targets = open_bank(folder / "bank", kind=TargetBank).to_torch()
        rows = np.random.default_rng(1).permutation(len(targets)).tolist() * 2
        bytes_a_row = TOKENS * WIDTH * 2 * (LAYERS + 1)
        mapped = np.memmap(folder / "bank" / "data-00000.arrow", np.uint8, mode="r")
        starts = np.linspace(0, len(mapped) - bytes_a_row, len(rows)).astype(np.int64)
        best = {"ours": 0.0, "plain": 0.0}
        for _ in range(TURNS + 1):
            begin = time.perf_counter()
            for row in rows:
                targets[row]
            best["ours"] = max(best["ours"], len(rows) * bytes_a_row / (time.perf_counter() - begin) / 1e6)
            begin = time.perf_counter()
            for start in starts:
                mapped[start : start + bytes_a_row].copy()
            best["plain"] = max(best["plain"], len(rows) * bytes_a_row / (time.perf_counter() - begin) / 1e6)
    return [
        {
            "what": "random samples from to_torch(), against copying as many bytes from the mapped file",
            "ours": best["ours"],
            "baseline": best["plain"],
            "ratio": best["ours"] / best["plain"],
            "goal": READS,
            "unit": "MB/s",
        }
    ]


if __name__ == "__main__":
    for line in run():
        print(line)
