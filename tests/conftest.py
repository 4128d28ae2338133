"""Fixtures for every test: tiny real tokenizers and models, built once a session, and processes that die on purpose."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# No test reaches for the network, nor prints a bar; set before anything imports huggingface_hub or datasets.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

from tests import hub_server, kill, pages, tiny


@pytest.fixture(scope="session")
def bpe_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer that adds no special tokens."""
    return tiny.save_bpe_tokenizer(tmp_path_factory.mktemp("tokenizers") / "bpe")


@pytest.fixture(scope="session")
def wordpiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a WordPiece tokenizer whose post-processor adds [CLS] and [SEP]."""
    return tiny.save_wordpiece_tokenizer(tmp_path_factory.mktemp("tokenizers") / "wordpiece")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen3 decoder, D = 32, and the BPE tokenizer."""
    return tiny.save_qwen3(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Bert encoder, D = 32, and the WordPiece tokenizer."""
    return tiny.save_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="session")
def kill_at() -> Callable[..., kill.Outcome]:
    """kill_at(n, target, *args, **kwargs): the target in a process that dies at its n-th publish moment (see tests/kill.py)."""
    return kill.kill_at


@pytest.fixture(scope="session")
def kill_after() -> Callable[..., kill.Outcome]:
    """kill_after(seconds, target, *args, **kwargs): the target in a process that is killed from outside after `seconds`."""
    return kill.kill_after


@pytest.fixture(scope="session")
def tree_bytes() -> Callable[[Path | str], dict[str, str]]:
    """tree_bytes(folder): relative name → sha256 of every file but build.jsonl."""
    return kill.tree_bytes


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """A hub of this test's own, to which the real client is logged in, in this process and in those that it starts."""
    with hub_server.serving() as running:
        for name, value in running.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        from huggingface_hub import close_session, constants

        settings = {"ENDPOINT": running.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        settings["HUGGINGFACE_CO_URL_TEMPLATE"] = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        settings["HF_HUB_CACHE"] = str(tmp_path / "hf" / "hub")
        for name, setting in settings.items():
            monkeypatch.setattr(constants, name, setting)  # this process has read its environment already
        yield running
        close_session()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium, one a session. Where there is none the tests are left out, but not in CI."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not os.environ.get("CI"):
        pytest.importorskip("playwright", reason="playwright is not installed")
        if path is None:
            pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=pages.FLAGS)
        yield started
        started.close()
