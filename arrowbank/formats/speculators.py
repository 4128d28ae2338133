"""The folder of speculators: a dataset of tokens that `datasets.load_from_disk` opens, and a safetensors file of hidden states a row.

data-*.arrow, dataset_info.json, state.json   input_ids and loss_mask, lists of int64, and seq_len; format torch
hidden_states/hs_{row}.safetensors            token_ids int64 [S] · hidden_states bfloat16 [S, L+1, H]
token_freq.pt                                 {token id: how often it is in the loss}, a plain dict

The last slot of hidden_states is what the final block puts out, before the norm. Layers are counted by what goes into a block.
The metadata of our safetensors files say what the format does not: layer ids, target model, and the sample's name.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.columns import list_column, list_values, number_column
from arrowbank.bank.files import HashedFile, json_bytes, require_space
from arrowbank.bank.kinds.targets_bank import RowsView, TargetFacts, TargetRows, TargetSample
from arrowbank.bank.manifest import INFO, STATE, dataset_info, dataset_state, json_in, parsed_json
from arrowbank.bank.names import check_names, check_places, checked_place
from arrowbank.errors import CorruptBank, InputError
from arrowbank.formats.dump import FLOATS, Quarantined, hidden_bits
from arrowbank.formats.dump import INDEX as DUMP_INDEX
from arrowbank.formats.export import BLOCK_INPUT, ExportFormat, facts_said, ours, save_torch, theirs, write_samples
from arrowbank.formats.export_folder import ExportFolder
from arrowbank.formats.safetensors import SafetensorsFile, Tensor, write_safetensors
from arrowbank.formats.sidecar import SIDECAR, sidecar_in
from arrowbank.progress import Phase, Progress, tell_unread

NAME = "speculators"
HIDDEN, TOKENS = "hidden_states", "token_ids"
FREQUENCIES = "token_freq.pt"
NORM = "pre"
OWNS = (f"{HIDDEN}/hs_*.safetensors", "data-*.arrow", INFO, STATE, FREQUENCIES)
COLUMNS = ("input_ids", "loss_mask", "seq_len")
PART_TOKENS = 1 << 24  # of the dataset's tokens, in a file
LAYERS_KEY, CONVENTION_KEY, MODEL_KEY, SAMPLE_KEY = "target_layer_ids", "layer_id_convention", "target_model", "sample"


def hidden_file(row: int) -> str:
    return f"{HIDDEN}/hs_{row}.safetensors"


def _final_block_last(rows: TargetRows) -> TargetRows:
    """Rows whose highest tap is the final block's output: it is the last hidden state before the norm, and a tap no more."""
    ids, width = (rows.facts.target_layer_ids or ())[:-1], rows.facts.hidden_size
    facts = replace(rows.facts, target_layer_ids=ids, layers=len(ids), last_hidden_norm=NORM)
    return RowsView(
        rows, facts, seen=lambda sample: replace(sample, taps=sample.taps[:, :-width], last=sample.taps[:, -width:])
    )


def _before_the_norm(rows: TargetRows) -> TargetRows:
    facts = rows.facts
    if facts.last_hidden_norm == NORM:
        return rows
    final = None if facts.num_hidden_layers is None else facts.num_hidden_layers - 1
    if facts.layers > 1 and facts.target_layer_ids and facts.target_layer_ids[-1] == final:
        return _final_block_last(rows)
    which = "the model's last one, whose number the bank does not know" if final is None else f"the last one, {final}"
    raise InputError(
        f"{rows.place}: its last hidden states are {facts.last_hidden_norm} (after the final norm), speculators holds what the final "
        "block puts out before it. Two ways out: capture or import them with --last-hidden-norm pre; or tap the final block as "
        f"well ({which}; tapped here: {', '.join(facts.layer_names)})."
    )


def write_folder(rows: TargetRows, folder: ExportFolder, *, source: str, phase: Phase) -> dict[str, Any]:
    """Write `rows`, whose last hidden states are before the norm; what the sidecar says. `phase` counts bytes of rows."""
    facts, lengths = rows.facts, rows.lengths
    said = {
        LAYERS_KEY: json.dumps(theirs(facts.target_layer_ids or (), BLOCK_INPUT)),
        CONVENTION_KEY: BLOCK_INPUT,
        MODEL_KEY: facts.target_model_name_or_path,
    }

    def write(sample: TargetSample, name: str, file: HashedFile) -> None:
        S, H = len(sample.input_ids), facts.hidden_size
        hidden = np.concatenate([sample.taps.reshape(S, facts.layers, H), sample.last.reshape(S, 1, H)], axis=1)
        tensors = {TOKENS: ("I64", [S], sample.input_ids.astype(np.int64)), HIDDEN: ("BF16", hidden.shape, hidden)}
        write_safetensors(file, tensors, {**said, SAMPLE_KEY: sample.name})

    dataset_bytes = 16 * int(lengths.sum()) + 20 * len(lengths)
    require_space(folder.folder, dataset_bytes, "the export's dataset")
    names = [hidden_file(row) for row in range(len(lengths))]
    write_samples(rows, folder, names, write, token_bytes=24 + 2 * facts.hidden_size * (facts.layers + 1), phase=phase)
    _write_dataset(rows, folder)
    return folder.finish(facts_said(rows, source=source, convention=BLOCK_INPUT))


