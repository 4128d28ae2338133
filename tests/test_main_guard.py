"""Scripts without a main guard that ask for several processes: real scripts in real processes, an error that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from arrowbank import ScanConfig, TokenizeConfig, scan, tokenize
from tests.arms import save_filler
from tests.tiny import save_bert, save_qwen3, texts

SCRIPTS = {
    "in2": """
        from arrowbank import In2Config, RunOptions, build_in2
        config = In2Config(arm="c", length=400, examples=8, triples=2, decoys=1, min_distance=8, vocab=500, alphabet=100,
                           shard_tokens=800)
        build_in2(config, ["filler.bin"], "out", options=RunOptions(workers=2))
    """,
    "encode": """
        from arrowbank import EncodeConfig, ModelConfig, RunOptions, encode
        config = EncodeConfig(model=ModelConfig(model="bert", device="cpu"), shard_rows=10)
        encode(config, "tokens", "out", options=RunOptions(workers=2))
    """,
    "capture": """
        from arrowbank import CaptureConfig, ModelConfig, RunOptions, capture
        config = CaptureConfig(model=ModelConfig(model="qwen", device="cpu"), data="ids.jsonl", target_layer_ids=(0, 1),
                               min_loss_tokens=1, max_shard_bytes=2000)
        capture(config, "out", options=RunOptions(workers=2))
    """,
    "trunk": """
        from arrowbank import ModelConfig, RunOptions, TrunkConfig, TrunkData, build_trunk
        config = TrunkConfig(model=ModelConfig(model="qwen", device="cpu"), sources=(TrunkData("ids", "ids.jsonl"),), window=20,
                             topk=4, hold_all=True, max_shard_bytes=5000)
        build_trunk(config, "out", options=RunOptions(workers=2))
    """,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the scripts read."""
    folder = tmp_path_factory.mktemp("scripts")
    save_filler(folder / "filler.bin", vocab=500)
    save_bert(folder / "bert")
    save_qwen3(folder / "qwen")
    (folder / "train.jsonl").write_text("".join(json.dumps({"query": text}) + "\n" for text in texts(40)))
    rows = "".join(json.dumps({"input_ids": [(7 * row + at) % 50 for at in range(40)]}) + "\n" for row in range(30))
    (folder / "ids.jsonl").write_text(rows)
    scan(ScanConfig(sources=(("train", folder / "train.jsonl"),)), folder / "texts")
    tokenize(TokenizeConfig(tokenizer=folder / "bert"), folder / "texts", folder / "tokens")
    return folder


def run_script(folder: Path, name: str, body: str, *, guarded: bool) -> subprocess.CompletedProcess[str]:
    lines = [line.removeprefix(" " * 8) for line in body.strip("\n").splitlines()]
    if guarded:
        lines = ['if __name__ == "__main__":', *(f"    {line}" for line in lines)]
    script = folder / name
    script.write_text("\n".join(lines) + "\n")
    return subprocess.run([sys.executable, script.name], cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("stage", SCRIPTS)
def test_a_script_without_a_main_guard_is_told(stage: str, folder: Path) -> None:
    done = run_script(folder, f"unguarded_{stage}.py", SCRIPTS[stage].replace('"out"', f'"{stage}_out"'), guarded=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"arrowbank.errors.InputError: {folder / f'unguarded_{stage}.py'}: has no main guard.")
    assert 'if __name__ == "__main__":' in last
    assert done.stderr.count("Traceback") == 1, "the workers say nothing"
    assert "bootstrapping" not in done.stderr
    assert not (folder / f"{stage}_out" / "state.json").exists()


@pytest.mark.slow
def test_the_same_script_with_a_main_guard_builds_where_the_other_stopped(folder: Path) -> None:
    body = SCRIPTS["in2"].replace('"out"', '"in2_again"')
    assert run_script(folder, "first.py", body, guarded=False).returncode == 1
    done = run_script(folder, "second.py", body, guarded=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "in2_again" / "state.json").is_file()


def test_a_script_whose_import_fails_in_the_workers_is_told(folder: Path) -> None:
    body = "        import os\n        os.mkdir('made_once')\n" + SCRIPTS["in2"].replace('"out"', '"in2_fails"')
    done = run_script(folder, "fails.py", body, guarded=False)
    assert done.returncode == 1
    assert "fails.py: a worker process failed while it imported this script" in done.stderr.strip().splitlines()[-1]
    assert "FileExistsError" in done.stderr, "the worker's own traceback says why"


@pytest.mark.slow
def test_stages_whose_processes_do_not_import_the_script_need_no_guard(folder: Path) -> None:
    lines = "".join(json.dumps({"query": f"text {row}"}) + "\n" for row in range(4100))  # enough for two processes
    (folder / "many.jsonl").write_text(lines)
    body = """
        from arrowbank import RunOptions, ScanConfig, TokenizeConfig, scan, tokenize
        scan(ScanConfig(sources=(("train", "many.jsonl"),)), "own_texts", options=RunOptions(workers=2))
        tokenize(TokenizeConfig(tokenizer="bert"), "own_texts", "own_tokens", options=RunOptions(workers=2))
    """
    done = run_script(folder, "stages.py", body, guarded=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "own_tokens" / "state.json").is_file()
