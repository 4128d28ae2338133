"""What an audit found, and its file: `arrowbank audit --out` writes it, `arrowbank report --audit` shows it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from arrowbank.bank.columns import Rows
from arrowbank.bank.files import json_bytes, publish_alone, refuse_address, refuse_other_file
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.open import open_bank
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explained, explains
from arrowbank.errors import ContractError, InputError
from arrowbank.features.nearest import nearest
from arrowbank.features.scan import DEFAULT_FIELDS, ScanConfig, read_keys
from arrowbank.inputs.sources import find_sources
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Cosine, Help, Natural, Part, Settings, checked


@dataclass(frozen=True)
class AuditRow:
    """The different texts of a kind in a split, and how many of them are shared with the split `against`, exactly and nearly."""

    kind: str
    source: str
    against: str
    texts: int
    exact: int
    near: int


@dataclass(frozen=True)
class AuditExample:
    """A text of a split, and the text of the split `against` that is nearest to it."""

    text: str
    nearest: str
    cosine: float
    kind: str
    source: str
    against: str


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found: a row per kind and split, and the near pairs that are most alike, at most 50. `texts` is how many
    different texts each split has, the one audited against included (empty in files of earlier versions)."""

    threshold: float
    max_shared: int | None
    rows: list[AuditRow]
    examples: list[AuditExample]
    texts: dict[str, int] = field(default_factory=dict)

    @property
    def exact(self) -> int:
        return sum(row.exact for row in self.rows)

    @property
    def near(self) -> int:
        return sum(row.near for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether there was something to look at on either side, and no more is shared than may be."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Why the audit is not passed, in words."""
        said = [f"{name}: no text was read, so nothing was audited" for name, count in self.texts.items() if not count]
        if not self.texts and not self.rows:
            said.append("no text was audited")
        if self.max_shared is not None and self.exact + self.near > self.max_shared:
            shared = f"{self.exact:,} texts are shared exactly and {self.near:,} nearly"
            said.append(f"{shared}: more than --max-shared {self.max_shared}")
        return said


def audit_file(path: str | Path, inputs: Iterable[Named] = ()) -> Path:
    """The file that an audit of `inputs` is to be written to, its folder made. InputError where none can be, or where it is an input,
    a file of a bank, or one that is no audit, before anything takes long."""
    file = Path(path)
    refuse_address(file)
    require_separate([], inputs, files=[("--out", file)])
    if file.is_dir():
        raise InputError(f"{file}: a folder, expected a file. Give one such as audit.json.")
    refuse_other_file(file, "an audit", lambda: read_audit(file))
    with explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    return file


def write_audit(audit: Audit, path: str | Path) -> None:
    """Publish `audit` as JSON. InputError, DiskFull."""
    publish_alone(audit_file(path), json_bytes(asdict(audit)))


def read_audit(path: str | Path) -> Audit:
    """The audit in a file. InputError where it cannot be read or is something else."""
    if Path(path).exists() and not Path(path).is_file():  # a named pipe would be waited for
        raise InputError(f"{path}: not a regular file. Give the file that `arrowbank audit --out FILE` wrote.")
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Audit)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}). Give the file that `arrowbank audit --out FILE` wrote."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not an audit ({error}). Give the file that `arrowbank audit --out FILE` wrote.") from None


QUERY_ROWS = 4096  # texts that are looked for in one pass over the other split
EXAMPLES = 50
ABSENT = 0
# What makes two banks' vectors comparable, beside the model; not the model's dtype, in which only last bits differ.
TEXT_FIELDS = ("tokenizer_fingerprint", "special_tokens", "prompt", "max_key_tokens")


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Settings):
    """What to audit against what, and what is too alike. Without `scan`, two banks are compared."""

    scan: (
        Annotated[
            ScanConfig,
            Part(
                without=("onto",),
                help={
                    "fields": Help(
                        "Where texts of a kind are, as for `scan`; repeat it. Default: as BANK was built.", "KIND=PATH"
                    ),
                },
            ),
        ]
        | None
    ) = None
    threshold: Annotated[Cosine, Help("Texts with this cosine or more are near.")] = 0.95
    max_shared: Annotated[Natural, Help("Exit code 1 if more texts are shared, exactly or nearly, over all splits.")] | None = (
        None
    )
    against: Annotated[str, Help("The split that the others are compared to. Default: the first.", "NAME")] | None = None

    def check(self) -> None:
        if self.scan is None:
            if self.against is not None:
                raise InputError("--against names a source. Of two banks the second is audited against the first.")
            return
        if len(self.splits) < 2:
            raise InputError(f"--source: an audit needs two splits, such as train and eval; found {', '.join(self.splits)}.")
        if self.against is not None and self.against not in self.splits:
            raise InputError(f"--against {self.against}: no such source; there are {', '.join(self.splits)}.")

    @property
    def splits(self) -> list[str]:
        """The names of the splits among the sources, in order."""
        return list(dict.fromkeys(name for name, _ in self.scan.sources)) if self.scan else []


