"""The stage `heal`: a draft is trained to agree with its own trunk again, measured before and after, and written back.

What counts is the file that will be served, so every file that is written is opened again and measured as it is stored. On request the
draft's rows become a bank: for held-out windows, before and after, what each step was fed and what it said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from arrowbank.bank import BankWriter
from arrowbank.bank.columns import fixed_list_column, number_column
from arrowbank.bank.kinds.trunk_bank import TrunkBank, lists_of, row_offsets
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.open import open_bank
from arrowbank.bank.places import Named, beside, require_separate
from arrowbank.bank.refusals import explains
from arrowbank.engine.stage import PARTED, Estimate, RunOptions, require_budget
from arrowbank.errors import ContractError, InputError
from arrowbank.models import ModelConfig, describe, local_model, model_fingerprint, resolve_model
from arrowbank.mtp.batches import DraftWindows, WindowBatch
from arrowbank.mtp.draft import Draft, Trunk, step_tokens, trunk_of
from arrowbank.mtp.draft_files import check_target, init_from_last_block, load_draft, remove_of_plan, save_draft
from arrowbank.mtp.heal_config import HealConfig
from arrowbank.mtp.heal_folder import HealFolder
from arrowbank.mtp.heal_sizes import KEPT, estimate_healing
from arrowbank.mtp.loss import top_tokens
from arrowbank.mtp.measure import Measured, check_conventions, measure
from arrowbank.mtp.trainer import Training
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked, refuse_unread

KIND = "drafts"
WHEN = ("before", "after")
ONE_PROCESS = "heal, which trains one draft in one process"


def dump_writer(folder: str | Path, recipe: Mapping[str, Any], *, restart: bool) -> BankWriter:
    """What writes the bank of the healing `recipe`."""
    return BankWriter(folder, kind=KIND, recipe={"heal": dict(recipe), "when": list(WHEN)}, restart=restart)


def dump_drafts(
    bank: BankWriter,
    draft: Draft,
    windows: DraftWindows,
    rows: Sequence[int],
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    config: HealConfig,
) -> Manifest:
    """Write the bank: a row for each of `weights` (those of WHEN) and windows `rows`; the draft has its last weights again afterwards."""
    with bank:
        if bank.committed:
            return bank.manifest
        number = 0
        for when, named in weights.items():
            draft.set_weights(named)
            for part in windows.batches(rows, config.batch):
                bank.write_shard(number, _batch(draft, windows, part, when, config.chain))
                number += 1
        facts = {"windows": len(rows), "chain": config.chain, "kept": KEPT, "hidden_size": windows.bank.hidden_size}
        return bank.commit(rows=len(rows) * len(weights), manifest={"text_count": len(rows) * len(weights), **facts})


@torch.no_grad()
def _batch(draft: Draft, windows: DraftWindows, part: WindowBatch, when: str, steps: int) -> pa.RecordBatch:
    names, fill = windows.bank.set_names, windows.bank.manifest.pad_id
    lengths = part.lengths.astype(np.int32)
    offsets = row_offsets(lengths)
    columns: dict[str, pa.Array] = {
        "when": pa.array([when] * len(lengths), pa.string()),
        "set": pa.array([names[row] for row in part.rows], pa.string()),
        "row": number_column(np.array(part.rows, np.int32)),
        "length": number_column(lengths),
    }
    fed = part.hidden
    for step in range(1, steps + 1):
        out = draft(step_tokens(part.input_ids, step, fill), fed)
        ids, probs = top_tokens(out.post.flatten(0, 1), draft.head_weight, KEPT, bias_V=draft.head_bias)
        real = part.real(0).flatten().cpu()
        columns[f"hidden_{step}"] = lists_of(offsets, fixed_list_column(fed.flatten(0, 1).cpu()[real].half().numpy()))
        columns[f"topk_ids_{step}"] = lists_of(offsets, fixed_list_column(ids.cpu()[real].numpy().astype(np.int32)))
        columns[f"topk_probs_{step}"] = lists_of(offsets, fixed_list_column(probs.cpu()[real].numpy()))
        fed = out.side(draft.recycle)
    return pa.record_batch(columns)


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
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Heal the draft of `config.model` on `trunk_bank` and write the checkpoint with it to `out`; the report.

    Where training brought nothing, the report's `failed` says why (see `shortcomings`); the files are written all the same, with
    the best weights that were found. Goes on where an earlier run of the same plan stopped. `dump`: also write the draft's rows on
    the held-out windows, before and after, as a bank there. Of `options` it takes `budget_gb` and `restart`, and refuses the others.

    Raises InputError (options, a bank with too few windows, no draft, conventions that contradict the draft), ContractError (a bank
    of another model), BadVector (training that does not stay finite), PlanMismatch, BankLocked, CorruptBank, DiskFull.
    """
    options, out = options or RunOptions(), Path(out)
    restart, inputs = options.restart, _inputs(config, trunk_bank)
    refuse_unread(ONE_PROCESS, options, [*PARTED, "workers"])
    _require_separate(config, out, dump, inputs)
    bank = _bank_of(config, trunk_bank)
    rows, held_out = _rows(config, bank)
    folder = resolve_model(config.model.model, code=config.model.trust_remote_code)
    targets = _targets(config, out)
    if options.budget_bytes is not None:
        found = _estimate(config, bank, rows, held_out, targets, dump, options)
        require_budget(out, found.total_bytes, options.budget_bytes, "the healing", "Give fewer --also copies, no --dump, or")
    work = HealFolder(out, _recipe(config, bank, folder), copies=[target for _, target in targets], restart=restart)
    if restart:
        for copy in work.earlier_copies():
            require_separate([("--restart deletes the copy", copy)], inputs)
    work.check()
    rows_bank = None if dump is None else dump_writer(dump, work.recipe, restart=restart)
    if rows_bank is not None:
        rows_bank.check()  # before anything takes long
    if (done := work.finished(dump)) is not None:
        with work:  # a run that was killed at its very end has left it
            work.drop_state()
        progress.message(f"{out}: already complete, nothing to do")
        return done
    for _, target in targets:
        if not work.may_replace(target):
            check_target(folder, target)
    subject = _subject(config, bank, held_out, folder, progress)
    with work:
        healed = _heal(config, subject, rows, work, progress)
        report = _write(config, subject, healed, folder, targets, work.plan, progress)
        if rows_bank is not None:
            weights = dict(zip(WHEN, (subject.first, subject.draft.weights()), strict=True))
            dump_drafts(rows_bank, subject.draft, subject.windows, held_out, weights, config)
        work.finish(report, traced=bool(config.epochs))
        return report


