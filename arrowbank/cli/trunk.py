"""The verb of trunk banks: trunk build."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from arrowbank.cli import options as o
from arrowbank.cli.show import CHECK_FAILED, finish, progress_for
from arrowbank.cli.spread import spread
from arrowbank.cli.trunk_options import TrunkOptions

if TYPE_CHECKING:
    from arrowbank.trunk.building import TrunkEstimate


@spread
def build(
    out: o.Out,
    what: TrunkOptions,
    common: o.Common,
    trust_remote_code: o.TrustRemoteCode = False,
    workers: o.Workers = None,
    dry_run: o.DryRun = False,
    restart: o.Restart = False,
) -> None:
    """Run a model over packed windows; keep its hidden states and most likely next tokens. The same command again goes on.

    Example: arrowbank trunk build --model Qwen/Qwen3-Next-80B-A3B-Instruct --data code=tokens --out trunk
    """
    from arrowbank.trunk.building import build_trunk, estimate_trunk

    config = what.config(trust_remote_code=trust_remote_code)
    if dry_run:
        _show_estimate(estimate_trunk(config, out), common.json)
        return
    manifest = build_trunk(config, out, restart=restart, workers=workers, progress=progress_for(common.json))
    finish(common.json, manifest, _made(out, manifest, taps=bool(config.taps)))


def _made(out: str, manifest: dict[str, Any], *, taps: bool) -> str:
    counts = manifest["counts"]
    beside = f" Taps of the held-out ones: {out}-taps." if taps else ""
    return (
        f"{out}: {counts['windows']:,} windows of {manifest['window']:,} tokens, {counts['held_out']:,} held out, "
        f"{counts['tokens']:,} tokens.{beside}\nProve it: arrowbank verify {out}"
    )


def _show_estimate(found: TrunkEstimate, as_json: bool) -> None:
    """Print what the banks will take; exit code 1 where that is too much."""
    from arrowbank.bank.files import human_bytes

    if as_json:
        print(
            json.dumps({"phase": "estimate", **asdict(found), "total_bytes": found.total_bytes, "fits": found.fits}), flush=True
        )
    else:
        taps = f", taps {human_bytes(found.taps_bytes)}" if found.taps_bytes else ""
        budget = "" if found.budget_bytes is None else f", the budget is {human_bytes(found.budget_bytes)}"
        print(f"windows          {found.windows:,} ({found.tokens:,} tokens), {found.held_out:,} held out")
        print(f"bytes a token    {found.bytes_a_token:,}")
        print(f"disk             {human_bytes(found.bytes)}{taps} of {human_bytes(found.free_bytes)} free{budget}")
    if not found.fits:
        raise typer.Exit(CHECK_FAILED)
