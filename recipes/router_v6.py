"""Router, dataset version 6: two JSON-lines files through a 4B Qwen in NF4, on a GPU that others use too.

What differs from version 5: the decoder runs without its LM head (`backbone="inner"`), which a third of the memory went to, and
this process takes at most 10 GB of the GPU; what does not fit stays on the CPU. The vectors agree to cosine 0.99999, the plan
digests differ.

    python recipes/router_v6.py --train train.jsonl --eval eval.jsonl --out router_v6 [--model Qwen/Qwen3-4B]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from arrowbank import BatchRules, BuildConfig, EncodeConfig, ModelConfig, ScanConfig, TokenizeConfig, build
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError

MODEL = "Qwen/Qwen3-4B"
GPU_MEMORY_GB = 10


def router_v6(train: Path, evaluation: Path, model: str = MODEL) -> BuildConfig:
    """The whole configuration of the bank."""
    return BuildConfig(
        scan=ScanConfig(sources=(("train", str(train)), ("eval", str(evaluation)))),
        tokenize=TokenizeConfig(tokenizer=model, max_tokens=256),
        encode=EncodeConfig(
            model=ModelConfig(model=model, pooling="mean", backbone="inner", load_in_4bit=True, gpu_memory_gb=GPU_MEMORY_GB),
            rules=BatchRules(max_batch=192, token_budget=12288),
        ),
    )


def tiny(train: Path, evaluation: Path, model: str) -> BuildConfig:
    """The same for a small decoder and a few texts, on a CPU."""
    config = router_v6(train, evaluation, model)
    small = ModelConfig(model=model, pooling="mean", backbone="inner", load_in_4bit=True, device="cpu")
    return dataclasses.replace(
        config,
        tokenize=dataclasses.replace(config.tokenize, max_tokens=32),
        encode=dataclasses.replace(config.encode, model=small, rules=BatchRules(max_batch=8, token_budget=256)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the router's feature bank, version 6.")
    parser.add_argument("--train", type=Path, required=True, help="training episodes, JSON lines")
    parser.add_argument("--eval", type=Path, required=True, help="evaluation episodes, JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder of the bank")
    parser.add_argument("--model", default=MODEL, help=f"folder or hub name (default: {MODEL})")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, a few tokens a text")
    given = parser.parse_args(argv)
    config = (tiny if given.tiny else router_v6)(given.train, given.eval, given.model)
    manifest = build(config, given.out, progress=progress_for(False))
    print(f"{given.out}: {manifest['rows']:,} texts. Check it: arrowbank verify {given.out / 'features'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ArrowbankError as error:
        sys.exit(f"router_v6: {error}")
