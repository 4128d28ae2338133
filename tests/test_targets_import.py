"""`targets import`: every name, dtype and rule of a dump, everything that may be wrong with one, and a bank that survives its maker."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arrowbank import ImportConfig, RunOptions, import_targets, import_to_deepspec, open_bank, verify
from arrowbank.bank.kinds.targets_bank import TargetBank, needed_positions
from arrowbank.errors import ArrowbankError, BadVector, DiskFull, InputError, PlanMismatch
from arrowbank.formats.deepspec import DeepSpecCache
from arrowbank.targets.importer import ImportStage, estimate_import, find_rows
from tests import dumps
from tests.dumps import LAYERS, WIDTH, Tensors, bits, make_dump
from tests.kill import kill_at, tree_bytes


def config(**options: Any) -> ImportConfig:
    return ImportConfig(**({"target_model": "org/target", "target_layer_ids": (1, 11, 21)} | options))


def import_all(dump: Path, out: Path, **options: Any) -> TargetBank:
    import_targets(config(**options), dump, out)
    bank = open_bank(out)
    assert isinstance(bank, TargetBank)
    return bank


def assert_holds(bank: TargetBank, made: list[Tensors]) -> None:
    """The bank's rows are these samples, bit for bit."""
    assert len(bank) == len(made)
    for row, tensors in enumerate(made):
        sample = bank.read(row)
        assert sample.name == f"s{row}.safetensors"
        assert sample.input_ids.tolist() == tensors["input_ids"].tolist()
        assert np.array_equal(sample.taps, bits(tensors["target_hidden_states"]))
        assert np.array_equal(sample.last, bits(tensors["target_last_hidden_states"]))


@pytest.mark.parametrize("shard_bytes", [None, 700])
def test_a_dump_becomes_a_bank_bit_for_bit(tmp_path: Path, shard_bytes: int | None) -> None:
    made = make_dump(tmp_path / "dump")
    bank = import_all(tmp_path / "dump", tmp_path / "bank", max_shard_bytes=shard_bytes, loss_mask="ones_except_first")
    assert len(bank.shard_names) == (1 if shard_bytes is None else 3)
    assert_holds(bank, made)
    assert all(check.ok for check in verify(tmp_path / "bank")), verify(tmp_path / "bank")
    manifest = bank.manifest
    assert manifest["target_layer_ids"] == [1, 11, 21]
    assert (manifest["layer_id_convention"], manifest["last_hidden_norm"]) == ("block_output", "post")
    assert manifest["target_model_name_or_path"] == "org/target"
    assert manifest["counts"] == {
        "kept": 4,
        "dropped": {"quarantined": 0, "nonfinite": 0},
        "tokens": 19,
        "loss_tokens": 15,
        "hidden_tokens": 19,
    }
    rows = datasets.load_from_disk(str(tmp_path / "bank"))
    assert rows.column_names == [
        "input_ids",
        "loss_mask",
        "target_hidden_states",
        "target_last_hidden_states",
        "seq_len",
        "sample",
    ]
    assert rows["seq_len"] == [5, 1, 9, 4]
    assert rows[2]["target_hidden_states"] == bits(made[2]["target_hidden_states"]).tolist()


ALIASES = [
    ("file", "input_ids", "target_hidden_states", "target_last_hidden_states", "loss_mask"),
    ("path", "input_id", "hidden_states", "last_hidden_states", "loss_masks"),
    ("safetensors", "ids", "target_hidden", "target_last_hidden", "loss_mask"),
    ("sample", "tokens", "target_hidden", "last_hidden_states", "loss_masks"),
    ("shard", "tokens", "hidden_states", "target_last_hidden", "loss_mask"),
]


