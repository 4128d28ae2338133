"""The stage `export`: a bank becomes the files that a trainer reads unchanged, or is refused where they would mislead it.

Every trainer assumes one convention for layers and one for the final norm, and none checks. What a bank says of itself is
converted where that is exact, and otherwise refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.bank.targets import RowsView, TargetRows, manifest_of, open_target_bank
from arrowbank.errors import InputError
from arrowbank.formats import deepspec, modelopt, specforge, speculators, tables, tokenshards
from arrowbank.formats.exported import Format
from arrowbank.formats.folder import ExportFolder, made_from
from arrowbank.formats.sidecar import About
from arrowbank.formats.windows import STRIDES
from arrowbank.progress import SILENT, Progress

FORMATS: dict[str, Format] = {**deepspec.FORMATS, **specforge.FORMATS, **speculators.FORMATS, **modelopt.FORMATS}
EVERY_FORMAT = (*FORMATS, *tokenshards.LAYOUTS, *tables.FORMATS)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """`format` is one of EVERY_FORMAT: FORMATS for a target bank, `tokenshards.LAYOUTS` for an arm, "npy" for a feature bank, "parquet"
    for any; `assume_norm` is the norm of last hidden states that a bank
    of "unknown" ones is to have; `stride` the step of an arm's loader, "T" or "T+1".
    """

    format: str
    max_shard_bytes: int | None = None
    assume_norm: str | None = None
    stride: str | None = None

    def __post_init__(self) -> None:
        if self.format not in EVERY_FORMAT:
            raise InputError(f"--to {self.format}: expected one of {', '.join(EVERY_FORMAT)}.")
        if self.stride not in (None, *STRIDES):
            raise InputError(f"--stride {self.stride}: expected T or T+1.")
        if self.stride is not None and self.format not in tokenshards.LAYOUTS:
            raise InputError(f"{self.format} does not hold an arm's examples for a loader: leave --stride out.")
        if self.assume_norm not in (None, "post", "pre"):
            raise InputError(f"--assume-norm {self.assume_norm}: expected post or pre.")
        if self.assume_norm is not None and self.format not in FORMATS:
            raise InputError(f"{self.format} says nothing of norms: leave --assume-norm out.")
        if self.max_shard_bytes is not None and self.max_shard_bytes < 1:
            raise InputError(f"max_shard_bytes is {self.max_shard_bytes}, it must be at least 1.")
        if self.max_shard_bytes is not None and not (self.format in FORMATS and FORMATS[self.format].shards):
            raise InputError(f"{self.format} has no shards of a size to choose: leave --max-shard-bytes out.")


@explains("out")
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
            bank, out, format=config.format, stride=config.stride, restart=restart, progress=progress
        )
    if config.format in tables.FORMATS:
        return tables.export_tables(bank, out, format=config.format, restart=restart, progress=progress)
    format = FORMATS[config.format]
    opened = open_target_bank(bank)
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
        options={"max_shard_bytes": config.max_shard_bytes, "assume_norm": config.assume_norm},
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


def _vouched(bank: TargetRows, config: ExportConfig) -> TargetRows:
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
    if config.assume_norm is not None:
        if norm not in ("unknown", config.assume_norm):
            raise InputError(
                f"{bank.place}: its last hidden states are {norm}, not {config.assume_norm}: leave --assume-norm out."
            )
        norm = config.assume_norm
    if norm == "unknown":
        raise InputError(
            f"{bank.place}: nobody said whether its last hidden states are after or before the final norm. Find out with "
            "`arrowbank targets verify --model M`, then give --assume-norm post or pre."
        )
    return RowsView(bank, replace(facts, last_hidden_norm=norm, codec="bf16"))
