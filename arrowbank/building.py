"""The three stages of a feature bank one after another, meeting on disk: DIR/texts, DIR/tokens, DIR/features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arrowbank.bank.manifest import Manifest
from arrowbank.corpus.scan import ScanConfig, scan
from arrowbank.corpus.tokenize import TokenizeConfig, tokenize
from arrowbank.encoding import EncodeConfig, RunOptions, encode
from arrowbank.progress import SILENT, Progress


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """A whole feature bank: what a recipe returns."""

    scan: ScanConfig
    tokenize: TokenizeConfig
    encode: EncodeConfig


def build(
    config: BuildConfig,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    num_proc: int | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Scan, tokenize and encode into `out`; the features' manifest. Stages that are complete are not done again.

    Raises what the three stages raise.
    """
    options = options or RunOptions()
    texts, tokens, features = (Path(out) / name for name in ("texts", "tokens", "features"))
    scan(config.scan, texts, restart=options.restart, progress=progress)
    tokenize(config.tokenize, texts, tokens, num_proc=num_proc, restart=options.restart, progress=progress)
    return encode(config.encode, tokens, features, options=options, progress=progress)
