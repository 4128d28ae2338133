"""Verifying exports and caches: bytes and digests by the sidecar, strays that a loader would take, and each format read again.

A folder without a sidecar, because another program wrote it, is only read again: the first line says what that cannot find."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from arrowbank.bank.checks import NOTHING, Check, attempt, found_wrong, run_check
from arrowbank.bank.files import digest_of, human_bytes
from arrowbank.bank.kinds.targets_bank import TargetRows
from arrowbank.bank.manifest import JOURNAL, STATE, read_json
from arrowbank.bank.mapped import map_npy
from arrowbank.bank.mirror import INDEX_ENTRY_BYTES, INDEX_FILE, MATRIX_FILE, TEXTS_FILE
from arrowbank.bank.names import place_fault
from arrowbank.errors import CorruptBank
from arrowbank.formats import deepspec, specforge, speculators
from arrowbank.formats import tokens as tokenshards
from arrowbank.formats.export import BLOCK_INPUT, theirs
from arrowbank.formats.sidecar import SIDECAR, Sidecar, find_sidecar, origin, read_sidecar, sidecar_in
from arrowbank.formats.tokens import TokenExport, read_ids
from arrowbank.formats.torchfile import TorchFile, TorchTensor
from arrowbank.progress import SILENT, Progress

Said = Mapping[str, Any]  # what the sidecar says; empty where there is none
Shape = tuple[int | str, ...]

INT, FLOAT = ("int64", "int32"), ("bfloat16", "float16", "float32")
# tensors of a sample's file: dtypes, and shape by letters (S: tokens of the sample, H: hidden_size, LH: of all taps)
TOKENS: dict[str, tuple[tuple[str, ...], Shape]] = {"input_ids": (INT, ("S",)), "loss_mask": (INT, ("S",))}
TENSORS: dict[str, dict[str, tuple[tuple[str, ...], Shape]]] = {
    "specforge-eagle3": {**TOKENS, "hidden_state": (FLOAT, (1, "S", "H")), "aux_hidden_state": (FLOAT, (1, "S", "LH"))},
    "specforge-dspark": {**TOKENS, "hidden_states": (FLOAT, ("S", "LH")), "target_last_hidden_states": (FLOAT, ("S", "H"))},
    "specforge-dflash": {**TOKENS, "hidden_states": (FLOAT, ("S", "LH"))},
    "modelopt": {**TOKENS, "hidden_states": (FLOAT, ("S", "H")), "aux_hidden_states": (FLOAT, ("S", "LH"))},
}


@dataclass(frozen=True)
class TrainerLayout:
    """A trainer's format.

    takes   patterns of the names that its loader takes, at any depth
    known   whether a folder without a sidecar is to be read so
    read    reads the folder again, and gives checks
    """

    takes: tuple[str, ...]
    known: Callable[[Path], bool]
    read: Callable[[Path, Said], list[Check]]


def verify_export(folder: str | Path, *, quick: bool = False, progress: Progress = SILENT) -> list[Check]:
    """All checks of the export or cache in `folder`, which never raise. `quick` looks at the sidecar and at sizes only."""
    folder = Path(folder)
    checks = verify_bytes(folder, quick=quick, progress=progress)
    if quick or not all(check.ok for check in checks):
        return checks  # what reads the files again would stumble over damage that is known by now
    said = sidecar_in(folder)
    layout = LAYOUTS[said["format"] if said else layout_of(folder) or ""]
    return checks + run_check("layout", folder, lambda: layout.read(folder, said))


def verify_bytes(folder: Path, *, quick: bool = False, progress: Progress = SILENT) -> list[Check]:
    """The checks of names, bytes and digests against the sidecar; of a folder without one, a line that says so."""
    path = find_sidecar(folder)
    if path is None:
        return [_without_sidecar(folder)]
    with attempt(path) as failures:
        said = read_sidecar(path)
        if said["format"] not in LAYOUTS:
            raise CorruptBank(
                f"{path}: of the format {said['format']!r}; this version knows {', '.join(LAYOUTS)}. Verify it with the version "
                f"that wrote it ({said['converter']})."
            )
    if failures:
        return [Check("sidecar", False, failures[0])]
    files, size = said["files"], sum(entry["bytes"] for entry in said["files"])
    good = f"{said['format']} made from {origin(said)}: {len(files):,} files, {human_bytes(size)}; its own digest is right"
    checks = [Check("sidecar", True, good), *run_check("files", path, lambda: _files(folder, said))]
    if quick or not checks[-1].ok:
        return checks
    with progress.phase("verify", size, unit="bytes") as phase:
        checks += run_check("digests", path, lambda: _digests(folder, said, phase.advance))
    return checks + run_check("strays", path, lambda: _strays(folder, said))


def layout_of(folder: Path) -> str | None:
    """The format that a folder without a sidecar is to be read as; None where it looks like none."""
    if (folder / "config.json").is_file():  # a model's weights are .bin or .pt, too
        return None
    return next((name for name, layout in LAYOUTS.items() if layout.known(folder)), None)


def _without_sidecar(folder: Path) -> Check:
    format = layout_of(folder)
    if (folder / JOURNAL).is_dir():
        found = f"an export that is not finished ({JOURNAL}/ is there). Run the command that began it again."
    elif format is None:
        found = f"no {SIDECAR}, and no format that `arrowbank export` writes."
    else:
        who = f"no {SIDECAR}: not written by `arrowbank export`, or copied without it"
        return Check("sidecar", True, f"{who}. Read as {format}; without digests nothing vouches for the bytes")
    return Check("sidecar", False, f"{folder}: {found}")


def _files(folder: Path, said: Sidecar) -> Check:
    wrong = []
    for entry in said["files"]:
        path = folder / entry["name"]
        if fault := place_fault(folder, entry["name"]):
            wrong.append(f"{entry['name']} ({fault})")
        elif not path.is_file():
            wrong.append(f"{entry['name']} (missing)")
        elif path.stat().st_size != entry["bytes"]:
            wrong.append(f"{entry['name']} ({path.stat().st_size:,} bytes, expected {entry['bytes']:,})")
    return found_wrong("files", wrong, f"{len(said['files']):,} files, each of its size", "missing, or of another size:")


def _digests(folder: Path, said: Sidecar, report: Callable[[int], object]) -> Check:
    wrong = []
    for entry in said["files"]:
        if digest_of(folder / entry["name"], "xxh3_128") != entry["xxh3_128"]:
            wrong.append(entry["name"])
        report(entry["bytes"])
    good = f"xxh3-128 of {len(said['files']):,} files"
    return found_wrong("digests", wrong, good, "bytes are not those that were exported (xxh3-128 differs) in")


def _strays(folder: Path, said: Sidecar) -> Check:
    listed, takes = {entry["name"] for entry in said["files"]}, LAYOUTS[said["format"]].takes
    found = [name for name in _visible(folder) if name not in listed and any(fnmatch(name, pattern) for pattern in takes)]
    return found_wrong(
        "strays", sorted(found), "no other file that a loader would take", "not of this export, and loaders take"
    )


def _visible(folder: Path) -> Iterator[str]:
    """The names of all files in `folder` that are not hidden, at any depth."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and not any(part.startswith(".") for part in name.split("/")):
            yield name


