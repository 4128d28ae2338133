"""The stage `export`: a bank becomes the files that a trainer reads unchanged, or is refused where they would mislead it.

Every trainer assumes one convention for layers and one for the final norm, and none checks. What a bank says of itself is
converted where that is exact, and otherwise refused."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import arrowbank.formats
from arrowbank.bank.bad_states import refuse_bad_states
from arrowbank.bank.kinds.targets_bank import RowsView, TargetBank, TargetRows, TargetSample, manifest_of
from arrowbank.bank.open import open_bank
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.errors import BadVector, InputError
from arrowbank.formats import plain_files as tables
from arrowbank.formats import tokens as tokenshards
from arrowbank.formats.export import ExportFormat
from arrowbank.formats.export_folder import ExportFolder, made_from
from arrowbank.formats.sidecar import About
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Count, Flag, Help, Old, Settings, checked, refuse_unread


def _formats_here() -> dict[str, ExportFormat]:
    """The formats of target rows: those that the modules of this folder list in a dictionary FORMATS. A new one is a new module."""
    names = sorted(module.name for module in pkgutil.iter_modules(arrowbank.formats.__path__, "arrowbank.formats."))
    found = (getattr(importlib.import_module(name), "FORMATS", None) for name in names if name != __name__)
    return {name: format for formats in found if isinstance(formats, dict) for name, format in formats.items()}


FORMATS = _formats_here()
ARM_OPTIONS = ("stride", "global_batch", "ranks")
OPTIONS = ("max_shard_bytes", "last_hidden_norm", *ARM_OPTIONS)
EVERY_FORMAT = (*FORMATS, *tokenshards.LAYOUTS, *tables.FORMATS)


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Settings):
    """The format, and what it leaves open."""

    format: Annotated[
        str,
        Flag("--to"),
        Help(
            f"of targets: {', '.join(FORMATS)}; of arms: {', '.join(tokenshards.LAYOUTS)}; of features: npy; of any bank: parquet",
            "FORMAT",
            choices=EVERY_FORMAT,
        ),
    ]
    max_shard_bytes: Annotated[Count, Help("Of formats with shards.")] | None = None
    last_hidden_norm: (
        Annotated[Literal["post", "pre"], Help("What unknown last hidden states are."), Old("--assume-norm")] | None
    ) = None
    stride: Annotated[Literal["T", "T+1"], Help("Step of the loader of an arm. Default: as the format's does.")] | None = None
    global_batch: Annotated[Count, Help("Of an arm: the loader's batch x ranks, for what it delivers.", default="1")] | None = (
        None
    )
    ranks: Annotated[Count, Help("Of an arm: the ranks in --global-batch.", default="1")] | None = None

    on_nonfinite: (
        Annotated[
            Literal["error", "keep"],
            Help("Hidden states that are NaN, Inf, zero or constant. Default: NaN and Inf that the bank counts are kept."),
        ]
        | None
    ) = None

    def check(self) -> None:
        if self.format not in EVERY_FORMAT:
            raise InputError(f"--to {self.format}: expected one of {', '.join(EVERY_FORMAT)}.")
        read = _reads(self.format)
        refuse_unread(f"--to {self.format}", self, [name for name in OPTIONS if name not in read])


def _reads(format: str) -> set[str]:
    """The options of `ExportConfig` that a format reads, beside its name."""
    if format in tokenshards.LAYOUTS:
        return set(ARM_OPTIONS)
    if format in FORMATS:
        return {"last_hidden_norm", "on_nonfinite", *(["max_shard_bytes"] if FORMATS[format].shards else [])}
    return set()


@explains("out")
@checked
def export(
    config: ExportConfig, bank: str | Path, out: str | Path, *, restart: bool = False, progress: Progress = SILENT
) -> dict[str, Any]:
    """Write `bank` in a trainer's format to `out`; what the last file says. Goes on where it stopped.

    Raises InputError for what the format cannot hold or would mislabel, PlanMismatch where `out` holds another export, DiskFull,
    BankLocked, CorruptBank.
    """
    require_separate([("--out", out)], [("BANK", bank)])
    if config.format in tokenshards.LAYOUTS:
        return tokenshards.export_tokens(
            bank,
            out,
            format=config.format,
            **{name: getattr(config, name) for name in ARM_OPTIONS},
            restart=restart,
            progress=progress,
        )
    if config.format in tables.FORMATS:
        return tables.export_tables(bank, out, format=config.format, restart=restart, progress=progress)
    format = FORMATS[config.format]
    opened = open_bank(bank, kind=TargetBank)
    rows = format.fit(_vouched(opened, config))
    recipe = {
        "format": config.format,
        "rows": rows.digest,
        "max_shard_bytes": config.max_shard_bytes,
        **manifest_of(rows.facts),
    }
    about = About(
        format=config.format,
        format_version=format.version,
        made_from=made_from(opened),
        options={"max_shard_bytes": config.max_shard_bytes, "last_hidden_norm": config.last_hidden_norm},
    )
    with ExportFolder(out, recipe, about=about, owns=format.owns, last=format.last, restart=restart) as folder:
        if folder.complete:
            progress.message(f"{folder.folder}: already complete, nothing to do")
            return {"format": config.format, "complete": True}
        opened.check_hashes()
        shards = {} if config.max_shard_bytes is None else {"max_shard_bytes": config.max_shard_bytes}
        total = sum(rows.facts.sample_bytes(int(length)) for length in rows.lengths)
        with progress.phase("export", total, unit="bytes", texts=len(rows.lengths)) as phase:
            return format.write(rows, folder, source=opened.manifest["source"], phase=phase, **shards)


REMEDY = "Build the bank again without such samples (targets import --on-nonfinite drop), or give --on-nonfinite keep to export them."


def _vouched(bank: TargetBank, config: ExportConfig) -> TargetRows:
    """The rows under the norm that they are to have; InputError where something is missing or nobody knows it."""
    facts = bank.facts
    if facts.spans != "all":
        raise InputError(
            f"{bank.place}: keeps hidden states only where a loss token needs them, and {config.format} has no way to say so. "
            "Make the bank with --spans all."
        )
    if facts.target_layer_ids is None:
        raise InputError(f"{bank.place}: does not know which layers it holds. Import it again with --layers.")
    norm = facts.last_hidden_norm
    if config.last_hidden_norm is not None:
        if norm not in ("unknown", config.last_hidden_norm):
            raise InputError(
                f"{bank.place}: its last hidden states are {norm}, not {config.last_hidden_norm}: leave --last-hidden-norm out."
            )
        norm = config.last_hidden_norm
    if norm == "unknown":
        raise InputError(
            f"{bank.place}: nobody said whether its last hidden states are after or before the final norm. Find out with "
            "`arrowbank targets verify --model M`, then give --last-hidden-norm post or pre."
        )
    return SoundRows(RowsView(bank, replace(facts, last_hidden_norm=norm, codec="bf16")), bank, config.on_nonfinite)


class SoundRows:
    """The rows of a bank, each looked at when it is first read: BadVector where a trainer could not use its hidden states.

    `on_nonfinite`: "keep" passes all; None passes the NaN and Inf of a bank whose manifest counts some, which were kept on purpose.
    """

    def __init__(self, rows: TargetRows, bank: TargetBank, on_nonfinite: str | None) -> None:
        self.rows, self.facts, self.lengths, self.digest, self.place = rows, rows.facts, rows.lengths, rows.digest, rows.place
        self._keep = on_nonfinite == "keep"
        self._known = on_nonfinite is None and any((bank.manifest.nonfinite or {}).values())
        self._looked: set[int] = set()

    def read(self, row: int) -> TargetSample:
        sample = self.rows.read(row)
        if row not in self._looked and not self._keep:
            where = f"{self.place}: {sample.name}"
            for hidden, layers in ((sample.taps, self.facts.layer_names), (sample.last, ["last"])):
                bad = refuse_bad_states(where, hidden, layers, sample.input_ids, remedy=REMEDY, keep=self._known)
                if bad.constant:
                    raise BadVector(f"{where}: {bad} of {len(hidden)}. {REMEDY}")
        self._looked.add(row)
        return sample
