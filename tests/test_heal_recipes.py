"""The recipes of healing, small: each runs from end to end as a script does, and is what it says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from arrowbank import open_bank
from recipes import heal_qwen35, heal_tiny
from tests import drafts
from tests.kill import tree_bytes


@pytest.mark.slow
def test_a_qwen35_with_its_own_draft_is_healed_with_a_copy_in_nf4(tmp_path: Path) -> None:
    trunk, heal = heal_qwen35.trunk_bank("m", [("a", "x"), ("b", "y")]), heal_qwen35.healing("m", "copy")
    assert (trunk.window, trunk.topk, trunk.tokens, trunk.chain) == (2048, 64, 393_216, 3)
    assert (heal.chain, heal.stride, heal.refresh, heal.batch, heal.lr) == (3, 0, 150, 2, 2e-5)
    assert heal.also == (("nf4", "copy"),)
    made = drafts.make("qwen3.5", tmp_path / "model")
    random = np.random.default_rng(0)
    rows = [random.integers(2, drafts.V, 32).tolist() for _ in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    argv = [
        "--model",
        str(made.folder),
        "--source",
        f"code={tmp_path / 'rows.jsonl'}",
        "--out",
        str(tmp_path / "healed"),
        "--tiny",
    ]
    assert heal_qwen35.main(argv) == 0
    report = json.loads((tmp_path / "healed.heal" / "report.json").read_text())
    assert [one["codec"] for one in report["files"]] == ["keep", "nf4"]
    assert len(open_bank(tmp_path / "healed.trunk")) == 24
    before, after = load_file(made.folder / "model.safetensors"), load_file(tmp_path / "healed" / "model.safetensors")
    assert set(before) == set(after)
    assert all(before[name].equal(after[name]) for name in before if not name.startswith("mtp."))
    with safe_open(tmp_path / "healed.nf4" / "model.safetensors", framework="pt") as file:
        assert "mtp.fc.weight.absmax" in set(file.keys())


@pytest.mark.slow
def test_the_small_healing_runs_whole_and_is_not_done_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = dataclasses.replace(heal_tiny.tiny(), texts=200)
    reports = heal_tiny.run(tmp_path, given)
    said = capsys.readouterr().out
    for name in (
        "before the damage",
        "damaged",
        "healed",
        "stored, keep",
        "stored, bf16",
        "stored, int8",
        "stored, nf4",
        "control",
    ):
        assert f"\n{name}" in said
    assert str(tmp_path / "healed.heal" / "trace.svg") in said
    assert reports["made"]["conventions"] == {}
    before = tree_bytes(tmp_path)
    heal_tiny.run(tmp_path, given)
    assert capsys.readouterr().out == said
    assert tree_bytes(tmp_path) == before
