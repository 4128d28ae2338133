"""The verb that heals a draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from arrowbank.cli import options as o
from arrowbank.cli.show import fail_on, finish, progress_for
from arrowbank.cli.spread import spread
from arrowbank.settings import Old

TRAIN, WRITE = "How it is trained", "What is written"


def _train(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=TRAIN, **settings)


def _write(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=WRITE, **settings)


@dataclass(kw_only=True)
class HealOptions:
    """How a draft is trained, measured and stored."""

    model: Annotated[str, typer.Option("--model", metavar="M", help="The checkpoint: trunk, and draft to be healed.")]
    chain: Annotated[int, _train("--chain", help="Drafts a round.")] = 3
    stride: Annotated[int, _train("--stride", help="0: every row is a chain. N >= chain: real rounds, one every N rows.")] = 0
    refresh: Annotated[
        int | None, _train("--refresh", show_default="150", help="Steps between two computations of what later drafts are fed.")
    ] = None
    epochs: Annotated[float, _train("--epochs", help="Passes over the windows; 0 only measures.")] = 1.0
    lr: Annotated[float | None, _train("--lr", show_default="2e-05", help="The largest learning rate.")] = None
    batch: Annotated[int, _train("--batch", help="Windows a step.")] = 2
    eval_every: Annotated[int | None, _train("--eval-every", show_default="25", help="Steps between two measurements.")] = None
    patience: Annotated[
        int | None, _train("--patience", show_default="6", help="Measurements without a better one that end it.")
    ] = None
    hard: Annotated[
        float | None, _train("--hard", show_default="0", help="Share of the mass moved to the trunk's first choice.")
    ] = None
    last_hidden_norm: Annotated[
        str | None,
        _train("--last-hidden-norm", metavar="post|pre", help="Trunk states the draft is fed. Default: its family's."),
        Old("--hidden"),
    ] = None
    recycle: Annotated[
        str | None, _train("--recycle", metavar="post|pre", help="Own states it is fed at later steps. Default: its family's.")
    ] = None
    train_proj: Annotated[bool, _train("--train-proj", help="Train eh_proj as well.")] = False
    init: Annotated[bool, _train("--init", help="Begin with the trunk's last block (a model without a draft).")] = False
    draft_from: Annotated[str | None, _train("--draft-from", metavar="M", help="Begin with this checkpoint's draft.")] = None
    in_order: Annotated[bool, _train("--in-order", help="Also count rounds one after another.")] = False
    codec: Annotated[
        str, _write("--codec", metavar="keep|bf16|fp16|int8|nf4", help="How the draft is stored; keep: as the source has it.")
    ] = "keep"
    also: Annotated[
        list[str] | None, _write("--also", metavar="CODEC=DIR", help="Another copy, with this codec; repeat it.")
    ] = None
    dtype: o.Dtype = None
    device: o.Device = None


@spread
def heal(
    trunk: Annotated[str, typer.Option("--trunk", metavar="DIR", help="The bank that `trunk build` made of this model.")],
    what: HealOptions,
    out: Annotated[str, _write("--out", metavar="DIR", help="The copy of the checkpoint with the healed draft.")],
    common: o.Common,
    dump: Annotated[str | None, _write("--dump", metavar="DIR", help="The draft's rows before and after, as a bank.")] = None,
    trust_remote_code: o.TrustRemoteCode = False,
    restart: o.Restart = False,
) -> None:
    """Train a model's MTP draft to agree with its trunk again, and write the checkpoint with it. Goes on after a crash.

    Example: arrowbank heal --trunk trunk --model Qwen/Qwen3.5-4B --out healed --also nf4=healed_nf4
    """
    from arrowbank.models import ModelConfig
    from arrowbank.mtp.heal import heal_draft as run
    from arrowbank.mtp.heal import table
    from arrowbank.mtp.heal_config import HealConfig

    config = o.make(
        HealConfig,
        what,
        model=o.make(ModelConfig, what, trust_remote_code=trust_remote_code),
        train_projection=what.train_proj,
        also=o.pairs("--also", what.also),
    )
    report = run(config, trunk, out, dump=dump, restart=restart, progress=progress_for(common.json))
    finish(common.json, report, "\n".join([*table(report), f"Trace, picture and report: {out}.heal"]))
    fail_on(report["failed"])
