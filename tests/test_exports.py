"""Exports of target banks: each format read by a plain reader that follows its description, refusals, deaths, and ways back."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from arrowbank import ExportConfig, export, import_targets, open_bank
from arrowbank.cli import main
from arrowbank.errors import ArrowbankError, CorruptBank, InputError, PlanMismatch
from arrowbank.formats.modelopt import conversation_ids
from arrowbank.formats.registry import FORMATS
from arrowbank.formats.specforge import sample_file
from tests.kill import kill_at, tree_bytes
from tests.target_banks import (
    HIDDEN_SIZE,
    LAYERS,
    LENGTHS,
    MODEL,
    VOCAB,
    Sample,
    import_config,
    know_the_depth,
    make_dump,
    make_target_bank,
)

DEPTH = LAYERS[-1] + 1  # a model of that many blocks has its final block among LAYERS
SMALL = {"lengths": (3, 2), "hidden_size": 2}


class Made(NamedTuple):
    """A target bank, and the dump's samples that are in it."""

    bank: Path
    samples: list[Sample]


class Read(NamedTuple):
    """What a plain reader finds of a row; None where the format has it not."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    taps: torch.Tensor
    last: torch.Tensor | None


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory) -> Made:
    bank = tmp_path_factory.mktemp("post") / "bank"
    return Made(bank, make_target_bank(bank))


@pytest.fixture(scope="module")
def pre(tmp_path_factory: pytest.TempPathFactory) -> Made:
    bank = tmp_path_factory.mktemp("pre") / "bank"
    return Made(bank, make_target_bank(bank, last_hidden_norm="pre", max_shard_bytes=300))


def read_eagle3(folder: Path, row: int) -> Read:
    found = load(folder / "rows_0-2000" / f"data_{row}.ckpt")
    assert set(found) == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
    S = len(found["input_ids"])
    assert found["hidden_state"].shape == (1, S, HIDDEN_SIZE)
    assert found["aux_hidden_state"].shape == (1, S, 3 * HIDDEN_SIZE)
    return Read(found["input_ids"], found["loss_mask"], found["aux_hidden_state"][0], found["hidden_state"][0])


def read_dflash(folder: Path, row: int) -> Read:
    found = load(folder / "rows_0-2000" / f"data_{row}.ckpt")
    assert set(found) == {"input_ids", "loss_mask", "hidden_states"}
    return Read(found["input_ids"], found["loss_mask"], found["hidden_states"], None)


def read_dspark(folder: Path, row: int) -> Read:
    found = load(folder / "rows_0-2000" / f"data_{row}.ckpt")
    assert set(found) == {"input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"}
    return Read(found["input_ids"], found["loss_mask"], found["hidden_states"], found["target_last_hidden_states"])


def read_speculators(folder: Path, row: int) -> Read:
    tokens = datasets.load_from_disk(str(folder))[row]
    found = load_file(folder / "hidden_states" / f"hs_{row}.safetensors")
    assert set(found) == {"token_ids", "hidden_states"}
    assert torch.equal(found["token_ids"], tokens["input_ids"])
    assert found["token_ids"].dtype == torch.int64
    assert tokens["seq_len"] == len(found["token_ids"])
    hidden = found["hidden_states"]
    assert hidden.dim() == 3
    return Read(tokens["input_ids"], tokens["loss_mask"], hidden[:, :-1].flatten(1), hidden[:, -1])


def read_modelopt(folder: Path, row: int) -> Read:
    found = load(folder / f"sample-{row:04d}.safetensors.pt")
    assert set(found) == {
        *("input_ids", "hidden_states", "aux_hidden_states", "loss_mask", "conversation_id", "hidden_states_prenorm")
    }
    assert found["conversation_id"] == f"sample-{row:04d}.safetensors"
    assert found["hidden_states_prenorm"] is (
        json.loads((folder / "arrowbank-export.json").read_text())["last_hidden_norm"] == "pre"
    )
    return Read(found["input_ids"], found["loss_mask"], found["aux_hidden_states"], found["hidden_states"])


def load(path: Path) -> dict[str, Any]:
    """A torch file without a pickle's powers; each tensor alone in its storage."""
    found: dict[str, Any] = torch.load(path, weights_only=True)
    tensors = [value for value in found.values() if isinstance(value, torch.Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    return found


READERS: dict[str, Callable[[Path, int], Read]] = {
    "specforge-eagle3": read_eagle3,
    "specforge-dflash": read_dflash,
    "specforge-dspark": read_dspark,
    "speculators": read_speculators,
    "modelopt": read_modelopt,
}
NORMS = {  # format → the norms of last hidden states that it takes
    "specforge-eagle3": ("post",),
    "specforge-dflash": ("post", "pre"),
    "specforge-dspark": ("post",),
    "speculators": ("pre",),
    "modelopt": ("post", "pre"),
}
CASES = [(name, norm) for name, norms in NORMS.items() for norm in norms]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.dtype == torch.bfloat16
    return tensor.contiguous().view(torch.int16)


def assert_same(found: Read, wanted: Read) -> None:
    for mine, theirs in ((found.input_ids, wanted.input_ids), (found.loss_mask, wanted.loss_mask)):
        assert mine.dtype == torch.int64
        assert torch.equal(mine, theirs)
    assert torch.equal(bits(found.taps), bits(wanted.taps))
    if found.last is not None and wanted.last is not None:
        assert torch.equal(bits(found.last), bits(wanted.last))


def of_sample(sample: Sample) -> Read:
    return Read(sample.input_ids, sample.loss_mask, sample.taps.flatten(1), sample.last)


def of_bank(bank: Path, row: int) -> Read:
    found = open_bank(bank).to_torch()[row]
    mask = found["loss_mask"].long()
    return Read(found["input_ids"], mask, found["target_hidden_states"], found["target_last_hidden_states"])


def note_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "arrowbank-export.json").read_text())
    return found


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_a_plain_reader_finds_every_bit_of_the_bank(name: str, norm: str, post: Made, pre: Made, tmp_path: Path) -> None:
    made = {"post": post, "pre": pre}[norm]
    said = export(ExportConfig(format=name), made.bank, tmp_path / "out")
    for row, sample in enumerate(made.samples):
        assert_same(READERS[name](tmp_path / "out", row), of_sample(sample))
    note = note_of(tmp_path / "out")
    assert said == note
    wanted = {
        "format": name,
        "num_samples": len(LENGTHS),
        "target_layer_ids": [layer + (name == "speculators") for layer in LAYERS],
        "layer_id_convention": "block_input" if name == "speculators" else "block_output",
        "hidden_size": HIDDEN_SIZE,
        "target_model_name_or_path": MODEL,
        "last_hidden_norm": norm,
        "loss_mask": "from_dump",
        "source": "bank-dump",
    }
    assert {key: note[key] for key in wanted} == wanted
    assert not (tmp_path / "out" / "journal").exists()


