"""The three stages of a feature bank one after another, meeting on disk: DIR/texts, DIR/tokens, DIR/features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from arrowbank.bank.files import free_bytes, human_bytes, require_space
from arrowbank.bank.info import PARTS
from arrowbank.bank.manifest import MANIFEST, Manifest
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explains
from arrowbank.engine.stage import RunOptions
from arrowbank.errors import InputError
from arrowbank.features.encode import encode
from arrowbank.features.encode import inputs_of as encoded
from arrowbank.features.encode_config import EncodeConfig, check_growth, load_custom_encoder, width_of
from arrowbank.features.grow import open_old
from arrowbank.features.scan import ScanConfig, estimate_scan, scan
from arrowbank.features.scan import inputs_of as scanned
from arrowbank.features.tokenize import TokenizeConfig, asked_of, token_rules, tokenize, truncating_backend
from arrowbank.models import describe, load_tokenizer, local_model, require_loadable
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Help, Part, Place, Settings, checked, refuse_unread

ROW_BYTES = 64  # at least, of a text in the three banks, beside its characters and its vector: keys, lengths, a token


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
    encode: Annotated[EncodeConfig, Part(without=("runner", "engine"), hidden=("as_tokenized",))]
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
    """Scan, tokenize and encode into `out`; the features' manifest. Stages that are complete are not done again. The workers, the
    budget and `restart` of `options` are those of each of the three stages, the engine that of tokenize and encode, shards and rows
    are those of the features.

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
    config = _as_the_model_asks(config)
    _check_stages(config, Path(out), options, progress)
    whole = RunOptions(workers=options.workers, budget_gb=options.budget_gb, restart=options.restart)
    scan(config.scan, texts, options=whole, progress=progress)
    tokenize(config.tokenize, texts, tokens, options=replace(options, shards=None, rows=None), progress=progress)
    return encode(config.encode, tokens, features, options=options, progress=progress)


def _as_the_model_asks(config: BuildConfig) -> BuildConfig:
    """Texts are tokenized as the model's folder asks; what the user asks of them otherwise, `encode` takes."""
    if config.encode.model is None:
        return config
    tokens = replace(config.tokenize, model=config.encode.model.model)
    return replace(
        config, tokenize=tokens, encode=replace(config.encode, as_tokenized=config.encode.as_tokenized or tokens.as_asked)
    )


def _check_stages(config: BuildConfig, out: Path, options: RunOptions, progress: Progress) -> None:
    """Refuse, before the scan, what `tokenize` and `encode` would refuse after it."""
    tokenizer = load_tokenizer(config.tokenize.tokenizer, trust_remote_code=config.tokenize.trust_remote_code)
    rules = token_rules(config.tokenize, asked_of(config.tokenize), [kind for kind, _ in config.scan.paths])
    truncating_backend(tokenizer, rules)
    if config.encode.model is None:
        hidden_size = int(load_custom_encoder(config.encode.model_path).hidden_size)
    else:
        info = describe(config.encode.model)
        hidden_size, limit, most = info.width, info.max_positions, rules.max_tokens
        if limit is not None and most > limit:
            raise InputError(
                f"model {info.model!r}: has {limit} positions, and texts may have {most} tokens (--max-tokens). Give --max-tokens "
                f"{limit} or less."
            )
        require_loadable(config.encode.model, info)
    hidden_size = width_of(config.encode, hidden_size)
    if config.encode.onto is not None:
        open_old(config.encode.onto)
    elif options.shards is None and options.rows is None and not any((out / part).exists() for part in PARTS):
        _check_space(config, out, hidden_size, progress)


def _check_space(config: BuildConfig, out: Path, hidden_size: int, progress: Progress) -> None:
    """Refuse banks that the disk under `out` has no room for, from the sources' texts. They are counted, or, where there are many,
    the first of every file are: texts may then repeat later on, so that only twice the room that there is is too much."""
    found = estimate_scan(config.scan, out / PARTS[0])
    if not (texts := found.rows):
        return  # the scan says so
    limits = [limit for limit in (config.encode.limit, config.encode.trial) if limit is not None]
    vectors = min([texts, *limits]) * 2 * hidden_size * (2 if config.encode.mirror and not config.encode.per_token else 1)
    needed = vectors + texts * ROW_BYTES + 2 * found.counts["text_bytes"]
    sampled, whole = found.counts["sampled_bytes"], found.counts["sampled_bytes"] == found.counts["input_bytes"]
    what = f"a bank of {'' if whole else 'some '}{texts:,} texts"
    what += "" if whole else f", as many as the first {human_bytes(sampled)} of its sources suggest,"
    if whole or needed // 2 > free_bytes(out):
        require_space(out, needed, what)
    elif needed > free_bytes(out):
        progress.message(f"{out}: {what} may take {human_bytes(needed)}, the disk has {human_bytes(free_bytes(out))} free")


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
