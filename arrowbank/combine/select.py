"""Which rows are wanted: conditions such as kind=query,candidate or length<=128, held against columns."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrowbank.bank import Bank, BankWriter, open_bank
from arrowbank.bank.columns import values_of
from arrowbank.bank.kinds import every_kind
from arrowbank.bank.kinds.tokens_bank import TokensBank
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.open import open_texts_behind
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explains
from arrowbank.combine.rows import Piece, Rows, has_mirror, stated, value_counts, write_pieces
from arrowbank.combine.rules import CombineRules, counted_fields, rules_of
from arrowbank.errors import InputError
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Count, Help, Settings, checked

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


class BankTable:
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


METHOD = 1  # raise it when the same bank and conditions would give other rows
BESIDE = "-texts"


@dataclass(frozen=True, kw_only=True)
class SelectConfig(Settings):
    """Which rows: those in which every condition of `where` holds, of the `rows` (start, stop), and of these the first `limit`."""

    where: Annotated[tuple[str, ...], Help("kind=query,candidate or length<=128; all of several must hold.", "COND")] = ()
    rows: Annotated[tuple[int, int], Help("Only of these rows.", "A:B", example="0:131072")] | None = None
    limit: Annotated[Count, Help("Only the first N of them.")] | None = None

    def check(self) -> None:
        if not self.where and self.rows is None and self.limit is None:
            raise InputError("Nothing says which rows. Give --where NAME=VALUE, --rows A:B or --limit N.")
        if self.rows is not None and not 0 <= self.rows[0] < self.rows[1]:
            raise InputError(f"--rows {self.rows[0]}:{self.rows[1]}: expected a start before the end, from 0 on.")
        for condition in self.where:
            parse_condition(condition)

    @property
    def conditions(self) -> list[Condition]:
        return [parse_condition(condition) for condition in self.where]


@explains("out")
@checked
def select(
    config: SelectConfig,
    bank: str | Path,
    out: str | Path,
    *,
    texts: str | Path | None = None,
    restart: bool = False,
    progress: Progress = SILENT,
) -> Manifest:
    """Write the rows of `bank` (texts, tokens, features or targets) that `config` wants as the bank `out`; its manifest.

    For a tokens bank the texts of these rows go to `out`-texts; `texts` is its texts bank, where that no longer lies where it says.

    Raises InputError (a bank of another kind, a column that is not there, no row that fits: with the values there are), PlanMismatch,
    BankLocked, CorruptBank, DiskFull.
    """
    source, target = open_bank(bank), Path(out)
    rules = rules_of(source.kind)
    if not rules.selects:
        kinds = ", ".join(name for name in every_kind() if rules_of(name).selects)
        raise InputError(f"{bank}: a bank of {source.kind}; rows of {kinds} can be selected. Build a smaller bank instead.")
    beside = target.resolve().with_name(target.resolve().name + BESIDE)  # for tokens: their texts
    outputs: list[Named] = [("--out", out), *([("--out", beside)] if isinstance(source, TokensBank) else [])]
    require_separate(outputs, [("BANK", source), ("--texts", texts)])
    if not isinstance(source, TokensBank):
        if texts is not None:
            raise InputError(f"--texts {texts}: is for a bank of tokens, {bank} is one of {source.kind}. Leave it out.")
        return _Selection(config, source, (source,), rules).write(target, {}, restart, progress)
    texts_bank = open_texts_behind(source, texts)
    written = _Selection(config, texts_bank, (source, texts_bank), CombineRules()).write(beside, {}, restart, progress)
    fields = {
        "texts": {"path": os.path.relpath(beside, target.resolve()), "plan_digest": written["plan_digest"]},
        "kinds": written["kinds"],
    }
    return _Selection(config, source, (source, texts_bank), rules).write(target, fields, restart, progress)


@dataclass(frozen=True)
class _Selection:
    """Rows of `source`, told by the columns of banks of the same rows."""

    config: SelectConfig
    source: Bank
    columns: Sequence[Bank]
    rules: CombineRules

    def write(self, out: Path, fields: dict[str, Any], restart: bool, progress: Progress) -> Manifest:
        source, mirror = self.source, has_mirror(self.source)
        table, conditions = BankTable(self.columns), self.config.conditions
        table.check(conditions)
        with progress.phase("choose", len(source), unit="rows") as phase:
            pieces = self._pieces(partial(table.choose, conditions), phase.advance)
        if not pieces:
            raise InputError(self._nothing(table, conditions))
        rows = sum(piece.count for piece in pieces)
        with BankWriter(out, kind=source.kind, recipe=self._recipe(), restart=restart) as bank:
            if bank.committed:
                progress.message(f"{bank.folder}: already complete, nothing to do")
                return bank.manifest
            for one in self.columns:
                one.check_hashes()
            with progress.phase("select", rows, unit="rows") as phase:
                write_pieces(bank, pieces, phase, beside=self.rules.bytes_beside(rows, source, mirror=mirror))
            self.rules.write_beside(bank, mirror=mirror, progress=progress)
            return bank.commit(rows=rows, manifest={**self._fields(bank), **fields})

    def _recipe(self) -> dict[str, Any]:
        return {
            "select_method": METHOD,
            "select": {
                "from": self.source.content_digest,
                "by": [bank.content_digest for bank in self.columns if bank is not self.source],
                "where": sorted(str(condition) for condition in self.config.conditions),
                "rows": list(self.config.rows) if self.config.rows else None,
                "limit": self.config.limit,
            },
            **self.rules.recipe(self.source),
        }

    def _pieces(self, choose: Callable[[int, int], Rows], report: Callable[[int], None]) -> list[Piece]:
        first, last = self.config.rows or (0, len(self.source))
        left = self.config.limit or len(self.source)
        pieces: list[Piece] = []
        for shard, count in enumerate(self.source.shard_rows):
            start = int(self.source.starts[shard])
            low, high = max(start, first), min(start + count, last)
            if low < high and left:
                picked = partial(_pick, choose, start, low, high, left)
                if found := len(picked()):
                    pieces.append(Piece(self.source, shard, found, picked))
                    left -= found
            report(count)
        return pieces

    def _nothing(self, table: BankTable, conditions: Sequence[Condition]) -> str:
        asked = [f"--where {condition}" for condition in conditions]
        asked += [f"--rows {self.config.rows[0]}:{self.config.rows[1]}"] if self.config.rows else []
        there = "; ".join(table.values(name) for name in dict.fromkeys(condition.column for condition in conditions))
        return f"{self.source.folder}: no row fits {' '.join(asked)}. It has {len(self.source):,} rows{'; ' + there if there else ''}."

    def _fields(self, bank: BankWriter) -> dict[str, Any]:
        """What the source says, but for what is true only of all its rows."""
        before = stated(self.source)
        kept = {name: value for name, value in before.items() if name not in (*self.rules.of_all_rows, *self.rules.of_files)}
        found = counted_fields(self.rules, bank, before)
        selected = {"plan_digest": self.source.plan_digest, "rows": len(self.source)}
        return {**self.rules.selected(kept, found, bank.done_rows, len(self.source)), "selected": selected}


def _pick(choose: Callable[[int, int], Rows], start: int, low: int, high: int, most: int) -> Rows:
    """The first `most` chosen rows between `low` and `high`, counted from `start`."""
    return choose(low, high)[:most] + (low - start)
