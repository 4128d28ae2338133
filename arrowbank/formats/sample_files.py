"""Folders that engines and trainers write, a file a sample: what their readers share.

A format says how one file is opened (`FoundSample`); here every file is looked at once, its ids and masks checked, what differs from
the first good sample refused or put in quarantine, and what is left are target rows. Hidden states are read when they are on their way
to disk."""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from arrowbank.bank.floats import Bits, bfloat16_bits
from arrowbank.bank.kinds.targets_bank import TargetFacts, TargetSample
from arrowbank.errors import CorruptBank, InputError
from arrowbank.formats.dump import BadSample, DumpRules, Quarantined, made_mask
from arrowbank.formats.torchfile import TorchFile, TorchTensor
from arrowbank.progress import SILENT, Progress

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
Masks = Callable[[str, Ids], Mask]  # a sample's name and tokens → its loss mask; BadSample where there is none


@dataclass(frozen=True, kw_only=True)
class FoundSample:
    """One file. `loss_mask` is None where the file has none; `hidden` reads taps [S, L·H] and last [S, H]; `identity` tells the file's
    content from other content."""

    name: str
    input_ids: Ids
    loss_mask: Mask | None
    layers: int
    hidden_size: int
    norm: str
    identity: bytes
    hidden: Callable[[], tuple[Bits, Bits]]


