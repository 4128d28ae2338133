"""The stage `in2 probes`: trials of one needle and one probe at chosen distances, to measure a model on.

A block is one stretch of filler with one key, one value and one place of the probe. Its trials differ in the needle only: one trial a
position p (1: right before the probe; 0: at the trial's begin, as far as it goes; lower is farther), one without a needle (`absent`), and
one with another key's needle (`null`). So whatever is compared within a block is the needle's doing. No key occurs in its filler.

Several places of the probe (`probe_pos`) give each block all trials again: needle position and distance are then two variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import BankWriter
from arrowbank.bank.columns import fixed_list_column, number_column, string_column
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.refusals import explains
from arrowbank.engine import Report
from arrowbank.engine.plan import Shard, shard_ranges
from arrowbank.engine.stage import Estimate, RunOptions
from arrowbank.errors import InputError
from arrowbank.in2.arm import FilledStage, filler_paths, mapped_files, reading_fields
from arrowbank.in2.arm_config import (
    PAD_TAIL,
    PLANTED,
    READING,
    Alphabet,
    FillerBadLine,
    FillerField,
    FillerTexts,
    FillerTokenizer,
    IdType,
    KeyLen,
    Length,
    ValLen,
    Vocab,
    check_vocab,
)
from arrowbank.in2.draws import Stream, Words, base_seed, first_below
from arrowbank.in2.fillers import Filler, open_filler
from arrowbank.in2.placement import FILLER, TRIES, KeyCounter
from arrowbank.inputs.lines import MAX_LINE_BYTES, MaxLineBytes
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Count, Flag, Help, Natural, Settings, Share, checked

KIND = "in2-probes"
METHOD = 1
PROBES = 500  # the offset of the stream that trials are drawn from
NEEDLE, ABSENT, NULL = "needle", "absent", "null"
NOWHERE = -1
ROW_BYTES = 80  # of what is said of a trial beside its tokens


@dataclass(frozen=True, kw_only=True)
class ProbesConfig(Settings):
    """Trials of one needle and one probe. `positions` and `probe_pos` are relative: 1 is as late as it goes."""

    length: Length
    positions: Annotated[
        tuple[Share, ...], Help("Of needles: 1 right before the probe, 0 as far as it goes.", example="0,0.5,1"), PLANTED
    ] = (0.0, 0.25, 0.5, 0.75, 1.0)
    blocks: Annotated[Count, Help("Repeats, each with filler, key and value of its own."), PLANTED] = 3
    probe_pos: Annotated[
        tuple[Share, ...],
        Help("Of probes: 1 at the trial's end, 0 at its begin; several: all trials each.", example="0.5,1"),
        PLANTED,
    ] = (1.0,)
    key_len: KeyLen = 4
    val_len: ValLen = 8
    alphabet: Alphabet = 512
    vocab: Vocab = 50304
    seed: Annotated[Natural, Help("The same for all probes that are compared."), PLANTED] = 0
    dtype: IdType = "uint16"
    tokenizer: FillerTokenizer | None = None
    text_field: FillerField | None = None
    on_bad_line: FillerBadLine | None = None
    max_line_bytes: MaxLineBytes = MAX_LINE_BYTES
    shard_tokens: Annotated[Count, Flag("")] = 1 << 23

    def check(self) -> None:
        check_vocab(self.alphabet, self.vocab, self.dtype)
        for option, values in (("--positions", self.positions), ("--probe-pos", self.probe_pos)):
            if not values or len(set(values)) < len(values):
                raise InputError(f"{option} {_listed(values)}: expected different numbers from 0 to 1, as in 0,0.5,1.")
        if self.last_probe < self.span:
            raise InputError(
                f"--length {self.length} is too small for a needle, a probe and {PAD_TAIL} tokens behind them. Give at least "
                f"{2 * self.span + PAD_TAIL}."
            )
        for where in self.probe_pos:
            needles = [self.needle(position, self.probe(where)) for position in self.positions]
            if len(set(needles)) < len(needles):
                raise InputError(
                    f"--positions {_listed(self.positions)}: two give the same place before a probe at {self.probe(where)} "
                    f"(--probe-pos {where:g}). Give fewer, a later --probe-pos, or a larger --length."
                )

    @property
    def texts(self) -> FillerTexts:
        """How fillers of texts are read."""
        return FillerTexts(**{name: getattr(self, name) for name in READING})

    @property
    def span(self) -> int:
        return self.key_len + self.val_len

    @property
    def last_probe(self) -> int:
        return self.length - PAD_TAIL - self.span

    def probe(self, where: float) -> int:
        """Where the probe starts for a probe_pos."""
        return self.span + round(where * (self.last_probe - self.span))

    def needle(self, position: float, probe: int) -> int:
        """Where the needle starts for a position."""
        return round(position * (probe - self.span))

    @property
    def trials_a_block(self) -> int:
        return len(self.probe_pos) * (len(self.positions) + 2)

    def recipe(self) -> dict[str, Any]:
        """What decides the rows."""
        return {name: value for name, value in asdict(self).items() if name not in READING}


@dataclass(frozen=True)
class Trial:
    """One row: what it is and where its spans are."""

    block: int
    condition: str
    position: float
    probe_pos: float
    needle: int
    probe: int


@dataclass(frozen=True)
class _ProbeBlock:
    """What the trials of a block share: filler [T], and key with value of the needle and of the null needle."""

    filler: int
    start: int
    ids: npt.NDArray[Any]
    spans: Words
    null_position: float


@explains("out")
@checked
def build_probes(
    config: ProbesConfig,
    fillers: Sequence[str | Path],
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Write the trials into the bank `out`; its manifest, `complete` or not. Goes on where an earlier run stopped.

    Raises InputError (options, fillers), PlanMismatch, BankLocked, CorruptBank, DiskFull, WorkerDied.
    """
    return ProbesStage(config, fillers, out).run(out, options, progress)


