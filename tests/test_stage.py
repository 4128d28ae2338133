"""Every stage takes every run option, with one meaning: the same bytes by whatever way, and nothing written by what is refused."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrowbank import (
    CaptureConfig,
    EncodeConfig,
    Estimate,
    ImportConfig,
    ModelConfig,
    ProbesConfig,
    RunOptions,
    TokenizeConfig,
    TrunkData,
    build_in2,
    build_probes,
    build_trunk,
    capture,
    encode,
    estimate_encode,
    estimate_probes,
    import_targets,
    open_bank,
    tokenize,
)
from arrowbank.bank.manifest import shard_name
from arrowbank.cli import main
from arrowbank.errors import DiskFull, InputError
from arrowbank.features.tokenize import estimate_tokenize
from arrowbank.in2.arm import estimate_in2
from arrowbank.mtp.trunk_build import estimate_trunk
from arrowbank.targets.capture import estimate_capture
from arrowbank.targets.importer import estimate_import
from tests import arms, banks, dumps, tiny, trunk_banks
from tests.kill import tree_bytes

RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
Run = Callable[[Path, RunOptions], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A stage over the inputs in a folder: run, estimate, and the words of its command."""

    run: Callable[[Path, Path, RunOptions], dict[str, Any]]
    estimate: Callable[[Path, Path, RunOptions], Estimate]
    words: Callable[[Path], Sequence[str]]


def _tokenizing(world: Path) -> TokenizeConfig:
    return TokenizeConfig(tokenizer=str(world / "bpe"), max_tokens=6, shard_rows=9)


ENCODE = EncodeConfig(encoder="tests.banks:TableEncoder", shard_rows=9)


def _capturing(world: Path) -> CaptureConfig:
    return CaptureConfig(
        model=ModelConfig(model=str(world / "model"), device="cpu"),
        data=world / "rows.jsonl",
        target_layer_ids=(0, 1),
        min_loss_tokens=1,
        codec="fp8",
        max_shard_bytes=20_000,
    )


IMPORT = ImportConfig(  # of a dump with two bad samples and two that are not finite
    target_model="org/target",
    target_layer_ids=(0, 1, 2),
    on_bad_sample="quarantine",
    on_nonfinite="drop",
    codec="fp8",
    spans="supervised",
    max_shard_bytes=1000,
)


def _spoiled(row: int, tensors: dumps.Tensors) -> dumps.Tensors:
    if row % 12 == 5:
        tensors["target_hidden_states"][2, 1, 3] = float("nan")
    elif row % 12 == 8:
        del tensors["target_last_hidden_states"]
    return tensors


PROBES = ProbesConfig(length=300, vocab=1000, shard_tokens=1500)


def _trunk(world: Path) -> Any:
    data = TrunkData("a", world / "rows.jsonl")
    return trunk_banks.make(world / "model", data, layers=(0, 1), hold_all=True, max_shard_bytes=20_000)


