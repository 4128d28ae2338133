"""`merge`: banks of one kind as one bank of all their rows, each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arrowbank.bank import Bank, BankWriter, open_bank
from arrowbank.bank.kinds import every_kind, kind_of
from arrowbank.bank.manifest import Manifest, differing_fields
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.combine.overlap import Overlap
from arrowbank.combine.rows import has_mirror, stated, write_pieces
from arrowbank.combine.rules import CombineRules, counted_fields, rules_of, sum_counts
from arrowbank.errors import ContractError, InputError
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

METHOD = 1  # raise it when the same banks would give other rows
FIRST = ("model_path", "tokenizer")  # may be spelled in another way where the fingerprints agree: the first bank's word counts


@explains("out")
@checked
def merge(banks: Sequence[str | Path], out: str | Path, *, restart: bool = False, progress: Progress = SILENT) -> Manifest:
    """Merge committed banks of texts, features or targets into the bank `out`; its manifest. Goes on where it stopped.

    A text that several feature banks have keeps the vector of the first one; how many there are and how far their vectors lie apart is
    in the manifest, under `merged`. Samples of target banks are told apart by their names.

    Raises InputError (banks of another kind; a sample that is there twice with other contents), ContractError (banks made by another
    model or in another way: the first field that differs), PlanMismatch, BankLocked, CorruptBank, DiskFull.
    """
    parts, rules = _open(banks)
    require_separate([("--out", out)], [("BANK", part) for part in parts])
    first = parts[0]
    _check_agreement(parts, rules)
    mirror = all(has_mirror(part) for part in parts)
    recipe = {
        "merge_method": METHOD,
        "merge": [{"content": part.content_digest, "rows": len(part)} for part in parts],
        **rules.recipe(first),
    }
    recipe |= {"mirror": mirror} if "mirror" in recipe else {}
    with BankWriter(out, kind=first.kind, recipe=recipe, restart=restart) as bank:
        if bank.committed:
            progress.message(f"{bank.folder}: already complete, nothing to do")
            return bank.manifest
        for part in parts:
            part.check_hashes(rules.files)
        with progress.phase("compare", sum(map(len, parts[1:])), unit="rows") as phase:
            overlap = rules.find(parts, phase.advance)
        progress.message(_told(overlap, parts))
        with progress.phase("merge", overlap.rows, unit="rows") as phase:
            write_pieces(bank, overlap.pieces, phase, beside=rules.bytes_beside(overlap.rows, first, mirror=mirror))
        rules.write_beside(bank, mirror=mirror, progress=progress)
        return bank.commit(rows=overlap.rows, manifest=_fields(parts, rules, overlap, bank))


def _open(banks: Sequence[str | Path]) -> tuple[list[Bank], CombineRules]:
    if len(banks) < 2:
        raise InputError(f"merge: {len(banks)} banks are given, at least two are needed.")
    parts = [open_bank(bank) for bank in banks]
    for part in parts:
        if not rules_of(part.kind).merges:
            *most, last = [name for name in every_kind() if rules_of(name).merges]
            instead = kind_of(part.kind).merge_instead
            raise InputError(
                f"{part.folder}: a bank of {part.kind}; only {', '.join(most)} and {last} can be merged. {instead}"
            )
        if part.kind != parts[0].kind:
            raise InputError(
                f"{part.folder}: a bank of {part.kind}, {parts[0].folder} is one of {parts[0].kind}. Merge banks of one kind."
            )
    return parts, rules_of(parts[0].kind)


def _check_agreement(parts: Sequence[Bank], rules: CombineRules) -> None:
    """ContractError for the first field in which a bank is not like the first one."""
    first = parts[0]
    for part in parts[1:]:
        here, there = (_agreed(bank, rules) for bank in (first, part))
        for name, (found, wanted) in differing_fields(there, here).items():
            raise ContractError(
                f"{part.folder}: {name} is {found!r}, in {first.folder} it is {wanted!r}. Rows of such banks do not belong "
                "together: make one of them again with the options of the other.",
                name,
            )


def _agreed(bank: Bank, rules: CombineRules) -> dict[str, Any]:
    decided = {name: value for name, value in rules.recipe(bank).items() if name != "mirror"}
    return {**{name: bank.manifest.get(name) for name in rules.agree}, **decided}


def _told(overlap: Overlap, parts: Sequence[Bank]) -> str:
    new = ", ".join(f"{count:,} of {len(part):,} from {part.folder}" for count, part in zip(overlap.new, parts, strict=True))
    told = f"{overlap.rows:,} rows: {new}; {overlap.shared:,} were there already"
    if overlap.largest_difference is not None and overlap.shared:
        told += f", their two vectors at most {overlap.largest_difference:.2g} apart"
    return told


def _fields(parts: Sequence[Bank], rules: CombineRules, overlap: Overlap, bank: BankWriter) -> dict[str, Any]:
    """What the manifest of a merged bank says: what all parts say alike, what is told by the rows, and what is the sum of all."""
    every = [stated(part) for part in parts]
    alike = {name: value for name, value in every[0].items() if all(other.get(name) == value for other in every[1:])}
    alike |= {name: every[0][name] for name in FIRST if name in every[0]}
    left_out = ("selected", "codec_error", "source_duplicates", *rules.of_files)
    alike = {name: value for name, value in alike.items() if name not in left_out}
    before = every[0] | {name: _union(every, name) for name in ("kinds", "source_rows") if name in every[0]}
    before |= {"nonfinite": sum_counts([one["nonfinite"] for one in every])} if "nonfinite" in before else {}
    found = counted_fields(rules, bank, before)
    counts = {"counts": rules.merged_counts(every, found, overlap.shared)} if all("counts" in one for one in every) else {}
    history: dict[str, Any] = {
        "parts": [
            {"plan_digest": part.plan_digest, "rows": len(part), "new": new}
            for part, new in zip(parts, overlap.new, strict=True)
        ],
        "shared": overlap.shared,
        **({} if overlap.largest_difference is None else {"largest_difference": overlap.largest_difference}),
    }
    return {**rules.merged(every, alike, overlap), **found, **counts, "merged": history, **rules.ends(parts, overlap.new)}


def _union(every: Sequence[dict[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(key for one in every for key in one.get(name, ())))
