"""The verb that heals a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from arrowbank.cli.options import Common, Restart
from arrowbank.cli.show import fail_on, finish, progress_for
from arrowbank.settings import Group, Help

if TYPE_CHECKING:
    from arrowbank import HealConfig

WRITE = Group("Output options")


def heal(
    trunk: Annotated[str, Help("The bank that `trunk build` made of this model.", "DIR")],
    config: HealConfig,
    out: Annotated[str, Help("The copy of the checkpoint with the healed draft.", "DIR"), WRITE],
    common: Common,
    dump: Annotated[str, Help("The draft's rows before and after, as a bank.", "DIR"), WRITE] | None = None,
    restart: Restart = False,
) -> None:
    """Train a model's MTP draft to agree with its trunk again, and write the checkpoint with it. Goes on after a crash.

    Example: arrowbank heal --trunk trunk --model Qwen/Qwen3.5-4B --out healed --also nf4=healed_nf4
    """
    from arrowbank.mtp.heal import heal_draft as run
    from arrowbank.mtp.heal import table

    report = run(config, trunk, out, dump=dump, restart=restart, progress=progress_for(common.json))
    finish(common.json, report, "\n".join([*table(report), f"Trace, picture and report: {out}.heal"]))
    fail_on(report["failed"])
