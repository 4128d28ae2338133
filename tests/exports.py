"""Exports of every format as tests need them, and their sidecars edited so that the seal fits again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from arrowbank import EncodeConfig, ExportConfig, encode, export, import_to_deepspec
from tests import arms, banks
from tests.target_banks import import_config, make_target_bank

TARGETS = ("deepspec", "specforge-eagle3", "specforge-dflash", "specforge-dspark", "modelopt")
TOKENS = ("raw", "llmc", "nanogpt", "nanogpt-npy", "megatron", "nanotron")
EVERY = (*TARGETS, "speculators", "deepspec-import", *TOKENS, "npy", "parquet")


def export_everything(folder: Path) -> dict[str, Path]:
    """Small exports of all formats, name → folder; "deepspec-import" is a dump's cache in one step."""
    make_target_bank(folder / "post", vocab_size=50)
    make_target_bank(folder / "pre", last_hidden_norm="pre")
    arm = arms.build_small(folder)
    banks.make_texts(folder / "texts")
    banks.make_tokens(folder / "tokens", folder / "texts")
    encode(EncodeConfig(encoder="tests.banks:TableEncoder", shard_rows=16), folder / "tokens", folder / "features")
    sources = {
        **dict.fromkeys(TARGETS, folder / "post"),
        "speculators": folder / "pre",
        **dict.fromkeys(TOKENS, arm),
        **dict.fromkeys(("npy", "parquet"), folder / "features"),
    }
    made = {name: folder / "exports" / name for name in EVERY}
    for name, source in sources.items():
        config = ExportConfig(format=name, max_shard_bytes=500 if name == "deepspec" else None)
        export(config, source, made[name])
    import_to_deepspec(import_config(), folder / "post-dump", made["deepspec-import"])
    return made


def sidecar_of(folder: Path) -> Path:
    """The path of an export's sidecar."""
    (path,) = folder.rglob("arrowbank-export.json")
    return path


def write_sidecar(folder: Path, said: Mapping[str, Any]) -> None:
    """Put `said` into an export's sidecar, sealed again as a forger would."""
    unsealed = {name: value for name, value in said.items() if name != "digest"}
    canonical = json.dumps(unsealed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    sidecar_of(folder).write_text(json.dumps({**unsealed, "digest": xxhash.xxh3_128_hexdigest(canonical)}))
