"""300 MB of episodes against a plain dict of `json.loads` and `sha1().hexdigest()`, and the memory that the scan takes.

Both sides run in fresh processes, in turns, with the file in the page cache; each side's best time counts. The plain loop
writes nothing; ours hashes the source, writes and syncs the bank. Memory is the largest sum of the process tree's proportional shares
(PSS), looked at every few milliseconds in a run of its own.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZE = 300_000_000
GOAL = 1.7
FIXED_BYTES, BYTES_A_TEXT = 150e6, 64
TURNS = 3

PLAIN = """
import hashlib, json, sys, time
start, seen, index = time.perf_counter(), 0, {}
with open(sys.argv[1], encoding="utf-8") as lines:
    for line in lines:
        episode = json.loads(line)
        for text in [episode.get("query"), *(candidate.get("text") for candidate in episode["candidates"])]:
            if isinstance(text, str) and (text := text.strip()):
                seen += 1
                index.setdefault(hashlib.sha1(text.encode()).hexdigest(), len(index))
print(json.dumps({"seconds": time.perf_counter() - start, "seen": seen, "unique": len(index)}))
"""
OURS = """
import json, sys, time
from arrowbank import ScanConfig, scan
start = time.perf_counter()
manifest = scan(ScanConfig(sources=(("train", sys.argv[1]),)), sys.argv[2])
print(json.dumps({"seconds": time.perf_counter() - start, "seen": manifest["counts"]["texts_seen"], "unique": manifest["rows"]}))
"""


def write_episodes(path: Path, size: int) -> None:
    """Episodes of about ten texts of 137 characters, a little under half of them new."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(4000)]
    tape = " ".join(rng.choices(words, k=400_000))
    known: list[str] = []

    def text() -> str:
        if known and rng.random() >= 0.447:
            return known[int(rng.random() * len(known))]
        at = int(rng.random() * (len(tape) - 300))
        made = f"{tape[at : at + 60 + int(rng.random() * 142)]} {len(known)}"
        if len(known) % 20 == 0:
            made = f'"{made}"\nnext line'
        elif len(known) % 50 == 1:
            made = f"Überprüfung – {made}"
        known.append(made)
        return made

    with path.open("w", encoding="utf-8") as lines:
        written = 0
        while written < size:
            candidates = [{"text": text()} for _ in range(rng.randrange(3, 16))]
            written += lines.write(json.dumps({"query": text(), "candidates": candidates, "positive_indices": [0]}) + "\n")


def answer(code: str, *arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def peak_bytes(code: str, *arguments: str) -> float:
    """The largest sum of PSS over the process and its children while `code` runs."""
    import psutil

    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL)
    tree, peak = psutil.Process(process.pid), 0.0
    while process.poll() is None:
        total = 0
        for one in [tree, *tree.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
            except (psutil.Error, OSError):  # it has just ended
                continue
        peak = max(peak, total)
        time.sleep(0.004)
    return peak


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "episodes.jsonl"
        write_episodes(source, SIZE)
        plain, ours = [], []
        for turn in range(TURNS):
            plain.append(answer(PLAIN, str(source)))
            ours.append(answer(OURS, str(source), f"{made}/texts-{turn}"))
        assert {(one["seen"], one["unique"]) for one in plain} == {(one["seen"], one["unique"]) for one in ours}
        peak = peak_bytes(OURS, str(source), f"{made}/texts-peak")
    seen, unique = plain[0]["seen"], plain[0]["unique"]
    fastest, slowest = (seen / min(one["seconds"] for one in side) for side in (ours, plain))
    allowed = FIXED_BYTES + BYTES_A_TEXT * unique
    return [
        {
            "what": f"scan of {SIZE // 10**6} MB of episodes, against json.loads and a dict of sha1 hex",
            "ours": fastest,
            "baseline": slowest,
            "ratio": fastest / slowest,
            "goal": GOAL,
            "unit": "texts/s",
        },
        {
            "what": f"scan, memory of all its processes, {int(unique):,} unique texts",
            "ours": peak / 1e6,
            "goal": f"at most {allowed / 1e6:.0f} MB (150 MB and 64 bytes a text)",
            "unit": "MB",
        },
    ]


if __name__ == "__main__":
    for row in run():
        print(row)
