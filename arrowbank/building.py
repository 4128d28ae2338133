"""The three stages of a feature bank one after another, meeting on disk: DIR/texts, DIR/tokens, DIR/features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from arrowbank.bank.info import PARTS
from arrowbank.bank.manifest import MANIFEST, Manifest
from arrowbank.corpus.scan import ScanConfig, scan
from arrowbank.corpus.tokenize import TokenizeConfig, tokenize
from arrowbank.encoding import EncodeConfig, RunOptions, encode
from arrowbank.errors import InputError
from arrowbank.progress import SILENT, Progress


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """A whole feature bank: what a recipe returns. `onto` is a folder that `build` made, whose texts and vectors stay."""

    scan: ScanConfig
    tokenize: TokenizeConfig
    encode: EncodeConfig
    onto: str | None = None


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
    config = _grown(config, config.onto, Path(out)) if config.onto is not None else config
    texts, tokens, features = (Path(out) / name for name in PARTS)
    scan(config.scan, texts, restart=options.restart, progress=progress)
    tokenize(config.tokenize, texts, tokens, num_proc=num_proc, restart=options.restart, progress=progress)
    return encode(config.encode, tokens, features, options=options, progress=progress)


def _grown(config: BuildConfig, onto: str, out: Path) -> BuildConfig:
    """The stages of a bank that grows. Its tokens are made again: that takes a hundredth of the time of encoding, and gives the
    same bytes."""
    old = Path(onto)
    for part in ("texts", "features"):
        if not (old / part / MANIFEST).is_file():
            raise InputError(
                f"--onto {onto}: not a folder that `arrowbank build` made (no {part}/{MANIFEST}). Give the folder that holds texts, "
                "tokens and features."
            )
    if old.resolve() == out.resolve():
        raise InputError(
            f"--onto {onto}: is the folder to be written, too. Give --out another one: the old bank stays as it is."
        )
    return replace(
        config,
        scan=replace(config.scan, onto=str(old / "texts")),
        encode=replace(config.encode, onto=str(old / "features")),
    )
