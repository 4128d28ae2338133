"""What the gate looks at in one arm, a function a check: each gets a block of rows and says which examples are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from arrowbank.bank.checks import Check, attempt, found_wrong
from arrowbank.bank.columns import fixed_lists, values_of
from arrowbank.formats.loaders import LOADERS, RANDOM, Batches, LoaderStops
from arrowbank.formats.tokens import LAYOUTS, STRIDES, TokenExport
from arrowbank.in2.arm_config import PAD_TAIL, In2Config
from arrowbank.in2.blocks import LISTS, Block, Ids, Rows
from arrowbank.in2.fillers import Filler
from arrowbank.in2.placement import KeyCounter
from arrowbank.in2.raw_shards import record_lines

Wrong = npt.NDArray[Any]  # the examples in which something is wrong


def lists(block: Block) -> Wrong:
    """Rows that are not the example and the arm that they should be, without K triples (none in arm a), or with other decoys
    than they count."""
    config = block.arm.config
    triples = 0 if config.arm == "a" else config.triples
    bad: npt.NDArray[np.bool_] = np.asarray(values_of(block.batch.column("example")) != block.examples)
    bad |= np.array([arm != config.arm for arm in block.batch.column("arm").to_pylist()], bool)
    for name in LISTS[:4]:
        bad |= block.counts(name) != triples
    bad |= block.counts("decoy_start") != values_of(block.batch.column("decoys_placed"))
    bad |= block.counts("decoy_start") != np.array([len(one.decoys) for one in block.planted])
    return _where(block, bad)


def ids(block: Block) -> Wrong:
    return _where(block, np.any(block.ids >= block.arm.config.vocab, axis=1))


def mirror(block: Block) -> Wrong:
    return _where(block, (block.ids != block.stored).any(axis=1))


def probes(block: Block) -> Wrong:
    key = block.arm.config.key_len
    return _of(block, "probe_start", (block.spans("probe_start") != block.drawn_spans)[:, :key].any(axis=1))


def answers(block: Block) -> Wrong:
    config = block.arm.config
    wrong = (block.spans("probe_start") != block.drawn_spans)[:, config.key_len :].any(axis=1)
    wrong |= block.starts("answer_start") != block.starts("probe_start") + config.key_len
    return _of(block, "probe_start", wrong)


def needles(block: Block) -> Wrong:
    wrong = (block.spans("needle_start") != block.drawn_spans).any(axis=1) | ~block.inside("needle_start")
    return _of(block, "needle_start", wrong)


def order(block: Block) -> Wrong:
    return _of(block, "needle_start", block.starts("needle_start") >= block.starts("probe_start"))


def distances(block: Block) -> Wrong:
    distance = block.starts("probe_start") - block.starts("needle_start")
    return _of(block, "distance", block.starts("distance") != distance)


def tail(block: Block) -> Wrong:
    config = block.arm.config
    return _of(block, "answer_start", block.starts("answer_start") + config.val_len > config.length - PAD_TAIL)


def overlaps(block: Block) -> Wrong:
    everything = np.sort(np.concatenate([block.flat(name) for name in ("needle_start", "probe_start", "decoy_start")]))
    close = np.flatnonzero(np.diff(everything) < block.arm.config.span)
    return np.unique(block.examples[everything[close] // block.arm.config.length])


def apart(block: Block) -> Wrong:
    sites, rows = block.starts("probe_start"), block.rows("probe_start")
    close = (np.diff(sites) < 2 * block.arm.config.span) & (np.diff(rows) == 0)
    return np.unique(block.examples[rows[1:][close]])


def arm_distances(block: Block) -> Wrong:
    """Arm b: the needle right before its probe. Arm c: at least a span and d_min before it. Arm a has none."""
    config, distance = block.arm.config, block.starts("probe_start") - block.starts("needle_start")
    if config.arm == "b":
        return _of(block, "distance", distance != config.span)
    return _of(block, "distance", distance < config.span + config.min_distance)


def decoys(block: Block) -> Wrong:
    """Decoys that are not what was drawn, or whose key is asked for."""
    config = block.arm.config
    found, keys = block.spans("decoy_start"), block.spans("probe_start")[:, : config.key_len]
    wrong = (found != block.drawn_decoys).any(axis=1) | ~block.inside("decoy_start")
    asked = _with_row(block.rows("probe_start"), keys)
    mine = _with_row(block.rows("decoy_start"), found[:, : config.key_len])
    if len(mine) and len(asked):
        both, place = np.unique(np.concatenate([asked, mine]), axis=0, return_inverse=True)
        is_asked = np.zeros(len(both), bool)
        is_asked[place.reshape(-1)[: len(asked)]] = True
        wrong |= is_asked[place.reshape(-1)[len(asked) :]]
    return _of(block, "decoy_start", wrong)


def mask(block: Block) -> Wrong:
    config = block.arm.config
    wanted = np.zeros(block.stored.shape, np.uint8)
    places = block.rows("probe_start") * config.length + np.clip(
        block.starts("probe_start") + config.key_len, 0, config.length - config.val_len
    )
    sliding_window_view(wanted.reshape(-1), config.val_len, writeable=True)[places] = 1
    return _where(block, (fixed_lists(block.batch.column("answer_mask")) != wanted).any(axis=1))


def filler(block: Block, fillers: Sequence[Filler]) -> Wrong:
    """Rows that differ from their source outside planted spans, or that are recorded to start where the draws do not."""
    config = block.arm.config
    numbers, starts = values_of(block.batch.column("filler")), values_of(block.batch.column("filler_start"))
    source = np.empty_like(block.stored)
    wrong = np.zeros(len(block.examples), bool)
    for row, (example, number, start) in enumerate(
        zip(block.examples.tolist(), numbers.tolist(), starts.tolist(), strict=True)
    ):
        if number != example % len(fillers) or start != block.placement.filler_start(example, len(fillers[number])):
            wrong[row] = True
        else:
            source[row] = fillers[number].window(start, config.length)
    places = sliding_window_view(source.reshape(-1), config.span, writeable=True)
    for name in ("needle_start", "probe_start", "decoy_start"):
        places[block.flat(name)] = block.spans(name)
    return _where(block, wrong | (source != block.ids).any(axis=1))


def repeated_keys(block: Block, counter: KeyCounter) -> tuple[int, int]:
    """How many keys an example holds twice, and how often one stands in its filler, over the block."""
    twice = stray = 0
    for row, one in enumerate(block.planted):
        if one.sites:
            keys = np.concatenate([one.spans, one.decoy_spans])[:, : block.arm.config.key_len]
            found = counter.count(block.ids[row], keys, np.array(one.sites + one.needles + one.decoys))
            twice, stray = twice + found[0], stray + found[1]
    return twice, stray


def records(block: Block, lines: list[str]) -> Wrong:
    wanted = record_lines(block.batch, block.arm.config).tobytes().decode().split(",\n")
    wrong = [one != other for one, other in zip(lines, wanted, strict=False)]
    wrong += [True] * (len(block.examples) - len(wrong))
    return _where(block, np.array(wrong, bool))


def cut(
    block: Block, shards: Sequence[Ids], starts: Sequence[npt.NDArray[np.int64]], *, width: int, read: int, per_shard: int
) -> tuple[int, Wrong]:
    """Read windows of `read` tokens at `starts` of files of `per_shard` examples, `width` tokens each: the triples that one window holds
    whole, and the examples of those whose tokens are then not key and value."""
    span = block.arm.config.span
    whole, wrong = 0, [np.empty(0, np.int64)]
    rows, offsets = block.rows("probe_start"), np.arange(span)
    shard_of = (block.examples // per_shard)[rows]
    for shard in np.unique(shard_of):
        mine = shard_of == shard
        if shard >= len(shards) or len(shards[int(shard)]) < read or not len(starts[int(shard)]):
            continue
        tokens, begins = shards[int(shard)], starts[int(shard)]
        first = (block.examples[rows[mine]] - shard * per_shard) * width
        needle, probe = (first + block.starts(f"{name}_start")[mine] for name in ("needle", "probe"))
        window = np.searchsorted(begins, needle, side="right") - 1
        end = begins[window] + read
        inside = (
            (window >= 0) & (needle + span <= end) & (probe >= begins[window]) & (probe + span <= end) & (end <= len(tokens))
        )
        whole += int(np.count_nonzero(inside))
        for place in (needle, probe):
            found = tokens[place[inside, None] + offsets]
            bad = (found != block.drawn_spans[mine][inside]).any(axis=1)
            wrong.append(block.examples[rows[mine][inside][bad]])
    return whole, np.unique(np.concatenate(wrong))


def _where(block: Block, wrong: npt.NDArray[np.bool_]) -> Wrong:
    found: Wrong = block.examples[wrong]
    return found


def _of(block: Block, name: str, wrong: npt.NDArray[np.bool_]) -> Wrong:
    """The examples that hold the places which are wrong."""
    return np.unique(block.examples[block.rows(name)[wrong]])


def _with_row(rows: Rows, keys: Ids) -> npt.NDArray[np.int64]:
    return np.concatenate([rows[:, None], keys.astype(np.int64)], axis=1)


@dataclass
class Finding:
    """A check over many blocks: what it says when all is well, and the examples in which it was not."""

    name: str
    good: str
    bad: str
    check: Callable[[Block], Wrong] | None = None
    wrong: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # why a block could not be checked

    def look(self, block: Block) -> None:
        """Check a block."""
        if self.check is not None:
            self.try_to(self.check, block)

    def try_to(self, check: Callable[[Block], Wrong], block: Block) -> None:
        """Check a block with `check`; an exception is a failure of this check, with the shard."""
        with attempt(block.path) as failures:
            self.add(check(block))
        self.failures += failures

    def add(self, examples: Wrong) -> None:
        self.wrong += [int(example) for example in examples]

    def result(self) -> Check:
        """What there is to say after all blocks."""
        if self.failures:
            return Check(self.name, False, self.failures[0])
        return found_wrong(self.name, [str(example) for example in self.wrong], self.good, f"{self.bad} example")


def findings(with_raw: bool) -> list[Finding]:
    """The checks that need nothing but a block whose `lists` are right."""
    found = [
        Finding("ids", "all below the vocabulary", "ids past the vocabulary in", ids),
        Finding("probes", "every probe is its key", "a probe is not its key in", probes),
        Finding("answers", "every answer is its value", "an answer is not its value in", answers),
        Finding("needles", "every needle is its key and value", "a needle cannot be retrieved in", needles),
        Finding("order", "every needle before its probe", "a needle is not before its probe in", order),
        Finding("distances", "all as recorded", "a distance is not as recorded in", distances),
        Finding("tail", f"answers stay clear of the last {PAD_TAIL} tokens", "an answer reaches the tail in", tail),
        Finding("overlaps", "no two planted spans overlap", "planted spans overlap in", overlaps),
        Finding("sites", "at least two spans apart", "sites are less than two spans apart in", apart),
        Finding("arm", "needles as far away as the arm says", "a needle is not where its arm says in", arm_distances),
        Finding("decoys", "as drawn, and never asked for", "a decoy is changed or asked for in", decoys),
        Finding("mask", "1 at answers and nowhere else", "the answer mask is wrong in", mask),
    ]
    if with_raw:
        found.append(Finding("mirror", "raw shards equal the Arrow shards", "raw and Arrow shards differ in", mirror))
    return found


@dataclass
class _Cut:
    """The windows that a loader reads: their starts by file, ascending, and the tokens of each."""

    starts: Sequence[npt.NDArray[np.int64]]
    read: int
    whole: float = 0
    wrong: list[int] = field(default_factory=list)


class LoaderWindows:
    """Files of `per_shard` examples, each `width` tokens wide, in the windows of loaders, and what is promised of each."""

    def __init__(
        self, shards: Sequence[Ids], cuts: Mapping[str, _Cut], promised: Mapping[str, int], *, width: int, per_shard: int
    ) -> None:
        self._shards, self._cuts, self._promised = shards, cuts, promised
        self._width, self._per_shard = width, per_shard

    @classmethod
    def of_arm(cls, config: In2Config, shards: Sequence[Ids], promised: Mapping[str, int]) -> LoaderWindows:
        """An arm's own raw shards, under loaders that look no token ahead, of both strides."""
        cuts = {
            f"stride {name}": _Cut([np.arange(0, len(ids) - step + 1, step) for ids in shards], step)
            for name, step in zip(STRIDES, (config.length, config.length + 1), strict=True)
        }
        promised = {f"stride {name}": count for name, count in promised.items()}
        return cls(shards, cuts, promised, width=config.length, per_shard=config.per_shard)

    @classmethod
    def of_export(cls, export: TokenExport, *, width: int, per_shard: int) -> LoaderWindows:
        """An export, under the loaders that read it."""
        said = export.said
        files, batches = (
            [len(ids) for ids in export.shards],
            Batches(width, said["global_batch"] // said["ranks"], said["ranks"]),
        )
        cuts = {}
        for name in LAYOUTS[said["format"]].loaders:
            if name == RANDOM:  # a window may start anywhere
                cuts[name] = _Cut([np.arange(max(0, tokens - width)) for tokens in files], width + 1)
                continue
            try:
                cuts[name] = _Cut(LOADERS[name].windows(files, batches), width + LOADERS[name].ahead)
            except LoaderStops:  # it delivers nothing
                cuts[name] = _Cut([np.empty(0, np.int64)] * len(files), width)
        return cls(export.shards, cuts, said["survivors"], width=width, per_shard=per_shard)

    def add(self, block: Block) -> None:
        """Read what holds the block's examples."""
        for name, one in self._cuts.items():
            if name == RANDOM:
                one.whole += self._average(block, one)
                continue
            whole, wrong = cut(block, self._shards, one.starts, width=self._width, read=one.read, per_shard=self._per_shard)
            one.whole += whole
            one.wrong += wrong.tolist()

    def _average(self, block: Block, one: _Cut) -> float:
        """The triples that as many windows as there are examples hold on average: counted at every place where one may start."""
        first = block.examples[block.rows("probe_start")] * self._width
        begin, end = first + block.starts("needle_start"), first + block.starts("probe_start") + block.arm.config.span
        places = len(one.starts[0])
        low, high = np.maximum(end - one.read, 0), np.minimum(begin, places - 1)
        changes = np.bincount(low[low <= high], minlength=places + 1) - np.bincount(high[low <= high] + 1, minlength=places + 1)
        return float(np.cumsum(changes)[:places].mean()) * block.arm.config.examples if places else 0.0

    def check(self, name: str) -> Check:
        """Whether every triple in one window is there, and as many are as the manifest says."""
        wrong = [
            f"a triple is not whole in example {one.wrong[0]} ({loader})" for loader, one in self._cuts.items() if one.wrong
        ]
        wrong += [
            f"{loader} gets {round(one.whole):,} triples whole, the manifest says {self._promised.get(loader)}"
            for loader, one in self._cuts.items()
            if round(one.whole) != self._promised.get(loader)
        ]
        good = "triples whole: " + ", ".join(f"{round(one.whole):,} by {loader}" for loader, one in self._cuts.items())
        return found_wrong(name, wrong, good, "")


class ExportedArm:
    """An export, held against the arm that it was made from. Raises what TokenExport raises."""

    def __init__(self, folder: str | Path) -> None:
        self.export = TokenExport(folder)
        said = self.export.said
        self.source: str = said["made_from"]["plan_digest"]
        self.width: int = said["T"] + (said["stride"] == "T+1")
        self.per_shard: int = said["shards"][0]["examples"]
        self.windows = LoaderWindows.of_export(self.export, width=self.width, per_shard=self.per_shard)
        self._wrong: list[int] = []

    @property
    def name(self) -> str:
        return f"{self.export.folder.name} ({self.export.said['format']})"

    def add(self, block: Block) -> None:
        """Hold the block's examples against those of the export."""
        config = block.arm.config
        self.windows.add(block)
        for row, example in enumerate(block.examples.tolist()):
            shard, place = divmod(example, self.per_shard)
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
