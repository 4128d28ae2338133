"""Which samples of target banks are new: a name that was there before is the same sample or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from arrowbank.bank import Bank
from arrowbank.errors import InputError
from arrowbank.joining.pieces import Rows
from arrowbank.joining.seen import Overlap

Place = tuple[Bank, int, int]  # a bank, a shard of it, a row of that


def new_samples(banks: Sequence[Bank], report: Callable[[int], None]) -> Overlap:
    """The samples of target banks whose name no earlier bank has. InputError where one has it with other contents."""
    overlap = Overlap()
    places: dict[str, list[Place]] = {}  # names are small beside the hidden states of one token
    for bank in banks:
        new, here = 0, []
        for shard, batch in enumerate(bank.shards()):
            fresh = []
            for row, name in enumerate(batch.column("sample").to_pylist()):
                if name in places:
                    _check_same(name, (bank, shard, row), places[name])
                else:
                    fresh.append(row)
                    here.append((name, (bank, shard, row)))
            new += overlap.add(bank, shard, partial(_rows, np.array(fresh, np.int64)))
            report(batch.num_rows if bank is not banks[0] else 0)
        for name, place in here:  # a name that a bank itself has twice is its own business
            places.setdefault(name, []).append(place)
        overlap.new.append(new)
    return overlap


def _rows(rows: Rows) -> Rows:
    return rows


def _check_same(name: str, place: Place, others: Sequence[Place]) -> None:
    if not any(_row(place).equals(_row(other)) for other in others):
        raise InputError(
            f"{place[0].folder}: sample {name!r} is in {others[0][0].folder}, too, with other contents. Leave it out of one of "
            f"them (arrowbank select keeps --where sample=…), or import one of them again under other names."
        )


def _row(place: Place) -> pa.RecordBatch:
    bank, shard, row = place
    return bank.shard(shard).slice(row, 1)