def inputs_of(config: AuditConfig, bank: str | Path, other: str | Path | None) -> list[Named]:
    """What an audit reads, source files one by one."""
    sources = find_sources(config.scan.sources) if config.scan else []
    return [("BANK", bank), ("OTHER", other), *(place for source in sources for place in source.places)]


@explains("bank", "read")
@checked
def audit(config: AuditConfig, bank: str | Path, other: str | Path | None = None, *, progress: Progress = SILENT) -> Audit:
    """Audit the splits of `config.scan`, whose texts the feature bank `bank` has; or, without them, `other` against `bank`.

    A text counts once in a split, with the kind that it has there first. Where `config.scan` does not say where texts are, they are
    read from where the bank's own were. A split without a text makes the audit fail (`Audit.failed`).

    Raises InputError (sources that are not usable, or have texts that the bank lacks), ContractError (two banks of different
    encoders: `field` says in what), and what `open_bank` raises.
    """
    if (config.scan is None) == (other is None):
        raise InputError("Give either --source twice or more with one bank, or two banks and no --source.")
    if config.scan is None:
        against, *audited = _bank_splits(open_bank(bank, kind=FeatureBank), open_bank(str(other), kind=FeatureBank))
    else:
        opened = open_bank(bank, kind=FeatureBank)
        splits = _source_splits(opened, _with_fields(config.scan, opened, progress), config.splits, progress)
        against = splits.pop(config.against or config.splits[0])
        audited = list(splits.values())
    best = _Best()
    rows: list[AuditRow] = []
    with progress.phase("audit", sum(len(split.rows) for split in audited)) as phase:
        for split in audited:
            counts = np.zeros((3, len(split.names) + 1), np.int64)
            for block in split.blocks():
                counts += _look_at(split, against, block, config.threshold, best)
                phase.advance(len(block))
            rows += [
                AuditRow(name, split.name, against.name, *counts[:, place].tolist())
                for place, name in enumerate(split.names, 1)
                if counts[0, place]
            ]
    return Audit(
        threshold=config.threshold,
        max_shared=config.max_shared,
        rows=rows,
        examples=best.examples(against),
        texts={split.name: len(split.rows) for split in (against, *audited)},
    )


def _with_fields(scan: ScanConfig, bank: FeatureBank, progress: Progress) -> ScanConfig:
    """`scan`, with the field paths that the bank's texts were read from where it names none."""
    recorded = bank.manifest.get("fields")
    if scan.fields is not None or not recorded:
        return scan
    config = replace(scan, fields=tuple((kind, path) for kind, path in recorded))
    if config.paths != DEFAULT_FIELDS:
        progress.message(
            f"texts are read as those of {bank.folder} were: {', '.join(f'{kind}={path}' for kind, path in config.paths)}"
        )
    return config


@dataclass(frozen=True)
class _Split:
    """Rows of a bank: `kinds` [N] uint8 is 1 + the place in `names` of a row's kind, 0 for a row that is not of the split."""

    name: str
    bank: FeatureBank
    names: Sequence[str]
    kinds: npt.NDArray[np.uint8]

    @property
    def rows(self) -> Rows:
        return np.flatnonzero(self.kinds)

    def blocks(self) -> Iterator[Rows]:
        rows = self.rows
        return (rows[start : start + QUERY_ROWS] for start in range(0, len(rows), QUERY_ROWS))

    def text(self, row: int) -> str:
        return str(self.bank.slice(row, row + 1, ["text"])["text"][0].as_py())


