"""The stage `targets import`: hidden states that lie somewhere already become a target bank, or a trainer's cache in one step.

Rows are looked at before anything is written (see `arrowbank.formats.dump`). Hidden states that are bfloat16 already go from the
mapped source to the shard as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank import BankWriter
from arrowbank.bank.bad_states import BadStates
from arrowbank.bank.kinds.targets_bank import (
    Norm,
    RowsView,
    TargetFacts,
    TargetRows,
    TargetSample,
    manifest_of,
    needed_positions,
)
from arrowbank.bank.manifest import INFO, STATE, Manifest
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explains
from arrowbank.engine.plan import SHARD_BYTES, Shard
from arrowbank.engine.pool import Report, Worker
from arrowbank.engine.stage import Estimate, RunOptions, require_budget
from arrowbank.errors import InputError
from arrowbank.formats import deepspec, dump, modelopt, specforge, speculators, vllm_states
from arrowbank.formats.export import BLOCK_INPUT, ours
from arrowbank.formats.export_folder import ExportFolder
from arrowbank.formats.sample_files import FoundSample, SampleFiles
from arrowbank.formats.sidecar import SIDECAR, About, find_sidecar, require_as_exported, sidecar_in
from arrowbank.progress import SILENT, Progress, tell_unread
from arrowbank.settings import Count, Flag, Help, Settings, checked, refuse_unread
from arrowbank.targets.joined_masks import JoinedMasks
from arrowbank.targets.shards import (
    REMEDY,
    ShardColumns,
    StoredAs,
    StoredSpans,
    TargetStage,
    check_layers,
    look_at_states,
    publish_tally,
    target_shards,
)

METHOD = 1  # raise it when the same rows would give other bytes
QUARANTINE = "quarantine.jsonl"


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Settings):
    """How hidden states are read, and what is kept of them.

    The first five may be left out where the source says them itself. What a source never reads is refused: a DeepSpec cache and a
    speculators folder have their own masks and no samples to quarantine, and a speculators folder is always "pre".
    """

    target_model: Annotated[str, Help("Name of the target model, exactly as the trainer will be given it.", "NAME")] | None = (
        None
    )
    target_layer_ids: (
        Annotated[
            tuple[int, ...],
            Flag("--layers"),
            Help("Blocks whose output is in the taps: 1,11,21 (−1: embeddings).", example="1,11,21"),
        ]
        | None
    ) = None
    hidden_size: Annotated[Count, Help("Checked on all samples. Default: the first one's.")] | None = None
    vocab_size: Annotated[Count, Help("Token ids from here on are an error.")] | None = None
    last_hidden_norm: Annotated[Norm, Help("Last hidden states: after or before the final norm.", default="post")] | None = None
    loss_mask: (
        Annotated[
            dump.LossMask,
            Help(
                "Which tokens count in the loss. auto: the dump's masks where every sample has one, else ones_except_first.",
                default="auto",
            ),
        ]
        | None
    ) = None
    on_nonfinite: Annotated[Literal["error", "keep", "drop"], Help("Hidden states that are NaN, Inf, zero or constant.")] = (
        "error"
    )
    on_bad_sample: (
        Annotated[Literal["error", "quarantine"], Help("quarantine: leave it out and note why.", default="error")] | None
    ) = None
    masks: (
        Annotated[
            str,
            Help(
                "Conversations or token rows whose loss masks are joined to samples by tokens or id (vLLM, .ckpt, .pt).", "PATH"
            ),
        ]
        | None
    ) = None
    tokenizer: Annotated[str, Help("Makes tokens of the conversations of --masks: a folder or hub id.", "NAME")] | None = None
    engine_layer_ids: (
        Annotated[
            tuple[int, ...],
            Flag("--engine-layers"),
            Help("vLLM's own layer ids, the last slot's too: 2,18,33,36.", example="2,18,33,36"),
        ]
        | None
    ) = None
    index_name: Annotated[str, Help("Index file of a dump.", "NAME", default=dump.INDEX)] | None = None
    relabel: Annotated[bool, Help("--target-model, --layers and --last-hidden-norm win over what the source says.")] = False
    allow_outside: Annotated[bool, Help("Follow paths and links out of the dump.")] = False
    limit: Annotated[Count, Help("Only the first N samples.")] | None = None
    codec: StoredAs = "bf16"
    spans: StoredSpans = "all"
    max_shard_bytes: Annotated[Count, Help("Default: 512 MiB for a bank, 64 GiB for a cache.")] | None = None

    def check(self) -> None:
        check_layers(self.target_layer_ids)
        ids = self.engine_layer_ids
        if ids is not None and (len(ids) < 2 or list(ids) != sorted(set(ids)) or ids[0] < 0):
            raise InputError(
                f"--engine-layers {','.join(map(str, ids))}: expected ascending ids as vLLM was given them, the last block's too, as in "
                "--engine-layers 2,18,33,36."
            )
        if self.index_name is not None and self.index_name != Path(self.index_name).name:
            raise InputError(
                f"--index-name {self.index_name}: expected the name of a file in the dump, as in --index-name samples.jsonl."
            )
        if self.tokenizer is not None and self.masks is None:
            raise InputError(
                "--tokenizer: makes tokens of the conversations of --masks, which is missing. Give both or neither."
            )

    @property
    def norm(self) -> Norm:
        """`last_hidden_norm`, its default in place."""
        return self.last_hidden_norm or "post"


@dataclass
class FoundSamples:
    """The rows of a source of that kind and name that are to be imported, and what was left out."""

    rows: TargetRows
    kind: str
    source: str
    quarantined: list[dump.Quarantined] = field(default_factory=list)
    nonfinite: int = 0
    missing: int = 0  # rows of a speculators folder without a file of hidden states
    kept: npt.NDArray[np.int64] | None = (
        None  # of the source's rows, those with sound hidden states where the others are dropped
    )
    outside: list[Path] = field(default_factory=list)  # folders that samples of a dump are in, other than its own

    def dropped(self) -> dict[str, int]:
        missing = {"missing": self.missing} if self.missing else {}
        return {"quarantined": len(self.quarantined), "nonfinite": self.nonfinite, **missing}


def find_rows(config: ImportConfig, source: str | Path, *, progress: Progress = SILENT) -> FoundSamples:
    """The rows in `source`: an engine's dump, a DeepSpec cache, or a speculators folder. Nothing is written.

    Raises InputError for a folder that is none of these, and for a sample that is no good.
    """
    folder = Path(source)
    kind = next(kind for kind in SOURCES if kind.known(folder, config))
    refuse_unread(f"{folder}, which is {kind.what}", config, kind.unread)
    rows = kind.open(config, folder, progress)
    found = FoundSamples(_relabelled(config, rows), kind.name, folder.resolve().name)
    if isinstance(rows, dump.Dump | SampleFiles | speculators.SpeculatorsFolder):
        found.quarantined = rows.quarantined
    if isinstance(rows, dump.Dump):
        found.outside = rows.outside
    if isinstance(rows, speculators.SpeculatorsFolder):
        found.missing = rows.missing
    return _finite_only(found, progress) if config.on_nonfinite == "drop" else found


@dataclass(frozen=True)
class _SourceKind:
    """A kind of folder with hidden states, by its name and in words; `unread` are the options of ImportConfig that nothing reads there."""

    name: str
    what: str
    known: Callable[[Path, ImportConfig], bool]
    open: Callable[[ImportConfig, Path, Progress], TargetRows]
    unread: tuple[str, ...] = ()


def is_dump(folder: str | Path, config: ImportConfig | None = None) -> bool:
    """Whether a folder looks like an engine's dump, or an index is named."""
    return (config is not None and config.index_name is not None) or (Path(folder) / dump.INDEX).is_file()