@pytest.mark.parametrize(("file", "ids", "taps", "last", "mask"), ALIASES)
def test_every_name_that_engines_use(tmp_path: Path, file: str, ids: str, taps: str, last: str, mask: str) -> None:
    names = {"input_ids": ids, "target_hidden_states": taps, "target_last_hidden_states": last, "loss_mask": mask}
    make_dump(
        tmp_path / "dump",
        change=lambda row, tensors: {names[name]: value for name, value in tensors.items()},
        lines=lambda row, name: {"n": 1, file: name},
    )
    bank = import_all(tmp_path / "dump", tmp_path / "bank", loss_mask="from_dump")
    made = [dumps.sample(length, row) for row, length in enumerate(dumps.LENGTHS)]
    assert_holds(bank, made)
    assert [bank.read(row).loss_mask.tolist() for row in range(4)] == [tensors["loss_mask"].tolist() for tensors in made]


def test_the_first_name_present_counts(tmp_path: Path) -> None:
    def twice(row: int, tensors: Tensors) -> Tensors:
        return tensors | {"tokens": tensors["input_ids"] + 1, "hidden_states": tensors["target_hidden_states"] * 2}

    make_dump(tmp_path / "dump", change=twice, lines=lambda row, name: {"shard": "nowhere", "path": name})
    made = [dumps.sample(length, row) for row, length in enumerate(dumps.LENGTHS)]
    assert_holds(import_all(tmp_path / "dump", tmp_path / "bank"), made)


