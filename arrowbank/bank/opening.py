"""Opening a bank of whatever kind, as the class that knows its columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arrowbank.bank import features, targets, trunk
from arrowbank.bank.reader import Bank, local_folder, open_committed
from arrowbank.bank.refusals import explains
from arrowbank.errors import InputError
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

CLASSES = {features.KIND: features.FeatureBank, targets.KIND: targets.TargetBank, trunk.KIND: trunk.TrunkBank}


@explains("folder", "read")
@checked
def open_bank(folder: str | Path, expect: Mapping[str, Any] | None = None, *, progress: Progress = SILENT) -> Bank:
    """Open a committed bank: a FeatureBank where it holds features, a TargetBank where it holds hidden states,
    a TrunkBank where it holds windows of a trunk. `folder` may be an address (`hf://datasets/org/name@revision`, `s3://…`): the
    bank is fetched into `$ARROWBANK_CACHE` (`~/.cache/arrowbank`), checked whole, and opened there; the next time only its manifest
    is asked for.

    `expect` names fields of the manifest and the values they must have; `model`, `max_tokens` and `dim` are short for
    `model_path`, `max_key_tokens` and `hidden_size`. Sizes and row counts of all files are checked, contents are not (see
    `verify`).

    Raises InputError (no bank), IncompleteBank (not committed), ContractError (not what was expected), CorruptBank (files
    missing, cut or unreadable), and for addresses RemoteError, MissingDependency, DiskFull.
    """
    path, manifest, commit = open_committed(folder, expect, progress=progress)
    return CLASSES.get(manifest["kind"], Bank)(path, manifest, commit)


def open_texts_behind(tokens: Bank, folder: str | Path | None = None) -> Bank:
    """The texts bank that a tokens bank was made from: in `folder` (or at that address), or where the tokens bank says.

    InputError when it is gone or another one.
    """
    named = tokens.manifest["texts"]
    place = tokens.folder / named["path"] if folder is None else local_folder(folder)
    if not place.is_dir():
        raise InputError(f"{place}: the texts bank behind {tokens.folder} is not there. Give its folder with --texts.")
    texts = open_bank(place)
    if texts.plan_digest != named["plan_digest"]:
        raise InputError(
            f"{place}: not the texts bank that {tokens.folder} was made from (plan digest {texts.plan_digest[:12]}, "
            f"expected {named['plan_digest'][:12]}). Give the right folder with --texts, or tokenize again."
        )
    return texts
