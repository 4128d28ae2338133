"""A check that looked at nothing fails, and so does one whose bound is no number: exit code 1 or 2, never 0."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arrowbank import (
    EncodeConfig,
    ModelConfig,
    ProbesConfig,
    ScanConfig,
    ScoreConfig,
    TokenizeConfig,
    build_probes,
    compare,
    encode,
    open_bank,
    scan,
    score_probes,
    tokenize,
    verify,
    verify_in2,
)
from arrowbank.bank import BankWriter
from arrowbank.cli import main
from arrowbank.errors import NothingChecked
from arrowbank.features.audit import Audit, AuditRow, read_audit, write_audit
from arrowbank.mtp.acceptance import Acceptance
from arrowbank.mtp.heal import Healed, shortcomings
from arrowbank.mtp.measure import Measured
from tests.arms import build_small, save_filler
from tests.feature_banks import save_features
from tests.tiny import save_wordpiece_tokenizer

TABLE = "tests.banks:TableEncoder"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and eval with the same texts in a field `q`, which is not the default one, and a feature bank of both."""
    folder = tmp_path_factory.mktemp("audited")
    lines = "".join(json.dumps({"q": f"what is thing {row}?"}) + "\n" for row in range(12))
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text(lines)
    sources = tuple((name, folder / f"{name}.jsonl") for name in ("train", "eval"))
    scan(ScanConfig(sources=sources, fields=(("query", "q"),)), folder / "texts")
    tokenizer = save_wordpiece_tokenizer(folder / "tokenizer")
    tokenize(TokenizeConfig(tokenizer=tokenizer), folder / "texts", folder / "tokens")
    encode(EncodeConfig(encoder=TABLE), folder / "tokens", folder / "features")
    return folder


def auditing(place: Path, *more: str) -> list[str]:
    sources = [f"--source={name}={place / name}.jsonl" for name in ("train", "eval")]
    return ["audit", str(place / "features"), *sources, *more]


