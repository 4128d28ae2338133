"""What `merge` and `select` have to know of the rows of a kind. A kind names its rules by their dotted name (`Kind.rules`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from arrowbank.bank import Bank, BankWriter
from arrowbank.bank.columns import list_values, nested_lists, values_of
from arrowbank.bank.floats import nonfinite
from arrowbank.bank.keys import KEY_FILE
from arrowbank.bank.kinds import kind_of, resolve
from arrowbank.bank.kinds.targets_bank import LABELS, facts_of
from arrowbank.bank.manifest import joint_sha256
from arrowbank.bank.mirror import finished_batches, mirror_fields, write_keys, write_mirror
from arrowbank.combine.overlap import Overlap, new_samples, new_texts
from arrowbank.combine.rows import ManifestFields, has_mirror, value_counts
from arrowbank.progress import Progress


class CombineRules:
    """Rules of rows that are texts, or stand for texts.

    merges, selects   whether banks of the kind can be merged, and rows of one selected
    agree         fields of the manifest that must be equal in all banks that are merged
    of_all_rows   fields that are true of all rows of a bank only: a selection does not have them
    files         files beside the shards that are read
    of_files      fields of the manifest that name files beside the shards: those of the new bank are its own
    """

    merges: bool = True
    selects: bool = True
    agree: tuple[str, ...] = ()
    of_all_rows: tuple[str, ...] = ("counts", "generations", "merged", "source_duplicates")
    files: tuple[str, ...] = ()
    of_files: tuple[str, ...] = ()

    def find(self, banks: Sequence[Bank], report: Callable[[int], None]) -> Overlap:
        """Which rows of each bank the banks before it have not."""
        return new_texts(banks, report)

    def recipe(self, bank: Bank) -> ManifestFields:
        """What decided the rows of a bank, beside the rows that it was made from: the recipe of a new bank of them has it."""
        return {}

    def counted(self, bank: BankWriter, before: ManifestFields) -> ManifestFields:
        """The fields that the finished shards decide, beside counts of kinds and sources."""
        return {}

    def merged(self, every: Sequence[ManifestFields], alike: ManifestFields, overlap: Overlap) -> ManifestFields:
        """Of the merged bank what its parts (`every`: their fields; `alike`: those that all have) say of where their rows come from:
        files of all parts, and for each split one hash over those that the parts state, unless one does not (a selection)."""
        sources = [entry for one in every for entry in one.get("sources", ())]
        unsaid = {name for one in every for entry in one.get("sources", ()) if (name := f"{entry['name']}_sha256") not in one}
        names = {name: None for one in every for name in one if name.endswith("_sha256") and name not in unsaid}
        hashes = {name: list(dict.fromkeys(one[name] for one in every if name in one)) for name in names}
        return {
            **{name: value for name, value in alike.items() if not name.endswith("_sha256")},
            **({"sources": [entry for at, entry in enumerate(sources) if entry not in sources[:at]]} if sources else {}),
            **{name: joint_sha256(found) for name, found in hashes.items()},
        }

    def merged_counts(self, every: Sequence[ManifestFields], found: ManifestFields, shared: int) -> ManifestFields:
        """What was counted while the parts were made, added up."""
        counts = sum_counts([one["counts"] for one in every])
        return counts | {"duplicates": counts.get("duplicates", 0) + shared}

    def ends(self, parts: Sequence[Bank], new: Sequence[int]) -> ManifestFields:
        """Where the rows of each part end."""
        ends = [*(parts[0].manifest.generations or [len(parts[0])])]
        return {"generations": ends + list(accumulate(new[1:], initial=new[0]))[1:]}

    def selected(self, kept: ManifestFields, found: ManifestFields, rows: int, of: int) -> ManifestFields:
        """The fields of a selection of `rows` rows `of` so many: `kept` ones of the source, and those `found` in its rows."""
        kept = {name: value for name, value in kept.items() if not name.endswith("_sha256")}
        return {**kept, **found, "generations": [rows]}

    def bytes_beside(self, rows: int, old: Bank, *, mirror: bool) -> int:
        """About what `write_beside` will take for `rows` rows like those of `old`."""
        return 0

    def write_beside(self, bank: BankWriter, *, mirror: bool, progress: Progress) -> None:
        """Write the files beside the finished shards."""


class TokenRules(CombineRules):
    """Of tokens."""

    merges = False

    def counted(self, bank: BankWriter, before: ManifestFields) -> ManifestFields:
        return {
            "counts": {
                "tokens": sum(int(values_of(batch.column("length")).sum(dtype=np.int64)) for batch in finished_batches(bank))
            }
        }


class FeatureRules(CombineRules):
    """Of vectors, of texts or of their tokens, their key file and their mirror. A text that several banks have keeps the first one's."""

    agree = ("hidden_size", "max_key_tokens", "tokenizer_fingerprint", "special_tokens", "prompt")
    files = (KEY_FILE,)
    of_files = ("bank", "index", "texts")

    def recipe(self, bank: Bank) -> ManifestFields:
        """What decides a vector once its tokens are given."""
        names = ("encoding_method", "model", "hidden_size", "normalize", "batches")
        dim = {"dim": bank.manifest.recipe["dim"]} if "dim" in bank.manifest.recipe else {}
        return {**{name: bank.manifest.recipe.get(name) for name in names}, **dim, "mirror": has_mirror(bank)}

    def counted(self, bank: BankWriter, before: ManifestFields) -> ManifestFields:
        files = mirror_fields(bank.done_rows) if bank.recipe["mirror"] else {}
        tokens = sum(int(values_of(batch.column("length")).sum(dtype=np.int64)) for batch in finished_batches(bank))
        return {"encoded_rows": bank.done_rows, "limit": None, **files, **({"tokens": tokens} if "tokens" in before else {})}

    def bytes_beside(self, rows: int, old: Bank, *, mirror: bool) -> int:
        texts = sum(batch.column("text").nbytes for batch in old.shards()) * rows // len(old)
        return 16 * rows + (2 * rows * int(old.schema.field("features").type.list_size) + 2 * texts if mirror else 0)

    def write_beside(self, bank: BankWriter, *, mirror: bool, progress: Progress) -> None:
        rows = bank.done_rows
        with progress.phase("mirror", rows, unit="rows") as phase:
            write_keys(bank, rows=rows)
            if mirror:
                width = finished_batches(bank)[0].schema.field("features").type.list_size
                write_mirror(bank, rows=rows, width=width, report=phase.advance)


