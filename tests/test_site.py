"""The site: every page is followed as a reader would, and every statement that can be checked against the program is."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import arrowbank
from arrowbank import (
    CaptureConfig,
    HealConfig,
    ModelConfig,
    TrunkConfig,
    TrunkData,
    build_trunk,
    capture,
    heal_draft,
    open_bank,
)
from arrowbank.cli import GROUPS, VERBS, app
from arrowbank.formats.registry import EVERY_FORMAT
from docs import pages_api, pages_cli
from tests import arms, docpages, tiny


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models under the names that the pages use."""
    folder = tmp_path_factory.mktemp("hub")
    tiny.save_qwen3(folder / "Qwen" / "Qwen3-4B")
    tiny.save_qwen3(folder / "Qwen" / "Qwen3-8B", layers=36, hidden_size=16, chat_template=tiny.CHAT_TEMPLATE)
    return folder


def no_stand_ins(folder: Path) -> dict[str, str]:
    return {}


def a_dump(folder: Path) -> dict[str, str]:
    """A dump of what the small target itself computes at layers 1, 17 and 32."""
    ids = [{"input_ids": [(7 * row + at) % 400 for at in range(12 + row)]} for row in range(4)]
    (folder / "ids.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ids))
    model = ModelConfig(model="Qwen/Qwen3-8B", device="cpu", dtype="bfloat16")
    config = CaptureConfig(model=model, data=folder / "ids.jsonl", target_layer_ids=(1, 17, 32), min_loss_tokens=0)
    capture(config, folder / "computed")
    (folder / "dump").mkdir()
    lines = []
    for row, sample in enumerate(open_bank(folder / "computed").to_torch()):
        names = ("input_ids", "target_hidden_states", "target_last_hidden_states")
        save_file({name: sample[name].contiguous() for name in names}, folder / "dump" / f"sample-{row:04d}.safetensors")
        lines.append(json.dumps({"file": f"sample-{row:04d}.safetensors"}) + "\n")
    (folder / "dump" / "index.jsonl").write_text("".join(lines))
    return {"targets capture --model": "targets capture --device cpu --dtype bfloat16 --min-loss-tokens 4 --model"}


def fillers(folder: Path) -> dict[str, str]:
    for number, name in enumerate(("train_0.bin", "train_1.bin")):
        arms.save_filler(folder / name, tokens=40_000, vocab=1000, seed=number)
    arms.save_filler(folder / "val_0.bin", tokens=20_000, vocab=500, seed=2)
    (folder / "runs").mkdir()
    for arm in ("arm_b", "arm_c"):
        (folder / "runs" / arm).symlink_to(folder / "Qwen" / "Qwen3-4B")
    shorter = "in2 probes --length 256 --vocab 500 --alphabet 100"
    return {"--examples 6000": "--examples 8", "--blocks 20": "--blocks 2", "in2 probes --length 16384": shorter}


def a_draft(folder: Path) -> dict[str, str]:
    """A small model with an MTP draft, and texts for it: some are what the model itself would say, which a draft can learn."""
    bare = tiny.save_qwen3(folder / "Bare", layers=18, hidden_size=16)
    weights = load_file(bare / "model.safetensors")
    for name in weights:  # blocks that hardly do more than pass a token on: the next one is a rule that a draft can learn
        weights[name] *= 0.02 if ".o_proj." in name or ".down_proj." in name else 1
    save_file(weights, bare / "model.safetensors", {"format": "pt"})
    texts = tiny.texts(200)
    (folder / "episodes.jsonl").write_text("".join(json.dumps({"query": text}) + "\n" for text in texts))
    rows = said_by(bare, count=60, tokens=64)
    (folder / "chats.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    data = (TrunkData("text", folder / "chats.jsonl", 700),)
    build_trunk(
        TrunkConfig(model=ModelConfig(model=str(bare)), sources=data, window=32, topk=8, last_hidden_norm="pre"),
        folder / "first",
    )
    config = HealConfig(model=ModelConfig(model=str(bare)), init=True, epochs=0.1)
    heal_draft(config, folder / "first", folder / "Org" / "Model")
    heal = {"heal --trunk trunk": "heal --lr 3e-3 --eval-every 60 --trunk trunk"}  # enough to be better than before
    return {"trunk build": "trunk build --window 64 --tokens 1500", "@100000": "@1000", **heal}


def said_by(model: Path, *, count: int, tokens: int) -> list[list[int]]:
    """What the model goes on to say after a token, but for every eighth token."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 50, (count, 1), generator=random)
    with torch.inference_mode():
        for _ in range(tokens - 1):
            best = loaded(ids, use_cache=False).logits[:, -1].argmax(-1)
            other = torch.randint(2, 50, (count,), generator=random)
            ids = torch.cat([ids, torch.where(torch.rand(count, generator=random) < 0.875, best, other)[:, None]], 1)
    rows: list[list[int]] = ids.tolist()
    return rows


def a_store(folder: Path) -> dict[str, str]:
    return {"/tmp/store": str(folder / "store")}


def a_small_encoder(folder: Path) -> dict[str, str]:
    tiny.save_bert(folder / "minilm")
    return {}


# what stands in for the big things of a page: files that are made in the folder, and texts that are replaced
STAND_INS: dict[str, Callable[[Path], dict[str, str]]] = {
    "index.md": no_stand_ins,
    "sources.md": no_stand_ins,
    "feature-bank.md": no_stand_ins,
    "target-bank.md": a_dump,
    "in2-arms.md": fillers,
    "trunk-and-heal.md": a_draft,
    "recipes.md": a_small_encoder,
    "scaling.md": no_stand_ins,
    "comparison.md": no_stand_ins,
    "looking.md": no_stand_ins,
    "sharing.md": a_store,
}


@pytest.mark.slow
@pytest.mark.parametrize("page", STAND_INS)
def test_a_page_can_be_followed(
    page: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARROWBANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for owner in hub.iterdir():
        (tmp_path / owner.name).symlink_to(owner)
    docpages.read_page(page, capsys, STAND_INS[page](tmp_path))


def test_every_page_is_followed_or_has_nothing_to_follow() -> None:
    for path in docpages.DOCS.glob("*.md"):
        if path.name not in (*STAND_INS, "errors.md", "in2-worked-example.md"):  # these have tests of their own
            assert not list(docpages.blocks(path.name)), f"{path.name} has blocks of code that nobody runs"


def test_every_format_of_export_is_in_a_table() -> None:
    tables = "".join(
        (docpages.DOCS / page).read_text(encoding="utf-8") for page in ("feature-bank.md", "target-bank.md", "in2-arms.md")
    )
    for name in EVERY_FORMAT:
        assert f"\n| `{name}` |" in tables


def test_every_verb_has_a_page() -> None:
    made = pages_cli.pages()
    words = [verb.__name__ for verbs in VERBS.values() for verb in verbs]
    words += [f"{group} {name}" for group, (_, members) in GROUPS.items() for name in members]
    for one in words:
        page = made[pages_cli.page_name(one)]
        assert page.startswith(f"# `arrowbank {one}`\n")
        assert f"[`arrowbank {one}`]({pages_cli.page_name(one)})" in made["index.md"]
        command: Any = app
        for word in one.split():
            command = command.commands[word]
        for option in command.params:
            if not getattr(option, "hidden", False) and option.name not in pages_cli.COMMON and option.opts[0].startswith("-"):
                assert re.search(rf"^\| `{option.opts[0]}[ `]", page, flags=re.MULTILINE), f"{one}: {option.opts[0]}"
        assert f"\narrowbank {one} " in page.partition("For example:")[2], f"{one} has no example"
    assert len(made) == len(words) + 1


def test_the_examples_of_the_verbs_are_commands() -> None:
    for name, page in pages_cli.pages().items():
        for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL):
            assert docpages.parse(block) == 1, name


def test_every_public_name_is_on_the_page_of_python() -> None:
    page = pages_api.page()
    for name in arrowbank.__all__:
        assert f"\n### `{name}` {{ #{name} }}\n" in page
    assert "0x" not in page  # nothing's address in memory: the page is the same each time


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="the extra `docs` is not installed")
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=docpages.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)"|<link[^>]* href="(https?:[^"]+)"', text)
        assert not fetched, f"{page.name} fetches {fetched}"
        assert not re.search(r"<!-- (include|scripts|extras|benchmarks)\b|\{\{", text), (
            f"{page.name} has a mark that nothing replaced"
        )
