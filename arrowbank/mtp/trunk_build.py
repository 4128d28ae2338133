"""The stage `trunk build`: data sets go in, what a model computes and would say next at each of their tokens comes out.

Windows are packed anew in every run, since their ids are part of the key; forward passes are what is expensive, and a finished
shard of them is kept. A shard is a contiguous range of windows. Windows of one length run together; the short last window of
a set is run at its exact length: no padding enters the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from arrowbank.bank import BankWriter
from arrowbank.bank.files import publishing
from arrowbank.bank.kinds.trunk_bank import HIDDEN_TYPES, KIND, TrunkColumns, row_offsets, window_bytes
from arrowbank.bank.manifest import STATE, Manifest
from arrowbank.bank.places import Named
from arrowbank.bank.refusals import explains
from arrowbank.engine.plan import MAX_VALUES, SHARD_BYTES, BatchRules, Shard, batches, cut_shards
from arrowbank.engine.stage import Estimate, RunOptions, Stage
from arrowbank.errors import BadVector, InputError
from arrowbank.inputs.sources import source_places
from arrowbank.models import describe, load_tokenizer, local_model, tokenizer_fingerprint
from arrowbank.mtp.trunk_plan import (
    FILES_OVERHEAD,
    METHOD,
    SHARD_OVERHEAD,
    TEXT_FIELD,
    TOKENS,
    TrunkConfig,
    TrunkData,
    model_recipe,
)
from arrowbank.mtp.trunk_records import (
    HELD_OUT_EVERY,
    NumberedRecords,
    PackedSet,
    PackedWindows,
    TokenRecords,
    least_tokens,
    number_records,
    pack,
    shuffled,
)
from arrowbank.mtp.trunk_taps import build_taps, taps_bytes, taps_folder
from arrowbank.progress import SILENT, Progress, tell_unread
from arrowbank.settings import checked, refuse_unread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from arrowbank.models import ModelConfig, ModelInfo
    from arrowbank.mtp.trunk_passes import TrunkPasses, TrunkStates


Report = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class WindowRows:
    """The windows of all shards but for their ids, which lie in a file: `ids` names an .npy of [W, T] int32, mapped by workers."""

    ids: Path
    lengths: npt.NDArray[np.int32]
    sets: list[str]
    numbers: npt.NDArray[np.int32]
    held_out: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class TrunkJob:
    """How a process becomes a worker. Everything here pickles; the model is loaded by the worker itself."""

    model: ModelConfig
    info: ModelInfo
    topk: int
    hidden_norm: str
    hidden_dtype: str
    rules: BatchRules
    rows: WindowRows

    def __call__(self, number: int) -> ShardComputer:
        from arrowbank.mtp.trunk_passes import load_trunk

        return ShardComputer(self, load_trunk(self.model, self.topk, self.hidden_norm, worker=number, info=self.info))


class ShardComputer:
    """A worker that holds the model and the windows."""

    def __init__(self, job: TrunkJob, trunk: TrunkPasses) -> None:
        self.job, self.trunk = job, trunk
        self._ids = np.load(job.rows.ids, mmap_mode="r")

    def __call__(self, shard: Shard, report: Report) -> pa.RecordBatch:
        """The columns of a trunk bank for the shard's windows, all in memory. Reports tokens.

        Raises BadVector for hidden states or probabilities that are NaN or Inf.
        """
        rows, here = self.job.rows, slice(shard.start, shard.stop)
        ids, lengths = np.array(self._ids[here]), rows.lengths[here]
        tokens, offsets = int(lengths.sum()), row_offsets(lengths)
        columns = TrunkColumns(
            input_ids=ids,
            lengths=lengths,
            topk_ids=np.empty((tokens, self.job.topk), np.int32),
            topk_probs=np.empty((tokens, self.job.topk), np.float32),
            tail_mass=np.empty(tokens, np.float32),
            hidden=np.empty((tokens, self.job.info.hidden_size), HIDDEN_TYPES[self.job.hidden_dtype]),
            sets=rows.sets[here],
            windows=rows.numbers[here],
            held_out=rows.held_out[here].tolist(),
        )
        plan = list(batches(lengths, self.job.rules))
        streamed = self.trunk.stream(ids[batch.rows, : batch.length] for batch in plan)
        for batch, states in zip(plan, streamed, strict=True):
            for at, row in enumerate(batch.rows):
                window = slice(int(offsets[row]), int(offsets[row + 1]))
                self._keep(columns, window, states, at, f"window {columns.windows[row]} of {columns.sets[row]}")
            report(len(batch.rows) * batch.length)
        return columns.batch()

    def _keep(self, columns: TrunkColumns, window: slice, states: TrunkStates, at: int, name: str) -> None:
        """Put row `at` of a batch into its place; BadVector where it is not finite."""
        hidden, probs = states.hidden[at], states.topk_probs[at]
        bad = int((~torch.isfinite(hidden)).sum()), int((~torch.isfinite(probs)).sum())
        if any(bad):
            raise BadVector(
                f"{name}: model {self.job.info.model!r} gave values that are NaN or Inf ({bad[0]} in hidden states, {bad[1]} in "
                f"probabilities), computing in {self.job.info.dtype}. Nothing of this shard was kept. Such values come from the "
                "model or its dtype: try --dtype bfloat16 or float32, check the weights, or leave that text out."
            )
        columns.topk_ids[window] = states.topk_ids[at].numpy()
        columns.topk_probs[window] = probs.numpy()
        columns.tail_mass[window] = states.tail_mass[at].numpy()
        columns.hidden[window] = bits_of(hidden)


def bits_of(hidden: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor of bfloat16 as its bits, one of float16 as it is."""
    if hidden.dtype is torch.bfloat16:
        return hidden.view(torch.int16).numpy().view(np.uint16)
    return hidden.numpy()


