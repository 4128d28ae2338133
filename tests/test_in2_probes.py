"""`in2 probes`: within a block nothing but the needle changes, and the controls are what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from arrowbank import ProbesConfig, build_probes
from arrowbank.bank.verify import verify
from arrowbank.cli import main
from arrowbank.errors import InputError
from tests import arms
from tests.kill import kill_at, tree_bytes

OPTIONS: dict[str, Any] = {
    "length": 300,
    "key_len": 2,
    "val_len": 3,
    "alphabet": 300,
    "vocab": arms.VOCAB,
    "shard_tokens": 1500,
}
SPAN, LAST = 5, 300 - 4 - 5


def config(**options: Any) -> ProbesConfig:
    return ProbesConfig(**{**OPTIONS, **options})


@pytest.fixture(scope="module")
def fillers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("fillers")
    return [arms.save_filler(folder / f"{seed}.bin", seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def rows(fillers: list[Path]) -> datasets.Dataset:
    build_probes(config(probe_pos=(1.0, 0.5)), fillers, fillers[0].parent / "probes")
    return datasets.load_from_disk(str(fillers[0].parent / "probes"))


def blocks(rows: datasets.Dataset) -> list[list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["block"], []).append(row)
    return list(found.values())


def test_each_block_has_every_distance_and_both_controls(rows: datasets.Dataset) -> None:
    assert len(rows) == 3 * 2 * (5 + 2)
    assert rows["trial"] == list(range(len(rows)))
    for block in blocks(rows):
        for where, probe in ((1.0, LAST), (0.5, SPAN + (LAST - SPAN) // 2)):
            mine = [row for row in block if row["probe_pos"] == where]
            assert {row["probe_start"] for row in mine} == {probe}
            assert [row["condition"] for row in mine] == ["needle"] * 5 + ["absent", "null"]
            distances = [row["distance"] for row in mine[:5]]
            assert (distances[0], distances[-1]) == (probe, SPAN)  # p = 0: as far as it goes; p = 1: adjacent
            assert distances == sorted(distances, reverse=True)
            assert [row["needle_start"] for row in mine[:5]] == [round(p * (probe - SPAN)) for p in (0, 0.25, 0.5, 0.75, 1)]
            assert (mine[5]["needle_start"], mine[5]["distance"]) == (-1, -1)
            assert mine[6]["needle_start"] in [row["needle_start"] for row in mine[:5]]


def test_within_a_block_only_the_needle_changes(rows: datasets.Dataset, fillers: list[Path]) -> None:
    spans = set()
    for number, block in enumerate(blocks(rows)):
        source = np.fromfile(fillers[number % 2], "<u2")[block[0]["filler_start"] :][:300]
        probe = block[0]["probe_start"]
        asked = block[0]["input_ids"][probe : probe + SPAN]
        spans.add(tuple(asked))
        for row in block:
            expected = source.copy()
            ids = np.array(row["input_ids"])
            needle = ids[row["needle_start"] : row["needle_start"] + SPAN]
            if row["condition"] != "absent":
                expected[row["needle_start"] : row["needle_start"] + SPAN] = needle
                assert (needle.tolist() == asked) == (row["condition"] == "needle")
                assert (needle[:2].tolist() == asked[:2]) == (row["condition"] == "needle")
            expected[row["probe_start"] : row["probe_start"] + SPAN] = asked
            assert np.array_equal(ids, expected)
            answer = range(row["answer_start"], row["answer_start"] + 3)
            assert np.flatnonzero(row["answer_mask"]).tolist() == list(answer)
            assert row["answer_start"] == row["probe_start"] + 2
            times = sum(ids[at : at + 2].tolist() == asked[:2] for at in range(299))
            assert times == (2 if row["condition"] == "needle" else 1)  # no key occurs in its filler
    assert len(spans) == 3


def test_a_key_that_its_filler_holds_is_drawn_again(tmp_path: Path) -> None:
    filler = arms.save_filler(tmp_path / "filler.bin", vocab=4)
    options: dict[str, Any] = {"alphabet": 8, "key_len": 1, "blocks": 20}
    build_probes(config(**options), [filler], tmp_path / "probes")
    for row in datasets.load_from_disk(str(tmp_path / "probes")):
        assert row["input_ids"][row["probe_start"]] >= 4
    with pytest.raises(InputError, match="block 0: 400 draws gave no two keys"):
        build_probes(config(**options | {"alphabet": 4}), [filler], tmp_path / "none")


def test_seeds_and_blocks_differ_and_the_same_plan_gives_the_same_bytes(fillers: list[Path], tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        build_probes(config(seed=seed), fillers, tmp_path / name)
        assert all(check.ok for check in verify(tmp_path / name))
    assert tree_bytes(tmp_path / "one") == tree_bytes(tmp_path / "two")
    one, other = (datasets.load_from_disk(str(tmp_path / name)) for name in ("one", "other"))
    assert one["input_ids"] != other["input_ids"]


def test_a_run_that_was_killed_goes_on(fillers: list[Path], tmp_path: Path) -> None:
    build_probes(config(), fillers, tmp_path / "whole")
    for moment in (20, 30, 40, 55):
        out = tmp_path / f"killed-{moment}"
        assert kill_at(moment, build_probes, config(), fillers, out).killed
        build_probes(config(), fillers, out)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")
        shutil.rmtree(out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"positions": (0.0, 1.5)}, r"positions is 1.5 at \[1\]; expected .* \(--positions\)"),
        ({"positions": (0.5, 0.5)}, "--positions 0.5,0.5"),
        ({"positions": ()}, "--positions"),
        ({"positions": (0.5, 0.5001)}, "two give the same place before a probe at 291"),
        ({"probe_pos": (0.0,)}, r"two give the same place before a probe at 5 \(--probe-pos 0\)"),
        ({"probe_pos": (-0.1,)}, "probe_pos is -0.1"),
        ({"length": 13}, "--length 13 is too small.*at least 14"),
        ({"blocks": 0}, "blocks is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"alphabet": 1001}, "--alphabet 1001 is larger than --vocab 1000"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"vocab": 70_000}, "--dtype uint32"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        config(**options)


def test_the_command_line(fillers: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["in2", "probes", "--length", "300", "--filler", *map(str, fillers), "--vocab", "1000", "--alphabet", "300"]
    words += ["--positions", "0,1", "--blocks", "2", "--probe-pos", "0.5", "--seed", "3", "--key-len", "3", "--val-len", "2"]
    assert main([*words, "--out", str(tmp_path / "probes"), "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out.splitlines()[-1])["manifest"]
    assert (manifest["rows"], manifest["positions"], manifest["probe_pos"]) == (8, [0.0, 1.0], [0.5])
    assert main([*words, "--out", str(tmp_path / "no"), "--positions", "a"]) == 2
    assert "--positions 'a'" in capsys.readouterr().err
