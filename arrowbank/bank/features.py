"""A feature bank as trainers use it: vectors by row or by text, without an index in memory and without widening float16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.columns import ShardedColumn, fixed_bytes, fixed_lists, values_of
from arrowbank.bank.keys import KEY_FILE, SHA1_BYTES, Digests, SortedKeys, text_keys
from arrowbank.bank.mapped import map_npy
from arrowbank.bank.reader import Bank, open_committed
from arrowbank.bank.refusals import raise_refusal
from arrowbank.errors import CorruptBank, InputError
from arrowbank.settings import checked

KIND = "features"
MATRIX_FILE = "features.f16.npy"

Vectors = npt.NDArray[np.float16]


class FeatureBank(Bank):
    """A committed feature bank: N vectors of width D, and the texts that they stand for."""

    @property
    def hidden_size(self) -> int:
        """D, the width of a vector."""
        return int(self.manifest["hidden_size"])

    @cached_property
    def matrix(self) -> Vectors:
        """All vectors, [N, D] float16, memory-mapped from the mirror. InputError for a bank built without one, CorruptBank where the
        file is not that array or the bank changed since it was opened."""
        if MATRIX_FILE not in self.entries:
            raise InputError(
                f"{self.folder}: built with --no-mirror, so there is no matrix to map. Use .take(rows) or .vectors(texts), "
                "which read the Arrow shards."
            )
        return self._array(MATRIX_FILE, np.dtype("<f2"), (len(self), self.hidden_size))

    @cached_property
    def features(self) -> ShardedColumn:
        """The vectors in the Arrow shards: [n_i, D] float16 a shard, memory-mapped."""
        return ShardedColumn([fixed_lists(part) for part in self.parts("features")], self.starts)

    @cached_property
    def digests(self) -> ShardedColumn:
        """The texts' sha1 in the Arrow shards: [n_i, 20] uint8 a shard, memory-mapped."""
        return ShardedColumn([fixed_bytes(part, SHA1_BYTES) for part in self.parts("sha1")], self.starts)

    @cached_property
    def key_table(self) -> npt.NDArray[np.uint64]:
        """The sorted key file, [2, N] uint64, memory-mapped: see `keys`."""
        return self._array(KEY_FILE, np.dtype("<u8"), (2, len(self)))

    @cached_property
    def _keys(self) -> SortedKeys:
        return SortedKeys(self.key_table, self.folder / KEY_FILE)

    def _array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """A mapped file of this bank. CorruptBank where it is not that array, or the bank changed since it was opened."""
        with self.opening(name) as path:
            try:
                mapped = map_npy(path)
            except (ValueError, OSError) as error:
                raise_refusal(error, path)
                raise CorruptBank(f"{path}: not readable as .npy ({error}). Restore it or rebuild the bank.") from None
        if mapped.dtype != dtype or mapped.shape != shape:
            raise CorruptBank(
                f"{path}: {mapped.dtype} of shape {mapped.shape}, expected {dtype} of {shape}. Restore it or rebuild the bank."
            )
        return mapped

    def take(self, rows: npt.ArrayLike) -> Vectors:
        """The vectors of `rows` in the order given, [n, D] float16, from the Arrow shards. InputError for what is no row."""
        wanted = np.asarray(rows)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise InputError(f"take: rows are {wanted.dtype}; expected whole numbers. For texts use .vectors(texts).")
        if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(self):
            outside = next(int(row) for row in wanted.ravel() if not 0 <= row < len(self))
            raise InputError(
                f"take: there is no row {outside}; {self.folder} has {len(self)} rows (−1 is a text that it lacks)."
            )
        return self.features.take(wanted)

    @checked
    def of_kind(self, kind: str) -> npt.NDArray[np.bool_]:
        """Which rows are texts of `kind`, [N]."""
        import pyarrow as pa
        import pyarrow.compute as pc

        # by way of numbers: a column of bits becomes no array without pandas
        equal = [pc.cast(pc.equal(part, kind), pa.uint8()) for part in self.parts("kind")]
        found: npt.NDArray[np.bool_] = np.concatenate([values_of(column) for column in equal]) != 0
        return found

    def find(self, digests: Digests) -> npt.NDArray[np.int64]:
        """The row of each sha1, [n, 20] uint8 → [n] int64; −1 where the bank does not have it."""
        return self._keys.find(digests, self.digests)

    @checked
    def rows(self, texts: Iterable[str]) -> npt.NDArray[np.int64]:
        """The row of each text, [n] int64; −1 where the bank does not have it. Texts are stripped as `scan` strips them."""
        return self.find(text_keys(texts))

    @checked
    def vectors(self, texts: Iterable[str]) -> Vectors:
        """The vector of each text, [n, D] float16. InputError for a text that the bank does not have."""
        texts = list(texts)
        rows = self.rows(texts)
        if (rows < 0).any():
            missing = np.flatnonzero(rows < 0)
            raise InputError(
                f"{self.folder}: {len(missing)} of {len(texts)} texts are not in this bank, "
                f"the first one {texts[missing[0]][:60]!r}. "
                "Use .rows(texts) to see which (−1), or build a bank that has them."
            )
        return self.take(rows)


@checked
def open_features(folder: str | Path, expect: Mapping[str, Any] | None = None) -> FeatureBank:
    """Open a committed feature bank; raises what `open_bank` raises, and InputError for a bank of another kind."""
    path, manifest, commit = open_committed(folder, expect)
    if manifest["kind"] != KIND:
        raise InputError(
            f"{folder}: a bank of {manifest['kind']}, expected features. Give a folder that `arrowbank encode` has written."
        )
    return FeatureBank(path, manifest, commit)
