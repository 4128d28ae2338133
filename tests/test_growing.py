"""Growing a feature bank: `encode --onto` and `build --onto`, on an encoder that needs no model."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank import (
    BuildConfig,
    EncodeConfig,
    ModelConfig,
    RunOptions,
    ScanConfig,
    TokenizeConfig,
    build,
    encode,
    open_bank,
    verify,
)
from arrowbank.engine.plan import BatchRules
from arrowbank.errors import ContractError, CorruptBank, InputError, PlanMismatch
from arrowbank.features.grow import measure_drift
from tests import banks
from tests.kill import cli, kill_at, tree_bytes

COUNT, OLD = 40, 25
TABLE = "tests.banks:TableEncoder"
CONFIG = EncodeConfig(encoder=TABLE, shard_rows=12, rules=BatchRules(max_batch=3, token_budget=16))


class Grown(NamedTuple):
    """Banks of OLD rows in old/, and texts and tokens of COUNT rows, the same first, in new/."""

    folder: Path
    tokens: Path
    config: EncodeConfig
    one_go: dict[str, str]


def make_grown(folder: Path, ends: list[int]) -> EncodeConfig:
    """old/ with features and new/ without, of `ends` rows (cumulative; the last generation is new)."""
    rows = banks.make_tokens(folder / "all-tokens", make_texts(folder / "all", ends), ends[-1])
    for name, generations in (("old", ends[:-1]), ("new", ends)):
        texts = make_texts(folder / name, generations)
        write_tokens(folder / name / "tokens", texts, rows, generations)
    encode(CONFIG, folder / "old" / "tokens", folder / "old" / "features")
    return replace(CONFIG, onto=str(folder / "old" / "features"))


def make_texts(folder: Path, ends: list[int]) -> Path:
    banks.make_texts(folder / "texts", ends[-1], generations=ends, shard_ends=ends)
    return folder / "texts"


def write_tokens(folder: Path, texts: Path, rows: list[list[int]], ends: list[int]) -> None:
    banks.write_tokens(folder, texts, rows[: ends[-1]], ends, shard_ends=ends)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Grown:
    folder = tmp_path_factory.mktemp("grown")
    config = make_grown(folder, [OLD, COUNT])
    encode(CONFIG, folder / "new" / "tokens", folder / "one-go")
    return Grown(folder, folder / "new" / "tokens", config, tree_bytes(folder / "one-go"))


def data_of(files: dict[str, str]) -> dict[str, str]:
    """Without the two files that say from what the bank was made."""
    return {name: sha256 for name, sha256 in files.items() if name not in ("manifest.json", "state.json")}


class Said:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.texts: dict[str, int | None] = {}

    def phase(self, name: str, total: int | None, *, unit: str = "texts", texts: int | None = None) -> Any:
        from arrowbank.progress import SILENT

        self.texts[name] = texts
        return SILENT.phase(name, total)

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_a_grown_bank_has_the_bytes_of_one_made_in_one_go_and_encodes_only_what_is_new(grown: Grown, tmp_path: Path) -> None:
    before = tree_bytes(grown.folder / "old")
    said = Said()
    manifest = encode(grown.config, grown.tokens, tmp_path / "out", progress=said)
    assert data_of(tree_bytes(tmp_path / "out")) == data_of(grown.one_go)
    assert said.texts["encode"] == COUNT - OLD
    assert tree_bytes(grown.folder / "old") == before
    assert all(check.ok for check in verify(tmp_path / "out"))
    old = open_bank(grown.folder / "old" / "features")
    assert manifest["recipe"]["onto"] == {"content": old.content_digest, "rows": OLD}
    one_go = open_bank(grown.folder / "one-go").manifest
    assert manifest["plan_digest"] != one_go["plan_digest"]
    assert {**manifest, "plan_digest": "", "recipe": ""} == {**one_go, "plan_digest": "", "recipe": ""}
    assert manifest["recipe"] == one_go["recipe"] | {"onto": manifest["recipe"]["onto"]}
    assert (manifest["rows"], manifest["text_count"], manifest["encoded_rows"]) == (COUNT, COUNT, COUNT)
    assert manifest["generations"] == [OLD, COUNT]
    assert (tmp_path / "out" / "data-00000.arrow").stat().st_ino == (old.folder / "data-00000.arrow").stat().st_ino


def test_drift_is_measured_noted_and_said(grown: Grown, tmp_path: Path) -> None:
    said = Said()
    encode(replace(grown.config, drift_sample=7), grown.tokens, tmp_path / "out", progress=said)
    events = [json.loads(line) for line in (tmp_path / "out" / "build.jsonl").read_text().splitlines()]
    (drift,) = [event for event in events if event["event"] == "drift"]
    assert (drift["texts"], drift["bound"]) == (7, 0.999)
    assert drift["min_cosine"] <= drift["mean_cosine"] == pytest.approx(1, abs=1e-6)
    assert drift["largest_difference"] < 1e-3
    assert any("7 old texts encoded again here" in message for message in said.messages)


@pytest.mark.slow
def test_an_environment_that_gives_other_vectors_is_refused_and_nothing_is_lost(grown: Grown, tmp_path: Path) -> None:
    drifted = grown.folder / "drifted"
    shutil.copytree(grown.folder / "old", drifted)
    banks.name_the_encoder(drifted / "features", "tests.banks:DriftedEncoder")
    config = replace(CONFIG, encoder="tests.banks:DriftedEncoder", onto=str(drifted / "features"))
    with pytest.raises(
        ContractError, match=r"(?s)cosine to the stored vectors at least 0\.9.*below --min-cosine 0\.999.*--onto"
    ):
        encode(config, grown.tokens, tmp_path / "out")
    with pytest.raises(ContractError):
        encode(config, grown.tokens, tmp_path / "out", options=RunOptions(workers=2))
    for change, options in (({"min_cosine": 0.5}, RunOptions()), ({"drift_sample": 0}, RunOptions(restart=True))):
        assert encode(replace(config, **change), grown.tokens, tmp_path / "out", options=options)["complete"]
    old = open_bank(drifted / "features")
    assert measure_drift(old, banks.DriftedEncoder(), open_bank(grown.tokens), CONFIG, 999).texts == OLD  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"encoder": "tests.banks:OtherVersion"}, "model.version"),
        ({"normalize": False}, "normalize"),
        ({"rules": BatchRules(max_batch=4, token_budget=16)}, "batches.max_batch"),
        ({"shard_rows": 13}, "shard_rows"),
    ],
)
def test_another_way_to_encode_is_refused_with_the_fields_that_differ(
    grown: Grown, tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(PlanMismatch, match=field) as caught:
        encode(replace(grown.config, **change), grown.tokens, tmp_path / "out")
    assert field in caught.value.fields
    assert not (tmp_path / "out").exists()


def test_tokens_that_do_not_begin_with_the_old_ones_are_refused(grown: Grown, tmp_path: Path) -> None:
    rows = banks.make_tokens(tmp_path / "unused", grown.folder / "new" / "texts", COUNT)
    rows[3] = [*rows[3][:-1], rows[3][-1] + 1]
    write_tokens(tmp_path / "tokens", grown.folder / "new" / "texts", rows, [OLD, COUNT])
    moved = str(grown.folder / "new" / "texts")
    with pytest.raises(PlanMismatch, match="tokens: ") as caught:
        encode(grown.config, tmp_path / "tokens", tmp_path / "out", texts=moved)
    assert list(caught.value.fields) == ["tokens"]
    banks.write_tokens(tmp_path / "tokens", grown.folder / "new" / "texts", rows, [COUNT])
    with pytest.raises(PlanMismatch, match="generations: "):
        encode(grown.config, tmp_path / "tokens", tmp_path / "out", texts=moved)


def test_growing_into_the_old_folder_a_trial_or_onto_a_damaged_bank_is_refused(grown: Grown, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="input and output are the same"):
        encode(grown.config, grown.tokens, grown.folder / "old" / "features")
    with pytest.raises(InputError, match="leave out --limit and --trial"):
        replace(grown.config, limit=3)
    with pytest.raises(InputError, match="a bank of texts, expected features"):
        encode(replace(CONFIG, onto=str(grown.folder / "old" / "texts")), grown.tokens, tmp_path / "out")
    shutil.copytree(grown.folder / "old" / "features", tmp_path / "damaged")
    path = tmp_path / "damaged" / "data-00001.arrow"
    path.write_bytes(path.read_bytes()[:-9] + b"\1" * 9)
    with pytest.raises(CorruptBank, match=r"data-00001\.arrow"):
        encode(replace(CONFIG, onto=str(tmp_path / "damaged")), grown.tokens, tmp_path / "out")


def test_a_job_array_and_parts_take_adopted_shards_for_done_ones(grown: Grown, tmp_path: Path) -> None:
    for number in (2, 0):
        assert not encode(grown.config, grown.tokens, tmp_path / "array", options=RunOptions(worker=(number, 3)))["complete"]
    assert encode(grown.config, grown.tokens, tmp_path / "array", options=RunOptions(worker=(1, 3)))["complete"]
    whole = tree_bytes(tmp_path / "array")
    assert data_of(whole) == data_of(grown.one_go)
    encode(grown.config, grown.tokens, tmp_path / "parts", options=RunOptions(shards=(0, 3)))
    encode(grown.config, grown.tokens, tmp_path / "parts", options=RunOptions(rows=(OLD, COUNT), workers=2))
    assert encode(grown.config, grown.tokens, tmp_path / "parts")["complete"]
    assert tree_bytes(tmp_path / "parts") == whole
    path = tmp_path / "parts" / "data-00004.arrow"  # an own shard; damage to an adopted one is damage to the old bank
    path.unlink()
    assert encode(grown.config, grown.tokens, tmp_path / "parts", options=RunOptions(shards=(4,)))["complete"]
    assert tree_bytes(tmp_path / "parts") == whole


@pytest.mark.slow
def test_every_moment_of_death_while_growing_is_made_good_by_the_same_command(grown: Grown, tmp_path: Path) -> None:
    encode(grown.config, grown.tokens, tmp_path / "whole")
    whole, before = tree_bytes(tmp_path / "whole"), tree_bytes(grown.folder / "old")
    for moment in range(1, 1000, 5):
        out = tmp_path / f"killed-{moment}"
        outcome = kill_at(moment, encode, grown.config, grown.tokens, out)
        assert outcome.error == ""
        encode(grown.config, grown.tokens, out)
        assert tree_bytes(out) == whole, f"killed at moment {moment}"
        if not outcome.killed:
            break
    assert moment > 80
    assert tree_bytes(grown.folder / "old") == before


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=4).filter(lambda sizes: sizes[0] > 0))
def test_growing_step_by_step_gives_the_bytes_of_one_go(sizes: list[int]) -> None:
    ends = np.cumsum(sizes).tolist()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        rows = banks.make_tokens(folder / "unused", make_texts(folder / "all", ends), ends[-1])
        onto = None
        for step in range(1, len(ends) + 1):
            texts = make_texts(folder / f"{step}", ends[:step])
            write_tokens(folder / f"{step}" / "tokens", texts, rows, ends[:step])
            encode(replace(CONFIG, onto=onto), folder / f"{step}" / "tokens", folder / f"{step}" / "features")
            onto = str(folder / f"{step}" / "features")
        encode(CONFIG, folder / f"{len(ends)}" / "tokens", folder / "one-go")
        assert data_of(tree_bytes(Path(str(onto)))) == data_of(tree_bytes(folder / "one-go"))


# build


def write_source(path: Path, names: range) -> Path:
    lines = [
        {"query": f"what is thing {i}?", "candidates": [{"text": f"thing {i} is a shard"}, {"text": "a shard"}]} for i in names
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def build_config(model: Path, source: Path, onto: Path | None = None) -> BuildConfig:
    return BuildConfig(
        scan=ScanConfig(sources=(("train", str(source)),)),
        tokenize=TokenizeConfig(tokenizer=str(model), special_tokens="on"),
        encode=EncodeConfig(model=ModelConfig(model=str(model)), shard_rows=16),
        onto=str(onto) if onto else None,
    )


@pytest.mark.slow
def test_build_grows_a_whole_folder_with_a_real_model(tmp_path: Path, tiny_bert: Path) -> None:
    config = partial(build_config, tiny_bert)
    old = write_source(tmp_path / "old.jsonl", range(15))
    more = write_source(tmp_path / "more.jsonl", range(10, 30))
    build(config(old), tmp_path / "old")
    before = tree_bytes(tmp_path / "old")
    said = Said()
    manifest = build(config(more, tmp_path / "old"), tmp_path / "new", progress=said)
    assert said.texts["encode"] == 30  # two new texts for each of 15 new things
    assert tree_bytes(tmp_path / "old") == before
    assert (manifest["rows"], manifest["generations"], manifest["kinds"]) == (61, [31, 61], {"query": 30, "candidate": 31})
    for part in ("texts", "tokens", "features"):
        assert all(check.ok for check in verify(tmp_path / "new" / part))
    encode(config(old).encode, tmp_path / "new" / "tokens", tmp_path / "one-go")
    assert data_of(tree_bytes(tmp_path / "new" / "features")) == data_of(tree_bytes(tmp_path / "one-go"))
    again = build(config(more, tmp_path / "new"), tmp_path / "same")  # nothing that is new
    assert (again["rows"], again["generations"]) == (61, [31, 61, 61])
    with pytest.raises(InputError, match="the output is inside an input"):
        build(config(more, tmp_path / "old"), tmp_path / "old")
    with pytest.raises(InputError, match="not a folder that `arrowbank build` made"):
        build(config(more, tmp_path / "old" / "texts"), tmp_path / "other")


@pytest.mark.slow
def test_a_build_that_grows_goes_on_after_deaths_in_any_stage(tmp_path: Path, tiny_bert: Path) -> None:
    build(build_config(tiny_bert, write_source(tmp_path / "old.jsonl", range(15))), tmp_path / "old")
    config = build_config(tiny_bert, write_source(tmp_path / "more.jsonl", range(10, 30)), tmp_path / "old")
    build(config, tmp_path / "whole", options=RunOptions(workers=1))
    moment, deaths, outcome = 0, 0, None
    while outcome is None or outcome.killed:  # one folder dies again and again, each time further on
        moment += 17
        outcome = kill_at(moment, build, config, tmp_path / "new", options=RunOptions(workers=1))
        assert outcome.error == ""
        deaths += outcome.killed
    assert deaths > 3
    assert tree_bytes(tmp_path / "new") == tree_bytes(tmp_path / "whole")


def test_the_command_line_grows(tmp_path: Path, tiny_bert: Path) -> None:
    argv = ["--source", f"train={write_source(tmp_path / 'a.jsonl', range(4))}", "--model", str(tiny_bert)]
    cli("build", *argv, "--out", str(tmp_path / "old"))
    argv[1] = f"train={write_source(tmp_path / 'b.jsonl', range(6))}"
    cli(
        "build",
        *argv,
        "--onto",
        str(tmp_path / "old"),
        "--drift-sample",
        "3",
        "--min-cosine",
        "0.9",
        "--out",
        str(tmp_path / "new"),
    )
    assert len(open_bank(tmp_path / "new" / "features")) == 13
    argv = ["--model", str(tiny_bert), "--onto", str(tmp_path / "old" / "features"), "--out", str(tmp_path / "alone")]
    cli("encode", str(tmp_path / "new" / "tokens"), *argv)
    assert tree_bytes(tmp_path / "alone") == tree_bytes(tmp_path / "new" / "features")
