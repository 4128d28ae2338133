"""The stage `push`: a committed bank to the hub or any fsspec address.

The manifest goes first: it says whose the place is, so that a push that stopped goes on, and one of another bank is refused. Then the
shards and the rest, as far as they are not there already. When sizes and hashes at the place are the manifest's, `state.json` goes,
and on the hub in the same commit the card that makes `load_dataset` work; until then there is a card that makes it fail. So nothing
opens a half pushed bank."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from arrowbank.bank import Bank, open_bank
from arrowbank.bank.checks import Check
from arrowbank.bank.manifest import CARD, JOURNAL, LOG, MANIFEST, STATE
from arrowbank.bank.names import name_fault
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explains
from arrowbank.bank.remote.addresses import WEB, Address, parse_address
from arrowbank.bank.remote.fetch import PLOT, parsed_manifest, read_remote_manifest, wrong_file
from arrowbank.bank.remote.stores import StoredFile, side_by_side
from arrowbank.bank.verify import verify
from arrowbank.errors import CorruptBank, InputError, PlanMismatch
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import EXECUTION, Help, Settings, checked, refuse_unread
from arrowbank.share.card import pushed_card, unfinished_card
from arrowbank.share.destinations import Outgoing, PushPlace

SHARDS = "data-*.arrow"  # what the card gives to `load_dataset`


@dataclass(frozen=True, kw_only=True)
class PushConfig(Settings):
    """What a pushed bank becomes, and what may be replaced."""

    public: Annotated[bool, Help("A new repository that everybody may read. Default: private.")] = False
    license: Annotated[str | None, Help("Identifier of the license for the card, as in cc-by-4.0.", "ID")] = None
    restart: Annotated[bool, Help("Replace another bank that is there, and an edited card."), EXECUTION] = False
    read_back: Annotated[bool, Help("Compare sizes only, where a place has no hashes (all but the hub)."), EXECUTION] = True

    def check(self) -> None:
        if self.license is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", self.license):
            raise InputError(f"--license {self.license!r}: expected an identifier, as in apache-2.0 or cc-by-4.0.")


@explains("bank", "read")
@checked
def push(bank: str | Path, repo: str, config: PushConfig | None = None, *, progress: Progress = SILENT) -> dict[str, Any]:
    """Bring the committed bank in the folder `bank` to `repo` (OWNER/NAME of a dataset repository, or an address); what was done.

    The bank is proved first, and what lies there is compared with its manifest afterwards. The same call again goes on where it
    stopped: files that are there and right are not sent again. The token for the hub is the one that its client finds.

    Raises what `open_bank` raises, CorruptBank (the bank, or what lies there afterwards, is not what the manifest says), PlanMismatch
    (another bank is there), InputError (other files are there; the repository is public, or private, against `public`), RemoteError.
    """
    config = config or PushConfig()
    address = parse_address(repo)
    opened = open_bank(bank)
    require_separate([("REPO", address.local)], [("BANK", opened)])
    work = _Push(opened, _place(address, config), config, progress)
    there = work.place.listing() if (exists := work.place.visit(public=config.public)) else {}
    ours = work.is_ours(there)  # before anything takes long
    checks = _proved(opened, progress)
    if not exists:
        work.place.create(public=config.public)
    if not ours:
        there = work.clear(there)
    sent = work.send_files(there)
    sent += work.send_commit(there, checks, anew=bool(sent))
    return {
        "address": work.place.shown,
        **work.place.facts(),
        "rows": len(opened),
        "plan_digest": opened.plan_digest,
        "sent": [file.name for file in sent],
        "bytes_sent": sum(file.size for file in sent),
        "kept": len({file.name for file in work.files} - {file.name for file in sent}),
        "checks": [asdict(check) for check in checks],
    }


def _place(address: Address, config: PushConfig) -> PushPlace:
    if address.revision:
        raise InputError(f"{address.shown}: a push goes to the main branch. Leave @{address.revision} out.")
    if address.repo:
        refuse_unread("a repository on the hub, which vouches for hashes", config, ["read_back"])
        from arrowbank.share.destinations import HubPlace

        return HubPlace(address)
    if address.scheme in WEB:
        raise InputError(
            f"{address.shown}: a web address can be read only. Push to the store behind it, as in s3://bucket/prefix."
        )
    from arrowbank.share.destinations import ObjectPlace

    return ObjectPlace(address, read_back=config.read_back)


def _proved(bank: Bank, progress: Progress) -> list[Check]:
    """The bank's proof. CorruptBank where a check fails."""
    checks = verify(bank.folder, progress=progress)
    wrong = [f"{check.name}: {check.detail}" for check in checks if not check.ok]
    if wrong:
        raise CorruptBank(f"{bank.folder}: not pushed, because it fails its own proof. {' · '.join(wrong)}")
    known = set(bank.entries) | {MANIFEST, STATE, CARD, PLOT, LOG, JOURNAL}
    beside = sorted(path.name for path in bank.folder.iterdir() if path.name not in known and not path.name.startswith("."))
    if beside:
        progress.message(f"{bank.folder}: not the bank's, and not pushed: {', '.join(beside)}")
    if paths := sorted(set(_paths(bank.manifest))):
        progress.message(f"{MANIFEST} goes as it is, and names places of this machine: {', '.join(paths)}")
    return checks


def _paths(value: Any) -> Iterator[str]:
    """The absolute paths among the strings of a JSON value."""
    if isinstance(value, str) and value.startswith("/"):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _paths(inner)


def _shards(there: Iterable[str]) -> list[str]:
    """The names at a place that its card would give to `load_dataset`. A listing is as little trusted as a manifest."""
    return [name for name in fnmatch.filter(there, SHARDS) if not name_fault(name)]


