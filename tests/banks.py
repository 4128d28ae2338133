"""Small real banks for tests, and an encoder that needs no model."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import BankWriter
from arrowbank.bank.columns import binary_column, list_column
from arrowbank.bank.keys import text_keys
from tests.mutations import reseal

WIDTH = 24
VOCAB = 512


class TableEncoder:
    """Mean of fixed random embeddings: a real function of the tokens, the same in every process, and quick."""

    hidden_size = WIDTH
    version = "1"

    def __init__(self) -> None:
        self._table = np.random.default_rng(7).standard_normal((VOCAB, WIDTH)).astype(np.float32)

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        positions = np.arange(1, input_ids_NT.shape[1] + 1, dtype=np.float32)[None, :, None]
        return (self._table[input_ids_NT] / positions).mean(axis=1, dtype=np.float32)


class CountedEncoder(TableEncoder):
    """Notes in a file, named by the environment, each time it is made."""

    def __init__(self) -> None:
        super().__init__()
        with Path(os.environ["ENCODERS_MADE"]).open("a") as notes:
            notes.write("made\n")


class ZeroEncoder(TableEncoder):
    """Gives an all-zero vector for every text that begins with token 3."""

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        vectors = super().encode(input_ids_NT)
        vectors[input_ids_NT[:, 0] == 3] = 0
        return vectors


class HugeEncoder(TableEncoder):
    """Vectors past what float16 holds, but finite."""

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return super().encode(input_ids_NT) * np.float32(1e6)


class SmallEncoder(TableEncoder):
    """Vectors of which float16 keeps a digit or two."""

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return super().encode(input_ids_NT) * np.float32(1e-7)


class NarrowEncoder(TableEncoder):
    """A column short of what it says."""

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return super().encode(input_ids_NT)[:, 1:]


class DeadlyEncoder(TableEncoder):
    """Its process does not survive."""

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(input_ids_NT)


class SlowEncoder(TableEncoder):
    """Takes a second for a batch."""

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        time.sleep(1)
        return super().encode(input_ids_NT)


class OtherVersion(TableEncoder):
    """The same encoder after a change that its author declared."""

    version = "2"


class DriftedEncoder(TableEncoder):
    """The same version on a machine that computes something else."""

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        vectors = super().encode(input_ids_NT)
        return vectors + np.float32(0.1) * np.abs(vectors).mean()


class WithoutVersion:
    """No encoder: nothing says which version it is."""

    hidden_size = WIDTH


class NanEncoder(TableEncoder):
    """Gives a NaN for every text that begins with token 3."""

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        vectors = super().encode(input_ids_NT)
        vectors[input_ids_NT[:, 0] == 3, 5] = np.nan
        return vectors


def make_texts(
    folder: Path,
    count: int = 40,
    *,
    shard_rows: int = 1000,
    generations: list[int] | None = None,
    shard_ends: list[int] | None = None,
) -> list[str]:
    """A committed texts bank of `count` different texts, in shards of `shard_rows` rows or with ends at `shard_ends`."""
    texts = [f"text number {row} of many" for row in range(count)]
    with BankWriter(folder, kind="texts", recipe={"count": count}, restart=True) as bank:
        ends = sorted({0, count, *(range(0, count, shard_rows) if shard_ends is None else shard_ends)})
        for index, (start, stop) in enumerate(itertools.pairwise(ends)):
            part = texts[start:stop]
            bank.write_shard(
                index,
                pa.record_batch(
                    {
                        "text": pa.array(part, pa.large_string()),
                        "sha1": binary_column(text_keys(part)),
                        "kind": ["query" if row % 3 == 0 else "candidate" for row in range(start, start + len(part))],
                        "source": ["train"] * len(part),
                    }
                ),
            )
        kinds = {"query": len(range(0, count, 3)), "candidate": count - len(range(0, count, 3))}
        fields = {"kinds": kinds, "text_count": count, "generations": generations or [count], "train_sha256": "ab" * 32}
        bank.commit(rows=count, manifest=fields)
    return texts


def make_tokens(folder: Path, texts: Path, count: int = 40, *, generations: list[int] | None = None) -> list[list[int]]:
    """A committed tokens bank behind a texts bank of `count` rows, with lengths from 1 to 9."""
    rng = np.random.default_rng(count)
    rows = [[int(token) for token in rng.integers(4, VOCAB, 1 + row * 7 % 9)] for row in range(count)]
    write_tokens(folder, texts, rows, generations or [count])
    return rows


def write_tokens(
    folder: Path, texts: Path, rows: list[list[int]], generations: list[int], *, shard_ends: list[int] | None = None
) -> None:
    """A committed tokens bank of exactly these rows, in one shard or with ends at `shard_ends`."""
    source = _manifest_of(texts)
    with BankWriter(folder, kind="tokens", recipe={"texts": source["plan_digest"]}, restart=True) as bank:
        ends = sorted({0, len(rows), *(shard_ends or ())})
        for index, (start, stop) in enumerate(itertools.pairwise(ends)):
            part = rows[start:stop]
            offsets = np.cumsum([0, *map(len, part)]).astype(np.int32)
            values = np.concatenate([np.array(row, np.int32) for row in part])
            lengths = np.diff(offsets).astype(np.int32)
            bank.write_shard(index, pa.record_batch({"input_ids": list_column(values, offsets), "length": lengths}))
        bank.commit(
            rows=len(rows),
            manifest={
                "texts": {"path": f"../{texts.name}", "plan_digest": source["plan_digest"]},
                "max_tokens": 9,
                "generations": generations,
                "tokenizer": "none",
                "kinds": source["kinds"],
                "train_sha256": source["train_sha256"],
                "text_count": len(rows),
            },
        )


def name_the_encoder(features: Path, encoder: str) -> None:
    """Let a feature bank say that it was made by another encoder than it was."""

    def edit(manifest: dict[str, Any]) -> None:
        manifest["recipe"]["model"]["name"] = manifest["model_path"] = encoder

    reseal(features, edit)


def _manifest_of(folder: Path) -> dict[str, Any]:
    from arrowbank.bank.manifest_checks import read_manifest

    return read_manifest(folder)
