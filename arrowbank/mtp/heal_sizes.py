"""What a healing takes on disk and how many steps it has, from the headers of checkpoints and the trunk bank: no weight is read.

At its end everything is there at once: the training's state, what later chain steps are fed, and the copies of the checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from arrowbank.bank.files import free_bytes
from arrowbank.bank.kinds.trunk_bank import TrunkBank
from arrowbank.engine.stage import Estimate
from arrowbank.models import describe, resolve_model
from arrowbank.models.describe import read_config, text_part
from arrowbank.mtp.batches import fed_shape
from arrowbank.mtp.checkpoint import Checkpoint
from arrowbank.mtp.draft_files import copy_bytes
from arrowbank.mtp.heal_config import HealConfig
from arrowbank.mtp.layouts import CANONICAL, ROLES, FoundLayout
from arrowbank.mtp.trainer import jobs_of

Shapes = dict[str, tuple[int, ...]]
FLOAT32 = 4
KEPT = 4  # most likely tokens of a row in the dump
KEPT_ROLES, MOMENTS = 3, 2  # weights in a training's state, and numbers that Adam keeps of each that trains
STATES = 2  # the old one is there until the new one is published
VISUAL = re.compile("visual|vision|audio")


def estimate_healing(
    config: HealConfig,
    bank: TrunkBank,
    rows: Sequence[int],
    targets: Sequence[tuple[str, Path]],
    *,
    dumped: int,
    budget_bytes: int | None,
) -> Estimate:
    """The sizes of a healing on training windows `rows` with the copies `targets` (codec, folder); `dumped` rows of drafts
    go to the dump."""
    info = describe(replace(config.model, backbone="outer"))
    source = Checkpoint(info.folder)
    shapes = _draft_shapes(config, source, bank.hidden_size)
    count = sum(math.prod(shape) for shape in shapes.values())
    itemsize = getattr(torch, info.dtype).itemsize
    written = targets if config.epochs or config.codec != "keep" else targets[1:]
    found = source.known_layout() or FoundLayout(layout=CANONICAL, prefix=CANONICAL.prefixes[0])
    named = {found.stored(own): shape for own, shape in shapes.items()}
    copies = [copy_bytes(source, target, named, codec=codec, itemsize=itemsize) for codec, target in written]
    beside = {"checkpoints": sum(copies)}
    if config.epochs:
        trained = count - (0 if config.train_projection else 2 * bank.hidden_size**2)
        beside["training state"] = STATES * FLOAT32 * (KEPT_ROLES * count + MOMENTS * trained)
        beside["chain inputs"] = 2 * math.prod(fed_shape(bank, rows, steps=config.chain, stride=config.stride))
    if dumped:
        beside["dump"] = dumped * config.chain * (2 * bank.hidden_size + 8 * KEPT)
    return Estimate(
        rows=len(rows),
        tokens=int(bank.lengths[list(rows)].sum()),
        shards=0,
        shard_bytes=0,
        beside=beside,
        free_bytes=free_bytes(targets[0][1]),
        budget_bytes=budget_bytes,
        counts={
            "steps": math.ceil(config.epochs * len(jobs_of(rows, config))),
            "held_out_windows": len(bank.held_out_rows),
            "draft_parameters": count,
        },
    )


def _draft_shapes(config: HealConfig, source: Checkpoint, hidden_size: int) -> Shapes:
    """The shapes of the draft's tensors, by its own names as a checkpoint stores them. InputError where there is no draft."""
    if config.init:
        text = text_part(read_config(source.folder, trust_remote_code=config.model.trust_remote_code))
        kinds = list(getattr(text, "layer_types", None) or [])
        full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
        block = re.compile(rf"(?:.*\.)?layers\.{(full or [text.num_hidden_layers - 1])[-1]}\.(.*)")
        shapes: Shapes = {f"{role}.weight": (hidden_size,) for role in ROLES[1:]}
        shapes["eh_proj.weight"] = (hidden_size, 2 * hidden_size)
        inside = {name: match[1] for name in source.names if not VISUAL.search(name) and (match := block.fullmatch(name))}
        return shapes | {f"block.{rest}": source.shape(name) for name, rest in inside.items()}
    checkpoint = source if config.draft_from is None else Checkpoint(resolve_model(config.draft_from))
    found = checkpoint.layout()
    outside = {found.prefix + stored: own for own, stored in found.layout.names().items()}
    return {
        outside.get(name) or f"block.{name.removeprefix(found.block)}": checkpoint.shape(name)
        for name in found.own_tensors(checkpoint.names)
    }