@pytest.mark.parametrize("name", READERS)
def test_an_fp8_bank_is_exported_as_bfloat16(name: str, tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank", codec="fp8", last_hidden_norm=NORMS[name][0])
    export(ExportConfig(format=name), tmp_path / "bank", tmp_path / "out")
    for row in range(len(LENGTHS)):
        assert_same(READERS[name](tmp_path / "out", row), of_bank(tmp_path / "bank", row))


def test_specforge_keeps_two_thousand_samples_a_folder() -> None:
    assert [sample_file(row) for row in (0, 1999, 2000, 4001)] == [
        "rows_0-2000/data_0.ckpt",
        "rows_0-2000/data_1999.ckpt",
        "rows_2000-4000/data_2000.ckpt",
        "rows_4000-6000/data_4001.ckpt",
    ]


def test_the_speculators_folder_is_a_dataset_of_tokens_in_torch_format(pre: Made, tmp_path: Path) -> None:
    export(ExportConfig(format="speculators"), pre.bank, tmp_path / "out")
    dataset = datasets.load_from_disk(str(tmp_path / "out"))
    assert dataset.format["type"] == "torch"
    assert dataset.features == datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int64")),
            "loss_mask": datasets.List(datasets.Value("int64")),
            "seq_len": datasets.Value("int64"),
        }
    )
    info = json.loads((tmp_path / "out" / "dataset_info.json").read_text())
    assert info["features"]["input_ids"]["_type"] == "Sequence"  # what older versions of datasets know as well
    assert dataset.with_format(None)["seq_len"][:] == list(LENGTHS)
    counts: dict[int, int] = {}
    for sample in pre.samples:
        for token in sample.input_ids[sample.loss_mask == 1].tolist():
            counts[token] = counts.get(token, 0) + 1
    found = torch.load(tmp_path / "out" / "token_freq.pt", weights_only=True)
    assert type(found) is dict
    assert found == counts
    with safe_open(tmp_path / "out" / "hidden_states" / "hs_2.safetensors", "pt") as file:
        assert json.loads(file.metadata()["target_layer_ids"]) == [2, 12, 22]
        assert file.metadata()["sample"] == "sample-0002.safetensors"


