"""`in2 verify`: whole arms pass, each check fails on an arm that was broken for it, and arms of other options are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from arrowbank import ExportConfig, build_in2, export, verify_in2
from arrowbank.cli import main
from arrowbank.errors import InputError
from tests import arms
from tests.arms import Rows
from tests.exports import write_sidecar
from tests.mutations import reseal

T = 600
SPAN = 5


def failed(*folders: Path, **options: Any) -> dict[str, str]:
    """The checks that fail, and what they say."""
    return {check.name: check.detail for check in verify_in2(folders, **options) if not check.ok}


@pytest.mark.parametrize("arm", ["a", "b", "c"])
@pytest.mark.parametrize("mirror", [True, False])
def test_a_whole_arm_passes(arm: str, mirror: bool, tmp_path: Path) -> None:
    checks = verify_in2([arms.build_small(tmp_path, arm, mirror=mirror)])
    assert [check.detail for check in checks if not check.ok] == []
    assert ({"mirror", "records", "windows"} <= {check.name for check in checks}) == mirror


def test_matched_arms_pass_together(tmp_path: Path) -> None:
    checks = verify_in2([arms.build_small(tmp_path, arm) for arm in "abc"])
    assert all(check.ok for check in checks)
    assert {"a: ids", "b: ids", "c: ids", "arms: filler", "arms: keys and values", "arms: histogram"} <= {
        check.name for check in checks
    }


def test_the_golden_arms_pass(tmp_path: Path) -> None:
    fillers = arms.save_golden_fillers(tmp_path)
    for case in arms.golden_cases()[:3]:
        build_in2(arms.golden_config(case), fillers, tmp_path / case["name"])
    assert failed(*(tmp_path / case["name"] for case in arms.golden_cases()[:3])) == {}


# a change of one thing, in Arrow and raw shards alike, and the check that it is for


def both(rows: Rows, row: int, place: int, ids: Any) -> None:
    """Write ids into example `row` of the Arrow and of the raw shard."""
    ids = np.atleast_1d(ids)
    rows.ids[row, place : place + len(ids)] = ids
    rows.raw.reshape(-1, T)[row, place : place + len(ids)] = ids


def first(rows: Rows, name: str) -> int:
    return int(rows.columns[name][0])


def id_outside(rows: Rows) -> None:
    both(rows, 1, 0, arms.VOCAB)


def other_key(rows: Rows) -> None:
    place = first(rows, "probe_start")
    both(rows, 0, place, rows.ids[0, place] ^ 1)


def other_answer(rows: Rows) -> None:
    place = first(rows, "answer_start")
    both(rows, 0, place, rows.ids[0, place] ^ 1)


def answer_recorded_elsewhere(rows: Rows) -> None:
    rows.columns["answer_start"][0] += 1


def other_needle(rows: Rows) -> None:
    place = first(rows, "needle_start") + SPAN - 1
    both(rows, 0, place, rows.ids[0, place] ^ 1)


def needle_behind(rows: Rows) -> None:
    rows.columns["needle_start"][0] = first(rows, "probe_start") + 10


def other_distance(rows: Rows) -> None:
    rows.columns["distance"][3] += 1


def into_the_tail(rows: Rows) -> None:
    rows.columns["answer_start"][5] = T - 4 - 2


def overlapping(rows: Rows) -> None:
    rows.columns["needle_start"][1] = first(rows, "needle_start") + 1


def needle_outside(rows: Rows) -> None:
    rows.columns["needle_start"][0] = -3


def sites_too_close(rows: Rows) -> None:
    rows.columns["probe_start"][1] = first(rows, "probe_start") + 2 * SPAN - 1


def needle_too_close(rows: Rows) -> None:
    rows.columns["needle_start"][0] = first(rows, "probe_start") - SPAN - 7


def decoy_asked_for(rows: Rows) -> None:
    probe, decoy = first(rows, "probe_start"), first(rows, "decoy_start")
    both(rows, 0, decoy, rows.ids[0, probe : probe + 2])


def decoy_changed(rows: Rows) -> None:
    place = first(rows, "decoy_start") + 3
    both(rows, 0, place, rows.ids[0, place] ^ 1)


def other_mask(rows: Rows) -> None:
    rows.mask[2, 0] = 1


def planted_everywhere(rows: Rows, row: int) -> np.ndarray[Any, Any]:
    """Where example `row` holds something planted."""
    taken = np.zeros(T, bool)
    for name, count in (("needle_start", 6), ("probe_start", 6), ("decoy_start", 1)):
        for place in rows.columns[name][row * count : (row + 1) * count]:
            taken[place : place + SPAN] = True
    return taken


def other_filler(rows: Rows) -> None:
    place = int(np.flatnonzero(~planted_everywhere(rows, 2))[-1])
    both(rows, 2, place, rows.ids[2, place] ^ 1)


def filler_from_elsewhere(rows: Rows) -> None:
    rows.columns["filler_start"][0] += 1


def raw_only(rows: Rows) -> None:
    rows.raw[T - 1] ^= 1


def arrow_only(rows: Rows) -> None:
    rows.ids[2, T - 1] ^= 1


def fewer_decoys_said(rows: Rows) -> None:
    rows.columns["decoys_placed"][0] -= 1


def other_example(rows: Rows) -> None:
    rows.columns["example"][:2] = [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        (id_outside, "ids", "example 1"),
        (other_key, "probes", "example 0"),
        (other_answer, "answers", "example 0"),
        (answer_recorded_elsewhere, "answers", "example 0"),
        (other_needle, "needles", "example 0"),
        (needle_outside, "needles", "example 0"),
        (needle_behind, "order", "example 0"),
        (other_distance, "distances", "example 0"),
        (into_the_tail, "tail", "example 0"),
        (overlapping, "overlaps", "example 0"),
        (sites_too_close, "sites", "example 0"),
        (needle_too_close, "arm", "example 0"),
        (decoy_asked_for, "decoys", "example 0"),
        (decoy_changed, "decoys", "example 0"),
        (other_mask, "mask", "example 2"),
        (other_mask, "counts", "answer_tokens"),
        (answer_recorded_elsewhere, "counts", "answer_start_hist"),
        (other_filler, "filler", "example 2"),
        (filler_from_elsewhere, "filler", "example 0"),
        (raw_only, "mirror", "example 0"),
        (arrow_only, "mirror", "example 2"),
        (fewer_decoys_said, "triples", "example 0"),
        (other_example, "triples", "example 0, 1"),
        (other_distance, "records", "example 0"),
        (other_needle, "windows", "a triple is not whole in example 0"),
        (needle_behind, "hashes", "data-00000.arrow"),
        (raw_only, "hashes", "in2c_train_00000.bin"),
    ],
)
def test_each_check_fails_on_an_arm_that_was_broken_for_it(
    change: Callable[[Rows], None], check: str, words: str, tmp_path: Path
) -> None:
    out = arms.build_small(tmp_path)
    arms.break_arm(out, change)
    assert words in failed(out)[check]


def test_in_arm_b_a_needle_must_stand_right_before_its_probe(tmp_path: Path) -> None:
    def move(rows: Rows) -> None:
        rows.columns["needle_start"][0] -= 1

    out = arms.build_small(tmp_path, "b")
    arms.break_arm(out, move)
    assert "example 0" in failed(out)["arm"]


def test_files_that_are_missing_cut_or_too_many(tmp_path: Path) -> None:
    out = arms.build_small(tmp_path)
    stray = out / "in2c_train_00002.bin"
    stray.write_bytes(b"1234")
    assert failed(out) == {"files": "in2c_train_00002.bin is not the bank's"}
    stray.unlink()
    last = out / "in2c_train_00001.bin"
    data = last.read_bytes()
    last.write_bytes(data[:-2])
    assert f"in2c_train_00001.bin: {len(data) - 2} bytes on disk" in failed(out)["files"]
    last.unlink()
    assert "the file is missing" in failed(out)["files"]
    (out / "state.json").unlink()
    assert "not committed" in failed(out)["files"]
    assert "no such folder" in failed(tmp_path / "gone")["files"]


@pytest.mark.parametrize(("name", "value"), [("decoys_placed", 1), ("survivors", {"T": 42, "T+1": 1}), ("synthetic_tokens", 0)])
def test_a_manifest_that_counts_otherwise(name: str, value: object, tmp_path: Path) -> None:
    out = arms.build_small(tmp_path)
    reseal(out, lambda manifest: manifest.update({name: value}))
    assert f"manifest.json says {name}" in failed(out)["counts"]
    assert ("windows" in failed(out)) == (name == "survivors")


def test_the_raw_shards_manifest_is_held_against_the_rows(tmp_path: Path) -> None:
    out = arms.build_small(tmp_path)
    path = out / "in2c_train_00000.json"
    text = path.read_text()
    path.write_text(text.replace('"answer_tokens": 126', '"answer_tokens": 127'))
    assert "says answer_tokens 127, counted 126" in failed(out)["counts"]
    path.write_text(text.replace('"distance": ', '"distance":  ').replace("{", " ", 1)[: len(text)])
    broken = failed(out)
    assert "example 0, 1, 2, 3, 4 and 2 more" in broken["records"]
    assert "its last line is not what was written" in broken["counts"] or "hashes" in broken


def test_a_filler_that_is_gone_changed_or_moved(tmp_path: Path) -> None:
    out, filler = arms.build_small(tmp_path), tmp_path / "filler.bin"
    filler.rename(tmp_path / "moved.bin")
    assert "filler.bin: no such filler" in failed(out)["filler"]
    assert failed(out, fillers=[tmp_path / "moved.bin"]) == {}
    arms.save_filler(filler, seed=2)
    assert "not the filler that" in failed(out)["filler"]
    assert "built from 1 fillers, 2 are given" in failed(out, fillers=[filler, filler])["filler"]


def test_the_folder_and_its_filler_can_move_together(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    arms.build_small(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert failed(tmp_path / "there" / "c") == {}


def test_keys_that_are_there_once_more_are_counted_and_an_error_where_that_is_asked_for(tmp_path: Path) -> None:
    def once_more(rows: Rows) -> None:  # into the filler of example 1: the key of its first probe
        probe = int(rows.columns["probe_start"][6])
        free = np.flatnonzero(np.convolve(planted_everywhere(rows, 1), [1] * 4, "same") == 0)
        both(rows, 1, int(free[5]), rows.ids[1, probe : probe + 2])

    out = arms.build_small(tmp_path)
    before = {check.name: check.detail for check in verify_in2([out])}["keys"]
    arms.break_arm(out, once_more)
    after = {check.name: check for check in verify_in2([out])}["keys"]
    count = int(before.split(", ")[1].split()[0])
    assert (after.ok, after.detail) == (True, before.replace(f" {count} times", f" {count + 1} times"))
    assert "keys" in failed(out, unique_keys=True)


# arms against each other


def test_arms_whose_rows_differ(tmp_path: Path) -> None:
    def shift(rows: Rows) -> None:
        rows.columns["filler_start"][0] += 1
        rows.columns["answer_start"][0] += 1
        place = first(rows, "probe_start")
        both(rows, 0, place, rows.ids[0, place] ^ 1)

    a, b, c = (arms.build_small(tmp_path, arm) for arm in "abc")
    arms.break_arm(c, shift)
    found = failed(a, b, c)
    for name in ("arms: filler", "arms: keys and values", "arms: histogram"):
        assert str(c) in found[name]
    assert not any(name.startswith(("a: ", "b: ")) for name in found)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 1}, "--seed is 1"),
        ({"triples": 5}, "--triples is 5"),
        ({"alphabet": 299}, "--alphabet is 299"),
        ({"examples": 8}, "--examples is 8"),
        ({"decoys": 3}, "--decoys is 3"),
        ({"min_distance": 9}, "--min-distance is 9"),
        ({"length": 601}, "--length is 601"),
        ({"split": "val"}, "--split is val"),
    ],
)
def test_arms_of_different_options_are_an_error_that_names_the_option(
    options: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b, c = arms.build_small(tmp_path, "b"), arms.build_small(tmp_path, "c", **options)
    with pytest.raises(InputError, match=f"{named}.*has "):
        verify_in2([b, c])
    assert main(["in2", "verify", str(b), str(c)]) == 2
    assert named in capsys.readouterr().err


def test_arms_of_different_fillers_are_an_error(tmp_path: Path) -> None:
    b = arms.build_small(tmp_path, "b")
    build_in2(arms.small("c"), [arms.save_filler(tmp_path / "other.bin", seed=2)], tmp_path / "c")
    with pytest.raises(InputError, match="--filler names other content"):
        verify_in2([b, tmp_path / "c"])


def test_the_command_line_prints_a_line_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b, c = (str(arms.build_small(tmp_path, arm)) for arm in "bc")
    capsys.readouterr()
    assert main(["in2", "verify", b, c]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok  ") for line in lines)
    arms.break_arm(Path(c), other_needle)
    assert main(["in2", "verify", b, c, "--json"]) == 1
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (event["phase"], event["ok"]) == ("done", False)
    assert len(event["checks"]) == len(lines)
    assert main(["in2", "verify", c]) == 1
    assert any(line.startswith("FAIL  needles") for line in capsys.readouterr().out.splitlines())


# exports


@pytest.mark.parametrize("format", ["raw", "llmc", "nanogpt", "nanogpt-npy", "megatron", "nanotron"])
def test_an_export_is_read_back_as_its_loader_cuts_it(format: str, tmp_path: Path) -> None:
    arm, out = arms.build_small(tmp_path), tmp_path / format
    note = export(ExportConfig(format=format), arm, out)
    assert failed(arm, out) == {}
    assert "is not among the folders" in failed(out)[f"{format} ({format})"]
    ending = {"nanogpt-npy": "npy", "nanotron": "ds"}.get(format, "bin")
    path = out / ("train.bin" if format == "nanogpt" else f"in2c_train_00000.{ending}")
    whole = path.read_bytes()
    rows = np.array(datasets.load_from_disk(str(arm))[0]["probe_start"])
    at = len(whole) - 2 * note["shards"][0]["tokens"] + 2 * int(rows[0])  # a byte of a key
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert "example 0" in failed(arm, out)[f"{format} ({format}): examples"]
    if format != "nanogpt":  # whose windows are counted only
        assert "a triple is not whole in example 0" in failed(arm, out)[f"{format} ({format}): windows"]
    path.write_bytes(whole[:-2])
    assert path.stem in failed(arm, out)["files"]
    path.write_bytes(whole)
    write_sidecar(out, note | {"survivors": dict.fromkeys(note["survivors"], 1)})
    assert "the manifest says 1" in failed(arm, out)[f"{format} ({format}): windows"]


@pytest.mark.parametrize(
    ("format", "name", "at"),
    [
        ("llmc", "in2c_train_00000.bin", 8),
        ("llmc", "in2c_train_00000.bin", 3),
        ("nanogpt-npy", "in2c_train_00000.npy", 1),
        ("megatron", "in2c_train_00000.idx", 0),
        ("megatron", "in2c_train_00000.idx", 17),
        ("megatron", "in2c_train_00001.idx", 40),
        ("megatron", "in2c_train_00000.idx", -1),
        ("nanotron", "in2c_train_00000.ds.index", -8),
        ("nanotron", "in2c_train_00000.ds.metadata", 8),
    ],
)
def test_headers_and_indexes_that_were_changed(format: str, name: str, at: int, tmp_path: Path) -> None:
    arm, out = arms.build_small(tmp_path), tmp_path / "out"
    export(ExportConfig(format=format), arm, out)
    data = bytearray((out / name).read_bytes())
    data[at] ^= 1
    (out / name).write_bytes(data)
    assert f"not readable as {format}" in failed(arm, out)["files"]
    (out / name).unlink()
    assert f"not readable as {format}" in failed(arm, out)["files"]
