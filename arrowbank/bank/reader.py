"""Which commit of a bank is in a folder: an open bank reads files of the commit that it opened, or none.

`--restart` writes a new bank into the same folder. Shards that are mapped stay the old ones, because a file that is mapped outlives
its name. A file that is opened later would be the new bank's. So every later opening is framed by two looks at the commit:
`manifest.json` and `state.json` are replaced as a whole, and only together with the files that they list."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.files import sha256_of
from arrowbank.bank.kinds import check_columns, typed
from arrowbank.bank.manifest import (
    MANIFEST,
    MAX_JSON_BYTES,
    SHARD_NAME,
    STATE,
    BankManifest,
    FileEntry,
    Manifest,
    canonical_json,
)
from arrowbank.bank.manifest_checks import check_info, check_manifest, check_state, read_manifest
from arrowbank.bank.mapped import check_values, map_shard
from arrowbank.bank.refusals import raise_refusal
from arrowbank.errors import ContractError, CorruptBank, IncompleteBank, InputError
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

if TYPE_CHECKING:
    import datasets
    import torch.utils.data


Identity = tuple[int, int, int, int]  # device, inode, bytes, time of change


@dataclass
class Commit:
    """The commit in `folder` when it was opened: sha256 and identity of the two files by which it is known."""

    folder: Path
    digests: dict[str, str]
    identities: dict[str, Identity]

    @classmethod
    def of(cls, folder: Path) -> Commit | None:
        """The commit that is in `folder` now; None where a file of it is missing or cannot be read."""
        commit = cls(folder, {}, {})
        try:
            for name in (MANIFEST, STATE):
                commit.digests[name], commit.identities[name] = _read(folder / name)
        except OSError as error:
            raise_refusal(error, folder)
            return None
        return commit

    @property
    def digest(self) -> str:
        """What tells this commit from any other one, also on another machine."""
        return " ".join(self.digests.values())

    def require(self, digest: str) -> None:
        """Raise CorruptBank where this is not the commit of that digest: what was opened elsewhere, under the same name."""
        if self.digest != digest:
            raise self._changed(self.folder)

    def require_unchanged(self) -> None:
        """Raise CorruptBank where the folder holds another commit than when it was opened, or none."""
        for name, known in self.identities.items():
            path = self.folder / name
            try:
                if _identity(path.stat()) == known:
                    continue
                digest, identity = _read(path)
            except OSError as error:
                raise_refusal(error, path)
                digest, identity = "", known
            if digest != self.digests[name]:
                raise self._changed(path)
            self.identities[name] = identity  # copied or touched: the same bytes list the same files

    def _changed(self, path: Path) -> CorruptBank:
        return CorruptBank(
            f"{path}: changed since it was opened: another bank is being written or was written into this folder. Open the bank "
            "again, and write new banks into folders of their own."
        )


def _read(path: Path) -> tuple[str, Identity]:
    """The sha256 of a file's bytes, and its identity. OSError where it cannot be read."""
    if path.exists() and not path.is_file():  # a named pipe would be waited for
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        # what is longer is refused where it is read as JSON
        return hashlib.sha256(file.read(MAX_JSON_BYTES + 1)).hexdigest(), _identity(os.fstat(file.fileno()))


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


# how the command line and people call what trainers' manifests call otherwise
EXPECT_ALIASES = {"model": "model_path", "max_tokens": "max_key_tokens", "dim": "hidden_size"}