def test_an_audit_reads_texts_where_the_bank_read_them(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(auditing(place, "--max-shared", "0")) == 1
    said = capsys.readouterr()
    assert "12 texts are shared exactly and 0 nearly: more than --max-shared 0" in said.err
    assert "query=q" in said.err
    assert main(auditing(place, "--max-shared", "12")) == 0
    assert main(auditing(place, "--field", "query=q", "--max-shared", "12")) == 0


@pytest.mark.parametrize("more", [[], ["--max-shared", "0"], ["--max-shared", "100"], ["--json"]], ids=str)
def test_an_audit_of_no_texts_fails(place: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(auditing(place, "--field", "query=elsewhere", *more)) == 1
    assert "eval: no text was read, so nothing was audited" in capsys.readouterr().err


@pytest.mark.parametrize("empty", ["train", "eval"])
def test_an_audit_with_texts_on_one_side_only_fails(
    place: Path, tmp_path: Path, empty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.jsonl").write_text('{"q": null}\n')
    given = {name: place / f"{name}.jsonl" for name in ("train", "eval")} | {empty: tmp_path / "none.jsonl"}
    argv = ["audit", str(place / "features"), *(f"--source={name}={path}" for name, path in given.items())]
    assert main([*argv, "--max-shared", "0", "--out", str(tmp_path / "audit.json")]) == 1
    assert f"FAIL  {empty}: no text was read" in capsys.readouterr().err
    assert read_audit(tmp_path / "audit.json").texts == {"train": 12, "eval": 12} | {empty: 0}


def test_an_audit_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    row = AuditRow("query", "eval", "train", texts=3, exact=0, near=0)
    for rows, ok in (([row], True), ([], False)):
        write_audit(Audit(threshold=0.9, max_shared=0, rows=rows, examples=[]), tmp_path / "audit.json")
        said = json.loads((tmp_path / "audit.json").read_text())
        del said["texts"]
        (tmp_path / "audit.json").write_text(json.dumps(said))
        assert read_audit(tmp_path / "audit.json").ok is ok


# comparisons


def two_banks(folder: Path, vectors: Any, others: Any, texts: list[str]) -> tuple[Path, Path]:
    save_features(folder / "a", vectors, ["one", "two"])
    save_features(folder / "b", others, texts)
    return folder / "a", folder / "b"


@pytest.mark.parametrize("bound", [[], ["--min-cosine", "0.5"], ["--min-cosine", "-1"]], ids=str)
def test_a_comparison_of_no_shared_texts_fails(tmp_path: Path, bound: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two_banks(tmp_path, np.eye(2, dtype=np.float16), np.eye(2, dtype=np.float16), ["three", "four"])
    with pytest.raises(NothingChecked):
        compare(a, b)
    assert main(["compare", str(a), str(b), *bound]) == 1
    assert "no text in common" in capsys.readouterr().err


def test_a_cosine_that_is_no_number_is_below_any_bound(tmp_path: Path) -> None:
    broken = np.array([[np.inf, 1], [0, 1]], np.float16)
    a, b = two_banks(tmp_path, np.eye(2, dtype=np.float16), broken, ["one", "two"])
    assert main(["compare", str(a), str(b)]) == 0
    assert main(["compare", str(a), str(b), "--min-cosine", "-1"]) == 1


def test_a_bound_above_one_is_never_reached(tmp_path: Path) -> None:
    a, b = two_banks(tmp_path, np.eye(2, dtype=np.float16), np.eye(2, dtype=np.float16), ["one", "two"])
    assert main(["compare", str(a), str(b), "--min-cosine", "1"]) == 0
    assert main(["compare", str(a), str(b), "--min-cosine", "1.1"]) == 1


BOUNDS = {
    "threshold": "audit bank --source=a=a.jsonl --source=b=b.jsonl --threshold {}",
    "max_shared": "audit bank --source=a=a.jsonl --source=b=b.jsonl --max-shared {}",
    "min_cosine": "encode tokens --encoder tests.banks:TableEncoder --onto old --out out --min-cosine {}",
    "drift_sample": "encode tokens --encoder tests.banks:TableEncoder --onto old --out out --drift-sample {}",
    "--min-cosine": "compare a b --min-cosine {}",
    "gpu_memory_gb": "encode tokens --model m --out out --gpu-memory-gb {}",
    "confidence": "in2 score probes --model m --out out --no-plot --confidence {}",
    "positions": "in2 probes --length 100 --filler a.bin --out out --positions 0,{}",
    "lr": "heal --trunk trunk --model m --out out --lr {}",
    "epochs": "heal --trunk trunk --model m --out out --epochs {}",
    "hard": "heal --trunk trunk --model m --out out --hard {}",
    "--budget-gb": "trunk build --model m --source a=b --out out --budget-gb {}",
    "samples": "targets verify bank --model m --samples {}",
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-7", "1e999"])
def test_bounds_that_are_no_numbers_are_refused(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(BOUNDS[name].format(value).split()) == 2
    said = capsys.readouterr().err
    assert name in said or f"--{name.replace('_', '-')}" in said
    assert not list(tmp_path.iterdir())


# banks and exports of nothing


def empty_bank(folder: Path, kind: str, columns: dict[str, Any], recipe: dict[str, Any] | None = None, **fields: Any) -> Path:
    """A committed bank of no rows."""
    with BankWriter(folder, kind=kind, recipe=recipe or {"of": "nothing"}, manifest=fields) as bank:
        bank.write_shard(0, pa.record_batch({name: pa.array([], type) for name, type in columns.items()}))
        bank.commit(rows=0)
    return folder


TEXT = {"text": pa.large_string(), "sha1": pa.binary(), "kind": pa.string(), "source": pa.string()}


@pytest.mark.parametrize("more", [[], ["--quick"]], ids=str)
def test_a_bank_without_rows_is_not_verified(tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = empty_bank(tmp_path / "texts", "texts", TEXT, text_count=0, kinds={})
    assert main(["verify", str(folder), *more]) == 1
    assert "nothing was verified" in capsys.readouterr().out
    assert [check.name for check in verify(folder) if not check.ok] == ["rows"]


def emptied(full: Path, folder: Path) -> Path:
    """The bank `full` without its rows, and all else that its manifest says."""
    bank = open_bank(full)
    written = ("format", "kind", "plan_digest", "recipe", "rows", "complete", "files")
    said = {name: value for name, value in bank.manifest.items() if name not in written}
    columns = {field.name: field.type for field in bank.shard(0).schema}
    return empty_bank(folder, bank.kind, columns, dict(bank.manifest["recipe"]), **{**said, "text_count": 0})


def test_an_arm_without_examples_is_not_verified(tmp_path: Path) -> None:
    arm = build_small(tmp_path, mirror=False)
    folder = emptied(arm, tmp_path / "empty")
    assert not any(check.ok for check in verify_in2([folder]))
    assert not all(check.ok for check in verify_in2([folder, arm]))
    assert main(["in2", "verify", str(folder)]) == 1


def test_probes_without_trials_are_not_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ProbesConfig(length=100, vocab=1000, alphabet=100, blocks=1)
    build_probes(config, [save_filler(tmp_path / "filler.bin")], tmp_path / "full")
    folder = emptied(tmp_path / "full", tmp_path / "probes")
    with pytest.raises(NothingChecked, match="holds no trial"):
        score_probes(ScoreConfig(models=(ModelConfig(model="m"),), plot=False), folder, tmp_path / "scores")
    assert main(["in2", "score", str(folder), "--model", "m", "--no-plot", "--out", str(tmp_path / "scores")]) == 1
    assert not (tmp_path / "scores").exists()


def empty_parquet(folder: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "data-00000.parquet")


def empty_npy(folder: Path) -> None:
    np.save(folder / "features.f16.npy", np.empty((0, 4), np.float16))
    (folder / "index.json").write_text("{}")
    (folder / "texts.jsonl").write_text("")


def empty_cache(folder: Path) -> None:
    manifest = {
        **{"version": 2, "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56},
        **{"num_samples": 0, "num_shards": 1, "target_layer_ids": [1, 2], "hidden_size": 8, "loss_mask_mode": "all_ones"},
        **{"shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}], "target_model_name_or_path": "m"},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "samples.idx").write_bytes(b"")
    (folder / "shard-00000.bin").write_bytes(b"")


def empty_llmc(folder: Path) -> None:
    (folder / "train_0.bin").write_bytes(struct.pack("<3i", 20240520, 1, 0) + bytes(1024 - 12))


@pytest.mark.parametrize("make", [empty_parquet, empty_npy, empty_cache, empty_llmc], ids=lambda make: make.__name__)
@pytest.mark.parametrize("command", ["verify", "targets verify"])
def test_an_export_of_nothing_is_not_verified(make: Any, command: str, tmp_path: Path) -> None:
    make(tmp_path)
    assert main([*command.split(), str(tmp_path)]) == 1


@pytest.mark.parametrize(("samples", "code"), [("0", 1), ("-1", 2)])
def test_a_proof_by_no_samples_is_none(samples: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "verify", str(tmp_path), "--model", "m", "--samples", samples]) == code
    assert "samples" in capsys.readouterr().err


# healing


def measured(score: float, control: float, rows: int = 100) -> Measured:
    return Measured(
        *(Acceptance(hits=(round(rate * rows),), rows=(rows,)) for rate in (score, control)),
    )


HEALED = [
    (measured(0.3, 0.01), measured(0.5, 0.01), []),
    (measured(0.3, 0.01), measured(0.3, 0.01), ["acceptance: 0.300 drafts a round, 0.300 before"]),
    (measured(0.3, 0.01), measured(0.2, 0.01), ["acceptance: 0.200 drafts a round, 0.300 before"]),
    (measured(0.3, 0.01), measured(0.5, 0.6), ["control: 0.600 drafts a round with targets a row late"]),
    (measured(0.3, 0.01), measured(0.5, 0.5), ["control: 0.500"]),
    (measured(0, 0, 0), measured(0, 0, 0), ["acceptance: no row"]),
]


@pytest.mark.parametrize(("before", "after", "words"), HEALED)
def test_a_healing_that_brought_nothing_says_so(before: Measured, after: Measured, words: list[str]) -> None:
    said = shortcomings(Healed(before, after, steps=10, best_step=3))
    assert len(said) == len(words)
    assert all(one.startswith(wanted) for one, wanted in zip(said, words, strict=True))