class SampleRules(CombineRules):
    """Of the samples of target banks, which are told apart by their names."""

    of_all_rows = ("counts", "codec_error", "generations", "merged", "source_duplicates")

    def find(self, banks: Sequence[Bank], report: Callable[[int], None]) -> Overlap:
        return new_samples(banks, report)

    def recipe(self, bank: Bank) -> ManifestFields:
        """What the hidden states are, and of which model."""
        names = (*LABELS, "model_fingerprint", "tokenizer_fingerprint", "chat_template_sha256")
        return {name: bank.manifest.get(name) for name in names}

    def counted(self, bank: BankWriter, before: ManifestFields) -> ManifestFields:
        """Rows, tokens and NaN. The codec's error was measured against values that are not here any more: it is not stated."""
        counts, batches = dict.fromkeys(("kept", "tokens", "loss_tokens", "hidden_tokens"), 0), finished_batches(bank)
        for batch in batches:
            counts["kept"] += batch.num_rows
            counts["tokens"] += int(values_of(batch.column("seq_len")).sum(dtype=np.int64))
            counts["loss_tokens"] += int(list_values(batch.column("loss_mask"))[0].sum(dtype=np.int64))
            counts["hidden_tokens"] += len(nested_lists(batch.column("target_last_hidden_states"))[0])
        counted = dict.fromkeys(before["nonfinite"], 0)
        if any(before["nonfinite"].values()):  # else no row has one
            layers = facts_of(before).layer_names
            for batch in batches:
                for column, names in (("target_hidden_states", layers), ("target_last_hidden_states", ["last"])):
                    bits, _ = nested_lists(batch.column(column))
                    values = nonfinite(bits).reshape(len(bits), len(names), -1).sum(axis=(0, 2))
                    for layer, count in zip(names, values.tolist(), strict=True):
                        counted[layer] += count
        return {"counts": counts, "nonfinite": counted}

    def merged(self, every: Sequence[ManifestFields], alike: ManifestFields, overlap: Overlap) -> ManifestFields:
        return {**alike, "source": " + ".join(dict.fromkeys(str(one["source"]) for one in every))}

    def merged_counts(self, every: Sequence[ManifestFields], found: ManifestFields, shared: int) -> ManifestFields:
        dropped = sum_counts([one["counts"]["dropped"] for one in every])
        return {**found["counts"], "dropped": dropped | {"duplicate": shared}}

    def ends(self, parts: Sequence[Bank], new: Sequence[int]) -> ManifestFields:
        return {}

    def selected(self, kept: ManifestFields, found: ManifestFields, rows: int, of: int) -> ManifestFields:
        return {**kept, **found, "counts": {**found["counts"], "dropped": {"not_selected": of - rows}}}


class NoRules(CombineRules):
    """Of a kind whose rows are neither merged nor selected."""

    merges = selects = False


def rules_of(kind: str) -> CombineRules:
    """The rules of the rows of a kind."""
    named = kind_of(kind).rules
    found: CombineRules = resolve(named)() if named else NoRules()
    return found


def counted_fields(rules: CombineRules, bank: BankWriter, before: ManifestFields) -> ManifestFields:
    """The fields that the finished shards of `bank` decide, in the order of names that `before` (a manifest) has."""
    batches = finished_batches(bank)
    fields: ManifestFields = {"text_count": bank.done_rows}
    for name, column in (("kinds", "kind"), ("source_rows", "source")):
        if column in batches[0].schema.names:
            found = value_counts(batches, column)
            fields[name] = {**dict.fromkeys(before.get(name, ()), 0), **found}
    return fields | rules.counted(bank, before)


def sum_counts(counts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Counts of the same names added up."""
    return {name: sum(one.get(name, 0) for one in counts) for name in dict.fromkeys(key for one in counts for key in one)}
