"""The verbs of target banks: targets import, and export."""

from __future__ import annotations

from typing import Annotated

import typer

from arrowbank.cli import options as o
from arrowbank.cli.show import finish, progress_for, show_estimate
from arrowbank.cli.spread import spread
from arrowbank.errors import InputError

FORMATS = "deepspec, specforge-eagle3, specforge-dflash, specforge-dspark, speculators or modelopt."


@spread
def import_(
    source: Annotated[str, typer.Argument(metavar="DUMP", help="An engine's dump, or a DeepSpec or speculators folder.")],
    out: o.Out,
    what: o.ImportOptions,
    common: o.Common,
    to: Annotated[str | None, typer.Option("--to", metavar="deepspec", help="Write this cache to --out, and no bank.")] = None,
    dry_run: o.DryRun = False,
    restart: o.Restart = False,
) -> None:
    """Turn hidden states that lie somewhere already into a target bank, or straight into a DeepSpec cache.

    Example: arrowbank targets import dump --target-model Qwen/Qwen3-8B --layers 1,17,33 --out targets
    """
    from arrowbank.targets.importing import estimate_import, import_targets, import_to_deepspec

    config, progress = what.config(), progress_for(common.json)
    if to not in (None, "deepspec"):
        raise InputError(f"--to {to}: expected deepspec. For other formats import into a bank, then `arrowbank export`.")
    if dry_run:
        show_estimate(estimate_import(config, source, out, progress=progress), common.json)
    elif to:
        cache = import_to_deepspec(config, source, out, restart=restart, progress=progress)
        finish(common.json, cache, f"{out}: {cache['num_samples']:,} samples in {cache['num_shards']} shards.")
    else:
        manifest = import_targets(config, source, out, restart=restart, progress=progress)
        finish(common.json, manifest, _imported(out, manifest["counts"]))


@spread
def export(
    bank: Annotated[str, typer.Argument(metavar="BANK", help="A target bank.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=FORMATS)],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="A new folder.")],
    common: o.Common,
    max_shard_bytes: Annotated[int | None, typer.Option("--max-shard-bytes", help="Of formats with shards.")] = None,
    assume_norm: Annotated[
        str | None, typer.Option("--assume-norm", metavar="post|pre", help="What unknown last hidden states are.")
    ] = None,
    restart: o.Restart = False,
) -> None:
    """Write a bank in the format that a trainer reads; refused where it would be mislabelled.

    Example: arrowbank export targets --to deepspec --out cache
    """
    from arrowbank.exporting import ExportConfig
    from arrowbank.exporting import export as run

    config = ExportConfig(format=to, max_shard_bytes=max_shard_bytes, assume_norm=assume_norm)
    manifest = run(config, bank, out, restart=restart, progress=progress_for(common.json))
    finish(common.json, manifest, f"{out}: complete, as {to}.")


def _imported(out: str, counts: dict[str, int]) -> str:
    return (
        f"{out}: {counts['kept']:,} samples, {counts['tokens']:,} tokens, {counts['loss_tokens']:,} in the loss.\n"
        f"Prove it: arrowbank targets verify {out} --model M. Next: arrowbank export {out} --to FORMAT --out DIR"
    )
