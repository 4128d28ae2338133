"""A folder behind plain HTTP: read only, and no listing is relied on. What the manifest names is asked for by name.

Servers differ: some list folders, some do not, some send no sizes, some know no ranges. The query of the address goes with every file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from arrowbank.bank.manifest import CARD, MANIFEST, STATE
from arrowbank.bank.refusals import explained
from arrowbank.bank.remote.fetch import PLOT, parsed_manifest
from arrowbank.bank.remote.objects import BLOCK, ObjectStore, object_errors
from arrowbank.bank.remote.stores import Report, StoredFile, side_by_side

NOT_THERE = (404, 410)


class WebStore(ObjectStore):
    """The folder at an http or https address."""

    def path(self, name: str) -> str:
        query = self.address.query.reveal()
        return f"{self.root}/{name}" + (f"?{query}" if query else "")

    def listing(self) -> dict[str, StoredFile]:
        _, manifest = self._ask(MANIFEST)
        if manifest is None:
            return {}
        listed = [entry["name"] for entry in parsed_manifest(self.read(MANIFEST), self.shown)["files"]]
        found: dict[str, StoredFile | None] = {MANIFEST: manifest}
        side_by_side(self._ask, dict.fromkeys([*listed, STATE, CARD, PLOT]), lambda asked: found.update([asked]))
        return {name: stored for name, stored in found.items() if stored}

    def _ask(self, name: str) -> tuple[str, StoredFile | None]:
        """The file as the server describes it. None where there is none."""
        with object_errors(f"{self.shown}/{name}"):
            try:
                facts: Mapping[str, object] = self.fs.info(self.path(name))
            except FileNotFoundError as error:  # which is what it says of every refusal
                if error.__cause__ is None or getattr(error.__cause__, "status", 0) in NOT_THERE:
                    return name, None
                raise error.__cause__ from None
        size = facts.get("size")
        return name, StoredFile(size=size if isinstance(size, int) else None)

    def fetch(self, name: str, size: int, work: Path, report: Report) -> Path:
        """Bring a file as one stream: a server may take a range for the whole file."""
        place = work / name
        with explained(place), place.open("wb") as file:
            for data in self._blocks(name, size + 1):
                report(file.write(data))
        return place

    def _blocks(self, name: str, most: int) -> Iterator[bytes]:
        """The file's first `most` bytes, some at a time: a server may send what has no end."""
        with object_errors(f"{self.shown}/{name}"), self.fs.open(self.path(name), "rb", block_size=0) as stream:
            while most > 0 and (data := stream.read(min(BLOCK, most))):
                most -= len(data)
                yield data
