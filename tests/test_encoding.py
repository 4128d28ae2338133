"""The stage `encode`, on an encoder that needs no model: what the bank holds, its parts, its resumes and its refusals."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank import EncodeConfig, FeatureBank, RunOptions, compare, encode, estimate_encode, open_bank, verify
from arrowbank.bank import BankWriter
from arrowbank.bank.columns import fixed_lists
from arrowbank.bank.mirror import write_mirror
from arrowbank.engine.plan import BatchRules, batches
from arrowbank.errors import (
    BadVector,
    ContractError,
    CorruptBank,
    DiskFull,
    IncompleteBank,
    InputError,
    PlanMismatch,
    WorkerDied,
)
from arrowbank.features.encode import EncodeStage
from arrowbank.features.encode_config import ENCODING_METHOD
from arrowbank.features.stored_vectors import fault_of, finish
from tests import banks
from tests.kill import kill_after, kill_at, tree_bytes

COUNT = 40
SHARD_ROWS = 12
TABLE = "tests.banks:TableEncoder"
CONFIG = EncodeConfig(encoder=TABLE, shard_rows=SHARD_ROWS, rules=BatchRules(max_batch=3, token_budget=16))


class Source(NamedTuple):
    folder: Path
    texts: list[str]
    token_rows: list[list[int]]

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("source")
    texts = banks.make_texts(folder / "texts", COUNT, shard_rows=15)
    return Source(folder, texts, banks.make_tokens(folder / "tokens", folder / "texts", COUNT))


@pytest.fixture(scope="module")
def whole(source: Source) -> dict[str, str]:
    """The bytes of a bank made in one go."""
    encode(CONFIG, source.tokens, source.folder / "whole")
    return tree_bytes(source.folder / "whole")


def slow_vector(tokens: list[int]) -> np.ndarray:
    pooled = banks.TableEncoder().encode(np.array([tokens], np.int32))[0].astype(np.float64)
    return pooled / np.linalg.norm(pooled)


def test_every_row_has_its_text_and_its_vector(source: Source, whole: dict[str, str]) -> None:
    dataset = datasets.load_from_disk(str(source.folder / "whole"))
    assert dataset.column_names == ["text", "kind", "sha1", "length", "features"]
    assert dataset.features["features"] == datasets.List(datasets.Value("float16"), length=banks.WIDTH)
    assert dataset["text"][:] == source.texts
    assert dataset["length"][:] == [len(row) for row in source.token_rows]
    assert dataset["kind"][:4] == ["query", "candidate", "candidate", "query"]
    assert dataset["sha1"][5] == hashlib.sha1(source.texts[5].encode()).digest()
    wanted = np.stack([slow_vector(row) for row in source.token_rows])
    stored = np.concatenate([fixed_lists(chunk) for chunk in dataset.data.column("features").chunks])
    assert stored.dtype == np.float16
    np.testing.assert_allclose(stored.astype(np.float64), wanted, rtol=2**-11, atol=2**-24)


def test_the_mirror_is_what_trainers_map(source: Source, whole: dict[str, str]) -> None:
    folder = source.folder / "whole"
    manifest = json.loads((folder / "manifest.json").read_text())
    matrix = np.load(folder / manifest["bank"], mmap_mode="r")
    index = json.loads((folder / manifest["index"]).read_text())
    texts = [json.loads(line) for line in (folder / manifest["texts"]).read_text().splitlines()]
    assert (matrix.dtype, matrix.shape) == (np.float16, (COUNT, banks.WIDTH))
    assert matrix.shape[0] == len(index) == len(texts)
    assert texts == source.texts
    assert all(index[hashlib.sha1(text.encode()).hexdigest()] == row for row, text in enumerate(texts))
    assert (folder / "index.json").read_text() == json.dumps(index, indent=0)
    bank = open_bank(folder)
    assert isinstance(bank, FeatureBank)
    assert np.array_equal(bank.take(np.arange(COUNT)).view(np.uint16), matrix.view(np.uint16))


def test_the_manifest_has_what_existing_trainers_check(source: Source, whole: dict[str, str]) -> None:
    manifest = json.loads((source.folder / "whole" / "manifest.json").read_text())
    wanted = {
        "format_version": 2,
        "train_sha256": "ab" * 32,
        "model_path": TABLE,
        "max_key_tokens": 9,
        "hidden_size": banks.WIDTH,
        "text_count": COUNT,
        "dtype": "float16_memmap",
        "bank": "features.f16.npy",
        "index": "index.json",
        "texts": "texts.jsonl",
        "kinds": {"query": 14, "candidate": 26},
        "complete": True,
        "encoded_rows": COUNT,
    }
    assert {name: manifest.get(name) for name in wanted} == wanted
    encoding = manifest["encoding"]
    assert (encoding["max_batch"], encoding["token_budget"], encoding["grouping"]) == (3, 16, "exact_token_length")
    assert "backbone" in encoding


def test_rows_and_vectors_of_texts(source: Source, whole: dict[str, str]) -> None:
    bank = open_bank(source.folder / "whole", expect={"model": TABLE, "max_tokens": 9, "train_sha256": "ab" * 32})
    assert isinstance(bank, FeatureBank)
    rows = bank.rows([source.texts[7], "absent", f"  {source.texts[0]}\n"])
    assert rows.dtype == np.int64
    assert rows.tolist() == [7, -1, 0]
    assert np.array_equal(bank.vectors([source.texts[30]])[0], bank.matrix[30])
    with pytest.raises(InputError, match="1 of 2 texts are not in this bank, the first one 'absent'"):
        bank.vectors([source.texts[0], "absent"])
    with pytest.raises(ContractError, match="max_tokens is 9, expected 256"):
        open_bank(source.folder / "whole", expect={"max_tokens": 256})


@pytest.mark.slow
def test_the_torch_dataset_does_not_widen(source: Source, whole: dict[str, str]) -> None:
    dataset = open_bank(source.folder / "whole").to_torch()
    batches_of = list(torch.utils.data.DataLoader(dataset, batch_size=16, num_workers=1, multiprocessing_context="spawn"))
    assert [batch.dtype for batch in batches_of] == [torch.float16] * 3
    assert torch.equal(torch.cat(batches_of), torch.from_numpy(np.array(dataset.bank.matrix)))  # type: ignore[attr-defined]
    assert torch.equal(dataset[-1], torch.from_numpy(np.array(dataset.bank.matrix[COUNT - 1])))  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        dataset[COUNT]


def test_all_checks_pass_and_the_bank_equals_itself(source: Source, whole: dict[str, str]) -> None:
    assert all(check.ok for check in verify(source.folder / "whole"))
    same = compare(source.folder / "whole", source.folder / "whole")
    assert (same.shared, same.largest_difference) == (COUNT, 0.0)
    assert same.min_cosine == pytest.approx(1.0, abs=1e-6)


# the same bytes, however it is made


@pytest.mark.slow
@pytest.mark.parametrize("options", [RunOptions(workers=2), RunOptions(workers=3)])
def test_several_processes_write_the_same_bytes(
    source: Source, whole: dict[str, str], tmp_path: Path, options: RunOptions
) -> None:
    encode(CONFIG, source.tokens, source.folder / "processes", options=options)
    assert tree_bytes(source.folder / "processes") == whole
    shutil.rmtree(source.folder / "processes")


def test_a_job_array_writes_the_same_bytes_and_its_last_job_commits(source: Source, whole: dict[str, str]) -> None:
    out = source.folder / "array"
    for number in (2, 0):
        manifest = encode(CONFIG, source.tokens, out, options=RunOptions(worker=(number, 3)))
        assert not manifest["complete"]
    with pytest.raises(IncompleteBank):
        open_bank(out)
    assert encode(CONFIG, source.tokens, out, options=RunOptions(worker=(1, 3)))["complete"]
    assert tree_bytes(out) == whole


def test_parts_by_rows_and_by_shards_add_up(source: Source, whole: dict[str, str]) -> None:
    out = source.folder / "parts"
    first = encode(CONFIG, source.tokens, out, options=RunOptions(rows=(13, 14)))  # row 13 lies in shard 1
    assert (first["complete"], first["encoded_rows"]) == (False, 12)
    second = encode(CONFIG, source.tokens, out, options=RunOptions(shards=(0, 3)))
    assert (second["complete"], second["encoded_rows"]) == (False, 28)
    assert encode(CONFIG, source.tokens, out)["complete"]
    assert tree_bytes(out) == whole


@pytest.mark.slow
def test_every_moment_of_death_is_made_good_by_the_same_command(source: Source, whole: dict[str, str]) -> None:
    for moment in range(1, 1000):
        out = source.folder / f"killed-{moment}"
        outcome = kill_at(moment, encode, CONFIG, source.tokens, out)
        assert outcome.error == ""
        if not outcome.killed:
            break
        if (out / "state.json").exists():
            assert all(check.ok for check in verify(out))
        else:
            assert not any(check.ok for check in verify(out))
            with pytest.raises(FileNotFoundError):
                datasets.load_from_disk(str(out))
        if (out / "manifest.json").exists() and not (out / "features.f16.npy").exists():
            assert json.loads((out / "manifest.json").read_text())["complete"] is False
        encode(CONFIG, source.tokens, out)
        assert tree_bytes(out) == whole, f"killed at moment {moment}"
        shutil.rmtree(out)
    assert moment > 80


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_moments_from_outside(source: Source, whole: dict[str, str], workers: int) -> None:
    rng = np.random.default_rng(workers)
    out = source.folder / f"random-{workers}"
    for _ in range(6):
        kill_after(
            float(rng.uniform(0.01, 0.3 * workers)), encode, CONFIG, source.tokens, out, options=RunOptions(workers=workers)
        )
    encode(CONFIG, source.tokens, out)
    assert tree_bytes(out) == whole


def test_a_mirror_left_out_leaves_vectors_and_look_up(source: Source) -> None:
    out = source.folder / "bare"
    encode(EncodeConfig(encoder=TABLE, shard_rows=SHARD_ROWS, mirror=False), source.tokens, out)
    bank = open_bank(out)
    assert isinstance(bank, FeatureBank)
    assert not (out / "features.f16.npy").exists()
    assert bank.vectors([source.texts[39]]).shape == (1, banks.WIDTH)
    assert all(check.ok for check in verify(out))
    with pytest.raises(InputError, match="--no-mirror"):
        _ = bank.matrix


def test_a_grown_token_bank_keeps_the_shards_of_its_old_rows(source: Source, tmp_path: Path) -> None:
    for name, count, generations in (("old", 20, [20]), ("new", 40, [20, 40])):
        banks.make_texts(tmp_path / name / "texts", count)
        banks.write_tokens(tmp_path / name / "tokens", tmp_path / name / "texts", source.token_rows[:count], generations)
        encode(CONFIG, tmp_path / name / "tokens", tmp_path / name / "features")
    for shard in ("data-00000.arrow", "data-00001.arrow"):
        assert (tmp_path / "old/features" / shard).read_bytes() == (tmp_path / "new/features" / shard).read_bytes()


# trials and refusals


def test_a_trial_is_never_taken_for_the_bank(source: Source) -> None:
    out = source.folder / "trial"
    manifest = encode(EncodeConfig(encoder=TABLE, trial=7), source.tokens, out)
    assert (manifest["complete"], manifest["encoded_rows"]) == (False, 7)
    assert not any(name.endswith("_sha256") for name in manifest)
    with pytest.raises(IncompleteBank):
        open_bank(out)
    assert not verify(out)[0].ok
    with pytest.raises(PlanMismatch, match="trial: found 7, wanted null"):
        encode(EncodeConfig(encoder=TABLE), source.tokens, out)


def test_a_limit_makes_a_bank_of_the_first_rows_without_the_digests_of_its_sources(
    source: Source, whole: dict[str, str], tmp_path: Path
) -> None:
    tokens = shutil.copytree(source.tokens, tmp_path / "tokens")
    manifest = json.loads((tokens / "manifest.json").read_text())
    texts = Path(shutil.copytree(source.tokens.parent / "texts", tmp_path / "texts"))
    assert any(name.endswith("_sha256") for name in manifest)
    for limit in (17, COUNT):
        config = EncodeConfig(encoder=TABLE, shard_rows=SHARD_ROWS, limit=limit)
        made = encode(config, tokens, tmp_path / str(limit), texts=texts)
        bank = open_bank(tmp_path / str(limit))
        assert (made["complete"], made["text_count"], made["rows"], len(bank)) == (True, limit, limit, limit)
        assert np.array_equal(bank.matrix, open_bank(source.folder / "whole").matrix[:limit])
        assert all(check.ok for check in verify(tmp_path / str(limit)))
        assert any(name.endswith("_sha256") for name in made) == (limit == COUNT)
        assert sum(made["kinds"].values()) == limit


@pytest.mark.slow
@pytest.mark.parametrize(("encoder", "words"), [("ZeroEncoder", "all zero"), ("NanEncoder", "not finite")])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_vector_ends_the_build_and_is_named(
    source: Source, tmp_path: Path, encoder: str, words: str, workers: int
) -> None:
    rows = [list(row) for row in source.token_rows]
    rows[30][0] = 3  # lies in shard 2
    shutil.copytree(source.folder / "texts", tmp_path / "texts")
    banks.write_tokens(tmp_path / "tokens", tmp_path / "texts", rows, [COUNT])
    config = EncodeConfig(encoder=f"tests.banks:{encoder}", shard_rows=SHARD_ROWS)
    with pytest.raises(BadVector, match=rf"(?s)shard 2: 1 vectors of \d tokens are {words}.*row 30: 'text number 30 of many'"):
        encode(config, tmp_path / "tokens", tmp_path / "out", options=RunOptions(workers=workers))
    assert not (tmp_path / "out" / "data-00002.arrow").exists()
    if workers == 1:
        assert sorted(path.name for path in (tmp_path / "out").glob("data-*")) == ["data-00000.arrow", "data-00001.arrow"]


def test_vectors_that_are_not_normalised_are_kept_as_they_are_and_may_not_overflow(source: Source) -> None:
    out = source.folder / "raw"
    encode(EncodeConfig(encoder=TABLE, normalize=False), source.tokens, out)
    bank = open_bank(out)
    assert isinstance(bank, FeatureBank)
    pooled = banks.TableEncoder().encode(np.array([source.token_rows[4]], np.int32))[0]
    assert np.array_equal(bank.matrix[4], pooled.astype(np.float16))
    with pytest.raises(BadVector, match="past 65504"):
        encode(EncodeConfig(encoder="tests.banks:HugeEncoder", normalize=False), source.tokens, source.folder / "huge")
    with pytest.raises(BadVector, match=r"(?s)too small for float16.*row \d+: '.*Leave out --normalize off"):
        encode(EncodeConfig(encoder="tests.banks:SmallEncoder", normalize=False), source.tokens, source.folder / "small")
    encode(EncodeConfig(encoder="tests.banks:SmallEncoder"), source.tokens, source.folder / "small-normalised")
    encode(EncodeConfig(encoder="tests.banks:HugeEncoder"), source.tokens, source.folder / "huge-normalised")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-12, 5), st.integers(1, 300))
def test_a_vector_is_stored_where_float16_keeps_it(seed: int, exponent: int, width: int) -> None:
    vectors = (np.random.default_rng(seed).standard_normal((8, width)) * 10.0**exponent).astype(np.float32)
    half, good = finish(vectors, normalize=False)
    with np.errstate(over="ignore", invalid="ignore"):
        exact, rounded = vectors.astype(np.float64), vectors.astype(np.float16)
        error = np.linalg.norm(rounded.astype(np.float64) - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert (error[good] < 2.0**-9.9).all()
    assert (~np.isfinite(error[~good]) | (error[~good] > 2.0**-10.1)).all()
    assert np.array_equal(half[good], rounded[good])
    for vector in vectors[~good]:
        assert ("not finite" in fault_of(vector)) == bool(np.abs(vector).max() > 60_000)


def test_dim_truncates_and_then_normalizes(source: Source, tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    encode(EncodeConfig(encoder=TABLE, normalize=False), source.tokens, whole)
    made = encode(EncodeConfig(encoder=TABLE, dim=3), source.tokens, half)
    pooled = np.stack([banks.TableEncoder().encode(np.array([row], np.int32))[0, :3] for row in source.token_rows])
    expected = (
        (torch.from_numpy(pooled) / torch.linalg.vector_norm(torch.from_numpy(pooled), dim=1, keepdim=True)).half().numpy()
    )
    bank = open_bank(half, kind=FeatureBank)
    assert np.array_equal(bank.matrix, expected)
    assert (made["hidden_size"], made["encoding"]["dim"], made["recipe"]["dim"]) == (3, 3, 3)
    assert all(check.ok for check in verify(half))
    with pytest.raises(PlanMismatch) as caught:
        encode(EncodeConfig(encoder=TABLE, dim=2), source.tokens, half)
    assert "dim" in caught.value.fields
    with pytest.raises(InputError, match=r"--dim 999: .* gives vectors of \d+ dimensions"):
        encode(EncodeConfig(encoder=TABLE, dim=999), source.tokens, tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_another_plan_is_refused_with_the_fields_that_differ(source: Source, whole: dict[str, str]) -> None:
    out = source.folder / "whole"
    changes: list[tuple[dict[str, Any], str]] = [
        ({"encoder": "tests.banks:OtherVersion"}, "model.version"),
        ({"normalize": False}, "normalize"),
        ({"rules": BatchRules(max_batch=4, token_budget=16)}, "batches.max_batch"),
        ({"shard_rows": 13}, "shard_rows"),
    ]
    for change, field in changes:
        fields = {"encoder": TABLE, "shard_rows": SHARD_ROWS, "rules": CONFIG.rules} | change
        with pytest.raises(PlanMismatch) as caught:
            encode(EncodeConfig(**fields), source.tokens, out)
        assert field in caught.value.fields
    assert tree_bytes(out) == whole


def test_a_complete_bank_is_left_as_it_is(source: Source, whole: dict[str, str]) -> None:
    state = source.folder / "whole" / "state.json"
    before = state.stat().st_mtime_ns
    assert encode(CONFIG, source.tokens, source.folder / "whole")["complete"]
    assert state.stat().st_mtime_ns == before
    assert tree_bytes(source.folder / "whole") == whole


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("bank", ["texts", "tokens"])
def test_flipped_bits_in_what_is_read_are_noticed_before_the_first_forward_pass(
    source: Source, tmp_path: Path, bank: str
) -> None:
    shutil.copytree(source.folder / "texts", tmp_path / "texts")
    shutil.copytree(source.folder / "tokens", tmp_path / "tokens")
    flip(tmp_path / bank / "data-00000.arrow")
    with pytest.raises(CorruptBank, match=rf"{bank}/data-00000.arrow: its bytes are not those that were committed"):
        encode(CONFIG, tmp_path / "tokens", tmp_path / "out")
    assert not list((tmp_path / "out").glob("data-*"))


def test_a_texts_bank_that_was_moved_or_changed(source: Source, whole: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(source.folder / "tokens", tmp_path / "tokens")
    shutil.copytree(source.folder / "texts", tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"the texts bank behind .* is not there. Give its folder with --texts"):
        encode(CONFIG, tmp_path / "tokens", tmp_path / "out")
    banks.make_texts(tmp_path / "other", 30)
    with pytest.raises(InputError, match="not the texts bank that"):
        encode(CONFIG, tmp_path / "tokens", tmp_path / "out", texts=tmp_path / "other")
    encode(CONFIG, tmp_path / "tokens", tmp_path / "out", texts=tmp_path / "elsewhere")
    assert tree_bytes(tmp_path / "out") == whole


def test_a_disk_without_room_is_refused_before_the_work(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DiskFull, match=r"takes \d+\.\d kB, the disk has 1.0 kB free"):
        encode(CONFIG, source.tokens, tmp_path / "out")
    assert not list((tmp_path / "out").glob("data-*"))


def test_a_mirror_that_is_there_needs_no_room_again(source: Source, whole: dict[str, str], tmp_path: Path) -> None:
    plan = EncodeStage(CONFIG, open_bank(source.tokens))
    with BankWriter(tmp_path / "out", kind="features", recipe=plan.recipe) as bank:
        everything = plan.bytes_to_write(bank, plan.shards, last=True)
        for index in range(4):
            batch = open_bank(source.folder / "whole").shard(index)
            bank.write_shard(index, batch)
        without_shards = plan.bytes_to_write(bank, (), last=True)
        write_mirror(bank, rows=COUNT, width=banks.WIDTH, report=lambda rows: None)
        without_mirror = plan.bytes_to_write(bank, (), last=True)
    vectors = COUNT * banks.WIDTH * 2
    assert everything >= without_shards + vectors
    assert without_shards >= without_mirror + vectors


def test_a_process_makes_an_encoder_once(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCODERS_MADE", str(tmp_path / "made"))
    encode(EncodeConfig(encoder="tests.banks:CountedEncoder"), source.tokens, tmp_path / "out", texts=source.folder / "texts")
    assert (tmp_path / "made").read_text() == "made\n"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no.such:thing", "cannot be imported"),
        ("tests.banks", "cannot be imported"),
        ("tests.banks:Nothing", "cannot be imported"),
        ("tests.banks:WithoutVersion", "has no attribute version"),
        ("tests.banks:VOCAB", "cannot be called without arguments"),
        ("os:system", "cannot be called without arguments"),
    ],
)
def test_an_encoder_that_is_none(source: Source, tmp_path: Path, spec: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        encode(EncodeConfig(encoder=spec), source.tokens, tmp_path / "out")


def test_an_encoder_whose_module_does_not_parse(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfinished.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="unfinished:make: cannot be imported"):
        encode(EncodeConfig(encoder="unfinished:make"), source.tokens, tmp_path / "out")


def test_an_encoder_of_the_wrong_shape(source: Source, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"shape \(\d+, 23\) for \d+ rows, expected \(\d+, 24\)"):
        encode(EncodeConfig(encoder="tests.banks:NarrowEncoder"), source.tokens, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions(rows=(30, 41)), "must lie within 0:40"),
        (RunOptions(rows=(3, 3)), "start before end"),
        (RunOptions(shards=(4,)), "no shard 4; this plan has shards 0 to 3"),
    ],
)
def test_parts_that_are_not_there(source: Source, tmp_path: Path, options: RunOptions, words: str) -> None:
    with pytest.raises(InputError, match=words):
        encode(CONFIG, source.tokens, tmp_path / "out", options=options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EncodeConfig(),
        lambda: EncodeConfig(encoder=TABLE, limit=0),
        lambda: EncodeConfig(encoder=TABLE, shard_rows=0),
        lambda: RunOptions(engine="slurm"),  # type: ignore[arg-type]
        lambda: RunOptions(worker=(2, 2)),
        lambda: RunOptions(worker=(0, 2), restart=True),
    ],
)
def test_configurations_that_make_no_sense(make: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        make()


def test_a_bank_of_another_kind_is_refused(source: Source, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a bank of texts, expected tokens"):
        encode(CONFIG, source.folder / "texts", tmp_path / "out")


# damage to a finished bank


@pytest.mark.parametrize(
    ("file", "failing"),
    [
        ("features.f16.npy", {"hashes", "mirror"}),
        ("index.json", {"hashes", "mirror"}),
        ("texts.jsonl", {"hashes", "mirror"}),
        ("keys.npy", {"hashes", "look-up"}),
        ("data-00001.arrow", {"opens"}),  # the byte is of the end of the stream
    ],
)
def test_verify_finds_changed_bytes_in_every_file(
    source: Source, whole: dict[str, str], tmp_path: Path, file: str, failing: set[str]
) -> None:
    shutil.copytree(source.folder / "whole", tmp_path / "bank")
    path = tmp_path / "bank" / file
    data = bytearray(path.read_bytes())
    data[-3] = data[-3] ^ 1 if file != "index.json" else ord("7")
    path.write_bytes(data)
    assert failing <= {check.name for check in verify(tmp_path / "bank") if not check.ok}


def test_verify_knows_a_cut_file_and_a_stray_shard(source: Source, whole: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(source.folder / "whole", tmp_path / "bank")
    shutil.copy(tmp_path / "bank/data-00001.arrow", tmp_path / "bank/data-00009.arrow")
    assert [check.name for check in verify(tmp_path / "bank") if not check.ok] == ["shards"]
    os.truncate(tmp_path / "bank/data-00001.arrow", 100)
    (only,) = verify(tmp_path / "bank", quick=True)
    assert not only.ok
    assert "data-00001.arrow: 100 bytes on disk" in only.detail


def test_one_damaged_shard_of_a_finished_bank_is_made_again_by_name(
    source: Source, whole: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(source.folder / "whole", tmp_path / "bank")
    os.truncate(tmp_path / "bank/data-00001.arrow", 100)
    with pytest.raises(CorruptBank, match="--shards 1 "):
        encode(CONFIG, source.tokens, tmp_path / "bank")
    encode(CONFIG, source.tokens, tmp_path / "bank", options=RunOptions(shards=(1,)))
    assert tree_bytes(tmp_path / "bank") == whole


@pytest.mark.slow
def test_a_worker_that_always_dies_ends_in_an_error(source: Source, tmp_path: Path) -> None:
    config = EncodeConfig(encoder="tests.banks:DeadlyEncoder", shard_rows=SHARD_ROWS)
    with pytest.raises(WorkerDied, match="workers died over it"):
        encode(config, source.tokens, tmp_path / "out", options=RunOptions(workers=2))


# counting before the work


def test_the_estimate_is_the_plan_and_the_disk(source: Source, whole: dict[str, str]) -> None:
    found = estimate_encode(CONFIG, source.tokens, source.folder)
    lengths = np.array([len(row) for row in source.token_rows], np.int32)
    shards = [lengths[low : low + SHARD_ROWS] for low in range(0, COUNT, SHARD_ROWS)]
    assert (found.rows, found.tokens, found.counts["hidden_size"], found.shards) == (COUNT, lengths.sum(), banks.WIDTH, 4)
    assert found.counts["forward_passes"] == sum(len(list(batches(part, CONFIG.rules))) for part in shards)
    assert found.seconds is not None
    assert found.seconds > 0
    assert found.fits
    sizes = {path.name: path.stat().st_size for path in (source.folder / "whole").iterdir()}
    vectors = COUNT * banks.WIDTH * 2
    assert vectors < found.shard_bytes
    assert sizes["features.f16.npy"] + sizes["keys.npy"] - 256 <= sum(found.beside.values())
    assert estimate_encode(CONFIG, source.tokens, source.folder, timed=False).seconds is None


GOLDEN = Path(__file__).parent / "golden" / "encoding.json"


def test_the_encoding_method_is_the_one_that_its_number_names(source: Source, whole: dict[str, str]) -> None:
    """When vectors, batches or recipe were changed on purpose: raise ENCODING_METHOD, then `python -m tests.test_encoding`."""
    golden, found = json.loads(GOLDEN.read_text()), golden_output(source.folder / "whole")
    assert {name: found[name] for name in ("method", "batches", "recipe")} == {
        name: golden[name] for name in ("method", "batches", "recipe")
    }
    # the last bit of a float16 may differ between processors, which add up a norm in different orders
    differences = np.abs(np.array(found["vectors"], np.int64) - np.array(golden["vectors"], np.int64))
    assert differences.max() <= 1


def golden_output(bank: Path) -> dict[str, Any]:
    """What the method gives: the bits of stored vectors, the batches of a shard, and what the plan digest is taken of."""
    lengths = (np.arange(50, dtype=np.int32) * 7) % 11 + 1
    return {
        "method": ENCODING_METHOD,
        "recipe": sorted(open_bank(bank).manifest["recipe"]),
        "batches": [
            [batch.length, batch.rows.tolist()] for batch in batches(lengths, BatchRules(max_batch=4, token_budget=20))
        ],
        "vectors": np.load(bank / "features.f16.npy").view(np.int16).tolist(),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        banks.make_texts(Path(made) / "texts", COUNT, shard_rows=15)
        banks.make_tokens(Path(made) / "tokens", Path(made) / "texts", COUNT)
        encode(CONFIG, Path(made) / "tokens", Path(made) / "whole")
        GOLDEN.write_text(json.dumps(golden_output(Path(made) / "whole")) + "\n")