@checked
def estimate_probes(
    config: ProbesConfig,
    fillers: Sequence[str | Path],
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Estimate:
    """What `build_probes` with the same arguments makes. Nothing is written. Raises what `build_probes` raises before it writes."""
    return ProbesStage(config, fillers, out).estimate(out, options, progress=progress)


class ProbesStage(FilledStage):
    """The trials, their fillers open."""

    config: ProbesConfig
    kind, phase, unit, what = KIND, "probes", "trials", "the bank of trials"
    remedy = "Give fewer --blocks, --positions or --probe-pos, or"

    @property
    def _trials(self) -> int:
        return self.config.blocks * self.config.trials_a_block

    @property
    def shards(self) -> list[Shard]:
        return shard_ranges([self._trials], max(1, self.config.shard_tokens // self.config.length))

    def shard_bytes(self, shard: Shard) -> int:
        return shard.rows * (self.config.length * (np.dtype(self.config.dtype).itemsize + 1) + ROW_BYTES)

    def tokens(self, shard: Shard) -> int:
        return shard.rows * self.config.length

    @property
    def recipe(self) -> dict[str, Any]:
        filler = [{"tokens": entry["tokens"], "sha256": entry["sha256"]} for entry in self.opened[1]]
        return {"method": METHOD, **self.config.recipe(), "fillers": filler}

    @property
    def manifest(self) -> dict[str, Any]:
        return {
            **self.config.recipe(),
            **reading_fields(self.config.texts),
            "text_count": self._trials,
            "fillers": filler_paths(self.opened[1], self.out),
            "pad_tail": PAD_TAIL,
            "span": self.config.span,
        }

    def workers(self, bank: BankWriter) -> ProbesJob:
        return ProbesJob(self.config, mapped_files(self.fillers, self.opened[0], bank.work_dir))

    def finish(self, bank: BankWriter, progress: Progress) -> Manifest:
        return bank.commit(rows=self._trials)


@dataclass(frozen=True)
class ProbesJob:
    """How a process becomes a worker. Everything here pickles; the fillers are opened by the worker itself."""

    config: ProbesConfig
    fillers: tuple[str, ...]

    def __call__(self, number: int) -> ProbeRows:
        return ProbeRows(self.config, [open_filler(path) for path in self.fillers])


@dataclass(frozen=True)
class ProbeRows:
    """Makes shards of trials."""

    config: ProbesConfig
    fillers: Sequence[Filler]

    def __call__(self, shard: Shard, report: Report) -> pa.RecordBatch:
        batch = _trials(self.config, self.fillers, shard)
        report(shard.rows)
        return batch


def trials(config: ProbesConfig, block: int, null_position: float) -> list[Trial]:
    """The trials of a block in their order."""
    rows = []
    for where in config.probe_pos:
        probe = config.probe(where)
        for position in config.positions:
            rows.append(Trial(block, NEEDLE, position, where, config.needle(position, probe), probe))
        rows.append(Trial(block, ABSENT, np.nan, where, NOWHERE, probe))
        rows.append(Trial(block, NULL, null_position, where, config.needle(null_position, probe), probe))
    return rows


def _draw(config: ProbesConfig, fillers: Sequence[Filler], block: int) -> _ProbeBlock:
    """Draw a block. Keys that occur in its filler, or twice, are drawn again."""
    base = base_seed(config.seed, config.length, block)
    number = block % len(fillers)
    start = first_below(base + FILLER, len(fillers[number]) - config.length)
    ids = fillers[number].window(start, config.length)
    stream, counter = Stream(base + PROBES), KeyCounter(config.vocab, config.key_len)
    null_position = config.positions[stream.below(len(config.positions))]
    for _ in range(TRIES):
        spans = stream.many_below(config.alphabet, 2 * config.span).reshape(2, -1)
        if counter.count(ids, spans[:, : config.key_len], np.empty(0, np.int64)) == (0, 0):
            return _ProbeBlock(number, start, ids, spans, null_position)
    raise InputError(
        f"block {block}: {TRIES} draws gave no two keys that its filler does not hold. Give a longer --key-len or a larger --alphabet."
    )


def _trials(config: ProbesConfig, fillers: Sequence[Filler], shard: Shard) -> pa.RecordBatch:
    ids = np.empty((shard.rows, config.length), config.dtype)
    mask = np.zeros((shard.rows, config.length), np.uint8)
    rows: list[Trial] = []
    places: list[tuple[int, int]] = []
    for number in range(shard.start // config.trials_a_block, (shard.stop - 1) // config.trials_a_block + 1):
        block = _draw(config, fillers, number)
        first = number * config.trials_a_block
        for trial, one in enumerate(trials(config, number, block.null_position), first):
            if not shard.start <= trial < shard.stop:
                continue
            row = trial - shard.start
            ids[row] = block.ids
            if one.needle != NOWHERE:
                ids[row, one.needle : one.needle + config.span] = block.spans[int(one.condition == NULL)]
            ids[row, one.probe : one.probe + config.span] = block.spans[0]
            mask[row, one.probe + config.key_len : one.probe + config.span] = 1
            rows.append(one)
            places.append((block.filler, block.start))
    probes = np.array([one.probe for one in rows], np.int32)
    needles = np.array([one.needle for one in rows], np.int32)
    return pa.record_batch(
        {
            "input_ids": fixed_list_column(ids),
            "answer_mask": fixed_list_column(mask),
            "condition": string_column([one.condition for one in rows]),
            "position": number_column(np.array([one.position for one in rows], np.float64)),
            "probe_pos": number_column(np.array([one.probe_pos for one in rows], np.float64)),
            "block": number_column(np.array([one.block for one in rows], np.int32)),
            "needle_start": number_column(needles),
            "probe_start": number_column(probes),
            "answer_start": number_column(probes + np.int32(config.key_len)),
            "distance": number_column(np.where(needles == NOWHERE, NOWHERE, probes - needles).astype(np.int32)),
            "filler": number_column(np.array([filler for filler, _ in places], np.int32)),
            "filler_start": number_column(np.array([start for _, start in places], np.int64)),
            "trial": number_column(np.arange(shard.start, shard.stop)),
        }
    )


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
