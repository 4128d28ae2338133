"""`in2 build`: the golden shards and manifests, the same bytes however it runs, every kind of filler, and everything it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from arrowbank import In2Config, RunOptions, build_in2, open_bank, verify_in2
from arrowbank.bank import BankWriter
from arrowbank.bank.verify import verify
from arrowbank.cli import main
from arrowbank.errors import InputError, PlanMismatch
from tests import arms, banks, tiny
from tests.kill import kill_after, kill_at, tree_bytes


def raw(folder: Path, config: In2Config) -> np.ndarray[Any, Any]:
    """All raw shards of an arm as [examples, T]."""
    names = sorted(folder.glob("in2*.bin"))
    assert [path.name for path in names] == [f"in2{config.arm}_{config.split}_{k:05d}.bin" for k in range(config.raw_files)]
    return np.concatenate([np.fromfile(path, config.dtype) for path in names]).reshape(-1, config.length)


@pytest.mark.parametrize("case", arms.golden_cases(), ids=lambda case: case["name"])
def test_the_golden_shards_and_manifests(case: dict[str, Any], tmp_path: Path) -> None:
    config = arms.golden_config(case)
    build_in2(config, arms.save_golden_fillers(tmp_path), tmp_path / "arm")
    for number, shard in enumerate(case["shards"]):
        data = (tmp_path / "arm" / f"in2{config.arm}_train_{number:05d}.bin").read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (2 * shard["tokens"], shard["sha256"])
    manifest = json.loads((tmp_path / "arm" / f"in2{config.arm}_train_00000.json").read_text())
    assert {name: manifest[name] for name in case["manifest"]} == case["manifest"]
    assert list(manifest["answer_start_hist"]) == list(case["manifest"]["answer_start_hist"])
    assert len(list((tmp_path / "arm").glob("*.bin"))) == len(case["shards"])


@pytest.mark.parametrize("arm", ["a", "c"])
def test_records_are_a_line_an_example_with_its_numbers_below_each_other(arm: str, tmp_path: Path) -> None:
    config = arms.small(arm)
    build_in2(config, [arms.save_filler(tmp_path / "filler.bin", 3000)], tmp_path / "arm")
    first, *lines, _ = (tmp_path / "arm" / f"in2{arm}_train_00000.json").read_text().splitlines()
    assert first == '{"records": ['
    assert [len(json.loads(line.rstrip(","))) for line in lines] == [config.triples * (arm != "a")] * config.examples
    assert len({tuple(found.end() for found in re.finditer(r"\d+", line)) for line in lines}) == 1


@pytest.mark.parametrize("arm", ["a", "b", "c"])
def test_the_dataset_is_the_draws_as_written(arm: str, tmp_path: Path) -> None:
    config = arms.small(arm)
    fillers = [arms.save_filler(tmp_path / f"filler_{seed}.bin", 3000 + seed, seed=seed) for seed in (1, 2)]
    build_in2(config, fillers, tmp_path / "arm")
    rows = datasets.load_from_disk(str(tmp_path / "arm"))
    assert len(rows) == config.examples
    for number, row in enumerate(rows):
        wanted = arms.as_written(config, [np.fromfile(path, "<u2") for path in fillers], number)
        assert row["input_ids"] == wanted.tokens
        for name in ("needle_start", "probe_start", "answer_start", "distance"):
            assert row[name] == [record[name] for record in wanted.records]
        answers = [place + token for place in row["answer_start"] for token in range(config.val_len)]
        assert np.flatnonzero(row["answer_mask"]).tolist() == answers
        assert (row["decoys_placed"], len(row["decoy_start"])) == (wanted.decoys, wanted.decoys)
        assert (row["arm"], row["example"], row["filler"]) == (arm, number, number % 2)
        source = np.fromfile(fillers[row["filler"]], "<u2")[row["filler_start"] :]
        planted = len(row["decoy_start"]) + 2 * len(row["probe_start"])
        assert np.count_nonzero(source[: config.length] != row["input_ids"]) <= planted * config.span
    assert rows.features["answer_mask"].feature.dtype == "uint8"
    assert np.array_equal(raw(tmp_path / "arm", config), np.array(rows["input_ids"]))
    assert all(check.ok for check in verify(tmp_path / "arm"))


def test_arms_differ_in_nothing_but_the_needles_places(tmp_path: Path) -> None:
    rows = {arm: datasets.load_from_disk(str(arms.build_small(tmp_path, arm))) for arm in "abc"}
    for name in ("probe_start", "answer_start"):
        assert rows["b"][name] == rows["c"][name]
    for name in ("filler", "filler_start", "example"):
        assert rows["a"][name] == rows["b"][name] == rows["c"][name]
    for one in "bc":
        for row in rows[one]:
            for needle, probe in zip(row["needle_start"], row["probe_start"], strict=True):
                assert row["input_ids"][needle : needle + 5] == row["input_ids"][probe : probe + 5]


def test_the_split_into_files_never_changes_the_data(tmp_path: Path) -> None:
    whole = raw(arms.build_small(tmp_path, raw_shards=1, name="one"), arms.small(raw_shards=1))
    parted = raw(arms.build_small(tmp_path, raw_shards=4, name="four"), arms.small(raw_shards=4))
    assert np.array_equal(whole, parted)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return arms.build_small(tmp_path_factory.mktemp("whole"))


def test_the_same_bytes_in_several_processes(whole: Path, tmp_path: Path) -> None:
    build_in2(arms.small(), [whole.parent / "filler.bin"], whole.parent / "two", options=RunOptions(workers=2))
    assert tree_bytes(whole.parent / "two") == tree_bytes(whole)


@pytest.mark.slow
def test_every_moment_of_death_is_made_good_by_the_same_command(tmp_path: Path) -> None:
    filler, config = arms.save_filler(tmp_path / "filler.bin"), arms.small(examples=4, raw_shards=1)
    build_in2(config, [filler], tmp_path / "whole")
    for moment in range(1, 1000):
        out = tmp_path / f"killed-{moment}"
        outcome = kill_at(moment, build_in2, config, [filler], out)
        assert outcome.error == ""
        if not outcome.killed:
            break
        if not (out / "state.json").exists():
            with pytest.raises(FileNotFoundError):
                datasets.load_from_disk(str(out))
        build_in2(config, [filler], out)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole"), f"killed at moment {moment}"
        shutil.rmtree(out)
    assert moment > 40


@pytest.mark.slow
def test_killed_from_outside_with_two_processes(whole: Path) -> None:
    filler, out = whole.parent / "filler.bin", whole.parent / "outside"
    for seconds in (0.05, 0.4, 0.8):
        kill_after(seconds, build_in2, arms.small(), [filler], out, options=RunOptions(workers=2))
    build_in2(arms.small(), [filler], out)
    assert tree_bytes(out) == tree_bytes(whole)


def test_another_plan_is_not_mixed_in_and_a_finished_one_is_left_alone(whole: Path) -> None:
    before = tree_bytes(whole)
    with pytest.raises(PlanMismatch, match="seed: found 0, wanted 1"):
        build_in2(arms.small(seed=1), [whole.parent / "filler.bin"], whole)
    build_in2(arms.small(global_batch=4), [whole.parent / "filler.bin"], whole)  # decides nothing that is written
    assert tree_bytes(whole) == before


def test_the_mirror_can_be_left_out(tmp_path: Path) -> None:
    out = arms.build_small(tmp_path, mirror=False)
    assert not list(out.glob("in2*"))
    assert len(open_bank(out)) == 7


@pytest.mark.parametrize("workers", [1, 2])
def test_an_example_without_a_place_ends_the_build_and_not_in_a_hang(workers: int, tmp_path: Path) -> None:
    filler = arms.save_filler(tmp_path / "filler.bin")
    config = arms.small(length=91, examples=40, min_distance=0, shard_tokens=3 * 91)  # examples 18 and 37 have no room
    with pytest.raises(arms.NoPlace):
        arms.as_written(config, [np.fromfile(filler, "<u2")], 18)
    with pytest.raises(InputError, match=r"example (18|37): .*Give fewer --triples"):
        build_in2(config, [filler], tmp_path / "arm", options=RunOptions(workers=workers))
    if workers == 1:  # of several, one may come to its bad example before another has written its first shard
        assert (tmp_path / "arm" / "data-00000.arrow").exists()
    assert not list((tmp_path / "arm").glob("in2*"))
    assert not (tmp_path / "arm" / "state.json").exists()


def test_a_build_does_not_wait_for_pandas(tmp_path: Path) -> None:
    arms.save_filler(tmp_path / "filler.bin")
    code = (
        "import sys; from arrowbank import In2Config, build_in2;"
        "build_in2(In2Config(arm='c', length=600, examples=3, triples=2, vocab=1000), ['filler.bin'], 'arm');"
        "print([name for name in ('pandas', 'torch', 'datasets') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_big_endian_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(InputError, match="this machine is big-endian"):
        arms.small()


# fillers


def llmc(ids: np.ndarray[Any, Any], *, announced: int | None = None, version: int = 1) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, version, len(ids) if announced is None else announced
    return header.tobytes() + ids.tobytes()


def test_every_kind_of_filler_file_gives_the_same_arm(tmp_path: Path) -> None:
    ids = np.fromfile(arms.save_filler(tmp_path / "filler.bin"), "<u2")
    (tmp_path / "llmc.bin").write_bytes(llmc(ids))
    np.save(tmp_path / "two.npy", ids)
    np.save(tmp_path / "eight.npy", ids.astype(np.int64))
    rows = np.split(ids.astype(np.int32), [10, 700, 4000])
    banks.make_texts(tmp_path / "texts", 4)
    with BankWriter(tmp_path / "tokens", kind="tokens", recipe={}) as bank:
        for index, part in enumerate((rows[:1], rows[1:3], rows[3:])):  # windows go over rows and shards
            values, lengths = np.concatenate(part), [len(row) for row in part]
            column = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]).tolist(), pa.int32()), values.tolist())
            bank.write_shard(
                index,
                pa.record_batch({"input_ids": column.cast(pa.list_(pa.int32())), "length": pa.array(lengths, pa.int32())}),
            )
        bank.commit(rows=4, manifest={"max_tokens": 5000})
    wanted = raw(arms.build_small(tmp_path), arms.small())
    for name in ("llmc.bin", "two.npy", "eight.npy", "tokens"):
        build_in2(arms.small(), [tmp_path / name], tmp_path / f"arm-{name}")
        assert np.array_equal(raw(tmp_path / f"arm-{name}", arms.small()), wanted), name


def test_records_are_filler_by_the_options_that_scan_has(
    tmp_path: Path, bpe_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--text-field, --on-bad-line and --max-line-bytes: the same ids as of the good texts alone, and a bank that is verified."""
    texts = tiny.texts(60)
    lines = [json.dumps({"body": text, "text": "not this"}) for text in texts]
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines[:9], "{no json", *lines[9:]]))
    (tmp_path / "good.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    common = f"--length 300 --vocab 1000 --tokenizer {bpe_tokenizer}".split()
    arm = ["in2", "build", "--arm", "c", "--examples", "4", "--triples", "3", *common]
    probes = ["in2", "probes", *common]
    reading = ["--text-field", "body", "--on-bad-line", "skip"]
    for name, verb in (("arm", arm), ("probes", probes)):
        good, bad = tmp_path / f"{name}-good", tmp_path / f"{name}-bad"
        assert main([*verb, "--filler", str(tmp_path / "good.jsonl"), "--out", str(good)]) == 0
        assert main([*verb, "--filler", str(tmp_path / "bad.jsonl"), "--out", str(bad), *reading]) == 0
        assert "bad.jsonl: skipped 1 of its lines, which are no records" in capsys.readouterr().err
        assert [path.read_bytes() for path in sorted(good.glob("*.arrow"))] == [
            path.read_bytes() for path in sorted(bad.glob("*.arrow"))
        ]
        manifest = json.loads((bad / "manifest.json").read_text())
        assert (manifest["text_field"], manifest["on_bad_line"], manifest["fillers"][0]["bad_lines"]) == ("body", "skip", 1)
        assert "text_field" not in json.loads((good / "manifest.json").read_text())
    assert main(["in2", "verify", str(tmp_path / "arm-bad")]) == 0
    capsys.readouterr()
    (tmp_path / "plain.txt").write_text("\n".join(texts))
    arms.save_filler(tmp_path / "filler.bin")
    for filler, more, words in (
        ("bad.jsonl", ["--text-field", "body"], r"bad\.jsonl, line 10.*--on-bad-line skip"),
        (
            "bad.jsonl",
            ["--on-bad-line", "skip", "--text-field", "none"],
            r"expected an object with a text under 'none'.*--text-field",
        ),
        ("good.jsonl", ["--max-line-bytes", "20"], r"good\.jsonl, line \d+: longer than 20 bytes"),
        ("plain.txt", ["--text-field", "body"], r"--text-field.*: has no effect with text files"),
        ("filler.bin", ["--on-bad-line", "skip"], r"--(on-bad-line|tokenizer)"),
    ):
        assert main([*arm, "--filler", str(tmp_path / filler), "--out", str(tmp_path / "none"), *more]) == 2
        assert re.search(words, capsys.readouterr().err), words
    no_tokenizer = [word for word in arm if word not in ("--tokenizer", str(bpe_tokenizer))]
    filler = ["--filler", str(tmp_path / "filler.bin"), "--out", str(tmp_path / "none")]
    assert main([*no_tokenizer, *filler, "--on-bad-line", "skip"]) == 2
    assert "--on-bad-line (on_bad_line): has no effect with fillers that are no records" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_shards_as_they_were_meant_once_are_told_the_option_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filler = arms.save_filler(tmp_path / "filler.bin")
    words = [
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
        "--shards",
        "2",
    ]
    assert main([*words, "--filler", str(filler), "--out", str(tmp_path / "out")]) == 2
    assert (
        "there is no shard 2; this plan has shards 0 to 0. The number of raw files is --raw-shards." in capsys.readouterr().err
    )


def test_texts_are_filler_where_a_tokenizer_is_given(tmp_path: Path, bpe_tokenizer: Path) -> None:
    from arrowbank.models.tokenizer import load_tokenizer

    texts = tiny.texts(60)
    tiny.save_texts_bank(tmp_path / "texts", texts, [20, 60])
    tokenizer = load_tokenizer(str(bpe_tokenizer))
    ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    np.save(tmp_path / "ids.npy", np.array(ids, np.uint16))
    options: dict[str, Any] = {"length": 200, "triples": 2, "vocab": 4096}
    build_in2(
        arms.small(tokenizer=str(bpe_tokenizer), **options),
        [tmp_path / "texts"],
        tmp_path / "of-texts",
        options=RunOptions(workers=2),
    )
    build_in2(arms.small(**options), [tmp_path / "ids.npy"], tmp_path / "of-ids")
    config = arms.small(**options)
    assert np.array_equal(raw(tmp_path / "of-texts", config), raw(tmp_path / "of-ids", config))
    with pytest.raises(InputError, match="--tokenizer"):
        build_in2(arms.small(**options), [tmp_path / "texts"], tmp_path / "no")


def test_a_large_vocabulary_needs_uint32_and_gets_it(tmp_path: Path) -> None:
    ids = np.random.default_rng(3).integers(60_000, 100_000, 3000)
    np.save(tmp_path / "large.npy", ids)
    with pytest.raises(InputError, match="--dtype uint32"):
        arms.small(vocab=100_000)
    with pytest.raises(InputError, match=r"id \d+ at token \d+; expected 0 to 65535.*--dtype uint32"):
        build_in2(arms.small(vocab=65_536), [tmp_path / "large.npy"], tmp_path / "no")
    config = arms.small(vocab=100_000, dtype="uint32")
    manifest = build_in2(config, [tmp_path / "large.npy"], tmp_path / "arm")
    assert manifest["dtype"] == "uint32"
    assert all(check.ok for check in verify_in2([tmp_path / "arm"]))
    wanted = [arms.as_written(config, [ids], example).tokens for example in range(config.examples)]
    assert np.array_equal(raw(tmp_path / "arm", config), np.array(wanted))


# what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alphabet": 1001}, "--alphabet 1001 is larger than --vocab 1000"),
        ({"length": 22}, "--length 22 is too small.*Give at least 23"),
        ({"length": 60}, "too small for 6 triples: at most"),
        ({"arm": "d"}, "arm is 'd'; expected one of a, b, c"),
        ({"split": "test"}, r"'test'; expected one of train, val \(--split\)"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"triples": 0}, r"triples is 0; expected .*\(--triples\)"),
        ({"key_len": 0}, r"key_len is 0; expected .*\(--key-len\)"),
        ({"min_distance": -1}, "min_distance is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"global_batch": 4, "raw_shards": 1}, "--examples 7 is not a multiple of --global-batch 4.* 4 and 8"),
        ({"global_batch": 10, "raw_shards": 1}, "not a multiple of --global-batch 10.* 10 and 20"),
        ({"global_batch": 3}, "4 in each of 2 raw shards, is not a multiple of --global-batch 3.* 6 and 12"),
        ({"length": 16_384, "examples": 10_000, "raw_shards": 1}, "163,840,000 tokens.*at least --raw-shards 2"),
        ({"length": 60_000_000, "examples": 4, "raw_shards": 2}, "at least --raw-shards 4"),
        ({"length": 100_000_001}, "--length 100000001 is more than a shard"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        arms.small(**options)


def test_just_enough_is_not_refused() -> None:
    assert arms.small(length=16_384, examples=12_206, raw_shards=2).per_shard == 6103
    assert arms.small(alphabet=1000, global_batch=4).decoy_count == 1
    assert arms.small(length=23, triples=1).last_site == arms.small(length=23, triples=1).first_site + 1


@pytest.mark.parametrize("name", ["x_val_000.bin", "VALID.bin", "validation-1.bin", "my.val.bin"])
def test_a_train_split_is_not_built_from_a_validation_file(name: str, tmp_path: Path) -> None:
    arms.save_filler(tmp_path / name)
    with pytest.raises(InputError, match=r"its name says val.*--split val"):
        build_in2(arms.small(), [tmp_path / name], tmp_path / "arm")
    build_in2(arms.small(split="val"), [tmp_path / name], tmp_path / "arm")
    assert (tmp_path / "arm" / "in2c_val_00000.json").exists()


def test_a_name_that_only_contains_the_letters_is_fine(tmp_path: Path) -> None:
    build_in2(arms.small(), [arms.save_filler(tmp_path / "retrieval_0.bin")], tmp_path / "arm")


def test_fillers_that_are_refused(tmp_path: Path) -> None:
    good = arms.save_filler(tmp_path / "good.bin")
    bad: dict[str, tuple[bytes, str]] = {
        "odd.bin": (good.read_bytes()[:-1], "9999 bytes, ends inside a token"),
        "empty.bin": (b"", "is empty"),
        "short.bin": (good.read_bytes()[:1200], "600 tokens, too short: --length 600 needs at least 601"),
        "outside.bin": (good.read_bytes() + b"\xe8\x03", "id 1000 at token 5,000; expected 0 to 999"),
        "cut.bin": (llmc(np.zeros(700, "<u2"), announced=701), "announces 701 tokens in 2,424 bytes"),
        "version.bin": (llmc(np.zeros(700, "<u2"), version=7), "version 7"),
        "no.npy": (b"nothing", "not readable as .npy"),
    }
    for name, (data, words) in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=rf"{name}: .*{words}"):
            build_in2(arms.small(), [good, tmp_path / name], tmp_path / "arm")
    np.save(tmp_path / "floats.npy", np.zeros(700))
    np.save(tmp_path / "negative.npy", np.array([-1] * 700))
    banks.make_texts(tmp_path / "texts", 3)
    arms.build_small(tmp_path, name="other")
    (tmp_path / "folder").mkdir()
    for name, words in {
        "floats.npy": "float64 of shape",
        "negative.npy": "id -1 at token 0",
        "gone.bin": "no such filler",
        "folder": "no files of records",
        "other": "a bank of in2",
    }.items():
        with pytest.raises(InputError, match=f"{name}: .*{words}"):
            build_in2(arms.small(), [tmp_path / name], tmp_path / "arm")
    with pytest.raises(InputError, match="--filler: give at least one"):
        build_in2(arms.small(), [], tmp_path / "arm")
    assert not (tmp_path / "arm").exists()


def test_a_filler_of_one_token_more_than_an_example_is_enough(tmp_path: Path) -> None:
    filler = arms.save_filler(tmp_path / "filler.bin", 601)
    build_in2(arms.small(), [filler], tmp_path / "arm")
    wanted = [arms.as_written(arms.small(), [np.fromfile(filler, "<u2")], example).tokens for example in range(7)]
    assert np.array_equal(raw(tmp_path / "arm", arms.small()), np.array(wanted))


def test_keys_that_stand_somewhere_else_are_refused_where_that_is_asked_for(tmp_path: Path) -> None:
    filler = arms.save_filler(tmp_path / "filler.bin", vocab=40)
    options: dict[str, Any] = {"alphabet": 40, "key_len": 1, "val_len": 3}
    build_in2(arms.small(**options), [filler], tmp_path / "arm")
    with pytest.raises(InputError, match=r"example 0: \d+ keys are there twice, \d+ times one stands in the filler"):
        build_in2(arms.small(unique_keys=True, **options), [filler], tmp_path / "strict")
    build_in2(arms.small(unique_keys=True, key_len=8), [filler], tmp_path / "long")
    build_in2(arms.small("a", unique_keys=True, **options), [filler], tmp_path / "a")


def test_the_command_line_builds_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = arms.golden_cases()[3]
    fillers = [str(path) for path in arms.save_golden_fillers(tmp_path)]
    words = ["in2", "build", *arms.golden_options(case).split()]
    assert main([*words, "--filler", *fillers, "--out", str(tmp_path / "one")]) == 0
    assert "5 examples of 1,024 tokens, 40 triples, 25 decoys" in capsys.readouterr().out
    assert main([*words, "--filler", fillers[0], "--filler", fillers[1], "--out", str(tmp_path / "two"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["manifest"]["K"] == 8
    assert tree_bytes(tmp_path / "one") == tree_bytes(tmp_path / "two")
    assert hashlib.sha256((tmp_path / "one/in2c_train_00000.bin").read_bytes()).hexdigest() == case["shards"][0]["sha256"]
    assert main([*words, "--filler", fillers[0], "--filler", *fillers, "--out", str(tmp_path / "three")]) == 2
    assert "one --filler" in capsys.readouterr().err
    assert main([*words, "--filler", str(tmp_path / "gone.bin"), "--out", str(tmp_path / "three")]) == 2
    assert "gone.bin: no such filler" in capsys.readouterr().err


def test_the_last_raw_shard_may_be_smaller_and_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filler = arms.save_filler(tmp_path / "filler.bin")
    words = [
        "--length",
        "600",
        "--examples",
        "7",
        "--triples",
        "6",
        "--vocab",
        "1000",
        "--alphabet",
        "300",
        "--raw-shards",
        "2",
    ]
    assert (
        main(
            ["in2", "build", "--arm", "c", *words, "--global-batch", "4", "--filler", str(filler), "--out", str(tmp_path / "c")]
        )
        == 0
    )
    said = capsys.readouterr().err
    assert "the last raw shard holds 3 examples, and a loader drops 3 of them (18 triples)" in said


@pytest.mark.parametrize("kind", ["llm.c", "megatron", "datatrove"])
def test_fillers_of_32_bits_are_read_as_what_they_are(kind: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(3).integers(0, 100_000, 3000).astype("<u4")
    np.save(tmp_path / "plain.npy", ids)
    path = tmp_path / ("train_0.ds" if kind == "datatrove" else "train_0.bin")
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, len(ids)
    path.write_bytes((header.tobytes() if kind == "llm.c" else b"") + ids.tobytes())
    if kind == "megatron":
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 2) + struct.pack("<iqqq", len(ids), 0, 0, 1)
        path.with_suffix(".idx").write_bytes(index)
    if kind == "datatrove":
        np.array([len(ids)], "<u8").tofile(f"{path}.index")
        Path(f"{path}.metadata").write_text(f"some tokenizer|4\n{len(ids)}\n3,000 tokens")
    options = {"vocab": 100_000, "dtype": "uint32"}
    for name, filler in (("a", tmp_path / "plain.npy"), ("b", path)):
        build_in2(arms.small(**options), [filler], tmp_path / name)
    rows = [np.array(datasets.load_from_disk(str(tmp_path / name))["input_ids"]) for name in "ab"]
    assert np.array_equal(*rows)


def test_halves_of_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train_0.bin"
    np.random.default_rng(3).integers(0, 100_000, 3000).astype("<u4").tofile(path)
    with pytest.raises(InputError, match="the halves of uint32 ids"):
        build_in2(arms.small(), [path], tmp_path / "arm")
    np.random.default_rng(3).integers(0, 1000, 6000).astype("<u2").tofile(path)
    build_in2(arms.small(), [path], tmp_path / "arm")
