"""From an inference engine's dump to a DeepSpec target cache, in one step, without a bank between.

    python recipes/deepspec_cache.py --dump dump --out cache [--target-model Qwen/Qwen3-8B] [--layers 1,9,17,25,33]

Five layers spread over the target's 36, as DFlash-style drafts take them. The dump says what the engine did: whether its last hidden
states are after the final norm, as the cache's reader takes them, is proved by `arrowbank targets verify cache --model M`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from arrowbank import ImportConfig, import_to_deepspec
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError

TARGET_MODEL = "Qwen/Qwen3-8B"
LAYERS = (1, 9, 17, 25, 33)


def deepspec_cache(target_model: str = TARGET_MODEL, layers: tuple[int, ...] = LAYERS) -> ImportConfig:
    """The whole configuration of the import."""
    return ImportConfig(
        target_model=target_model,
        target_layer_ids=layers,
        loss_mask="from_dump",
        on_nonfinite="drop",
        on_bad_sample="quarantine",
    )


def tiny(target_model: str, layers: tuple[int, ...]) -> ImportConfig:
    """The same for a dump of a few small samples that carry no masks, in several shards."""
    return dataclasses.replace(deepspec_cache(target_model, layers), loss_mask="ones_except_first", max_shard_bytes=1 << 16)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Turn an engine's dump into a DeepSpec target cache.")
    parser.add_argument("--dump", type=Path, required=True, help="folder with index.jsonl and one .safetensors a sample")
    parser.add_argument("--out", type=Path, required=True, help="folder of the cache")
    parser.add_argument(
        "--target-model", default=TARGET_MODEL, help=f"the string the trainer is given (default: {TARGET_MODEL})"
    )
    parser.add_argument("--layers", default=",".join(map(str, LAYERS)), help="blocks whose output the dump holds")
    parser.add_argument("--tiny", action="store_true", help="small shards, masks of ones")
    given = parser.parse_args(argv)
    config = (tiny if given.tiny else deepspec_cache)(given.target_model, tuple(map(int, given.layers.split(","))))
    cache = import_to_deepspec(config, given.dump, given.out, progress=progress_for(False))
    print(
        f"{given.out}: {cache['num_samples']:,} samples. Check it: arrowbank targets verify {given.out} --model {given.target_model}"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ArrowbankError as error:
        sys.exit(f"deepspec_cache: {error}")
