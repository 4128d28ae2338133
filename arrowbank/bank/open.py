"""Opening a bank of whatever kind, as the class that knows its columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from arrowbank.bank.kinds import every_kind, kind_of
from arrowbank.bank.kinds.texts_bank import TextsBank
from arrowbank.bank.kinds.tokens_bank import TokensBank
from arrowbank.bank.reader import Bank, local_folder, open_committed
from arrowbank.bank.refusals import explains
from arrowbank.errors import InputError
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import checked

B = TypeVar("B", bound=Bank)
Expect = Mapping[str, Any] | None


@overload
def open_bank(folder: str | Path, expect: Expect = None, *, progress: Progress = SILENT) -> Bank: ...
@overload
def open_bank(folder: str | Path, expect: Expect = None, *, kind: type[B], progress: Progress = SILENT) -> B: ...
@explains("folder", "read")
@checked
def open_bank(folder: str | Path, expect: Expect = None, *, kind: type[Bank] = Bank, progress: Progress = SILENT) -> Bank:
    """Open a committed bank as the class of its kind: a FeatureBank where it holds vectors, a TargetBank where it holds hidden
    states, a TrunkBank where it holds windows of a trunk. `folder` may be an address (`hf://datasets/org/name@revision`, `s3://…`):
    the bank is fetched into `$ARROWBANK_CACHE` (`~/.cache/arrowbank`), checked whole, and opened there; the next time only its
    manifest is asked for.

    `expect` names fields of the manifest and the values they must have; `model`, `max_tokens` and `dim` are short for
    `model_path`, `max_key_tokens` and `hidden_size`. `kind` is the class that is expected. Sizes and row counts of all files are
    checked, contents are not (see `verify`).

    Raises InputError (no bank, or one of another kind), IncompleteBank (not committed), ContractError (not what was expected),
    CorruptBank (files missing, cut or unreadable), and for addresses RemoteError, MissingDependency, DiskFull.
    """
    path, manifest, commit = open_committed(folder, expect, progress=progress)
    found = kind_of(manifest.kind)
    if not issubclass(found.opens, kind):
        wanted = next((one for one in every_kind().values() if one.opens is kind), None)
        expected = (wanted.expected or wanted.name) if wanted else kind.__name__
        made_by = wanted.made_by if wanted else "the command that makes one"
        raise InputError(f"{folder}: a bank of {found.name}, expected {expected}. Give a folder that {made_by} has written.")
    return found.opens(path, manifest, commit)


def open_texts_behind(tokens: TokensBank, folder: str | Path | None = None) -> TextsBank:
    """The texts bank that a tokens bank was made from: in `folder` (or at that address), or where the tokens bank says.

    InputError when it is gone or another one.
    """
    named = tokens.manifest.texts
    if named is None:
        raise InputError(f"{tokens.folder}: does not say which texts bank it was made from. Tokenize the texts again.")
    place = tokens.folder / named.path if folder is None else local_folder(folder)
    if not place.is_dir():
        raise InputError(f"{place}: the texts bank behind {tokens.folder} is not there. Give its folder with --texts.")
    texts = open_bank(place, kind=TextsBank)
    if texts.plan_digest != named.plan_digest:
        raise InputError(
            f"{place}: not the texts bank that {tokens.folder} was made from (plan digest {texts.plan_digest[:12]}, "
            f"expected {named.plan_digest[:12]}). Give the right folder with --texts, or tokenize again."
        )
    return texts
