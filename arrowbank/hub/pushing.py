"""The stage `push`: a committed bank to the hub or any fsspec address.

The manifest goes first: it says whose the place is, so that a push that stopped goes on, and one of another bank is refused. Then the
shards and the rest, as far as they are not there already. When sizes and hashes at the place are the manifest's, `state.json` goes,
and on the hub in the same commit the card that makes `load_dataset` work; until then there is a card that makes it fail. So nothing
opens a half pushed bank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arrowbank.bank import Bank, open_bank
from arrowbank.bank.checks import Check
from arrowbank.bank.manifest import CARD, JOURNAL, LOG, MANIFEST, SHARD_NAME, STATE
from arrowbank.bank.remote.addresses import Address, parse_address
from arrowbank.bank.remote.fetching import PLOT, parsed_manifest, wrong_file
from arrowbank.bank.remote.stores import Stored, side_by_side
from arrowbank.bank.verify import verify
from arrowbank.errors import CorruptBank, InputError, PlanMismatch
from arrowbank.hub.card import pushed_card, unfinished_card
from arrowbank.hub.places import Outgoing, Place
from arrowbank.progress import SILENT, Progress


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """`public`: a new repository is open to everybody (default: private). `license`: an identifier for the card, as in cc-by-4.0.
    `restart`: replace another bank that is there, and a card that may have been edited. `read_back`: where a place vouches for no
    hashes (anything but the hub), read what was written once more; else only sizes are compared there.
    """

    public: bool = False
    license: str | None = None
    restart: bool = False
    read_back: bool = True

    def __post_init__(self) -> None:
        if self.license is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", self.license):
            raise InputError(f"--license {self.license!r}: expected an identifier, as in apache-2.0 or cc-by-4.0.")


def push(
    bank: str | Path, repo: str, config: PushConfig | None = None, *, progress: Progress = SILENT
) -> dict[str, Any]:
    """Bring the committed bank in the folder `bank` to `repo` (OWNER/NAME of a dataset repository, or an address); what was done.

    The bank is proved first, and what lies there is compared with its manifest afterwards. The same call again goes on where it
    stopped: files that are there and right are not sent again. The token for the hub is the one that its client finds.

    Raises what `open_bank` raises, CorruptBank (the bank, or what lies there afterwards, is not what the manifest says), PlanMismatch
    (another bank is there), InputError (other files are there; the repository is public, or private, against `public`), RemoteError.
    """
    config = config or PushConfig()
    address = parse_address(repo)
    opened = open_bank(bank)
    place = _place(address, config)
    head, body, state = _files(opened)
    there = place.listing() if (found := place.visit(public=config.public)) else {}
    same = _require_own(place, head, [*body, state], there, restart=config.restart)
    checks = _proved(opened, progress)
    if not found:
        place.create(public=config.public)
    if not same:
        there = _cleared(place, there)
    card_stays = _card_stays(place, there, config)
    sent = _send_body(place, head, body, there, progress)
    _send_rest(place, opened, state, checks, config, there, sent, card_stays, progress)
    return {
        "address": place.shown,
        **place.facts(),
        "rows": len(opened),
        "plan_digest": opened.plan_digest,
        "sent": [file.name for file in sent],
        "bytes_sent": sum(file.size for file in sent),
        "kept": len(body) + 2 - len([file for file in sent if file.name not in (CARD, PLOT)]),
        "checks": [asdict(check) for check in checks],
    }


def _place(address: Address, config: PushConfig) -> Place:
    if address.revision:
        raise InputError(f"{address.shown}: a push goes to the main branch. Leave @{address.revision} out.")
    if address.repo:
        from arrowbank.hub.hub_place import HubPlace

        return HubPlace(address)
    from arrowbank.hub.object_place import ObjectPlace

    return ObjectPlace(address, read_back=config.read_back)


def _files(bank: Bank) -> tuple[Outgoing, list[Outgoing], Outgoing]:
    """The manifest, the files that it lists, and state.json. What else lies in the folder stays here."""
    head, state = (Outgoing.of_bytes(name, (bank.folder / name).read_bytes()) for name in (MANIFEST, STATE))
    return head, [Outgoing.of_entry(bank.folder, entry) for entry in bank.manifest["files"]], state


def _proved(bank: Bank, progress: Progress) -> list[Check]:
    """The bank's proof. CorruptBank where a check fails."""
    checks = verify(bank.folder, progress=progress)
    wrong = [f"{check.name}: {check.detail}" for check in checks if not check.ok]
    if wrong:
        raise CorruptBank(f"{bank.folder}: not pushed, because it fails its own proof. {' · '.join(wrong)}")
    known = {entry["name"] for entry in bank.manifest["files"]} | {MANIFEST, STATE, CARD, PLOT, LOG, JOURNAL}
    beside = sorted(path.name for path in bank.folder.iterdir() if path.name not in known and not path.name.startswith("."))
    if beside:
        progress.message(f"{bank.folder}: not the bank's, and not pushed: {', '.join(beside)}")
    return checks


