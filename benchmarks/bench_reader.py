"""Opening a bank of two million rows, finding texts in it, and fetching random rows of a wide one.

Opening and finding run in fresh processes, whose time and memory begin after the imports. Random rows are compared with a bare
memory map of the same matrix, read in the same order in the same run, warm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from arrowbank import FeatureBank, open_bank
from benchmarks.made_banks import make_feature_bank

ROWS = 2_000_000
LOOKED_UP = 100_000
WIDE_ROWS, WIDTH = 200_000, 2560
FETCHED = 1024

OPENED = """
import json, sys, time
from arrowbank import open_bank
from benchmarks.made_banks import text_of
texts = [text_of(row * 19) for row in range(int(sys.argv[2]))]
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
start = time.perf_counter()
bank = open_bank(sys.argv[1])
opened = time.perf_counter() - start
memory = resident() - before
start = time.perf_counter()
rows = bank.rows(texts)
found = time.perf_counter() - start
assert rows.tolist() == [row * 19 for row in range(len(texts))]
print(json.dumps({"opened": opened, "memory": memory, "found": found}))
"""


def opening(folder: Path) -> dict[str, float]:
    command = [sys.executable, "-c", OPENED, str(folder), str(LOOKED_UP)]
    runs = [json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(3)]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def fetch_seconds(folder: Path) -> dict[str, float]:
    """The median of many fetches of 1,024 random rows: bare map, mirror, Arrow shards. Each way has a mapping of its own."""
    bank = open_bank(folder)
    assert isinstance(bank, FeatureBank)
    bare = np.load(folder / "features.f16.npy", mmap_mode="r")
    ways = {"bare": bare.__getitem__, "mirror": bank.matrix.__getitem__, "arrow": bank.take}
    rng = np.random.default_rng(0)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(90):
        rows = rng.integers(0, WIDE_ROWS, FETCHED)
        for name in np.roll(list(ways), turn):  # each in turn is the first to touch the file's pages
            start = time.perf_counter()
            got = ways[name](rows)
            spent[name].append(time.perf_counter() - start)
            assert np.array_equal(got[:3], bare[rows[:3]])
    return {name: float(np.median(times)) for name, times in spent.items()}


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as made:
        narrow, wide = Path(made) / "narrow", Path(made) / "wide"
        make_feature_bank(narrow, ROWS, 8)
        found = opening(narrow)
        make_feature_bank(wide, WIDE_ROWS, WIDTH)
        fetched = fetch_seconds(wide)
    bare = fetched["bare"]
    return [
        {"what": "open_bank, 2 million rows", "ours": found["opened"] * 1e3, "goal": "50 ms", "unit": "ms"},
        {"what": "open_bank, 2 million rows, memory", "ours": found["memory"] / 1e6, "goal": "50 MB", "unit": "MB"},
        {"what": "rows of 100,000 texts among 2 million", "ours": found["found"] * 1e3, "goal": "1000 ms", "unit": "ms"},
        {
            "what": "1,024 random rows of 2,560 through the mirror, against a bare memory map",
            "ours": fetched["mirror"] * 1e3,
            "baseline": bare * 1e3,
            "ratio": fetched["mirror"] / bare,
            "goal": "at most 1.1×",
            "unit": "ms",
        },
        {
            "what": "1,024 random rows of 2,560 from the Arrow shards, against a bare memory map",
            "ours": fetched["arrow"] * 1e3,
            "baseline": bare * 1e3,
            "ratio": fetched["arrow"] / bare,
            "goal": "at most 2×",
            "unit": "ms",
        },
    ]


if __name__ == "__main__":
    for row in run():
        print(row)
