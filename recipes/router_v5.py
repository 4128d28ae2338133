"""Router, dataset version 5: two JSON-lines files through a 4B Qwen in NF4.

What version 6 changed: it runs the decoder without its LM head (`backbone="inner"`) and caps the GPU memory. Version 5 runs the
whole model, head and all, and takes what memory it gets; nothing comes of the head, so take version 6 for new banks. The
vectors of the two agree to cosine 0.99999, their plan digests differ.

    python recipes/router_v5.py --train train.jsonl --eval eval.jsonl --out router_v5 [--model Qwen/Qwen3-4B]
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


def router_v5(train: Path, evaluation: Path, model: str = MODEL) -> BuildConfig:
    """The whole configuration of the bank."""
    return BuildConfig(
        scan=ScanConfig(sources=(("train", str(train)), ("eval", str(evaluation)))),
        tokenize=TokenizeConfig(tokenizer=model, max_tokens=256),
        encode=EncodeConfig(
            model=ModelConfig(model=model, pooling="mean", backbone="outer", load_in_4bit=True),
            rules=BatchRules(max_batch=192, token_budget=12288),
        ),
    )


def tiny(train: Path, evaluation: Path, model: str) -> BuildConfig:
    """The same for a small decoder and a few texts, on a CPU."""
    config = router_v5(train, evaluation, model)
    small = ModelConfig(model=model, pooling="mean", backbone="outer", load_in_4bit=True, device="cpu")
    return dataclasses.replace(
        config,
        tokenize=dataclasses.replace(config.tokenize, max_tokens=32),
        encode=dataclasses.replace(config.encode, model=small, rules=BatchRules(max_batch=8, token_budget=256)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the router's feature bank, version 5.")
    parser.add_argument("--train", type=Path, required=True, help="training episodes, JSON lines")
    parser.add_argument("--eval", type=Path, required=True, help="evaluation episodes, JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder of the bank")
    parser.add_argument("--model", default=MODEL, help=f"folder or hub name (default: {MODEL})")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, a few tokens a text")
    given = parser.parse_args(argv)
    config = (tiny if given.tiny else router_v5)(given.train, given.eval, given.model)
    manifest = build(config, given.out, progress=progress_for(False))
    print(f"{given.out}: {manifest['rows']:,} texts. Check it: arrowbank verify {given.out / 'features'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ArrowbankError as error:
        sys.exit(f"router_v5: {error}")
