"""The stage `heal`: a draft is trained to agree with its own trunk again, measured before and after, and written back.

Beside the folder that is written lies OUT.heal: the training's state until it is done, then its trace, its picture and the report. What
counts is the file that will be served, so every file that is written is opened again and measured as it is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arrowbank.bank.files import publish_bytes, publish_json, refuse_address, sweep_temporaries
from arrowbank.bank.locks import FolderLock
from arrowbank.bank.manifest import JOURNAL, differing_fields, plan_digest, readable_json
from arrowbank.bank.manifest import STATE as COMMIT
from arrowbank.bank.names import own_folder, refuse_links
from arrowbank.bank.places import beside, in_words, is_bare_journal, require_separate, visible
from arrowbank.bank.refusals import explained, explains
from arrowbank.bank.trunk import TrunkBank, open_trunk
from arrowbank.drawing.frame import svg_file
from arrowbank.errors import ContractError, InputError, PlanMismatch
from arrowbank.models import ModelConfig, describe, local_model, model_fingerprint, resolve_model
from arrowbank.mtp.batches import Windows
from arrowbank.mtp.draft import Draft, Trunk, trunk_of
from arrowbank.mtp.drafts_bank import WHEN, dump_drafts, dump_writer
from arrowbank.mtp.heal_config import HealConfig
from arrowbank.mtp.load import init_from_last_block, load_draft
from arrowbank.mtp.measure import Measured, check_conventions, measure
from arrowbank.mtp.save import check_target, is_of_plan, remove_of_plan, save_draft
from arrowbank.mtp.trace import TRACE, TRACE_PLOT, read_trace, trace_plots
from arrowbank.mtp.training import FED, STATE, Training, plan_of
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

PLAN, REPORT = "plan.json", "report.json"
OWN_NAMES = {PLAN, REPORT, STATE, FED, TRACE, TRACE_PLOT, JOURNAL}
KIND = "heal"


@dataclass(frozen=True)
class Healed:
    """What came of it, measured on the held-out windows in the training's own precision."""

    before: Measured
    after: Measured
    steps: int
    best_step: int


