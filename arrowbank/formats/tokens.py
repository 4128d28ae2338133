"""Arms as the files that trainers' loaders read, and files of token ids read again.

A loader cuts its files into windows of its own length, wherever examples begin. So examples are laid out as wide as the loader's step
(`--stride`): T tokens, or T + 1, where the next token stands once more behind each. Loaders that look a token ahead for the last label
find one behind the last example of each file. What each loader then delivers whole is counted by its own rule (`loaders.py`)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank import Bank, open_bank
from arrowbank.bank.columns import fixed_lists, list_values, one_array
from arrowbank.bank.files import HashedFile, require_space
from arrowbank.bank.kinds.in2_bank import ArmBank
from arrowbank.bank.manifest import read_json
from arrowbank.bank.mapped import map_npy
from arrowbank.bank.names import check_places
from arrowbank.errors import CorruptBank, InputError
from arrowbank.formats.export_folder import ExportFolder, made_from
from arrowbank.formats.loaders import LOADERS, RANDOM, Batches, LoaderStops, expected_whole, whole_in_windows
from arrowbank.formats.sidecar import SIDECAR, About, find_sidecar, sidecar_in
from arrowbank.progress import SILENT, Progress

STRIDES = ("T", "T+1")
RAW_TOKENS = 100_000_000  # the loader behind the raw format ignores what is past it
LLMC_HEADERS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}  # magic and version: GPT-2's, and Llama 3's
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_CODES = {"uint16": 8, "int32": 4}

Ids = npt.NDArray[Any]
Blocks = Callable[[], Iterator[Ids]]


@dataclass(frozen=True)
class TokenFile:
    """One shard to be written: `examples` rows of `width` ids each, which `blocks()` gives in pieces [n, width], and the ids `behind`
    the last of them."""

    examples: int
    width: int
    dtype: str
    blocks: Blocks
    behind: Ids

    @property
    def tokens(self) -> int:
        return self.examples * self.width + len(self.behind)

    def write_ids(self, file: HashedFile) -> None:
        for block in (*self.blocks(), self.behind):
            file.write(np.ascontiguousarray(block, self.dtype))


@dataclass(frozen=True)
class TokenLayout:
    """A layout of files: their endings and what writes each, the loaders that read them (of LOADERS), the strides that these can have,
    their own first, and the dtypes: the arm's → the file's."""

    files: dict[str, Callable[[TokenFile, HashedFile], None]]
    loaders: tuple[str, ...]
    strides: tuple[str, ...] = STRIDES
    dtypes: dict[str, str] = field(default_factory=lambda: {"uint16": "uint16", "uint32": "uint32"})
    behind: int = 0  # tokens behind the last example of a file
    versions: dict[str, int] = field(default_factory=dict)  # the format's number by dtype, where it has one


def _llmc(shard: TokenFile, file: HashedFile) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = *LLMC_HEADERS[shard.dtype], shard.tokens
    file.write(header)
    shard.write_ids(file)


def _npy(shard: TokenFile, file: HashedFile) -> None:
    header = {"descr": np.dtype(shard.dtype).str, "fortran_order": False, "shape": (shard.tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
    shard.write_ids(file)


def _megatron_index(shard: TokenFile, file: HashedFile) -> None:
    count, bytes_each = shard.examples, shard.width * np.dtype(shard.dtype).itemsize
    file.write(MEGATRON_MAGIC + struct.pack("<QBQQ", 1, MEGATRON_CODES[shard.dtype], count, count + 1))
    file.write(np.full(count, shard.width, "<i4"))
    file.write(np.arange(count, dtype="<i8") * bytes_each)
    file.write(np.arange(count + 1, dtype="<i8"))


def _document_ends(shard: TokenFile, file: HashedFile) -> None:
    file.write(np.arange(1, shard.examples + 1, dtype="<u8") * np.uint64(shard.width))


def _metadata(shard: TokenFile, file: HashedFile) -> None:
    file.write(f"unknown|{np.dtype(shard.dtype).itemsize}\n{shard.tokens}\n{shard.tokens:,} tokens".encode())


LAYOUTS: dict[str, TokenLayout] = {
    "raw": TokenLayout({".bin": TokenFile.write_ids}, ("olmo-core", "build-nanogpt"), behind=1),
    "llmc": TokenLayout(
        {".bin": _llmc},
        ("llm.c", "llm.c-python", "modded-nanogpt"),
        behind=1,
        versions={dtype: version for dtype, (_, version) in LLMC_HEADERS.items()},
    ),
    "nanogpt": TokenLayout({".bin": TokenFile.write_ids}, (RANDOM,), strides=("T",), dtypes={"uint16": "uint16"}, behind=1),
    "nanogpt-npy": TokenLayout({".npy": _npy}, ("build-nanogpt",), behind=1),
    "megatron": TokenLayout(
        {".bin": TokenFile.write_ids, ".idx": _megatron_index},
        ("megatron-core",),
        strides=("T",),
        dtypes={"uint16": "uint16", "uint32": "int32"},
        versions={"uint16": 1, "int32": 1},
    ),
    "nanotron": TokenLayout(
        {".ds": TokenFile.write_ids, ".ds.index": _document_ends, ".ds.metadata": _metadata},
        ("nanotron",),
        strides=("T+1", "T"),
    ),
}
OWNS = ("*.bin", "*.idx", "*.npy", "*.ds", "*.ds.index", "*.ds.metadata")


def export_tokens(
    bank: str | Path,
    out: str | Path,
    *,
    format: str,
    stride: str | None = None,
    global_batch: int | None = None,
    ranks: int | None = None,
    restart: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Write the examples of the arm `bank` as `format` (one of LAYOUTS) to `out`; what the sidecar says.

    `stride` is the loader's: "T" or "T+1" (None: the one that the format's loader has). `global_batch` is batch × ranks of the training:
    it decides what loaders deliver, not the bytes. Goes on where it stopped.

    Raises InputError (no arm, a stride or ids that the format does not know, files of less than a batch), PlanMismatch, BankLocked,
    CorruptBank, DiskFull.
    """
    layout, opened = LAYOUTS[format], open_bank(bank)
    stride = stride or layout.strides[0]
    if not isinstance(opened, ArmBank):
        raise InputError(f"{bank}: a bank of {opened.kind}; {format} takes an arm that `arrowbank in2 build` has written.")
    if stride not in layout.strides:
        raise InputError(f"--stride {stride}: {format} knows {' and '.join(layout.strides)}.")
    dtype = layout.dtypes.get(opened.manifest.dtype)
    if dtype is None:
        raise InputError(
            f"{bank}: its ids are {opened.manifest.dtype}, {format} holds uint16. Export as raw, llmc or megatron."
        )
    shards = _shards(opened, format, stride, dtype)
    if format == "raw" and (most := max(shard.tokens for shard in shards)) > RAW_TOKENS:
        raise InputError(
            f"{bank}: a shard would hold {most:,} tokens, a loader reads {RAW_TOKENS:,}. Build with more --raw-shards."
        )
    batches = _batches(shards, global_batch or 1, ranks or 1)
    recipe = {"format": format, "stride": stride, "rows": opened.content_digest, "shards": len(shards)}
    recipe |= {"global_batch": global_batch or 1, "ranks": ranks or 1}
    about = About(
        format=format, format_version=layout.versions.get(dtype), made_from=made_from(opened), options={"stride": stride}
    )
    with ExportFolder(out, recipe, about=about, owns=OWNS, restart=restart) as folder:
        if folder.complete:
            progress.message(f"{folder.folder}: already complete, nothing to do")
            return {"format": format, "complete": True}
        opened.check_hashes()
        require_space(folder.folder, sum(shard.tokens for shard in shards) * np.dtype(dtype).itemsize, "the export")
        if format == "llmc" and len(shards) == 1 and opened.manifest.json["split"] == "train":
            progress.message("one train shard: a loader that opens the next file early wants two. Build with --raw-shards 2.")
        with progress.phase("export", len(opened), unit="examples") as phase:
            for index, shard in enumerate(shards):
                for ending, write in layout.files.items():
                    folder.write(_name(opened, format, index, ending), partial(write, shard))
                phase.advance(shard.examples)
        facts = _facts(opened, format, stride, shards, batches)
        for loader, whole in facts["survivors"].items():
            if loader in facts["stops"]:
                progress.message(f"{loader} stops with an error: {facts['stops'][loader]}")
            elif whole < opened.manifest.triples:
                progress.message(
                    f"{loader} delivers {whole:,} of {opened.manifest.triples:,} triples whole{_why(loader, batches)}"
                )
        return folder.finish(facts)