def _differing(said: Said, found: Mapping[str, Any]) -> list[str]:
    """Where the sidecar, if there is one, says otherwise than the files."""
    return [
        f"{name} is {value!r}, {SIDECAR} says {said[name]!r}"
        for name, value in found.items()
        if said and said.get(name) != value
    ]


# token ids of samples


def _sample_fault(name: str, ids: npt.NDArray[Any], mask: npt.NDArray[Any], vocab_size: Any) -> Iterator[str]:
    limit = vocab_size if isinstance(vocab_size, int) else 1 << 31
    if not len(ids) or len(ids) != len(mask):
        yield f"{name}: {len(ids)} ids, {len(mask)} of a mask"
    elif ids.min() < 0 or ids.max() >= limit:
        yield f"{name}: ids {ids.min()} to {ids.max()}"
    elif mask.min() < 0 or mask.max() > 1:
        yield f"{name}: a loss mask of {mask.min()} to {mask.max()}"


def _tokens_check(samples: int, tokens: int, wrong: list[str], vocab_size: Any) -> Check:
    if not samples:
        return Check("tokens", False, NOTHING)
    within = f"ids below {vocab_size:,}" if isinstance(vocab_size, int) else "ids not negative (no vocabulary is stated)"
    return found_wrong(
        "tokens", wrong, f"{samples:,} samples, {tokens:,} tokens; {within}, masks 0 and 1", "ids or masks wrong in"
    )


