"""The verbs that hand banks on: push and pull."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from arrowbank.cli.options import Common
from arrowbank.cli.show import finish, progress_for
from arrowbank.secrets import redact
from arrowbank.settings import Help

if TYPE_CHECKING:
    from arrowbank import PushConfig

Repo = Annotated[
    str,
    typer.Argument(metavar="REPO", help="OWNER/NAME of a dataset repository on the hub, or an address: s3://bucket/prefix …"),
]


def push(
    bank: Annotated[str, typer.Argument(metavar="BANK", help="The folder of a committed bank.")],
    repo: Repo,
    common: Common,
    config: PushConfig,
) -> None:
    """Prove a bank and push it, with a card. The same command again goes on; what is there and right is not sent again.

    Example: arrowbank push router/features my-org/router-features --license cc-by-4.0
    """
    from arrowbank.share.push import push as run

    done = run(bank, repo, config, progress=progress_for(common.json))
    who = {True: ", private", False: ", public", None: ""}[done.get("private")]
    finish(
        common.json,
        done,
        f"{done['url']}: {done['rows']:,} rows{who}; {len(done['sent']):,} files sent, {done['kept']:,} were there.\n"
        f"Fetch it: arrowbank pull {redact(repo)} DIR",
    )


def pull(
    repo: Repo,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A new folder, or one that an earlier pull began.")],
    common: Common,
    revision: Annotated[str | None, Help("A branch, tag or commit.", "R", default="main")] = None,
) -> None:
    """Fetch a bank and check every byte. The same command again goes on; until all is there the folder does not open.

    Example: arrowbank pull my-org/router-features features
    """
    from arrowbank.share.pull import pull as run

    manifest = run(repo, folder, revision=revision, progress=progress_for(common.json))
    finish(
        common.json,
        manifest,
        f"{folder}: {manifest['rows']:,} rows of {manifest['kind']}, as {redact(repo)} has them.",
    )
