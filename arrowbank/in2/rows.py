"""Examples as rows: what a worker makes of a shard, and the columns of the bank.

input_ids       T ids                           answer_mask    uint8, T: 1 at the tokens of answers
needle_start, probe_start, answer_start, distance   lists of K, in the order of the sites (empty in arm a)
decoy_start     a list                          decoys_placed  how many there are
filler          number of the filler file       filler_start   where in it the example's T tokens begin
arm, example
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

from arrowbank.bank.columns import fixed_list_column, list_column, number_column, string_column
from arrowbank.engine import Report
from arrowbank.errors import InputError
from arrowbank.in2.config import In2Config
from arrowbank.in2.fillers import Filler, open_filler
from arrowbank.in2.keycount import KeyCounter
from arrowbank.in2.placement import Placement, Planted
from arrowbank.plan import Shard

REPORT_EVERY = 64
Starts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ArmJob:
    """How a process becomes a worker. Everything here pickles; the fillers are opened by the worker itself."""

    config: In2Config
    fillers: tuple[str, ...]

    def __call__(self, number: int) -> ArmRows:
        return ArmRows(self.config, [open_filler(path) for path in self.fillers])


class ArmRows:
    """Makes shards of one arm."""

    def __init__(self, config: In2Config, fillers: Sequence[Filler]) -> None:
        self.config = config
        self._fillers = fillers
        self._memory = _Memory(config)
        self._placement = Placement(config)
        self._keys = KeyCounter(config.vocab, config.key_len)

    def __call__(self, shard: Shard, report: Report) -> pa.RecordBatch:
        config = self.config
        ids, mask = self._memory.take(shard.rows)
        starts = np.empty(shard.rows, np.int64)
        planted: list[Planted] = []
        for row, example in enumerate(range(shard.start, shard.stop)):
            filler = self._fillers[example % len(self._fillers)]
            starts[row] = self._placement.filler_start(example, len(filler))
            ids[row] = filler.window(int(starts[row]), config.length)
            planted.append(self._placement.place(example))
            if row % REPORT_EVERY == REPORT_EVERY - 1:
                report(REPORT_EVERY)
        report(shard.rows % REPORT_EVERY)
        columns = self._plant(ids, mask, planted)
        examples = np.arange(shard.start, shard.stop)
        if config.unique_keys:
            self._refuse_repeated_keys(ids, planted, examples)
        columns["filler"] = number_column((examples % len(self._fillers)).astype(np.int32))
        columns["filler_start"] = number_column(starts)
        columns["arm"] = string_column([config.arm] * shard.rows)
        columns["example"] = number_column(examples)
        return pa.record_batch(columns)

    def _plant(
        self, ids: npt.NDArray[np.unsignedinteger], mask: npt.NDArray[np.uint8], planted: Sequence[Planted]
    ) -> dict[str, pa.Array]:
        """Write what is planted over the filler in `ids`, and 1 into `mask` at answers; the columns that say where."""
        config = self.config
        sites, needles, decoys = [
            _joined([getattr(one, name) for one in planted], config.length) for name in ("sites", "needles", "decoys")
        ]
        spans = np.concatenate([one.spans for one in planted])
        decoy_spans = np.concatenate([one.decoy_spans for one in planted])
        places = sliding_window_view(ids.reshape(-1), config.span, writeable=True)
        for starts, tokens in ((sites.flat, spans), (needles.flat, spans), (decoys.flat, decoy_spans)):
            places[starts] = tokens
        sliding_window_view(mask.reshape(-1), config.val_len, writeable=True)[sites.flat + config.key_len] = 1
        return {
            "input_ids": fixed_list_column(ids),
            "answer_mask": fixed_list_column(mask),
            "needle_start": list_column(needles.starts, needles.offsets),
            "probe_start": list_column(sites.starts, sites.offsets),
            "answer_start": list_column(sites.starts + np.int32(config.key_len), sites.offsets),
            "distance": list_column(sites.starts - needles.starts, sites.offsets),
            "decoy_start": list_column(decoys.starts, decoys.offsets),
            "decoys_placed": number_column(np.diff(decoys.offsets)),
        }

    def _refuse_repeated_keys(
        self, ids: npt.NDArray[np.unsignedinteger], planted: Sequence[Planted], examples: npt.NDArray[np.int64]
    ) -> None:
        for row, one in enumerate(planted):
            if not one.sites:
                continue
            keys = np.concatenate([one.spans, one.decoy_spans])[:, : self.config.key_len]
            twice, stray = self._keys.count(ids[row], keys, np.array(one.sites + one.needles + one.decoys))
            if twice or stray:
                raise InputError(
                    f"example {examples[row]}: {twice} keys are there twice, {stray} times one stands in the filler, and "
                    "--unique-keys is given. Give longer keys (--key-len), a larger --alphabet, or another --seed."
                )


class _Memory:
    """Arrays for shards. What no record batch holds any more is used again: to touch fresh memory takes longer than to fill it."""

    def __init__(self, config: In2Config) -> None:
        self._config = config
        self._pairs: list[list[npt.NDArray[np.unsignedinteger]]] = []

    def take(self, rows: int) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint8]]:
        """Ids as they come, and a mask of zeros, each [rows, T]."""
        config = self._config
        # a count of 2 is the list's and the call's own; a batch's columns hold views, which count too
        idle = (pair for pair in self._pairs if max(sys.getrefcount(pair[0]), sys.getrefcount(pair[1])) <= 2)
        pair = next(idle, None)
        if pair is None:
            shape = (min(config.rows_a_shard, config.examples), config.length)
            pair = [np.empty(shape, config.dtype), np.empty(shape, np.uint8)]
            self._pairs.append(pair)
        ids, mask = pair[0][:rows], pair[1][:rows]
        mask.fill(0)
        return ids, mask


@dataclass(frozen=True)
class _Joined:
    """Starts of many rows: within their row, and in all rows laid end to end."""

    starts: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    flat: Starts


def _joined(lists: Sequence[list[int]], length: int) -> _Joined:
    counts = [len(one) for one in lists]
    starts = np.fromiter(chain.from_iterable(lists), np.int32, sum(counts))
    rows = np.repeat(np.arange(len(lists), dtype=np.int64), counts)
    return _Joined(starts, np.cumsum([0, *counts]).astype(np.int32), rows * length + starts)
