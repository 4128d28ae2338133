"""`heal` end to end on tiny models: it learns, it resumes to the same result, it writes what it measured, and it refuses."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from arrowbank import (
    HealConfig,
    ModelConfig,
    RunOptions,
    TrunkConfig,
    TrunkData,
    build_trunk,
    estimate_heal,
    heal_draft,
    open_bank,
)
from arrowbank.bank.locks import FolderLock
from arrowbank.cli import main
from arrowbank.errors import BadVector, BankLocked, ContractError, InputError, PlanMismatch
from arrowbank.mtp.batches import DraftWindows
from arrowbank.mtp.draft import trunk_of
from arrowbank.mtp.draft_files import init_from_last_block, load_draft, save_draft
from arrowbank.mtp.heal_config import HealConfig as Config
from arrowbank.mtp.measure import check_conventions, measure
from arrowbank.mtp.trainer import ChainBatch, jobs_of, learning_rate, ordered
from arrowbank.progress import SILENT, Phase
from tests import drafts
from tests.kill import kill_at, tree_bytes

WINDOW, CHAIN = 24, 2


def texts_of(model: Any, count: int) -> list[list[int]]:
    """What the model itself goes on to say, but for every eighth token: text that a draft can be right about."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, drafts.V, (count, 2), generator=generator)
    with torch.inference_mode():
        for _ in range(WINDOW - 2):
            best = model(ids, use_cache=False).logits[:, -1].argmax(-1)
            other = torch.randint(2, drafts.V, (count,), generator=generator)
            ids = torch.cat([ids, torch.where(torch.rand(count, generator=generator) < 0.875, best, other)[:, None]], 1)
    rows: list[list[int]] = ids.tolist()
    return rows


