"""The stage `select`: some rows of a bank as a bank of its own, in their order, with all columns.

The rows of a tokens bank are told by its texts bank as well, and the texts of the rows that are chosen are written beside it: a tokens bank
is of no use without.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from arrowbank.bank import Bank, BankWriter, open_bank
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.opening import open_texts_behind
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explains
from arrowbank.errors import InputError
from arrowbank.joining.conditions import Condition, Table, parse_condition
from arrowbank.joining.fields import bytes_beside, counted, has_mirror, stated, vectors_recipe, write_beside
from arrowbank.joining.pieces import Piece, Rows, write_pieces
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Count, Settings, checked

METHOD = 1  # raise it when the same bank and conditions would give other rows
KINDS = ("texts", "tokens", "features", "targets")
BESIDE = "-texts"


@dataclass(frozen=True, kw_only=True)
class SelectConfig(Settings):
    """Which rows: those in which every condition of `where` holds (such as "kind=query,candidate" or "length<=128"), of the `rows` (start,
    stop), and of these the first `limit`."""

    where: tuple[str, ...] = ()
    rows: tuple[int, int] | None = None
    limit: Count | None = None

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
def select_rows(
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
    if source.kind not in KINDS:
        raise InputError(
            f"{bank}: a bank of {source.kind}; rows of {', '.join(KINDS)} can be selected. Build a smaller bank instead."
        )
    beside = target.resolve().with_name(target.resolve().name + BESIDE)  # for tokens: their texts
    outputs: list[Named] = [("--out", out), *([("--out", beside)] if source.kind == "tokens" else [])]
    require_separate(outputs, [("BANK", source), ("--texts", texts)])
    if source.kind != "tokens" and texts is not None:
        raise InputError(f"--texts {texts}: is for a bank of tokens, {bank} is one of {source.kind}. Leave it out.")
    if source.kind != "tokens":
        return _Selection(config, source, (source,)).write(target, {}, restart, progress)
    texts_bank = open_texts_behind(source, texts)
    written = _Selection(config, texts_bank, (source, texts_bank)).write(beside, {}, restart, progress)
    fields = {
        "texts": {"path": os.path.relpath(beside, target.resolve()), "plan_digest": written["plan_digest"]},
        "kinds": written["kinds"],
    }
    return _Selection(config, source, (source, texts_bank)).write(target, fields, restart, progress)


@dataclass(frozen=True)
class _Selection:
    """Rows of `source`, told by the columns of banks of the same rows."""

    config: SelectConfig
    source: Bank
    columns: Sequence[Bank]

    def write(self, out: Path, fields: dict[str, Any], restart: bool, progress: Progress) -> Manifest:
        source, mirror = self.source, has_mirror(self.source)
        table, conditions = Table(self.columns), self.config.conditions
        table.check(conditions)
        with progress.phase("choose", len(source), unit="rows") as phase:
            pieces = self._pieces(partial(table.choose, conditions), phase.advance)
        if not pieces:
            raise InputError(self._nothing(table, conditions))
        rows = sum(piece.count for piece in pieces)
        with BankWriter(out, kind=source.kind, recipe=self._recipe(mirror), restart=restart) as bank:
            if bank.committed:
                progress.message(f"{bank.folder}: already complete, nothing to do")
                return bank.manifest
            for one in self.columns:
                one.check_hashes()
            with progress.phase("select", rows, unit="rows") as phase:
                write_pieces(bank, pieces, phase, beside=bytes_beside(rows, source, mirror=mirror))
            write_beside(bank, mirror=mirror, progress=progress)
            return bank.commit(rows=rows, manifest={**self._fields(bank), **fields})

    def _recipe(self, mirror: bool) -> dict[str, Any]:
        return {
            "select_method": METHOD,
            "select": {
                "from": self.source.content_digest,
                "by": [bank.content_digest for bank in self.columns if bank is not self.source],
                "where": sorted(str(condition) for condition in self.config.conditions),
                "rows": list(self.config.rows) if self.config.rows else None,
                "limit": self.config.limit,
            },
            **vectors_recipe(self.source),
            **({"mirror": mirror} if self.source.kind == "features" else {}),
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

    def _nothing(self, table: Table, conditions: Sequence[Condition]) -> str:
        asked = [f"--where {condition}" for condition in conditions]
        asked += [f"--rows {self.config.rows[0]}:{self.config.rows[1]}"] if self.config.rows else []
        there = "; ".join(table.values(name) for name in dict.fromkeys(condition.column for condition in conditions))
        return f"{self.source.folder}: no row fits {' '.join(asked)}. It has {len(self.source):,} rows{'; ' + there if there else ''}."

    def _fields(self, bank: BankWriter) -> dict[str, Any]:
        """What the source says, but for what is true only of all its rows."""
        before = stated(self.source)
        left_out = ("counts", "codec_error", "generations", "merged", "source_duplicates")
        kept = {name: value for name, value in before.items() if name not in left_out}
        found = counted(bank, before)
        if bank.kind == "targets":
            found["counts"]["dropped"] = {"not_selected": len(self.source) - bank.done_rows}
        else:
            kept = {name: value for name, value in kept.items() if not name.endswith("_sha256")}
            found["generations"] = [bank.done_rows]
        selected = {"plan_digest": self.source.plan_digest, "rows": len(self.source)}
        return {**kept, **found, "selected": selected}


def _pick(choose: Callable[[int, int], Rows], start: int, low: int, high: int, most: int) -> Rows:
    """The first `most` chosen rows between `low` and `high`, counted from `start`."""
    return choose(low, high)[:most] + (low - start)
