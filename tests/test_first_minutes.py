"""The first minutes: what someone sees who types `arrowbank`, mistypes an option, asks what a folder is, or interrupts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from arrowbank import ExportConfig, ImportConfig, export, import_targets
from arrowbank.cli import main
from arrowbank.cli.first import interrupted, welcome
from arrowbank.cli.help import table
from arrowbank.errors import InputError
from arrowbank.report.folders import banks_under, describe_any
from tests import arms
from tests.banks import make_texts, make_tokens
from tests.dumps import make_dump
from tests.test_cli import every_verb, run

SCREEN = 55  # lines of a tall terminal


def complete(words: str) -> list[str]:
    """What a shell is offered for the last of `words`."""
    environment = {
        **os.environ,
        "_ARROWBANK_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    code = "import sys; from arrowbank.cli import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split()


def test_no_arguments_say_what_to_do_next_and_which_banks_are_here(tmp_path: Path) -> None:
    make_texts(tmp_path / "router" / "texts")
    said = welcome(tmp_path)
    assert "arrowbank demo" in said
    assert "arrowbank --help" in said
    assert "router/texts" in said
    assert "texts, 40 rows, committed" in said


@pytest.mark.parametrize("verb", every_verb())
def test_help_fits_a_screen(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*verb.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"Usage: arrowbank {verb}")


def test_long_options_and_long_words_wrap_into_their_column() -> None:
    text = table([("Head", [("--a N", "word " * 20), ("--" + "b" * 60, "short")])], 80)
    lines = text.splitlines()
    assert max(map(len, lines[:3])) <= 80
    assert lines[2].startswith(" " * 30 + "word")
    assert lines[-1] == " " * 30 + "short"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "near"),
    [(["biuld"], "build"), (["encode", "x", "--tokenbudget", "3"], "--token-budget"), (["in2", "prob"], "probes")],
)
def test_what_is_mistyped_is_answered_with_the_near_one(argv: list[str], near: str) -> None:
    done = run(*argv)
    assert done.returncode == 2
    assert near in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_shells_are_offered_verbs_options_and_values() -> None:
    assert {"encode", "estimate", "export"} <= set(complete("arrowbank e"))
    assert "--token-budget" in complete("arrowbank encode --tok")
    assert complete("arrowbank encode --dtype b") == ["bfloat16"]
    assert complete("arrowbank in2 build --arm ") == ["a", "b", "c"]


def test_the_version_names_the_packages_that_decide_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    lines = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert {"arrowbank", "python", "torch", "transformers", "tokenizers", "datasets", "pyarrow"} <= set(lines)
    assert lines["numpy"] == np.__version__


def test_an_interrupt_tells_the_command_that_goes_on() -> None:
    said = interrupted(["build", "--source", "train=my file.jsonl", "--out", "x"])
    assert said.endswith("arrowbank build --source 'train=my file.jsonl' --out x")
    assert interrupted(["info", "x"]) == "arrowbank: interrupted."


# info of any folder


@pytest.mark.slow
def test_info_knows_what_comes_before_banks_and_after_them(tmp_path: Path, tiny_bert: Path, tiny_qwen3: Path) -> None:
    make_dump(tmp_path / "dump")
    import_targets(ImportConfig(target_model="m", target_layer_ids=(1, 11, 21)), tmp_path / "dump", tmp_path / "bank")
    for format in ("deepspec", "specforge-eagle3"):
        export(ExportConfig(format=format), tmp_path / "bank", tmp_path / format)
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "train.jsonl").write_text("{}\n")
    np.save(tmp_path / "ids.npy", np.arange(10, dtype=np.uint16))
    kinds = {
        "dump": "an inference engine's dump of hidden states",
        "bank": "targets",
        "deepspec": "a DeepSpec target cache",
        "specforge-eagle3": "an export, for its trainer",
        "episodes": "files of episodes or texts",
        "episodes/train.jsonl": "files of episodes or texts",
        "ids.npy": "token ids",
        str(tiny_bert): "a model",
        str(tiny_qwen3): "a causal language model",
    }
    for name, kind in kinds.items():
        facts = describe_any(tmp_path / name)
        assert facts["kind"] == kind
        assert facts["next"]
    assert describe_any(tiny_qwen3)["hidden_size"] == 32
    assert "targets capture" in describe_any(tiny_qwen3)["next"]
    assert "targets capture" not in describe_any(tiny_bert)["next"]


def test_info_of_a_saved_dataset_of_somebody_else(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"query": ["a"]}).save_to_disk(tmp_path / "saved")
    assert "arrowbank scan --source" in describe_any(tmp_path / "saved")["next"]


def test_info_of_what_is_nothing_names_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an empty folder"):
        describe_any(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"holds notes\.txt; nothing that"):
        describe_any(tmp_path)
    with pytest.raises(InputError, match="no such folder or file"):
        describe_any(tmp_path / "gone")


def test_info_shows_the_banks_that_build_made_one_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_texts(tmp_path / "texts")
    make_tokens(tmp_path / "tokens", tmp_path / "texts")
    assert main(["info", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "texts:"
    assert f"  next               arrowbank encode {tmp_path / 'tokens'} --model M --out DIR" in lines


def test_banks_under_a_folder_are_ours_only(tmp_path: Path) -> None:
    make_texts(tmp_path / "a" / "texts")
    arms.save_filler(tmp_path / "filler.bin")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text(json.dumps({"format": "else"}))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "manifest.json").write_text("{")
    shutil.copytree(tmp_path / "a" / "texts", tmp_path / "b" / "c" / "d" / "too" / "deep")
    assert banks_under(tmp_path) == [tmp_path / "a" / "texts"]
