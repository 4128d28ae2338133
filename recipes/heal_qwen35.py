"""The draft of a Qwen3.5 whose trunk was quantised or edited: its trunk bank, then the healing, with a copy of the draft in NF4.

    python recipes/heal_qwen35.py --model edited --source code=tokens --source chat=chats.jsonl --out healed

The checkpoint has its draft under its own names, mtp.*, as Qwen's models bring it. A set gives 192 windows of 2,048 tokens, of which
every tenth is held out. The bank lies beside the copy (OUT.trunk), and so does the copy in NF4 (OUT.nf4).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from arrowbank import HealConfig, ModelConfig, TrunkConfig, TrunkData, build_trunk, heal_draft
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError
from arrowbank.inputs.sources import named_source
from arrowbank.mtp.heal import table

CHAIN = 3


def trunk_bank(model: str, data: Sequence[tuple[str, str]]) -> TrunkConfig:
    """The bank that the draft learns from: `data` are (name, path) of each set."""
    return TrunkConfig(
        model=ModelConfig(model=model),
        sources=tuple(TrunkData(name, path) for name, path in data),
        window=2048,
        topk=64,
        tokens=393_216,
        chain=CHAIN,
    )


def healing(model: str, copy: str) -> HealConfig:
    """How the draft is healed; `copy` is the folder of the one in NF4."""
    return HealConfig(
        model=ModelConfig(model=model),
        chain=CHAIN,
        stride=0,
        refresh=150,
        batch=2,
        lr=2e-5,
        eval_every=25,
        patience=6,
        also=(("nf4", copy),),
    )


def tiny(model: str, data: Sequence[tuple[str, str]], copy: str) -> tuple[TrunkConfig, HealConfig]:
    """Both for a small model on a CPU, with windows of a few tokens."""
    small = ModelConfig(model=model, device="cpu")
    return (
        dataclasses.replace(trunk_bank(model, data), model=small, window=32, topk=16, tokens=32 * 24),
        dataclasses.replace(healing(model, copy), model=small, refresh=5, eval_every=5, lr=1e-3),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Heal the draft of a Qwen3.5 whose trunk has changed.")
    parser.add_argument("--model", required=True, help="folder or hub name of the checkpoint")
    parser.add_argument("--source", action="append", required=True, metavar="NAME=PATH", help="tokens or texts; repeat it")
    parser.add_argument("--out", type=Path, required=True, help="folder of the copy with the healed draft")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, windows of a few tokens")
    given = parser.parse_args(argv)
    data, copy = [named_source(one) for one in given.source], f"{given.out}.nf4"
    trunk, heal = trunk_bank(given.model, data), healing(given.model, copy)
    if given.tiny:
        trunk, heal = tiny(given.model, data, copy)
    progress, bank = progress_for(False), given.out.with_name(f"{given.out.name}.trunk")
    build_trunk(trunk, bank, progress=progress)
    report = heal_draft(heal, bank, given.out, progress=progress)
    print("\n".join(table(report)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ArrowbankError as error:
        sys.exit(f"heal_qwen35: {error}")
