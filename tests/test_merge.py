"""`merge`: held against plain Python on lists of rows, with what it keeps, counts and refuses."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from arrowbank import (
    ExportConfig,
    FeatureBank,
    RunOptions,
    ScanConfig,
    SelectConfig,
    TokenizeConfig,
    encode,
    export,
    import_targets,
    merge,
    open_bank,
    scan,
    select,
    tokenize,
    verify,
)
from arrowbank.bank import mirror
from arrowbank.errors import ContractError, CorruptBank, InputError, PlanMismatch
from tests.banks import name_the_encoder
from tests.joined_banks import CONFIG, counts_of, rows_of, save_features, save_texts
from tests.kill import cli, kill_at, tree_bytes
from tests.target_banks import import_config, make_dump, make_target_bank

TEXTS = st.lists(st.integers(0, 25).map("text {}".format), min_size=1, max_size=14, unique=True)


def proved(folder: Path) -> bool:
    return all(check.ok for check in verify(folder))


def merged_rows(parts: list[list[dict[str, Any]]], key: str = "text") -> list[dict[str, Any]]:
    """The plain way: what comes first stays."""
    found: dict[str, dict[str, Any]] = {}
    for rows in parts:
        for row in rows:
            found.setdefault(row[key], row)
    return list(found.values())


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=4))
def test_merging_features_is_what_plain_python_makes_of_the_rows(parts: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folders = [save_features(Path(made) / f"{at}", texts) for at, texts in enumerate(parts)]
        out = Path(made) / "merged"
        manifest = merge(folders, out)
        wanted = merged_rows([rows_of(folder) for folder in folders])
        assert rows_of(out) == wanted
        assert proved(out)
        sizes = [len({text for texts in parts[: at + 1] for text in texts}) for at in range(len(parts))]
        assert manifest["generations"] == sizes
        assert manifest["text_count"] == manifest["encoded_rows"] == manifest["rows"] == sizes[-1]
        assert manifest["kinds"] == counts_of(row["kind"] for row in wanted)
        assert manifest["merged"]["shared"] == sum(map(len, parts)) - sizes[-1]
        bank = open_bank(out)
        assert isinstance(bank, FeatureBank)
        assert bank.rows(row["text"] for row in wanted).tolist() == list(range(len(wanted)))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=4))
def test_merging_texts_is_what_plain_python_makes_of_the_rows(parts: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folders = [save_texts(Path(made) / f"{at}", texts) for at, texts in enumerate(parts)]
        manifest = merge(folders, Path(made) / "merged")
        wanted = merged_rows([rows_of(folder) for folder in folders])
        assert rows_of(Path(made) / "merged") == wanted
        assert proved(Path(made) / "merged")
        counts = manifest["counts"]
        assert counts["texts_seen"] - counts["duplicates"] == len(wanted)
        assert manifest["source_rows"] == counts_of(row["source"] for row in wanted)


def test_merged_texts_are_those_of_a_scan_onto_the_first_and_grow_and_tokenize_like_them(
    tmp_path: Path, tiny_bert: Path
) -> None:
    def source(name: str, things: range) -> ScanConfig:
        path = tmp_path / f"{name}.jsonl"
        lines = [{"query": f"thing {i}", "candidates": [{"text": f"it is {i}"}, {"text": "all"}]} for i in things]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return ScanConfig(sources=(("train", str(path)),))

    first, second = source("first", range(8)), source("second", range(5, 13))
    scan(first, tmp_path / "a")
    scan(second, tmp_path / "b")
    onto = scan(replace(second, onto=str(tmp_path / "a")), tmp_path / "onto")
    manifest = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    assert rows_of(tmp_path / "merged") == rows_of(tmp_path / "onto")
    for name in ("kinds", "source_rows", "counts", "generations", "sources", "fields", "text_count"):
        assert manifest[name] == onto[name], name
    hashes = [hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest() for name in ("first", "second")]
    assert manifest["train_sha256"] == hashlib.sha256("".join(hashes).encode()).hexdigest()
    assert merge([tmp_path / "a", tmp_path / "a"], tmp_path / "same")["train_sha256"] == hashes[0]
    third = replace(source("third", range(11, 16)), onto=str(tmp_path / "merged"))
    assert scan(third, tmp_path / "grown")["generations"] == [17, 27, 33]
    tokenize(TokenizeConfig(tokenizer=str(tiny_bert)), tmp_path / "grown", tmp_path / "tokens", options=RunOptions(workers=1))
    assert encode(CONFIG, tmp_path / "tokens", tmp_path / "features")["generations"] == [17, 27, 33]


def test_whole_shards_are_linked_and_old_banks_stay_as_they_are(tmp_path: Path) -> None:
    a = save_features(tmp_path / "a", ["one", "two"])
    b = save_features(tmp_path / "b", ["three", "four", "five", "six", "seven", "one"])
    before = tree_bytes(tmp_path)
    merge([a, b], tmp_path / "out")
    inodes = [(tmp_path / "out" / f"data-0000{index}.arrow").stat().st_ino for index in range(3)]
    assert inodes[0] == (a / "data-00000.arrow").stat().st_ino
    assert inodes[1] == (b / "data-00000.arrow").stat().st_ino
    assert inodes[2] != (b / "data-00001.arrow").stat().st_ino
    assert {name: sha256 for name, sha256 in tree_bytes(tmp_path).items() if not name.startswith("out/")} == before


def drifted(folder: Path, texts: list[str]) -> Path:
    """A bank that says it is of the same encoder as others, and has other vectors."""
    features = save_features(folder, texts, config=replace(CONFIG, encoder="tests.banks:DriftedEncoder"))
    name_the_encoder(features, "tests.banks:TableEncoder")
    return features


def test_a_text_in_several_keeps_the_first_vector_and_the_difference_is_reported(tmp_path: Path) -> None:
    a = save_features(tmp_path / "a", ["one", "two", "three"])
    b = drifted(tmp_path / "b", ["two", "four", "three"])
    c = save_features(tmp_path / "c", ["four", "one"])
    manifest = merge([a, b, c], tmp_path / "out")
    assert rows_of(tmp_path / "out") == merged_rows([rows_of(part) for part in (a, b, c)])
    vectors = {
        (at, row["text"]): np.array(row["features"], np.uint16).view(np.float16).astype(np.float32)
        for at, part in enumerate((a, b, c))
        for row in rows_of(part)
    }
    twice = [(0, 1, "two"), (0, 1, "three"), (1, 2, "four"), (0, 2, "one")]
    apart = max(float(np.abs(vectors[x, text] - vectors[y, text]).max()) for x, y, text in twice)
    assert manifest["merged"] == {
        "parts": [
            {"plan_digest": open_bank(part).plan_digest, "rows": rows, "new": new}
            for part, rows, new in ((a, 3, 3), (b, 3, 1), (c, 2, 0))
        ],
        "shared": 4,
        "largest_difference": apart,
    }
    assert apart > 0.001


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"encoder": "tests.banks:OtherVersion"}, "model.name"),
        ({"normalize": False}, "normalize"),
        ({"rules": replace(CONFIG.rules, max_batch=4)}, "batches.max_batch"),
    ],
)
def test_banks_made_in_another_way_are_refused_with_the_field_and_both_values(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    a = save_features(tmp_path / "a", ["one", "two"])
    b = save_features(tmp_path / "b", ["three"], config=replace(CONFIG, **change))
    with pytest.raises(ContractError, match=rf"b/features: {field} is .*, in .*a/features it is ") as caught:
        merge([a, b], tmp_path / "out")
    assert caught.value.field == field
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_merged_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    a = save_features(tmp_path / "a", ["one", "two"])
    with pytest.raises(InputError, match="at least two are needed"):
        merge([a], tmp_path / "out")
    with pytest.raises(
        InputError, match=r"a bank of tokens; only features, targets, texts and token-features can.*tokenize the result"
    ):
        merge([tmp_path / "a" / "tokens", tmp_path / "a" / "tokens"], tmp_path / "out")
    with pytest.raises(InputError, match=r"a bank of texts, .* is one of features"):
        merge([a, tmp_path / "a" / "texts"], tmp_path / "out")
    with pytest.raises(InputError, match="input and output are the same"):
        merge([a, save_features(tmp_path / "b", ["three"])], a)
    assert not (tmp_path / "out").exists()


def test_a_damaged_part_is_refused(tmp_path: Path) -> None:
    a, b = save_features(tmp_path / "a", ["one", "two"]), save_features(tmp_path / "b", ["three"])
    for name in ("data-00000.arrow", "keys.npy"):
        whole = (b / name).read_bytes()
        (b / name).write_bytes(whole[:-9] + b"\1" * 9)
        with pytest.raises(CorruptBank, match=f"b/features/{name}"):
            merge([a, b], tmp_path / "out")
        (b / name).write_bytes(whole)
    assert merge([a, b], tmp_path / "out")["complete"]


def test_without_a_mirror_in_one_part_there_is_none_and_a_merge_can_be_merged_but_not_grown(tmp_path: Path) -> None:
    a = save_features(tmp_path / "a", ["one", "two"])
    b = save_features(tmp_path / "b", ["two", "three"], config=replace(CONFIG, mirror=False))
    manifest = merge([a, b], tmp_path / "ab")
    assert not (tmp_path / "ab" / "features.f16.npy").exists()
    assert not {"bank", "index", "texts"} & set(manifest)
    assert proved(tmp_path / "ab")
    again = merge([tmp_path / "ab", save_features(tmp_path / "c", ["four", "one"])], tmp_path / "abc")
    assert again["generations"] == [2, 3, 4]
    assert [row["text"] for row in rows_of(tmp_path / "abc")] == ["one", "two", "three", "four"]
    with pytest.raises(InputError, match="not made by `arrowbank encode` but by merge or select"):
        encode(replace(CONFIG, onto=str(tmp_path / "ab")), tmp_path / "a" / "tokens", tmp_path / "out")


@pytest.mark.slow
def test_every_moment_of_death_while_merging_is_made_good_by_the_same_command(tmp_path: Path) -> None:
    a = save_features(tmp_path / "a", [f"text {i}" for i in range(6)])
    b = save_features(tmp_path / "b", [f"text {i}" for i in range(4, 14)])
    merge([a, b], tmp_path / "whole")
    whole = tree_bytes(tmp_path / "whole")
    before = tree_bytes(tmp_path / "a") | tree_bytes(tmp_path / "b")
    for moment in range(1, 1000, 3):
        out = tmp_path / f"killed-{moment}"
        outcome = kill_at(moment, merge, [a, b], out)
        assert outcome.error == ""
        merge([a, b], out)
        assert tree_bytes(out) == whole, f"killed at moment {moment}"
        if not outcome.killed:
            break
    assert moment > 60
    assert tree_bytes(tmp_path / "a") | tree_bytes(tmp_path / "b") == before
    with pytest.raises(PlanMismatch, match="merge: "):
        merge([b, a], tmp_path / "whole")


# targets


def test_target_banks_are_put_on_end_and_a_sample_that_is_the_same_is_kept_once(tmp_path: Path) -> None:
    shard = {"max_shard_bytes": 700}
    make_target_bank(tmp_path / "a", dump={"lengths": (5, 1, 9)}, **shard)
    make_target_bank(tmp_path / "b", dump={"lengths": (5, 1, 9, 3, 4)}, **shard)  # the first three are the same
    manifest = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert rows_of(tmp_path / "out") == merged_rows([rows_of(tmp_path / part) for part in "ab"], "sample")
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "b")
    whole = open_bank(tmp_path / "b").manifest["counts"]
    assert manifest["counts"] == whole | {"dropped": {"quarantined": 0, "nonfinite": 0, "duplicate": 3}}
    assert (manifest["merged"]["shared"], manifest["text_count"]) == (3, 5)
    assert proved(tmp_path / "out")
    row = open_bank(tmp_path / "out").to_torch()[4]
    assert row["target_hidden_states"].shape == (4, 24)
    export(ExportConfig(format="deepspec"), tmp_path / "out", tmp_path / "cache")


def test_a_sample_of_the_same_name_with_other_contents_is_refused(tmp_path: Path) -> None:
    make_target_bank(tmp_path / "a")
    make_target_bank(tmp_path / "b", dump={"seed": 1})
    with pytest.raises(InputError, match=r"sample 'sample-0000\.safetensors' is in .*a, too, with other contents"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"target_model": "org/other"}, "target_model_name_or_path"),
        ({"target_layer_ids": (1, 11, 22)}, "target_layer_ids"),
        ({"last_hidden_norm": "pre"}, "last_hidden_norm"),
        ({"codec": "fp8"}, "codec"),
        ({"spans": "supervised"}, "spans"),
    ],
)
def test_targets_of_another_model_layer_norm_or_form_are_refused(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    make_target_bank(tmp_path / "a")
    make_target_bank(tmp_path / "b", dump={"names": [f"other-{row}.safetensors" for row in range(4)]}, **options)
    with pytest.raises(ContractError, match=f"{field} is ") as caught:
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert caught.value.field == field


def test_fp8_and_supervised_rows_are_merged_as_they_are(tmp_path: Path) -> None:
    for part in "ab":
        dump = {"names": [f"{part}-{row}.safetensors" for row in range(4)], "seed": ord(part)}
        make_target_bank(tmp_path / part, dump=dump, codec="fp8", spans="supervised")
    manifest = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    assert rows_of(tmp_path / "ab") == rows_of(tmp_path / "a") + rows_of(tmp_path / "b")
    assert "codec_error" not in manifest  # nobody can say it any more
    assert proved(tmp_path / "ab")


def test_nan_that_were_kept_are_counted_once(tmp_path: Path) -> None:
    for part, lengths in (("a", (5, 2)), ("b", (5, 2, 4))):  # the same two, and one more
        make_dump(tmp_path / f"{part}-dump", lengths=lengths)
        for row, values in ((0, 3), (2, 2))[: len(lengths) - 1]:
            path = tmp_path / f"{part}-dump" / f"sample-000{row}.safetensors"
            tensors = load_file(path)
            tensors["target_hidden_states"][0, 1, :values] = float("nan")
            save_file(tensors, path)
        import_targets(import_config(on_nonfinite="keep"), tmp_path / f"{part}-dump", tmp_path / part)
    assert open_bank(tmp_path / "b").manifest["nonfinite"] == {"1": 0, "11": 5, "21": 0, "last": 0}
    manifest = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    assert manifest["nonfinite"] == {"1": 0, "11": 5, "21": 0, "last": 0}
    one = select(SelectConfig(rows=(2, 3)), tmp_path / "ab", tmp_path / "one")
    assert one["nonfinite"] == {"1": 0, "11": 2, "21": 0, "last": 0}


def test_the_command_line_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save_features(tmp_path / "a", ["one", "two"]), save_features(tmp_path / "b", ["two", "three"])
    cli("merge", str(a), str(b), "--out", str(tmp_path / "out"))
    said = capsys.readouterr()
    assert "3 rows of 2 banks, 1 that several have are kept once (their vectors are at most 0 apart)" in said.out
    assert "1 were there already" in said.err


def test_the_index_of_a_mirror_is_left_out_where_it_would_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bank by its own rows: two that have one may become a bank without."""
    monkeypatch.setattr(mirror, "INDEX_ROWS", 3)
    a, b = save_features(tmp_path / "a", ["one", "two"]), save_features(tmp_path / "b", ["three", "four"])
    merge([a, b], tmp_path / "out")
    select(SelectConfig(limit=3), tmp_path / "out", tmp_path / "some")
    for folder, has in ((a, True), (tmp_path / "out", False), (tmp_path / "some", True)):
        bank = open_bank(folder)
        assert (folder / "index.json").exists() is has
        assert ("index" in bank.manifest) is ("index.json" in bank.entries) is has
        assert bank.manifest["bank"] == "features.f16.npy"
        assert all(check.ok for check in verify(folder))
    assert len(json.loads((tmp_path / "some" / "index.json").read_text())) == 3
