"""What the encode pipeline itself costs: a do-nothing encoder at D = 2560, with hashes, fsync, commit and mirror.

The peer is the least that could be done on the same disk: the same vectors written twice (once for the shards, once for the
mirror) by plain `write` and `fsync`, unhashed. Both run in turns, since a disk's rate is not a constant.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.made_banks import make_text_and_token_banks

WIDTH = 2560
ROWS = 200_000
GOAL_MB_S = 400


class DoNothing:
    """Hands out rows of one array that was made before."""

    hidden_size = WIDTH
    version = "1"

    def __init__(self) -> None:
        self._vectors = np.random.default_rng(0).standard_normal((128, WIDTH), dtype=np.float32)

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return self._vectors[: len(input_ids_NT)]


def pipeline_seconds(folder: Path) -> float:
    from arrowbank import EncodeConfig, encode

    start = time.perf_counter()
    encode(EncodeConfig(encoder=f"{__name__}:DoNothing"), folder / "tokens", folder / "features")
    seconds = time.perf_counter() - start
    shutil.rmtree(folder / "features")
    return seconds


def plain_seconds(folder: Path) -> float:
    """Write the bytes of all vectors twice."""
    block = np.ones((8192, WIDTH), np.float16)
    start = time.perf_counter()
    for copy in range(2):
        with (folder / f"plain-{copy}").open("wb", buffering=0) as file:
            for low in range(0, ROWS, len(block)):
                file.write(block[: ROWS - low].tobytes())
            os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    for copy in range(2):
        (folder / f"plain-{copy}").unlink()
    return seconds


def measure(place: Path, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=place) as made:
        folder = Path(made)
        make_text_and_token_banks(folder, ROWS)
        plain, ours = [], []
        for _ in range(2):
            plain.append(plain_seconds(folder))
            ours.append(pipeline_seconds(folder))
        megabytes = ROWS * WIDTH * 2 / 1e6
        return {
            "what": f"pipeline with a do-nothing encoder, D = 2560, fsync and mirror, {name}",
            "ours": megabytes / min(ours),
            "baseline": megabytes / min(plain),
            "ratio": min(plain) / min(ours),
            "goal": f"{GOAL_MB_S} MB/s of vectors",
            "unit": "MB/s",
        }


def run() -> list[dict[str, Any]]:
    """On this disk, and in memory where the disk is out of the picture."""
    rows = [measure(Path(tempfile.gettempdir()), "on this disk")]
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 4 * ROWS * WIDTH * 2:
        rows.append(measure(memory, "in memory"))
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
