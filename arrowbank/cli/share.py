"""The verbs that hand banks on: push and pull."""

from __future__ import annotations

from typing import Annotated

import typer

from arrowbank.cli import options as o
from arrowbank.cli.show import finish, progress_for
from arrowbank.cli.spread import spread
from arrowbank.secrets import redact

Repo = Annotated[
    str,
    typer.Argument(metavar="REPO", help="OWNER/NAME of a dataset repository on the hub, or an address: s3://bucket/prefix …"),
]


@spread
def push(
    bank: Annotated[str, typer.Argument(metavar="BANK", help="The folder of a committed bank.")],
    repo: Repo,
    common: o.Common,
    public: Annotated[
        bool, typer.Option("--public", help="A new repository that everybody may read. Default: private.")
    ] = False,
    license: Annotated[str | None, typer.Option("--license", metavar="ID", help="For the card, as in cc-by-4.0.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Replace another bank that is there, and an edited card.")] = False,
    no_read_back: Annotated[
        bool, typer.Option("--no-read-back", help="Compare sizes only, where a place has no hashes (all but the hub).")
    ] = False,
) -> None:
    """Prove a bank and push it, with a card. The same command again goes on; what is there and right is not sent again.

    Example: arrowbank push router/features my-org/router-features --license cc-by-4.0
    """
    from arrowbank.share.push import PushConfig
    from arrowbank.share.push import push as run

    config = PushConfig(public=public, license=license, restart=restart, read_back=not no_read_back)
    done = run(bank, repo, config, progress=progress_for(common.json))
    who = {True: ", private", False: ", public", None: ""}[done.get("private")]
    finish(
        common.json,
        done,
        f"{done['url']}: {done['rows']:,} rows{who}; {len(done['sent']):,} files sent, {done['kept']:,} were there.\n"
        f"Fetch it: arrowbank pull {redact(repo)} DIR",
    )


@spread
def pull(
    repo: Repo,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A new folder, or one that an earlier pull began.")],
    common: o.Common,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="A branch, tag or commit. Default: main.")
    ] = None,
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
