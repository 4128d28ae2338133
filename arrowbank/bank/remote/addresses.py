"""Addresses of banks that are stored elsewhere.

org/name                          a dataset repository on the Hugging Face Hub (only where an address is asked for: push and pull)
hf://datasets/org/name@revision   the same, with a branch, tag or commit
s3://bucket/prefix                any folder that fsspec reaches: s3, gs, memory, file …
https://host/path?query           the same, read only; the query (a signature, a token) goes with every file

User, password and query are taken out once, here: what is left of an address may be shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from arrowbank import secrets
from arrowbank.errors import InputError
from arrowbank.secrets import HIDDEN, Secret

HUB = "hf://"
WEB = ("http", "https")
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,3}")
_STORE = re.compile("[A-Za-z][A-Za-z0-9+.-]+")
_LOCAL = ("file", "local")  # a path, whatever characters it has
_BUCKETS = ("s3", "s3a", "gs", "gcs")  # where no port can be
_NO_LOGIN = ("abfs", "abfss", "wasb", "wasbs", "github")  # a container or a repository stands before their @
_SERVERS = (*WEB, "ftp", "sftp", "ssh", "smb")  # a host stands ahead of their path
_SECRET_FIELD = re.compile("token|sig|secret|key|pass|auth|cred", re.IGNORECASE)
_LONG_VALUE = 12  # of another field of a query: long enough to be a secret, too long for an ordinary word
ELSEWHERE = "leave both out, and set them where the store's client looks for them."
NOTHING = Secret(None)


@dataclass(frozen=True, kw_only=True)
class Address:
    """`repo` with `revision` (None: its main branch) on the hub, or the fsspec `url` of a folder; `shown` is for people.

    `login` (user and password, as they are sent) and `query` are kept apart; a copy that went through a pickle has neither.
    """

    repo: str = ""
    revision: str | None = None
    url: str = ""
    login: Secret = NOTHING
    query: Secret = NOTHING

    @property
    def scheme(self) -> str:
        """In lower case; empty for a repository."""
        return self.url.partition("://")[0].lower()

    @property
    def shown(self) -> str:
        """The address as it may be printed: without user and password, and with *** for a query."""
        if self.url:
            return self.url + (f"?{HIDDEN}" if self.query.reveal() else "")
        return f"{HUB}datasets/{self.repo}" + (f"@{self.revision}" if self.revision else "")

    @property
    def local(self) -> Path | None:
        """The folder on this machine that a file:// address means."""
        return Path(self.url.partition("://")[2]) if self.scheme in _LOCAL else None


class Login(NamedTuple):
    """As it is written in an address."""

    user: str
    password: str


def is_address(value: object) -> bool:
    """Whether `value` is an address, not a folder of this machine."""
    return isinstance(value, str) and "://" in value


def parse_address(value: str, revision: str | None = None) -> Address:
    """The address that `value` is. InputError where it is none, or names a revision and `revision` another."""
    know_secrets_of(value if is_address(value) else f"a://{value}")
    if "\0" in value:
        raise InputError("the address has a null character in it, which no name can have. Leave it out.")
    if not is_address(value):
        if not _REPO.fullmatch(value) or value.startswith((".", "/")):
            raise InputError(
                f"{value!r}: expected OWNER/NAME of a dataset repository, or an address as in s3://bucket/prefix. "
                "A folder of this machine is file:///its/path."
            )
        return Address(repo=value, revision=revision)
    if value.startswith(HUB):
        return _on_the_hub(value, revision)
    address = _elsewhere(value)
    if revision is not None:
        raise InputError(f"{address.shown}: has no revisions; leave --revision {revision} out.")
    return address


def _on_the_hub(value: str, revision: str | None) -> Address:
    if _login_in(value)[0]:
        raise InputError(f"{HUB}…: the hub takes no user or password in an address. `hf auth login`, or set HF_TOKEN.")
    place, _, named = value.removeprefix(HUB).partition("@")
    repo = place.removeprefix("datasets/")
    if repo == place or not _REPO.fullmatch(repo):
        raise InputError(f"{value}: expected hf://datasets/OWNER/NAME, or hf://datasets/OWNER/NAME@REVISION.")
    if revision and named and named != revision:
        raise InputError(f"{value}: names the revision {named}, and --revision {revision}. Give one of them.")
    return Address(repo=repo, revision=named or revision)


