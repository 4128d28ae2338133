"""`report`: open what is given, look at it, and write the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from arrowbank.bank.cards import describe_bank
from arrowbank.bank.checks import Check, attempt
from arrowbank.bank.files import human_bytes, publish_alone, refuse_address
from arrowbank.bank.kinds import kind_of, resolve
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.manifest import MANIFEST
from arrowbank.bank.places import require_separate
from arrowbank.bank.reader import Bank
from arrowbank.bank.refusals import explained, explains
from arrowbank.drawing.markup import Markup, join, plural, tag
from arrowbank.errors import InputError
from arrowbank.features.audit import read_audit
from arrowbank.progress import SILENT, Progress
from arrowbank.report.build_log import one_step, pace_plots
from arrowbank.report.healed import tell_healing
from arrowbank.report.integrity import Verification, audit_section, files_of, prove
from arrowbank.report.page import Page
from arrowbank.report.section import Section, Story, code_block, facts_list, paragraph, plots
from arrowbank.report.subject import Subject, open_subject
from arrowbank.secrets import hide
from arrowbank.settings import Help, Place, Range, Settings, checked, refuse_unread

POINTS, NEIGHBOURS = 2000, 8
MAX_POINTS, MAX_NEIGHBOURS = 5000, 20  # so that a page stays one that opens on a phone
HEALING = "healed draft"


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Settings):
    """What a page has."""

    verify: Annotated[bool, Help("Verify every byte first, not only sizes and row counts.")] = False
    points: (
        Annotated[int, Range(0, MAX_POINTS), Help("Vectors on the map of a feature bank; 0 for no map.", default="2000")] | None
    ) = None
    neighbours: (
        Annotated[int, Range(1, MAX_NEIGHBOURS), Help("Nearest neighbors of each, exact and of the whole bank.", default="8")]
        | None
    ) = None
    audit: Annotated[Place, Help("Show what `audit --out` found, too.", "FILE")] | None = None

    def check(self) -> None:
        if self.points == 0:
            refuse_unread("--points 0", self, ["neighbours"])


@explains("out")
@checked
def write_report(
    config: ReportConfig, banks: Sequence[str | Path], out: str | Path, *, progress: Progress = SILENT
) -> list[Check]:
    """Write the page about `banks` to the file `out`; the checks that were run.

    `banks` is one folder or address: a committed bank of any kind, a folder that `build` made, or a healing's OUT.heal; or several
    IN2 arms.
    The page is written also where a check fails, and says so; a part that cannot be made from what the bank holds is a failed check
    with the file. The same banks and options give the same bytes.

    Raises InputError (no bank, banks that do not go together, an audit that is none), IncompleteBank (not committed),
    CorruptBank (files missing or cut), DiskFull.
    """
    out = Path(out)
    refuse_address(out)
    if out.is_dir() or out.suffix not in (".html", ".htm"):
        what = "a folder" if out.is_dir() else "no name of a page"
        raise InputError(f"{out}: {what}, expected a file that ends in .html. Give one such as report.html.")
    audit = None if config.audit is None else read_audit(config.audit)
    points = POINTS if config.points is None else config.points
    neighbours = config.neighbours or NEIGHBOURS
    subject = replace(open_subject(banks, progress), points=points, neighbours=neighbours, progress=progress)
    require_separate(
        [], [("--audit", config.audit), *(("BANK", bank) for bank in subject.banks.values())], files=[("--out", out)]
    )
    if subject.bank(FeatureBank) is None:
        refuse_unread("a page without a feature bank", config, ["points", "neighbours"])
    proofs = {name: prove(bank, full=config.verify, progress=progress) for name, bank in subject.banks.items()}
    damaged = any(proof.damaged for proof in proofs.values())
    story = _damaged(subject) if damaged else _told(subject, config)
    sections, checks = [*story.sections], [*story.checks]
    if audit is not None:
        sections.append(audit_section(audit))
    if subject.banks:
        sections += _common(subject, proofs, checks)
    name = (
        ", ".join(subject.banks) if len(subject.banks) > 1 and kind_of(subject.kind).together else subject.folder.resolve().name
    )
    page = Page(
        title=name,
        what=(kind_of(subject.kind).words or subject.kind) if subject.banks else HEALING,
        subtitle=_subtitle(subject, checks),
        tiles=[*story.tiles, *_tiles(subject, proofs)],
        sections=sections,
        data=story.data,
    )
    with explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    publish_alone(out, hide(page.html().decode()).encode())
    return [*checks, *(check for proof in proofs.values() for check in proof.checks)]


def _told(subject: Subject, config: ReportConfig) -> Story:
    """`_story`; where the bank holds something that cannot be shown, a page that says so, with a failed check."""
    # an OUT.heal is read here for the first time: what is wrong with it is an error, as opening a bank is
    if not subject.banks:
        return _story(subject, config)
    with attempt(subject.folder) as failures:
        return _story(subject, config)
    return Story([], [_not_shown(failures[0])], checks=[Check("page", False, failures[0])])


def _not_shown(why: str) -> Section:
    return Section("Not shown", [paragraph(why)])


def _story(subject: Subject, config: ReportConfig) -> Story:
    """What this kind of bank has to say for itself."""
    if not subject.banks:
        return tell_healing(subject.folder, full=config.verify)
    named = kind_of(subject.kind).story
    if not named:  # what every bank has is shown
        return Story([(f"{len(subject.main):,}", "rows")], [])
    story: Story = resolve(named)(subject)
    return story


def _damaged(subject: Subject) -> Story:
    """Of a bank with a damaged file nothing is shown that would have to be read from it."""
    words = "A file is not the one that was committed, so nothing of what it holds is shown. It is named below."
    return Story([(f"{len(subject.main):,}", "rows")], [Section("Damaged", [paragraph(words)])])


def _subtitle(subject: Subject, checks: list[Check]) -> str:
    if not subject.banks:
        return "A draft trained to agree with its trunk again: what a server would keep of it, before and after."
    with attempt(subject.main.folder / MANIFEST) as failures:
        return _titles(subject)
    checks.append(Check("page", False, failures[0]))
    return ""


def _titles(subject: Subject) -> str:
    first, *more = dict.fromkeys(describe_bank(bank.manifest).title for bank in subject.banks.values())
    return ", ".join([first, *(name[0].lower() + name[1:] if name[1:2].islower() else name for name in more)]) + "."


def _tiles(subject: Subject, proofs: dict[str, Verification]) -> list[tuple[str, str]]:
    if not subject.banks:
        return []
    size = sum(entry.bytes for bank in subject.banks.values() for entry in bank.manifest.files)
    shards = sum(len(bank.shard_names) for bank in subject.banks.values())
    good = all(proof.ok for proof in proofs.values())
    return [(human_bytes(size), f"in {plural(shards, 'shard')}"), ("✓" if good else "✗", next(iter(proofs.values())).words)]


def _common(subject: Subject, proofs: dict[str, Verification], checks: list[Check]) -> list[Section]:
    """What every bank's page has: facts, how to open it, files and checks, how fast it was built. What cannot be described is
    added to `checks`."""
    single = len(subject.banks) == 1
    facts, opening, paces, left = [], [], [], []
    for name, bank in subject.banks.items():
        with attempt(bank.folder / MANIFEST) as failures:
            facts.append(_facts(name, bank, single=single))
            opening += [] if single else [tag("h3", None, name)]
            opening.append(code_block(describe_bank(bank.manifest).snippet))
        facts += [paragraph(failure) for failure in failures]
        checks += [Check("page", False, failure) for failure in failures]
        drawn = pace_plots(name, bank, kind_of(bank.kind).unit)
        paces += drawn
        left += [] if drawn else [paragraph(one_step(bank) if single else f"{name}: {one_step(bank)}")]
    how = (
        "Every byte was read and proved against the manifest (--verify)."
        if next(iter(proofs.values())).full
        else "Quick checks: sizes and row counts of all files. The verb verify, or --verify here, reads every byte."
    )
    files = [files_of(name, subject.banks[name], proof) for name, proof in proofs.items()]
    return [
        Section("What it is", facts, short="Facts"),
        Section("How to open it", opening, short="Open it"),
        Section("Files and checks", files, how, "Files"),
        Section("How fast it was built", [*([plots(*paces)] if paces else []), *left], short="Build"),
    ]


def _facts(name: str, bank: Bank, *, single: bool) -> Markup:
    described = describe_bank(bank.manifest)
    facts: dict[str, Any] = {
        **described.facts,
        "format": bank.manifest.format,
        "plan digest": tag("code", None, bank.plan_digest),
    }
    return join([None if single else tag("h3", None, name), facts_list(facts)])