def _rules(config: ImportConfig) -> dump.DumpRules:
    return dump.DumpRules(
        target_layer_ids=config.target_layer_ids,
        hidden_size=config.hidden_size,
        loss_mask=config.loss_mask or "auto",
        vocab_size=config.vocab_size,
        limit=config.limit,
        allow_outside=config.allow_outside,
        quarantine=config.on_bad_sample == "quarantine",
        index=config.index_name or dump.INDEX,
    )


def _open_dump(config: ImportConfig, folder: Path, progress: Progress) -> dump.Dump:
    if config.target_model is None:
        raise InputError(f"{folder}: a dump does not say which model it is of. Give --target-model NAME.")
    return dump.open_dump(folder, _rules(config), target_model=config.target_model, norm=config.norm, progress=progress)


def _open_cache(config: ImportConfig, folder: Path, progress: Progress) -> TargetRows:
    cache = deepspec.DeepSpecCache(folder)
    require_as_exported(folder, (deepspec.MANIFEST, deepspec.INDEX))
    names = sorted(path.name for path in folder.iterdir())
    own = (*deepspec.OWNS, SIDECAR, ".*")
    tell_unread(progress, folder, files=[name for name in names if not any(fnmatch(name, pattern) for pattern in own)])
    return cache


def _open_speculators(config: ImportConfig, folder: Path, progress: Progress) -> speculators.SpeculatorsFolder:
    exported = find_sidecar(folder) is not None  # then every file is listed, and a missing one is damage
    opened = speculators.SpeculatorsFolder(
        folder,
        target_layer_ids=config.target_layer_ids,
        quarantine=config.on_bad_sample == "quarantine",
        skip_missing=not exported,
    )
    require_as_exported(folder, (STATE, INFO))
    opened.tell_unread(progress)
    if opened.missing:
        progress.message(f"{folder}: {opened.missing:,} rows have no file of hidden states and are left out (dropped: missing)")
    return opened