def _batches(shards: Sequence[TokenFile], global_batch: int, ranks: int) -> Batches:
    if global_batch % ranks:
        raise InputError(f"--global-batch {global_batch} is not a multiple of --ranks {ranks}: each rank has as many rows.")
    for index, shard in enumerate(shards[:-1]):  # the last one may be smaller
        if shard.examples % global_batch:
            raise InputError(
                f"shard {index} holds {shard.examples:,} examples, not a multiple of --global-batch {global_batch}: a loader drops "
                f"{shard.examples % global_batch} of every such shard. Build with --global-batch {global_batch}."
            )
    return Batches(shards[0].width, global_batch // ranks, ranks)


def _why(loader: str, batches: Batches) -> str:
    if loader == RANDOM:
        return " on average: its windows start anywhere"
    return f" (batch {batches.batch}, {batches.ranks} ranks)"


def _name(bank: ArmBank, format: str, index: int, ending: str) -> str:
    split = bank.manifest.json["split"]
    return f"{split}{ending}" if format == "nanogpt" else f"in2{bank.manifest.arm}_{split}_{index:05d}{ending}"


def _shards(bank: ArmBank, format: str, stride: str, dtype: str) -> list[TokenFile]:
    """The files to be written: the same examples in each as in the arm's raw shards, or all in one."""
    examples = len(bank)
    per_shard = examples if format == "nanogpt" else -(-examples // bank.manifest.recipe["shards"])
    width = bank.manifest.T + (stride == "T+1")
    ranges = [range(start, min(start + per_shard, examples)) for start in range(0, examples, per_shard)]
    return [
        TokenFile(len(rows), width, dtype, partial(_blocks, bank, rows, stride), _behind(bank, rows, LAYOUTS[format].behind))
        for rows in ranges
    ]


def _behind(bank: ArmBank, rows: range, count: int) -> Ids:
    """The first ids of the example that follows `rows` (behind the last: of the first)."""
    following = bank.slice(rows.stop % len(bank), rows.stop % len(bank) + 1, ["input_ids"])["input_ids"]
    return fixed_lists(one_array(following))[0, :count]


def _blocks(bank: Bank, rows: range, stride: str) -> Iterator[Ids]:
    """The ids of `rows`, an Arrow shard at a time; under T+1 with the first id of the next example behind each (of the first behind
    the last)."""
    for index, batch in enumerate(bank.shards()):
        low, high = int(bank.starts[index]), int(bank.starts[index + 1])
        ids = fixed_lists(batch.column("input_ids"))
        part = ids[max(0, rows.start - low) : max(0, rows.stop - low)]
        if not len(part):
            continue
        if stride == "T+1":
            after = fixed_lists(bank.shard((index + 1) % len(bank.shard_names)).column("input_ids"))[0, :1]
            firsts = np.concatenate([ids[1:, 0], after])[max(0, rows.start - low) : min(rows.stop, high) - low]
            part = np.concatenate([part, firsts[:, None]], axis=1)
        yield part


def _facts(bank: ArmBank, format: str, stride: str, shards: list[TokenFile], batches: Batches) -> dict[str, Any]:
    facts = bank.manifest.json
    survivors: dict[str, int] = {}
    stops: dict[str, str] = {}
    for name in LAYOUTS[format].loaders:
        try:
            survivors[name] = _survivors(bank, name, shards, batches)
        except LoaderStops as fault:
            survivors[name], stops[name] = 0, str(fault)
    return {
        "stride": stride,
        "arm": facts["arm"],
        "split": facts["split"],
        "T": facts["T"],
        "examples": len(bank),
        "dtype": shards[0].dtype,
        "vocab": facts["vocab"],
        "shards": [
            {
                "name": _name(bank, format, index, next(iter(LAYOUTS[format].files))),
                "examples": shard.examples,
                "tokens": shard.tokens,
            }
            for index, shard in enumerate(shards)
        ],
        "triples": facts["triples"],
        "global_batch": batches.batch * batches.ranks,
        "ranks": batches.ranks,
        "survivors": survivors,
        "stops": stops,
    }


def _survivors(bank: ArmBank, loader: str, shards: Sequence[TokenFile], batches: Batches) -> int:
    """The triples that the windows of a loader hold whole; of one that draws its windows, in as many as there are examples."""
    files = [shard.tokens for shard in shards]
    windows = LOADERS[loader].windows(files, batches) if loader in LOADERS else []
    span, count, per_shard = bank.manifest.span, 0.0, shards[0].examples
    for index, batch in enumerate(bank.shards()):
        needles, offsets = list_values(batch.column("needle_start"))
        probes, _ = list_values(batch.column("probe_start"))
        examples = np.repeat(np.arange(int(bank.starts[index]), int(bank.starts[index + 1])), np.diff(offsets))
        if not len(needles):  # arm a
            continue
        begin = examples % per_shard * batches.length + needles
        end = examples % per_shard * batches.length + probes + span - 1
        for file in np.unique(examples // per_shard):
            mine = examples // per_shard == file
            if loader == RANDOM:
                count += len(bank) * expected_whole(begin[mine], end[mine], files[file], batches.length)
            else:
                read = batches.length + LOADERS[loader].ahead
                count += int(np.count_nonzero(whole_in_windows(begin[mine], end[mine], windows[file], read)))
    return round(count)


HEADER_BYTES = 1024


class TokenExport:
    """An export of an arm. `said` is its sidecar, `shards` are its files' ids, mapped.

    Raises InputError for a folder that is none, CorruptBank where files are missing or do not agree with their headers.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.said = sidecar_in(self.folder)
        if self.said.get("format") not in LAYOUTS:
            raise InputError(f"{folder}: not an export of an arm. Give a folder that `arrowbank export` has written.")
        self._listed = {entry["name"] for entry in self.said["files"]}
        check_places(self.folder, self._listed, self.folder / SIDECAR)
        try:
            self.shards = [self._shard(entry["name"], entry["tokens"]) for entry in self.said["shards"]]
        except (KeyError, TypeError) as error:
            raise CorruptBank(f"{self.folder / SIDECAR}: no usable shards ({error!r}). Export again.") from None

    def _shard(self, name: str, tokens: int) -> Ids:
        if name not in self._listed:
            raise CorruptBank(f"{self.folder / SIDECAR}: shard {name!r} is not among its files. Export again.")
        ids = read_ids(self.said["format"], self.folder / name, self.said["dtype"])
        if len(ids) != tokens:
            raise CorruptBank(f"{self.folder / name}: {len(ids):,} tokens, {SIDECAR} says {tokens:,}. Export again.")
        return ids


def is_token_export(folder: Path) -> bool:
    """Whether `folder` holds an export of an arm."""
    path = find_sidecar(folder)
    said = read_json(path) if path else {}
    return isinstance(said, dict) and said.get("format") in LAYOUTS


def read_ids(format: str, path: Path, dtype: str | None) -> Ids:
    """The ids in the file `path` of one of LAYOUTS, mapped. `dtype` is that of an export of an arm, whose documents are its examples;
    None: the file is another program's, and uint16 where it does not say more. CorruptBank where its header, or an index beside it,
    does not agree with it."""
    try:
        return _READERS[format](path, dtype)
    except (OSError, ValueError, struct.error) as error:
        raise CorruptBank(f"{path}: not readable as {format} ({error}). Export again.") from None


def _raw(path: Path, dtype: str | None) -> Ids:
    return np.asarray(np.memmap(path, dtype or "<u2", mode="r"))


def _read_llmc(path: Path, dtype: str | None) -> Ids:
    header = np.fromfile(path, "<i4", 256)
    kinds = [kind for kind, known in LLMC_HEADERS.items() if header[:2].tolist() == list(known) and dtype in (None, kind)]
    _require(len(kinds) == 1 and not header[3:].any(), "another header")
    ids = np.asarray(np.memmap(path, np.dtype(kinds[0]).newbyteorder("<"), mode="r", offset=HEADER_BYTES))
    _require(int(header[2]) == len(ids), f"the header announces {header[2]:,} tokens, {len(ids):,} are there")
    return ids


def _read_npy(path: Path, dtype: str | None) -> Ids:
    ids = map_npy(path)
    _require(
        ids.dtype in (np.uint16, np.uint32) and dtype in (None, ids.dtype.name) and ids.ndim == 1,
        f"{ids.dtype} of shape {ids.shape}",
    )
    return ids


def _megatron(path: Path, dtype: str | None) -> Ids:
    index = path.with_suffix(".idx").read_bytes()
    magic, fixed = len(MEGATRON_MAGIC), struct.calcsize("<QBQQ")
    version, code, count, documents = struct.unpack_from("<QBQQ", index, magic)
    kinds = {code: kind for kind, code in MEGATRON_CODES.items() if dtype in (None, kind)}
    _require(index[:magic] == MEGATRON_MAGIC and version == 1 and code in kinds, "another index header")
    ids = _raw(path, kinds[code])
    at = magic + fixed
    _require(len(index) == at + 12 * count + 8 * documents, f"the index has {len(index)} bytes")
    lengths = np.frombuffer(index, "<i4", count, at)
    pointers = np.frombuffer(index, "<i8", count, at + 4 * count)
    ends = np.frombuffer(index, "<i8", documents, at + 12 * count)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    _require(np.array_equal(pointers, starts * ids.itemsize), "pointers are not where sequences start")
    if dtype:
        _require(np.array_equal(ends, np.arange(count + 1)), "a document is not one example")
    _require(documents > 0 and (int(ends[0]), int(ends[-1])) == (0, count), "documents do not end with the sequences")
    _require(bool((np.diff(ends) >= 0).all()) and bool((lengths >= 0).all()), "sequences or documents of negative length")
    _require(int(lengths.sum(dtype=np.int64)) == len(ids), "sequences do not add up to the tokens")
    return ids


def _nanotron(path: Path, dtype: str | None) -> Ids:
    said = Path(f"{path}.metadata").read_text().split("\n")
    width = said[0].rpartition("|")[2]
    _require(width in ("2", "4") and (dtype is None or int(width) == np.dtype(dtype).itemsize), "another width of a token")
    ids, ends = _raw(path, f"<u{width}"), np.fromfile(f"{path}.index", "<u8")
    _require(len(ends) > 0 and int(ends[-1]) == len(ids), "documents do not end where the tokens do")
    _require(bool((ends[1:] >= ends[:-1]).all()), "documents of negative length")
    _require(int(said[1]) == len(ids), "the metadata says otherwise")
    return ids


_READERS: dict[str, Callable[[Path, str | None], Ids]] = {
    "raw": _raw,
    "llmc": _read_llmc,
    "nanogpt": _raw,
    "nanogpt-npy": _read_npy,
    "megatron": _megatron,
    "nanotron": _nanotron,
}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
