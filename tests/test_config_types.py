"""Configs and public functions with values of the wrong type: an InputError with field, found and expected, never an accident later."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrowbank
from arrowbank import (
    AuditConfig,
    BatchRules,
    BuildConfig,
    CaptureConfig,
    EncodeConfig,
    EngineConfig,
    ExportConfig,
    HealConfig,
    ImportConfig,
    In2Config,
    ModelConfig,
    ProbesConfig,
    PushConfig,
    ReportConfig,
    RunOptions,
    ScanConfig,
    ScoreConfig,
    SearchConfig,
    SelectConfig,
    TokenizeConfig,
    TrunkConfig,
    TrunkData,
)
from arrowbank.errors import ArrowbankError, InputError
from tests.arms import save_filler, small
from tests.feature_banks import save_features

MODEL = ModelConfig(model="m")
SCAN = ScanConfig(sources=(("train", "a.jsonl"), ("eval", "b.jsonl")))
TOKENIZE = TokenizeConfig(tokenizer="m")
ENCODE = EncodeConfig(model=MODEL)
VALID: dict[type, dict[str, Any]] = {
    AuditConfig: {"scan": SCAN},
    BatchRules: {},
    BuildConfig: {"scan": SCAN, "tokenize": TOKENIZE, "encode": ENCODE},
    CaptureConfig: {"model": MODEL, "data": "chats.jsonl", "target_layer_ids": (1, 2)},
    EncodeConfig: {"model": MODEL},
    EngineConfig: {},
    ExportConfig: {"format": "deepspec"},
    HealConfig: {"model": MODEL},
    ImportConfig: {},
    In2Config: {"arm": "c", "length": 4000, "examples": 8, "triples": 4},
    ModelConfig: {"model": "m"},
    ProbesConfig: {"length": 4000},
    PushConfig: {},
    ReportConfig: {},
    RunOptions: {},
    ScanConfig: {"sources": (("train", "a.jsonl"),)},
    ScoreConfig: {"models": (MODEL,)},
    SearchConfig: {},
    SelectConfig: {"limit": 3},
    TokenizeConfig: {"tokenizer": "m"},
    TrunkConfig: {"model": MODEL, "sources": (TrunkData("code", "tokens"),)},
    TrunkData: {"name": "code", "path": "tokens"},
}
FIELDS = [(kind, field) for kind in VALID for field in dataclasses.fields(kind)]
NUMBERS = [
    (kind, field.name) for kind, field in FIELDS if re.search(r"\b(Count|Natural|int)\b", re.sub("'.*?'", "", str(field.type)))
]
FLOATS = [
    *((HealConfig, name) for name in ("epochs", "lr", "hard")),
    *((EncodeConfig, "min_cosine"), (AuditConfig, "threshold"), (ScoreConfig, "confidence"), (ModelConfig, "gpu_memory_gb")),
]


def made(kind: type, /, **options: Any) -> Any:
    return kind(**(VALID[kind] | options))


def test_every_config_of_the_public_names_is_tried() -> None:
    names = {name for name in arrowbank.__all__ if name.endswith(("Config", "Options", "Rules")) or name == "TrunkData"}
    assert names == {kind.__name__ for kind in VALID}


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda value: getattr(value, "name", getattr(value, "__name__", "")))
def test_no_field_takes_any_object(kind: type, field: dataclasses.Field[Any]) -> None:
    class Stranger:
        def __repr__(self) -> str:
            return "<a stranger>"

    with pytest.raises(InputError) as error:
        made(kind, **{field.name: Stranger()})
    assert str(error.value).startswith(f"{kind.__name__}: {field.name}")
    assert "is <a stranger> (Stranger); expected " in str(error.value)


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=str)
@pytest.mark.parametrize("value", ["256", True, 2.5, float("nan"), b"3", [[]], {"a": 1}], ids=repr)
def test_numbers_are_whole_numbers(kind: type, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{kind.__name__}: {name} is .*; expected "):
        made(kind, **{name: value})


@pytest.mark.parametrize(("kind", "name"), FLOATS, ids=str)
@pytest.mark.parametrize("value", ["0.5", True, float("nan"), float("inf"), -float("inf"), -7.0, b"x", [0.5]], ids=repr)
def test_numbers_with_a_point_are_finite_and_in_their_range(kind: type, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{kind.__name__}: {name} is .*; expected "):
        made(kind, **{name: value})


WRONG: list[tuple[type, str, Any, str]] = [
    (EncodeConfig, "model", "minilm", r" a ModelConfig. Give ModelConfig\(…\)."),
    (EncodeConfig, "rules", {"max_batch": 3}, "expected a BatchRules. Give BatchRules"),
    (EncodeConfig, "normalize", 1, "expected True or False"),
    (EncodeConfig, "encoder", 3, "expected a string"),
    (BuildConfig, "scan", {"sources": ()}, "expected a ScanConfig"),
    (ScanConfig, "sources", {"train": "a.jsonl"}, r"\(dict\); expected a list, each \(a string, a string or a path\)"),
    (ScanConfig, "sources", ("train", "a.jsonl"), r"is 'train' at \[0\]; expected \(a string, a string or a path\)"),
    (ScanConfig, "sources", "train=a.jsonl", "expected a list"),
    (ScanConfig, "sources", [("train", 3)], r"is 3 at \[0\]\[1\]; expected a string or a path"),
    (ScanConfig, "sources", [("train", "a", "b")], "expected "),
    (ScanConfig, "fields", "query", "expected a list"),
    (ScanConfig, "on_bad_line", "ignore", "is 'ignore'; expected one of error, skip"),
    (TokenizeConfig, "max_tokens", "256", r"max_tokens is '256'; expected a whole number, at least 1 \(--max-tokens\)\."),
    (TokenizeConfig, "max_tokens", 0, "is 0; expected at least 1"),
    (TokenizeConfig, "special_tokens", "yes", "expected one of auto, on, off"),
    (TokenizeConfig, "on_long", True, "expected one of truncate, error"),
    (TokenizeConfig, "tokenizer", None, "expected a string or a path"),
    (ModelConfig, "dtype", "fp16", "expected one of auto, float32, bfloat16, float16"),
    (ModelConfig, "layer", "-1", "expected a whole number"),
    (RunOptions, "rows", (3,), r"expected \(a whole number, a whole number\)"),
    (RunOptions, "rows", "0:3", "expected "),
    (RunOptions, "shards", "3-7", "expected a list, each a whole number"),
    (RunOptions, "shards", 3, "expected a list"),
    (RunOptions, "shards", {3, 7}, "expected a list"),
    (RunOptions, "engine", "slurm", "expected one of local, ray"),
    (RunOptions, "workers", 0, "is 0; expected at least 1"),
    (In2Config, "arm", "d", r"arm is 'd'; expected one of a, b, c \(--arm\)"),
    (In2Config, "mirror", None, r"mirror is None; expected True or False \(--no-mirror\)"),
    (In2Config, "shard_tokens", 0, r"In2Config: shard_tokens is 0"),
    (ProbesConfig, "positions", "0,1", "expected a list, each a number, at least 0 and at most 1"),
    (ProbesConfig, "positions", (0, 1.5), r"is 1.5 at \[1\]; expected at least 0 and at most 1"),
    (CaptureConfig, "target_layer_ids", "1,2", r"target_layer_ids is '1,2'; expected .*\(--layers\)"),
    (ImportConfig, "target_layer_ids", ("1",), r"is '1' at \[0\]; expected a whole number"),
    (ImportConfig, "loss_mask", "some", "expected one of auto, ones_except_first, all_ones, from_dump"),
    (HealConfig, "also", ("nf4=x",), "expected "),
    (HealConfig, "also", (("int4", "x"),), r"is 'int4' at \[0\]\[0\]; expected one of keep, bf16"),
    (ScoreConfig, "models", ("m",), r"is 'm' at \[0\]; expected a ModelConfig. Give ModelConfig"),
    (ScoreConfig, "models", MODEL, "expected a list, each a ModelConfig"),
    (SelectConfig, "where", 3, "expected a list"),
    (SelectConfig, "where", [b"kind=query"], "expected a string"),
    (ReportConfig, "points", 5001, "is 5001; expected at least 0 and at most 5000"),
    (ExportConfig, "stride", "2T", "expected one of T, T"),
    (TrunkConfig, "sources", TrunkData("code", "tokens"), "expected a list, each a TrunkData"),
    (TrunkConfig, "sources", {"code": "tokens"}, "expected a list, each a TrunkData"),
    (TrunkData, "path", 3, "expected a string or a path"),
    (PushConfig, "public", "no", "expected True or False"),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "words"), WRONG, ids=lambda value: getattr(value, "__name__", str(value))[:40]
)
def test_wrong_values_are_named_with_what_was_expected(kind: type, name: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        made(kind, **{name: value})
    assert name in str(error.value)


ALIKE: list[tuple[type, str, Any, Any]] = [
    (BatchRules, "max_batch", np.int32(7), 7),
    (EncodeConfig, "limit", np.uint8(7), 7),
    (EncodeConfig, "normalize", np.bool_(False), False),
    (AuditConfig, "threshold", np.float32(0.5), 0.5),
    (HealConfig, "epochs", 2, 2.0),
    (TokenizeConfig, "tokenizer", Path("some/folder"), "some/folder"),
    (ModelConfig, "model", Path("some/folder"), "some/folder"),
    (ScanConfig, "sources", [["train", Path("a.jsonl")]], (("train", "a.jsonl"),)),
    (BuildConfig, "onto", Path("old"), "old"),
    (CaptureConfig, "data", Path("a.jsonl"), Path("a.jsonl")),
    (CaptureConfig, "target_layer_ids", np.array([1, 5]), (1, 5)),
    (ImportConfig, "target_layer_ids", range(3), (0, 1, 2)),
    (ProbesConfig, "positions", [0, 1], (0.0, 1.0)),
    (RunOptions, "rows", [0, 10], (0, 10)),
    (SelectConfig, "where", "kind=query", ("kind=query",)),
    (TrunkConfig, "layers", [0], (0,)),
    (HealConfig, "also", [["nf4", Path("x")]], (("nf4", "x"),)),
    (ModelConfig, "dtype", np.str_("float32"), "float32"),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "stored"), ALIKE, ids=lambda value: getattr(value, "__name__", str(value))[:40]
)
def test_values_that_mean_the_same_are_stored_in_one_form(kind: type, name: str, value: Any, stored: Any) -> None:
    config = made(kind, **{name: value})
    found = getattr(config, name)
    assert (found, type(found)) == (stored, type(stored))
    assert config == made(kind, **{name: stored})
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - configs go to worker processes
    assert dataclasses.replace(config) == config


@given(
    st.sampled_from(NUMBERS),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=4,
    ),
)
def test_any_value_is_taken_or_refused_by_name(place: tuple[type, str], value: Any) -> None:
    kind, name = place
    with suppress(InputError):
        assert type(getattr(made(kind, **{name: value}), name)) in (int, tuple, type(None))


@pytest.mark.parametrize("value", [10**5000, [10**5000], "x" * 10_000, list(range(10**6))], ids=lambda value: str(type(value)))
def test_a_huge_value_is_said_in_short(value: Any) -> None:
    for kind, name in ((HealConfig, "lr"), (PushConfig, "public"), (TokenizeConfig, "max_tokens")):
        with pytest.raises(InputError, match=f"{name} is ") as error:
            made(kind, **{name: value})
        assert len(str(error.value)) < 250


# functions


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    vectors = np.eye(4, 8, dtype=np.float16)
    return save_features(tmp_path_factory.mktemp("features") / "bank", vectors, ["ducks", "d", "u", "c"])


def test_one_text_is_one_text_and_not_its_characters(bank: Any) -> None:
    assert bank.rows("ducks").tolist() == [0]
    assert bank.vectors("ducks").shape == (1, 8)
    assert bank.rows(iter(["c", "u"])).tolist() == [3, 2]
    assert bank.rows(np.array(["c", "u"])).tolist() == [3, 2]
    assert bank.slice(0, 2, "text").column_names == ["text"]


@pytest.mark.parametrize("texts", [None, 3, b"ducks", ["ducks", None], [b"ducks"], {"ducks": 1}, [["ducks"]], object], ids=repr)
@pytest.mark.parametrize("method", ["rows", "vectors"])
def test_what_is_no_list_of_texts_is_refused(bank: Any, method: str, texts: Any) -> None:
    with pytest.raises(InputError, match=rf"{method}: texts is .*; expected "):
        getattr(bank, method)(texts)


@pytest.mark.parametrize("rows", ["ducks", ["ducks"], [0.5], [True, False, True, True], [-1], [4], [None]], ids=repr)
def test_what_is_no_row_is_refused(bank: Any, rows: Any) -> None:
    with pytest.raises(InputError, match="take: "):
        bank.take(rows)


def test_no_rows_are_none(bank: Any) -> None:
    assert bank.take([]).shape == (0, 8)
    assert bank.take(np.array([3, 0], np.uint8)).shape == (2, 8)


CALLS: dict[str, Callable[[Path], object]] = {
    "scan: config": lambda out: arrowbank.scan({"sources": ()}, out),  # type: ignore[arg-type]
    "scan: options": lambda out: arrowbank.scan(SCAN, out, options="2"),  # type: ignore[arg-type]
    "scan: out": lambda out: arrowbank.scan(SCAN, 3),  # type: ignore[arg-type]
    "tokenize: options": lambda out: arrowbank.tokenize(TOKENIZE, "texts", out, options=2),  # type: ignore[arg-type]
    "encode: config": lambda out: arrowbank.encode("minilm", "tokens", out),  # type: ignore[arg-type]
    "encode: options": lambda out: arrowbank.encode(ENCODE, "tokens", out, options={"workers": 2}),  # type: ignore[arg-type]
    "build: config": lambda out: arrowbank.build(SCAN, out),  # type: ignore[arg-type]
    "build_in2: options": lambda out: arrowbank.build_in2(small(), ["a.bin"], out, options=True),  # type: ignore[arg-type]
    "build_in2: fillers": lambda out: arrowbank.build_in2(small(), 3, out),  # type: ignore[arg-type]
    "verify_in2: folders": lambda out: arrowbank.verify_in2({"a": out}),  # type: ignore[arg-type]
    "merge: banks": lambda out: arrowbank.merge(None, out),  # type: ignore[arg-type]
    "select: config": lambda out: arrowbank.select("kind=query", "bank", out),  # type: ignore[arg-type]
    "export: config": lambda out: arrowbank.export("deepspec", "bank", out),  # type: ignore[arg-type]
    "capture: options": lambda out: arrowbank.capture(made(CaptureConfig), out, options={"workers": 2}),  # type: ignore[arg-type]
    "import_targets: source": lambda out: arrowbank.import_targets(ImportConfig(), None, out),  # type: ignore[arg-type]
    "build_trunk: options": lambda out: arrowbank.build_trunk(made(TrunkConfig), out, options=True),  # type: ignore[arg-type]
    "heal_draft: config": lambda out: arrowbank.heal_draft(MODEL, "trunk", out),  # type: ignore[arg-type]
    "write_report: banks": lambda out: arrowbank.write_report(ReportConfig(), 3, out),  # type: ignore[arg-type]
    "open_bank: folder": lambda out: arrowbank.open_bank(3),  # type: ignore[arg-type]
    "open_bank: expect": lambda out: arrowbank.open_bank(out, "max_tokens"),  # type: ignore[arg-type]
    "verify: quick": lambda out: arrowbank.verify(out, quick="yes"),  # type: ignore[arg-type]
    "compare: a": lambda out: arrowbank.compare(None, out),  # type: ignore[arg-type]
    "push: config": lambda out: arrowbank.push(out, "org/name", {"public": True}),  # type: ignore[arg-type]
    "pull: revision": lambda out: arrowbank.pull("org/name", out, revision=3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", CALLS)
def test_arguments_of_functions_are_checked(what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{what} is .*; expected "):
        CALLS[what](tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "a/" * 3000], ids=["null", "long name", "long path"])
@pytest.mark.parametrize("what", ["open_bank", "verify", "merge", "write_report", "pull"])
def test_a_path_that_none_can_be_is_an_error(what: str, path: str, tmp_path: Path) -> None:
    calls: dict[str, Callable[[], object]] = {
        "open_bank": lambda: arrowbank.open_bank(path),
        "verify": lambda: arrowbank.verify(path),
        "merge": lambda: arrowbank.merge([path, path], tmp_path / "out"),
        "write_report": lambda: arrowbank.write_report(ReportConfig(), [path], tmp_path / "page.html"),
        "pull": lambda: arrowbank.pull(f"file://{path}", tmp_path / "out"),
    }
    with pytest.raises(ArrowbankError):
        calls[what]()
    assert not list(tmp_path.iterdir())


def test_every_public_function_that_takes_paths_is_checked() -> None:
    made = {name: getattr(arrowbank, name) for name in arrowbank.__all__}
    functions = {name for name, value in made.items() if callable(value) and not isinstance(value, type)}
    unchecked = {name for name in functions if not hasattr(made[name], "__wrapped__")}
    assert unchecked == {"collate_targets"}


def test_one_path_is_one_path_and_not_its_characters(tmp_path: Path) -> None:
    filler = save_filler(tmp_path / "filler.bin")
    for one in (str(filler), filler, [filler], (str(filler),)):
        arrowbank.build_in2(small(), one, tmp_path / "arm")
    assert arrowbank.verify_in2(str(tmp_path / "arm"))[0].ok
    assert arrowbank.verify_in2(tmp_path / "arm", fillers=str(filler))[0].ok


def test_an_expectation_that_looks_at_nothing_fails(bank: Any) -> None:
    arrowbank.open_bank(bank.folder, {"hidden_size": 8, "generations": (4,)})
    for name in ("nothing", "hidden_size.nothing", "encoding.nothing"):
        with pytest.raises(arrowbank.errors.ContractError, match=f"{name} is missing, expected None"):  # type: ignore[attr-defined]
            arrowbank.open_bank(bank.folder, {name: None})
    with pytest.raises(arrowbank.errors.ContractError, match="hidden_size is 8, expected nan"):  # type: ignore[attr-defined]
        arrowbank.open_bank(bank.folder, {"hidden_size": float("nan")})
