"""The site: every page is followed as a reader would, and every statement that can be checked against the program is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import pages, tiny


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models under the names that the pages use."""
    folder = tmp_path_factory.mktemp("hub")
    tiny.save_qwen3(folder / "Qwen" / "Qwen3-4B")
    return folder


def no_stand_ins(folder: Path) -> dict[str, str]:
    return {}


# what stands in for the big things of a page: files that are made in the folder, and texts that are replaced
STAND_INS: dict[str, Callable[[Path], dict[str, str]]] = {
    "index.md": no_stand_ins,
    "feature-bank.md": no_stand_ins,
}


@pytest.mark.parametrize("page", STAND_INS)
def test_a_page_can_be_followed(
    page: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for owner in hub.iterdir():
        (tmp_path / owner.name).symlink_to(owner)
    pages.read_page(page, capsys, STAND_INS[page](tmp_path))
