"""Feature banks of chosen vectors and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import BankWriter, FeatureBank, open_bank
from arrowbank.bank.columns import binary_column, fixed_list_column
from arrowbank.bank.keys import text_keys
from arrowbank.bank.mirror import write_keys, write_mirror


def save_features(
    folder: Path,
    vectors: npt.NDArray[np.float16],
    texts: Sequence[str] | None = None,
    *,
    kinds: Sequence[str] | None = None,
    shard_rows: int = 1000,
    mirror: bool = True,
    normalize: bool = False,
    model: Mapping[str, str] | None = None,
    fields: Mapping[str, object] | None = None,
) -> FeatureBank:
    """A committed feature bank of these vectors [N, D] float16, as they are, and texts (default: "text 0" …).

    `model` is the recipe's, `fields` are more of the manifest's.
    """
    rows, width = vectors.shape
    texts = [f"text {row}" for row in range(rows)] if texts is None else texts
    kinds = ["query"] * rows if kinds is None else kinds
    manifest = {
        "model_path": "none",
        "hidden_size": width,
        "max_key_tokens": 9,
        "text_count": rows,
        "kinds": {kind: list(kinds).count(kind) for kind in dict.fromkeys(kinds)},
        "generations": [rows],
        "encoding": {"normalize": normalize},
        **(fields or {}),
    }
    recipe = {"vectors": vectors.tobytes().hex(), "mirror": mirror, "shard_rows": shard_rows, "model": dict(model or {})}
    with BankWriter(folder, kind="features", recipe=recipe, manifest=manifest, restart=True) as bank:
        for index, start in enumerate(range(0, rows, shard_rows)):
            here = slice(start, start + shard_rows)
            columns = {
                "text": pa.array(texts[here], pa.large_string()),
                "kind": pa.array(kinds[here], pa.string()),
                "sha1": binary_column(text_keys(texts[here])),
                "length": pa.array([1] * len(texts[here]), pa.int32()),
                "features": fixed_list_column(vectors[here]),
            }
            bank.write_shard(index, pa.record_batch(columns))
        write_keys(bank, rows=rows)
        if mirror:
            write_mirror(bank, rows=rows, width=width, report=lambda _: None)
        bank.commit(rows=rows)
    return open_bank(folder)
