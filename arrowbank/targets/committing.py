"""What every stage that makes a target bank does alike: layer ids and budgets checked, sizes told, shards counted, the commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arrowbank.bank import BankWriter
from arrowbank.bank.files import human_bytes, publish_json
from arrowbank.bank.manifest import Manifest, read_json, readable_json
from arrowbank.bank.target_shards import Tally
from arrowbank.bank.targets import TargetFacts
from arrowbank.errors import DiskFull, InputError
from arrowbank.plan import Shard


def check_layers(layers: tuple[int, ...] | None) -> None:
    """InputError for layer ids that are not ascending from −1 (the embeddings) on."""
    if layers is not None and (not layers or list(layers) != sorted(set(layers)) or layers[0] < -1):
        raise InputError(
            f"--layers {','.join(map(str, layers))}: expected ascending ids of decoder blocks, each once, −1 for the embeddings, "
            "as in --layers 1,11,21."
        )


def require_budget(needed: int, budget: int | None, what: str) -> None:
    """DiskFull when `needed` is past a budget that the user has set."""
    if budget is not None and needed > budget:
        raise DiskFull(
            f"{what} takes {human_bytes(needed)}, the budget is {human_bytes(budget)}. Tap fewer layers, give --codec fp8 (half), "
            "--spans supervised, --limit, or a larger --budget-gb."
        )


@dataclass(frozen=True)
class TargetEstimate:
    """What a target bank will take. `bytes` is what is written, `free_bytes` what the disk has."""

    samples: int
    tokens: int
    bytes_a_token: int
    bytes: int
    free_bytes: int
    budget_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it, and the budget."""
        return self.bytes <= min(self.free_bytes, self.bytes if self.budget_bytes is None else self.budget_bytes)


def tally_file(folder: Path, shard: int) -> Path:
    """Where the counts of a shard lie while the bank is being built."""
    return folder / f"tally-{shard:05d}.json"


def publish_tally(folder: Path, shard: int, tally: Tally) -> None:
    """Note the counts of a shard."""
    folder.mkdir(exist_ok=True)
    publish_json(tally_file(folder, shard), vars(tally))


def is_done(bank: BankWriter, shard: Shard) -> bool:
    """Whether a shard and its counts are there."""
    found = readable_json(tally_file(bank.work_dir, shard.index))  # a power cut may have taken it: the shard is made again
    return shard.index in bank.done_shards and isinstance(found, dict) and found.keys() == vars(Tally()).keys()


def commit_targets(bank: BankWriter, shards: list[Shard], facts: TargetFacts, dropped: dict[str, int], **more: int) -> Manifest:
    """Commit the bank with the counts of all its shards, and `more` counts; its manifest."""
    tally = Tally()
    for shard in shards:
        tally.add(Tally(**read_json(tally_file(bank.work_dir, shard.index))))
    counts: dict[str, Any] = {
        "kept": tally.rows,
        "dropped": dropped,
        "tokens": tally.tokens,
        "loss_tokens": tally.loss_tokens,
        "hidden_tokens": tally.hidden_tokens,
        **more,
    }
    fields = {"counts": counts, "nonfinite": tally.nonfinite}
    if facts.codec != "bf16":
        fields["codec_error"] = tally.codec_error()
    return bank.commit(rows=tally.rows, manifest=fields)
