"""The stage `in2 verify`: arms are read back and held against the draws, their sources, their manifests and each other.

Each check has its own line. What cannot be opened is a failed check; arms of different options are an error, since nothing
could be said of them together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.checks import SHOWN, Check, attempt, run_check
from arrowbank.bank.columns import values_of
from arrowbank.bank.files import sha256_of
from arrowbank.bank.manifest import MANIFEST
from arrowbank.errors import ArrowbankError, InputError
from arrowbank.formats.tokens import is_token_export
from arrowbank.in2.arm_checks import ExportedArm, Finding, LoaderWindows, filler, findings, lists, records, repeated_keys
from arrowbank.in2.arm_config import SHARED
from arrowbank.in2.blocks import Arm, Block
from arrowbank.in2.fillers import Filler
from arrowbank.in2.placement import KeyCounter
from arrowbank.in2.raw_shards import ArmCounts, fields, raw_names
from arrowbank.progress import SILENT, Phase, Progress
from arrowbank.settings import checked

FILLER, PLANTED = ("filler", "filler_start"), ("sites", "spans")


@checked
def verify_in2(
    folders: Sequence[str | Path],
    *,
    fillers: Sequence[str | Path] | None = None,
    unique_keys: bool = False,
    progress: Progress = SILENT,
) -> list[Check]:
    """All checks of the arms in `folders`, of the arms against each other, and of exports of theirs that are among `folders`.

    `fillers` are the sources, where they no longer lie where the arms say. `unique_keys`: a key that its example or its filler
    holds once more is an error (always for an arm that was built so).

    Raises InputError for arms that were built with different options; it names the first option.
    """
    if not folders:
        raise InputError("give at least one arm's folder.")
    checks: list[Check] = []
    arms: list[Arm] = []
    exports: list[ExportedArm] = []
    for folder in folders:
        with attempt(Path(folder) / MANIFEST) as failures:
            if is_token_export(Path(folder)):
                exports.append(ExportedArm(folder))
            else:
                arms.append(Arm(folder))
        checks += [Check("files", False, failure) for failure in failures]
    refuse_other_options(arms)
    seen: list[_Seen] = []
    with progress.phase("verify", sum(len(arm.bank) for arm in arms), unit="examples") as phase:
        for arm in arms:
            found = []
            with attempt(arm.folder) as failures:
                proof = _ArmReader(arm, fillers, [one for one in exports if one.source == arm.bank.plan_digest])
                proof.read(phase)
                found = proof.checks(unique_keys=unique_keys)
                seen.append(proof.seen)
            found += [Check("files", False, failure) for failure in failures]
            checks += (
                [Check(f"{arm.config.arm}: {one.name}", one.ok, one.detail) for one in found] if len(folders) > 1 else found
            )
    known = {arm.bank.plan_digest for arm in arms}
    for one in exports:
        lonely = f"{one.export.folder}: the arm that it was made from is not among the folders. Give it, too."
        checks += (
            run_check(one.name, one.export.folder, one.checks) if one.source in known else [Check(one.name, False, lonely)]
        )
    return checks + (run_check("arms", seen[0].arm.folder, lambda: _across(seen)) if len(seen) > 1 else [])


def refuse_other_options(arms: Sequence[Arm]) -> None:
    """InputError where two arms do not share an option that decides more than the distance."""
    for arm in arms[1:]:
        for name, option in SHARED.items():
            mine, other = arm.recipe.get(name), arms[0].recipe.get(name)
            if mine != other:
                values = "" if name == "fillers" else f" is {mine}, {arms[0].folder} has {other}"
                raise InputError(
                    f"{arm.folder}: {option}{values or ' names other content than for ' + str(arms[0].folder)}. Arms are compared "
                    "under the same options only: build them again, or verify them one by one."
                )


@dataclass
class _Seen:
    """What is kept of an arm to hold it against others."""

    arm: Arm
    histogram: npt.NDArray[np.int64]
    _hashes: dict[str, Any] = field(default_factory=lambda: {name: hashlib.sha256() for name in (*FILLER, *PLANTED)})

    def add(self, block: Block) -> None:
        for name in FILLER:
            self._hashes[name].update(np.ascontiguousarray(values_of(block.batch.column(name))))
        self._hashes["sites"].update(block.starts("probe_start"))
        self._hashes["spans"].update(block.spans("probe_start"))

    def digest(self, names: Sequence[str]) -> bytes:
        return b"".join(self._hashes[name].digest() for name in names)


class _ArmReader:
    """One arm, read block by block."""

    def __init__(self, arm: Arm, given: Sequence[str | Path] | None, exports: Sequence[ExportedArm]) -> None:
        self.arm, self.seen = arm, _Seen(arm, np.zeros(0, np.int64))
        self._given, self._exports = given, exports
        self._lists = Finding("triples", "as many as the options say", "not as many triples or decoys as drawn in", lists)
        self._found = findings(arm.config.mirror)
        self._filler = Finding("filler", "equal to its source outside planted spans", "differs from its source in")
        self._records = Finding("records", "the manifest's records are those of the rows", "other records than rows in")
        self._windows = LoaderWindows.of_arm(arm.config, arm.raw or [], arm.bank.manifest.survivors or {})
        self._keys, self._twice, self._stray = KeyCounter(arm.config.vocab, arm.config.key_len), 0, 0
        self._counts = ArmCounts()
        self._no_source = ""
        self._failures: list[str] = []

    def read(self, phase: Phase) -> None:
        """Look at all blocks; at none behind one whose rows are not what they should be at all."""
        fillers: list[Filler] = []
        with attempt(self.arm.folder / MANIFEST) as failures:
            fillers = self.arm.fillers(self._given)
        for failure in failures:
            self._no_source = f"the source cannot be read: {failure} Give where it is now with --filler."
        recorded = self.arm.records() if self.arm.config.mirror else iter(())
        with attempt(self.arm.folder) as self._failures:
            for block in self.arm.blocks():
                if not self._look(block, fillers, recorded):
                    break
                phase.advance(len(block.examples))
        self.seen.histogram = self._counts.histogram

    def _look(self, block: Block, fillers: Sequence[Filler], recorded: Iterator[str]) -> bool:
        """Look at one block; whether the next one is worth a look."""
        self._counts.add(block.batch, self.arm.config)
        self._lists.look(block)
        if self._lists.wrong or self._lists.failures:
            return False
        for one in self._found:
            one.look(block)
        if fillers:
            self._filler.try_to(partial(filler, fillers=fillers), block)
        if self.arm.config.mirror:
            self._records.try_to(lambda block: records(block, list(islice(recorded, len(block.examples)))), block)
            self._windows.add(block)
        for export in self._exports:
            export.add(block)
        twice, stray = repeated_keys(block, self._keys)
        self._twice, self._stray = self._twice + twice, self._stray + stray
        self.seen.add(block)
        return True

    def checks(self, *, unique_keys: bool) -> list[Check]:
        """What there is to say of the arm."""
        arm, manifest = self.arm, self.arm.folder / MANIFEST
        checks = run_check("files", manifest, lambda: _files(arm)) + run_check("hashes", manifest, lambda: _hashes(arm))
        checks += [one.result() for one in (self._lists, *self._found)]
        checks += [Check("rows", False, failure) for failure in self._failures]
        checks.append(Check("filler", False, self._no_source) if self._no_source else self._filler.result())
        checks += run_check("counts", manifest, lambda: _counts(arm, self._counts))
        if arm.config.mirror:
            checks += [self._records.result(), *run_check("windows", manifest, lambda: self._windows.check("windows"))]
        strict = unique_keys or arm.config.unique_keys
        said = f"{self._twice} keys twice in their example, {self._stray} times one in the filler by chance"
        return [*checks, Check("keys", not (strict and self._twice + self._stray), said)]


def _files(arm: Arm) -> Check:
    """Sizes, token counts, and that no file lies beside them which a loader would take for a shard."""
    config = arm.config
    wrong = []
    if len(arm.bank) != config.examples:
        wrong.append(f"{len(arm.bank)} examples, the options say {config.examples}")
    for tokens, name, examples in zip(arm.raw or (), raw_names(config), config.shard_examples, strict=False):
        if len(tokens) != len(examples) * config.length:
            wrong.append(f"{name} holds {len(tokens):,} tokens, expected {len(examples) * config.length:,}")
    listed = {entry.name for entry in arm.bank.manifest.files}
    strays = {path.name for path in arm.folder.iterdir() if path.suffix in (".bin", ".arrow")} - listed
    wrong += [f"{name} is not the bank's" for name in sorted(strays)]
    size = sum(entry.bytes for entry in arm.bank.manifest.files)
    good = f"{config.examples:,} examples, {config.examples * config.length:,} tokens, {size:,} bytes"
    return Check("files", not wrong, "; ".join(wrong[:SHOWN]) if wrong else good)


def _hashes(arm: Arm) -> Check:
    files = arm.bank.manifest.files
    wrong = [entry.name for entry in files if sha256_of(arm.folder / entry.name) != entry.sha256]
    detail = f"edited after the build: {', '.join(wrong[:SHOWN])}" if wrong else f"sha256 of {len(files)} files"
    return Check("hashes", not wrong, detail)


def _counts(arm: Arm, counts: ArmCounts) -> Check:
    """The manifests' counts against a recount of the rows."""
    recount: dict[str, Any] = {**fields(arm.config, counts), "triples": counts.triples, "survivors": counts.survivors}
    wrong = []
    for name, value in recount.items():
        if name != "answer_start_hist" and arm.bank.manifest.get(name) != value:
            wrong.append(f"manifest.json says {name} {arm.bank.manifest.get(name)}, counted {value}")
    if arm.config.mirror:
        try:
            said = arm.fields()
        except ArrowbankError as error:
            return Check("counts", False, str(error))
        wrong += [
            f"the raw shards' manifest says {name} {str(said.get(name))[:60]}, counted {str(value)[:60]}"
            for name, value in recount.items()
            if said.get(name) != value
        ]
    good = f"{counts.triples:,} triples, {counts.decoys_placed:,} decoys, {counts.answer_tokens:,} answer tokens"
    return Check("counts", not wrong, "; ".join(wrong[:SHOWN]) if wrong else good)


def _across(seen: Sequence[_Seen]) -> list[Check]:
    """Arms against each other: the same filler in all; the same sites, keys and values in all that plant."""
    planting = [one for one in seen if one.arm.config.arm != "a"]
    return [
        _same("arms: filler", [(one.arm, one.digest(FILLER)) for one in seen], "starts of filler"),
        _same("arms: keys and values", [(one.arm, one.digest(PLANTED)) for one in planting], "sites, keys and values"),
        _same("arms: histogram", [(one.arm, one.histogram.tobytes()) for one in planting], "histograms of answer_start"),
    ]


def _same(name: str, kept: Sequence[tuple[Arm, bytes]], what: str) -> Check:
    differing = [str(arm.folder) for arm, digest in kept[1:] if digest != kept[0][1]]
    if differing:
        return Check(name, False, f"{what} differ between {kept[0][0].folder} and {', '.join(differing)}")
    return Check(name, True, f"{what} equal in {len(kept)} arms" if len(kept) > 1 else "one arm plants: nothing to compare")
