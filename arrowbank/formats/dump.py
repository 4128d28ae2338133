"""An inference engine's dump: a folder with `index.jsonl`, one JSON object a line, and one safetensors file a sample.

Engines name things differently; the first name present counts (see FILE_NAMES … MASK_NAMES). Before anything is written, every
sample is looked at: its header, ids and mask, not its hidden states, which are read when they are on their way to disk. A
sample that is no good is an error with line, file and tensor, or goes into quarantine, where that is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import numpy.typing as npt

from arrowbank.bank.floats import E4M3, E5M2, Bits, bfloat16_bits
from arrowbank.bank.kinds.targets_bank import TargetFacts, TargetSample
from arrowbank.bank.manifest import parsed_json
from arrowbank.bank.names import is_inside
from arrowbank.errors import InputError
from arrowbank.formats.safetensors import SafetensorsFile, Tensor
from arrowbank.progress import SILENT, Progress, tell_unread

INDEX = "index.jsonl"
FILE_NAMES = ("file", "path", "safetensors", "sample", "shard")
ID_NAMES = ("input_ids", "input_id", "ids", "tokens")
TAP_NAMES = ("target_hidden_states", "hidden_states", "target_hidden")
LAST_NAMES = ("target_last_hidden_states", "last_hidden_states", "target_last_hidden")
MASK_NAMES = ("loss_mask", "loss_masks")
LossMask = Literal["auto", "ones_except_first", "all_ones", "from_dump"]
MAX_LINE = 1 << 24
INTEGERS = ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")
MASKS = ("BOOL", *INTEGERS, "F16", "F32", "F64")
FLOATS = ("F16", "F32", "F64", "BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, kw_only=True)
class DumpRules:
    """How a dump is read. What is None is taken from the first sample, and checked on all others. `loss_mask` "auto": the dump's
    own masks where every good sample has one, else ones_except_first."""

    target_layer_ids: tuple[int, ...] | None = None
    hidden_size: int | None = None
    loss_mask: LossMask = "auto"
    vocab_size: int | None = None
    limit: int | None = None
    allow_outside: bool = False
    quarantine: bool = False
    index: str = INDEX


@dataclass(frozen=True)
class Quarantined:
    """A sample that was left out, and why."""

    line: int
    file: str
    reason: str


class BadSample(Exception):
    """Why a sample is no good: tensor, found, expected."""


class _NoMask(Exception):
    """A good sample without a loss mask of its own, under the rule "auto": where it is."""


@dataclass
class Dump:
    """The good samples of a dump, as target rows."""

    folder: Path
    facts: TargetFacts
    digest: str
    files: list[Path]
    lengths: npt.NDArray[np.int64]
    quarantined: list[Quarantined] = field(default_factory=list)

    @property
    def place(self) -> str:
        return str(self.folder)

    @property
    def outside(self) -> list[Path]:
        """The folders outside the dump that samples are in."""
        root = self.folder.resolve()
        return sorted({folder for folder in {file.parent for file in self.files} if not folder.is_relative_to(root)})

    def read(self, row: int) -> TargetSample:
        """The sample; InputError when its file is no longer what it was."""
        try:
            return _Sample(SafetensorsFile(self.files[row]), self.facts.loss_mask).sample(self.facts)
        except BadSample as error:
            raise InputError(f"{self.files[row]}: {error}. It was good before: leave a dump alone while it is read.") from None


def open_dump(folder: str | Path, rules: DumpRules, *, target_model: str, norm: str, progress: Progress = SILENT) -> Dump:
    """Look at every sample of the dump in `folder`.

    Raises InputError with line, file, tensor, found and expected for the first sample that is no good (unless
    `rules.quarantine`), and for a dump without a good sample. What the dump holds beside that is named in a message.
    """
    survey = _Survey(Path(folder), rules, target_model, norm)
    how = "the dump's own"
    try:
        survey.look(progress)
    except _NoMask as missing:
        how = f"1, but 0 for the first token of each sample ({missing} has none of its own)"
        survey = _Survey(Path(folder), replace(rules, loss_mask="ones_except_first"), target_model, norm)
        survey.look(progress)
    found = survey.finish()
    if rules.loss_mask == "auto":
        progress.message(f"{folder}: loss masks are {how} (--loss-mask {found.facts.loss_mask})")
    survey.tell_unread(progress)
    return found


def _lines(index: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that are not blank."""
    try:
        with index.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise InputError(f"{index} line {number}: longer than {MAX_LINE} bytes. Give one JSON object a line.")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InputError(
            f"{index}: cannot be read ({error.strerror}). A dump is a folder with {INDEX} (another name: "
            "--index-name) and one .safetensors a sample."
        ) from None