def _write_dataset(rows: TargetRows, folder: ExportFolder) -> None:
    """The tokens, their frequencies, and last what makes `datasets` find them."""
    parts = list(_parts(rows.lengths))
    counts: Counter[int] = Counter()
    names = [f"data-{index:05d}-of-{len(parts):05d}.arrow" for index in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        batch = _batch(rows, part)
        (ids, _), (masks, _) = (list_values(batch.column(column)) for column in ("input_ids", "loss_mask"))
        found, times = np.unique(ids[masks != 0], return_counts=True)
        counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
        _write_part(folder, name, batch)
    folder.write(FREQUENCIES, lambda file: save_torch(dict(sorted(counts.items())), file))
    info = dataset_info(batch.schema)
    for feature in info["features"].values():  # the name by which `datasets` before 4 and after know a list
        feature["_type"] = {"List": "Sequence"}.get(feature["_type"], feature["_type"])
    folder.write(INFO, lambda file: file.write(json_bytes(info)))
    state = {**dataset_state(names, folder.digest), "_format_type": "torch"}
    folder.write(STATE, lambda file: file.write(json_bytes(state)))


def _parts(lengths: npt.NDArray[np.int64]) -> Iterator[range]:
    start, tokens = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > start and tokens + length > PART_TOKENS:
            yield range(start, row)
            start, tokens = row, 0
        tokens += length
    yield range(start, len(lengths))


def _batch(rows: TargetRows, part: range) -> pa.RecordBatch:
    ids, masks = [], []
    for row in part:
        sample = rows.read(row)  # its hidden states are not kept
        ids.append(sample.input_ids.astype(np.int64))
        masks.append(sample.loss_mask.astype(np.int64))
    lengths = np.array([len(one) for one in ids], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.record_batch(
        {
            "input_ids": list_column(np.concatenate(ids), offsets),
            "loss_mask": list_column(np.concatenate(masks), offsets),
            "seq_len": number_column(lengths),
        }
    )


def _write_part(folder: ExportFolder, name: str, batch: pa.RecordBatch) -> None:
    def write(file: HashedFile) -> None:
        with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), batch.schema) as stream:
            stream.write_batch(batch)

    folder.write(name, write)


FORMATS = {NAME: ExportFormat(write_folder, OWNS, _before_the_norm)}


def looks_like(folder: Path) -> bool:
    """Whether `folder` is to be read as this layout, be it whole or torn: an engine's dump would have an index."""
    return (folder / HIDDEN).is_dir() and not (folder / DUMP_INDEX).is_file()


