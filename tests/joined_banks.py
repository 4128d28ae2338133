"""Small real banks of chosen texts, to be merged and selected from, and what their rows are in plain Python."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from arrowbank import EncodeConfig, encode, open_bank
from arrowbank.bank import BankWriter
from arrowbank.bank.columns import binary_column
from arrowbank.bank.keys import text_keys
from arrowbank.engine.plan import BatchRules
from tests import banks

KINDS = ("query", "candidate", "title")
CONFIG = EncodeConfig(encoder="tests.banks:TableEncoder", shard_rows=4, rules=BatchRules(max_batch=3, token_budget=16))


def kind_of(text: str) -> str:
    return KINDS[hashlib.sha1(text.encode()).digest()[0] % len(KINDS)]


def source_of(text: str) -> str:
    return ("train", "eval")[hashlib.sha1(text.encode()).digest()[1] % 2]


def tokens_of(text: str) -> list[int]:
    digest = hashlib.sha1(text.encode()).digest()
    return [4 + byte for byte in digest[: 1 + digest[2] % 9]]


def save_texts(folder: Path, texts: Sequence[str], *, shard_rows: int = 3, train: str = "ab") -> Path:
    """A committed texts bank of `texts`, as scan makes it of one source "train" whose file has the sha256 `train` × 32."""
    with BankWriter(folder, kind="texts", recipe={"texts": list(texts), "train": train}) as bank:
        for index, start in enumerate(range(0, len(texts), shard_rows)):
            part = texts[start : start + shard_rows]
            columns = {
                "text": pa.array(part, pa.large_string()),
                "sha1": binary_column(text_keys(part)),
                "kind": pa.array([kind_of(text) for text in part], pa.string()),
                "source": pa.array([source_of(text) for text in part], pa.string()),
            }
            bank.write_shard(index, pa.record_batch(columns))
        fields = {
            "text_count": len(texts),
            "kinds": counts_of(map(kind_of, texts)),
            "source_rows": counts_of(map(source_of, texts)),
            "counts": {"episodes": 2, "texts_seen": len(texts) + 5, "duplicates": 5},
            "sources": [{"name": "train", "file": "train.jsonl", "bytes": 7, "sha256": train * 32}],
            "train_sha256": train * 32,
            "fields": [["query", "query"]],
            "generations": [len(texts)],
        }
        bank.commit(rows=len(texts), manifest=fields)
    return folder


def save_features(folder: Path, texts: Sequence[str], *, train: str = "ab", config: EncodeConfig = CONFIG) -> Path:
    """folder/texts, folder/tokens and folder/features of `texts`; the last one's path."""
    save_texts(folder / "texts", texts, train=train)
    banks.write_tokens(folder / "tokens", folder / "texts", [tokens_of(text) for text in texts], [len(texts)])
    encode(config, folder / "tokens", folder / "features")
    return folder / "features"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a bank in plain Python, float16 vectors as their bits."""
    bank = open_bank(folder)
    table = pa.Table.from_batches(list(bank.shards()))
    if "features" in table.column_names:
        vectors = np.concatenate([np.asarray(bank.take(np.arange(len(bank))))]).view(np.uint16)  # type: ignore[attr-defined]
        rows: list[dict[str, Any]] = table.drop_columns(["features"]).to_pylist()
        return [row | {"features": vector.tolist()} for row, vector in zip(rows, vectors, strict=True)]
    plain: list[dict[str, Any]] = table.to_pylist()
    return plain


def counts_of(values: Any) -> dict[str, int]:
    ordered = sorted(values)
    return {value: len(list(group)) for value, group in itertools.groupby(ordered)}