class _Survey:
    """The look at a dump, sample by sample."""

    def __init__(self, folder: Path, rules: DumpRules, target_model: str, norm: str) -> None:
        self._folder, self._rules, self._target_model, self._norm = folder, rules, target_model, norm
        self._root = folder.resolve()
        self._facts: TargetFacts | None = None
        self._content = hashlib.sha256()
        self._seen: dict[Path, int] = {}
        self.files: list[Path] = []
        self._lengths: list[int] = []
        self._quarantined: list[Quarantined] = []
        self._unread: dict[str, dict[str, None]] = {"tensors": {}, f"fields of {rules.index}": {}}
        self._whole = True

    def look(self, progress: Progress) -> None:
        """Take up the samples of the index, as many as are asked for. Raises _NoMask under the rule "auto"."""
        with progress.phase("look", None, unit="samples") as phase:
            for number, line in _lines(self._folder / self._rules.index):
                if self._rules.limit is not None and len(self.files) >= self._rules.limit:
                    self._whole = False
                    break
                self.take(number, line)
                phase.advance(1)

    def tell_unread(self, progress: Progress) -> None:
        """Name what the dump holds and nobody reads."""
        paths = sorted(self._folder.rglob("*")) if self._whole else []
        files = [
            path for path in paths if path.is_file() and path.name != self._rules.index and path.resolve() not in self._seen
        ]
        names = [path.relative_to(self._folder).as_posix() for path in files]
        tell_unread(progress, self._folder, **self._unread, files=names)

    def take(self, number: int, line: bytes) -> None:
        name = ""
        try:
            name = self._file_of(line)
            path = self._path(name, number)
            self._look(path)
        except _NoMask:
            raise _NoMask(f"{name} in line {number}") from None
        except (BadSample, InputError) as error:
            self._refuse(number, name, str(error))

    def finish(self) -> Dump:
        if self._facts is None or not self.files:
            why = f": {self._quarantined[0].reason}" if self._quarantined else ""
            raise InputError(f"{self._folder}: no good sample in {INDEX} ({len(self._quarantined)} bad ones{why}).")
        return Dump(
            self._folder,
            self._facts,
            self._content.hexdigest(),
            self.files,
            np.array(self._lengths, np.int64),
            self._quarantined,
        )

    def _path(self, name: str, number: int) -> Path:
        try:
            path = (self._folder / name).resolve()
            is_file = path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that no file system has
            raise BadSample(f"not the name of a file ({error})") from None
        if not self._rules.allow_outside and not is_inside(self._root, path):
            raise BadSample(f"lies outside the dump, at {path}; give --allow-outside if that is meant")
        if path in self._seen:
            raise BadSample(f"is the sample of line {self._seen[path]} already; expected one line a sample")
        if not is_file:
            raise BadSample("the file is missing")
        self._seen[path] = number
        return path

    def _look(self, path: Path) -> None:
        """Check the sample and take it up."""
        found = _Sample(SafetensorsFile(path), self._rules.loss_mask)
        facts = self._facts or self._facts_of(found)
        found.check(facts)
        input_ids = found.input_ids()
        _check_ids(input_ids, self._rules.vocab_size)
        loss_mask = found.loss_mask()
        self._facts = facts
        self._unread["tensors"] |= dict.fromkeys(sorted(found.unread()))
        for part in (path.name.encode(), found.file.header, input_ids.tobytes(), loss_mask.tobytes()):
            self._content.update(part)
        self.files.append(path)
        self._lengths.append(len(input_ids))

    def _facts_of(self, first: _Sample) -> TargetFacts:
        """What the first sample says of width and layers, held against what was asked for."""
        rules, tokens = self._rules, first.tokens
        hidden_size = rules.hidden_size or _elements(first.last) // tokens
        layers = _elements(first.taps) // (tokens * hidden_size) if hidden_size else 0
        if rules.target_layer_ids is not None:
            layers = len(rules.target_layer_ids)
        return TargetFacts(
            target_layer_ids=rules.target_layer_ids,
            layers=layers,
            hidden_size=hidden_size,
            target_model_name_or_path=self._target_model,
            last_hidden_norm=self._norm,
            loss_mask="from_dump" if rules.loss_mask == "auto" else rules.loss_mask,
            vocab_size=rules.vocab_size,
        )

    def _file_of(self, line: bytes) -> str:
        """The file that a line names; what else the line says is noted."""
        try:
            entry = parsed_json(line, max_bytes=MAX_LINE, strict=False)
        except ValueError as error:
            raise BadSample(f"not JSON ({error})") from None
        key = next((key for key in FILE_NAMES if key in entry), None) if isinstance(entry, dict) else None
        name = entry[key] if key is not None else None
        if not isinstance(name, str) or not name:
            raise BadSample(f"names no file; expected a JSON object with one of {', '.join(FILE_NAMES)}")
        if not name.isprintable():
            raise BadSample(f"not the name of a file ({name!r} has characters that cannot be printed)")
        self._unread[f"fields of {self._rules.index}"] |= dict.fromkeys(str(other) for other in entry if other != key)
        return name

    def _refuse(self, number: int, name: str, reason: str) -> None:
        if not self._rules.quarantine:
            where = f": {name}" if name else ""
            raise InputError(
                f"{self._folder / self._rules.index} line {number}{where}: {reason}. Mend or remove it, or give --on-bad-sample quarantine "
                "to leave such samples out."
            )
        self._quarantined.append(Quarantined(number, name, reason))