@pytest.mark.parametrize("ids", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64])
@pytest.mark.parametrize("flat", [True, False])
def test_ids_of_any_integer_type_and_hidden_states_of_either_shape(tmp_path: Path, ids: torch.dtype, flat: bool) -> None:
    def change(row: int, tensors: Tensors) -> Tensors:
        length = len(tensors["input_ids"])
        shapes = {"target_hidden_states": (length, -1)} if flat else {"target_last_hidden_states": (1, length, 1, WIDTH)}
        shaped = {name: tensors[name].reshape(shape) for name, shape in shapes.items()}
        return tensors | shaped | {"input_ids": tensors["input_ids"].to(ids).reshape(1, -1)}

    make_dump(tmp_path / "dump", change=change)
    made = [dumps.sample(length, row) for row, length in enumerate(dumps.LENGTHS)]
    assert_holds(import_all(tmp_path / "dump", tmp_path / "bank"), made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_any_width_become_bfloat16(tmp_path: Path, dtype: torch.dtype) -> None:
    def change(row: int, tensors: Tensors) -> Tensors:
        names = ("target_hidden_states", "target_last_hidden_states")
        return tensors | {name: (tensors[name].double() * 1.2345).to(dtype) for name in names}

    made = make_dump(tmp_path / "dump", change=change)
    wide = [{name: value.double() if value.is_floating_point() else value for name, value in one.items()} for one in made]
    assert_holds(import_all(tmp_path / "dump", tmp_path / "bank"), wide)


def test_the_loss_mask_rules(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "dump", change=lambda row, tensors: tensors | {"loss_mask": tensors["loss_mask"].float()})
    wanted = {
        "ones_except_first": [[0] + [1] * (length - 1) for length in dumps.LENGTHS],
        "all_ones": [[1] * length for length in dumps.LENGTHS],
        "from_dump": [tensors["loss_mask"].int().tolist() for tensors in made],
    }
    for rule, masks in wanted.items():
        bank = import_all(tmp_path / "dump", tmp_path / rule, loss_mask=rule)
        assert [bank.read(row).loss_mask.tolist() for row in range(4)] == masks
        assert bank.manifest["loss_mask"] == rule


def test_width_and_layers_come_from_the_first_sample_and_hold_for_all(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump")
    facts = import_all(tmp_path / "dump", tmp_path / "bank", target_layer_ids=None).facts
    assert (facts.layers, facts.hidden_size, facts.target_layer_ids) == (LAYERS, WIDTH, None)
    with pytest.raises(
        InputError, match=r"line 1: s0.safetensors: tensor target_hidden_states .*\(5, 3, 8\); expected \(5, 2, 8\)"
    ):
        import_all(tmp_path / "dump", tmp_path / "other", target_layer_ids=(1, 11))
    with pytest.raises(InputError, match=r"tensor target_hidden_states is BF16 of shape \(5, 3, 8\); expected \(5, 3, 16\)"):
        import_all(tmp_path / "dump", tmp_path / "other", hidden_size=16)
    assert not (tmp_path / "other").exists()


def test_limit_takes_the_first_samples_and_does_not_look_at_the_others(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "dump", lines=lambda row, name: {"file": name} if row < 2 else "not json")
    assert_holds(import_all(tmp_path / "dump", tmp_path / "bank", limit=2), made[:2])


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "dump", lines=lambda row, name: f'\n  \n{{"file": "{name}"}}\r')
    assert_holds(import_all(tmp_path / "dump", tmp_path / "bank"), made)


# ------------------------------------------------------------------------------------------------------- what may be wrong


def tensors_with(**changed: Any) -> Any:
    """A change of row 2: new tensors, or None to take one away."""

    def change(row: int, tensors: Tensors) -> Mapping[str, torch.Tensor]:
        if row != 2:
            return tensors
        return {name: value for name, value in (tensors | changed).items() if value is not None}

    return change


def ids(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([*values, *[7] * (9 - len(values))], dtype=dtype)


BAD_SAMPLES = {
    "no ids": (tensors_with(input_ids=None), r"no tensor input_ids or input_id or ids or tokens; the file has: "),
    "empty ids": (tensors_with(input_ids=torch.zeros(0, dtype=torch.int64)), r"tensor input_ids is I64 of shape \(0,\)"),
    "negative id": (tensors_with(input_ids=ids(-1)), r"tensor input_ids has token id -1; expected 0 or more"),
    "id past 32 bits": (tensors_with(input_ids=ids(1 << 40)), r"token id 1099511627776; expected 0 or more, in 32 bits"),
    "id past the vocabulary": (
        tensors_with(input_ids=ids(5, 100)),
        r"token id 100 at position 1; expected less than --vocab-size 100",
    ),
    "float ids": (tensors_with(input_ids=torch.zeros(9)), r"tensor input_ids is F32 of shape \(9,\); expected integers"),
    "bool ids": (tensors_with(input_ids=torch.zeros(9, dtype=torch.bool)), r"is BOOL of shape \(9,\); expected integers"),
    "another count": (tensors_with(input_ids=ids()[:8]), r"of shape \(9, 3, 8\); expected \(8, 3, 8\) or \(8, 24\)"),
    "a layer less": (
        tensors_with(target_hidden_states=torch.zeros(9, 2, WIDTH).bfloat16()),
        r"tensor target_hidden_states is BF16 of shape \(9, 2, 8\); expected \(9, 3, 8\)",
    ),
    "integers for hidden states": (
        tensors_with(target_hidden_states=torch.zeros(9, 3, WIDTH, dtype=torch.int16)),
        r"is I16 of shape \(9, 3, 8\); expected one of F16",
    ),
    "last too short": (
        tensors_with(target_last_hidden_states=torch.zeros(8, WIDTH).bfloat16()),
        r"tensor target_last_hidden_states is BF16 of shape \(8, 8\); expected \(9, 8\)",
    ),
    "no last": (tensors_with(target_last_hidden_states=None), r"no tensor target_last_hidden_states or "),
    "no mask": (tensors_with(loss_mask=None), r"no tensor loss_mask or loss_masks"),
    "mask of another length": (tensors_with(loss_mask=torch.ones(8)), r"tensor loss_mask is F32 of shape \(8,\)"),
    "mask that is none": (tensors_with(loss_mask=ids(2)), r"tensor loss_mask has values other than 0 and 1"),
}

BAD_LINES = {
    "not JSON": ("{", r"not JSON"),
    "deep JSON": ("[" * 100_000, r"not JSON"),
    "not UTF-8": ("\udcff", r"not JSON"),
    "a list": ("[1]", r"names no file"),
    "no file": ('{"n_tokens": 3}', r"names no file; expected a JSON object with one of file, path"),
    "a number for a file": ('{"file": 3}', r"names no file"),
    "missing": ('{"file": "gone.safetensors"}', r"gone.safetensors: the file is missing"),
    "a folder": ('{"file": "."}', r"the file is missing"),
    "twice": ('{"file": "s0.safetensors"}', r"s0.safetensors: is the sample of line 1 already"),
    "absolute": ('{"file": "/etc/hostname"}', r"/etc/hostname: lies outside the dump"),
    "above": ('{"file": "../outside.safetensors"}', r"lies outside the dump, at .*outside.safetensors; give --allow-outside"),
    "a link out": ('{"file": "link.safetensors"}', r"link.safetensors: lies outside the dump"),
    "a loop of links": ('{"file": "loop"}', r"loop"),
    "a name too long": (json.dumps({"file": "x" * 5000}), r"not the name of a file"),
    "a surrogate": ('{"file": "\\ud800"}', r"not the name of a file"),
}


def assert_refused_and_quarantined(tmp_path: Path, words: str, kept: list[int], **options: Any) -> None:
    """An error in line 3 that leaves nothing behind, or a sample set aside."""
    with pytest.raises(InputError, match=rf"index.jsonl line 3(: .*)?: .*{words}|index.jsonl line 3: {words}"):
        import_targets(config(**options), tmp_path / "dump", tmp_path / "bank")
    assert not (tmp_path / "bank").exists()
    bank = import_all(tmp_path / "dump", tmp_path / "bank", on_bad_sample="quarantine", **options)
    assert [bank.read(row).name for row in range(len(bank))] == [f"s{row}.safetensors" for row in kept]
    (set_aside,) = (json.loads(line) for line in (tmp_path / "bank" / "quarantine.jsonl").read_text().splitlines())
    assert set_aside["line"] == 3
    assert bank.manifest["counts"]["dropped"] == {"quarantined": 1, "nonfinite": 0}
    assert all(check.ok for check in verify(tmp_path / "bank"))


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_is_an_error_with_line_file_tensor_found_and_expected(tmp_path: Path, name: str) -> None:
    change, words = BAD_SAMPLES[name]
    make_dump(tmp_path / "dump", change=change)
    options = {"loss_mask": "from_dump"} if "mask" in name else {}
    assert_refused_and_quarantined(tmp_path, words, [0, 1, 3], vocab_size=100, **options)


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_an_error_with_its_number(tmp_path: Path, name: str) -> None:
    line, words = BAD_LINES[name]
    make_dump(tmp_path / "dump")
    shutil.copy(tmp_path / "dump" / "s0.safetensors", tmp_path / "outside.safetensors")
    (tmp_path / "dump" / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (tmp_path / "dump" / "loop").symlink_to("loop")
    index = tmp_path / "dump" / "index.jsonl"
    lines = index.read_bytes().splitlines()
    lines[2] = line.encode("utf-8", "surrogateescape")
    index.write_bytes(b"\n".join(lines))
    assert_refused_and_quarantined(tmp_path, words, [0, 1, 3])


def test_files_outside_are_read_where_that_is_asked_for(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "elsewhere")
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "s1.safetensors").symlink_to(tmp_path / "elsewhere" / "s1.safetensors")
    files = [str(tmp_path / "elsewhere" / "s0.safetensors"), "s1.safetensors", "../elsewhere/s2.safetensors"]
    (dump / "index.jsonl").write_text("".join(json.dumps({"file": file}) + "\n" for file in files))
    with pytest.raises(InputError, match="lies outside"):
        import_targets(config(), dump, tmp_path / "bank")
    assert_holds(import_all(dump, tmp_path / "bank", allow_outside=True), made[:3])


def header(path: Path, text: bytes, count: int | None = None) -> None:
    """Put another header before the data of a safetensors file."""
    data = path.read_bytes()
    old = struct.unpack("<Q", data[:8])[0]
    path.write_bytes(struct.pack("<Q", len(text) if count is None else count) + text + data[8 + old :])


TORN = {
    "empty": lambda path: path.write_bytes(b""),
    "seven bytes": lambda path: path.write_bytes(b"\0" * 7),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "cut in the data": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a huge header": lambda path: header(path, b"{}", 1 << 63),
    "a header of 200 MB": lambda path: header(path, b"{}", 200_000_000),
    "no JSON": lambda path: header(path, b"{'a': 1}"),
    "a list": lambda path: header(path, b"[]"),
    "no offsets": lambda path: header(path, b'{"input_ids": {"dtype": "I64", "shape": [9]}}'),
    "negative": lambda path: header(path, b'{"a": {"dtype": "I64", "shape": [-1], "data_offsets": [0, 8]}}'),
    "a shape that is none": lambda path: header(path, b'{"a": {"dtype": "I64", "shape": ["x"], "data_offsets": [0, 8]}}'),
    "another size": lambda path: header(path, b'{"a": {"dtype": "I64", "shape": [2], "data_offsets": [0, 8]}}'),
    "a hole": lambda path: header(path, b'{"a": {"dtype": "I64", "shape": [1], "data_offsets": [8, 16]}}'),
    "a name twice": lambda path: header(path, b'{"a": {}, "a": {}}'),
}


@pytest.mark.parametrize("name", TORN)
def test_a_torn_file_is_an_error_with_its_name(tmp_path: Path, name: str) -> None:
    make_dump(tmp_path / "dump")
    TORN[name](tmp_path / "dump" / "s2.safetensors")
    assert_refused_and_quarantined(tmp_path, r"s2.safetensors: not a whole safetensors file: ", [0, 1, 3])


def test_a_dump_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"index.jsonl: cannot be read \(No such file or directory\)"):
        import_targets(config(), tmp_path, tmp_path / "bank")
    make_dump(tmp_path / "dump", ())
    with pytest.raises(InputError, match=r"no good sample in index.jsonl"):
        import_targets(config(), tmp_path / "dump", tmp_path / "bank")
    with pytest.raises(InputError, match=r"Give --target-model"):
        import_targets(config(target_model=None), tmp_path / "dump", tmp_path / "bank")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_layer_ids": (11, 1)}, "--layers 11,1: expected ascending"),
        ({"target_layer_ids": (1, 1)}, "ascending"),
        ({"target_layer_ids": (-2, 1)}, "−1 for the embeddings"),
        ({"target_layer_ids": ()}, "ascending"),
        ({"loss_mask": "some"}, "loss_mask is 'some'; expected one of auto, ones_except_first, all_ones, from_dump"),
        ({"last_hidden_norm": "both"}, "post, pre, unknown"),
        ({"on_nonfinite": "zero"}, "error, keep, drop"),
        ({"on_bad_sample": "skip"}, "error, quarantine"),
        ({"codec": "int8"}, "bf16, fp8"),
        ({"spans": "some"}, "all, supervised"),
        ({"limit": 0}, "limit is 0"),
        ({"hidden_size": -1}, "hidden_size is -1"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        config(**options)


# ------------------------------------------------------------------------------------------------------------- not finite


def with_inf(row: int, tensors: Tensors) -> Tensors:
    if row == 2:
        tensors["target_hidden_states"][4, 1, 3] = float("inf")
        tensors["target_hidden_states"][5, 1, 0] = float("nan")
        tensors["target_last_hidden_states"][0, 0] = float("-inf")
    return tensors


def test_nan_and_inf_are_an_error_with_sample_and_layer(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump", change=with_inf)
    for run in (import_targets, import_to_deepspec):
        with pytest.raises(BadVector, match=r"s2.safetensors: .* NaN or Inf \(2 in layer 11\), first at hidden state 4 of 9"):
            run(config(), tmp_path / "dump", tmp_path / run.__name__)
        assert not list((tmp_path / run.__name__).glob("*.bin"))
        assert not list((tmp_path / run.__name__).glob("state.json"))


def test_nan_and_inf_kept_are_counted_a_layer_and_verify_finds_them(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "dump", change=with_inf)
    bank = import_all(tmp_path / "dump", tmp_path / "bank", on_nonfinite="keep")
    assert_holds(bank, made)
    assert bank.manifest["nonfinite"] == {"1": 0, "11": 2, "21": 0, "last": 1}
    failed = {check.name: check.detail for check in verify(tmp_path / "bank") if not check.ok}
    assert set(failed) == {"hidden"}
    assert "layer 11: 2 of 19 vectors not finite, first at s2.safetensors token 4" in failed["hidden"]
    assert "layer last: 1 of 19 vectors not finite, first at s2.safetensors token 0" in failed["hidden"]


def test_samples_with_nan_or_inf_are_dropped_and_counted(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "dump", change=with_inf)
    bank = import_all(tmp_path / "dump", tmp_path / "bank", on_nonfinite="drop")
    assert [bank.read(row).name for row in range(3)] == ["s0.safetensors", "s1.safetensors", "s3.safetensors"]
    assert np.array_equal(bank.read(2).taps, bits(made[3]["target_hidden_states"]))
    assert bank.manifest["counts"]["dropped"] == {"quarantined": 0, "nonfinite": 1}
    cache = import_to_deepspec(config(on_nonfinite="drop"), tmp_path / "dump", tmp_path / "cache")
    assert cache["num_samples"] == 3


def test_an_import_that_met_an_inf_goes_on_with_keep(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump", change=with_inf)
    with pytest.raises(BadVector):
        import_all(tmp_path / "dump", tmp_path / "bank", max_shard_bytes=700)
    first = (tmp_path / "bank" / "data-00000.arrow").stat().st_ino
    import_all(tmp_path / "dump", tmp_path / "bank", max_shard_bytes=700, on_nonfinite="keep")
    assert (tmp_path / "bank" / "data-00000.arrow").stat().st_ino == first


# ------------------------------------------------------------------------------------------------------- spans and codecs


def test_supervised_spans_keep_what_a_loss_token_needs(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "dump", (12, 30, 7))
    bank = import_all(tmp_path / "dump", tmp_path / "bank", loss_mask="from_dump", spans="supervised")
    for row, tensors in enumerate(made):
        mask = tensors["loss_mask"].tolist()
        wanted = [at for at in range(len(mask)) if mask[at] or (at + 1 < len(mask) and mask[at + 1])]
        sample = bank.read(row)
        assert sample.positions is not None
        assert sample.positions.tolist() == wanted
        assert np.array_equal(sample.taps, bits(tensors["target_hidden_states"])[wanted])
        assert np.array_equal(sample.last, bits(tensors["target_last_hidden_states"])[wanted])
        assert sample.input_ids.tolist() == tensors["input_ids"].tolist()
    kept = bank.manifest["counts"]["hidden_tokens"]
    assert kept < bank.manifest["counts"]["tokens"]
    assert all(check.ok for check in verify(tmp_path / "bank"))
    found = estimate_import(config(loss_mask="from_dump", spans="supervised"), tmp_path / "dump", tmp_path)
    assert found.total_bytes == 6 * 49 + kept * 2 * WIDTH * (LAYERS + 1)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=30))
def test_needed_positions_are_loss_tokens_and_those_that_predict_them(mask: list[int]) -> None:
    wanted = {at for at, one in enumerate(mask) if one} | {at - 1 for at, one in enumerate(mask) if one and at}
    assert needed_positions(np.array(mask, np.uint8)).tolist() == sorted(wanted)


def test_fp8_is_half_the_size_and_says_how_far_off_it_is(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "dump", (40, 25), width=128)
    plain = import_all(tmp_path / "dump", tmp_path / "plain")
    bank = import_all(tmp_path / "dump", tmp_path / "bank", codec="fp8")
    sizes = [sum(path.stat().st_size for path in b.folder.glob("*.arrow")) for b in (bank, plain)]
    assert sizes[0] < 0.56 * sizes[1]
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in ("1", "11", "21", "last")}
    for row, tensors in enumerate(made):
        sample = bank.read(row)
        stored = torch.from_numpy(sample.taps.view(np.int16).copy()).view(torch.bfloat16).double().view(-1, 3, 128)
        true = tensors["target_hidden_states"].double()
        for at, name in enumerate(("1", "11", "21")):
            errors[name].append(torch.stack([stored[:, at], true[:, at]]))
        last = torch.from_numpy(sample.last.view(np.int16).copy()).view(torch.bfloat16).double()
        errors["last"].append(torch.stack([last, tensors["target_last_hidden_states"].double()]))
    for name, parts in errors.items():
        stored, true = torch.cat(parts, dim=1)
        said = bank.manifest["codec_error"][name]
        assert said["cosine"] == pytest.approx(torch.cosine_similarity(stored, true, dim=1).mean().item(), abs=2e-6)
        assert said["relative"] == pytest.approx(((stored - true).norm() / true.norm()).item(), abs=2e-6)
        assert said["cosine"] > 0.999
    assert all(check.ok for check in verify(tmp_path / "bank"))
    assert estimate_import(config(codec="fp8"), tmp_path / "dump", tmp_path).total_bytes == 65 * (6 + 4 * (128 + 4))


def test_fp8_cannot_hold_inf(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump", change=with_inf)
    with pytest.raises(BadVector, match="fp8 cannot hold NaN and Inf"):
        import_all(tmp_path / "dump", tmp_path / "bank", codec="fp8", on_nonfinite="keep")


def test_a_bank_in_fp8_and_spans_opens_for_training(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump")
    import_all(tmp_path / "dump", tmp_path / "bank", codec="fp8", spans="supervised", loss_mask="ones_except_first")
    row = open_bank(tmp_path / "bank").to_torch()[2]
    assert row["target_hidden_states"].dtype is torch.bfloat16
    assert row["hidden_positions"].tolist() == list(range(9))
    assert row["target_hidden_states"].shape == (9, LAYERS * WIDTH)


# --------------------------------------------------------------------------------------------------- size, resume, fuzzing


def test_the_size_is_known_before_and_a_budget_is_kept(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump")
    found = estimate_import(config(), tmp_path / "dump", tmp_path)
    assert found.counts["bytes_per_token"] == 2 * WIDTH * (LAYERS + 1) + 6
    assert (found.rows, found.tokens, found.total_bytes) == (4, 19, 19 * found.counts["bytes_per_token"])
    assert found.fits
    small = RunOptions(budget_gb=(found.total_bytes - 1) / 1e9)
    assert not estimate_import(config(), tmp_path / "dump", tmp_path / "out", options=small).fits
    for run in (import_targets, import_to_deepspec):
        with pytest.raises(DiskFull, match=r"takes 1\.3 kB, the budget is 1\.3 kB\. Give fewer --layers, --codec fp8"):
            run(config(), tmp_path / "dump", tmp_path / "out", options=small)
    import_targets(config(), tmp_path / "dump", tmp_path / "bank", options=RunOptions(budget_gb=found.total_bytes / 1e9))
    with pytest.raises(InputError, match="--worker: has no effect with --to deepspec"):
        import_to_deepspec(config(), tmp_path / "dump", tmp_path / "cache", options=RunOptions(worker=(0, 2)))
    assert not (tmp_path / "cache").exists()


def test_another_process_refuses_a_dump_that_has_changed(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump")
    stage = ImportStage(config(max_shard_bytes=100), tmp_path / "dump", find_rows(config(), tmp_path / "dump"))
    make_dump(tmp_path / "dump", change=lambda row, tensors: {**tensors, "input_ids": tensors["input_ids"] + 1})
    with pytest.raises(InputError, match="dump: holds other samples than before"):
        stage.run(tmp_path / "bank", RunOptions(workers=2))
    assert not list((tmp_path / "bank").glob("data-*.arrow"))


def test_another_dump_or_option_is_another_plan(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump")
    import_all(tmp_path / "dump", tmp_path / "bank")
    before = tree_bytes(tmp_path / "bank")
    import_all(tmp_path / "dump", tmp_path / "bank")
    with pytest.raises(PlanMismatch, match='last_hidden_norm: found "post", wanted "pre"'):
        import_all(tmp_path / "dump", tmp_path / "bank", last_hidden_norm="pre")
    make_dump(tmp_path / "longer", (5, 1, 9, 4, 2))
    with pytest.raises(PlanMismatch, match="rows"):
        import_all(tmp_path / "longer", tmp_path / "bank")
    assert tree_bytes(tmp_path / "bank") == before


@pytest.mark.slow
@pytest.mark.parametrize("run", [import_targets, import_to_deepspec])
def test_an_import_killed_at_any_moment_goes_on_to_the_same_bytes(tmp_path: Path, run: Any) -> None:
    make_dump(tmp_path / "dump", lines=lambda row, name: {"file": name} if row != 1 else "bad")
    how = config(max_shard_bytes=700, on_bad_sample="quarantine")
    run(how, tmp_path / "dump", tmp_path / "whole")
    whole = tree_bytes(tmp_path / "whole")
    moment, out = 0, tmp_path / "out"
    while True:
        moment += 1
        shutil.rmtree(out, ignore_errors=True)
        outcome = kill_at(moment, run, how, tmp_path / "dump", out)
        assert not outcome.error
        run(how, tmp_path / "dump", out)
        assert tree_bytes(out) == whole, f"moment {moment}"
        if not outcome.killed:
            break
    assert moment > 20


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump")
    found = find_rows(config(), tmp_path / "dump")
    TORN["cut in the data"](tmp_path / "dump" / "s2.safetensors")
    with pytest.raises(InputError, match=r"s2.safetensors"):
        found.rows.read(2)


DAMAGE = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(["flip", "cut", "insert"])), max_size=3)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(DAMAGE, st.integers(0, 2), st.sampled_from(["error", "quarantine"]), st.sampled_from(["error", "keep", "drop"]))
def test_a_damaged_dump_never_ends_in_a_traceback_or_a_cache_that_is_rejected(
    fuzzed: Path, damage: list[tuple[int, int, str]], row: int, on_bad_sample: str, on_nonfinite: str
) -> None:
    dump, out = fuzzed / "dump", fuzzed / "out"
    shutil.rmtree(dump, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(fuzzed / "good", dump)
    for at, byte, how in damage:
        path = dump / ("index.jsonl" if at % 5 == 0 else f"s{row}.safetensors")
        data = bytearray(path.read_bytes())
        at = (at // 5) % max(1, len(data) if at % 2 else min(len(data), 300))
        if how == "flip" and data:
            data[at] ^= byte
        elif how == "cut":
            del data[at:]
        else:
            data.insert(at, byte)
        path.write_bytes(data)
    how = config(on_bad_sample=on_bad_sample, on_nonfinite=on_nonfinite, vocab_size=100)
    try:
        import_to_deepspec(how, dump, out)
    except ArrowbankError:
        assert not (out / "manifest.json").exists()
    else:
        cache = DeepSpecCache(out)
        for index in range(len(cache.lengths)):
            sample = cache.read(index)
            assert sample.input_ids.min() >= 0
            assert sample.input_ids.max() < 100
            assert len(sample.taps) == len(sample.last) == len(sample.input_ids)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    make_dump(folder / "good", (3, 1, 2))
    return folder


def test_importing_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    make_dump(tmp_path / "dump")
    code = (
        "import sys; from arrowbank import ImportConfig, import_targets, import_to_deepspec;"
        "c = ImportConfig(target_model='m', target_layer_ids=(1, 2, 3));"
        f"import_targets(c, {str(tmp_path / 'dump')!r}, {str(tmp_path / 'a')!r});"
        f"import_to_deepspec(c, {str(tmp_path / 'dump')!r}, {str(tmp_path / 'b')!r});"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
