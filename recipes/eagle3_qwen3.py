"""What an Eagle-3 draft of Qwen3-8B learns from: hidden states for a file of chats, for SpecForge and for DeepSpec.

What blocks 1, N/2 − 1 and N − 4 of the target's N = 36 put out (serving engines, which name what goes into a block, call
them 2, N/2 and N − 3), the last hidden states after the final norm, losses on the assistant's tokens. The bank is proved by
the model itself before it is exported.

    python recipes/eagle3_qwen3.py --source chats.jsonl --out eagle3 [--model Qwen/Qwen3-8B]

writes eagle3/targets (the bank), eagle3/specforge and eagle3/deepspec. The same command goes on after a crash.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from arrowbank import BatchRules, CaptureConfig, ExportConfig, ModelConfig, capture, export
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError, CorruptBank
from arrowbank.targets.check_model import verify_targets

MODEL = "Qwen/Qwen3-8B"
LAYERS = (1, 17, 32)
EXPORTS = {"specforge": "specforge-eagle3", "deepspec": "deepspec"}


def eagle3_qwen3(data: Path, model: str = MODEL) -> CaptureConfig:
    """The whole configuration of the bank."""
    return CaptureConfig(
        model=ModelConfig(model=model, dtype="bfloat16"),
        data=data,
        target_layer_ids=LAYERS,
        max_length=4096,
        min_loss_tokens=14,
        rules=BatchRules(max_batch=16, token_budget=16384),
    )


def tiny(data: Path, model: str) -> CaptureConfig:
    """The same for a decoder of a few blocks and short chats, on a CPU."""
    return dataclasses.replace(
        eagle3_qwen3(data, model),
        model=ModelConfig(model=model, dtype="bfloat16", device="cpu"),
        target_layer_ids=(0, 1, 2),
        max_length=512,
        min_loss_tokens=2,
        rules=BatchRules(max_batch=4, token_budget=512),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Capture, prove and export what an Eagle-3 draft learns from.")
    parser.add_argument("--source", type=Path, required=True, help='chats, JSON lines: {"messages": [{"role", "content"}, …]}')
    parser.add_argument("--out", type=Path, required=True, help="folder of the bank and its exports")
    parser.add_argument("--model", default=MODEL, help=f"folder or hub name (default: {MODEL})")
    parser.add_argument("--tiny", action="store_true", help="three low layers of a small model on a CPU, short chats")
    given = parser.parse_args(argv)
    config = (tiny if given.tiny else eagle3_qwen3)(given.source, given.model)
    progress, bank = progress_for(False), given.out / "targets"
    manifest = capture(config, bank, progress=progress)
    for check in verify_targets(bank, config.model, progress=progress):
        if not check.ok:
            raise CorruptBank(f"{bank}: {check.name}: {check.detail}. Nothing was exported.")
    for folder, format in EXPORTS.items():
        export(ExportConfig(format=format), bank, given.out / folder, progress=progress)
    print(f"{given.out}: {manifest['rows']:,} chats in targets, specforge and deepspec.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ArrowbankError as error:
        sys.exit(f"eagle3_qwen3: {error}")
