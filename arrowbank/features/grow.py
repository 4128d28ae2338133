"""Whether this environment still gives the vectors that an old bank has: some of its texts, encoded again before new ones are.

Every worker looks for itself, with the model that it has loaded: one of them may have another device or library. The sample's
batches have other shapes than those of the old bank, so that last bits may differ on the very same machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from arrowbank.bank import Bank, BankWriter
from arrowbank.bank.columns import one_array
from arrowbank.bank.floats import cosines
from arrowbank.bank.journal import append_log
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.manifest import LOG, differing_fields
from arrowbank.bank.open import open_bank
from arrowbank.engine.plan import Shard
from arrowbank.errors import ContractError, InputError, PlanMismatch
from arrowbank.features.encode_config import EncodeConfig, Encoder
from arrowbank.features.stored_vectors import encoded, finish

EVENT = "drift"


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Vectors of `texts` texts encoded here against the stored ones: cosines, and the largest difference of two components."""

    texts: int
    min_cosine: float
    mean_cosine: float
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"{self.texts} old texts encoded again here: cosine to the stored vectors at least {self.min_cosine:.6f}, "
            f"mean {self.mean_cosine:.6f}, largest difference {self.largest_difference:.2g}"
        )


@dataclass(frozen=True, kw_only=True)
class DriftCheck:
    """What a worker does before its first shard. Picklable. `out` is the folder of the new bank."""

    config: EncodeConfig
    old: FeatureBank
    out: str
    sample: int
    min_cosine: float

    def __call__(self, encoder: Encoder, tokens: Bank) -> None:
        """Measure, and note it in the new bank's build.jsonl. ContractError below the bound."""
        drift = measure_drift(self.old, encoder, tokens, self.config, self.sample)
        append_log(Path(self.out), EVENT, **asdict(drift), bound=self.min_cosine)
        if not drift.min_cosine >= self.min_cosine:  # NaN is no agreement either
            raise ContractError(
                f"{self.old.folder}: {drift}, below --min-cosine {self.min_cosine}. Vectors that are made here (this device, these "
                "library versions, this model) are not those of the old bank, and would not compare with them. Nothing is lost. "
                "Encode where the old bank was made, build the whole bank here without --onto, or give a lower --min-cosine if "
                "such a difference does no harm.",
                "min_cosine",
            )


def measure_drift(old: FeatureBank, encoder: Encoder, tokens: Bank, config: EncodeConfig, sample: int) -> Drift:
    """Encode `sample` rows of `old` again, the same ones each time; `tokens` has its rows first."""
    random = np.random.default_rng(int(old.content_digest[:16], 16))
    rows = np.sort(random.choice(len(old), min(sample, len(old)), replace=False))
    parts = [tokens.slice(row, row + 1, ["input_ids"]) for row in rows.tolist()]
    again = np.empty((len(rows), old.hidden_size), np.float16)
    for batch, vectors in encoded(encoder, one_array(pa.concat_tables(parts)["input_ids"]), config.rules, config.dim):
        again[batch.rows], _ = finish(vectors, normalize=config.normalize)
    stored = old.take(rows)
    alike = cosines(stored, again, of_zeros=np.nan)
    return Drift(
        texts=len(rows),
        min_cosine=round(float(alike.min()), 9),
        mean_cosine=round(float(alike.mean()), 9),
        largest_difference=float(np.abs(stored.astype(np.float64) - again).max()),
    )


def told_since(folder: Path, offset: int) -> list[str]:
    """What was measured for the bank in `folder` since its build.jsonl had `offset` bytes, for people."""
    with (folder / LOG).open("rb") as log:
        log.seek(offset)
        # other jobs of an array may be writing theirs
        lines = [json.loads(line) for line in log if f'"event": "{EVENT}"'.encode() in line and line.endswith(b"}\n")]
    return [str(Drift(**{name: line[name] for name in Drift.__dataclass_fields__})) for line in lines]


RECIPE = ("encoding_method", "model", "hidden_size", "normalize", "batches", "shard_rows")
FIELDS = ("max_key_tokens", "tokenizer_fingerprint", "special_tokens", "prompt")


def open_old(folder: str | Path) -> FeatureBank:
    """Open the feature bank that is to grow. InputError for one that `encode` did not make."""
    old = open_bank(folder, kind=FeatureBank)
    if not {"tokens", "texts", *RECIPE} <= set(old.manifest.recipe):
        raise InputError(
            f"--onto {folder}: not made by `arrowbank encode` but by merge or select, so nothing says which tokens its rows "
            "are of. Grow a bank that encode made, and merge it with this one."
        )
    return old


def check_fits(old: FeatureBank, recipe: Mapping[str, Any], manifest: Mapping[str, Any], *, texts: Bank, tokens: Bank) -> None:
    """Raise PlanMismatch, naming the fields, unless the plan of `recipe` and `manifest` begins with the rows of `old`."""
    rows, ends = len(old), old.manifest.generations or []
    found = {name: old.manifest.recipe[name] for name in (*RECIPE, "texts", "tokens")}
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
        bank.adopt_shard(shard.index, old.folder / name, rows=shard.rows, sha256=old.entries[name].sha256)
    return sum(shard.rows for shard in todo)
