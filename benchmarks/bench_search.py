"""The ten nearest of a million rows, for one query and for 32, against NumPy and faiss.

NumPy multiplies the whole matrix in float32, once as it comes from the map of the mirror, once from a copy that is kept in memory,
and takes the largest with argpartition. faiss has its flat index, of float32 as well. All sides take turns in one process; memory
is that of a fresh process, mapped files left out.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.open import open_bank
from arrowbank.features.nearest import nearest
from arrowbank.features.search import FEW, IndexedRows
from benchmarks.made_banks import make_feature_bank
from benchmarks.turns import best_seconds

ROWS, WIDTH = 1_000_000, 384
WIDE_ROWS, WIDE = 150_000, 2560
K = 10
TURNS = 5

Queries = npt.NDArray[np.float32]

MEMORY = """
import json, sys, threading, time
import numpy as np, torch
from arrowbank.bank.open import open_bank
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.features.nearest import nearest
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
bank = open_bank(sys.argv[1], kind=FeatureBank)
queries = np.random.default_rng(1).standard_normal((int(sys.argv[2]), bank.hidden_size)).astype(np.float32)
torch.ones(600, 600) @ torch.ones(600, 600)
before, most, on = anonymous(), 0, True
def watch():
    global most
    while on:
        most = max(most, anonymous())
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
nearest(bank, queries, 10)
on = False
watcher.join()
print(json.dumps(most - before))
"""


def plain(matrix: npt.NDArray[Any], queries: Queries) -> npt.NDArray[np.int64]:
    """The nearest rows as one writes it down."""
    scores = queries @ matrix.astype(np.float32, copy=False).T
    best = np.argpartition(-scores, K, axis=1)[:, :K]
    order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1)
    rows: npt.NDArray[np.int64] = np.take_along_axis(best, order, 1)
    return rows


def seconds(bank: FeatureBank, queries: Queries) -> dict[str, float]:
    """The best time of each side, all of which find the same rows."""
    kept = bank.matrix.astype(np.float32)
    sides: dict[str, Callable[[], npt.NDArray[np.int64]]] = {
        "ours": lambda: nearest(bank, queries, K)[0],
        "mapped": lambda: plain(bank.matrix, queries),
        "kept": lambda: plain(kept, queries),
    }
    if importlib.util.find_spec("faiss"):
        faiss: Any = importlib.import_module("faiss")
        flat = faiss.IndexFlatIP(bank.hidden_size)
        flat.add(kept)
        sides["flat"] = lambda: flat.search(queries, K)[1]
        if len(queries) <= FEW:
            indexed = IndexedRows(bank)
            sides["indexed"] = lambda: indexed.nearest(queries, K)[0]
    wanted = sides["ours"]()
    for side, find in sides.items():
        same = np.mean([len(set(a) & set(b)) / K for a, b in zip(find().tolist(), wanted.tolist(), strict=True)])
        assert same > 0.95, (side, same)  # vectors are rounded to float16: a product is not quite a cosine
    return best_seconds({side: (lambda find=find: find()) for side, find in sides.items()}, TURNS)  # type: ignore[misc]


def rows_of(bank: FeatureBank, count: int) -> list[dict[str, Any]]:
    """The table's rows for `count` queries."""
    queries = np.random.default_rng(1).standard_normal((count, bank.hidden_size)).astype(np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    best = seconds(bank, queries)
    what = f"10 nearest of {len(bank):,} × {bank.hidden_size}, {count} quer{'y' if count == 1 else 'ies'}"
    names = {
        "mapped": ("ours", "NumPy on the mapped matrix", 1.0),
        "kept": ("ours", "NumPy on float32 kept in memory", None),
        "flat": ("ours", "faiss flat, float32 in memory", None),
        "indexed": ("indexed", "faiss flat, ours with --faiss", None),
    }
    rows = []
    for side, (ours, baseline, goal) in names.items():
        if side in best:
            other = best["flat" if side == "indexed" else side]
            ratio = other / best[ours]
            rows.append({"what": f"{what}, against {baseline}", "ours": best[ours] * 1e3, "baseline": other * 1e3})
            rows[-1] |= {"ratio": ratio, "goal": goal, "unit": "ms"}
    return rows


def memory_row(folder: Path, rows: int, width: int) -> dict[str, Any]:
    command = [sys.executable, "-c", MEMORY, str(folder), "32"]
    ours = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1e6
    matrix = rows * width * 4 / 1e6
    return {
        "what": f"memory of that for 32 queries of {width}, against the float32 matrix",
        "ours": ours,
        "baseline": matrix,
        "ratio": matrix / ours,
        "goal": 10,
        "unit": "MB",
    }


def run() -> list[dict[str, Any]]:
    found = []
    for rows, width, counts in ((ROWS, WIDTH, (1, 32)), (WIDE_ROWS, WIDE, (1,))):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "bank"
            make_feature_bank(folder, rows, width, normalize=True)
            bank = open_bank(folder, kind=FeatureBank)
            found += [row for count in counts for row in rows_of(bank, count)]
            if width == WIDTH:
                found.append(memory_row(folder, rows, width))
    return found


if __name__ == "__main__":
    for row in run():
        print(row)
