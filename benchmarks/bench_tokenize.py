"""The tokenize stage, from bank to committed bank, against threads that run the same tokenizer over the same texts in memory.

The peer is what a careful script does: a pool of one thread a core over batches of 2,000 texts, its lists kept in memory,
nothing written; through the transformers tokenizer or straight through the Rust tokenizer behind it, whichever is faster. Ours
reads the texts from a bank and ends with a bank on disk. All take turns; each side's best time counts.

    python -m benchmarks.bench_tokenize [TEXTS]
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrowbank import RunOptions, TokenizeConfig, tokenize
from arrowbank.bank import BankWriter
from arrowbank.cli.demo import minilm
from arrowbank.engine.plan import SHARD_ROWS
from arrowbank.models import load_tokenizer

TEXTS = 150_000
BATCH = 2000
MAX_TOKENS = 256
LONGEST = 1000  # characters; beyond, it is data or code in quotation marks
TURNS = 2
GOAL = 0.85

_DOCSTRING = re.compile(r'"""(.+?)"""', re.DOTALL)


def paragraphs(count: int) -> list[str]:
    """Up to `count` distinct docstring paragraphs of all the Python that is installed here, found by pattern: it is quick."""
    found: dict[str, None] = {}
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
        for docstring in _DOCSTRING.findall(path.read_text("utf-8", "replace")):
            stripped = (text.strip() for text in docstring.split("\n\n"))
            found.update(dict.fromkeys(text for text in stripped if 0 < len(text) <= LONGEST))
        if len(found) >= count:
            break
    return list(found)[:count]


def make_texts(folder: Path, texts: list[str]) -> Path:
    """A texts bank of `texts`, with the one column that matters here."""
    with BankWriter(folder, kind="texts", recipe={"benchmark": len(texts)}) as bank:
        for index, start in enumerate(range(0, len(texts), SHARD_ROWS)):
            rows = pa.array(texts[start : start + SHARD_ROWS], pa.large_string())
            bank.write_shard(index, pa.record_batch({"text": rows}))
        bank.commit(rows=len(texts))
    return folder


def through_transformers(tokenizer: Any, batch: list[str]) -> list[list[int]]:
    lists: list[list[int]] = tokenizer(batch, add_special_tokens=False, truncation=True, max_length=MAX_TOKENS)["input_ids"]
    return lists


def through_rust(tokenizer: Any, batch: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)]


def seconds_of_threads(ids: Callable[[list[str]], list[list[int]]], texts: list[str]) -> float:
    begin = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(ids, [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]))
    return time.perf_counter() - begin


def seconds_of_ours(folder: Path, bank: Path, model: str) -> float:
    begin = time.perf_counter()
    tokenize(TokenizeConfig(tokenizer=model, max_tokens=MAX_TOKENS), bank, folder / "tokens", options=RunOptions(restart=True))
    return time.perf_counter() - begin


def run(count: int = TEXTS) -> list[dict[str, Any]]:
    """The rows of this benchmark's table."""
    model, texts = minilm(), paragraphs(count)
    tokenizer = load_tokenizer(model)
    tokenizer.backend_tokenizer.enable_truncation(MAX_TOKENS)
    peers = {way.__name__.replace("_", " "): partial(way, tokenizer) for way in (through_transformers, through_rust)}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        bank = make_texts(folder / "texts", texts)
        ours: list[float] = []
        theirs: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(TURNS):
            ours.append(seconds_of_ours(folder, bank, model))
            for name, ids in peers.items():
                theirs[name].append(seconds_of_threads(ids, texts))
    best = min(peers, key=lambda name: min(theirs[name]))
    row = {
        "what": f"tokenize, {len(texts):,} texts, bank to bank, against a thread a core in memory, {best}",
        "ours": round(len(texts) / min(ours)),
        "baseline": round(len(texts) / min(theirs[best])),
        "ratio": min(theirs[best]) / min(ours),
        "goal": GOAL,
        "unit": "texts/s",
    }
    return [row]


if __name__ == "__main__":
    print(run(int(sys.argv[1]) if len(sys.argv) > 1 else TEXTS))