class SpeculatorsFolder:
    """A folder of speculators as target rows; hidden states are mapped when their row is read.

    `target_layer_ids`, ours, where the files do not say them. Every file is looked at on opening, but for its hidden states. With
    `skip_missing`, rows without a file are left out and counted in `missing`: speculators makes files for as many rows as it is asked
    for, and skips those that failed. With `quarantine` a row whose file is no good is left out and noted.
    Raises InputError (not such a folder), CorruptBank (torn, or its parts do not fit).
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        target_layer_ids: tuple[int, ...] | None = None,
        skip_missing: bool = False,
        quarantine: bool = False,
    ) -> None:
        self.folder = Path(folder)
        dataset = _Dataset(self.folder)
        self._ids, self._masks, self._starts = dataset.tokens()
        self._columns = [name for name in dataset.columns if name not in COLUMNS]
        self._all_lengths = np.diff(self._starts)
        rows = range(len(self._all_lengths))
        self._rows = [row for row in rows if not skip_missing or (self.folder / hidden_file(row)).is_file()]
        self.missing, self.quarantined = len(rows) - len(self._rows), list[Quarantined]()
        if not self._rows:
            raise InputError(f"{self.folder}: none of its {len(rows):,} rows has a file in {HIDDEN}/. Make them first.")
        self._quarantine, self._first = quarantine, self._rows[0]
        if quarantine:
            self._first = next((row for row in self._rows if self._is_readable(row)), self._first)
        self.facts = self._facts(self._at(self._first), target_layer_ids)
        self.digest = self._survey()
        self.lengths = self._all_lengths[self._rows]

    def tell_unread(self, progress: Progress) -> None:
        """Name what the folder holds and nobody reads."""
        own = {SIDECAR, *(hidden_file(row) for row in range(len(self._all_lengths)))}
        found = [path.relative_to(self.folder).as_posix() for path in sorted(self.folder.rglob("*")) if path.is_file()]
        files = [name for name in found if name not in own and not any(fnmatch(name, pattern) for pattern in OWNS[1:])]
        tensors = [name for name in self._at(self._first).tensors if name not in (HIDDEN, TOKENS)]
        tell_unread(progress, self.folder, columns=self._columns, tensors=tensors, files=files)

    @property
    def place(self) -> str:
        return str(self.folder)

    def read(self, row: int) -> TargetSample:
        L, H, at = self.facts.layers, self.facts.hidden_size, self._rows[row]
        file = self._at(at)
        hidden = hidden_bits(file, self._hidden(file, at)).reshape(-1, L + 1, H)
        ids, mask = self._tokens(at)
        return TargetSample(
            file.metadata.get(SAMPLE_KEY, file.path.name),
            ids,
            mask,
            np.ascontiguousarray(hidden[:, :-1]).reshape(-1, L * H),
            np.ascontiguousarray(hidden[:, -1]),
        )

    def tokens(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """input_ids and loss_mask of a row, without its hidden states."""
        return self._tokens(self._rows[row])

    # below, rows are counted as the dataset counts them

    def _tokens(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        part = slice(int(self._starts[row]), int(self._starts[row + 1]))
        return self._ids[part], self._masks[part]

    def _is_readable(self, row: int) -> bool:
        try:
            return HIDDEN in self._at(row).tensors
        except (InputError, CorruptBank):
            return False

    def _at(self, row: int) -> SafetensorsFile:
        path = checked_place(self.folder, hidden_file(row), self.folder, nested=True)
        if not path.is_file():
            raise CorruptBank(
                f"{path}: missing; the dataset has {len(self._all_lengths)} rows. Make it, or copy the folder again."
            )
        return SafetensorsFile(path)

    def _hidden(self, file: SafetensorsFile, row: int) -> Tensor:
        """The entry of a row's hidden states; CorruptBank where they do not fit the dataset's row, or row 0."""
        S, H = int(self._all_lengths[row]), self.facts.hidden_size
        hidden = _tensor(file, HIDDEN)
        if hidden.dtype not in FLOATS or hidden.shape != (S, self.facts.layers + 1, H):
            raise CorruptBank(
                f"{file.path}: {HIDDEN} is {hidden.dtype} of shape {hidden.shape}; expected floats of {(S, self.facts.layers + 1, H)}: "
                "tokens, layers and one, hidden size. Make it again."
            )
        return hidden

    def _survey(self) -> str:
        """Hold every file against its row; a digest over tokens, masks and headers."""
        content, good = hashlib.sha256(), list[int]()
        for row in self._rows:
            try:
                parts = self._looked_at(row)
            except (InputError, CorruptBank) as error:
                if not self._quarantine:
                    raise
                self.quarantined.append(Quarantined(row, hidden_file(row), str(error)))
                continue
            good.append(row)
            for part in parts:
                content.update(part)
        if not good:
            raise InputError(f"{self.folder}: no row is good, of {len(self._rows):,}. Make the folder again.")
        self._rows = good
        return content.hexdigest()

    def _looked_at(self, row: int) -> tuple[bytes, bytes, bytes]:
        """Header, tokens and mask of a row. CorruptBank where its file is not one of this row."""
        file, (ids, mask) = self._at(row), self._tokens(row)
        self._hidden(file, row)
        there, layers = _tensor(file, TOKENS), self._at(self._first).metadata.get(LAYERS_KEY)
        if not there.dtype.startswith(("I", "U")) or not np.array_equal(file.array(there), ids):
            raise CorruptBank(
                f"{file.path}: its {TOKENS} are not the input_ids of row {row} of the dataset: hidden states of other tokens. "
                "Make the folder again; rows and files must be of one run."
            )
        if file.metadata.get(LAYERS_KEY) != layers:
            raise CorruptBank(f"{file.path}: of layers {file.metadata.get(LAYERS_KEY)}, the first file is of {layers}.")
        return file.header, ids.tobytes(), mask.tobytes()

    def _facts(self, first: SafetensorsFile, target_layer_ids: tuple[int, ...] | None) -> TargetFacts:
        said = self._said()
        hidden = _tensor(first, HIDDEN)
        if len(hidden.shape) != 3 or hidden.shape[1] < 2 or not hidden.shape[2]:
            raise InputError(f"{first.path}: {HIDDEN} of shape {hidden.shape}; expected tokens, layers and one, hidden size.")
        layers = hidden.shape[1] - 1
        found = _layer_ids(first) or target_layer_ids
        if found is not None and len(found) != layers:
            raise InputError(
                f"{first.path}: holds {layers} layers beside the last hidden states, not those of {list(found)} (what decoder block "
                "i puts out). Give as many with --layers."
            )
        return TargetFacts(
            target_layer_ids=found,
            layers=layers,
            hidden_size=hidden.shape[2],
            target_model_name_or_path=str(said.get("target_model_name_or_path") or first.metadata.get(MODEL_KEY, "")),
            last_hidden_norm=NORM,
            loss_mask=str(said.get("loss_mask", "unknown")),
            vocab_size=said.get("vocab_size"),
            num_hidden_layers=said.get("num_hidden_layers"),
        )

    def _said(self) -> dict[str, Any]:
        """What the sidecar says; nothing where another program wrote the folder."""
        said, where = sidecar_in(self.folder), self.folder / SIDECAR
        if said and said["format"] != NAME:
            raise CorruptBank(f"{where}: of the format {said['format']}, expected {NAME}. Copy or export the folder again.")
        for name in ("vocab_size", "num_hidden_layers"):
            if not isinstance(said.get(name), int | None):
                raise CorruptBank(f"{where}: {name} is {said[name]!r}, expected a number. Copy or export the folder again.")
        return said


def _tensor(file: SafetensorsFile, name: str) -> Tensor:
    if name not in file.tensors:
        raise CorruptBank(f"{file.path}: no tensor {name}; it has: {', '.join(file.tensors) or 'none'}. Make it again.")
    return file.tensors[name]


def _layer_ids(file: SafetensorsFile) -> tuple[int, ...] | None:
    """Our ids of the layers that a file's metadata name; None where they name none."""
    text = file.metadata.get(LAYERS_KEY)
    if text is None:
        return None
    try:
        ids = parsed_json(text.encode())
    except ValueError:
        ids = None
    if (
        not isinstance(ids, list)
        or not all(type(layer) is int for layer in ids)
        or ids != sorted(set(ids))
        or min(ids, default=-1) < 0
    ):
        raise CorruptBank(f"{file.path}: {LAYERS_KEY} {text!r} in the metadata; expected ascending numbers. Make it again.")
    return ours(ids, BLOCK_INPUT)