@explains("out")
@checked
def heal_draft(
    config: HealConfig,
    trunk_bank: str | Path,
    out: str | Path,
    *,
    dump: str | Path | None = None,
    restart: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Heal the draft of `config.model` on `trunk_bank` and write the checkpoint with it to `out`; the report.

    Where training brought nothing, the report's `failed` says why (see `shortcomings`); the files are written all the same, with
    the best weights that were found. Goes on where an earlier run of the same plan stopped. `dump`: also write the draft's rows on
    the held-out windows, before and after, as a bank there.

    Raises InputError (options, a bank with too few windows, no draft, conventions that contradict the draft), ContractError (a bank
    of another model), BadVector (training that does not stay finite), PlanMismatch, BankLocked, CorruptBank, DiskFull.
    """
    out, work = Path(out), beside(out, ".heal")
    inputs = [
        ("--trunk", trunk_bank),
        ("--model", local_model(config.model.model)),
        ("--draft-from", local_model(config.draft_from)),
    ]
    copies = [(f"--also {codec}=", target) for codec, target in config.also]
    require_separate([("--out", out), ("--out", work), *copies, ("--dump", dump)], inputs)
    if restart:
        for copy in _earlier_copies(work):
            require_separate([("--restart deletes the copy", copy)], inputs)
    bank = _bank_of(config, trunk_bank)
    rows, held_out = _rows(config, bank)
    folder = resolve_model(config.model.model, code=config.model.trust_remote_code)
    targets = [(config.codec, out), *((codec, Path(target)) for codec, target in config.also)]
    recipe = _recipe(config, bank, folder)
    plan = plan_digest(KIND, recipe)
    _refuse_other_work(work, recipe, restart=restart)
    rows_bank = None if dump is None else dump_writer(dump, recipe, restart=restart)
    if rows_bank is not None:
        rows_bank.check()  # before anything takes long
    if (done := _finished(work, plan, dump, restart=restart)) is not None:
        progress.message(f"{out}: already complete, nothing to do")
        if readable_json(work / PLAN) is None:  # a power cut took it
            publish_json(work / PLAN, {"digest": plan, "recipe": recipe})
        return done
    replaceable = {_found_plan(work)}  # copies that a run of the work that lies there has written
    if (work / PLAN).exists() and readable_json(work / PLAN) is None:
        replaceable.add(plan)
    for _, target in targets:
        if not is_of_plan(target, replaceable):
            check_target(folder, target)
    subject = _subject(config, bank, held_out, folder, progress)
    with _locked(work):
        if restart:
            _throw_away(work, [target for _, target in targets], replaceable)
        publish_json(work / PLAN, {"digest": plan, "recipe": recipe})
        healed = _heal(config, subject, rows, work, plan, progress)
        report = _write(config, subject, healed, folder, targets, plan, progress)
        if rows_bank is not None:
            weights = dict(zip(WHEN, (subject.first, subject.draft.weights()), strict=True))
            dump_drafts(rows_bank, subject.draft, subject.windows, held_out, weights, config)
        _finish(work, report, traced=bool(config.epochs))
        return report


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """The right to write in `work`, which is made where it is not there."""
    with explained(work):
        journal = own_folder(work, "journal")
        refuse_links(work.resolve())  # what is written in place (what later steps are fed) would go elsewhere
    lock = FolderLock(journal)
    sweep_temporaries(work)  # of killed runs
    try:
        yield
    finally:
        (journal / "lock").unlink(missing_ok=True)
        lock.release()


@dataclass(frozen=True)
class _Subject:
    """What is healed, on what, and how it is counted. `first` are the weights that it begins with."""

    draft: Draft
    windows: Windows
    first: Mapping[str, torch.Tensor]
    conventions: Mapping[str, float]
    count: Callable[[Draft], Measured]


def _subject(config: HealConfig, bank: TrunkBank, held_out: Sequence[int], folder: Path, progress: Progress) -> _Subject:
    """Load trunk and draft, and see that the draft is fed what it was trained on."""
    draft = _first_draft(config, _load_trunk(config.model), folder)
    for note in draft.origin.notes:
        progress.message(note)
    windows = Windows(bank, draft)
    conventions = {} if config.init else check_conventions(draft, windows, held_out, chain=config.chain, batch=config.batch)
    count = partial(
        measure,
        windows=windows,
        rows=held_out,
        chain=config.chain,
        stride=config.stride,
        batch=config.batch,
        in_order=config.in_order,
    )
    return _Subject(draft, windows, draft.weights(), conventions, count)


def _heal(config: HealConfig, subject: _Subject, rows: Sequence[int], work: Path, plan: str, progress: Progress) -> Healed:
    """Train, if there is anything to train; the draft then has its best weights."""
    before, steps, best_step = subject.count(subject.draft), 0, 0
    if config.epochs:
        held_out = subject.windows.bank.held_out_rows.tolist()
        training = Training(config, subject.draft, subject.windows, rows, held_out, work, plan)
        training.run(progress)
        steps, best_step = training.at.step, training.at.best_step
    return Healed(before, subject.count(subject.draft), steps, best_step)


def _write(
    config: HealConfig,
    subject: _Subject,
    healed: Healed,
    folder: Path,
    targets: Sequence[tuple[str, Path]],
    plan: str,
    progress: Progress,
) -> dict[str, Any]:
    """Write the checkpoints, open each again and measure it as it is stored; the report."""
    provenance = _provenance(config, subject.windows.bank, healed) | {"plan": plan}
    files = []
    for codec, target in targets if config.epochs or config.codec != "keep" else targets[1:]:
        remove_of_plan(target, {plan})  # of a run that was killed before its report
        saved = save_draft(subject.draft, folder, target, codec=codec, provenance=provenance)
        stored = load_draft(subject.draft.trunk, target).feed(hidden=subject.draft.hidden, recycle=subject.draft.recycle)
        accepted = subject.count(stored)
        progress.message(f"{target}: {codec}, {accepted.whole.score:.3f} drafts a round as stored")
        files.append(
            {
                "folder": str(target),
                "codec": codec,
                "draft_bytes": saved.draft_bytes,
                "sha256": dict(saved.sha256),
                "accepted": accepted.record(),
            }
        )
    failed = shortcomings(healed) if config.epochs else []
    return {**provenance, "conventions": dict(subject.conventions), "files": files, "failed": failed}


def shortcomings(healed: Healed) -> list[str]:
    """Why a training has not healed its draft, in words: nothing was counted, the control, which must miss, is accepted as often
    as the draft, or the draft is accepted no more than before. Empty where it has."""
    before, after, control = healed.before.whole, healed.after.whole, healed.after.control
    if not after.rows[0]:
        return ["acceptance: no row of the held-out windows was counted, so nothing was measured"]
    said = []
    if control.score >= after.score:
        said.append(f"control: {control.score:.3f} drafts a round with targets a row late, {after.score:.3f} in their place")
    if not after.score > before.score:
        said.append(f"acceptance: {after.score:.3f} drafts a round, {before.score:.3f} before: training brought nothing")
    return said


def _bank_of(config: HealConfig, folder: str | Path) -> TrunkBank:
    """The bank, which must be of this very model and reach as far as the chain."""
    bank = open_trunk(folder)
    fingerprint = describe(config.model).fingerprint
    if bank.manifest["model_fingerprint"] != fingerprint:
        raise ContractError(
            f"{folder}: a trunk bank of {bank.manifest['model_path']} with weights {str(bank.manifest['model_fingerprint'])[:12]}, "
            f"expected those of {config.model.model}, {fingerprint[:12]}. Build the bank of this model: arrowbank trunk build.",
            "model_fingerprint",
        )
    return bank


def _rows(config: HealConfig, bank: TrunkBank) -> tuple[Sequence[int], Sequence[int]]:
    """The rows to train on (none with epochs 0), and those to measure on."""
    held_out = bank.held_out_rows.tolist()
    if not held_out:
        raise InputError(f"{bank.folder}: no window is held out to measure on. Build a bank of at least ten windows.")
    return (bank.training_rows(config.batch).tolist() if config.epochs else []), held_out


def _recipe(config: HealConfig, bank: TrunkBank, folder: Path) -> dict[str, Any]:
    """Everything that decides what is written."""
    first = None
    if config.draft_from is not None:
        first = model_fingerprint(resolve_model(config.draft_from), code=False)
    return {
        **config.recipe(),
        "trunk_bank": bank.content_digest,
        "model": bank.manifest["model_fingerprint"],
        "dtype": config.model.dtype,
        "draft_from": first,
        "hidden": config.last_hidden_norm,
        "recycle": config.recycle,
        "codec": config.codec,
        "also": [list(one) for one in config.also],
        "in_order": config.in_order,
    }


def _finished(work: Path, plan: str, dump: str | Path | None, *, restart: bool) -> dict[str, Any] | None:
    """The report of a run of this very plan whose files are all there; None where there is something to do."""
    if restart or not (work / REPORT).exists() or _found_plan(work) != plan:
        return None
    found: dict[str, Any] | None = readable_json(work / REPORT)
    if found is None:
        return None
    report = {"failed": [], **found}
    if not all(Path(one["folder"]).exists() for one in report["files"]):
        return None
    if dump is not None and not (Path(dump) / COMMIT).exists():
        raise InputError(
            f"{dump}: the healing is complete, and kept no rows of its drafts. Give --restart to do it again with --dump."
        )
    _drop_state(work)
    return report


def _drop_state(work: Path) -> None:
    for name in (STATE, FED):
        (work / name).unlink(missing_ok=True)


def _found_plan(work: Path) -> str | None:
    """The digest of the plan whose work lies there."""
    found, report = readable_json(work / PLAN), readable_json(work / REPORT)
    if _is_plan(found):
        return str(found["digest"])
    return plan_of(work) or (report.get("plan") if isinstance(report, dict) else None)


def _is_plan(found: object) -> bool:
    return isinstance(found, dict) and isinstance(found.get("digest"), str) and isinstance(found.get("recipe"), dict)


def _refuse_other_work(work: Path, recipe: Mapping[str, Any], *, restart: bool) -> None:
    """InputError where the folder `work` holds anything but the work of a healing, PlanMismatch where it is that of another one."""
    refuse_address(work)
    if work.exists() and not work.is_dir():
        raise InputError(f"{work}: is a file, expected the folder of a healing. Give another --out.")
    names, found, plan = visible(work), readable_json(work / PLAN), plan_digest(KIND, recipe)
    damaged = found is None and (work / PLAN).exists()  # as a power cut leaves it
    strange = names - (OWN_NAMES if damaged else {JOURNAL}) or not (damaged or is_bare_journal(work))
    if strange and not _is_plan(found):
        raise InputError(
            f"{work}: holds {in_words(work)}, expected the work of a healing or nothing. Give another --out; this folder was left as "
            "it is."
        )
    if restart or not names or _found_plan(work) == plan:
        return
    if not _is_plan(found):
        if _found_plan(work) is None and not {STATE, REPORT} & names:
            return
        raise PlanMismatch(
            f"{work / PLAN}: is damaged, and what else is in the folder is not of this healing. Give --restart to throw that work "
            "away, or another --out to keep it."
        )
    fields = differing_fields(found["recipe"], json.loads(json.dumps(recipe)))
    lines = "".join(f"\n  {name}: found {old!r}, wanted {new!r}" for name, (old, new) in fields.items())
    raise PlanMismatch(
        f"{work}: holds the work of another healing; these fields differ:{lines}\n"
        "Give --restart to throw that work away, or another --out to keep it.",
        fields,
    )


def _earlier_copies(work: Path) -> list[Path]:
    """Where the healing in `work` has written copies of the checkpoint, as its report says: those beside it. A report that came from
    elsewhere could name any folder."""
    report = readable_json(work / REPORT)
    files = report.get("files") if isinstance(report, dict) else None
    named = [one.get("folder") for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    return [work.with_name(name) for folder in named if isinstance(folder, str) and (name := Path(folder).name)]


def _throw_away(work: Path, targets: Sequence[Path], plans: Collection[str | None]) -> None:
    """Remove an earlier healing's state, and the copies that it has written: those whose own record says so."""
    for target in (*targets, *_earlier_copies(work)):
        remove_of_plan(target, plans)
    for name in (STATE, TRACE, FED, REPORT, PLAN):  # the plan last: what is left is never taken for another's
        (work / name).unlink(missing_ok=True)


def _load_trunk(config: ModelConfig) -> Trunk:
    from arrowbank.models.device import resolve_device
    from arrowbank.models.loading import load_reader

    outer = replace(config, backbone="outer")
    device = torch.device(resolve_device(outer)[0])
    model: Any = load_reader(outer, describe(outer), device, lambda model: model)
    return trunk_of(model)


def _first_draft(config: HealConfig, trunk: Trunk, folder: Path) -> Draft:
    """The draft to begin with, in float32: steps of 2e-5 are lost in bfloat16."""
    if config.init:
        draft = init_from_last_block(trunk, dtype=torch.float32)
    else:
        source = folder if config.draft_from is None else resolve_model(config.draft_from)
        draft = load_draft(trunk, source, dtype=torch.float32)
    return draft.feed(hidden=config.last_hidden_norm, recycle=config.recycle)


def _provenance(config: HealConfig, bank: TrunkBank, healed: Healed) -> dict[str, Any]:
    """What is put into the metadata of every file that is written."""
    counts, how = bank.manifest["counts"], config.recipe()
    return {
        "made_by": "arrowbank heal",
        "data": bank.manifest["sets"],
        "tokens": counts["tokens"],
        "windows": counts["windows"],
        "k": bank.topk,
        **{name: how[name] for name in ("chain", "stride", "epochs", "lr", "batch", "hard", "refresh")},
        "draft_from": config.draft_from,
        "steps": healed.steps,
        "best_step": healed.best_step,
        "before": healed.before.record(),
        "after": healed.after.record(),
    }


def _finish(work: Path, report: Mapping[str, Any], *, traced: bool) -> None:
    if traced:
        publish_bytes(work / TRACE_PLOT, svg_file(*trace_plots(read_trace(work / TRACE))))
    publish_json(work / REPORT, report)
    _drop_state(work)


def table(report: Mapping[str, Any]) -> list[str]:
    """Before and after by data set and chain step, and each written file, for a person."""
    steps = "".join(f"{f'step {step}':>9}" for step in range(1, len(report["before"]["rates"]) + 1))
    lines = [f"{'rate of acceptance':23}{steps}{'drafts a round':>17}"]

    def row(name: str, counts: Mapping[str, Any]) -> str:
        rates = "".join("        –" if rate is None else f"{rate:9.3f}" for rate in counts["rates"])
        return f"{name:23}{rates}{counts['score']:17.3f}"

    for name in ("", *report["before"]["sets"]):
        for when in ("before", "after"):
            found = report[when]["sets"][name] if name else report[when]
            lines.append(row(f"{name or 'all'}, {when}", found))
    lines.append(row("control (must miss)", report["after"]["control"]))
    if "in_order" in report["after"]:
        lines += [row(f"in order, {when}", report[when]["in_order"]) for when in ("before", "after")]
    for one in report["files"]:
        lines.append(
            row(f"{one['codec']} as stored", one["accepted"]) + f"   {one['folder']} ({one['draft_bytes']:,} bytes of draft)"
        )
    return lines