STAGES = {
    "tokenize": Case(
        lambda world, out, options: tokenize(_tokenizing(world), world / "texts", out, options=options),
        lambda world, out, options: estimate_tokenize(_tokenizing(world), world / "texts", out, options=options),
        lambda world: ["tokenize", f"{world}/texts", "--tokenizer", f"{world}/bpe"],
    ),
    "encode": Case(
        lambda world, out, options: encode(ENCODE, world / "tokens", out, options=options),
        lambda world, out, options: estimate_encode(ENCODE, world / "tokens", out, options=options),
        lambda world: ["encode", f"{world}/tokens", "--encoder", "tests.banks:TableEncoder", "--shard-rows", "9"],
    ),
    "capture": Case(
        lambda world, out, options: capture(_capturing(world), out, options=options),
        lambda world, out, options: estimate_capture(_capturing(world), out, options=options),
        lambda world: ["targets", "capture", "--model", f"{world}/model", "--source", f"{world}/rows.jsonl", "--layers", "0,1"],
    ),
    "import": Case(
        lambda world, out, options: import_targets(IMPORT, world / "dump", out, options=options),
        lambda world, out, options: estimate_import(IMPORT, world / "dump", out, options=options),
        lambda world: ["targets", "import", f"{world}/sound", "--target-model", "org/target", "--layers", "0,1,2"],
    ),
    "trunk": Case(
        lambda world, out, options: build_trunk(_trunk(world), out, options=options),
        lambda world, out, options: estimate_trunk(_trunk(world), out, options=options),
        lambda world: (
            [
                "trunk",
                "build",
                "--model",
                f"{world}/model",
                "--source",
                f"a={world}/rows.jsonl",
                "--window",
                "48",
                "--topk",
                "6",
                "--hold-all",
            ]
        ),
    ),
    "in2": Case(
        lambda world, out, options: build_in2(arms.small(examples=11), [world / "filler.bin"], out, options=options),
        lambda world, out, options: estimate_in2(arms.small(examples=11), [world / "filler.bin"], out, options=options),
        lambda world: (
            [
                "in2",
                "build",
                "--arm",
                "c",
                "--length",
                "600",
                "--examples",
                "6",
                "--vocab",
                "1000",
                "--triples",
                "4",
                "--filler",
                f"{world}/filler.bin",
            ]
        ),
    ),
    "probes": Case(
        lambda world, out, options: build_probes(PROBES, [world / "filler.bin"], out, options=options),
        lambda world, out, options: estimate_probes(PROBES, [world / "filler.bin"], out, options=options),
        lambda world: ["in2", "probes", "--length", "300", "--vocab", "1000", "--filler", f"{world}/filler.bin"],
    ),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all stages."""
    world = tmp_path_factory.mktemp("world")
    tiny.save_bpe_tokenizer(world / "bpe")
    tiny.save_qwen3(world / "model")
    tiny.save_texts_bank(world / "texts", tiny.texts(40))
    banks.make_texts(world / "of-tokens")
    banks.make_tokens(world / "tokens", world / "of-tokens")
    trunk_banks.write_ids(world / "rows.jsonl", 30)
    arms.save_filler(world / "filler.bin")
    dumps.make_dump(world / "dump", range(3, 27), change=_spoiled)
    dumps.make_dump(world / "sound")
    return world


@pytest.fixture(scope="module", params=STAGES)
def case(request: pytest.FixtureRequest) -> Case:
    return STAGES[request.param]


@pytest.fixture(scope="module")
def whole(case: Case, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a plain run makes, beside all runs of this stage: manifests have relative paths, and names of banks."""
    folder = tmp_path_factory.mktemp("runs")
    assert case.run(world, folder / "whole" / "bank", RunOptions())["complete"]
    assert len(shards_of(folder / "whole" / "bank")) >= 4
    return folder / "whole" / "bank"


@pytest.fixture(scope="module")
def ray_running() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _ray_where_needed(request: pytest.FixtureRequest) -> None:
    if "ray]" in request.node.name:
        request.getfixturevalue("ray_running")


def beside(whole: Path, name: str) -> Path:
    """Where another run puts its bank: its folder has the same name, as deep."""
    return whole.parent.parent / name / whole.name


def shards_of(bank: Path) -> list[Path]:
    return sorted(bank.glob("data-*.arrow"))


def written(out: Path) -> dict[str, dict[str, str]]:
    """Every file of a bank and of the one of its taps."""
    return {suffix: tree_bytes(f"{out}{suffix}") for suffix in ("", "-taps")}


WAYS: dict[str, Any] = {
    "workers": [RunOptions(workers=2)],
    "halves": [RunOptions(worker=(0, 2)), RunOptions(worker=(1, 2))],
    "shards": [RunOptions(shards=(1, 3)), RunOptions(shards=(3, 0)), RunOptions()],
    "rows": [RunOptions(rows=(0, 1)), RunOptions(rows=(1, 2), shards=(0,)), RunOptions(workers=2)],
    "ray": [RunOptions(engine="ray", workers=2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=RAY if way == "ray" else ()) for way in WAYS])
def test_every_way_writes_the_same_bytes(case: Case, world: Path, whole: Path, way: str) -> None:
    out = beside(whole, way)
    *parts, last = WAYS[way]
    for options in parts:
        manifest = case.run(world, out, options)
        assert not manifest["complete"]
        assert 0 < manifest["rows"] < len(open_bank(whole))
        assert not (out / "state.json").exists()
        assert not Path(f"{out}-taps").exists()
    assert case.run(world, out, last)["complete"]
    assert written(out) == written(whole)


def test_the_chosen_shards_are_made_and_no_other(case: Case, world: Path, whole: Path) -> None:
    out = beside(whole, "chosen")
    case.run(world, out, RunOptions(shards=(2,)))
    case.run(world, out, RunOptions(rows=(0, 1)))
    assert [path.name for path in shards_of(out)] == [shard_name(0), shard_name(2)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions(shards=(99,)), r"--shards: there is no shard 99; this plan has shards 0 to \d+"),
        (RunOptions(rows=(0, 10**6)), r"--rows 0:1000000: must lie within 0:\d+, start before end"),
        (RunOptions(rows=(2, 2)), "start before end"),
    ],
)
def test_a_part_that_does_not_exist_is_refused(case: Case, world: Path, whole: Path, options: RunOptions, words: str) -> None:
    before = written(whole)
    for out in (beside(whole, "none"), whole):
        for restart in (False, True):
            with pytest.raises(InputError, match=words):
                case.run(world, out, replace(options, restart=restart))
    with pytest.raises(InputError, match=words):
        case.estimate(world, beside(whole, "none"), options)
    assert not (beside(whole, "none")).exists()
    assert written(whole) == before