def _open_files(
    config: ImportConfig, folder: Path, progress: Progress, *, files: Sequence[Path], open: Callable[[Path], FoundSample]
) -> SampleFiles:
    """Files of samples, whose masks may be joined. What a sidecar says of layers, model and mask is taken from there."""
    said = sidecar_in(folder)
    layers = said.get("target_layer_ids")
    masks = None
    if config.masks is not None:
        refuse_unread("--masks", config, ["loss_mask"])
        here = config.target_model if config.target_model and Path(config.target_model).is_dir() else None
        masks = JoinedMasks(config.masks, config.tokenizer or here, progress=progress)
    rules = _rules(config)
    if layers is not None and not config.relabel:
        rules = replace(rules, target_layer_ids=ours(layers, said["layer_id_convention"]))
    facts = TargetFacts(
        target_layer_ids=rules.target_layer_ids,
        layers=0,
        hidden_size=0,
        target_model_name_or_path=str(said.get("target_model_name_or_path") or ""),
        last_hidden_norm="unknown",
        loss_mask="unknown",
        vocab_size=said.get("vocab_size") or config.vocab_size,
        num_hidden_layers=said.get("num_hidden_layers"),
    )
    opened = SampleFiles(folder, files, open, rules, facts, masks, progress)
    if said.get("loss_mask") and masks is None and opened.facts.loss_mask == "from_dump":
        opened.facts = replace(opened.facts, loss_mask=str(said["loss_mask"]))
    return opened


def _open_specforge(config: ImportConfig, folder: Path, progress: Progress) -> SampleFiles:
    read = partial(specforge.open_sample, folder)
    return _open_files(config, folder, progress, files=specforge.sample_paths(folder), open=read)


def _open_modelopt(config: ImportConfig, folder: Path, progress: Progress) -> SampleFiles:
    return _open_files(config, folder, progress, files=modelopt.sample_paths(folder), open=modelopt.open_sample)


def _open_vllm(config: ImportConfig, folder: Path, progress: Progress) -> SampleFiles:
    if (ids := config.engine_layer_ids) is not None:
        layers = ours(ids[:-1], BLOCK_INPUT)
        slots, _ = vllm_states.slots(folder)
        if slots != len(ids):
            raise InputError(
                f"{folder}: its files have {slots} slots a token; --engine-layers names {len(ids)}. Give the ids of vLLM's "
                "eagle_aux_hidden_state_layer_ids, all of them."
            )
        if config.target_layer_ids not in (None, layers):
            raise InputError(
                f"--layers {config.target_layer_ids}: --engine-layers {','.join(map(str, ids))} are our layers {layers}. Give one of both."
            )
        config = replace(config, target_layer_ids=layers)
    opened = _open_files(config, folder, progress, files=vllm_states.sample_paths(folder), open=vllm_states.open_sample)
    if ids is not None:
        opened.facts = replace(opened.facts, num_hidden_layers=ids[-1])
    return opened