class Bank:
    """A committed bank, read-only. `len(bank)` is its rows; `entries` is what the manifest says of each file, by name."""

    manifest: BankManifest

    def __init__(self, folder: Path, manifest: BankManifest, commit: Commit) -> None:
        self._commit = commit
        self.folder = folder
        self.manifest = manifest
        self.kind = manifest.kind
        self.plan_digest = manifest.plan_digest
        self.entries: dict[str, FileEntry] = {entry.name: entry for entry in manifest.files}
        self.shard_names = [name for name in self.entries if SHARD_NAME.fullmatch(name)]  # in order: see check_state
        self.shard_rows = [self.entries[name].rows or 0 for name in self.shard_names]
        self.starts: npt.NDArray[np.int64] = np.cumsum([0, *self.shard_rows])
        self._check_files()
        self._batches = [self._map(index) for index in range(len(self.shard_names))]
        self._checked: set[tuple[int, str]] = set()
        check_info(folder, self.schema)
        commit.require_unchanged()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        """A bank goes to another process as its folder and its commit: the process maps the same bank, or gets CorruptBank."""
        return reopen, (type(self), self.folder.resolve(), self._commit.digest)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder}: {len(self)} rows, {self.kind}>"

    def _check_files(self) -> None:
        for name, entry in self.entries.items():
            path = self.folder / name
            size = path.stat().st_size if path.exists() else None
            if size != entry.bytes:
                found = "the file is missing" if size is None else f"{size} bytes on disk"
                raise CorruptBank(
                    f"{path}: {found}, the manifest says {entry.bytes}. Restore it from a copy, or make it again with the "
                    "command that made the bank (encode: --shards with its number)."
                )
        if (rows := sum(self.shard_rows)) != self.manifest.rows:
            raise CorruptBank(f"{self.folder}: shards hold {rows} rows, the manifest says {self.manifest.rows}.")

    def _map(self, index: int) -> pa.RecordBatch:
        path = self.folder / self.shard_names[index]
        batch = map_shard(path, lambda schema: check_columns(path, schema, self.manifest))
        if batch.num_rows != self.shard_rows[index]:
            raise CorruptBank(f"{path}: {batch.num_rows} rows, the manifest says {self.shard_rows[index]}.")
        return batch

    @property
    def content_digest(self) -> str:
        """A sha256 over the bytes of all shards, as the manifest has them."""
        return self._digest_of(self.shard_names)

    def first_digest(self, rows: int) -> str | None:
        """The content digest of a bank of the shards of the first `rows` rows; None where no shard ends there."""
        count = int(np.searchsorted(self.starts, rows))
        return self._digest_of(self.shard_names[:count]) if rows in self.starts else None

    def _digest_of(self, names: list[str]) -> str:
        wanted = set(names)
        shards = [entry.sha256 for entry in self.manifest.files if entry.name in wanted]
        return hashlib.sha256(canonical_json(shards)).hexdigest()

    def check_hashes(self, beside: Sequence[str] = ()) -> None:
        """Read every shard whole, and the files `beside` them; CorruptBank when bytes are not those that were committed."""
        names = [*self.shard_names, *beside]
        self._commit.require_unchanged()
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda name: sha256_of(self.folder / name), names))
        self._commit.require_unchanged()
        for name, sha256 in zip(names, found, strict=True):
            if sha256 != self.entries[name].sha256:
                raise CorruptBank(
                    f"{self.folder / name}: its bytes are not those that were committed (sha256 {sha256[:12]}…, the "
                    f"manifest says {self.entries[name].sha256[:12]}…). Restore the file from a copy or build this bank again."
                )

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns of shard 0."""
        return self._batches[0].schema

    def shard(self, index: int) -> pa.RecordBatch:
        """Shard `index` as a memory-mapped record batch. CorruptBank where its offsets or its text are damaged."""
        self._check(index, self._batches[index].schema.names)
        return self._batches[index]

    def shards(self) -> Iterator[pa.RecordBatch]:
        """All shards in row order, memory-mapped. CorruptBank as in `shard`."""
        return map(self.shard, range(len(self._batches)))

    def numbered_shards(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """All shards, each with the number of its first row. CorruptBank as in `shard`."""
        return zip(map(int, self.starts), self.shards(), strict=False)

    def parts(self, column: str) -> list[pa.Array]:
        """One column of every shard, memory-mapped; no other column is looked at. CorruptBank as in `shard`."""
        for index in range(len(self._batches)):
            self._check(index, [column])
        return [batch.column(column) for batch in self._batches]

    @checked
    def slice(self, start: int, stop: int, columns: list[str] | None = None) -> pa.Table:
        """Rows start … stop − 1 as a zero-copy table of `columns` (all). CorruptBank as in `shard`."""
        batches = []
        for index, batch in enumerate(self._batches):
            low, high = max(start, int(self.starts[index])), min(stop, int(self.starts[index + 1]))
            if low < high:
                self._check(index, columns or batch.schema.names)
                piece = batch.slice(low - int(self.starts[index]), high - low)
                batches.append(piece.select(columns) if columns else piece)
        wanted = pa.schema([self.schema.field(name) for name in columns]) if columns else self.schema
        return pa.Table.from_batches(batches, wanted)

    def _check(self, index: int, columns: Sequence[str]) -> None:
        """Check the values of some columns of a shard that nobody has used yet."""
        for name in columns:
            if (index, name) not in self._checked:
                check_values(self.folder / self.shard_names[index], name, self._batches[index].column(name))
                self._checked.add((index, name))

    @contextmanager
    def opening(self, name: str) -> Iterator[Path]:
        """The path of a file of this bank, for a block that opens it: `with bank.opening(name) as path`.

        CorruptBank where the manifest does not list it, so that nothing vouches for it, or the folder holds another commit than the
        one that was opened, before the block or after it.
        """
        if name not in self.entries and name != STATE:
            raise CorruptBank(f"{self.folder / name}: not listed in {MANIFEST}. Restore the bank from a copy or rebuild it.")
        self._commit.require_unchanged()
        yield self.folder / name
        self._commit.require_unchanged()

    def to_torch(self) -> torch.utils.data.Dataset[Any]:
        """The rows as a `torch.utils.data.Dataset`, where banks of this kind have one. InputError where they have none."""
        raise InputError(
            f"{self.folder}: a bank of {self.kind} has no PyTorch rows of its own, expected features or targets. Read it with "
            "`bank.dataset` or datasets.load_from_disk."
        )

    @cached_property
    def dataset(self) -> datasets.Dataset:
        """What `datasets.load_from_disk(folder)` gives. All offsets and texts are checked first, as in `shard`, because `datasets`
        follows them unchecked.

        CorruptBank where `datasets` refuses the folder, or the folder holds another commit than the one that was opened.
        """
        from datasets import load_from_disk

        for _ in self.shards():
            pass
        with self.opening(STATE) as state:
            try:
                return load_from_disk(str(self.folder))
            except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                raise CorruptBank(
                    f"{state}: `datasets` cannot load the bank ({type(error).__name__}: {error}). Run `arrowbank verify` to find the "
                    "damaged file; restore it or rebuild the bank."
                ) from error


def open_committed(
    folder: str | Path, expect: Mapping[str, Any] | None = None, *, progress: Progress = SILENT
) -> tuple[Path, BankManifest, Commit]:
    """The folder, manifest and commit of a committed bank that is what `expect` says. An address (`hf://…`, `s3://…`) is fetched
    first.

    Raises InputError (no bank there), IncompleteBank (not committed), CorruptBank (a field is lacking, or the manifest contradicts
    itself), ContractError (a field differs).
    """
    folder = local_folder(folder, progress)
    commit = Commit.of(folder)  # before the manifest is read: what is read then is of this commit, or `Bank` finds out
    manifest = read_manifest(folder)
    if commit is None or not manifest.get("complete"):
        total = manifest.get("text_count")
        raise IncompleteBank(
            f"{folder}: not committed (complete is {str(manifest.get('complete')).lower()}, {manifest.get('rows')} rows of "
            f"{total if total is not None else 'an unknown number'} at the last count). Run the command that builds it again: "
            "it goes on where it stopped."
        )
    fields = typed(manifest, folder / MANIFEST)
    check_manifest(folder / MANIFEST, manifest)
    fields.extra = check_state(folder, manifest)
    check_contract(folder, manifest, expect or {})
    return folder, fields, commit


def reopen(kind: type[Bank], folder: Path, digest: str) -> Bank:
    """The bank in `folder` as a `kind`, if it is the commit of that digest."""
    path, manifest, commit = open_committed(folder)
    commit.require(digest)
    return kind(path, manifest, commit)


def local_folder(folder: str | Path, progress: Progress = SILENT) -> Path:
    """The folder itself, or the one in the cache that an address is fetched into."""
    if not isinstance(folder, str) or "://" not in folder:
        return Path(folder)
    from arrowbank.bank.remote.cache import local_bank

    return local_bank(folder, progress=progress)


def check_contract(folder: Path, manifest: Manifest, expect: Mapping[str, Any]) -> None:
    """Raise ContractError for the first field of `expect` (dotted names reach inside) that the manifest lacks or does not equal."""
    for name, given in expect.items():
        value: Any = manifest
        there = True
        for part in EXPECT_ALIASES.get(name, name).split("."):
            there = isinstance(value, dict) and part in value
            value = value[part] if there else None
        wanted = list(given) if isinstance(given, tuple) else given
        if value != wanted or not there:
            found = "missing" if wanted is None and not there else repr(value)
            known = "" if there else f" The manifest has: {', '.join(sorted(manifest))}."
            raise ContractError(
                f"{folder}: {name} is {found}, expected {wanted!r}.{known} "
                "Give the bank that was built for this, or build one.",
                name,
            )
