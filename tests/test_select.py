"""`select`: held against plain Python on lists of rows, with what it counts again and refuses."""

from __future__ import annotations

import json
import operator
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank import (
    ExportConfig,
    FeatureBank,
    ScanConfig,
    SelectConfig,
    encode,
    export,
    merge,
    open_bank,
    scan,
    select,
    verify,
)
from arrowbank.errors import InputError, PlanMismatch
from tests.banks import WIDTH
from tests.joined_banks import CONFIG, KINDS, counts_of, kind_of, rows_of, save_features, save_texts
from tests.kill import cli, kill_at, tree_bytes
from tests.target_banks import make_target_bank

TEXTS = [f"text {i}" for i in range(22)]
COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq}


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """texts, tokens and features of TEXTS; the features."""
    return save_features(tmp_path_factory.mktemp("bank"), TEXTS)


def proved(folder: Path) -> bool:
    return all(check.ok for check in verify(folder))


kinds = st.lists(st.sampled_from(KINDS), min_size=1, unique=True)
lengths = st.tuples(st.sampled_from(sorted(COMPARE)), st.integers(0, 10))
ranges = st.tuples(st.integers(0, 22), st.integers(1, 30)).filter(lambda pair: pair[0] < pair[1])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.none() | kinds, st.lists(lengths, max_size=2), st.none() | ranges, st.none() | st.integers(1, 9))
def test_selecting_is_what_plain_python_makes_of_the_rows(
    bank: Path, kinds: list[str] | None, lengths: list[tuple[str, int]], rows: tuple[int, int] | None, limit: int | None
) -> None:
    wanted = rows_of(bank)[slice(*rows) if rows else slice(None)]
    wanted = [row for row in wanted if kinds is None or row["kind"] in kinds]
    wanted = [row for row in wanted if all(COMPARE[how](row["length"], bound) for how, bound in lengths)][:limit]
    where = (*([f"kind={','.join(kinds)}"] if kinds else []), *(f"length{how}{bound}" for how, bound in lengths))
    if not where and rows is None and limit is None:
        where = ("length>0",)
    config = SelectConfig(where=where, rows=rows, limit=limit)
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "out"
        if not wanted:
            with pytest.raises(InputError, match="no row fits"):
                select(config, bank, out)
            assert not out.exists()
            return
        manifest = select(config, bank, out)
        assert rows_of(out) == wanted
        assert proved(out)
        assert manifest["text_count"] == manifest["encoded_rows"] == manifest["rows"] == len(wanted)
        assert {kind: count for kind, count in manifest["kinds"].items() if count} == counts_of(row["kind"] for row in wanted)
        opened = open_bank(out, expect={"model": CONFIG.encoder, "max_tokens": 9, "dim": WIDTH})
        assert isinstance(opened, FeatureBank)
        assert opened.rows(row["text"] for row in wanted).tolist() == list(range(len(wanted)))
        assert opened.matrix.shape == (len(wanted), WIDTH)


def test_a_selection_of_tokens_has_its_texts_beside_it_and_can_be_encoded(bank: Path, tmp_path: Path) -> None:
    config = SelectConfig(where=("kind=query,title", "length<=5"))
    manifest = select(config, bank.parent / "tokens", tmp_path / "tokens")
    wanted = [row for row in rows_of(bank) if row["kind"] != "candidate" and row["length"] <= 5]
    assert [row["text"] for row in rows_of(tmp_path / "tokens-texts")] == [row["text"] for row in wanted]
    assert [row["length"] for row in rows_of(tmp_path / "tokens")] == [row["length"] for row in wanted]
    assert manifest["counts"] == {"tokens": sum(row["length"] for row in wanted)}
    assert proved(tmp_path / "tokens")
    assert proved(tmp_path / "tokens-texts")
    encode(CONFIG, tmp_path / "tokens", tmp_path / "features")
    assert rows_of(tmp_path / "features") == wanted
    shutil.copytree(bank.parent / "tokens", tmp_path / "moved" / "tokens")
    with pytest.raises(InputError, match="Give its folder with --texts"):
        select(config, (tmp_path / "moved" / "tokens"), tmp_path / "other")
    select(config, tmp_path / "moved" / "tokens", tmp_path / "other", texts=bank.parent / "texts")
    assert rows_of(tmp_path / "other") == rows_of(tmp_path / "tokens")


