"""Banks as files that need nothing of ours: Parquet for any bank, the mirror of a feature bank as `npy`.

parquet   data-00000.parquet … a file a shard, with the column types as `datasets` spells them in the schema, so that
          `load_dataset("parquet", …)` gives fixed-size lists and float16 back
npy       features.f16.npy, index.json, texts.jsonl: what a bank built with --no-mirror has left out (see `arrowbank.bank.mirror`)"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arrowbank.bank import Bank, FeatureBank, open_bank
from arrowbank.bank.files import HashedFile, require_space
from arrowbank.bank.manifest import dataset_info
from arrowbank.bank.mirror import INDEX_FILE, TEXTS_FILE, mirror_files
from arrowbank.errors import InputError
from arrowbank.formats.export_folder import ExportFolder, made_from
from arrowbank.formats.sidecar import HIDDEN_SIDECAR, SIDECAR, About
from arrowbank.progress import SILENT, Phase, Progress

FORMATS = ("parquet", "npy")
SIDECARS = {"parquet": HIDDEN_SIDECAR, "npy": SIDECAR}  # who reads a folder of Parquet takes every file that is not hidden
OWNS = ("data-*.parquet", "*.npy", INDEX_FILE, TEXTS_FILE)
ROW_GROUP_BYTES = 64 << 20  # of columns in memory, roughly: what a reader has to hold at once


def export_tables(
    bank: str | Path, out: str | Path, *, format: str, restart: bool = False, progress: Progress = SILENT
) -> dict[str, Any]:
    """Write `bank` as `format` (one of FORMATS) to `out`; what the sidecar says. Goes on where it stopped.

    Raises InputError (npy of a bank that holds no vectors), PlanMismatch, BankLocked, CorruptBank, DiskFull.
    """
    opened = open_bank(bank)
    if format == "npy" and not isinstance(opened, FeatureBank):
        raise InputError(f"{bank}: a bank of {opened.kind}; npy takes one of features. --to parquet takes any bank.")
    recipe = {"format": format, "rows": opened.content_digest}
    about = About(format=format, made_from=made_from(opened), options={})
    with ExportFolder(out, recipe, about=about, owns=OWNS, last=SIDECARS[format], restart=restart) as folder:
        if folder.complete:
            progress.message(f"{folder.folder}: already complete, nothing to do")
            return {"format": format, "complete": True}
        opened.check_hashes()
        bytes_in_all = sum(opened.entries[name].bytes for name in opened.shard_names)
        require_space(folder.folder, bytes_in_all, "the export")
        with progress.phase("export", len(opened), unit="rows") as phase:
            if isinstance(opened, FeatureBank) and format == "npy":
                _write_npy(opened, folder, phase)
            else:
                _write_parquet(opened, folder, phase)
        return folder.finish({"rows": len(opened)})


def _write_npy(bank: FeatureBank, folder: ExportFolder, phase: Phase) -> None:
    files = mirror_files(list(bank.shards()), rows=len(bank), width=bank.hidden_size, report=phase.advance)
    for name, write in files.items():
        folder.write(name, write)


def _write_parquet(bank: Bank, folder: ExportFolder, phase: Phase) -> None:
    for index, batch in enumerate(bank.shards()):
        folder.write(f"data-{index:05d}.parquet", partial(_parquet, batch))
        phase.advance(batch.num_rows)


def _parquet(batch: pa.RecordBatch, file: HashedFile) -> None:
    schema = batch.schema.with_metadata(
        {"huggingface": json.dumps({"info": {"features": dataset_info(batch.schema)["features"]}})}
    )
    rows = max(1, batch.num_rows * ROW_GROUP_BYTES // max(1, batch.nbytes))
    with pq.ParquetWriter(pa.PythonFile(file, mode="w"), schema, compression="zstd") as writer:
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            writer.write_batch(pa.RecordBatch.from_arrays(part.columns, schema=schema))