_JOINED = ("masks", "tokenizer")
_DUMP_ONLY = ("allow_outside",)
SOURCES = (
    _SourceKind(
        deepspec.NAME,
        "a DeepSpec cache",
        lambda folder, config: (folder / deepspec.INDEX).is_file(),
        _open_cache,
        ("loss_mask", "on_bad_sample", "engine_layer_ids", "index_name", *_JOINED, *_DUMP_ONLY),
    ),
    _SourceKind("dump", "an engine's dump", is_dump, _open_dump, ("engine_layer_ids", "relabel", *_JOINED)),
    _SourceKind(
        speculators.NAME,
        "a speculators folder",
        lambda folder, config: speculators.looks_like(folder),
        _open_speculators,
        ("loss_mask", "engine_layer_ids", *_JOINED, *_DUMP_ONLY),
    ),
    _SourceKind(
        vllm_states.NAME,
        "a folder of vLLM's hidden-state connector",
        lambda folder, config: vllm_states.looks_like(folder),
        _open_vllm,
        _DUMP_ONLY,
    ),
    _SourceKind(
        "specforge",
        "a folder of SpecForge",
        lambda folder, config: specforge.looks_like(folder),
        _open_specforge,
        ("engine_layer_ids", *_DUMP_ONLY),
    ),
    _SourceKind(
        "modelopt",
        "a folder of Model-Optimizer",
        lambda folder, config: modelopt.looks_like(folder),
        _open_modelopt,
        ("engine_layer_ids", *_DUMP_ONLY),
    ),
    _SourceKind("dump", "an engine's dump", lambda folder, config: True, _open_dump, ("engine_layer_ids", "relabel", *_JOINED)),
)


def _relabelled(config: ImportConfig, rows: TargetRows) -> TargetRows:
    """Rows under what the user says of them, where the source says nothing or the same: another name, layer or norm is refused, unless
    the options are to win."""
    if isinstance(rows, dump.Dump):  # it says nothing of itself
        return rows
    facts, options = rows.facts, ("target_model", "target_layer_ids", "last_hidden_norm")
    said = {name: getattr(config, name) for name in options if getattr(config, name) is not None}
    there = dict(zip(options, (facts.target_model_name_or_path, facts.target_layer_ids, facts.last_hidden_norm), strict=True))
    for name, value in said.items():
        if there[name] and there[name] != value and not config.relabel:
            flag = {"target_model": "--target-model", "target_layer_ids": "--layers"}.get(name, "--last-hidden-norm")
            raise InputError(
                f"{rows.place}: {name} is {there[name]!r}, expected {value!r}. Leave {flag} out, or give --relabel if the source is wrong."
            )
    if config.hidden_size is not None and config.hidden_size != facts.hidden_size:
        raise InputError(
            f"{rows.place}: hidden_size is {facts.hidden_size}, expected {config.hidden_size}. Leave the option out, or give the right "
            "source."
        )
    if config.target_layer_ids is not None and len(config.target_layer_ids) != facts.layers:
        raise InputError(
            f"{rows.place}: holds {facts.layers} layers, expected {len(config.target_layer_ids)}. Give --layers for all of them."
        )
    facts = replace(
        facts,
        target_layer_ids=config.target_layer_ids or facts.target_layer_ids,
        target_model_name_or_path=config.target_model or facts.target_model_name_or_path,
        last_hidden_norm=config.last_hidden_norm or facts.last_hidden_norm,
        vocab_size=config.vocab_size or facts.vocab_size,
    )
    if not facts.target_model_name_or_path:
        raise InputError(f"{rows.place}: does not say which model it is of. Give --target-model NAME.")
    kept = None if config.limit is None else np.arange(len(rows.lengths))[: config.limit]
    return RowsView(rows, facts, kept, seen=partial(_in_vocabulary, rows.place, config.vocab_size))


def _in_vocabulary(place: str, vocab_size: int | None, sample: TargetSample) -> TargetSample:
    if vocab_size is not None and (highest := int(sample.input_ids.max(initial=0))) >= vocab_size:
        raise InputError(
            f"{place}: sample {sample.name} has token id {highest}; expected less than --vocab-size {vocab_size}. Give the "
            "target's own vocabulary."
        )
    return sample


def _finite_only(found: FoundSamples, progress: Progress) -> FoundSamples:
    """Without the rows that hold NaN, Inf or constant vectors: all hidden states are read for it, once."""
    rows, finite = found.rows, []
    with progress.phase("check", len(rows.lengths), unit="samples") as phase:
        for row in range(len(rows.lengths)):
            if not any(look_at(rows, rows.read(row), keep=True)):
                finite.append(row)
            phase.advance(1)
    if not finite:
        raise InputError(
            f"{rows.place}: no sample is free of NaN, Inf and constant vectors. Give --on-nonfinite keep, or make them again."
        )
    found.nonfinite = len(rows.lengths) - len(finite)
    if found.nonfinite:
        found.kept = np.array(finite, np.int64)
        found.rows = _kept(rows, found.kept)
    return found