def _rows(rows: TargetRows, said: Said) -> Check:
    wrong: list[str] = []
    for row in range(len(rows.lengths)):
        sample = rows.read(row)
        wrong += _sample_fault(f"row {row}", sample.input_ids, sample.loss_mask, said.get("vocab_size"))
    return _tokens_check(len(rows.lengths), int(rows.lengths.sum()), wrong, said.get("vocab_size"))


# formats of target banks


def _deepspec(folder: Path, said: Said) -> list[Check]:
    cache = deepspec.DeepSpecCache(folder)
    manifest, samples = cache.manifest, len(cache.lengths)
    names = ("num_samples", "target_layer_ids", "hidden_size", "target_model_name_or_path")
    wrong = _differing(said, {name: manifest[name] for name in names})
    if manifest.get("num_shards") != len(manifest["shards"]):
        wrong.append(f"num_shards is {manifest.get('num_shards')!r}, {len(manifest['shards'])} are listed")
    if [shard.get("shard_id") for shard in manifest["shards"]] != list(range(len(manifest["shards"]))):
        wrong.append("shard_id of the manifest's shards do not count from 0")
    if not np.array_equal(cache.sample_ids, np.arange(samples)):
        wrong.append(f"sample_id in {deepspec.INDEX} do not count from 0")
    good = f"manifest, index and {len(manifest['shards']):,} shards agree: {samples:,} samples of layers {manifest['target_layer_ids']}"
    return [found_wrong("layout", wrong, good, ""), *run_check("tokens", folder, lambda: _rows(cache, said))]


def _speculators(folder: Path, said: Said) -> list[Check]:
    rows = speculators.SpeculatorsFolder(folder)
    facts = rows.facts
    found: dict[str, Any] = {"num_samples": len(rows.lengths), "hidden_size": facts.hidden_size}
    if facts.target_layer_ids is not None:
        found["target_layer_ids"] = theirs(facts.target_layer_ids, BLOCK_INPUT)
    wrong = _differing(said, found)
    good = f"{len(rows.lengths):,} files of hidden states hold the dataset's tokens, {facts.layers} layers and the last each"
    return [
        found_wrong("layout", wrong, good, ""),
        *run_check("dataset", folder / STATE, lambda: _dataset(folder, rows)),
        *run_check("tokens", folder, lambda: _rows(rows, said)),
    ]


def _dataset(folder: Path, rows: speculators.SpeculatorsFolder) -> Check:
    """Whether `datasets` opens the tokens, and what is counted beside them is right."""
    import datasets

    wrong = []
    opened: Any = datasets.load_from_disk(str(folder))
    if len(opened) != len(rows.lengths):
        wrong.append(f"{len(opened)} rows in {STATE}, {len(rows.lengths)} in its files")
    if "seq_len" in opened.column_names and opened.with_format(None)["seq_len"][:] != rows.lengths.tolist():
        wrong.append("seq_len is not the length of input_ids")
    path = folder / speculators.FREQUENCIES
    if path.is_file():
        with TorchFile(path) as file:
            file.check()
            if isinstance(file.value, dict) and file.value != _frequencies(rows):
                wrong.append(f"{path.name} is not how often tokens are in the loss")
    return found_wrong("dataset", wrong, f"load_from_disk opens {len(opened):,} rows", "")


def _frequencies(rows: speculators.SpeculatorsFolder) -> dict[int, int]:
    kept = [ids[mask != 0] for ids, mask in map(rows.tokens, range(len(rows.lengths)))]
    found, times = np.unique(np.concatenate(kept), return_counts=True)
    return dict(zip(found.tolist(), times.tolist(), strict=True))


def _torch_samples(folder: Path, said: Said, *, names: list[str], format: str) -> list[Check]:
    """Files of `torch.save`, a sample each: tensors, shapes, values of ids and masks."""
    sizes: dict[str, int] = {}
    if said:
        sizes = {"H": said["hidden_size"], "LH": said["hidden_size"] * len(said["target_layer_ids"])}
    damaged: list[str] = []
    wrong: list[str] = []
    tokens = 0
    for name in names:
        with attempt(folder / name) as failures, TorchFile(folder / name) as file:
            file.check()
            _require_tensors(file, format, sizes)
            sample = file.value
            if format == "modelopt" and sample.get("conversation_id") != Path(name).stem:
                raise CorruptBank(
                    f"{folder / name}: conversation_id is {sample.get('conversation_id')!r}, expected the file's stem."
                )
            ids, mask = (file.array(sample[part]) for part in TOKENS)
            wrong += _sample_fault(name, ids, mask, said.get("vocab_size"))
            tokens += len(ids)
        damaged += failures
    damaged += _differing(said, {"num_samples": len(names)})
    good = f"{len(names):,} files, each of {', '.join(TENSORS[format])}; widths {sizes}"
    return [found_wrong("layout", damaged, good, ""), _tokens_check(len(names), tokens, wrong, said.get("vocab_size"))]


