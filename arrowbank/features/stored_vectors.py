"""Tokens to stored vectors: rows in batches of equal length through an encoder, then normalized and rounded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.columns import list_values
from arrowbank.engine.plan import Batch, BatchRules, batches, gather
from arrowbank.errors import InputError
from arrowbank.features.encode_config import Encoder, stream


def encoded(
    encoder: Encoder, input_ids: pa.Array, rules: BatchRules, dim: int | None = None, *, per_token: bool = False
) -> Iterator[tuple[Batch, npt.NDArray[np.float32]]]:
    """The batches of rows `input_ids` (list<int32>) and the vectors of each, [N, D] float32, or [N·T, D] with one `per_token`: the first
    `dim` numbers of those that the encoder gives. InputError for another shape.
    """
    values, offsets = list_values(input_ids)
    plan = list(batches(np.diff(offsets), rules))
    pooled = stream(encoder, (gather(values, offsets, batch) for batch in plan))
    for batch, vectors in zip(plan, pooled, strict=True):
        shape = (len(batch.rows), *([batch.length] if per_token else []), encoder.hidden_size)
        if vectors.shape != shape:
            raise InputError(
                f"the encoder gave an array of shape {vectors.shape} for {len(batch.rows)} rows, expected {shape}."
            )
        yield batch, vectors.reshape(-1, encoder.hidden_size)[:, :dim]


# Of a vector's norm, what rounding to float16 may take. It takes up to 2^-11 of each number from 6e-5 on, more and more of smaller
# ones, and all of those below 3e-8.
MOST_LOST = 2.0**-10


def fault_of(vector: npt.NDArray[np.float32]) -> str:
    """What is wrong with a pooled vector [D] that may not be stored."""
    if not vector.any():
        return "all zero"
    with np.errstate(over="ignore"):
        half = vector.astype(np.float16)
    if not np.isfinite(half).all():
        return "not finite in float16 (NaN, Inf or past 65504)"
    return "too small for float16 (below 0.00006, where it loses digits, or lost as 0)"


def finish(vectors: npt.NDArray[np.float32], *, normalize: bool) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.bool_]]:
    """Pooled [N, D] float32 → stored [N, D] float16 (L2-normalized, rounded to nearest even), and which rows may be stored.

    A row may be stored when it is finite, not all zero, and float16 holds it as closely as a normal float16 holds a number: [N] bool.
    See `fault_of`.
    """
    import torch

    pooled = torch.from_numpy(np.ascontiguousarray(vectors, np.float32))
    norms = torch.linalg.vector_norm(pooled, dim=1, keepdim=True)
    if not normalize:
        stored = pooled.half()
        lost = torch.linalg.vector_norm(stored.float() - pooled, dim=1, keepdim=True)
        good = stored.isfinite().all(dim=1, keepdim=True) & (norms > 0) & (lost <= MOST_LOST * norms)
        return stored.numpy(), good.squeeze(1).numpy()
    good = (norms.isfinite() & (norms > 0)).squeeze(1)
    return (pooled / norms).half().numpy(), good.numpy()  # torch rounds to float16 five times as fast as NumPy
