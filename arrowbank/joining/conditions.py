"""Which rows are wanted: conditions such as kind=query,candidate or length<=128, held against columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrowbank.bank import Bank
from arrowbank.bank.columns import values_of
from arrowbank.errors import InputError
from arrowbank.joining.fields import value_counts
from arrowbank.joining.pieces import Rows

SHAPE = re.compile(r"\s*(\w+)\s*(<=|>=|<|>|=)(.*)", re.DOTALL)
COMPARE: dict[str, Any] = {"<=": pc.less_equal, ">=": pc.greater_equal, "<": pc.less, ">": pc.greater}
SHOWN = 8


@dataclass(frozen=True)
class Condition:
    """A column whose value is one of `values` ("="), or on one side of the only one (numbers)."""

    column: str
    operator: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.column}{self.operator}{','.join(self.values)}"

    def holds(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Where it does, as booleans. InputError for a comparison that the column's type has not."""
        if not pa.types.is_integer(column.type):
            if self.operator != "=":
                raise InputError(f"--where {self}: {self.column} is text, give {self.column}=VALUE.")
            return pc.is_in(column, value_set=pa.array(self.values, column.type))
        try:
            numbers = pa.array([int(value) for value in self.values], pa.int64())
        except (ValueError, OverflowError):
            raise InputError(f"--where {self}: {self.column} is a number, as in --where {self.column}<=128.") from None
        if self.operator == "=":
            return pc.is_in(column.cast(pa.int64()), value_set=numbers)
        if len(numbers) > 1:
            raise InputError(f"--where {self}: give one number, as in --where {self.column}<=128.")
        return COMPARE[self.operator](column, numbers[0])


def parse_condition(text: str) -> Condition:
    """NAME=VALUE[,VALUE…], NAME<=N, NAME<N, NAME>=N or NAME>N. A value of `text` is taken whole, commas and all."""
    found = SHAPE.fullmatch(text)
    if not found or not found[3]:
        raise InputError(f"--where {text!r}: expected NAME=VALUE or NAME<=NUMBER, as in --where kind=query.")
    name, operator, value = found.groups()
    return Condition(name, operator, (value,) if name == "text" else tuple(value.split(",")))


class Table:
    """The columns of banks that have the same rows: a tokens bank's beside its texts'."""

    def __init__(self, banks: Sequence[Bank]) -> None:
        self.banks = banks
        self._bank_of = {name: bank for bank in reversed(banks) for name in bank.columns if _is_plain(bank, name)}

    def check(self, conditions: Sequence[Condition]) -> None:
        """InputError for a column that is not there, or that cannot be compared."""
        for condition in conditions:
            if condition.column not in self._bank_of:
                raise InputError(
                    f"--where {condition}: {self.banks[0].folder} has no column {condition.column} of text or whole numbers. "
                    f"It has {', '.join(sorted(self._bank_of))}."
                )
            condition.holds(self._column(condition.column, 0, 0))

    def _column(self, name: str, start: int, stop: int) -> pa.ChunkedArray:
        return self._bank_of[name].slice(start, stop, [name])[name]

    def choose(self, conditions: Sequence[Condition], start: int, stop: int) -> Rows:
        """The rows from `start` to `stop` − 1 in which all conditions hold, ascending, counted from `start`."""
        if not conditions:
            return np.arange(stop - start, dtype=np.int64)
        mask = conditions[0].holds(self._column(conditions[0].column, start, stop))
        for condition in conditions[1:]:
            mask = pc.and_(mask, condition.holds(self._column(condition.column, start, stop)))
        return values_of(pc.indices_nonzero(mask)).astype(np.int64)

    def values(self, name: str) -> str:
        """The values that a column has, for a person who found none: the most frequent ones, or the range of numbers."""
        bank = self._bank_of[name]
        if pa.types.is_integer(bank.schema.field(name).type):
            ends = [pc.min_max(batch.column(name)).as_py() for batch in bank.shards()]
            return f"{name} is {min(end['min'] for end in ends)} to {max(end['max'] for end in ends)}"
        if name in ("text", "sample"):
            return f"{name} is another one in every row, such as {bank.shard(0).column(name)[0].as_py()[:60]!r}"
        counts = sorted(value_counts(list(bank.shards()), name).items(), key=lambda item: -item[1])
        more = f" and {len(counts) - SHOWN} others" if len(counts) > SHOWN else ""
        return f"{name} is {', '.join(f'{value} ({count:,})' for value, count in counts[:SHOWN])}{more}"


def _is_plain(bank: Bank, name: str) -> bool:
    kind = bank.schema.field(name).type
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind))