def _require_tensors(file: TorchFile, format: str, sizes: dict[str, int]) -> None:
    """Hold the tensors of a file against TENSORS. The widths of the first file are those of all."""
    sizes.pop("S", None)
    for name, (dtypes, shape) in TENSORS[format].items():
        tensor = file.value.get(name) if isinstance(file.value, dict) else None
        if not isinstance(tensor, TorchTensor):
            raise CorruptBank(f"{file.path}: no tensor {name}; expected {', '.join(TENSORS[format])}.")
        fits = tensor.dtype in dtypes and len(tensor.shape) == len(shape)
        for size, wanted in zip(tensor.shape, shape, strict=False):
            fits = fits and size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
        if not fits:
            raise CorruptBank(
                f"{file.path}: {name} is {tensor.dtype} of shape {list(tensor.shape)}; expected {' or '.join(dtypes)} of "
                f"{list(shape)}, where {sizes}."
            )
    sizes.pop("S", None)


def _specforge_names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.glob("rows_*-*/data_*.ckpt")]


def _specforge(folder: Path, said: Said, *, format: str) -> list[Check]:
    found = sorted(_specforge_names(folder), key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
    wanted = [specforge.sample_file(row) for row in range(len(found))]
    wrong = [name for name, right in zip(found, wanted, strict=True) if name != right]
    order = found_wrong(
        "samples", wrong, f"data_0 to data_{len(found) - 1}, {specforge.GROUP:,} a folder", "not in their places:"
    )
    return [order, *_torch_samples(folder, said, names=found, format=format)]


def _is_specforge(folder: Path, *, format: str) -> bool:
    """Whether the first sample has the tensors of `format` (every folder of samples is of some format: dflash takes the rest)."""
    names = _specforge_names(folder)
    if not names or format == "specforge-dflash":
        return bool(names)
    with attempt(folder / names[0]), TorchFile(folder / names[0]) as file:
        return isinstance(file.value, dict) and TENSORS[format].keys() <= file.value.keys()
    return False


def _modelopt(folder: Path, said: Said) -> list[Check]:
    return _torch_samples(folder, said, names=sorted(path.name for path in folder.glob("*.pt")), format="modelopt")


# token shards


def _token_shards(folder: Path, said: Said, *, format: str) -> list[Check]:
    if said:
        shards = TokenExport(folder).shards
        width, behind = said["T"] + (said["stride"] == "T+1"), tokenshards.LAYOUTS[format].behind
        wrong = [
            f"{entry['name']}: {entry['tokens']:,} tokens, {entry['examples']:,} examples of {width:,} and {behind} behind"
            for entry in said["shards"]
            if entry["tokens"] != entry["examples"] * width + behind
        ]
        if sum(entry["examples"] for entry in said["shards"]) != said["examples"]:
            wrong.append(f"the shards' examples do not add up to {said['examples']:,}")
    else:
        ending = next(iter(tokenshards.LAYOUTS[format].files))
        names = sorted(path for path in folder.iterdir() if path.name.endswith(ending))
        wrong, shards = [], []
        for path in names:
            with attempt(path) as failures:
                shards.append(read_ids(format, path, None))
            wrong += failures
    tokens, limit = sum(map(len, shards)), said.get("vocab")
    wrong += [] if tokens else [NOTHING]
    layout = found_wrong("layout", wrong, f"{len(shards):,} shards, {tokens:,} tokens; headers and indexes agree with them", "")
    if not isinstance(limit, int):
        return [layout, Check("tokens", True, "no vocabulary is stated, so the range of ids was not checked")]
    past = [f"shard {at}" for at, ids in enumerate(shards) if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limit]
    return [layout, found_wrong("tokens", past, f"ids below {limit:,}", f"ids of {limit:,} or more in")]


def _has_magic(folder: Path) -> bool:
    """Whether the first .bin file begins as llm.c's do."""
    for path in sorted(folder.glob("*.bin"))[:1]:
        with path.open("rb") as file:
            begin = file.read(8)
            return any(begin == np.array(header, "<i4").tobytes() for header in tokenshards.LLMC_HEADERS.values())
    return False


# tables


def _parquet(folder: Path, said: Said) -> list[Check]:
    names = sorted(path.name for path in folder.glob("*.parquet"))
    wrong: list[str] = []
    rows, first = 0, None
    for name in names:
        with attempt(folder / name) as failures, pq.ParquetFile(folder / name) as file:
            first = first or file.schema_arrow
            if file.schema_arrow != first:
                failures.append(f"{name}: other columns than {names[0]}")
            for group in range(file.num_row_groups):
                part = file.read_row_group(group)
                part.validate(full=True)
                rows += part.num_rows
        wrong += failures
    wrong += _differing(said, {"rows": rows})
    wrong += [] if rows else [NOTHING]
    columns = ", ".join(first.names) if first is not None else "none"
    return [found_wrong("layout", wrong, f"{len(names):,} files, {rows:,} rows; columns {columns}", "")]


def _npy(folder: Path, said: Said) -> list[Check]:
    matrix = map_npy(folder / MATRIX_FILE)
    index = read_json(folder / INDEX_FILE, max_bytes=(len(matrix) + 1) * INDEX_ENTRY_BYTES)
    wrong = _differing(said, {"rows": len(matrix)}) + ([] if len(matrix) else [NOTHING])
    if matrix.dtype != np.float16 or matrix.ndim != 2:
        wrong.append(f"{MATRIX_FILE} is {matrix.dtype} of shape {matrix.shape}, expected float16 [rows, width]")
    elif not all(np.isfinite(matrix[at : at + 4096]).all() for at in range(0, len(matrix), 4096)):
        wrong.append(f"{MATRIX_FILE} has values that are not finite")
    if not isinstance(index, dict) or list(index.values()) != list(range(len(matrix))):
        wrong.append(f"{INDEX_FILE} does not count the rows of {MATRIX_FILE}")
        index = {}
    with (folder / TEXTS_FILE).open("rb") as lines:
        for row, (line, key) in enumerate(zip_longest(lines, index)):
            text = json.loads(line) if line else None
            if not isinstance(text, str) or hashlib.sha1(text.encode("utf-8", "replace")).hexdigest() != key:
                wrong.append(f"{TEXTS_FILE} line {row + 1} is not the text of its key in {INDEX_FILE}")
                break
    return [found_wrong("layout", wrong, f"{len(matrix):,} vectors, keys and texts", "")]


def _any(*patterns: str) -> Callable[[Path], bool]:
    return lambda folder: any(True for pattern in patterns for _ in folder.glob(pattern))


def _all(*names: str) -> Callable[[Path], bool]:
    return lambda folder: all((folder / name).is_file() for name in names)


def _tokens_layout(format: str, known: Callable[[Path], bool]) -> TrainerLayout:
    return TrainerLayout(tokenshards.OWNS, known, partial(_token_shards, format=format))


def _specforge_layout(format: str) -> TrainerLayout:
    return TrainerLayout(("*.ckpt",), partial(_is_specforge, format=format), partial(_specforge, format=format))


# in the order in which a folder without a sidecar is recognized: what says most comes first
LAYOUTS: dict[str, TrainerLayout] = {
    deepspec.NAME: TrainerLayout(deepspec.OWNS, _all(deepspec.INDEX, deepspec.MANIFEST), _deepspec),
    speculators.NAME: TrainerLayout(
        (*speculators.OWNS, "data_*.pt"),
        lambda folder: speculators.looks_like(folder) and (folder / STATE).is_file(),
        _speculators,
    ),
    **{format: _specforge_layout(format) for format in TENSORS if format in specforge.FORMATS},
    "modelopt": TrainerLayout(("*.pt",), _any("*.pt"), _modelopt),
    "npy": TrainerLayout(("*.npy", INDEX_FILE, TEXTS_FILE), _all(MATRIX_FILE, INDEX_FILE, TEXTS_FILE), _npy),
    "parquet": TrainerLayout(("*.parquet", "*.json", "*.jsonl", "*.csv", "*.arrow"), _any("*.parquet"), _parquet),
    "megatron": _tokens_layout("megatron", _any("*.idx")),
    "nanotron": _tokens_layout("nanotron", _any("*.ds")),
    "nanogpt-npy": _tokens_layout("nanogpt-npy", _any("*.npy")),
    "llmc": _tokens_layout("llmc", _has_magic),
    "nanogpt": _tokens_layout("nanogpt", _any("train.bin", "val.bin")),
    "raw": _tokens_layout("raw", _any("*.bin")),
}