def _require_own(
    place: Place, head: Outgoing, files: Sequence[Outgoing], there: Mapping[str, Stored], *, restart: bool
) -> bool:
    """Whether what lies there is nothing, or this bank; InputError or PlanMismatch where it is not and may not be replaced."""
    ours = {file.name for file in files}
    strays = sorted(name for name in there if SHARD_NAME.fullmatch(name) and name not in ours)
    if MANIFEST not in there:
        if taken := strays or sorted(ours & set(there)):
            raise InputError(f"{place.shown}: holds {taken[0]}, which no bank there accounts for. Give another, or a new, place.")
        return True
    same = place.read(MANIFEST) == head.contents()
    if same and not strays:
        return True
    if not restart:
        what = f"a shard {strays[0]} that is not this bank's" if same else "another bank, or this one from another run"
        raise PlanMismatch(f"{place.shown}: holds {what}. Give --restart to replace what is there, or another name to keep it.")
    return False


def _cleared(place: Place, there: Mapping[str, Stored]) -> dict[str, Stored]:
    """Take the other bank away, the file that commits it first and the one that names it last; what is left there."""
    listed = [entry["name"] for entry in parsed_manifest(place.read(MANIFEST), place.shown)["files"]]
    shards = [name for name in there if SHARD_NAME.fullmatch(name)]
    names = [name for name in dict.fromkeys([STATE, *listed, *shards, CARD, PLOT, MANIFEST]) if name in there]
    place.remove(names, "Make room for another bank")
    return {name: stored for name, stored in there.items() if name not in names}


def _card_stays(place: Place, there: Mapping[str, Stored], config: PushConfig) -> bool:
    """Whether the card there is that of this bank and whole: people edit cards."""
    if config.restart or CARD not in there or MANIFEST not in there:
        return False
    return place.read(CARD) != unfinished_card(place.shown)


def _send_body(
    place: Place, head: Outgoing, body: Sequence[Outgoing], there: Mapping[str, Stored], progress: Progress
) -> list[Outgoing]:
    """Send what is not there or not right, and prove it; what was sent."""
    missing = _wrong(place, [head, *body], there, progress)
    if not missing:
        return []
    if STATE in there:
        place.remove([STATE], "Take the commit away until every file is right")
    first = [head] if head in missing else []
    if place.hub and MANIFEST not in there:
        first.append(Outgoing.of_bytes(CARD, unfinished_card(place.shown)))
    rest = [file for file in missing if file is not head]
    with progress.phase("push", sum(file.size for file in missing), unit="bytes") as phase:
        if first:
            place.send(first, "Begin to push a bank", lambda _: None)
            phase.advance(sum(file.size for file in missing if file is head))
        place.send(rest, "Add files of the bank", phase.advance)
    _require_right(place, missing, progress)
    return missing


def _send_rest(
    place: Place,
    bank: Bank,
    state: Outgoing,
    checks: Sequence[Check],
    config: PushConfig,
    there: Mapping[str, Stored],
    sent: list[Outgoing],
    card_stays: bool,
    progress: Progress,
) -> None:
    """Send card, plot and, last, the file whose presence is the commit; add to `sent` what went."""
    if card_stays:
        progress.message(f"{place.shown}: the card there is kept (it may have been edited); --restart makes it anew")
        files = []
    else:
        files = pushed_card(bank, place.shown, checks, license=config.license, progress=progress)
    if sent or STATE not in there or not place.is_right(state, there[STATE]):
        files.append(state)
    if files:
        place.send(files[:-1], "Add files of the bank", lambda _: None) if not place.hub else None
        place.send(files if place.hub else files[-1:], "The bank is whole", lambda _: None)
        _require_right(place, files, progress)
    sent += files


def _wrong(place: Place, files: Sequence[Outgoing], there: Mapping[str, Stored], progress: Progress) -> list[Outgoing]:
    """The files that are not there, or not right, in their order."""
    present = [file for file in files if file.name in there]
    right: set[str] = set()

    def look(file: Outgoing) -> tuple[Outgoing, bool]:
        return file, place.is_right(file, there[file.name])

    with progress.phase("compare", sum(file.size for file in present), unit="bytes") as phase:

        def note(result: tuple[Outgoing, bool]) -> None:
            file, good = result
            right.update([file.name] if good else [])
            phase.advance(file.size)

        side_by_side(look, present, note)
    return [file for file in files if file.name not in right]


def _require_right(place: Place, files: Sequence[Outgoing], progress: Progress) -> None:
    there = place.listing()
    for file in _wrong(place, files, there, progress):
        raise wrong_file(place.shown, file.entry, there.get(file.name))