class TorchSample:
    """A sample in a file of `torch.save`: a dict of tensors and plain values, read without unpickling anything.

    Raises BadSample for what is not such a file, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            self.identity = file.identity
            if not isinstance(file.value, dict):
                raise BadSample(f"holds a {type(file.value).__name__}; expected a dict of tensors")
            self.values = file.value
            self.input_ids = self._ids(file)
            self.loss_mask = self._mask(file)

    def width(self, name: str) -> int:
        """Numbers a token in the hidden states `name`, which are [S, width] or [1, S, width]."""
        tensor, tokens = self._tensor(name), len(self.input_ids)
        shape = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
        if len(shape) != 2 or shape[0] != tokens or not shape[1] or tensor.dtype not in FLOATS:
            raise BadSample(
                f"{name} is {tensor.dtype} of shape {tensor.shape}; expected floats of ({tokens}, width) or (1, {tokens}, width)"
            )
        return int(shape[1])

    def bits(self, *names: str) -> list[Bits]:
        """The hidden states of these names as bfloat16 bits [S, width]."""
        with self._opened() as file:
            found = [file.array(self._tensor(name)).reshape(len(self.input_ids), -1) for name in names]
            return [
                values if self._tensor(name).dtype == "bfloat16" else bfloat16_bits(values)
                for name, values in zip(names, found, strict=True)
            ]

    @contextmanager
    def _opened(self) -> Iterator[TorchFile]:
        try:
            with TorchFile(self.path) as file:
                yield file
        except NOT_A_ZIP as error:
            raise BadSample(f"not a file of torch.save, or damaged ({error})") from None

    def _tensor(self, name: str) -> TorchTensor:
        tensor = self.values.get(name)
        if not isinstance(tensor, TorchTensor):
            there = ", ".join(map(str, self.values)) or "nothing"
            raise BadSample(f"no tensor {name}; the file has: {there}")
        return tensor

    def _ids(self, file: TorchFile) -> Ids:
        tensor = self._tensor("input_ids")
        if "int" not in tensor.dtype:
            raise BadSample(f"input_ids are {tensor.dtype}; expected integers")
        ids = file.array(tensor).reshape(-1)
        if not len(ids) or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise BadSample("input_ids are empty, or have ids below 0 or past 32 bits")
        return ids.astype(np.int32)

    def _mask(self, file: TorchFile) -> Mask | None:
        if self.values.get("loss_mask") is None:
            return None
        mask = file.array(self._tensor("loss_mask")).reshape(-1)
        if len(mask) != len(self.input_ids) or not np.isin(mask, (0, 1)).all():
            raise BadSample(f"loss_mask has {len(mask)} values; expected 0 or 1 for each of {len(self.input_ids)} tokens")
        return mask.astype(np.uint8)


# what zipfile and gzip raise for damaged archives: other versions, encryption and names that are no UTF-8 among it
NOT_A_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, KeyError, RuntimeError, OverflowError)
FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass
class SampleFiles:
    """The good samples of `files`, as target rows. `facts` holds what every file must agree with: layers, width and norm are those of
    the first good one.

    Raises InputError for the first file that is no good, unless `rules.quarantine`, and where none is left.
    """

    folder: Path
    files: Sequence[Path]
    open: Callable[[Path], FoundSample]
    rules: DumpRules
    facts: TargetFacts
    masks: Masks | None = None
    progress: Progress = SILENT
    quarantined: list[Quarantined] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._good: list[Path] = []
        self._known = False
        lengths, content, own_masks = list[int](), hashlib.sha256(), 0
        with self.progress.phase("look", len(self.files), unit="samples") as phase:
            for number, path in enumerate(self.files):
                if self.rules.limit is not None and len(self._good) >= self.rules.limit:
                    break
                try:
                    found = self._checked(path)
                    mask = self._mask(found)
                except (BadSample, InputError, CorruptBank) as error:
                    self._refuse(number, path, str(error))
                else:
                    for part in (path.name.encode(), found.identity, mask.tobytes()):
                        content.update(part)
                    self._good.append(path)
                    lengths.append(len(found.input_ids))
                    own_masks += found.loss_mask is not None
                phase.advance(1)
        if not self._good:
            raise InputError(f"{self.folder}: no sample of it is good, of {len(self.quarantined)}. Make the folder again.")
        self.lengths, self.digest = np.array(lengths, np.int64), content.hexdigest()
        self._say_masks(own_masks)

    @property
    def place(self) -> str:
        return str(self.folder)

    def read(self, row: int) -> TargetSample:
        """The sample; InputError when its file is no longer what it was."""
        path = self._good[row]
        try:
            found = self._checked(path)
            taps, last = found.hidden()
            return TargetSample(found.name, found.input_ids, self._mask(found), taps, last)
        except BadSample as error:
            raise InputError(f"{path}: {error}. It was good before: leave the folder alone while it is read.") from None

    def _checked(self, path: Path) -> FoundSample:
        found, facts = self.open(path), self.facts
        if not self._known:
            if self.rules.target_layer_ids is not None and len(self.rules.target_layer_ids) != found.layers:
                raise BadSample(
                    f"holds {found.layers} layers beside the last hidden states; expected {len(self.rules.target_layer_ids)}, those of "
                    f"--layers {','.join(map(str, self.rules.target_layer_ids))}"
                )
            expected = self.rules.hidden_size or found.hidden_size
            self.facts = facts = replace(facts, layers=found.layers, hidden_size=expected, last_hidden_norm=found.norm)
        here, wanted = (found.layers, found.hidden_size, found.norm), (facts.layers, facts.hidden_size, facts.last_hidden_norm)
        if here != wanted:
            raise BadSample(f"(layers, hidden size, norm) are {here}; expected {wanted}, as in the samples before it")
        ids, most = found.input_ids, self.rules.vocab_size
        if most is not None and int(ids.max()) >= most:
            at = int(ids.argmax())
            raise BadSample(f"token id {ids[at]} at position {at}; expected less than --vocab-size {most}")
        self._known = True
        return found

    def _mask(self, found: FoundSample) -> Mask:
        rule = self.rules.loss_mask
        if self.masks is not None:
            return self.masks(found.name, found.input_ids)
        if rule in ("auto", "from_dump") and found.loss_mask is not None:
            return found.loss_mask
        if rule == "from_dump":
            raise BadSample("has no loss mask; expected one under --loss-mask from_dump")
        return made_mask(len(found.input_ids), rule)

    def _say_masks(self, own: int) -> None:
        rule: str = self.rules.loss_mask
        if self.masks is not None:
            rule, how = "joined", "those of --masks"
        elif rule == "auto" and 0 < own < len(self._good):
            raise InputError(
                f"{self.folder}: {own} of {len(self._good)} samples have a loss mask, the others none. Give --loss-mask "
                "ones_except_first or all_ones for all of them, or --masks FILE to join them."
            )
        elif rule == "auto":
            rule = "from_dump" if own else "ones_except_first"
            how = "the files' own" if own else "1, but 0 for the first token of each sample (the files have none)"
        else:
            how = rule
        self.facts = replace(self.facts, loss_mask=rule)
        self.progress.message(f"{self.folder}: loss masks are {how}")

    def _refuse(self, number: int, path: Path, reason: str) -> None:
        name = path.relative_to(self.folder).as_posix()
        if not self.rules.quarantine:
            raise InputError(
                f"{path}: {reason.removeprefix(f'{path}: ').removesuffix('.')}. Make it again or remove it, or give --on-bad-sample "
                "quarantine to leave such samples out."
            )
        self.quarantined.append(Quarantined(number, name, reason))