@explains("out")
@checked
def build_trunk(
    config: TrunkConfig, out: str | Path, *, options: RunOptions | None = None, progress: Progress = SILENT
) -> Manifest:
    """Compute the trunk bank `out` of `config.model` for `config.sources`, and the bank of its taps, if any; the former's manifest.

    Resumes where an earlier run stopped; a bank of the same weights, window, k and token ids is read back. `options.shards` and
    `options.rows` are those of the trunk bank; the taps follow in the run that completes it.

    Raises InputError (model, data, too few windows), BadVector (NaN or Inf), PlanMismatch, BankLocked, DiskFull, WorkerDied.
    """
    options = options or RunOptions()
    stage, was_complete = TrunkStage(config), (Path(out) / STATE).exists() and not options.restart
    manifest = stage.run(out, options, progress)
    if not config.layers:
        return manifest
    if manifest["complete"] and (options.worker is None or was_complete or stage.committed_here):
        # those who find the trunk bank complete share its taps; the one that has completed it makes all of them
        part = options.worker if was_complete else None
        options = replace(options, worker=part, shards=None, rows=None, budget_gb=None)
        build_taps(stage, Path(out), options, progress)
    else:
        progress.message(f"{taps_folder(out)}: follows in the run that completes the trunk bank")
    return manifest


@checked
def estimate_trunk(
    config: TrunkConfig, out: str | Path, *, options: RunOptions | None = None, progress: Progress = SILENT
) -> Estimate:
    """What `build_trunk` with the same arguments makes: the windows are packed, nothing is written, no weight is loaded.

    Raises what `build_trunk` raises for a model or data that cannot be used.
    """
    return TrunkStage(config).estimate(out, options, progress=progress)


