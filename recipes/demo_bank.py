"""The demo's bank as a recipe: episodes from the docstrings of the installed Python library, through a small sentence encoder.

    python recipes/demo_bank.py [--out demo_bank] [--episodes N]

`arrowbank demo` does the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from arrowbank import BuildConfig
from arrowbank.cli import demo
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError


def demo_bank(sources: Mapping[str, Path], model: str) -> BuildConfig:
    """The whole configuration of the bank."""
    return demo.demo_bank(sources, model)


def tiny(sources: Mapping[str, Path], model: str) -> BuildConfig:
    """The same in seconds: for any small encoder, a few tokens a text."""
    config = demo_bank(sources, model)
    return dataclasses.replace(config, tokenize=dataclasses.replace(config.tokenize, max_tokens=16))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build a real bank from the docstrings of this Python, and query it.")
    parser.add_argument("--out", type=Path, default=Path("demo_bank"), help="folder of the bank (default: demo_bank)")
    parser.add_argument("--episodes", type=int, default=demo.EPISODES, help=f"how many episodes (default: {demo.EPISODES})")
    given = parser.parse_args(argv)
    demo.run(given.out, episodes=given.episodes, progress=progress_for(False))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ArrowbankError as error:
        sys.exit(f"demo_bank: {error}")