class _Dataset:
    """The dataset of a folder: its tokens and masks, checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.columns: list[str] = []

    def tokens(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """All ids and masks, flat, and where each row starts [N + 1]."""
        table = self._table()
        ids, starts = self._lists(table, "input_ids")
        masks, mask_starts = self._lists(table, "loss_mask")
        if not np.array_equal(starts, mask_starts) or not np.diff(starts).all() or len(starts) < 2:
            raise InputError(
                f"{self.folder}: rows without tokens, or with other counts in loss_mask; expected one for each token."
            )
        if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise InputError(f"{self.folder}: input_ids from {ids.min()} to {ids.max()}; expected 0 or more, in 32 bits.")
        if not np.isin(masks, (0, 1)).all():
            raise InputError(f"{self.folder}: loss_mask has values other than 0 and 1; expected a mask.")
        return ids.astype(np.int32), masks.astype(np.uint8), starts.astype(np.int64)

    def _table(self) -> pa.Table:
        path = self.folder / STATE
        try:
            check_places(self.folder, [STATE, SIDECAR], self.folder)
            names = check_names((part["filename"] for part in json_in(path)["_data_files"]), path)
            check_places(self.folder, names, path)
            parts = [pa.ipc.open_stream(pa.memory_map(str(self.folder / name))).read_all() for name in names]
            self.columns = parts[0].column_names if parts else []
            table = pa.concat_tables(part.select(["input_ids", "loss_mask"]) for part in parts)
            table.validate(full=True)  # Arrow would follow an offset out of range wherever it points
            return table
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise InputError(
                f"{self.folder}: not a whole dataset beside {HIDDEN}/ ({error!r}); expected {STATE}, and data files with input_ids "
                "and loss_mask. Copy or make the folder again."
            ) from None

    def _lists(self, table: pa.Table, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        try:
            column = table.column(name).cast(pa.list_(pa.int64())).combine_chunks()
        except pa.ArrowException as error:
            raise InputError(
                f"{self.folder}: {name} is {table.schema.field(name).type}, not lists of integers ({error})."
            ) from None
        if column.null_count or column.flatten().null_count:
            raise InputError(f"{self.folder}: {name} has nulls; expected integers.")
        return list_values(column)
