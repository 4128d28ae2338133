"""Growing a feature bank: the shards of an old one become the first shards of the new one.

That is right only where the old rows would come out the same again: every option that decides a vector is compared, and by
content digests that the old texts and tokens are the first ones of the new.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arrowbank.bank import Bank, BankWriter, FeatureBank
from arrowbank.bank.features import open_features
from arrowbank.bank.manifest import differing_fields
from arrowbank.errors import InputError, PlanMismatch
from arrowbank.plan import Shard

RECIPE = ("encoding_method", "model", "hidden_size", "normalize", "batches", "shard_rows")
FIELDS = ("max_key_tokens", "tokenizer_fingerprint", "special_tokens", "prompt")


def open_old(folder: str | Path) -> FeatureBank:
    """Open the feature bank that is to grow. InputError for one that `encode` did not make."""
    old = open_features(folder)
    if not {"tokens", "texts", *RECIPE} <= set(old.manifest["recipe"]):
        raise InputError(
            f"--onto {folder}: not made by `arrowbank encode` but by merge or select, so nothing says which tokens its rows "
            "are of. Grow a bank that encode made, and merge it with this one."
        )
    return old


def check_fits(old: FeatureBank, recipe: Mapping[str, Any], manifest: Mapping[str, Any], *, texts: Bank, tokens: Bank) -> None:
    """Raise PlanMismatch, naming the fields, unless the plan of `recipe` and `manifest` begins with the rows of `old`."""
    rows, ends = len(old), old.manifest["generations"]
    found = {name: old.manifest["recipe"][name] for name in (*RECIPE, "texts", "tokens")}
    found |= {name: old.manifest.get(name) for name in FIELDS} | {"generations": ends}
    wanted = {name: recipe[name] for name in RECIPE} | {name: manifest.get(name) for name in FIELDS}
    wanted |= {"generations": recipe["generations"][: len(ends)]}
    wanted |= {"texts": texts.first_digest(rows), "tokens": tokens.first_digest(rows)}
    if not (fields := differing_fields(found, wanted)):
        return
    lines = "".join(f"\n  {name}: {json.dumps(there)} there, {json.dumps(here)} here" for name, (there, here) in fields.items())
    raise PlanMismatch(
        f"--onto {old.folder}: its {rows:,} rows are not what this plan would make of them; these fields differ:{lines}\n"
        "Give the options of the old bank and texts that grew out of its texts (scan --onto), or build anew without --onto. "
        "(texts and tokens are digests of the first rows.)",
        fields,
    )


def adopt(old: FeatureBank, bank: BankWriter, chosen: Sequence[Shard]) -> int:
    """Take over those of the `chosen` shards that `old` has and `bank` has not; how many rows. CorruptBank where `old` is damaged."""
    done = bank.done_shards
    todo = [shard for shard in chosen if shard.index < len(old.shard_names) and shard.index not in done]
    if todo:
        old.check_hashes()
    for shard in todo:
        name = old.shard_names[shard.index]
        bank.adopt_shard(shard.index, old.folder / name, rows=shard.rows, sha256=old.entries[name]["sha256"])
    return sum(shard.rows for shard in todo)
