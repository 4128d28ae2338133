"""Large text and token banks made directly, for benchmarks that begin behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from arrowbank.bank import BankWriter
from arrowbank.bank.columns import binary_column, fixed_list_column, list_column
from arrowbank.bank.keys import text_keys
from arrowbank.bank.mirror import write_keys, write_mirror

SHARD_ROWS = 65_536


def make_text_and_token_banks(folder: Path, rows: int) -> None:
    """`folder`/texts and `folder`/tokens: short texts, lengths of 4 to 63 tokens."""
    with BankWriter(folder / "texts", kind="texts", recipe={"rows": rows}) as texts:
        for index, low, high in _ranges(rows):
            texts.write_shard(index, pa.record_batch(_text_columns(low, high)))
        texts.commit(rows=rows, manifest={"text_count": rows, "generations": [rows], "kinds": {"query": rows}})
    with BankWriter(folder / "tokens", kind="tokens", recipe={"texts": texts.plan_digest}) as tokens:
        for index, low, high in _ranges(rows):
            lengths = (np.arange(low, high) * 7919 % 60 + 4).astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            ids = list_column(np.arange(offsets[-1], dtype=np.int32) % 30_000, offsets)
            tokens.write_shard(index, pa.record_batch({"input_ids": ids, "length": lengths}))
        origin = {"path": "../texts", "plan_digest": texts.plan_digest}
        tokens.commit(rows=rows, manifest={"texts": origin, "max_tokens": 64, "generations": [rows], "text_count": rows})


def make_feature_bank(folder: Path, rows: int, width: int, *, mirror: bool = True, normalize: bool = False) -> None:
    """A committed feature bank of random vectors."""
    rng = np.random.default_rng(0)
    with BankWriter(folder, kind="features", recipe={"rows": rows, "width": width, "normalize": normalize}) as bank:
        for index, low, high in _ranges(rows):
            columns = _text_columns(low, high)
            del columns["source"]
            columns["length"] = pa.array(np.full(high - low, 8, np.int32))
            vectors = rng.standard_normal((high - low, width), dtype=np.float32)
            if normalize:
                vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            columns["features"] = fixed_list_column(vectors.astype(np.float16))
            bank.write_shard(index, pa.record_batch(columns))
        write_keys(bank, rows=rows)
        if mirror:
            write_mirror(bank, rows=rows, width=width, report=lambda rows: None)
        bank.commit(rows=rows, manifest={"hidden_size": width, "text_count": rows, "encoding": {"normalize": normalize}})


def text_of(row: int) -> str:
    return f"the text of row {row}"


def _text_columns(low: int, high: int) -> dict[str, pa.Array]:
    texts = [text_of(row) for row in range(low, high)]
    return {
        "text": pa.array(texts, pa.large_string()),
        "kind": pa.array(["query"] * len(texts)),
        "sha1": binary_column(text_keys(texts)),
        "source": pa.array(["train"] * len(texts)),
    }


def _ranges(rows: int) -> Iterator[tuple[int, int, int]]:
    for index, low in enumerate(range(0, rows, SHARD_ROWS)):
        yield index, low, min(low + SHARD_ROWS, rows)