class Case:
    """A checkpoint with a damaged draft, its trunk bank, and a configuration that heals it in seconds.

    The trunk hardly does more than map a token to the next one: a rule that a draft can learn from little text.
    """

    def __init__(self, folder: Path, *, draft: bool = True) -> None:
        bare = drafts.make("llama, canonical", folder / "bare", draft=False).folder
        tensors = load_file(bare / "model.safetensors")
        quiet = {
            name: value * 0.02 if ".o_proj." in name or ".down_proj." in name else value for name, value in tensors.items()
        }
        quiet["model.norm.weight"] = torch.tensor([1.5, -0.5, 2.5, -1.0] * (drafts.H // 4))  # its sides are easily told apart
        drafts.write(bare, quiet)
        self.model = bare
        if draft:
            damaged = init_from_last_block(drafts.load_trunk(bare), dtype=torch.float32)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(2)
                for weight in damaged.train_only(projection=True):
                    weight.add_(
                        0.5 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0.3 * torch.randn_like(weight)
                    )
            self.model = folder / "model"
            save_draft(damaged, bare, self.model, provenance={})
        self.bank = folder / "trunk"
        rows = texts_of(drafts.load_trunk(self.model), 40)
        (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        build_trunk(self.trunk_config(), self.bank)

    def trunk_config(self, **options: Any) -> TrunkConfig:
        rows = str(self.bank.parent / "rows.jsonl")
        given: dict[str, Any] = {
            "model": ModelConfig(model=str(self.model), device="cpu"),
            "sources": (TrunkData("a", rows, 24 * 30), TrunkData("b", rows, 24 * 20)),
            "last_hidden_norm": "pre",
        }
        return TrunkConfig(window=WINDOW, topk=8, chain=CHAIN, **(given | options))

    def config(self, **options: Any) -> Config:
        given: dict[str, Any] = {
            "chain": CHAIN,
            "lr": 3e-3,
            "batch": 4,
            "epochs": 2.0,
            "eval_every": 5,
            "refresh": 7,
            "patience": 50,
        }
        if options.get("epochs") == 0:  # such options would have no effect
            given = {name: value for name, value in given.items() if name not in ("lr", "eval_every", "refresh", "patience")}
        return HealConfig(model=ModelConfig(model=str(self.model), device="cpu"), **(given | options))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("heal"))


@pytest.mark.slow
def test_a_draft_is_healed_written_and_measured_as_it_is_stored(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "healed"
    config = case.config(also=(("int8", str(tmp_path / "small")),), in_order=True)
    report = heal_draft(config, case.bank, out, dump=tmp_path / "dump")
    assert report["after"]["score"] > report["before"]["score"] + 0.2
    assert report["after"]["control"]["score"] < report["after"]["score"] / 2
    assert set(report["after"]["sets"]) == {"a", "b"}
    assert [one["codec"] for one in report["files"]] == ["keep", "int8"]
    assert report["files"][0]["accepted"]["score"] == pytest.approx(report["after"]["score"], abs=0.02)
    for one in report["files"]:
        trunk = trunk_of(drafts.load_trunk(Path(one["folder"])))
        stored = load_draft(trunk, Path(one["folder"]))
        bank = open_bank(case.bank)
        found = measure(stored, DraftWindows(bank, stored), bank.held_out_rows.tolist(), chain=CHAIN)
        assert found.whole.record()["hits"] == one["accepted"]["hits"]
    lines = [json.loads(line) for line in (tmp_path / "healed.heal" / "trace.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 0
    assert lines[-1]["step"] == lines[-1]["steps"] == report["steps"]
    assert max(line["score"] for line in lines) == report["after"]["score"]
    assert (tmp_path / "healed.heal" / "trace.svg").exists()
    assert not (tmp_path / "healed.heal" / "state.safetensors").exists()
    rows = datasets.load_from_disk(str(tmp_path / "dump"))
    held_out = open_bank(case.bank).held_out_rows
    assert rows["when"] == ["before"] * len(held_out) + ["after"] * len(held_out)
    assert np.array(rows[0]["topk_ids_2"]).shape == (rows[0]["length"], 4)
    (columns,) = re.findall(
        r"^\| `drafts` \| (.*) \|$", (Path(__file__).parents[1] / "FORMAT.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    first = [name.replace("_j", "_1") for name in re.findall(r"`(\w+)`", columns)]
    assert rows.column_names == first + [name.replace("_1", "_2") for name in first if name.endswith("_1")]
    before = tree_bytes(out)
    assert heal_draft(config, case.bank, out, dump=tmp_path / "dump") == json.loads(json.dumps(report))
    assert tree_bytes(out) == before


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"stride": 5}, {"stride": 4, "hard": 0.3, "train_projection": True}], ids=str)
def test_killed_runs_go_on_to_the_same_result(case: Case, tmp_path: Path, options: dict[str, Any]) -> None:
    config = case.config(epochs=1.0, **options)
    whole = heal_draft(config, case.bank, tmp_path / "whole")
    for moment in (9, 23, 45):  # before and after the second refresh
        out = tmp_path / f"killed-{moment}"
        assert kill_at(moment, heal_draft, config, case.bank, out).killed
        report = heal_draft(config, case.bank, out)
        assert {**report, "files": []} == {**whole, "files": []}
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")
        traces = [(tmp_path / name / "trace.jsonl").read_bytes() for name in (f"{out.name}.heal", "whole.heal")]
        assert traces[0] == traces[1]


@pytest.mark.slow
def test_a_run_killed_while_it_writes_its_files_goes_on(case: Case, tmp_path: Path) -> None:
    def config(name: str) -> Config:
        return case.config(epochs=0.3, also=(("int8", str(tmp_path / f"{name}-small")),))

    whole = heal_draft(config("whole"), case.bank, tmp_path / "whole")
    moments = kill_at(0, heal_draft, config("counted"), case.bank, tmp_path / "counted").moments
    for before_the_end in (2, 6, 9, 16, 24, 32):
        name = f"killed-{before_the_end}"
        assert kill_at(moments - before_the_end, heal_draft, config(name), case.bank, tmp_path / name).killed
        report = heal_draft(config(name), case.bank, tmp_path / name)
        assert [one["accepted"] for one in report["files"]] == [one["accepted"] for one in whole["files"]]
        for suffix, other in (("", "whole"), ("-small", "whole-small")):
            tensors, wanted = (load_file(tmp_path / made / "model.safetensors") for made in (f"{name}{suffix}", other))
            assert set(tensors) == set(wanted)
            assert all(tensors[key].equal(wanted[key]) for key in wanted)
        left = {path.name for path in (tmp_path / f"{name}.heal").iterdir()}
        assert left == {path.name for path in (tmp_path / "whole.heal").iterdir()}


class Sizes:
    """A progress that looks at the files of a folder whenever something is said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.last = folder, dict[str, int]()

    def phase(self, *args: Any, **options: Any) -> Phase:
        return SILENT.phase(*args, **options)

    def message(self, text: str) -> None:
        self.last = {path.name: path.stat().st_size for path in self.folder.iterdir() if path.is_file()}


SIZES: dict[str, dict[str, Any]] = {
    "keep": {},
    "copies": {"also": (("int8", "small"), ("nf4", "tiny"), ("fp16", "half"))},
    "projection": {"train_projection": True, "stride": 4},
    "init": {"init": True},
    "measured": {"epochs": 0.0, "codec": "nf4"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_an_estimate_is_what_a_healing_takes_at_its_end(
    case: Case, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if name == "init":
        case = Case(tmp_path_factory.mktemp("without"), draft=False)
    monkeypatch.chdir(tmp_path)
    config = case.config(**{"epochs": 0.5, **SIZES[name]})
    found = estimate_heal(config, case.bank, tmp_path / "out", dump=tmp_path / "dump", options=RunOptions(budget_gb=1))
    assert list(tmp_path.iterdir()) == []
    progress = Sizes(tmp_path / "out.heal")
    report = heal_draft(config, case.bank, tmp_path / "out", dump=tmp_path / "dump", progress=progress)
    kept = progress.last
    written = sum(
        path.stat().st_size
        for one in report["files"]
        for path in Path(one["folder"]).iterdir()
        if path.suffix != ".safetensors" or path.stat().st_nlink == 1
    )
    assert abs(found.beside["checkpoints"] - written) < 6000 * len(report["files"]), "headers and records"
    assert found.counts["steps"] == report["steps"] or report["steps"] == 0
    dumped = sum(path.stat().st_size for path in (tmp_path / "dump").glob("*.arrow"))
    assert abs(found.beside["dump"] - dumped) < 5000 + dumped // 10
    if config.epochs:
        assert found.beside["chain inputs"] == kept["fed.bin"]
        state = found.beside["training state"] // 2
        assert state - 4 * 3 * found.counts["draft_parameters"] <= kept["state.safetensors"] <= state + 20_000
    assert found.fits


def test_a_healing_over_budget_or_in_parts_is_refused_before_anything_is_written(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["heal", "--trunk", str(case.bank), "--model", str(case.model), "--out", str(tmp_path / "out"), "--device", "cpu"]
    for more, words in (
        (["--budget-gb", "1e-6"], "the healing takes .*, the budget is 1.0 kB. Give fewer --also"),
        (["--workers", "2"], "--workers: has no effect with heal, which trains one draft in one process"),
        (["--worker", "0/2"], "--worker: has no effect with heal"),
        (["--shards", "0", "--dry-run"], "--shards: has no effect with heal"),
    ):
        assert main([*argv, *more]) == 2
        assert re.search(words, capsys.readouterr().err)
    assert main([*argv, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["rows", "steps"]
    assert main([*argv, "--dry-run", "--budget-gb", "1e-6"]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_is_there_is_kept_unless_it_is_this_healings_own(case: Case, tmp_path: Path) -> None:
    config, out = case.config(epochs=0.2), tmp_path / "out"
    report = heal_draft(config, case.bank, out)
    with pytest.raises(InputError, match="kept no rows of its drafts"):
        heal_draft(config, case.bank, out, dump=tmp_path / "dump")
    (tmp_path / "out.heal" / "journal").mkdir()
    lock = FolderLock(tmp_path / "out.heal" / "journal")
    before = tree_bytes(tmp_path)
    with pytest.raises(BankLocked, match=r"out\.heal: another process"):
        heal_draft(config, case.bank, out, options=RunOptions(restart=True))
    assert tree_bytes(tmp_path) == before
    lock.release()
    shutil.rmtree(out)  # "already complete" would be a lie
    assert heal_draft(config, case.bank, out) == report
    assert (out / "model.safetensors").exists()
    shutil.rmtree(out)
    shutil.copytree(case.model, out)  # somebody else's by now
    with pytest.raises(InputError, match="is there already and not empty"):
        heal_draft(config, case.bank, out, options=RunOptions(restart=True))
    assert (out / "model.safetensors").exists()


@pytest.mark.slow
def test_a_power_cut_costs_no_more_than_the_file_that_it_damaged(case: Case, tmp_path: Path) -> None:
    config = case.config(epochs=0.5)
    heal_draft(config, case.bank, tmp_path / "whole")
    wanted = tree_bytes(tmp_path / "whole")
    moments = kill_at(0, heal_draft, config, case.bank, tmp_path / "counted").moments
    begun = tmp_path / "begun"
    assert kill_at(moments // 2, heal_draft, config, case.bank, begun / "out").killed
    assert (begun / "out.heal" / "state.safetensors").exists()
    for name in ("plan.json", "state.safetensors"):
        for data in (b"", b"{"):
            folder = tmp_path / f"{name}-{len(data)}"
            shutil.copytree(begun, folder)
            (folder / "out.heal" / name).write_bytes(data)
            if name == "plan.json":  # the state says whose it is
                with pytest.raises(PlanMismatch, match="--restart"):
                    heal_draft(case.config(epochs=0.5, lr=4e-3), case.bank, folder / "out")
            heal_draft(config, case.bank, folder / "out")
            assert tree_bytes(folder / "out") == wanted
    for name in ("plan.json", "report.json"):
        (tmp_path / "whole.heal" / name).write_bytes(b"")
        heal_draft(config, case.bank, tmp_path / "whole")
        assert tree_bytes(tmp_path / "whole") == wanted
        assert json.loads((tmp_path / "whole.heal" / name).read_text())


@pytest.mark.slow
def test_a_dump_of_another_healing_is_kept_unless_restart_is_given(case: Case, tmp_path: Path) -> None:
    heal_draft(case.config(epochs=0.2), case.bank, tmp_path / "first", dump=tmp_path / "dump")
    before = tree_bytes(tmp_path)
    with pytest.raises(PlanMismatch, match=r"dump: holds work of another plan.*\n  heal\.lr: "):
        heal_draft(case.config(epochs=0.2, lr=4e-3), case.bank, tmp_path / "second", dump=tmp_path / "dump")
    assert tree_bytes(tmp_path) == before
    heal_draft(
        case.config(epochs=0.2, lr=4e-3),
        case.bank,
        tmp_path / "second",
        dump=tmp_path / "dump",
        options=RunOptions(restart=True),
    )
    assert tree_bytes(tmp_path / "dump") != {}


@pytest.mark.slow
def test_restart_deletes_no_copy_that_is_read(case: Case, tmp_path: Path) -> None:
    """What an earlier healing wrote, and --restart would throw away, may be the model or the first draft of this one."""
    heal_draft(case.config(epochs=0.2, also=(("bf16", str(tmp_path / "copy")),)), case.bank, tmp_path / "out")
    before = tree_bytes(tmp_path)
    with pytest.raises(InputError, match=r"--restart deletes the copy .*copy: input and output are the same"):
        heal_draft(
            case.config(epochs=0.2, draft_from=str(tmp_path / "copy")),
            case.bank,
            tmp_path / "out",
            options=RunOptions(restart=True),
        )
    assert tree_bytes(tmp_path) == before


@pytest.mark.slow
def test_rounds_are_trained_and_counted_as_a_server_runs_them(case: Case, tmp_path: Path) -> None:
    report = heal_draft(case.config(stride=4), case.bank, tmp_path / "out")
    assert report["after"]["score"] > report["before"]["score"] + 0.1
    chained = heal_draft(case.config(epochs=0.0), case.bank, tmp_path / "measured")
    assert report["before"]["rows"][0] < chained["before"]["rows"][0]  # a round every fourth row, at two offsets


@pytest.mark.slow
def test_a_model_without_a_draft_begins_with_its_last_block(tmp_path: Path) -> None:
    case = Case(tmp_path, draft=False)
    with pytest.raises(InputError, match="--init"):
        heal_draft(case.config(), case.bank, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = heal_draft(case.config(init=True, train_projection=True), case.bank, tmp_path / "out")
    assert report["after"]["score"] > report["before"]["score"] + 0.2
    assert load_draft(trunk_of(drafts.load_trunk(tmp_path / "out")), tmp_path / "out").origin.family == "canonical"


def test_no_epochs_only_measure_and_re_encode_where_that_is_asked_for(case: Case, tmp_path: Path) -> None:
    report = heal_draft(case.config(epochs=0.0), case.bank, tmp_path / "out")
    assert report["before"] == report["after"]
    assert report["files"] == []
    assert not (tmp_path / "out").exists()
    report = heal_draft(case.config(epochs=0.0, codec="nf4"), case.bank, tmp_path / "nf4")
    assert [one["codec"] for one in report["files"]] == ["nf4"]
    assert (tmp_path / "nf4" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_draft_that_is_fed_the_wrong_side_is_found_out_before_training(case: Case, tmp_path: Path) -> None:
    heal_draft(case.config(train_projection=True, epochs=6.0), case.bank, tmp_path / "healed")
    draft = load_draft(drafts.load_trunk(tmp_path / "healed"), tmp_path / "healed")
    windows = DraftWindows(open_bank(case.bank), draft)
    rows = windows.bank.held_out_rows.tolist()
    scores = check_conventions(draft, windows, rows, chain=CHAIN, batch=4)
    assert set(scores) == {"pre/pre", "pre/post", "post/pre", "post/post"}
    assert min(scores["pre/pre"], scores["pre/post"]) > max(scores["post/pre"], scores["post/post"]) + 0.2
    draft.feed(hidden="post", recycle="post")
    with pytest.raises(
        InputError, match=r"is fed --last-hidden-norm post --recycle post, .*\n(.*\n)*Give --last-hidden-norm pre"
    ):
        check_conventions(draft, windows, rows, chain=CHAIN, batch=4)
    assert (draft.hidden, draft.recycle) == ("post", "post")
    post = tmp_path / "post"
    build_trunk(case.trunk_config(last_hidden_norm="post"), post)
    with pytest.raises(InputError, match="holds hidden states after the final norm, this draft is fed those before it"):
        heal_draft(case.config(last_hidden_norm="pre"), post, tmp_path / "out")
    assert not any(path.name.startswith("out") for path in tmp_path.iterdir())


@pytest.mark.slow
def test_what_cannot_be_healed(case: Case, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"training with 30 windows a batch needs at least 300"):
        heal_draft(case.config(batch=30), case.bank, tmp_path / "out")
    other = drafts.make("qwen3, canonical", tmp_path / "other").folder
    with pytest.raises(ContractError, match="a trunk bank of"):
        heal_draft(replace(case.config(), model=ModelConfig(model=str(other))), case.bank, tmp_path / "out")
    with pytest.raises(InputError, match=r"--out .*: input and output are the same"):
        heal_draft(case.config(), case.bank, case.model)
    with pytest.raises(BadVector, match="20 steps gave a loss or gradients that are NaN or Inf"):
        heal_draft(case.config(lr=1e30, epochs=5.0), case.bank, tmp_path / "wild")
    assert not any((tmp_path / name).exists() for name in ("out", "wild"))
    heal_draft(case.config(epochs=0.2), case.bank, tmp_path / "done")
    with pytest.raises(PlanMismatch, match=r"lr: found 0.003, wanted 0.004"):
        heal_draft(case.config(epochs=0.2, lr=4e-3), case.bank, tmp_path / "done", options=RunOptions(restart=False))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stride": 1, "chain": 3}, "--stride 1 is shorter than --chain 3"),
        ({"last_hidden_norm": "both"}, "last_hidden_norm is 'both'; expected one of post, pre"),
        ({"init": True, "draft_from": "x"}, "at most one of --init and --draft-from"),
        ({"hard": 2.0}, "hard is 2.0; expected at least 0 and at most 1"),
        ({"chain": 0}, "chain is 0"),
        ({"codec": "int3"}, "int3"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        HealConfig(model=ModelConfig(model="m"), **options)


@given(st.integers(1, 400), st.floats(1e-6, 1.0))
def test_the_learning_rate_rises_for_a_tenth_and_ends_at_a_tenth(steps: int, lr: float) -> None:
    rates = [learning_rate(step, steps, lr) for step in range(steps)]
    warm = max(1, steps // 10)
    assert rates[warm - 1] == pytest.approx(lr)
    assert max(rates) <= lr * (1 + 1e-9)
    assert all(later <= rate * (1 + 1e-9) for rate, later in zip(rates[warm:], rates[warm + 1 :], strict=False))
    if steps > warm + 1:
        assert rates[-1] == pytest.approx(lr / 10)


@given(st.integers(1, 30), st.floats(0.1, 4.0), st.integers(1, 4), st.integers(1, 3))
def test_every_job_comes_once_an_epoch(windows: int, epochs: float, batch: int, chain: int) -> None:
    config = HealConfig(model=ModelConfig(model="m"), batch=batch, chain=chain)
    jobs = jobs_of(range(windows), config)
    assert len(jobs) == -(-windows // batch) * chain
    order = list(ordered(jobs, epochs))
    assert len(order) == int(np.ceil(epochs * len(jobs)))
    for start in range(0, len(order) - len(jobs) + 1, len(jobs)):
        assert sorted(order[start : start + len(jobs)], key=repr) == sorted(jobs, key=repr)
    assert all(isinstance(job, ChainBatch) for job in order)


@pytest.mark.slow
def test_the_command_line_heals_and_shows_a_table(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["heal", "--trunk", str(case.bank), "--model", str(case.model), "--out", str(tmp_path / "out"), "--chain", "2"]
    argv += ["--lr", "3e-3", "--batch", "4", "--epochs", "0.5", "--eval-every", "4", "--also", f"bf16={tmp_path / 'bf16'}"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "all, before" in said
    assert "control (must miss)" in said
    assert "bf16 as stored" in said


def test_a_healing_that_brought_nothing_fails_each_time_it_is_asked_for(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["heal", "--trunk", str(case.bank), "--model", str(case.model), "--out", str(tmp_path / "out"), "--chain", "2"]
    argv += ["--lr", "1e-12", "--batch", "4", "--epochs", "0.1"]
    for _ in range(2):
        assert main(argv) == 1
        assert "FAIL  acceptance: " in capsys.readouterr().err
    report = json.loads((tmp_path / "out.heal" / "report.json").read_text())
    assert [one.partition(":")[0] for one in report["failed"]] == ["acceptance"]
    assert (tmp_path / "out" / "config.json").is_file(), "what was written is kept"
