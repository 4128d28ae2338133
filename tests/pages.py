"""A page in a real browser without a network: whatever it asks for or complains about is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE, DESK = (390, 844), (1280, 900)


@dataclass
class Opened:
    """A page that is open, with the requests beside its own file, and what went wrong on it."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def scrolls_sideways(self) -> bool:
        """Whether the page is wider than its window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))

    def background(self) -> str:
        return str(self.page.evaluate("getComputedStyle(document.body).backgroundColor"))


@contextmanager
def opened(browser: Any, path: Path, *, size: tuple[int, int] = DESK, dark: bool = False) -> Iterator[Opened]:
    """The page in the file `path`, open. Every request but that for the file is noted, and refused."""
    url = path.resolve().as_uri()
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light", offline=True
    )
    found = Opened(context.new_page())

    def route(route: Any) -> None:
        if route.request.url.split("#")[0] == url:
            route.continue_()
        else:
            found.requests.append(route.request.url)
            route.abort()

    context.route("**/*", route)
    found.page.on("console", lambda message: found.errors.append(message.text))
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("dialog", lambda dialog: found.errors.append(f"dialog {dialog.message}") or dialog.dismiss())
    try:
        found.page.goto(url)
        yield found
    finally:
        context.close()
