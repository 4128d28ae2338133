"""What an audit found, and its file: `arrowbank audit --out` writes it, `arrowbank report --audit` shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from arrowbank.bank.files import json_bytes, publish_alone, refuse_address, refuse_other_file
from arrowbank.bank.places import Named, require_separate
from arrowbank.bank.refusals import explained
from arrowbank.errors import InputError


@dataclass(frozen=True)
class AuditRow:
    """The different texts of a kind in a split, and how many of them are shared with the split `against`, exactly and nearly."""

    kind: str
    source: str
    against: str
    texts: int
    exact: int
    near: int


@dataclass(frozen=True)
class AuditExample:
    """A text of a split, and the text of the split `against` that is nearest to it."""

    text: str
    nearest: str
    cosine: float
    kind: str
    source: str
    against: str


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found: a row per kind and split, and the near pairs that are most alike, at most 50. `texts` is how many
    different texts each split has, the one audited against included (empty in files of earlier versions)."""

    threshold: float
    max_shared: int | None
    rows: list[AuditRow]
    examples: list[AuditExample]
    texts: dict[str, int] = field(default_factory=dict)

    @property
    def exact(self) -> int:
        return sum(row.exact for row in self.rows)

    @property
    def near(self) -> int:
        return sum(row.near for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether there was something to look at on either side, and no more is shared than may be."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Why the audit is not passed, in words."""
        said = [f"{name}: no text was read, so nothing was audited" for name, count in self.texts.items() if not count]
        if not self.texts and not self.rows:
            said.append("no text was audited")
        if self.max_shared is not None and self.exact + self.near > self.max_shared:
            shared = f"{self.exact:,} texts are shared exactly and {self.near:,} nearly"
            said.append(f"{shared}: more than --max-shared {self.max_shared}")
        return said


def audit_file(path: str | Path, inputs: Iterable[Named] = ()) -> Path:
    """The file that an audit of `inputs` is to be written to, its folder made. InputError where none can be, or where it is an input,
    a file of a bank, or one that is no audit, before anything takes long."""
    file = Path(path)
    refuse_address(file)
    require_separate([], inputs, files=[("--out", file)])
    if file.is_dir():
        raise InputError(f"{file}: a folder, expected a file. Give one such as audit.json.")
    refuse_other_file(file, "an audit", lambda: read_audit(file))
    with explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    return file


def write_audit(audit: Audit, path: str | Path) -> None:
    """Publish `audit` as JSON. InputError, DiskFull."""
    publish_alone(audit_file(path), json_bytes(asdict(audit)))


def read_audit(path: str | Path) -> Audit:
    """The audit in a file. InputError where it cannot be read or is something else."""
    if Path(path).exists() and not Path(path).is_file():  # a named pipe would be waited for
        raise InputError(f"{path}: not a regular file. Give the file that `arrowbank audit --out FILE` wrote.")
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Audit)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}). Give the file that `arrowbank audit --out FILE` wrote."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not an audit ({error}). Give the file that `arrowbank audit --out FILE` wrote.") from None
