"""The verbs that make banks out of banks: merge, select."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from arrowbank.cli.options import Common, Out, Restart, Texts
from arrowbank.cli.show import finish, progress_for

if TYPE_CHECKING:
    from arrowbank import SelectConfig


def merge(
    banks: Annotated[list[str], typer.Argument(metavar="A B...", help="Banks of texts, of features or of targets.")],
    out: Out,
    common: Common,
    restart: Restart = False,
) -> None:
    """Merge banks that were made alike: the rows of the first one, then what each of the others adds. Nothing is computed again.

    Example: arrowbank merge monday/features tuesday/features --out features
    """
    from arrowbank.combine.merge import merge

    manifest = merge(banks, out, restart=restart, progress=progress_for(common.json))
    merged = manifest["merged"]
    apart = merged.get("largest_difference")
    shared = f"{merged['shared']:,} that several have are kept once"
    difference = "" if apart is None else f" (their vectors are at most {apart:.2g} apart)"
    finish(common.json, manifest, f"{out}: {manifest['rows']:,} rows of {len(banks)} banks, {shared}{difference}. {_next(out)}")


def select(
    bank: Annotated[str, typer.Argument(metavar="BANK", help="A bank of texts, tokens, features or targets.")],
    out: Out,
    common: Common,
    config: SelectConfig,
    texts: Texts | None = None,
    restart: Restart = False,
) -> None:
    """Write some rows of a bank as a bank of their own. Of a tokens bank, the texts of these rows go to DIR-texts.

    Example: arrowbank select router/features --where kind=query --where 'length<=128' --out queries
    """
    from arrowbank.combine.select import select

    manifest = select(config, bank, out, texts=texts, restart=restart, progress=progress_for(common.json))
    finish(common.json, manifest, f"{out}: {manifest['rows']:,} of {manifest['selected']['rows']:,} rows. {_next(out)}")


def _next(out: Any) -> str:
    return f"Prove it: arrowbank verify {out}"
