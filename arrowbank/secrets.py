"""The secrets that this process knows, kept out of every text that leaves it.

    know(value)       a secret of an address, in every spelling in which a library may repeat it
    hide(text)        `text` with *** for each known secret, and for those in the environment
    redact(text)      the same, and for what stands where addresses have users, passwords and queries
    hide_output()     standard output and error go through `hide` from now on

A secret in a file would stay there: what is to be stored is refused where it `shows_secrets`, not changed.
"""

from __future__ import annotations

import base64
import html
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, TextIO
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
SHORTEST = 4  # shorter ones are parts of ordinary words: they are hidden inside addresses only
ANYWHERE = 8  # shorter ones are hidden where they stand alone

# names of environment variables whose values are secrets; a value shorter than ANYWHERE is a placeholder
_NAMES = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|(?:ACCESS|API|ACCOUNT|STORAGE|PRIVATE|SECRET)_KEY(?:_ID)?"
    r"|CONNECTION_STRING|SAS|SAS_TOKEN)$",
    re.IGNORECASE,
)
# What may stand before the @ of an address: anything up to the last @ ahead of a slash, or, where a password follows a colon (no port),
# anything up to an @. One slash is left of an address that went through a Path.
_CREDENTIALS = re.compile(
    r"""(?<=[A-Za-z0-9]:/)(/?)(?:[^/\s@:'"]*:(?!\d*(?:[/?\#'"),;]|\s|$))[^\s@][^@\n]*@(?:\S*@)?)?(?:[^/\s@]*@)*""", re.VERBOSE
)
_QUERY = re.compile(r"""([A-Za-z0-9]:/{1,2}[^\s?'"]*)\?[^\s'"]+""")

_known: set[str] = set()
_lock = threading.Lock()


class Secret:
    """A value that nothing shows: repr, str and format give ***, a copy in a pickle is empty."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def reveal(self) -> Any:
        return self._value

    def __repr__(self) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.reveal() == other.reveal()

    def __hash__(self) -> int:
        return hash(Secret)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> tuple[type[Secret], tuple[None]]:
        return Secret, (None,)


def know(*values: str | None) -> None:
    """Enter secrets. Those shorter than SHORTEST cannot be told from ordinary text."""
    spelled = {form for value in values if value for form in _spellings(value) if len(form) >= SHORTEST}
    with _lock:
        new = spelled - _known
        _known.update(new)
    if new:
        _hide_in_logs()


def know_login(user: str, password: str) -> None:
    """Enter a user's password, both together, and what HTTP sends for them. A short user name is an ordinary word."""
    know(password, user if len(user) >= ANYWHERE else None)
    for form in {user, unquote(user)}:
        for secret in {password, unquote(password)}:
            know(f"{form}:{secret}", base64.b64encode(f"{form}:{secret}".encode("utf-8", "surrogatepass")).decode())


def know_hub_token() -> None:
    """Enter the token that the hub's client finds, which may be in a file of its own."""
    from huggingface_hub import get_token

    know(get_token())


@contextmanager
def forgetting() -> Iterator[None]:
    """Forget at the end what is learned in this block: its addresses are no longer in use, and words in them may be ordinary ones."""
    with _lock:
        before = set(_known)
    try:
        yield
    finally:
        with _lock:
            _known.intersection_update(before)


def hide(text: str) -> str:
    """`text` with *** in place of every secret that is known."""
    pattern = _pattern(frozenset(_known) | _of_the_environment())
    return pattern.sub(HIDDEN, text) if pattern else text


def redact(text: str) -> str:
    """`hide`, then *** for the query of every address in `text`; users and passwords are left out of addresses.

    Known secrets first: with spaces or slashes in them they would be cut.
    """
    return _QUERY.sub(rf"\1?{HIDDEN}", _CREDENTIALS.sub(r"\1", hide(text)))


def shows_secrets(text: str) -> bool:
    """Whether a known secret is in `text`."""
    return hide(text) != text


def hide_output() -> None:
    """Let standard output and error go through `hide` from now on, so that warnings, logs and tracebacks do too."""
    sys.stdout, sys.stderr = (_Hiding(stream) if stream else stream for stream in (sys.stdout, sys.stderr))


@contextmanager
def hiding_output() -> Iterator[None]:
    """`hide_output` in this block."""
    before = sys.stdout, sys.stderr
    hide_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Hiding:
    """A text stream that hides known secrets in what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(hide(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _hide_in_logs() -> None:
    """Have every record of `logging` hide what is known by then: libraries log addresses, headers and signatures."""
    make = logging.getLogRecordFactory()
    if getattr(make, "hides", False):
        return

    def make_hiding(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        said = record.getMessage()
        if shows_secrets(said):
            record.msg, record.args = hide(said), ()
        if record.exc_info and record.exc_info[0]:
            record.exc_text = hide(logging.Formatter().formatException(record.exc_info))
        return record

    make_hiding.hides = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_hiding)


@lru_cache(maxsize=256)
def _spellings(value: str) -> frozenset[str]:
    """`value` as libraries repeat it: decoded, encoded, quoted, escaped, as a path, and the pieces that a path is cut into."""
    plain = {value, unquote(value), unquote_plus(value)}
    forms = set(plain)
    for form in plain:
        encoded = [quote(form, safe=safe, errors="replace") for safe in ("", "/", "/:", ":")] + [
            quote_plus(form, errors="replace")
        ]
        forms.update(encoded, (re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), code) for code in encoded))
        forms.update(text[1:-1] for text in (repr(form), ascii(form), json.dumps(form), json.dumps(form, ensure_ascii=False)))
        forms.update((html.escape(form), form.replace("'", "'\"'\"'"), str(PurePosixPath(form))))
        if re.search(r"[/?#@]", form):
            forms.update(piece for piece in re.split(r"[/?#@]", form) if len(piece) >= SHORTEST)
    return frozenset(forms)


def _of_the_environment() -> frozenset[str]:
    found: set[str] = set()
    for name, value in os.environ.items():
        if len(value) >= ANYWHERE and _NAMES.search(name):
            found |= _spellings(value)
        elif "@" in value and name.lower().endswith("_proxy"):
            password = value.rpartition("@")[0].rpartition(":")[2]
            found.update(form for form in _spellings(password) if len(form) >= SHORTEST)
    return frozenset(found)


@lru_cache(maxsize=8)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """What finds them all, the longest first. None where there is none."""
    return re.compile("|".join(map(_finding, sorted(secrets, key=len, reverse=True)))) if secrets else None


def _finding(secret: str) -> str:
    """The pattern of one: a short one, or a number, is no part of a longer word."""
    if len(secret) >= ANYWHERE and not secret.isdecimal():
        return re.escape(secret)
    before = r"(?<![0-9A-Za-z])" if secret[0].isalnum() else ""
    after = r"(?![0-9A-Za-z])" if secret[-1].isalnum() else ""
    return before + re.escape(secret) + after
