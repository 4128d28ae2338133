"""Exports of arms in the gate: each layout is read back and cut into windows the way that its loader cuts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.formats.tokenread import TokenExport
from arrowbank.formats.tokenshards import LAYOUTS
from arrowbank.in2.blocks import Block, Ids
from arrowbank.in2.checks import cut


@dataclass
class _Cut:
    """A loader's windows: `read` tokens, `step` apart."""

    stride: str
    read: int
    step: int
    whole: int = 0
    wrong: list[int] = field(default_factory=list)


class Windows:
    """Files of examples, each `width` tokens of which the first `length` are its own, under loaders of both strides."""

    def __init__(
        self,
        length: int,
        shards: Sequence[Ids],
        promised: Mapping[str, int],
        *,
        looks_ahead: bool,
        width: int | None = None,
    ) -> None:
        self._shards, self._promised, self._width = shards, promised, width or length
        self._cuts = [
            _Cut(stride, length + 1 if looks_ahead else step, step) for stride, step in (("T", length), ("T+1", length + 1))
        ]

    def add(self, block: Block) -> None:
        """Cut what holds the block's examples."""
        for one in self._cuts:
            whole, wrong = cut(block, self._shards, width=self._width, read=one.read, step=one.step)
            one.whole += whole
            one.wrong += wrong.tolist()

    def check(self, name: str) -> Check:
        """Whether every triple in one window is there, and as many are as the manifest says."""
        wrong = [f"a triple is not whole in example {one.wrong[0]} (stride {one.stride})" for one in self._cuts if one.wrong]
        wrong += [
            f"a loader of stride {one.stride} gets {one.whole:,} triples whole, the manifest says {self._promised.get(one.stride)}"
            for one in self._cuts
            if one.whole != self._promised.get(one.stride)
        ]
        good = ", ".join(f"{one.whole:,} triples whole under stride {one.stride}" for one in self._cuts)
        return found_wrong(name, wrong, good, "")


class ExportedArm:
    """An export, held against the arm that it was made from. Raises what TokenExport raises."""

    def __init__(self, folder: str | Path) -> None:
        self.export = TokenExport(folder)
        said = self.export.said
        self.source: str = said["made_from"]["plan_digest"]
        self.width: int = said["T"] + (said["stride"] == "T+1")
        self.windows = Windows(
            said["T"],
            self.export.shards,
            said["survivors"],
            looks_ahead=LAYOUTS[said["format"]].looks_ahead,
            width=self.width,
        )
        self._wrong: list[int] = []

    @property
    def name(self) -> str:
        return f"{self.export.folder.name} ({self.export.said['format']})"

    def add(self, block: Block) -> None:
        """Hold the block's examples against those of the export."""
        config = block.arm.config
        self.windows.add(block)
        for row, example in enumerate(block.examples.tolist()):
            shard, place = divmod(example, config.per_shard)  # the same examples in each file as in the raw shards
            tokens = self.export.shards[shard] if shard < len(self.export.shards) else np.empty(0, np.uint16)
            found = tokens[place * self.width : place * self.width + config.length]
            if not np.array_equal(found, block.ids[row]):
                self._wrong.append(example)

    def checks(self) -> list[Check]:
        """What there is to say when all blocks have been seen."""
        differing = [str(example) for example in self._wrong]
        return [
            found_wrong(f"{self.name}: examples", differing, "equal to the arm's", "differ from the arm's: example"),
            self.windows.check(f"{self.name}: windows"),
        ]
