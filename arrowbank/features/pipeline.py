"""The three stages of a feature bank one after another, meeting on disk: DIR/texts, DIR/tokens, DIR/features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from arrowbank.bank.info import PARTS
from arrowbank.bank.manifest import MANIFEST, Manifest
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explains
from arrowbank.engine.stage import RunOptions
from arrowbank.errors import InputError
from arrowbank.features.encode import encode
from arrowbank.features.encode import inputs_of as encoded
from arrowbank.features.encode_config import EncodeConfig, check_growth
from arrowbank.features.scan import ScanConfig, scan
from arrowbank.features.scan import inputs_of as scanned
from arrowbank.features.tokenize import TokenizeConfig, tokenize
from arrowbank.models import local_model
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Help, Part, Place, Settings, checked, refuse_unread


@dataclass(frozen=True, kw_only=True)
class BuildConfig(Settings):
    """A whole feature bank: what a recipe returns. `onto` is a folder that `build` made, whose texts and vectors stay."""

    scan: ScanConfig
    tokenize: Annotated[
        TokenizeConfig,
        Part(
            help={"tokenizer": Help("A folder or hub name. Default: the model's.", "M")},
            follows={"tokenizer": "model"},
        ),
    ]
    encode: EncodeConfig
    onto: Annotated[Place, Help("A folder that build made: encode only unseen texts.", "DIR")] | None = None


@explains("out")
@checked
def build(
    config: BuildConfig,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Scan, tokenize and encode into `out`; the features' manifest. Stages that are complete are not done again. The shards and rows
    of `options` are those of the features.

    Raises what the three stages raise.
    """
    options = options or RunOptions()
    refuse_unread(
        "build, whose first stages are not made in parts (run scan and tokenize once, then encode)", options, ["worker"]
    )
    check_growth(config.encode, grows=config.onto is not None or config.encode.onto is not None)  # before the first stage
    texts, tokens, features = (Path(out) / name for name in PARTS)
    require_separate([("--out", texts), ("--out", tokens), ("--out", features)], inputs_of(config))
    config = _grown(config, config.onto) if config.onto is not None else config
    scan(config.scan, texts, restart=options.restart, progress=progress)
    tokenize(config.tokenize, texts, tokens, options=replace(options, shards=None, rows=None), progress=progress)
    return encode(config.encode, tokens, features, options=options, progress=progress)


def inputs_of(config: BuildConfig) -> list[Named]:
    """What the three stages read, other than each other's banks."""
    old = [None, *PARTS] if config.onto is not None else []
    return [
        *scanned(config.scan),
        ("--tokenizer", local_model(config.tokenize.tokenizer)),
        *encoded(config.encode),
        *(("--onto", Path(str(config.onto)) / (part or "")) for part in old),
    ]


def _grown(config: BuildConfig, onto: str) -> BuildConfig:
    """The stages of a bank that grows. Its tokens are made again: that takes a hundredth of the time of encoding, and gives the
    same bytes."""
    old = Path(onto)
    for part in ("texts", "features"):
        if not (old / part / MANIFEST).is_file():
            raise InputError(
                f"--onto {onto}: not a folder that `arrowbank build` made (no {part}/{MANIFEST}). Give the folder that holds texts, "
                "tokens and features."
            )
    return replace(
        config,
        scan=replace(config.scan, onto=str(old / "texts")),
        encode=replace(config.encode, onto=str(old / "features")),
    )
