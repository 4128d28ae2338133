"""The three IN2 arms at 16,384 tokens: 64 facts an example, matched, verified together, exported for llm.c.

The number of examples is a multiple of the loader's batch times its ranks (8 × 8) in each of two raw shards: a loader that opens the next
file early wants two.

    python recipes/in2_16k.py --filler train_0.bin train_1.bin --out in2_16k

writes in2_16k/arm_a, arm_b and arm_c (bank, raw shards, manifest) and in2_16k/llmc_a, llmc_b and llmc_c.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from arrowbank import ExportConfig, In2Config, build_in2, export, verify_in2
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError, CorruptBank
from arrowbank.in2.arm_config import ArmName

ARMS: tuple[ArmName, ...] = ("a", "b", "c")
LENGTH, TRIPLES = 16_384, 64
BATCH, RANKS = 8, 8
EXAMPLES = 94 * BATCH * RANKS


def in2_16k(arm: ArmName) -> In2Config:
    """The whole configuration of one arm."""
    return In2Config(arm=arm, length=LENGTH, examples=EXAMPLES, triples=TRIPLES, global_batch=BATCH * RANKS, raw_shards=2)


def tiny(arm: ArmName) -> In2Config:
    """The same at 1,024 tokens, for a few seconds."""
    return dataclasses.replace(
        in2_16k(arm), length=1024, examples=8, triples=4, global_batch=8, raw_shards=1, vocab=1000, alphabet=100
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the three arms at 16,384 tokens, verify them together, export them.")
    parser.add_argument("--filler", nargs="+", required=True, help="token ids: .bin or .npy, or banks of tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder of the arms")
    parser.add_argument("--tiny", action="store_true", help="1,024 tokens, eight examples, ids below 1,000")
    given = parser.parse_args(argv)
    progress = progress_for(False)
    folders = [given.out / f"arm_{arm}" for arm in ARMS]
    for arm, folder in zip(ARMS, folders, strict=True):
        build_in2((tiny if given.tiny else in2_16k)(arm), given.filler, folder, progress=progress)
    for check in verify_in2(folders, progress=progress):
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:8}  {check.detail}")
        if not check.ok:
            raise CorruptBank(f"{given.out}: {check.name}: {check.detail}. Nothing was exported.")
    for arm, folder in zip(ARMS, folders, strict=True):
        config = ExportConfig(format="llmc", stride="T", global_batch=8 if given.tiny else BATCH * RANKS)
        note = export(config, folder, given.out / f"llmc_{arm}", progress=progress)
        print(f"arm {arm}: {note['examples']:,} examples, llm.c delivers {note['survivors']['llm.c']:,} triples whole")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ArrowbankError as error:
        sys.exit(f"in2_16k: {error}")
