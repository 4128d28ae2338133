"""DeepSpec's cache: what is written is read back by a plain reader of the layout, and nothing torn is taken."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowbank import ImportConfig, RunOptions, import_targets, import_to_deepspec, open_bank
from arrowbank.bank.kinds.targets_bank import TargetFacts
from arrowbank.errors import ArrowbankError, CorruptBank, InputError, PlanMismatch
from arrowbank.formats.deepspec import DeepSpecCache, plan
from arrowbank.targets.check_model import verify_targets
from tests.dumps import LAYERS, LENGTHS, WIDTH, bits, make_dump
from tests.kill import tree_bytes

CONFIG = ImportConfig(
    target_model="org/target", target_layer_ids=(1, 11, 21), max_shard_bytes=700, loss_mask="ones_except_first"
)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    make_dump(tmp_path / "dump")
    import_to_deepspec(CONFIG, tmp_path / "dump", tmp_path / "cache")
    return tmp_path / "cache"


def test_a_plain_reader_of_the_layout_finds_every_sample(cache: Path, tmp_path: Path) -> None:
    made = make_dump(tmp_path / "dump")
    manifest = json.loads((cache / "manifest.json").read_text())
    index = (cache / "samples.idx").read_bytes()
    assert len(index) == 56 * len(LENGTHS) == 56 * manifest["num_samples"]
    for row, tensors in enumerate(made):
        sample, shard, S, *offsets = struct.unpack_from("<QIIQQQQQ", index, 56 * row)
        assert (sample, S) == (row, LENGTHS[row])
        data = (cache / manifest["shards"][shard]["file_name"]).read_bytes()
        sizes = [4 * S, S, S, 2 * S * LAYERS * WIDTH, 2 * S * WIDTH]
        ids, attention, mask, taps, last = (data[at : at + size] for at, size in zip(offsets, sizes, strict=True))
        assert np.frombuffer(ids, "<i4").tolist() == tensors["input_ids"].tolist()
        assert attention == b"\1" * S
        assert mask == b"\0" + b"\1" * (S - 1)
        assert taps == bits(tensors["target_hidden_states"]).tobytes()
        assert last == bits(tensors["target_last_hidden_states"]).tobytes()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 20_000))
def test_a_shard_is_closed_when_the_next_sample_would_pass_the_limit(lengths: list[int], limit: int) -> None:
    facts = TargetFacts(
        target_layer_ids=(0, 1),
        layers=2,
        hidden_size=4,
        target_model_name_or_path="m",
        last_hidden_norm="post",
        loss_mask="all_ones",
    )
    shards, records = plan(np.array(lengths, np.int64), facts, limit)
    wanted: list[tuple[int, int]] = []  # shard and offset of every sample, as the page says it
    shard, size = 0, 0
    for length in lengths:
        more = length * (4 + 1 + 1 + 2 * 2 * 4 + 2 * 4)
        if size and size + more > limit:
            shard, size = shard + 1, 0
        wanted.append((shard, size))
        size += more
    assert [(int(record["shard_id"]), int(record["offsets"][0])) for record in records] == wanted
    assert [shard.rows for shard in shards] == np.bincount([shard for shard, _ in wanted]).tolist()


def test_a_cache_becomes_a_bank_again(cache: Path, tmp_path: Path) -> None:
    import_targets(ImportConfig(), cache, tmp_path / "bank")
    import_targets(CONFIG, tmp_path / "dump", tmp_path / "direct")
    back, direct = open_bank(tmp_path / "bank"), open_bank(tmp_path / "direct")
    for row in range(len(LENGTHS)):
        one, other = back.read(row), direct.read(row)  # type: ignore[attr-defined]
        for name in ("input_ids", "loss_mask", "taps", "last"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    assert back.manifest["target_model_name_or_path"] == "org/target"
    assert back.manifest["target_layer_ids"] == [1, 11, 21]
    assert back.manifest["loss_mask"] == "ones_except_first"


def test_what_the_user_says_of_a_cache_must_agree(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"target_layer_ids is \(1, 11, 21\), expected \(2, 12, 22\)"):
        import_targets(ImportConfig(target_layer_ids=(2, 12, 22)), cache, tmp_path / "bank")
    for said in ({"target_model": "other/name"}, {"last_hidden_norm": "pre"}):
        with pytest.raises(InputError, match=rf"expected '{next(iter(said.values()))}'.*or give --relabel"):
            import_targets(ImportConfig(**said), cache, tmp_path / "bank")
    import_targets(ImportConfig(target_model="other/name", relabel=True, limit=2), cache, tmp_path / "bank")
    bank = open_bank(tmp_path / "bank")
    assert len(bank) == 2
    assert bank.manifest["target_model_name_or_path"] == "other/name"


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def run(cache: Path) -> None:
        path = cache / name
        if name.endswith(".json"):
            path.write_text(json.dumps(change(json.loads(path.read_text()))))
        else:
            path.write_bytes(change(path.read_bytes()))

    return run


TORN = {
    "no manifest": lambda cache: (cache / "manifest.json").unlink(),
    "a manifest that is none": lambda cache: (cache / "manifest.json").write_text("["),
    "another version": edit("manifest.json", lambda manifest: manifest | {"version": 1}),
    "another dtype": edit("manifest.json", lambda manifest: manifest | {"hidden_dtype": "float16"}),
    "another width": edit("manifest.json", lambda manifest: manifest | {"hidden_size": WIDTH + 1}),
    "a layer less": edit("manifest.json", lambda manifest: manifest | {"target_layer_ids": [1, 11]}),
    "layers not ascending": edit("manifest.json", lambda manifest: manifest | {"target_layer_ids": [11, 1, 21]}),
    "a sample more": edit("manifest.json", lambda manifest: manifest | {"num_samples": 5}),
    "a shard less": edit("manifest.json", lambda manifest: manifest | {"shards": manifest["shards"][:-1]}),
    "a shard elsewhere": edit("manifest.json", lambda manifest: manifest | {"shards": [{"shard_id": 0, "file_name": "../x"}]}),
    "a cut index": edit("samples.idx", lambda data: data[:-1]),
    "an index of zeros": edit("samples.idx", lambda data: bytes(len(data))),
    "a moved offset": edit("samples.idx", lambda data: data[:24] + b"\1" + data[25:]),
    "a cut shard": edit("shard-00000.bin", lambda data: data[:-1]),
    "a longer shard": edit("shard-00001.bin", lambda data: data + b"\0"),
    "a missing shard": lambda cache: (cache / "shard-00001.bin").unlink(),
}


@pytest.mark.parametrize("name", TORN)
def test_a_torn_cache_is_not_opened(cache: Path, tmp_path: Path, name: str) -> None:
    TORN[name](cache)
    with pytest.raises((CorruptBank, InputError)):
        DeepSpecCache(cache)
    (check,) = verify_targets(cache) if (cache / "samples.idx").exists() else [None]
    assert check is None or not check.ok
    with pytest.raises(ArrowbankError):
        import_targets(ImportConfig(), cache, tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_verify_looks_into_a_cache(cache: Path) -> None:
    assert all(check.ok for check in verify_targets(cache))
    edit("shard-00000.bin", lambda data: data[: -2 * WIDTH] + bytes(2 * WIDTH))(cache)  # the last sample's last vector
    failed = {check.name: check.detail for check in verify_targets(cache) if not check.ok}
    assert set(failed) == {"digests", "hidden"}
    assert "1 of 19 vectors zero, first at sample 1 token 0" in failed["hidden"]


def test_a_folder_is_never_written_over(cache: Path, tmp_path: Path) -> None:
    before = tree_bytes(cache)
    import_to_deepspec(CONFIG, tmp_path / "dump", cache)
    assert tree_bytes(cache) == before
    other = ImportConfig(target_model="org/target", target_layer_ids=(1, 11, 21), loss_mask="all_ones")
    with pytest.raises(PlanMismatch, match="holds another export"):
        import_to_deepspec(other, tmp_path / "dump", cache)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="no part of this format"):
        import_to_deepspec(CONFIG, tmp_path / "dump", foreign)
    assert tree_bytes(cache) == before
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
    import_to_deepspec(other, tmp_path / "dump", cache, options=RunOptions(restart=True))
    names = sorted(path.name for path in cache.iterdir())
    assert names == ["arrowbank-export.json", "manifest.json", "samples.idx", "shard-00000.bin"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "fp8"}, "leave --codec and --spans out"),
        ({"spans": "supervised"}, "leave --codec and --spans out"),
        ({"last_hidden_norm": "pre"}, "these are pre"),
        ({"last_hidden_norm": "unknown"}, "these are unknown"),
        ({"target_layer_ids": None}, "give --layers"),
    ],
)
def test_what_a_cache_cannot_hold_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    make_dump(tmp_path / "dump")
    config = ImportConfig(**({"target_model": "m", "target_layer_ids": (1, 11, 21)} | options))
    with pytest.raises(InputError, match=words):
        import_to_deepspec(config, tmp_path / "dump", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    shutil.rmtree(tmp_path / "dump")
