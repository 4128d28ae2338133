"""The draft's rows as a bank: for held-out windows, before and after, what each step was fed and what it said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from arrowbank.bank import BankWriter
from arrowbank.bank.columns import fixed_list_column, number_column
from arrowbank.bank.kinds.trunk import lists_of, row_offsets
from arrowbank.bank.manifest import Manifest
from arrowbank.mtp.batches import DraftWindows, WindowBatch
from arrowbank.mtp.draft import Draft, step_tokens
from arrowbank.mtp.heal_config import HealConfig
from arrowbank.mtp.loss import top_tokens

KIND = "drafts"
WHEN = ("before", "after")
KEPT = 4  # most likely tokens


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