class TrunkStage(Stage):
    """Everything that is fixed before the first forward pass. Raises InputError for a model or data that cannot be used."""

    kind, phase, what = KIND, "trunk", "the trunk bank and its taps"
    remedy = "Give fewer --tokens, a smaller --topk, fewer --layers, or"
    committed_here = False

    def __init__(self, config: TrunkConfig) -> None:
        self.config = config
        self._has_texts = False  # whether a tokenizer was needed

    @property
    def inputs(self) -> list[Named]:
        config = self.config
        models = [("--model", local_model(config.model.model)), ("--tokenizer", local_model(config.tokenizer))]
        data = (place for one in config.sources for place in source_places(f"--source {one.name}=", one.path))
        return [*data, *models]

    def outputs(self, out: str | Path) -> list[Named]:
        return [("--out", out), *([("--out", taps_folder(out))] if self.config.layers else [])]

    @cached_property
    def model(self) -> ModelInfo:
        """The model, as it is run: with its head. InputError where it has none, a window is too long for it, or it has fewer
        tokens or layers than are asked for."""
        from arrowbank.mtp.trunk_passes import require_causal

        info, config = replace(describe(self.config.model), backbone="outer"), self.config
        require_causal(config.model, info)
        if info.max_positions is not None and config.window > info.max_positions:
            raise InputError(
                f"--window {config.window}: model {info.model!r} has {info.max_positions} positions. Give that or less."
            )
        if config.topk > info.vocab_size:
            raise InputError(
                f"--topk {config.topk}: model {info.model!r} has a vocabulary of {info.vocab_size}. Give that or less."
            )
        if config.layers and config.layers[-1] >= info.num_layers:
            raise InputError(
                f"--layers {','.join(map(str, config.layers))}: there is no block {config.layers[-1]}, {info.model!r} has "
                f"{info.num_layers}; expected ids from 0 to {info.num_layers - 1}, or −1 for the embeddings."
            )
        if config.window * max(info.hidden_size, config.topk) > MAX_VALUES:
            raise InputError(f"--window {config.window}: more than a record batch holds at {info.hidden_size} values a token.")
        return info

    @cached_property
    def pad_id(self) -> int:
        """What fills a short window."""
        from arrowbank.mtp.trunk_passes import end_of_text

        return end_of_text(self.config.trunk_model, self.model)

    @cached_property
    def hidden_dtype(self) -> str:
        from arrowbank.mtp.trunk_passes import stored_dtype

        return stored_dtype(self.model)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """What makes ids of texts; None where the model has no tokenizer and none is given (the data must be ids then)."""
        name, code = self.config.tokenizer, self.config.model.trust_remote_code
        if name is None and not any(
            (self.model.folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")
        ):
            return None
        return load_tokenizer(name or self.config.model.model, trust_remote_code=code)

    def _tokenizer_of_texts(self) -> PreTrainedTokenizerFast | None:
        self._has_texts = True
        return self.tokenizer

    @cached_property
    def windows(self) -> PackedWindows:
        """The packed windows. InputError for data that cannot be read, or give too few windows."""
        windows = PackedWindows([self._pack(one) for one in self.config.sources], self.config.window, self.config.hold_all)
        if all(source.are_rows for source in self._sources.values()):
            refuse_unread("banks and tables, which have no lines", self.config, ["on_bad_line", "max_line_bytes"])
        if not any(source.text_field for source in self._sources.values()):
            refuse_unread("data without named fields (banks, .txt)", self.config, ["text_field"])
        if not self._has_texts:
            refuse_unread("data of token ids", self.config, ["tokenizer"])
        if len(windows) < HELD_OUT_EVERY and not self.config.hold_all:
            each = ", ".join(f"{one.name} {len(one.lengths)}" for one in windows.sets)
            raise InputError(
                f"too few windows: {len(windows)} ({each}) of {self.config.window} tokens; expected at least {HELD_OUT_EVERY}, "
                "since every tenth is held out to measure on. Give more --source or --tokens, a smaller --window, or --hold-all "
                "for a bank of evaluation only."
            )
        return windows

    @cached_property
    def _sources(self) -> dict[TrunkData, NumberedRecords]:
        config = self.config
        policy = {"max_line_bytes": config.max_line_bytes, "skip_bad_lines": config.on_bad_line == "skip"}
        return {data: number_records(data.path, config.text_field or TEXT_FIELD, **policy) for data in config.sources}

    def tell_unread(self, progress: Progress) -> None:
        """Name what the data hold and nobody has read."""
        for data in self.config.sources:
            tell_unread(progress, f"{data.name} ({data.path})", fields=self._sources[data].unread)

    def _pack(self, data: TrunkData) -> PackedSet:
        source = self._sources[data]
        records = TokenRecords(source, f"{data.name} ({data.path})", self.model.vocab_size, self._tokenizer_of_texts)
        packed = pack(
            data.name,
            records.in_order(shuffled(len(source))),
            tokens=data.tokens or self.config.tokens or TOKENS,
            window=self.config.window,
            chain=self.config.chain,
        )
        if not packed.lengths:
            raise InputError(
                f"{records.place}: too few windows: its {len(source):,} records give none of {self.config.window} tokens, nor a "
                f"short one of at least {least_tokens(self.config.chain)} (16 and the chain). Give more data or a smaller --window."
            )
        return packed

    def row_bytes(self, length: int) -> int:
        """Bytes of a window of `length` real tokens."""
        return window_bytes(self.config.window, length, self.config.topk, self.model.hidden_size)

    @cached_property
    def shards(self) -> list[Shard]:
        widest = max(self.model.hidden_size, self.config.topk)
        return cut_shards(self.windows.lengths.tolist(), self.row_bytes, widest, self.config.max_shard_bytes)

    def shard_bytes(self, shard: Shard) -> int:
        return sum(map(self.row_bytes, self.windows.lengths[shard.start : shard.stop].tolist())) + SHARD_OVERHEAD

    def tokens(self, shard: Shard) -> int:
        return int(self.windows.lengths[shard.start : shard.stop].sum())

    @property
    def beside(self) -> dict[str, int]:
        tapped = self.windows.lengths[self.windows.held_out].tolist() if self.config.layers else []
        taps = taps_bytes(tapped, len(self.config.layers), self.model.hidden_size, self.config.window)
        return {"files": FILES_OVERHEAD, **({"taps": taps} if taps else {})}

    @property
    def counts(self) -> dict[str, int]:
        each = self.row_bytes(self.config.window) // self.config.window
        return {"held_out": int(self.windows.held_out.sum()), "bytes_per_token": each}

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The weights, T, k, every token id."""
        config = self.config
        sets, start = {}, 0
        for one in self.windows.sets:
            sha256 = hashlib.sha256(one.ids.astype("<i4").tobytes()).hexdigest()
            sets[one.name] = {"first": start, "windows": len(one.lengths), "tokens": len(one.ids), "ids_sha256": sha256}
            start += len(one.lengths)
        return {
            "method": METHOD,
            "model": model_recipe(self.model),
            "window": config.window,
            "topk": config.topk,
            "hidden_norm": config.last_hidden_norm,
            "hidden_dtype": self.hidden_dtype,
            "hold_all": config.hold_all,
            "pad_id": self.pad_id,
            "sets": sets,
            "batches": config.rules.recipe(),
            "shard_bytes": config.max_shard_bytes or SHARD_BYTES,
        }

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The fields that are known before the work: all but the files."""
        config, info, windows = self.config, self.model, self.windows
        texts = self.tokenizer if self._has_texts else None
        return {
            "text_count": len(windows),
            "model_path": info.model,
            "model_fingerprint": info.fingerprint,
            "tokenizer_fingerprint": None if texts is None else tokenizer_fingerprint(texts),
            "architecture": info.architecture,
            "dtype": info.dtype,
            "quantisation": info.quantisation,
            "vocab_size": info.vocab_size,
            "hidden_size": info.hidden_size,
            "num_hidden_layers": info.num_layers,
            "hidden_norm": config.last_hidden_norm,
            "hidden_dtype": self.hidden_dtype,
            "window": config.window,
            "topk": config.topk,
            "chain": config.chain,
            "hold_all": config.hold_all,
            "pad_id": self.pad_id,
            "sets": self.recipe["sets"],
            "counts": {
                "windows": len(windows),
                "held_out": int(windows.held_out.sum()),
                "tokens": int(windows.lengths.sum()),
                "bad_lines": sum(source.bad_lines for source in self._sources.values()),
            },
        }

    def prepare(self, bank: BankWriter, options: RunOptions, progress: Progress) -> None:
        self.tell_unread(progress)

    def workers(self, bank: BankWriter) -> TrunkJob:
        return self.job(bank.work_dir)

    def job(self, folder: Path) -> TrunkJob:
        """The factory of workers; the windows' ids go into a file in `folder` that they map."""
        folder.mkdir(exist_ok=True)
        path, windows = folder / "windows.npy", self.windows
        with publishing(path, hash=None) as file:
            np.save(file, windows.padded(self.pad_id))
        return TrunkJob(
            model=self.config.trunk_model,
            info=self.model,
            topk=self.config.topk,
            hidden_norm=self.config.last_hidden_norm,
            hidden_dtype=self.hidden_dtype,
            rules=self.config.rules,
            rows=WindowRows(
                ids=path, lengths=windows.lengths, sets=windows.names, numbers=windows.numbers, held_out=windows.held_out
            ),
        )

    def finish(self, bank: BankWriter, progress: Progress) -> Manifest:
        self.committed_here = True
        return bank.commit(rows=len(self.windows))