def test_selected_texts_say_of_which_file_they_are_but_not_that_they_are_all_of_it(bank: Path, tmp_path: Path) -> None:
    texts = bank.parent / "texts"
    manifest = select(SelectConfig(where=("source=eval",)), texts, tmp_path / "out")
    assert manifest["source_rows"] == {"eval": manifest["rows"], "train": 0}
    assert manifest["sources"] == open_bank(texts).manifest["sources"]
    assert not {"train_sha256", "counts"} & set(manifest)
    assert manifest["selected"] == {"plan_digest": open_bank(texts).plan_digest, "rows": len(TEXTS)}
    source = tmp_path / "more.jsonl"
    source.write_text(json.dumps({"query": TEXTS[0]}) + "\n" + json.dumps({"query": "new"}) + "\n")
    grown = scan(ScanConfig(sources=(("more", str(source)),), onto=str(tmp_path / "out")), tmp_path / "grown")
    assert grown["rows"] > manifest["rows"]


def test_a_merge_with_a_selection_states_no_hash_of_a_split_that_it_has_not_all_of(bank: Path, tmp_path: Path) -> None:
    texts = bank.parent / "texts"
    select(SelectConfig(limit=4), texts, tmp_path / "some")
    save_texts(tmp_path / "others", ["another text"], train="cd")
    manifest = merge([tmp_path / "others", tmp_path / "some"], tmp_path / "merged")
    assert not {"train_sha256", "selected"} & set(manifest)
    assert [entry["sha256"][:2] for entry in manifest["sources"]] == ["cd", "ab"]
    assert proved(tmp_path / "merged")


def test_a_text_is_taken_whole(tmp_path: Path) -> None:
    texts = ["one, two", "one", "two", "a<=b"]
    save_texts(tmp_path / "texts", texts)
    for text in texts:
        select(SelectConfig(where=(f"text={text}",)), tmp_path / "texts", tmp_path / text)
        assert [row["text"] for row in rows_of(tmp_path / text)] == [text]


