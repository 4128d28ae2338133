"""The verb that heals a draft."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from arrowbank.cli import options as o
from arrowbank.cli.show import finish, progress_for
from arrowbank.cli.spread import spread

TRAIN, WRITE = "How it is trained", "What is written"


def _train(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=TRAIN, **settings)


def _write(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=WRITE, **settings)


@spread
def heal(
    trunk: Annotated[str, typer.Option("--trunk", metavar="DIR", help="The bank that `trunk build` made of this model.")],
    model: Annotated[str, typer.Option("--model", metavar="M", help="The checkpoint: trunk, and draft to be healed.")],
    out: Annotated[str, _write("--out", metavar="DIR", help="The copy of the checkpoint with the healed draft.")],
    common: o.Common,
    chain: Annotated[int, _train("--chain", help="Drafts a round.")] = 3,
    stride: Annotated[int, _train("--stride", help="0: every row is a chain. N >= chain: real rounds, one every N rows.")] = 0,
    refresh: Annotated[int, _train("--refresh", help="Steps between two computations of what later drafts are fed.")] = 150,
    epochs: Annotated[float, _train("--epochs", help="Passes over the windows; 0 only measures.")] = 1.0,
    lr: Annotated[float, _train("--lr", help="The largest learning rate.")] = 2e-5,
    batch: Annotated[int, _train("--batch", help="Windows a step.")] = 2,
    eval_every: Annotated[int, _train("--eval-every", help="Steps between two measurements.")] = 25,
    patience: Annotated[int, _train("--patience", help="Measurements without a better one that end it.")] = 6,
    hard: Annotated[float, _train("--hard", help="Share of the mass that goes to the trunk's first choice.")] = 0.0,
    hidden: Annotated[
        str | None, _train("--hidden", metavar="post|pre", help="Trunk states the draft is fed. Default: its family's.")
    ] = None,
    recycle: Annotated[
        str | None, _train("--recycle", metavar="post|pre", help="Own states it is fed at later steps. Default: its family's.")
    ] = None,
    train_proj: Annotated[bool, _train("--train-proj", help="Train eh_proj as well.")] = False,
    init: Annotated[bool, _train("--init", help="Begin with the trunk's last block (a model without a draft).")] = False,
    draft_from: Annotated[str | None, _train("--draft-from", metavar="M", help="Begin with this checkpoint's draft.")] = None,
    in_order: Annotated[bool, _train("--in-order", help="Also count rounds one after another.")] = False,
    codec: Annotated[
        str, _write("--codec", metavar="keep|bf16|fp16|int8|nf4", help="How the draft is stored; keep: as the source has it.")
    ] = "keep",
    also: Annotated[
        list[str] | None, _write("--also", metavar="CODEC=DIR", help="Another copy, with this codec; repeat it.")
    ] = None,
    dump: Annotated[str | None, _write("--dump", metavar="DIR", help="The draft's rows before and after, as a bank.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="auto|float32|bfloat16|float16", help="The trunk's.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 …")] = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    restart: o.Restart = False,
) -> None:
    """Train a model's MTP draft to agree with its trunk again, and write the checkpoint with it. Goes on after a crash.

    Example: arrowbank heal --trunk trunk --model Qwen/Qwen3.5-4B --out healed --also nf4=healed_nf4
    """
    from arrowbank.heal.config import HealConfig
    from arrowbank.heal.healing import heal_draft as run
    from arrowbank.heal.healing import table
    from arrowbank.models import ModelConfig

    config = HealConfig(
        model=ModelConfig(
            model=model,
            dtype=dtype,  # type: ignore[arg-type]  # checked there
            device=device,
            trust_remote_code=trust_remote_code,
        ),
        chain=chain,
        stride=stride,
        refresh=refresh,
        epochs=epochs,
        lr=lr,
        batch=batch,
        eval_every=eval_every,
        patience=patience,
        hard=hard,
        hidden=hidden,
        recycle=recycle,
        train_projection=train_proj,
        init=init,
        draft_from=draft_from,
        codec=codec,
        also=o.pairs("--also", also),
        in_order=in_order,
    )
    report = run(config, trunk, out, dump=dump, restart=restart, progress=progress_for(common.json))
    finish(common.json, report, "\n".join([*table(report), f"Trace, picture and report: {out}.heal"]))