def _elsewhere(value: str) -> Address:
    login, place, clear = _login_in(value)
    scheme, _, path = place.partition("://")
    if not clear:
        raise InputError(
            f"{scheme}://…: where user and password end is not clear, for an @, /, ? or # in them. Write these characters as %40, %2F, "
            f"%3F, %23, or {ELSEWHERE}"
        )
    if not _STORE.fullmatch(scheme):  # fsspec would take it for a path of this machine
        raise InputError(f"{scheme}://{path}: {scheme!r} is no kind of store. Give an address as in s3://bucket/prefix.")
    query = ""
    if scheme.lower() not in _LOCAL:
        path, _, query = path.partition("?")
    if query and scheme.lower() not in WEB:
        raise InputError(f"{scheme}://{path}: a folder has no query there. Leave out what follows the question mark.")
    if scheme.lower() in WEB and "#" in path + query:
        raise InputError(f"{scheme}://{path.partition('#')[0]}: a folder has no fragment. Leave out what follows the #.")
    if login and scheme.lower() in _LOCAL + _BUCKETS[2:]:
        raise InputError(f"{scheme}://{path}: such addresses take no user and password: {ELSEWHERE}")
    if not path.strip("/"):  # without its slashes it would be a folder of this machine
        raise InputError(f"{scheme}://{path}: names no folder. Give an address as in s3://bucket/prefix.")
    if scheme.lower() in _SERVERS and _host_of(path)[:1] in ("", ":"):
        raise InputError(f"{scheme}://{path}: names no host. Give an address as in {scheme}://host/folder.")
    sent = (unquote(login.user), unquote(login.password)) if login else None
    return Address(url=f"{scheme}://{path.rstrip('/')}", login=Secret(sent), query=Secret(query or None))


def _login_in(value: str) -> tuple[Login | None, str, bool]:
    """User and password in an address, the address without them, and whether they can be read in one way only.

    They end at the last @ ahead of the path. People also write passwords with /, ? or # as they are: then at the only @ there is,
    where what is ahead of it is no host with a port.
    """
    scheme, _, rest = value.partition("://")
    name = scheme.lower()
    if name in _LOCAL:
        return None, value, True
    before, at, _ = _host_of(rest).rpartition("@")
    if not at:
        if "@" not in rest or _begins_with_host(rest, name):
            return None, value, True
        before = rest.rpartition("@")[0]
    user, colon, password = before.partition(":")
    after = rest[len(before) + 1 :]
    is_plain = not colon and _begins_with_host(after, name)
    if name == "github" or (name in _NO_LOGIN and is_plain):
        return None, value, True
    clear = "@" not in (after if at else before) or (bool(user) and is_plain)
    return Login(user, password), f"{scheme}://{after}", clear


def _host_of(rest: str) -> str:
    """What is ahead of path, query and fragment."""
    return re.split("[/?#]", rest, maxsplit=1)[0]


def _begins_with_host(rest: str, scheme: str) -> bool:
    """Whether `rest` reads as a host, with a port or without. A port is never ahead of a fragment, for a folder has none."""
    host, colon, port = _host_of(rest).partition(":")
    is_port = bool(host) and scheme not in _BUCKETS and port.isdecimal()
    return not colon or (is_port and not rest.startswith(f"{host}:{port}#"))


def know_secrets_of(text: str) -> None:
    """Enter the secrets of all addresses in `text`, in every way in which they can be read, so that no message shows them."""
    pieces = re.split(rf"(?<![A-Za-z0-9])(?={_SCHEME.pattern})", text)[1:]
    for piece in {*pieces, "".join(pieces)}:  # what looks like another address may be in the user or password of the first
        scheme, _, rest = piece.partition(":")
        rest = rest.lstrip("/")
        if scheme.lower() in _LOCAL:
            continue
        if query := rest.partition("?")[2]:
            secrets.know(query, *(value for name, value in parse_qsl(query) if _may_be_secret(name, value)))
        if _login_in(f"{scheme}://{rest}")[0]:
            for at in re.finditer("@", rest):
                user, colon, password = rest[: at.start()].partition(":")
                secrets.know_login(user, password) if colon else secrets.know(user)


def _may_be_secret(name: str, value: str) -> bool:
    """Of a field of a query: whether its name says so, or it is too long for an ordinary word."""
    return bool(_SECRET_FIELD.search(name)) or (len(value) >= _LONG_VALUE and not value.isdecimal())
