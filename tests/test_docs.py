"""The README and FORMAT.md are run and held against the program: what they show works as written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from arrowbank import ImportConfig, ProbesConfig, TrunkData, build_in2, build_probes, build_trunk, import_targets, open_bank
from arrowbank.cli import GROUPS, VERBS, main
from tests import arms
from tests.dumps import make_dump
from tests.trunk_banks import make, write_ids

ROOT = Path(__file__).parents[1]
MODEL = "Qwen/Qwen3-4B"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def built(tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's bank, made by its own command in a folder of its own; a tiny model takes the big one's place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    (tmp_path / MODEL).symlink_to(tiny_qwen3)
    episode = {"query": "Where does Ada live?", "candidates": [{"text": "Ada lives in Lisbon."}]}
    for split in ("train", "eval"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(episode | {"split": split}) + "\n")
    (command,) = blocks("README.md", "bash")
    assert main(shlex.split(command)[1:]) == 0
    return tmp_path / "router"


def test_the_readmes_example_runs_as_written(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened, plain, *_ = blocks("README.md", "python")
    names: dict[str, object] = {}
    exec(compile(opened, "README.md", "exec"), names)
    assert capsys.readouterr().out.splitlines()[-1] == "(2, 32) float16"
    vectors = names["vectors"]
    assert isinstance(vectors, np.ndarray)
    assert (vectors.shape, vectors.dtype) == ((1, 32), np.float16)
    exec(compile(plain, "README.md", "exec"), names)
    first, matrix = names["first"], names["matrix"]
    assert isinstance(first, np.ndarray)
    assert isinstance(matrix, np.ndarray)
    assert first.dtype == matrix.dtype == np.float16
    assert np.array_equal(first, matrix[0])
    assert np.array_equal(first, vectors[0])


def test_the_readmes_loader_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dump(tmp_path / "dump")
    import_targets(ImportConfig(target_model="m", target_layer_ids=(1, 11, 21)), tmp_path / "dump", tmp_path / "targets")
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("README.md", "python")[2], "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([4, 9, 24]) torch.bfloat16\n"


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A trunk bank of 25 windows, and its taps beside it."""
    folder = tmp_path_factory.mktemp("trunk")
    write_ids(folder / "ids.jsonl", 80)
    config = make(tiny_qwen3, TrunkData("a", folder / "ids.jsonl"), tokens=24 * 48 + 30, topk=64, layers=(0, 1))
    build_trunk(config, folder / "trunk")
    return folder / "trunk"


