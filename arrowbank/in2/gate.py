"""The stage `in2 verify`: arms are read back and held against the draws, their sources, their manifests and each other.

Each check has its own line. What cannot be opened is a failed check; arms of different options are an error, since nothing
could be said of them together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.checks import SHOWN, Check, found_wrong
from arrowbank.bank.columns import values_of
from arrowbank.bank.files import sha256_of
from arrowbank.errors import ArrowbankError, InputError
from arrowbank.in2.blocks import Arm, Block
from arrowbank.in2.checks import Finding, cut, filler, findings, records, repeated_keys
from arrowbank.in2.config import SHARED
from arrowbank.in2.fillers import Filler
from arrowbank.in2.keycount import KeyCounter
from arrowbank.in2.rawshards import Counts, fields, raw_names
from arrowbank.progress import SILENT, Phase, Progress

FILLER, PLANTED = ("filler", "filler_start"), ("sites", "spans")


def verify_in2(
    folders: Sequence[str | Path],
    *,
    fillers: Sequence[str | Path] | None = None,
    unique_keys: bool = False,
    progress: Progress = SILENT,
) -> list[Check]:
    """All checks of the arms in `folders`, and of the arms against each other.

    `fillers` are the sources, where they no longer lie where the arms say. `unique_keys`: a key that its example or its filler
    holds once more is an error (always for an arm that was built so).

    Raises InputError for arms that were built with different options; it names the first option.
    """
    if not folders:
        raise InputError("give at least one arm's folder.")
    checks: list[Check] = []
    seen: list[_Seen] = []
    opened: list[Arm] = []
    for folder in folders:
        try:
            opened.append(Arm(folder))
        except ArrowbankError as error:
            checks.append(Check("files", False, str(error)))
    refuse_other_options(opened)
    total = sum(len(arm.bank) for arm in opened)
    with progress.phase("verify", total, unit="examples") as phase:
        for arm in opened:
            found, one = _verify_arm(arm, fillers, unique_keys, phase)
            checks += [_named(check, arm) if len(folders) > 1 else check for check in found]
            seen.append(one)
    if len(seen) > 1:
        checks += _across(seen)
    return checks


def refuse_other_options(arms: Sequence[Arm]) -> None:
    """InputError where two arms do not share an option that decides more than the distance."""
    for arm in arms[1:]:
        for name, option in SHARED.items():
            mine, other = arm.recipe[name], arms[0].recipe[name]
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


def _verify_arm(arm: Arm, given: Sequence[str | Path] | None, unique_keys: bool, phase: Phase) -> tuple[list[Check], _Seen]:
    checks = [_files(arm), _hashes(arm)]
    sources: list[Filler] | str
    try:
        sources = arm.fillers(given)
    except ArrowbankError as error:
        sources = f"the source cannot be read: {error} Give where it is now with --filler."
    found = findings(arm.config.mirror)
    source = Finding("filler", "equal to its source outside planted spans", "differs from its source in")
    lines = Finding("records", "the manifest's records are those of the rows", "other records than rows in")
    cuts = {step: _Cut(step) for step in (arm.config.length, arm.config.length + 1)}
    counter, twice, stray = KeyCounter(arm.config.vocab, arm.config.key_len), 0, 0
    counts, seen = Counts(), _Seen(arm, np.zeros(0, np.int64))
    recorded = arm.records() if arm.config.mirror else iter(())
    for block in arm.blocks():
        counts.add(block.batch, arm.config)
        found[0].look(block)
        if found[0].wrong:  # what is not there cannot be looked at
            break
        for one in found[1:]:
            one.look(block)
        if not isinstance(sources, str):
            source.add(filler(block, sources))
        if arm.config.mirror:
            lines.add(records(block, list(_records(recorded, len(block.examples)))))
        for one_cut in cuts.values():
            one_cut.add(block)
        more = repeated_keys(block, counter)
        twice, stray = twice + more[0], stray + more[1]
        seen.add(block)
        phase.advance(len(block.examples))
    seen.histogram = counts.histogram
    checks += [_check(one) for one in found]
    checks.append(Check("filler", False, sources) if isinstance(sources, str) else _check(source))
    checks.append(_counts(arm, counts))
    if arm.config.mirror:
        checks += [_check(lines), _cuts(arm, list(cuts.values()))]
    strict = unique_keys or arm.config.unique_keys
    said = f"{twice} keys twice in their example, {stray} times one in the filler by chance"
    checks.append(Check("keys", not (strict and twice + stray), said))
    return checks, seen


def _records(lines: Iterator[str], count: int) -> Iterator[str]:
    return islice(lines, count)


def _named(check: Check, arm: Arm) -> Check:
    return Check(f"{arm.config.arm}: {check.name}", check.ok, check.detail)


def _check(found: Finding) -> Check:
    return found_wrong(found.name, [str(example) for example in found.wrong], found.good, f"{found.bad} example")


def _files(arm: Arm) -> Check:
    """Sizes, token counts, and that no file lies beside them which a loader would take for a shard."""
    config = arm.config
    wrong = []
    if len(arm.bank) != config.examples:
        wrong.append(f"{len(arm.bank)} examples, the options say {config.examples}")
    for tokens, name, examples in zip(arm.raw or (), raw_names(config), config.shard_examples, strict=False):
        if len(tokens) != len(examples) * config.length:
            wrong.append(f"{name} holds {len(tokens):,} tokens, expected {len(examples) * config.length:,}")
    listed = {entry["name"] for entry in arm.bank.manifest["files"]}
    strays = {path.name for path in arm.folder.iterdir() if path.suffix in (".bin", ".arrow")} - listed
    wrong += [f"{name} is not the bank's" for name in sorted(strays)]
    size = sum(entry["bytes"] for entry in arm.bank.manifest["files"])
    good = f"{config.examples:,} examples, {config.examples * config.length:,} tokens, {size:,} bytes"
    return Check("files", not wrong, "; ".join(wrong[:SHOWN]) if wrong else good)


def _hashes(arm: Arm) -> Check:
    files = arm.bank.manifest["files"]
    wrong = [entry["name"] for entry in files if sha256_of(arm.folder / entry["name"]) != entry["sha256"]]
    detail = f"edited after the build: {', '.join(wrong[:SHOWN])}" if wrong else f"sha256 of {len(files)} files"
    return Check("hashes", not wrong, detail)


def _counts(arm: Arm, counts: Counts) -> Check:
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


@dataclass
class _Cut:
    """A loader's windows of `step` tokens."""

    step: int
    whole: int = 0
    wrong: list[int] = field(default_factory=list)

    def add(self, block: Block) -> None:
        whole, wrong = cut(block, self.step)
        self.whole += whole
        self.wrong += wrong.tolist()


def _cuts(arm: Arm, cuts: Sequence[_Cut]) -> Check:
    promised = arm.bank.manifest.get("survivors", {})
    wrong = []
    for stride, one in zip(("T", "T+1"), cuts, strict=True):
        if one.wrong:
            wrong.append(f"in windows of {one.step} tokens a triple is not whole in example {one.wrong[0]}")
        if one.whole != promised.get(stride):
            wrong.append(f"windows of {one.step} tokens hold {one.whole:,} triples, the manifest says {promised.get(stride)}")
    good = ", ".join(f"{one.whole:,} triples whole in windows of {one.step:,} tokens" for one in cuts)
    return Check("windows", not wrong, "; ".join(wrong) if wrong else good)


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
