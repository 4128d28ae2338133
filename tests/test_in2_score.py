"""`in2 score`: likelihoods against transformers, curves against plain arithmetic, and files that say what was found."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arrowbank.bank import open_bank
from arrowbank.cli import main
from arrowbank.errors import InputError, PlanMismatch
from arrowbank.in2.probes import ABSENT, NEEDLE, NULL, ProbesConfig, build_probes
from arrowbank.in2.score import ScoreConfig, Trials, curve, score_probes
from arrowbank.models import ModelConfig
from tests import tiny
from tests.kill import kill_at, tree_bytes

DISTANCES = (10, 100, 1000)
BLOCKS = 12


def made_trials(needles: dict[int, float], absent: float = 6.0, null: float = 6.2, noise: float = 0.05) -> Trials:
    """Trials whose answers' NLL is as given, with a level of its own for every block, which pairing takes out, and some noise."""
    rng = np.random.default_rng(1)
    rows: list[tuple[str, int, int, float]] = []
    for block in range(BLOCKS):
        level = 5 * rng.standard_normal()
        rows += [(NEEDLE, block, distance, nll + level) for distance, nll in needles.items()]
        rows += [(ABSENT, block, -1, absent + level), (NULL, block, 10, null + level)]
    rng.shuffle(rows)
    conditions, blocks, distances, nll = zip(*rows, strict=True)
    tokens = np.array(nll)[:, None] + noise * rng.standard_normal((len(rows), 4))
    return Trials(np.array(conditions), np.array(blocks), np.ones(len(rows)), np.array(distances), tokens)


def test_the_reach_is_the_farthest_distance_whose_interval_stays_above_zero() -> None:
    found = curve(made_trials({10: 1.0, 100: 3.0, 1000: 6.1}), draws=500, confidence=0.95)
    assert [point.distance for point in found.points] == [10, 100, 1000]
    assert [point.found for point in found.points] == [True, True, False]
    assert found.reach == 100
    assert found.points[0].to_absent.mean == pytest.approx(5.0, abs=0.1)
    assert found.points[1].to_null.mean == pytest.approx(3.2, abs=0.1)
    for point in found.points:
        assert point.to_absent.low <= point.to_absent.mean <= point.to_absent.high
        assert point.to_absent.high - point.to_absent.low < 0.2  # blocks' levels are five nats apart: pairing took them out


def test_a_model_that_finds_nothing_has_no_reach() -> None:
    found = curve(made_trials(dict.fromkeys(DISTANCES, 6.0)), draws=500, confidence=0.95)
    assert found.reach is None


def test_a_floor_that_is_not_the_lowest_and_a_hole_are_said() -> None:
    found = curve(made_trials({10: 6.1, 100: 2.0, 1000: 3.0}), draws=500, confidence=0.95)
    assert found.reach == 1000
    assert any("the nearest needle (distance 10" in note and "is not the easiest: distance 100" in note for note in found.notes)
    assert any("not found at distance 10, but farther away" in note for note in found.notes)
    misled = curve(made_trials({10: 1.0, 100: 8.0, 1000: 6.0}), draws=500, confidence=0.95)
    assert any("worse with a needle than without one at distance 100" in note for note in misled.notes)


def test_intervals_are_the_same_each_time_and_wider_for_more_confidence() -> None:
    trials = made_trials({10: 1.0, 100: 5.9}, noise=1.0)
    one, two = (curve(trials, draws=300, confidence=0.9) for _ in range(2))
    assert one == two
    wide = curve(trials, draws=300, confidence=0.99)
    for narrow_point, wide_point in zip(one.points, wide.points, strict=True):
        assert wide_point.to_absent.low < narrow_point.to_absent.low
        assert wide_point.to_absent.high > narrow_point.to_absent.high


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probes")
    np.random.default_rng(0).integers(0, 500, 5000).astype(np.uint16).tofile(folder / "filler_0.bin")
    config = ProbesConfig(
        length=120, positions=(0.0, 0.5, 1.0), blocks=4, probe_pos=(0.5, 1.0), key_len=2, val_len=3, alphabet=40, vocab=500
    )
    build_probes(config, [folder / "filler_0.bin"], folder / "probes")
    return folder / "probes"


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_qwen3(tmp_path_factory.mktemp("models") / "other", layers=3)