class _Push:
    """A push under way. `there` is in every method what the place lists at the begin."""

    def __init__(self, bank: Bank, place: PushPlace, config: PushConfig, progress: Progress) -> None:
        self.bank, self.place, self.config, self.progress = bank, place, config, progress
        self.manifest, self.state = (Outgoing.of_bytes(name, (bank.folder / name).read_bytes()) for name in (MANIFEST, STATE))
        self.body = [Outgoing.of_entry(bank.folder, entry) for entry in bank.manifest.files]
        self.files = [self.manifest, *self.body, self.state]  # what else lies in the folder stays there

    def is_ours(self, there: Mapping[str, StoredFile]) -> bool:
        """Whether what lies there is nothing, or this bank. InputError, PlanMismatch where it is not and may not be replaced."""
        ours = {file.name for file in self.files}
        strays = sorted(set(_shards(there)) - ours)
        if MANIFEST not in there:
            if not self.place.hub:  # such places keep no older version of a card that somebody wrote
                ours |= {CARD, PLOT}
            if taken := strays or sorted(ours & set(there)):
                raise InputError(
                    f"{self.place.shown}: holds {taken[0]}, and no {MANIFEST} that says whose it is. Give another, or a new, place."
                )
            return True
        same = there[MANIFEST].size == self.manifest.size and self.place.read(MANIFEST) == self.manifest.contents()
        if same and not strays:
            return True
        if not self.config.restart:
            what = f"a shard {strays[0]} that is not this bank's" if same else "another bank, or this one from another run"
            raise PlanMismatch(
                f"{self.place.shown}: holds {what}. Give --restart to replace what is there, or another name to keep it."
            )
        found = parsed_manifest(self.place.read(MANIFEST), self.place.shown)["kind"]
        if found != self.bank.kind:
            raise PlanMismatch(
                f"{self.place.shown}: holds a bank of {found}, this is one of {self.bank.kind}. --restart replaces only a bank of the "
                "same kind. Give another name, or remove that bank yourself.",
                {"kind": (found, self.bank.kind)},
            )
        return False

    def clear(self, there: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
        """Take the other bank away: what commits it first, what names it last. What is left there."""
        manifest = parsed_manifest(read_remote_manifest(self.place, there), self.place.shown)
        listed = [entry["name"] for entry in manifest["files"]]
        names = [name for name in dict.fromkeys([STATE, *listed, *_shards(there), CARD, PLOT, MANIFEST]) if name in there]
        self.place.remove(names, "Make room for another bank")
        return {name: stored for name, stored in there.items() if name not in names}

    def send_files(self, there: Mapping[str, StoredFile]) -> list[Outgoing]:
        """Send manifest, shards and the rest, as far as they are not there or not right, and compare; what was sent."""
        missing = self._wrong([self.manifest, *self.body], there)
        if not missing:
            return []
        if STATE in there:
            self.place.remove([STATE], "Not whole until every file is right")
        with self.progress.phase("push", sum(file.size for file in missing), unit="bytes") as phase:
            if MANIFEST not in there:
                unfinished = [Outgoing.of_bytes(CARD, unfinished_card(self.place.shown))] if self.place.hub else []
                self.place.send([self.manifest, *unfinished], "Begin to push a bank", lambda _: None)
                phase.advance(self.manifest.size)
            rest = [file for file in missing if file is not self.manifest or MANIFEST in there]
            self.place.send(rest, "Add files of the bank", phase.advance)
        self._require_right(missing)
        return missing

    def send_commit(self, there: Mapping[str, StoredFile], checks: Sequence[Check], *, anew: bool) -> list[Outgoing]:
        """Send card, plot, and last the file whose presence is the commit; what was sent."""
        files: list[Outgoing] = []
        if self._keeps_card(there):
            self.progress.message(
                f"{self.place.shown}: the card there is kept, it may have been edited; --restart makes it anew"
            )
        else:
            card = pushed_card(self.bank, self.place.shown, checks, license=self.config.license)
            files += self._wrong(card, there)
        if anew or self._wrong([self.state], there):
            files.append(self.state)
        if self.place.hub:  # in one commit
            self.place.send(files, "The bank is whole", lambda _: None)
        else:
            for file in files:
                self.place.send([file], "", lambda _: None)
        self._require_right(files)
        return files

    def _keeps_card(self, there: Mapping[str, StoredFile]) -> bool:
        """Whether a whole card of this bank is there: people edit cards."""
        if self.config.restart or CARD not in there or MANIFEST not in there:
            return False
        unfinished = unfinished_card(self.place.shown)
        return there[CARD].size != len(unfinished) or self.place.read(CARD) != unfinished

    def _wrong(self, files: Sequence[Outgoing], there: Mapping[str, StoredFile]) -> list[Outgoing]:
        """The files that are not there, or not right, in their order."""
        present = [file for file in files if file.name in there]
        right: set[str] = set()

        def look(file: Outgoing) -> tuple[Outgoing, bool]:
            return file, self.place.is_right(file, there[file.name])

        shown = self.progress if present and not self.place.hub else SILENT  # the hub says hashes; other places are read back
        with shown.phase("compare", sum(file.size for file in present), unit="bytes") as phase:

            def note(found: tuple[Outgoing, bool]) -> None:
                file, good = found
                right.update([file.name] if good else [])
                phase.advance(file.size)

            side_by_side(look, present, note)
        return [file for file in files if file.name not in right]

    def _require_right(self, files: Sequence[Outgoing]) -> None:
        """CorruptBank for the first of `files` that does not lie there as it should."""
        there = self.place.listing()
        for file in self._wrong(files, there):
            raise wrong_file(self.place.shown, file.entry, there.get(file.name))