def test_what_fits_nothing_is_told_what_there_is(bank: Path, tmp_path: Path) -> None:
    by_kind = {kind: sum(kind_of(text) == kind for text in TEXTS) for kind in KINDS}
    cases = {
        "kind=quary": [f"{kind} ({count})" for kind, count in by_kind.items()],
        "length>90": ["length is 1 to 9"],
        "text=absent": ["text is another one in every row, such as 'text 0'"],
        "length": ["expected NAME=VALUE or NAME<=NUMBER"],
        "length=": ["expected NAME=VALUE"],
        "length<=long": ["length is a number"],
        "length<=1,2": ["give one number"],
        f"length<={10**30}": ["length is a number"],
        "kind<=query": ["kind is text, give kind=VALUE"],
        "colour=red": ["has no column colour", "It has kind, length, text."],
        "sha1=ab": ["has no column sha1"],
    }
    for condition, words in cases.items():
        with pytest.raises(InputError) as caught:
            select(SelectConfig(where=(condition,)), bank, tmp_path / "out")
        assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(InputError, match=r"no row fits --rows 90:99\. It has 22 rows\."):
        select(SelectConfig(rows=(90, 99)), bank, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_selection_of_nothing_or_into_its_own_folder_is_refused(bank: Path, tmp_path: Path) -> None:
    for wrong in ({}, {"limit": 0}, {"rows": (3, 3)}):
        with pytest.raises(InputError):
            SelectConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="input and output are the same"):
        select(SelectConfig(limit=1), bank, bank)
    with pytest.raises(InputError, match="is for a bank of tokens"):
        select(SelectConfig(limit=1), bank, tmp_path / "out", texts=bank)
    select(SelectConfig(limit=3), bank, tmp_path / "out")
    before = tree_bytes(tmp_path / "out")
    select(SelectConfig(limit=3), bank, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == before
    with pytest.raises(PlanMismatch, match=r"select\.limit: found 3, wanted 4"):
        select(SelectConfig(limit=4), bank, tmp_path / "out")


def test_whole_shards_are_linked(bank: Path, tmp_path: Path) -> None:
    select(SelectConfig(rows=(2, 22)), bank, tmp_path / "out")
    same = [
        (tmp_path / "out" / name).stat().st_ino == (bank / name).stat().st_ino
        for name in open_bank(tmp_path / "out").shard_names
    ]
    assert same == [False, *[True] * (len(same) - 1)]


def test_parts_of_a_bank_merge_to_the_whole(bank: Path, tmp_path: Path) -> None:
    select(SelectConfig(rows=(0, 9)), bank, tmp_path / "a")
    select(SelectConfig(rows=(5, 22)), bank, tmp_path / "b")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    assert rows_of(tmp_path / "ab") == rows_of(bank)
    for name in ("features.f16.npy", "index.json", "texts.jsonl", "keys.npy"):
        assert (tmp_path / "ab" / name).read_bytes() == (bank / name).read_bytes()


@pytest.mark.parametrize("options", [{}, {"codec": "fp8", "spans": "supervised"}])
def test_target_banks_are_selected_from(tmp_path: Path, options: dict[str, Any]) -> None:
    make_target_bank(tmp_path / "bank", max_shard_bytes=700, **options)
    manifest = select(SelectConfig(where=("seq_len<=5",), limit=2), tmp_path / "bank", tmp_path / "out")
    rows = [row for row in rows_of(tmp_path / "bank") if row["seq_len"] <= 5][:2]
    assert rows_of(tmp_path / "out") == rows
    assert proved(tmp_path / "out")
    counts = manifest["counts"]
    assert counts["loss_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert counts["hidden_tokens"] == sum(len(row["target_last_hidden_states"]) for row in rows)
    assert (counts["kept"], counts["tokens"], counts["dropped"]) == (2, 6, {"not_selected": 2})
    if not options:
        whole, some = open_bank(tmp_path / "bank").to_torch(), open_bank(tmp_path / "out").to_torch()
        assert np.array_equal(some[1]["target_hidden_states"].float(), whole[1]["target_hidden_states"].float())
        export(ExportConfig(format="deepspec"), tmp_path / "out", tmp_path / "cache")
    one = select(SelectConfig(where=("sample=sample-0003.safetensors",)), tmp_path / "bank", tmp_path / "one")
    assert one["rows"] == 1


@pytest.mark.slow
def test_deaths_while_selecting_are_made_good_by_the_same_command(bank: Path, tmp_path: Path) -> None:
    config = SelectConfig(where=("length<=5",))
    select(config, bank, tmp_path / "whole")
    for moment in range(1, 1000, 7):
        out = tmp_path / f"killed-{moment}"
        outcome = kill_at(moment, select, config, bank, out)
        assert outcome.error == ""
        select(config, bank, out)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole"), f"killed at moment {moment}"
        if not outcome.killed:
            break
    assert moment > 60


def test_the_command_line_selects(bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--where", "kind=query", "--where", "length<=5", "--rows", "0:20", "--limit", "3", "--out", str(tmp_path / "out")]
    cli("select", str(bank), *argv)
    wanted = [row for row in rows_of(bank)[:20] if row["kind"] == "query" and row["length"] <= 5][:3]
    assert rows_of(tmp_path / "out") == wanted
    assert f"{len(wanted)} of 22 rows. Prove it: arrowbank verify" in capsys.readouterr().out