@checked
def estimate_heal(
    config: HealConfig,
    trunk_bank: str | Path,
    out: str | Path,
    *,
    dump: str | Path | None = None,
    options: RunOptions | None = None,
) -> Estimate:
    """What `heal_draft` with the same arguments takes at its end, when the copies of the checkpoint and the training's state are there
    at once: rows and tokens are those that it trains on. Nothing is written, and no weight is read but for the model's fingerprint.

    Raises what `heal_draft` raises for options, the bank, and a model without a draft.
    """
    options, out = options or RunOptions(), Path(out)
    refuse_unread(ONE_PROCESS, options, [*PARTED, "workers"])
    _require_separate(config, out, dump, _inputs(config, trunk_bank))
    bank = _bank_of(config, trunk_bank)
    rows, held_out = _rows(config, bank)
    return _estimate(config, bank, rows, held_out, _targets(config, out), dump, options)


def _estimate(
    config: HealConfig,
    bank: TrunkBank,
    rows: Sequence[int],
    held_out: Sequence[int],
    targets: Sequence[tuple[str, Path]],
    dump: str | Path | None,
    options: RunOptions,
) -> Estimate:
    dumped = 0 if dump is None else len(WHEN) * int(bank.lengths[held_out].sum())
    return estimate_healing(config, bank, rows, targets, dumped=dumped, budget_bytes=options.budget_bytes)


def _inputs(config: HealConfig, trunk_bank: str | Path) -> list[Named]:
    return [
        ("--trunk", trunk_bank),
        ("--model", local_model(config.model.model)),
        ("--draft-from", local_model(config.draft_from)),
    ]


def _targets(config: HealConfig, out: Path) -> list[tuple[str, Path]]:
    """The copies of the checkpoint: codec and folder."""
    return [(config.codec, out), *((codec, Path(target)) for codec, target in config.also)]


def _require_separate(config: HealConfig, out: Path, dump: str | Path | None, inputs: Sequence[Named]) -> None:
    copies = [(f"--also {codec}=", target) for codec, target in config.also]
    require_separate([("--out", out), ("--out", beside(out, ".heal")), *copies, ("--dump", dump)], inputs)


@dataclass(frozen=True)
class _HealSubject:
    """What is healed, on what, and how it is counted. `first` are the weights that it begins with."""

    draft: Draft
    windows: DraftWindows
    first: Mapping[str, torch.Tensor]
    conventions: Mapping[str, float]
    count: Callable[[Draft], Measured]


def _subject(config: HealConfig, bank: TrunkBank, held_out: Sequence[int], folder: Path, progress: Progress) -> _HealSubject:
    """Load trunk and draft, and see that the draft is fed what it was trained on."""
    draft = _first_draft(config, _load_trunk(config.model), folder)
    for note in draft.origin.notes:
        progress.message(note)
    windows = DraftWindows(bank, draft)
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
    return _HealSubject(draft, windows, draft.weights(), conventions, count)


def _heal(config: HealConfig, subject: _HealSubject, rows: Sequence[int], work: HealFolder, progress: Progress) -> Healed:
    """Train, if there is anything to train; the draft then has its best weights."""
    before, steps, best_step = subject.count(subject.draft), 0, 0
    if config.epochs:
        held_out = subject.windows.bank.held_out_rows.tolist()
        training = Training(config, subject.draft, subject.windows, rows, held_out, work.folder, work.plan)
        training.run(progress)
        steps, best_step = training.at.step, training.at.best_step
    return Healed(before, subject.count(subject.draft), steps, best_step)


def _write(
    config: HealConfig,
    subject: _HealSubject,
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
    bank = open_bank(folder, kind=TrunkBank)
    fingerprint = describe(config.model).fingerprint
    if bank.manifest.model_fingerprint != fingerprint:
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
        "model": bank.manifest.model_fingerprint,
        "dtype": config.model.dtype,
        "draft_from": first,
        "hidden": config.last_hidden_norm,
        "recycle": config.recycle,
        "codec": config.codec,
        "also": [list(one) for one in config.also],
        "in_order": config.in_order,
    }


def _load_trunk(config: ModelConfig) -> Trunk:
    from arrowbank.models.device import resolve_device
    from arrowbank.models.load import load_reader

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
    counts, how = bank.manifest.counts, config.recipe()
    return {
        "made_by": "arrowbank heal",
        "data": bank.manifest.json["sets"],
        "tokens": counts.tokens,
        "windows": counts.windows,
        "k": bank.topk,
        **{name: how[name] for name in ("chain", "stride", "epochs", "lr", "batch", "hard", "refresh")},
        "draft_from": config.draft_from,
        "steps": healed.steps,
        "best_step": healed.best_step,
        "before": healed.before.record(),
        "after": healed.after.record(),
    }


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