def test_a_budget_that_is_too_small_is_refused_and_costs_nothing(case: Case, world: Path, whole: Path) -> None:
    before = written(whole)
    for out, restart in ((beside(whole, "none"), False), (whole, True)):
        options = RunOptions(budget_gb=1e-6, restart=restart)
        with pytest.raises(DiskFull) as caught:
            case.run(world, out, options)
        assert re.fullmatch(
            rf"{out}: the .* takes .*, the budget is 1\.0 kB\. Give .*, or a larger --budget-gb\.", str(caught.value)
        )
        assert not case.estimate(world, beside(whole, "none"), options).fits
    assert not (beside(whole, "none")).exists()
    assert written(whole) == before


def test_an_estimate_is_what_is_written(case: Case, world: Path, whole: Path) -> None:
    out = beside(whole, "nowhere")
    found = case.estimate(world, out, RunOptions(budget_gb=1))
    assert not out.exists()
    assert found.fits
    assert (found.rows, found.shards) == (len(open_bank(whole)), len(shards_of(whole)))
    size = sum(path.stat().st_size for path in shards_of(whole))
    assert abs(size - found.shard_bytes) < 2500 * found.shards
    assert found.total_bytes == found.shard_bytes + sum(found.beside.values())
    one = case.estimate(world, out, RunOptions(shards=(0,)))
    assert (one.shards, one.rows) == (1, int(np.diff(open_bank(whole).starts)[0]))
    assert 0 < one.tokens < found.tokens
    assert 0 < one.total_bytes < found.total_bytes


@pytest.mark.slow
def test_a_restart_makes_everything_anew(case: Case, world: Path, whole: Path) -> None:
    out = beside(whole, "again")
    case.run(world, out, RunOptions())
    made = [path.stat().st_ino for path in shards_of(out)]
    case.run(world, out, RunOptions())
    assert [path.stat().st_ino for path in shards_of(out)] == made
    assert not case.run(world, out, RunOptions(restart=True, shards=(1,)))["complete"]
    assert [path.name for path in shards_of(out)] == [shard_name(1)]
    assert case.run(world, out, RunOptions(restart=True))["complete"]
    assert written(out) == written(whole)


@pytest.mark.slow
def test_a_damaged_shard_is_made_again_where_it_is_named(case: Case, world: Path, whole: Path) -> None:
    out = beside(whole, "damaged")
    case.run(world, out, RunOptions())
    shard = shards_of(out)[1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    if not case.run(world, out, RunOptions(shards=(1,)))["complete"]:  # counts of the others went with the commit
        assert case.run(world, out, RunOptions())["complete"]
    assert written(out) == written(whole)


def _part(name: str, world: Path, out: Path, number: int) -> None:
    STAGES[name].run(world, out, RunOptions(worker=(number, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_the_jobs_of_an_array_may_run_at_once(name: str, world: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=_part, args=(name, world, tmp_path / "array" / "bank", number)) for number in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    assert [job.exitcode for job in jobs] == [0, 0]
    STAGES[name].run(world, tmp_path / "whole" / "bank", RunOptions())
    assert written(tmp_path / "array" / "bank") == written(tmp_path / "whole" / "bank")


def test_a_stage_of_its_own_waits_for_no_array(case: Case, world: Path, whole: Path) -> None:
    out = beside(whole, "shared")
    case.run(world, out, RunOptions(worker=(0, 2)))
    with pytest.raises(InputError, match="restart cannot be combined with worker"):
        RunOptions(worker=(1, 2), restart=True)
    assert case.run(world, out, RunOptions())["complete"]
    assert written(out) == written(whole)


@pytest.mark.parametrize("name", STAGES)
def test_the_command_line_takes_them(name: str, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*STAGES[name].words(world), "--out", str(tmp_path / "out")]
    assert main([*argv, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["rows", "shards"]
    assert any(line.startswith("disk ") for line in lines)
    assert main([*argv, "--dry-run", "--budget-gb", "0.0000001", "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["phase"], found["fits"], found["budget_bytes"]) == ("estimate", False, 100)
    assert main([*argv, "--budget-gb", "0.0000001"]) == 2
    assert "the budget is 100 bytes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*argv, "--shards", "0", "--worker", "1/2"]) == 0
    assert "0 rows so far, not committed" in capsys.readouterr().out
    assert main([*argv, "--rows", "0:1", "--worker", "0/2", "--engine", "local", "--workers", "1"]) == 0
    assert len(shards_of(tmp_path / "out")) == 1
    assert main([*argv, "--ray-address", "auto"]) == 2
    assert "has no effect with --engine local" in capsys.readouterr().err