class _Sample:
    """A sample's tensors under their first present names, and what they come to."""

    def __init__(self, file: SafetensorsFile, loss_mask: str) -> None:
        self.file, self._rule = file, loss_mask
        self.ids, self.taps, self.last = (self._find(names) for names in (ID_NAMES, TAP_NAMES, LAST_NAMES))
        self.mask = self._first(MASK_NAMES) if loss_mask == "auto" else None
        if loss_mask == "from_dump":
            self.mask = self._find(MASK_NAMES)
        self.tokens = _elements(self.ids)
        if not self.tokens:
            _expected(self.ids, "at least one token")

    def unread(self) -> list[str]:
        """The names of the file's other tensors."""
        read = (self.ids, self.taps, self.last, self.mask)
        return [name for name, tensor in self.file.tensors.items() if tensor not in read]

    def _first(self, names: tuple[str, ...]) -> Tensor | None:
        return next((self.file.tensors[name] for name in names if name in self.file.tensors), None)

    def _find(self, names: tuple[str, ...]) -> Tensor:
        found = self._first(names)
        if found is None:
            there = ", ".join(self.file.tensors) or "none"
            raise BadSample(f"no tensor {' or '.join(names)}; the file has: {there}")
        return found

    def check(self, facts: TargetFacts) -> None:
        """Raise BadSample for hidden states of a shape or type that does not fit."""
        S, L, H = self.tokens, facts.layers, facts.hidden_size
        shapes = ((S, L, H), (S, L * H), (1, S, L, H), (1, S, L * H), (S * L * H,))
        if self.taps.shape not in shapes or not L * H:
            _expected(self.taps, f"({S}, {L}, {H}) or ({S}, {L * H}): tokens, layers, hidden size")
        if _elements(self.last) != S * H:
            _expected(self.last, f"({S}, {H}): tokens, hidden size")
        for tensor in (self.taps, self.last):
            if tensor.dtype not in FLOATS:
                _expected(tensor, f"one of {', '.join(FLOATS)}")

    def sample(self, facts: TargetFacts) -> TargetSample:
        """The checked sample, its hidden states as bfloat16 bits: over the map where they are bfloat16 already."""
        self.check(facts)
        return TargetSample(
            self.file.path.name,
            self.input_ids(),
            self.loss_mask(),
            hidden_bits(self.file, self.taps).reshape(self.tokens, -1),
            hidden_bits(self.file, self.last).reshape(self.tokens, -1),
        )

    def input_ids(self) -> npt.NDArray[np.int32]:
        if self.ids.dtype not in INTEGERS:
            _expected(self.ids, "integers")
        ids = self.file.array(self.ids)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > np.iinfo(np.int32).max:
            raise BadSample(f"tensor {self.ids.name} has token id {low if low < 0 else high}; expected 0 or more, in 32 bits")
        return ids.astype(np.int32)

    def loss_mask(self) -> npt.NDArray[np.uint8]:
        if self.mask is None and self._rule == "auto":
            raise _NoMask
        if self.mask is None:
            return made_mask(self.tokens, self._rule)
        if _elements(self.mask) != self.tokens or self.mask.dtype not in MASKS:
            _expected(self.mask, f"({self.tokens},), one for each token, of {', '.join(MASKS)}")
        values = self.file.array(self.mask)
        if not np.isin(values, (0, 1)).all():
            raise BadSample(f"tensor {self.mask.name} has values other than 0 and 1; expected a mask")
        return values.astype(np.uint8)


def hidden_bits(file: SafetensorsFile, tensor: Tensor) -> Bits:
    """A tensor of floats of any width as bfloat16 bits: over the map where they are bfloat16 already."""
    values = file.array(tensor)
    eighths = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}
    bits: Bits
    if tensor.dtype == "BF16":
        bits = values
    elif tensor.dtype in eighths:
        bits = eighths[tensor.dtype][values]
    else:
        bits = bfloat16_bits(values)
    return bits


def made_mask(tokens: int, rule: str) -> npt.NDArray[np.uint8]:
    """The loss mask of a sample without one of its own."""
    mask = np.ones(tokens, np.uint8)
    if rule != "all_ones":
        mask[0] = 0  # it has no left context, so nothing predicts it
    return mask


def _check_ids(ids: npt.NDArray[np.int32], vocab_size: int | None) -> None:
    if vocab_size is not None and int(ids.max()) >= vocab_size:
        at = int(ids.argmax())
        raise BadSample(f"token id {ids[at]} at position {at}; expected less than --vocab-size {vocab_size}")


def _elements(tensor: Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _expected(tensor: Tensor, expected: str) -> NoReturn:
    raise BadSample(f"tensor {tensor.name} is {tensor.dtype} of shape {tensor.shape}; expected {expected}")


def quarantine_lines(quarantined: list[Quarantined]) -> bytes:
    """What was left out, as JSON lines."""
    return b"".join(json.dumps(vars(one)).encode() + b"\n" for one in quarantined)
