"""One shard of a feature bank: tokens in, a record batch of float16 vectors out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from arrowbank.bank import Bank
from arrowbank.bank.columns import fixed_list_column, one_array
from arrowbank.encoding.config import EncodeConfig, Encoder, load_custom_encoder
from arrowbank.encoding.drift import DriftCheck
from arrowbank.encoding.vectors import encoded, finish
from arrowbank.errors import BadVector
from arrowbank.plan import Batch, Shard

if TYPE_CHECKING:
    from arrowbank.models import ModelInfo

TEXT_COLUMNS = ["text", "kind", "sha1"]
SHOWN_TEXTS = 3


@dataclass(frozen=True)
class EncodeJob:
    """How a process becomes a worker. Everything here pickles; the model is loaded by the worker itself."""

    config: EncodeConfig
    tokens: Bank
    texts: Bank
    info: ModelInfo | None = None
    processes: int = 1
    drift: DriftCheck | None = None

    def __call__(self, number: int) -> ShardEncoder:
        if self.processes > 1:  # they share the cores; the bits of a vector do not depend on how many there are
            torch.set_num_threads(max(1, torch.get_num_threads() // self.processes))
        encoder = self.encoder(number)
        if self.drift:
            self.drift(encoder, self.tokens)
        return ShardEncoder(self.config, encoder, self.tokens, self.texts)

    def encoder(self, number: int) -> Encoder:
        """The frozen model of worker `number`."""
        if self.config.model is None:
            return load_custom_encoder(str(self.config.encoder))
        from arrowbank.models import load_encoder  # transformers is not needed for an encoder of the user's own

        return load_encoder(self.config.model, worker=number, info=self.info)


class ShardEncoder:
    """A worker that holds the model and the two banks it reads."""

    def __init__(self, config: EncodeConfig, encoder: Encoder, tokens: Bank, texts: Bank) -> None:
        self._config, self._encoder, self._tokens, self._texts = config, encoder, tokens, texts

    def __call__(self, shard: Shard, report: Callable[[int], None]) -> pa.RecordBatch:
        """Columns text, kind, sha1, length, features (fixed_size_list<float16>[D]) of the shard's rows. Reports tokens."""
        columns: dict[str, pa.Array] = {
            name: one_array(self._texts.slice(shard.start, shard.stop, [name])[name]) for name in TEXT_COLUMNS
        }
        tokens = self._tokens.slice(shard.start, shard.stop, ["input_ids", "length"])
        columns["length"] = one_array(tokens["length"])
        vectors = self._vectors(shard, one_array(tokens["input_ids"]), report)
        columns["features"] = fixed_list_column(vectors)
        return pa.record_batch(columns)

    def _vectors(self, shard: Shard, input_ids: pa.Array, report: Callable[[int], None]) -> npt.NDArray[np.float16]:
        out = np.empty((shard.rows, self._encoder.hidden_size), np.float16)
        for batch, vectors in encoded(self._encoder, input_ids, self._config.rules):
            half, good = finish(vectors, normalize=self._config.normalize)
            if not good.all():
                self._refuse(shard, batch, vectors, good)
            out[batch.rows] = half
            report(len(batch.rows) * batch.length)
        return out

    def _refuse(self, shard: Shard, batch: Batch, vectors: npt.NDArray[np.float32], good: npt.NDArray[np.bool_]) -> None:
        bad = np.flatnonzero(~good)
        rows = shard.start + batch.rows[bad]
        what = "all zero" if not vectors[bad[0]].any() else "not finite in float16 (NaN, Inf or past 65504)"
        shown = [
            f"\n  row {row}: {self._texts.slice(int(row), int(row) + 1, ['text'])['text'][0].as_py()[:80]!r}"
            for row in rows[:SHOWN_TEXTS]
        ]
        layer = self._config.model.layer if self._config.model else "the encoder's"
        raise BadVector(
            f"shard {shard.index}: {len(bad)} vectors of {batch.length} tokens are {what} (layer {layer}):{''.join(shown)}\n"
            "Nothing of this shard was kept. Such a vector comes from the model or its dtype: try --dtype float32 or bfloat16, "
            "or check the weights."
        )


def text_bytes(texts: Bank) -> int:
    """The bytes that the text columns take on disk."""
    names: list[dict[str, Any]] = texts.manifest["files"]
    return sum(int(entry["bytes"]) for entry in names if entry["rows"] is not None)
