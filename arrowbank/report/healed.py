"""Pages of a healing: how many drafts a server would accept, before and after, by data set and chain step, and the way there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.files import human_bytes, sha256_of
from arrowbank.bank.manifest import read_json
from arrowbank.bank.names import checked_place
from arrowbank.drawing.frame import Plot
from arrowbank.drawing.markup import Markup, number, tag
from arrowbank.drawing.plots import Series, lines
from arrowbank.errors import CorruptBank
from arrowbank.mtp.trace import TRACE, percent_of, read_trace, trace_plots
from arrowbank.report.integrity import verdict
from arrowbank.report.section import Section, Story, code_block, facts_list, plots, table
from arrowbank.report.subject import HEAL_REPORT

OPTIONS = (
    "chain",
    "stride",
    "epochs",
    "lr",
    "batch",
    "hard",
    "refresh",
    "draft_from",
    "steps",
    "best_step",
    "k",
    "windows",
    "tokens",
)
OPENING = (
    "from transformers import AutoModelForCausalLM\n\n"
    'trunk = AutoModelForCausalLM.from_pretrained("path/to/this/checkpoint")  # a server reads the draft beside it'
)


def tell_healing(folder: Path, *, full: bool) -> Story:
    """The story of an OUT.heal. `full`: the checkpoints' files are hashed, else only looked for. CorruptBank where it is none."""
    try:
        return _tell(folder.absolute(), full=full)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CorruptBank(
            f"{folder}: its {HEAL_REPORT} or {TRACE} is not what `arrowbank heal` writes ({type(error).__name__}: {error}). Give the "
            "OUT.heal of a healing, or restore it."
        ) from None


def _tell(folder: Path, *, full: bool) -> Story:
    report: dict[str, Any] = read_json(folder / HEAL_REPORT)
    before, after = report["before"], report["after"]
    tiles = [
        (number(before["score"]), "drafts a round before"),
        (number(after["score"]), "after"),
        (number(after["control"]["score"]), "control, must miss"),
        (f"{report['best_step']:,} of {report['steps']:,}", "steps to the best"),
    ]
    drawn = [_rates("All windows", before, after, after["control"])]
    drawn += [_rates(f"Data set {name}", before["sets"][name], after["sets"][name], None) for name in after["sets"]]
    lead = "The share of rows that got to a chain step whose draft the trunk accepts; a draft counts only where all before it were right."
    sections = [Section("Acceptance", [plots(*drawn), _scores(report)], lead, "Acceptance")]
    if trace := read_trace(folder / TRACE):
        sections.append(Section("The way there", [plots(*trace_plots(trace))], short="Trace"))
    found = [_checkpoint(one, folder.parent, full=full) for one in report["files"]]
    facts = {name.replace("_", " "): report[name] for name in OPTIONS if report.get(name) is not None}
    facts |= {"not passed": "; ".join(report["failed"])} if report.get("failed") else {}
    facts["plan digest"] = tag("code", None, report["plan"])
    how = "hashed again, just now" if full else "looked for, not hashed (--verify does that)"
    sections += [
        Section("What it is", [facts_list(facts)], short="Facts"),
        Section("How to open it", [code_block(OPENING)], short="Open it"),
        Section(
            "Files", [_files(report, found)], f"Each was opened again and measured as it is stored; they were {how}.", "Files"
        ),
    ]
    return Story(tiles, sections, checks=found)


def _checkpoint(one: Mapping[str, Any], beside: Path, *, full: bool) -> Check:
    """Whether a checkpoint's files are there, where they were written or beside the report, and (`full`) are what was written."""
    written = Path(one["folder"])
    place = written if written.exists() else beside / written.name
    for name in one["sha256"]:
        checked_place(place, name, HEAL_REPORT)
    missing = [name for name in one["sha256"] if not (place / name).is_file()]
    if missing:
        return Check(written.name, False, f"not there: {', '.join(missing)}")
    if not full:
        return Check(written.name, True, "there")
    wrong = [name for name, sha256 in one["sha256"].items() if sha256_of(place / name) != sha256]
    return found_wrong(written.name, wrong, "sha256", "bytes differ in")


def _rates(title: str, before: Mapping[str, Any], after: Mapping[str, Any], control: Mapping[str, Any] | None) -> Plot:
    given = {"before": before, "after": after, **({} if control is None else {"control": control})}
    steps = [float(step) for step in range(1, len(after["rates"]) + 1)]
    series = [Series(name, steps, [percent_of(rate) for rate in one["rates"]]) for name, one in given.items()]
    said = ", ".join(f"{number(one['score'])} {name}" for name, one in given.items())
    return lines(
        title,
        series,
        x_label="chain step",
        y_label="% accepted",
        summary=f"Drafts a round: {said}.",
        ceiling=100.0,
        whole_x=True,
    )


def _scores(report: Mapping[str, Any]) -> Markup:
    """Every count, in numbers."""
    steps = len(report["after"]["rates"])
    rows: list[tuple[object, ...]] = []

    def add(name: str, counts: Mapping[str, Any]) -> None:
        rates = [
            "–" if rate is None else f"{rate:.3f} ({rows:,})"
            for rate, rows in zip(counts["rates"], counts["rows"], strict=True)
        ]
        rows.append((name, *rates, counts["score"]))

    for when in ("before", "after"):
        add(f"all, {when}", report[when])
    for name in report["after"]["sets"]:
        for when in ("before", "after"):
            add(f"{name}, {when}", report[when]["sets"][name])
    add("control, before", report["before"]["control"])
    add("control, after", report["after"]["control"])
    if "in_order" in report["after"]:
        for when in ("before", "after"):
            add(f"in order, {when}", report[when]["in_order"])
    columns = ("rate (rows that got there)", *(f"step {step}" for step in range(1, steps + 1)), "drafts a round")
    return table(columns, rows, "acceptance by chain step")


def _files(report: Mapping[str, Any], found: Sequence[Check]) -> Markup:
    rows = [
        (
            tag("code", None, check.name),
            one["codec"],
            human_bytes(one["draft_bytes"]),
            one["accepted"]["score"],
            tag("code", None, ", ".join(f"{name} {sha256[:12]}" for name, sha256 in one["sha256"].items())),
            verdict(check.ok, check.detail),
        )
        for one, check in zip(report["files"], found, strict=True)
    ]
    columns = ("checkpoint", "codec", "draft", "drafts a round as stored", "sha256", "integrity")
    return table(columns, rows, "files that were written")