def _kept(rows: TargetRows, kept: npt.NDArray[np.int64] | None) -> TargetRows:
    return rows if kept is None else RowsView(rows, rows.facts, kept)


def _places(source: str | Path, found: FoundSamples) -> list[Named]:
    """What is read: the source, and folders outside it that its index names."""
    return [("DUMP", source), *(("a folder of samples of DUMP,", folder) for folder in found.outside)]


def bank_facts(config: ImportConfig, rows: TargetRows) -> TargetFacts:
    """The facts of the bank that `rows` become."""
    return replace(rows.facts, codec=config.codec, spans=config.spans if rows.facts.spans == "all" else rows.facts.spans)


@dataclass(frozen=True, kw_only=True)
class ImportJob:
    """How a process becomes a worker. What pickles is where the rows are and what they must be: another process opens them again.

    kept      the source's rows that are imported, where not all are
    digest    of the rows
    tallies   the folder for the counts of shards
    rows      open here
    """

    config: ImportConfig
    source: Path
    facts: TargetFacts
    kept: npt.NDArray[np.int64] | None
    digest: str
    tallies: Path
    rows: TargetRows | None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "rows": None}

    def __call__(self, number: int) -> Worker:
        return partial(self._make, self._reopened() if self.rows is None else self.rows)

    def _reopened(self) -> TargetRows:
        # which rows are finite was looked at once, by the process that made the plan
        rows = _kept(find_rows(replace(self.config, on_nonfinite="keep"), self.source).rows, self.kept)
        if rows.digest != self.digest:
            raise InputError(f"{self.source}: holds other samples than before. Leave it alone and run the same command again.")
        return rows

    def _make(self, rows: TargetRows, shard: Shard, report: Report) -> pa.RecordBatch:
        """The columns of a target bank for the shard's rows, all in memory; its counts are published. Raises BadVector."""
        columns = ShardColumns(rows, shard, self.facts, keep_nonfinite=self.config.on_nonfinite != "error")
        columns.fill()
        publish_tally(self.tallies, shard.index, columns.tally)
        report(shard.rows)
        return columns.batch()


class ImportStage(TargetStage):
    """The rows of a source as the shards of a bank. `found` is what was found there."""

    phase, unit = "import", "samples"
    splits_threads = False

    def __init__(self, config: ImportConfig, source: str | Path, found: FoundSamples) -> None:
        self.config, self.source, self.found = config, Path(source), found
        self.lengths = self.needed = found.rows.lengths

    @cached_property
    def facts(self) -> TargetFacts:
        return bank_facts(self.config, self.found.rows)

    @property
    def inputs(self) -> list[Named]:
        return _places(self.source, self.found)

    @cached_property
    def shards(self) -> list[Shard]:
        return target_shards(self.lengths, self.facts, self.config.max_shard_bytes)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        shard_bytes = self.config.max_shard_bytes or SHARD_BYTES
        return {"method": METHOD, "rows": self.found.rows.digest, "shard_bytes": shard_bytes, **manifest_of(self.facts)}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return {
            **manifest_of(self.facts),
            "text_count": len(self.lengths),
            "source": self.found.source,
            "model_fingerprint": None,
            "tokenizer_fingerprint": None,
            "chat_template_sha256": None,
        }

    def measure(self, progress: Progress) -> None:
        """Count what supervision needs. Only where sizes are asked for: it reads every sample, and some kinds convert them whole."""
        if self.facts.spans == "supervised":
            rows = self.found.rows
            needed = (len(needed_positions(rows.read(row).loss_mask)) for row in range(len(self.lengths)))
            self.needed = np.fromiter(needed, np.int64, len(self.lengths))

    def workers(self, bank: BankWriter) -> ImportJob:
        return ImportJob(
            config=self.config,
            source=self.source.absolute(),
            facts=self.facts,
            kept=self.found.kept,
            digest=self.found.rows.digest,
            tallies=bank.work_dir,
            rows=self.found.rows,
        )

    def finish(self, bank: BankWriter, progress: Progress) -> Manifest:
        if self.found.quarantined:
            bank.write_file(QUARANTINE, lambda file: file.write(dump.quarantine_lines(self.found.quarantined)))
        return self.commit(bank, self.found.dropped())