def test_the_likelihoods_are_those_of_transformers(probes: Path, tiny_qwen3: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = ScoreConfig(models=(ModelConfig(model=str(tiny_qwen3), device="cpu"),), token_budget=500)
    found = score_probes(config, probes, tmp_path / "scores").curves[str(tiny_qwen3)]
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    rows = open_bank(probes).dataset.with_format("numpy")
    nll: dict[tuple[str, float, int], list[float]] = {}
    for row in rows:
        ids = torch.from_numpy(row["input_ids"].astype(np.int64))[None]
        with torch.inference_mode():
            expected = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
        answer = np.flatnonzero(row["answer_mask"])
        values = [-expected[at - 1, ids[0, at]].item() for at in answer]
        nll.setdefault((row["condition"], row["probe_pos"].item(), row["distance"].item()), []).append(float(np.mean(values)))
    assert len(found.points) == 6
    for point in found.points:
        assert point.nll == pytest.approx(np.mean(nll[NEEDLE, point.probe_pos, point.distance]), abs=1e-4)
    for where, (value, _) in found.controls[ABSENT].items():
        assert value == pytest.approx(np.mean(nll[ABSENT, where, -1]), abs=1e-4)


def test_several_models_in_one_table_and_one_plot(
    probes: Path, tiny_qwen3: Path, other_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores"
    argv = ["in2", "score", str(probes), "--model", str(tiny_qwen3), "--model", str(other_model), "--out", str(out)]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert said.count("reach: ") == 2
    assert "4 blocks: intervals from so few say little" in said
    assert sorted(path.name for path in out.iterdir()) == [
        "nll-00.json",
        "nll-01.json",
        "scores.csv",
        "scores.json",
        "scores.svg",
    ]
    rows = list(csv.DictReader((out / "scores.csv").read_text().splitlines()))
    assert len(rows) == 2 * (6 + 4)
    result = json.loads((out / "scores.json").read_text())
    assert list(result["models"]) == [str(tiny_qwen3), str(other_model)]
    first = result["models"][str(tiny_qwen3)]["points"][0]
    assert float(rows[0]["to_absent_low"]) == pytest.approx(first["to_absent"]["low"], abs=1e-6)
    assert b"<svg" in (out / "scores.svg").read_bytes()
    before = tree_bytes(out)
    assert main(argv) == 0
    assert tree_bytes(out) == before
    with pytest.raises(PlanMismatch, match="holds another export"):
        score_probes(ScoreConfig(models=(ModelConfig(model=str(other_model)),)), probes, out)


def test_a_killed_run_goes_on_with_the_next_model(probes: Path, tiny_qwen3: Path, other_model: Path, tmp_path: Path) -> None:
    models = tuple(ModelConfig(model=str(model), device="cpu") for model in (tiny_qwen3, other_model))
    config = ScoreConfig(models=models, plot=False)
    score_probes(config, probes, tmp_path / "whole")
    assert kill_at(12, score_probes, config, probes, tmp_path / "out").killed
    score_probes(config, probes, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "whole")


def test_what_cannot_be_scored(probes: Path, tiny_qwen3: Path, tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="each once"):
        ScoreConfig(models=())
    with pytest.raises(InputError, match="a bank of texts, expected in2-probes"):
        score_probes(
            ScoreConfig(models=(ModelConfig(model=str(tiny_qwen3)),)),
            tiny.save_texts_bank(tmp_path / "texts", ["a"]),
            tmp_path / "x",
        )
    with pytest.raises(InputError, match="no LM head"):
        score_probes(ScoreConfig(models=(ModelConfig(model=str(tiny_bert)),), plot=False), probes, tmp_path / "bert")
    np.full(5000, 600, np.uint16).tofile(tmp_path / "filler_0.bin")
    build_probes(ProbesConfig(length=100, key_len=2, val_len=3), [tmp_path / "filler_0.bin"], tmp_path / "probes")
    with pytest.raises(InputError, match=r"token id 600, but model .* has a vocabulary of 512"):
        score_probes(ScoreConfig(models=(ModelConfig(model=str(tiny_qwen3)),), plot=False), tmp_path / "probes", tmp_path / "y")