def test_the_readmes_windows_run_as_written(
    trunk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trunk.parent)
    exec(compile(blocks("README.md", "python")[3], "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 23  # two of 25 are held out
    assert lines[0] == "(48, 64) (48, 64) torch.bfloat16"
    assert lines[-1] == "(30, 64) (30, 64) torch.bfloat16"
    (code,) = re.findall(r"```python\n(.*?)```", (trunk / "README.md").read_text(), flags=re.DOTALL)
    exec(compile(code.replace("path/to/this/folder", str(trunk)), "card", "exec"), {})
    assert capsys.readouterr().out == "(48, 64) (48, 32)\n"


def test_the_format_page_describes_trunk_banks(trunk: Path) -> None:
    assert_described(trunk, "trunk")
    page = (ROOT / "FORMAT.md").read_text(encoding="utf-8")
    manifest = json.loads((trunk / "manifest.json").read_text())
    for name in ("window", "topk", "hidden_norm", "hidden_dtype", "pad_id", "sets", "counts", "model_fingerprint"):
        assert name in manifest
        assert f"`{name}`" in page
    taps = json.loads((trunk.with_name("trunk-taps") / "dataset_info.json").read_text())
    (row,) = re.findall(r"^\| `taps` \| (.*) \|$", page, flags=re.MULTILINE)
    assert [name for name in taps["features"] if not name.startswith("layer_")] == re.findall(r"`(\w+)`", row)[:4]


def test_the_cards_snippet_runs(built: Path) -> None:
    card = (built / "features" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code.replace("path/to/this/folder", str(built / "features")), "card", "exec"), names)
    assert isinstance(names["matrix"], np.ndarray)
    assert names["matrix"].shape == (2, 32)


def test_every_verb_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for verbs in VERBS.values():
        for verb in verbs:
            assert f"`arrowbank {verb.__name__}`" in text
    for group, (_, members) in GROUPS.items():
        for name in members:
            assert f"`arrowbank {group} {name}`" in text


def assert_described(bank: Path, kind: str) -> None:
    """FORMAT.md names every file of the bank, and its columns in their order."""
    page = (ROOT / "FORMAT.md").read_text(encoding="utf-8")
    for path in bank.iterdir():
        assert f"`{path.name}`" in page
    info = json.loads((bank / "dataset_info.json").read_text())
    (row,) = re.findall(rf"^\| `{kind}` \| (.*) \|$", page, flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`", row)[: len(info["features"])] == list(info["features"])


def test_the_format_page_describes_target_banks(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump", lines=lambda row, name: {"file": name} if row else "no line")
    config = ImportConfig(target_model="m", target_layer_ids=(1, 11, 21), on_bad_sample="quarantine")
    manifest = import_targets(config, tmp_path / "dump", tmp_path / "bank")
    assert_described(tmp_path / "bank", "targets")
    page = (ROOT / "FORMAT.md").read_text(encoding="utf-8")
    for name in (
        "target_layer_ids",
        "layer_id_convention",
        "last_hidden_norm",
        "target_model_name_or_path",
        "loss_mask",
        "counts",
    ):
        assert name in manifest
        assert f"`{name}`" in page


def test_the_format_page_describes_arms_and_probes(tmp_path: Path) -> None:
    filler = arms.save_filler(tmp_path / "filler.bin")
    build_in2(arms.small(examples=3, raw_shards=1), [filler], tmp_path / "arm")
    assert_described(tmp_path / "arm", "in2")
    build_probes(ProbesConfig(length=200, vocab=arms.VOCAB), [filler], tmp_path / "probes")
    assert_described(tmp_path / "probes", "in2-probes")
    for folder in ("arm", "probes"):
        (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / folder / "README.md").read_text(), flags=re.DOTALL)
        names: dict[str, object] = {}
        exec(compile(code.replace("path/to/this/folder", str(tmp_path / folder)), "card", "exec"), names)
        assert np.asarray(names.get("answers", names.get("answer"))).shape == ((18,) if folder == "arm" else (8,))


def test_the_format_page_names_every_file_and_column_of_a_real_bank(built: Path) -> None:
    page = (ROOT / "FORMAT.md").read_text(encoding="utf-8")
    for part in ("texts", "tokens", "features"):
        assert_described(built / part, part)
    manifest = json.loads((built / "features" / "manifest.json").read_text())
    for name in ("format_version", "train_sha256", "eval_sha256", "model_path", "max_key_tokens", "hidden_size", "text_count"):
        assert name in manifest
        assert f"`{name}`" in page


def test_the_readmes_growth_runs_as_written_and_the_format_page_names_what_it_leaves(built: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\n(arrowbank .*?)^```", readme, flags=re.DOTALL | re.MULTILINE)
    (commands,) = (block for block in shown if "--onto" in block)
    for day in ("monday", "tuesday"):
        (built.parent / day).symlink_to(built)
    (built.parent / "more.jsonl").write_text(json.dumps({"query": "Where does Alan live?"}) + "\n")
    for command in commands.splitlines():
        assert main(shlex.split(command)[1:]) == 0
    assert len(open_bank(built.parent / "router_2" / "features")) == 3
    assert len(open_bank(built.parent / "features")) == 2
    assert len(open_bank(built.parent / "queries")) == 1
    page = (ROOT / "FORMAT.md").read_text(encoding="utf-8")
    for folder, names in (("features", ["merged", "generations"]), ("queries", ["selected"])):
        assert_described(built.parent / folder, "features")
        manifest = json.loads((built.parent / folder / "manifest.json").read_text())
        assert all(name in manifest and f"`{name}`" in page for name in names)
        assert all(f"`{name}`" in page for name in manifest.get("merged", {}))


def test_the_worked_example_of_in2_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("docs/in2-worked-example.md", "python")
    exec(compile(code.replace("import in2_reach as experiment", "import tiny as experiment"), "docs", "exec"), {})
    assert capsys.readouterr().out.count("reach: ") == 2
    assert (tmp_path / "in2_reach" / "scores" / "scores.svg").exists()