@checked
def estimate_import(
    config: ImportConfig,
    source: str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Estimate:
    """What `import_targets` with the same arguments will take, by the samples themselves. Raises what it raises before it writes."""
    return ImportStage(config, source, find_rows(config, source, progress=progress)).estimate(out, options, progress=progress)


@explains("out")
@checked
def import_targets(
    config: ImportConfig,
    source: str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Import the hidden states in `source` into the target bank `out`; its manifest, `complete` or not.

    Resumes where an earlier run stopped.

    Raises InputError (the source), BadVector (NaN, Inf, zero or constant, under `on_nonfinite="error"`), PlanMismatch,
    BankLocked, DiskFull, WorkerDied.
    """
    return ImportStage(config, source, find_rows(config, source, progress=progress)).run(out, options, progress)


@explains("out")
@checked
def import_to_deepspec(
    config: ImportConfig,
    source: str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Import the hidden states in `source` straight into a DeepSpec cache at `out`; the cache's manifest.

    Of `options` it takes `budget_gb` and `restart`: one process writes a cache. Raises what `import_targets` raises, and
    InputError for what a cache cannot hold.
    """
    options = options or RunOptions()
    refuse_unread("--to deepspec", options, ["engine", "ray_address", "workers", "worker", "shards", "rows"])
    if config.codec != "bf16" or config.spans != "all":
        raise InputError("--to deepspec holds every hidden state in bfloat16: leave --codec and --spans out.")
    found = find_rows(config, source, progress=progress)
    require_separate([("--out", out)], _places(source, found))
    if found.rows.facts.last_hidden_norm != deepspec.NORM:
        raise InputError(
            "--to deepspec holds last hidden states after the final norm (post), these are "
            f"{found.rows.facts.last_hidden_norm}. Import into a bank instead, or say post if they are."
        )
    if found.rows.facts.target_layer_ids is None:
        raise InputError("--to deepspec names the layers: give --layers, as in --layers 1,11,21.")
    nonfinite, constant = Counter[str](), Counter[str]()
    rows = _watched(found.rows, nonfinite, constant, keep=config.on_nonfinite != "error")
    needed = sum(rows.facts.sample_bytes(int(length)) for length in rows.lengths)
    require_budget(out, needed, options.budget_bytes, "the cache", REMEDY)
    recipe = {
        "format": deepspec.NAME,
        "rows": rows.digest,
        "max_shard_bytes": config.max_shard_bytes,
        **manifest_of(rows.facts),
    }
    format = deepspec.FORMATS[deepspec.NAME]
    about = About(
        format=deepspec.NAME,
        format_version=format.version,
        made_from={"kind": found.kind, "name": found.source, "rows_digest": rows.digest},
        options={"max_shard_bytes": config.max_shard_bytes, "limit": config.limit, "on_nonfinite": config.on_nonfinite},
    )
    owns = (*format.owns, QUARANTINE)
    with ExportFolder(out, recipe, about=about, owns=owns, last=format.last, restart=options.restart) as folder:
        if folder.complete:
            progress.message(f"{folder.folder}: already complete, nothing to do")
            return deepspec.DeepSpecCache(folder.folder).manifest
        if found.quarantined:
            folder.write(QUARANTINE, lambda file: file.write(dump.quarantine_lines(found.quarantined)))
        with progress.phase("write", needed, unit="bytes", texts=len(rows.lengths)) as phase:
            manifest = deepspec.write_cache(
                rows,
                folder,
                source=found.source,
                max_shard_bytes=config.max_shard_bytes or deepspec.SHARD_BYTES,
                phase=phase,
            )
    for what, counts in (("values are NaN or Inf", nonfinite), ("vectors are zero or constant", constant)):
        for layer, count in counts.items():
            progress.message(f"layer {layer}: {count:,} {what}, kept")
    return manifest


def _watched(rows: TargetRows, nonfinite: Counter[str], constant: Counter[str], *, keep: bool) -> TargetRows:
    """`rows`, looked at as they pass: bad hidden states raise BadVector or, with `keep`, are counted by layer."""

    def look(sample: TargetSample) -> TargetSample:
        for bad in look_at(rows, sample, keep=keep):
            nonfinite.update(bad.nonfinite)
            constant.update(bad.constant)
        return sample

    return RowsView(rows, rows.facts, seen=look)


def look_at(rows: TargetRows, sample: TargetSample, *, keep: bool) -> list[BadStates]:
    """What is wrong with the taps and the last hidden states of a sample of `rows`. BadVector, unless `keep`."""
    pairs = ((sample.taps, rows.facts.layer_names), (sample.last, ["last"]))
    return [look_at_states(rows.place, sample, hidden, layers, keep=keep) for hidden, layers in pairs]
