"""DeepSpec's target cache, version 2: shards of samples back to back, an index of fixed records, a manifest that comes last.

shard-{k:05d}.bin   a sample: input_ids int32[S] · attention_mask uint8[S] · loss_mask uint8[S] · taps bf16[S, L·H] · last bf16[S, H]
samples.idx         56 bytes a sample: sample_id, shard_id, seq_len, and where those five begin
manifest.json       the rest; its reader compares target_model_name_or_path as a string

Its own reader ignores the attention mask and finds a torn file late: so everything is checked here on opening.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.files import HashedFile, require_space
from arrowbank.bank.kinds.targets_bank import TargetFacts, TargetRows, TargetSample
from arrowbank.bank.manifest import canonical_json, json_in
from arrowbank.bank.names import check_places
from arrowbank.engine.plan import Shard
from arrowbank.errors import CorruptBank, InputError
from arrowbank.formats.export import ExportFormat, facts_said, with_norm
from arrowbank.formats.export_folder import CONVERTER, ExportFolder
from arrowbank.progress import Phase

NAME = "deepspec"
VERSION = 2
MANIFEST = "manifest.json"
INDEX = "samples.idx"
SHARD_BYTES = 64 << 30
OWNS = ("shard-*.bin", INDEX, MANIFEST)
NORM = "post"
RECORD = np.dtype([("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"), ("offsets", "<u8", 5)])
FIXED = {
    "version": VERSION,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": RECORD.itemsize,
}

MAX_HIDDEN_SIZE = 1 << 24  # of any model there is; what a cache takes is then counted in 64 bits

CacheRecords = npt.NDArray[Any]  # of RECORD


def shard_file(index: int) -> str:
    return f"shard-{index:05d}.bin"


def plan(lengths: npt.NDArray[np.int64], facts: TargetFacts, max_shard_bytes: int) -> tuple[list[Shard], CacheRecords]:
    """The shards, and the whole index. A shard that is not empty is closed before it would pass `max_shard_bytes`."""
    width = 2 * facts.hidden_size
    parts = np.stack([4 * lengths, lengths, lengths, lengths * facts.layers * width, lengths * width], axis=1)
    sizes = parts.sum(axis=1)
    shards: list[Shard] = []
    start, size = 0, 0
    for row, more in enumerate(sizes.tolist()):
        if size and size + more > max_shard_bytes:
            shards.append(Shard(len(shards), start, row))
            start, size = row, 0
        size += more
    shards.append(Shard(len(shards), start, len(lengths)))
    records = np.zeros(len(lengths), RECORD)
    records["sample_id"], records["seq_len"] = np.arange(len(lengths)), lengths
    for shard in shards:
        rows = slice(shard.start, shard.stop)
        begins = np.cumsum(parts[rows].reshape(-1)) - parts[rows].reshape(-1)
        records["shard_id"][rows], records["offsets"][rows] = shard.index, begins.reshape(-1, 5)
    return shards, records


def write_cache(
    rows: TargetRows, folder: ExportFolder, *, source: str, max_shard_bytes: int = SHARD_BYTES, phase: Phase
) -> dict[str, Any]:
    """Write `rows`, which are all there and named by layer ids, as a cache into `folder`; its manifest. `phase` counts bytes."""
    facts = rows.facts
    shards, records = plan(rows.lengths, facts, max_shard_bytes)
    sizes = [_end(records[shard.stop - 1], facts) for shard in shards]
    missing = [size for shard, size in zip(shards, sizes, strict=True) if shard_file(shard.index) not in folder.receipts]
    require_space(folder.folder, sum(missing) + records.nbytes, "the cache")
    for shard, size in zip(shards, sizes, strict=True):
        if shard_file(shard.index) in folder.receipts:
            phase.advance(size)
            continue
        folder.write(shard_file(shard.index), lambda file, shard=shard: _write_shard(rows, shard, file, phase))  # type: ignore[misc]
    folder.write(INDEX, lambda file: _write_bytes(file, records))
    manifest = {
        **FIXED,
        "num_samples": len(records),
        "num_shards": len(shards),
        "target_layer_ids": list(facts.target_layer_ids or ()),
        "hidden_size": facts.hidden_size,
        "shards": [{"shard_id": shard.index, "file_name": shard_file(shard.index)} for shard in shards],
        "target_model_name_or_path": facts.target_model_name_or_path,
        "source_engine_dump": source,
        "loss_mask_mode": facts.loss_mask,
        "converter": f"{CONVERTER}, plan {folder.mark}",
    }
    folder.finish(facts_said(rows, source=source), last=json.dumps(manifest, indent=2, sort_keys=True).encode())
    return manifest


def _write_bytes(file: HashedFile, values: npt.NDArray[Any]) -> None:
    file.write(values.view(np.uint8))


def _write_shard(rows: TargetRows, shard: Shard, file: HashedFile, phase: Phase) -> None:
    for row in range(shard.start, shard.stop):
        sample = rows.read(row)
        ones = np.ones(len(sample.input_ids), np.uint8)
        file.write(b"".join(part.tobytes() for part in (sample.input_ids, ones, sample.loss_mask)))
        for hidden in (sample.taps, sample.last):
            file.write(np.ascontiguousarray(hidden).reshape(-1).view(np.uint8))
        phase.advance(6 * len(ones) + sample.taps.nbytes + sample.last.nbytes)


def _end(record: Any, facts: TargetFacts) -> int:
    """Where the sample of `record` ends in its shard."""
    return int(record["offsets"][4]) + int(record["seq_len"]) * facts.hidden_size * 2


class DeepSpecCache:
    """A cache as target rows, mapped. Raises InputError (not a cache), CorruptBank (torn, or its parts do not fit)."""

    def __init__(self, folder: str | Path, *, norm: str = NORM) -> None:
        self.folder = Path(folder)
        self.manifest = self._read_manifest()
        self.facts = TargetFacts(
            target_layer_ids=tuple(self.manifest["target_layer_ids"]),
            layers=len(self.manifest["target_layer_ids"]),
            hidden_size=self.manifest["hidden_size"],
            target_model_name_or_path=self.manifest["target_model_name_or_path"],
            last_hidden_norm=norm,
            loss_mask=str(self.manifest.get("loss_mask_mode", "unknown")),
        )
        self._records = self._read_index()
        self.lengths = self._records["seq_len"].astype(np.int64)
        self.sample_ids = self._records["sample_id"]
        self._shards = self._map_shards()

    @property
    def place(self) -> str:
        return str(self.folder)

    @cached_property
    def digest(self) -> str:
        """Over manifest and index, and the ids and masks of every sample."""
        content = hashlib.sha256(canonical_json(self.manifest))
        content.update(self._records.tobytes())
        for record in self._records:
            begin, end = int(record["offsets"][0]), int(record["offsets"][3])
            content.update(self._shards[int(record["shard_id"])][begin:end].tobytes())
        return content.hexdigest()

    def read(self, row: int) -> TargetSample:
        record, facts = self._records[row], self.facts
        S, shard = int(record["seq_len"]), self._shards[int(record["shard_id"])]
        ids, attention, mask, taps, last = (int(offset) for offset in record["offsets"])
        name = f"sample {int(record['sample_id'])}"
        if not shard[attention : attention + S].all():
            raise CorruptBank(f"{self.folder}: {name}: its attention mask has zeros; expected unpadded samples.")
        return TargetSample(
            name,
            shard[ids : ids + 4 * S].view("<i4"),
            shard[mask : mask + S],
            shard[taps : taps + 2 * S * facts.layers * facts.hidden_size].view("<u2").reshape(S, -1),
            shard[last : last + 2 * S * facts.hidden_size].view("<u2").reshape(S, -1),
        )

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        try:
            check_places(self.folder, [MANIFEST, INDEX], self.folder)
            manifest = json_in(path)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path}: not a cache's manifest ({error}). Give a folder with {MANIFEST}, {INDEX} and shards."
            ) from None
        ids = manifest.get("target_layer_ids") if isinstance(manifest, dict) else None
        whole = (
            isinstance(ids, list)
            and len(ids) > 0
            and all(type(layer) is int for layer in ids)
            and ids == sorted(set(ids))
            and type(manifest.get("hidden_size")) is int
            and 0 < manifest["hidden_size"] < MAX_HIDDEN_SIZE
            and type(manifest.get("num_samples")) is int
            and isinstance(manifest.get("target_model_name_or_path"), str)
            and isinstance(manifest.get("shards"), list)
            and all(isinstance(shard, dict) for shard in manifest["shards"])
        )
        if not whole:
            raise InputError(
                f"{path}: no target_layer_ids (ascending), hidden_size, num_samples, target_model_name_or_path and shards in it. "
                "Give a DeepSpec target cache of version 2."
            )
        for name, expected in FIXED.items():
            if manifest.get(name) != expected:
                raise InputError(f"{path}: {name} is {manifest.get(name)!r}, expected {expected!r}.")
        result: dict[str, Any] = manifest
        return result

    def _read_index(self) -> CacheRecords:
        path = self.folder / INDEX
        data = path.read_bytes() if path.is_file() else b""
        if not data or len(data) != self.manifest.get("num_samples", 0) * RECORD.itemsize:
            raise CorruptBank(
                f"{path}: {len(data)} bytes; expected {RECORD.itemsize} for each of {self.manifest.get('num_samples')} samples. "
                "Copy or make the cache again."
            )
        return np.frombuffer(data, RECORD)

    def _map_shards(self) -> list[npt.NDArray[np.uint8]]:
        """The shards, once it is clear that the index describes them to the last byte."""
        names = [shard.get("file_name") for shard in self.manifest["shards"]]
        if names != [shard_file(index) for index in range(len(names))] or not names:
            raise CorruptBank(f"{self.folder / MANIFEST}: its shards are {names[:3]}…; expected {shard_file(0)} and so on.")
        check_places(self.folder, names, self.folder / MANIFEST)
        if int(self._records["shard_id"].max()) >= len(names) or not self.lengths.all():
            raise CorruptBank(f"{self.folder / INDEX}: a record names a shard that is not there, or has no tokens.")
        return [self._map(index, name) for index, name in enumerate(names)]

    def _map(self, index: int, name: str) -> npt.NDArray[np.uint8]:
        path, records = self.folder / name, self._records[self._records["shard_id"] == index]
        _, wanted = plan(records["seq_len"].astype(np.int64), self.facts, 1 << 62)
        size = path.stat().st_size if path.is_file() else -1
        end = _end(wanted[-1], self.facts) if len(wanted) else 0
        if size != end or not np.array_equal(records["offsets"], wanted["offsets"]):
            found = "the file is missing" if size < 0 else f"{size} bytes"
            raise CorruptBank(f"{path}: {found}; {INDEX} describes {end} bytes. Copy or make the cache again.")
        mapped: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)
        return mapped


FORMATS = {
    NAME: ExportFormat(
        write_cache, OWNS, partial(with_norm, what=NAME, norms=(NORM,)), last=MANIFEST, shards=True, version=VERSION
    )
}