def test_a_tapped_final_block_is_the_last_hidden_state_before_the_norm(tmp_path: Path) -> None:
    samples = make_target_bank(tmp_path / "bank")
    know_the_depth(tmp_path / "bank", DEPTH)
    export(ExportConfig(format="speculators"), tmp_path / "bank", tmp_path / "out")
    for row, sample in enumerate(samples):
        wanted = Read(sample.input_ids, sample.loss_mask, sample.taps[:, :-1].flatten(1), sample.taps[:, -1])
        assert_same(read_speculators(tmp_path / "out", row), wanted)
    note = note_of(tmp_path / "out")
    assert (note["target_layer_ids"], note["last_hidden_norm"], note["num_hidden_layers"]) == ([2, 12], "pre", DEPTH)


@pytest.mark.parametrize("depth", [None, DEPTH + 1])
def test_a_bank_without_the_final_blocks_output_is_refused_with_two_ways_out(depth: int | None, tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank")
    if depth:
        know_the_depth(tmp_path / "bank", depth)
    with pytest.raises(InputError, match="before it") as refusal:
        export(ExportConfig(format="speculators"), tmp_path / "bank", tmp_path / "out")
    assert "--last-hidden-norm pre" in str(refusal.value)
    assert "tap the final block" in str(refusal.value)
    assert not (tmp_path / "out").exists()


def refused(bank: Path, out: Path, match: str, **options: Any) -> None:
    with pytest.raises(InputError, match=match):
        export(ExportConfig(**options), bank, out)
    assert not out.exists()


@pytest.mark.parametrize("name", FORMATS)
def test_an_unknown_norm_is_refused_until_someone_vouches_for_it(name: str, tmp_path: Path) -> None:
    samples = make_target_bank(tmp_path / "bank", last_hidden_norm="unknown")
    refused(tmp_path / "bank", tmp_path / "out", "--last-hidden-norm post or pre", format=name)
    norm = NORMS.get(name, ("post",))[0]
    export(ExportConfig(format=name, last_hidden_norm=norm), tmp_path / "bank", tmp_path / "out")
    if name in READERS:
        assert note_of(tmp_path / "out")["last_hidden_norm"] == norm
        assert_same(READERS[name](tmp_path / "out", 0), of_sample(samples[0]))


@pytest.mark.parametrize("name", ["deepspec", "specforge-eagle3", "specforge-dspark"])
def test_last_hidden_states_before_the_norm_are_refused_where_the_trainer_takes_them_for_normed(
    name: str, pre: Made, tmp_path: Path
) -> None:
    refused(pre.bank, tmp_path / "out", f"are pre .* {name} holds post", format=name)


@pytest.mark.parametrize("name", FORMATS)
def test_nobody_may_assume_what_the_bank_knows_otherwise(name: str, post: Made, pre: Made, tmp_path: Path) -> None:
    refused(post.bank, tmp_path / "out", "are post, not pre", format=name, last_hidden_norm="pre")
    refused(pre.bank, tmp_path / "out", "are pre, not post", format=name, last_hidden_norm="post")


@pytest.mark.parametrize("name", FORMATS)
def test_a_bank_of_unknown_layers_or_of_supervised_spans_is_refused(name: str, tmp_path: Path) -> None:
    norm = NORMS.get(name, ("post",))[0]
    make_target_bank(tmp_path / "nameless", target_layer_ids=None, last_hidden_norm=norm)
    refused(tmp_path / "nameless", tmp_path / "out", "which layers", format=name)
    make_target_bank(tmp_path / "spans", spans="supervised", last_hidden_norm=norm)
    refused(tmp_path / "spans", tmp_path / "out", "--spans all", format=name)


@pytest.mark.parametrize("layers", [(4,), (1, 2, 3, 4)])
def test_eagle3_takes_exactly_three_layers(layers: tuple[int, ...], tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank", dump={"layers": len(layers)}, target_layer_ids=layers)
    listed = ", ".join(map(str, layers))
    refused(tmp_path / "bank", tmp_path / "out", rf"{len(layers)} layers \({listed}\)", format="specforge-eagle3")
    export(ExportConfig(format="specforge-dflash"), tmp_path / "bank", tmp_path / "out")


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="leave --max-shard-bytes out"):
        ExportConfig(format="modelopt", max_shard_bytes=100)
    with pytest.raises(InputError, match=", ".join(FORMATS)):
        ExportConfig(format="other")
    with pytest.raises(InputError, match="one of post, pre"):
        ExportConfig(format="modelopt", last_hidden_norm="unknown")  # type: ignore[arg-type]


def test_samples_of_one_name_have_ids_of_their_own(tmp_path: Path) -> None:
    names = ["a/same.safetensors", "b/same.safetensors", "b/SAME.safetensors", "..odd name…é.safetensors"]
    make_target_bank(tmp_path / "bank", dump={"names": names})
    export(ExportConfig(format="modelopt"), tmp_path / "bank", tmp_path / "out")
    files = sorted(path for path in (tmp_path / "out").iterdir() if path.suffix == ".pt")
    assert len(files) == len(names)
    assert len({path.name.casefold() for path in files}) == len(names)
    for path in files:
        assert load(path)["conversation_id"] == path.stem


@given(st.lists(st.text(max_size=8) | st.sampled_from(["a", "A", "a~1", "..", "", "x" * 300, "a/b", "a_b", "."])))
def test_conversation_ids_are_safe_and_no_two_alike(names: list[str]) -> None:
    ids = conversation_ids(names)
    assert len({one.casefold() for one in ids}) == len(names) == len(ids)
    for one in ids:
        assert 0 < len(f"{one}.pt") < 255
        assert ".." not in f"{one}.pt"
        assert not one.startswith(".")
        assert not set("/\\:\0") & set(one)
        assert Path(f"{one}.pt").stem == one
        assert Path(f"{one}.pt").name == f"{one}.pt"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_an_export_killed_at_any_moment_goes_on_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    bank, whole = tmp_path / "bank", tmp_path / "whole"
    make_target_bank(bank, dump=SMALL, last_hidden_norm=NORMS.get(name, ("post",))[0])
    config = ExportConfig(format=name, max_shard_bytes=1 if name == "deepspec" else None)
    export(config, bank, whole)
    wanted, last = tree_bytes(whole), FORMATS[name].last
    for moment in range(1, 1000):
        out = tmp_path / f"out-{moment}"
        outcome = kill_at(moment, export, config, bank, out)
        assert not outcome.error
        if not outcome.killed:
            break
        if (out / last).exists():  # then it is whole, whatever else was to be done
            assert {file: found for file, found in tree_bytes(out).items() if not file.startswith("journal/")} == wanted
        if (out / "state.json").exists():  # a dataset that opens has its hidden states
            assert {file for file in wanted if file.startswith("hidden_states/")} <= set(tree_bytes(out))
        export(config, bank, out)
        assert tree_bytes(out) == wanted
    assert moment > 2 * len(wanted)
    assert tree_bytes(out) == wanted


@pytest.mark.slow
def test_a_restart_killed_at_any_moment_leaves_nothing_of_the_export_before(tmp_path: Path) -> None:
    make_target_bank(tmp_path / "long", dump={**SMALL, "lengths": (2, 2, 2)})
    make_target_bank(tmp_path / "short", dump={**SMALL, "lengths": (1,)})
    config = ExportConfig(format="specforge-dflash")
    export(config, tmp_path / "long", tmp_path / "before")
    export(config, tmp_path / "short", tmp_path / "whole")
    wanted = tree_bytes(tmp_path / "whole")
    for moment in range(1, 1000):
        out = tmp_path / f"out-{moment}"
        shutil.copytree(tmp_path / "before", out)
        outcome = kill_at(moment, export, config, tmp_path / "short", out, restart=True)
        assert not outcome.error
        if not outcome.killed:
            break
        try:
            export(config, tmp_path / "short", out)
        except PlanMismatch:  # nothing of the old one was gone yet
            assert (out / "arrowbank-export.json").exists()
            export(config, tmp_path / "short", out, restart=True)
        assert tree_bytes(out) == wanted
    assert tree_bytes(out) == wanted


@pytest.mark.parametrize("name", FORMATS)
def test_another_export_into_the_same_folder_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    norm = NORMS.get(name, ("post",))[0]
    make_target_bank(tmp_path / "bank", dump=SMALL, last_hidden_norm=norm)
    make_target_bank(tmp_path / "other", dump={**SMALL, "seed": 1, "lengths": (2,)}, last_hidden_norm=norm)
    config, out = ExportConfig(format=name), tmp_path / "out"
    export(config, tmp_path / "bank", out)
    before = tree_bytes(out)
    with pytest.raises(PlanMismatch, match="--restart"):
        export(config, tmp_path / "other", out)
    assert tree_bytes(out) == before
    export(config, tmp_path / "other", out, restart=True)
    export(config, tmp_path / "other", tmp_path / "fresh")
    assert tree_bytes(out) == tree_bytes(tmp_path / "fresh")


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_with_other_files_is_left_alone(name: str, tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank", dump=SMALL, last_hidden_norm=NORMS.get(name, ("post",))[0])
    for file in ("notes.txt", "mine.pt", "rows_0-2000/data_7.ckpt", "shard-00009.bin"):
        out = tmp_path / f"out-{file.replace('/', '-')}"
        (out / file).parent.mkdir(parents=True)
        (out / file).write_text("mine")
        for restart in (False, True):
            with pytest.raises(InputError, match="Give a new folder"):
                export(ExportConfig(format=name), tmp_path / "bank", out, restart=restart)
        assert [path.name for path in out.rglob("*") if path.is_file()] == [Path(file).name]


def test_an_export_that_is_whole_says_so(post: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["export", str(post.bank), "--to", "modelopt", "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    assert main(argv) == 0
    assert "already complete" in "".join(capsys.readouterr())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_the_help_of_export_names_every_format(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["export", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in FORMATS)


def test_a_bank_comes_back_from_the_speculators_folder(pre: Made, tmp_path: Path) -> None:
    export(ExportConfig(format="speculators"), pre.bank, tmp_path / "out")
    argv = ["targets", "import", str(tmp_path / "out"), "--out", str(tmp_path / "back")]
    assert main(argv) == 0
    manifests = [json.loads((bank / "manifest.json").read_text()) for bank in (pre.bank, tmp_path / "back")]
    for field in ("target_layer_ids", "layers", "hidden_size", "last_hidden_norm", "loss_mask", "target_model_name_or_path"):
        assert manifests[0][field] == manifests[1][field]
    before, after = (datasets.load_from_disk(str(bank)) for bank in (pre.bank, tmp_path / "back"))
    assert before.features == after.features
    assert before[:] == after[:]


def test_a_folder_of_another_writer_is_imported_with_what_the_user_knows(pre: Made, tmp_path: Path) -> None:
    folder = foreign_folder(tmp_path / "foreign", pre.samples)
    with pytest.raises(InputError, match="--target-model"):
        import_targets(import_config(target_model=None, loss_mask=None), folder, tmp_path / "back")
    with pytest.raises(InputError, match="holds 3 layers"):
        import_targets(import_config(target_layer_ids=(1, 11), loss_mask=None), folder, tmp_path / "back")
    manifest = import_targets(import_config(loss_mask=None), folder, tmp_path / "back")
    assert (manifest["target_layer_ids"], manifest["last_hidden_norm"]) == (list(LAYERS), "pre")
    for row, sample in enumerate(pre.samples):
        assert_same(of_bank(tmp_path / "back", row), of_sample(sample))


def foreign_folder(folder: Path, samples: list[Sample]) -> Path:
    """The layout as `datasets` and `safetensors` write it, with nothing of ours in it."""
    rows = [
        {"input_ids": sample.input_ids.tolist(), "loss_mask": sample.loss_mask.tolist(), "seq_len": len(sample.input_ids)}
        for sample in samples
    ]
    dataset = datasets.Dataset.from_list(rows)
    dataset.set_format("torch")
    dataset.save_to_disk(str(folder), num_shards=2)
    (folder / "hidden_states").mkdir()
    for row, sample in enumerate(samples):
        hidden = torch.cat([sample.taps, sample.last[:, None]], dim=1)
        save_file({"token_ids": sample.input_ids, "hidden_states": hidden}, folder / "hidden_states" / f"hs_{row}.safetensors")
    return folder


def swap(folder: Path) -> None:
    first, second = (folder / "hidden_states" / f"hs_{row}.safetensors" for row in (0, 1))
    first.rename(folder / "kept")
    second.rename(first)
    (folder / "kept").rename(second)


def rewrite(folder: Path, **changed: torch.Tensor) -> None:
    path = folder / "hidden_states" / "hs_1.safetensors"
    save_file({**load_file(path), **changed}, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing file": (lambda folder: (folder / "hidden_states" / "hs_2.safetensors").unlink(), r"hs_2\.safetensors: missing"),
    "a missing first file": (lambda folder: (folder / "hidden_states" / "hs_0.safetensors").unlink(), r"hs_0.*missing"),
    "a torn file": (lambda folder: cut(folder / "hidden_states" / "hs_1.safetensors"), r"hs_1\.safetensors: not a whole"),
    "files of other rows": (swap, r"hs_0\.safetensors"),
    "other tokens": (
        lambda folder: rewrite(folder, token_ids=torch.full((1,), VOCAB)),
        r"hs_1.*token_ids are not the input_ids of row 1",
    ),
    "another width": (lambda folder: rewrite(folder, hidden_states=torch.zeros(1, 4, 9).bfloat16()), r"shape \(1, 4, 9\)"),
    "another type": (lambda folder: rewrite(folder, hidden_states=torch.zeros(1, 4, 8).int()), r"is I32"),
    "no state": (lambda folder: (folder / "state.json").unlink(), r"state\.json"),
    "no data": (lambda folder: next(folder.glob("data-*.arrow")).unlink(), r"not a whole dataset"),
    "another note": (lambda folder: (folder / "arrowbank-export.json").write_text("{}x"), r"arrowbank-export\.json"),
    "layers that are none": (
        lambda folder: save_file(
            load_file(folder / "hidden_states" / "hs_0.safetensors"),
            folder / "hidden_states" / "hs_0.safetensors",
            {"target_layer_ids": "[1, true]"},
        ),
        r"hs_0.*expected ascending numbers",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_speculators_folder_is_refused_with_the_file(damage: str, pre: Made, tmp_path: Path) -> None:
    export(ExportConfig(format="speculators"), pre.bank, tmp_path / "out")
    harm, match = DAMAGE[damage]
    harm(tmp_path / "out")
    with pytest.raises((InputError, CorruptBank), match=match):
        import_targets(import_config(loss_mask=None), tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_speculators_folder_is_not_taken_for_normed(pre: Made, tmp_path: Path) -> None:
    export(ExportConfig(format="speculators"), pre.bank, tmp_path / "out")
    argv = ["targets", "import", str(tmp_path / "out"), "--out", str(tmp_path / "cache"), "--to", "deepspec"]
    assert main(argv) == 2
    assert not (tmp_path / "cache").exists()


def test_a_deepspec_cache_comes_back_byte_for_byte(post: Made, tmp_path: Path) -> None:
    config = ExportConfig(format="deepspec", max_shard_bytes=500)
    export(config, post.bank, tmp_path / "first")
    import_targets(import_config(loss_mask=None), tmp_path / "first", tmp_path / "back")
    export(config, tmp_path / "back", tmp_path / "second")
    first, second = tree_bytes(tmp_path / "first"), tree_bytes(tmp_path / "second")
    assert len(first) > 4
    saying = {"manifest.json": "", "arrowbank-export.json": ""}  # what each was made from
    assert {**first, **saying} == {**second, **saying}
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("first", "second")]
    for manifest in manifests:
        del manifest["converter"], manifest["source_engine_dump"]
    assert manifests[0] == manifests[1]


def test_a_disk_without_room_is_found_out_first(post: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(ArrowbankError, match="10 bytes free"):
        export(ExportConfig(format="modelopt"), post.bank, tmp_path / "out")
    assert not list(tmp_path.rglob("*.pt"))


def export_with_small_files(name: str, bank: Path, out: Path, limit: int) -> None:
    """A target: an export on a system where no file may pass `limit` bytes; says what it raised in a file beside `out`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        export(ExportConfig(format=name), bank, out)
    except ArrowbankError as error:
        out.with_suffix(".error").write_text(type(error).__name__)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_disk_that_fills_up_on_the_way_is_said_and_gone_on_from(name: str, tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank", dump={"lengths": (2, 300)}, last_hidden_norm=NORMS[name][0])
    out = tmp_path / "out"
    assert not kill_at(0, export_with_small_files, name, tmp_path / "bank", out, 4096).error
    assert out.with_suffix(".error").read_text() == "DiskFull"
    first = tree_bytes(out)
    export(ExportConfig(format=name), tmp_path / "bank", out)
    assert (out / "arrowbank-export.json").exists()
    assert {file: found for file, found in first.items() if not file.startswith("journal/")}.items() <= tree_bytes(out).items()


@pytest.mark.slow
def test_a_disk_that_fills_up_before_the_first_receipt_is_gone_on_from(tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank", dump={"lengths": (1,), "hidden_size": 1})
    out = tmp_path / "out"
    assert not kill_at(0, export_with_small_files, "deepspec", tmp_path / "bank", out, 100).error
    assert out.with_suffix(".error").read_text() == "DiskFull"
    assert (out / "shard-00000.bin").exists()
    export(ExportConfig(format="deepspec"), tmp_path / "bank", out)
    assert (out / "manifest.json").exists()


def test_a_dump_with_a_folder_of_hidden_states_is_still_a_dump(tmp_path: Path) -> None:
    samples = make_dump(tmp_path / "dump", names=[f"hidden_states/hs_{row}.safetensors" for row in range(len(LENGTHS))])
    import_targets(import_config(), tmp_path / "dump", tmp_path / "bank")
    assert_same(of_bank(tmp_path / "bank", 2), of_sample(samples[2]))
