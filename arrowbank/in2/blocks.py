"""An arm read back: its options, its fillers, and its rows a shard at a time, with what the draws say should be there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

from arrowbank.bank import open_bank
from arrowbank.bank.columns import fixed_lists, list_values
from arrowbank.bank.kinds.in2_bank import ArmBank
from arrowbank.bank.manifest import MANIFEST, parsed_json
from arrowbank.bank.remote.addresses import is_address
from arrowbank.errors import CorruptBank, InputError
from arrowbank.in2.arm import config_of
from arrowbank.in2.arm_config import READING, FillerTexts, In2Config
from arrowbank.in2.fillers import Filler, open_filler
from arrowbank.in2.placement import Placement, Planted
from arrowbank.in2.raw_shards import FIELDS, manifest_name, raw_names

Ids = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
LISTS = ("needle_start", "probe_start", "answer_start", "distance", "decoy_start")


class Arm:
    """A committed arm. Raises what `open_bank` raises, and InputError for a bank of another kind."""

    def __init__(self, folder: str | Path) -> None:
        self.bank = open_bank(folder, kind=ArmBank)
        self.folder = self.bank.folder
        self.recipe: dict[str, Any] = self.bank.manifest.recipe
        self.config = self._config()

    def _config(self) -> In2Config:
        """The options, which must be those of the rows; CorruptBank where they are not."""
        path = self.folder / MANIFEST
        try:
            config = config_of(self.recipe)
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptBank(f"{path}: its recipe is not an arm's ({error}). Restore it or build the arm again.") from None
        ids = self.bank.schema.field("input_ids").type
        found, wanted = (len(self.bank), ids.list_size, str(ids.value_type)), (config.examples, config.length, config.dtype)
        if found != wanted:
            raise CorruptBank(
                f"{path}: its recipe is of {wanted[0]} examples of {wanted[1]} {wanted[2]} tokens, the rows are {found[0]} of "
                f"{found[1]} {found[2]}. Restore it or build the arm again."
            )
        return config

    @cached_property
    def raw(self) -> list[Ids] | None:
        """The raw shards, mapped; None for an arm built without them."""
        if not self.config.mirror:
            return None
        return [self._map_raw(name) for name in raw_names(self.config)]

    def _map_raw(self, name: str) -> Ids:
        try:
            with self.bank.opening(name) as path:
                return np.asarray(np.memmap(path, self.config.dtype, mode="r"))
        except (OSError, ValueError) as error:
            raise CorruptBank(f"{self.folder / name}: not readable as raw tokens ({error}). Build the arm again.") from None

    def fields(self) -> dict[str, Any]:
        """The mirror's manifest without its records: its last line."""
        with self.bank.opening(manifest_name(self.config)) as path, path.open(encoding="utf-8", errors="replace") as file:
            last = "".join(deque(file, maxlen=1))
        try:
            found: dict[str, Any] = parsed_json(("{" + last.removeprefix(FIELDS)).encode("utf-8", "replace"))
        except ValueError as error:
            raise CorruptBank(f"{path}: its last line is not what was written ({error}). Build the arm again.") from None
        return found

    def records(self) -> Iterator[str]:
        """The lines of the mirror's manifest between its first and its last: an example's records each."""
        with self.bank.opening(manifest_name(self.config)) as path, path.open(encoding="utf-8", errors="replace") as file:
            next(file, None)
            for line in file:
                yield line.rstrip("\n").removesuffix(",")

    def fillers(self, given: Sequence[str | Path] | None) -> list[Filler]:
        """The sources of the filler: where the manifest says, or `given`. Raises InputError where one is gone or another."""
        manifest = self.bank.manifest
        entries, read = manifest.fillers, {name: getattr(manifest, name) for name in READING}
        texts = FillerTexts(**{name: value for name, value in read.items() if value is not None})
        paths = given or [entry.path if is_address(entry.path) else self.folder / entry.path for entry in entries]
        if len(paths) != len(entries):
            raise InputError(f"{self.folder}: built from {len(entries)} fillers, {len(paths)} are given.")
        opened = []
        for path, entry in zip(paths, entries, strict=True):
            filler = open_filler(path, texts)
            if filler.digest != entry.sha256:
                raise InputError(
                    f"{path}: not the filler that {self.folder} was built from (sha256 {filler.digest[:12]}…, expected "
                    f"{entry.sha256[:12]}…)."
                )
            opened.append(filler)
        return opened

    def blocks(self) -> Iterator[Block]:
        """All rows, an Arrow shard at a time."""
        placement = Placement(self.config)
        for first, name, batch in zip(self.bank.starts.tolist(), self.bank.shard_names, self.bank.shards(), strict=False):
            yield Block(self, self.folder / name, batch, placement, first)


@dataclass
class Block:
    """The rows of one Arrow shard. Arrays with a row for each triple are in the order of the rows."""

    arm: Arm
    path: Path
    batch: pa.RecordBatch
    placement: Placement
    first: int

    @cached_property
    def examples(self) -> Rows:
        """The numbers of the examples: those of the rows. (What the column says of them is checked.)"""
        return np.arange(self.first, self.first + self.batch.num_rows)

    @cached_property
    def stored(self) -> Ids:
        """The ids of the Arrow shard, [n, T]."""
        return fixed_lists(self.batch.column("input_ids"))

    @cached_property
    def ids(self) -> Ids:
        """The ids that a trainer gets, [n, T]: those of the raw shards, where there are any."""
        config, raw = self.arm.config, self.arm.raw
        if raw is None:
            return self.stored
        ids = np.zeros_like(self.stored)
        for row, example in enumerate(self.examples.tolist()):
            shard, place = divmod(example, config.per_shard)
            if 0 <= shard < len(raw) and len(raw[shard]) >= (place + 1) * config.length:
                ids[row] = raw[shard][place * config.length : (place + 1) * config.length]
        return ids

    @cached_property
    def planted(self) -> list[Planted]:
        """What the draws say, an example each."""
        return [self.placement.place(example) for example in self.examples.tolist()]

    def starts(self, name: str) -> Rows:
        """The places of a list column, [sum of lengths]."""
        return list_values(self.batch.column(name))[0].astype(np.int64)

    def counts(self, name: str) -> Rows:
        """How many places of a list column each row has, [n]."""
        return np.diff(list_values(self.batch.column(name))[1]).astype(np.int64)

    def rows(self, name: str) -> Rows:
        """The row that each place of a list column belongs to."""
        return np.repeat(np.arange(len(self.examples)), self.counts(name))

    def inside(self, name: str) -> npt.NDArray[np.bool_]:
        """Whether a whole span fits behind each place."""
        starts = self.starts(name)
        return (starts >= 0) & (starts <= self.arm.config.length - self.arm.config.span)

    def flat(self, name: str) -> Rows:
        """The places in all rows laid end to end; one that does not fit its row is moved to where it does."""
        last = self.arm.config.length - self.arm.config.span
        return self.rows(name) * self.arm.config.length + np.clip(self.starts(name), 0, last)

    def spans(self, name: str) -> Ids:
        """The tokens at each place, [places, span]."""
        windows = sliding_window_view(self.ids.reshape(-1), self.arm.config.span)
        found: Ids = windows[self.flat(name)]
        return found

    @cached_property
    def drawn_spans(self) -> Ids:
        """Key and value of each triple as drawn, [triples, span]."""
        return np.concatenate([one.spans for one in self.planted])

    @cached_property
    def drawn_decoys(self) -> Ids:
        return np.concatenate([one.decoy_spans for one in self.planted])
