"""An arm c of T = 16,384 and K = 64, against a plain loop with random.Random and array, on two cores and on one.

The plain loop makes the draws as they are written down, one at a time, and writes the raw shards and the manifest; ours also writes
the bank, and hashes and syncs everything. Both sides run in fresh processes, in turns, their clocks beginning when imports are done;
each side's best time counts. The results are compared byte for byte. Memory is the peak of a run, less that of a run of a quarter of
its examples.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES, LENGTH, TRIPLES, SHARDS = 18_312, 16_384, 64, 4  # 300 million tokens: starting processes weighs little
FILLER_TOKENS = 2_000_000
TURNS = 2
GOALS = {2: 9.0, 1: 5.0}
VERIFY_TOKENS, VERIFY_SECONDS = 100_000_000, 60

PLAIN = """
import json, random, sys, time
from array import array
filler_path, out, n_examples, T, K, shards = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
start_time = time.perf_counter()
key_len, val_len, A, V, d_min, seed, M, PAD = 4, 8, 512, 50304, 64, 0, 1_000_003, 4
span, n_decoys = key_len + val_len, K // 4
filler = array("H")
filler.frombytes(open(filler_path, "rb").read())

def free(q, spans):
    return all(q + span <= s or s + span <= q for s in spans)

hist, records, answers, synthetic, decoys_placed = {}, [], 0, 0, 0
per_shard = -(-n_examples // shards)
for k in range(shards):
    shard = array("H")
    for i in range(k * per_shard, min((k + 1) * per_shard, n_examples)):
        base = ((seed * M + T) * M + i) * M
        site, arm, fill = (random.Random(base + x) for x in (7, 1000 + ord("c"), 99))
        start = fill.randrange(len(filler) - T)
        x = filler[start : start + T]
        if max(x) >= V:
            raise ValueError("an id past the vocabulary")
        lo, hi, sites = span + d_min, T - PAD - span, []
        for _ in range(400 * K):
            p = lo + site.randrange(hi + 1 - lo)
            if all(abs(p - s) >= 2 * span for s in sites):
                sites.append(p)
                if len(sites) == K:
                    break
        sites.sort()
        keys = [[site.randrange(A) for _ in range(key_len)] for _ in range(K)]
        values = [[site.randrange(A) for _ in range(val_len)] for _ in range(K)]
        order = list(range(K))
        site.shuffle(order)
        taken, mine = list(sites), []
        for s, p in enumerate(sites):
            tokens = array("H", keys[order[s]] + values[order[s]])
            x[p : p + span] = tokens
            for _ in range(400):
                q = arm.randrange(p - d_min - span + 1)
                if free(q, taken):
                    break
            else:
                raise ValueError("no place")
            taken.append(q)
            x[q : q + span] = tokens
            a = p + key_len
            hist[a] = hist.get(a, 0) + 1
            mine.append({"needle_start": q, "probe_start": p, "answer_start": a, "distance": p - q, "csv_first": a - 1})
        answers += K * val_len
        synthetic += 2 * K * span
        for _ in range(n_decoys):
            tokens = array("H", [site.randrange(A) for _ in range(span)])
            for _ in range(400):
                q = arm.randrange(T - PAD - span + 1)
                if free(q, taken):
                    taken.append(q)
                    x[q : q + span] = tokens
                    decoys_placed += 1
                    synthetic += span
                    break
        records.append(mine)
        shard.extend(x)
    with open(f"{out}/in2c_train_{k:05d}.bin", "wb") as file:
        shard.tofile(file)
with open(f"{out}/in2c_train_00000.json", "w") as file:
    json.dump({"answer_start_hist": {str(a): hist[a] for a in sorted(hist)}, "answer_tokens": answers,
               "synthetic_tokens": synthetic, "decoys_placed": decoys_placed, "records": records}, file)
print(json.dumps({"seconds": time.perf_counter() - start_time}))
"""
OURS = """
import json, resource, sys, time
import arrowbank.in2.arm
from arrowbank import In2Config, build_in2
filler, out, examples, length, triples, shards = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])

def main():
    start = time.perf_counter()
    build_in2(In2Config(arm="c", length=length, examples=examples, triples=triples, raw_shards=shards), [filler], out)
    print(json.dumps({"seconds": time.perf_counter() - start, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))

if __name__ == "__main__":
    main()
"""
VERIFY = """
import json, sys, time
from arrowbank import verify_in2
start = time.perf_counter()
checks = verify_in2([sys.argv[1]])
assert all(check.ok for check in checks), checks
print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def write_filler(path: Path) -> None:
    ids = np.random.default_rng(7).integers(0, 50304, FILLER_TOKENS, dtype=np.uint16)
    path.write_bytes(ids.astype("<u2").tobytes())


def answer(script: Path, *arguments: object, cores: set[int]) -> dict[str, float]:
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    os.sync()  # what the side before left unwritten would be written while this one's clock runs
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def digests(folder: Path) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("in2c_train_*.bin"))]


def run() -> list[dict[str, Any]]:
    available = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        scripts = {}
        for name, code in (("plain", PLAIN), ("ours", OURS), ("verify", VERIFY)):
            scripts[name] = folder / f"{name}.py"
            scripts[name].write_text(code)
        filler = folder / "filler.bin"
        write_filler(filler)
        size = (EXAMPLES, LENGTH, TRIPLES, SHARDS)
        best: dict[object, float] = {}
        for turn in range(TURNS):
            (folder / f"plain-{turn}").mkdir()
            sides: list[tuple[object, dict[str, float]]] = [
                ("plain", answer(scripts["plain"], filler, folder / f"plain-{turn}", *size, cores={available[0]}))
            ]
            for cores in GOALS:
                out = folder / f"ours-{cores}-{turn}"
                sides.append((cores, answer(scripts["ours"], filler, out, *size, cores=set(available[:cores]))))
                assert digests(out) == digests(folder / f"plain-{turn}")
            for side, found in sides:
                best[side] = min(best.get(side, 1e9), found["seconds"])
        small, large = (
            answer(
                scripts["ours"], filler, folder / f"peak-{times}", EXAMPLES // 4 * times, *size[1:], cores=set(available[:1])
            )
            for times in (1, 4)
        )
        verified = answer(scripts["verify"], folder / "ours-1-0", cores=set(available))["seconds"]
    what = f"in2 build, arm c, {EXAMPLES:,} examples of T = {LENGTH:,}, K = {TRIPLES}"
    rows = [
        {
            "what": f"{what}, {cores} core{'s' * (cores > 1)}, against a plain loop",
            "ours": EXAMPLES * LENGTH / best[cores] / 1e6,
            "baseline": EXAMPLES * LENGTH / best["plain"] / 1e6,
            "ratio": best["plain"] / best[cores],
            "goal": goal,
            "unit": "M tokens/s",
        }
        for cores, goal in GOALS.items()
    ]
    return [
        *rows,
        {
            "what": "in2 build, more memory for four times the examples",
            "ours": (large["peak"] - small["peak"]) / 1e6,
            "goal": "flat",
            "unit": "MB",
        },
        {
            "what": f"in2 verify of {VERIFY_TOKENS // 10**6} million tokens",
            "ours": verified * VERIFY_TOKENS / (EXAMPLES * LENGTH),
            "goal": f"at most {VERIFY_SECONDS} s",
            "unit": "s",
        },
    ]


if __name__ == "__main__":
    for row in run():
        print(row)
