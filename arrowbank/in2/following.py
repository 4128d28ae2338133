"""The Arrow shards of a build as they are finished, for threads that make more of them while others are still being made."""

from __future__ import annotations

import threading
from pathlib import Path

from arrowbank.bank import BankWriter, Receipt
from arrowbank.bank.manifest import shard_name
from arrowbank.errors import ArrowbankError


class Abandoned(ArrowbankError):
    """The build has failed elsewhere: that error is the one to read."""


class FollowedWriter(BankWriter):
    """A writer whose finished shards can be waited for."""

    changed: threading.Condition
    abandoned = False

    def __enter__(self) -> FollowedWriter:
        self.changed = threading.Condition()
        super().__enter__()
        return self

    def accept(self, receipt: Receipt) -> Receipt:
        with self.changed:
            accepted = super().accept(receipt)
            self.changed.notify_all()
        return accepted

    def abandon(self) -> None:
        """Let those who wait go: there will be no more shards."""
        with self.changed:
            self.abandoned = True
            self.changed.notify_all()

    def wait_for(self, index: int) -> Path:
        """The file of shard `index`, once it is finished. Raises Abandoned where it never will be."""
        name = shard_name(index)
        with self.changed:
            self.changed.wait_for(lambda: name in self.receipts or self.abandoned)
            if name not in self.receipts:
                raise Abandoned(f"{self.folder}: the build was given up.")
        return self.folder / name

    def wait_for_all(self, shards: int) -> None:
        """Wait until `shards` shards are finished: only then may a file that is none of them have its receipt."""
        for index in range(shards):
            self.wait_for(index)
