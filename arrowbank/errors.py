"""What can go wrong, as exceptions that a program can tell apart and a person can act on.

    ArrowbankError
    ├── InputError          a source, text, option or file given by the user is not usable
    │   └── NothingChecked  a check had nothing to look at; exit code 1
    ├── PlanMismatch        the folder holds another plan's work; names the fields that differ
    ├── IncompleteBank      the bank is not committed, or rows are missing
    ├── ContractError       the bank is whole but not the one that was expected
    ├── CorruptBank         bytes on disk are not those that were committed
    ├── BankLocked          another process writes this bank
    ├── DiskFull            not enough room, before or during a build
    ├── StorageError        the operating system refused to read or write: a failing disk, a lost server, a limit
    ├── BadVector           an encoder gave NaN, Inf or an all-zero vector
    ├── WorkerDied          a worker process ended without a result, more often than it may
    ├── RemoteError         the hub or a store refused, or could not be reached
    └── MissingDependency   an optional package is needed

Every message says what was at fault, what was found, what was expected, and what to do about it.
"""

from __future__ import annotations

from arrowbank.secrets import redact


class ArrowbankError(Exception):
    """Base of all errors that arrowbank raises on purpose. The command line prints it without a traceback."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))


class InputError(ArrowbankError):
    """A source, text, option or file given by the user is not usable."""


class NothingChecked(InputError):
    """A check had nothing to look at, so it vouches for nothing: the command line exits with 1, as for any check that failed."""

    exit_code = 1


class PlanMismatch(ArrowbankError):
    """The folder already holds work of another plan. `fields` maps each differing field to (found, wanted)."""

    def __init__(self, message: str, fields: dict[str, tuple[object, object]] | None = None) -> None:
        super().__init__(message)
        self.fields = fields or {}


class IncompleteBank(ArrowbankError):
    """The bank is not committed, or rows are missing."""


class ContractError(ArrowbankError):
    """The bank is whole but differs from what the caller expects. `field` is the first field that differs."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class CorruptBank(ArrowbankError):
    """Bytes on disk are not those that were committed."""


class BankLocked(ArrowbankError):
    """Another process writes this bank."""


class DiskFull(ArrowbankError):
    """There is not enough room on the disk, found before or during a build."""


class StorageError(ArrowbankError):
    """The operating system refused to read or write: a failing disk, a lost file server, a limit of the process."""


class BadVector(ArrowbankError):
    """An encoder gave a vector that must not be stored: NaN, Inf, or all zero."""


class WorkerDied(ArrowbankError):
    """A worker process ended without a result, more often than it may."""


class RemoteError(ArrowbankError):
    """The hub or another store refused, or could not be reached."""


class MissingDependency(ArrowbankError):
    """An optional package is needed for what was asked."""