def _bank_splits(bank: FeatureBank, other: FeatureBank) -> list[_Split]:
    """Two whole banks as splits. ContractError where their vectors cannot be compared."""
    facts, others = (
        {**one.manifest.recipe["model"], **{name: one.manifest.get(name) for name in TEXT_FIELDS}} for one in (bank, other)
    )
    for name in {**facts, **others}:
        if name != "dtype" and facts.get(name) != others.get(name):
            raise ContractError(
                f"{other.folder}: {name} is {others.get(name)!r}, that of {bank.folder} is {facts.get(name)!r}: their vectors "
                "cannot be compared. Give two banks of one encoder.",
                name,
            )
    splits = []
    for one in (bank, other):
        names = list(one.manifest.kinds or ())
        kinds = np.zeros(len(one), np.uint8)
        for place, name in enumerate(names, 1):
            kinds[one.of_kind(name)] = place
        splits.append(_Split(str(one.folder), one, names, kinds))
    return splits


def _source_splits(bank: FeatureBank, scan: ScanConfig, names: Sequence[str], progress: Progress) -> dict[str, _Split]:
    """The rows of each source's texts. InputError where the bank lacks a text."""
    splits = {name: _Split(name, bank, scan.rules.kinds, np.zeros(len(bank), np.uint8)) for name in names}
    missing = dict.fromkeys(names, 0)
    for block in read_keys(scan, progress=progress):
        rows = bank.find(block.digests)
        missing[block.source] += int((rows < 0).sum())
        kinds = splits[block.source].kinds
        new = np.flatnonzero((rows >= 0) & (kinds[rows] == ABSENT))[::-1]
        kinds[rows[new]] = block.kinds[new] + 1  # of a text that is twice in the block the first, which is assigned last
    if lacking := {name: count for name, count in missing.items() if count}:
        raise InputError(
            f"{bank.folder}: lacks texts of {', '.join(f'{name} ({count:,})' for name, count in lacking.items())}, counted as "
            "often as they come. Give the bank that was built from these sources, with the --field that it was built with."
        )
    return splits


def _look_at(split: _Split, against: _Split, rows: Rows, threshold: float, best: _Best) -> npt.NDArray[np.int64]:
    """Texts, exact and near of some rows of `split`, by kind: [3, kinds + 1]."""
    found = against.bank.find(split.bank.digests.take(rows))
    exact = (found >= 0) & (against.kinds[found] != ABSENT)
    near = np.zeros(len(rows), np.bool_)
    rest = np.flatnonzero(~exact)
    among = against.kinds != ABSENT
    if len(rest) and among.any():
        vectors = split.bank.take(rows[rest]).astype(np.float32)
        nearest_rows, cosines = nearest(against.bank, vectors, 1, among=among)
        alike = np.flatnonzero(cosines[:, 0] >= threshold)
        near[rest[alike]] = True
        best.add(split, rows[rest[alike]], nearest_rows[alike, 0], cosines[alike, 0])
    kinds = split.kinds[rows]
    return np.stack([np.bincount(kinds[which], minlength=len(split.names) + 1) for which in (kinds > 0, exact, near)])


@dataclass
class _Best:
    """The most similar near pairs so far: (cosine, −the order in which they came, split, row, nearest row) in a heap."""

    _heap: list[tuple[float, int, _Split, int, int]] = field(default_factory=list)
    _count: int = 0

    def add(self, split: _Split, rows: Rows, nearest_rows: Rows, cosines: npt.NDArray[np.float32]) -> None:
        for row, other, cosine in zip(rows.tolist(), nearest_rows.tolist(), cosines.tolist(), strict=True):
            self._count += 1
            entry = (cosine, -self._count, split, row, other)
            if len(self._heap) < EXAMPLES:
                heapq.heappush(self._heap, entry)
            elif entry > self._heap[0]:
                heapq.heapreplace(self._heap, entry)

    def examples(self, against: _Split) -> list[AuditExample]:
        return [
            AuditExample(
                text=split.text(row),
                nearest=against.text(other),
                cosine=cosine,
                kind=split.names[int(split.kinds[row]) - 1],
                source=split.name,
                against=against.name,
            )
            for cosine, _, split, row, other in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)
        ]
