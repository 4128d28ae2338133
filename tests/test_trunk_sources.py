"""Where the windows of a trunk bank come from: the same texts give the same windows in whatever form they lie; bad input is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import zstandard

from arrowbank import RunOptions, TokenizeConfig, TrunkConfig, TrunkData, tokenize
from arrowbank.errors import CorruptBank, InputError
from arrowbank.models import load_tokenizer
from arrowbank.mtp.trunk_build import TrunkStage
from arrowbank.mtp.trunk_plan import data_set
from arrowbank.mtp.trunk_records import PackedWindows, shuffled
from tests import tiny
from tests.banks import make_texts, make_tokens
from tests.dumps import make_dump
from tests.target_banks import make_target_bank
from tests.trunk_banks import make

TEXTS = tiny.texts(90)


def as_texts_bank(folder: Path, tokenizer: Path) -> Path:
    return tiny.save_texts_bank(folder / "texts", TEXTS, generations=[20, 90])


def as_token_bank(folder: Path, tokenizer: Path) -> Path:
    config = TokenizeConfig(tokenizer=str(tokenizer), shard_rows=40)
    tokenize(config, as_texts_bank(folder, tokenizer), folder / "tokens", options=RunOptions(workers=1))
    return folder / "tokens"


def as_text(folder: Path, tokenizer: Path) -> Path:
    (folder / "texts.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(TEXTS).encode())
    return folder / "texts.txt"


def as_lines(folder: Path, tokenizer: Path) -> Path:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder / "texts.jsonl"


def as_gzip(folder: Path, tokenizer: Path) -> Path:
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress(as_lines(folder, tokenizer).read_bytes()))
    return folder / "texts.jsonl.gz"


def as_zstd(folder: Path, tokenizer: Path) -> Path:
    (folder / "texts.txt.zst").write_bytes(zstandard.compress(as_text(folder, tokenizer).read_bytes()))
    return folder / "texts.txt.zst"


def as_ids(folder: Path, tokenizer: Path) -> Path:
    made = load_tokenizer(str(tokenizer))
    rows = [made(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return folder / "ids.jsonl"


def as_dataset_of_ids(folder: Path, tokenizer: Path) -> Path:
    rows = [json.loads(line) for line in as_ids(folder, tokenizer).read_text().splitlines()]
    datasets.Dataset.from_list(rows).save_to_disk(folder / "dataset")
    return folder / "dataset"


def as_dataset_of_texts(folder: Path, tokenizer: Path) -> Path:
    datasets.Dataset.from_dict({"text": TEXTS, "other": list(range(90))}).save_to_disk(folder / "dataset")
    return folder / "dataset"


def windows_of(model: Path, path: Path, **options: Any) -> PackedWindows:
    return TrunkStage(make(model, TrunkData("a", path), **options)).windows


@pytest.mark.parametrize(
    "form",
    [
        as_texts_bank,
        as_token_bank,
        as_text,
        as_lines,
        as_gzip,
        as_zstd,
        as_ids,
        as_dataset_of_ids,
        as_dataset_of_texts,
    ],
)
def test_the_same_texts_give_the_same_windows(form: Callable[[Path, Path], Path], tiny_qwen3: Path, tmp_path: Path) -> None:
    made = load_tokenizer(str(tiny_qwen3))
    stream = [token for at in shuffled(90) for token in made(TEXTS[at], add_special_tokens=False)["input_ids"]]
    found = windows_of(tiny_qwen3, form(tmp_path, tiny_qwen3), tokens=1000)
    assert found.lengths.tolist() == [48] * 20 + [40]
    assert found.padded(0)[found.padded(-1) >= 0].tolist() == stream[:1000]


def test_a_tokenizer_of_its_own_is_taken(tiny_qwen3: Path, wordpiece_tokenizer: Path, tmp_path: Path) -> None:
    path = as_text(tmp_path, tiny_qwen3)
    other = windows_of(tiny_qwen3, path, tokenizer=str(wordpiece_tokenizer))
    made = load_tokenizer(str(wordpiece_tokenizer))
    first = made(TEXTS[shuffled(90)[0]], add_special_tokens=False)["input_ids"]
    assert other.padded(0)[0, : len(first)].tolist() == first


def test_another_field_holds_the_text(tiny_qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text, "n": 1}) + "\n" for text in TEXTS))
    found = windows_of(tiny_qwen3, tmp_path / "a.jsonl", text_field="body")
    assert np.array_equal(found.padded(0), windows_of(tiny_qwen3, as_text(tmp_path, tiny_qwen3)).padded(0))
    with pytest.raises(InputError, match=r"line \d+: .* expected an object with input_ids, or a text under 'text'"):
        windows_of(tiny_qwen3, tmp_path / "a.jsonl")


def test_a_bank_of_tokens_of_several_shards_is_read_by_row(tiny_qwen3: Path, tmp_path: Path) -> None:
    make_texts(tmp_path / "texts", 200)
    rows = make_tokens(tmp_path / "tokens", tmp_path / "texts", 200)
    expected = [token for at in shuffled(200) for token in rows[at]]
    found = windows_of(tiny_qwen3, tmp_path / "tokens")
    assert found.padded(0)[0].tolist() == expected[:48]


def test_a_target_banks_tokens_are_tokens_too(tiny_qwen3: Path, tmp_path: Path) -> None:
    samples = make_target_bank(tmp_path / "targets")
    stream = [int(token) for at in shuffled(len(samples)) for token in samples[at].input_ids]
    with pytest.raises(InputError, match="too few windows"):
        windows_of(tiny_qwen3, tmp_path / "targets")
    found = windows_of(tiny_qwen3, tmp_path / "targets", window=4, hold_all=True)
    assert found.padded(0)[0].tolist() == stream[:4]


# what is wrong with them


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_bad_input_is_named(tiny_qwen3: Path, tmp_path: Path) -> None:
    good = {"input_ids": [5] * 700}
    make_dump(tmp_path / "folder")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 50)[:-20])
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "splits")
    datasets.Dataset.from_dict({"other": ["a"]}).save_to_disk(tmp_path / "columns")
    cases = [
        (tmp_path / "absent", "no such file"),
        (tmp_path / "folder", "expected an object with input_ids, or a text"),
        (tmp_path / "splits", "of several splits"),
        (tmp_path / "columns", "a dataset of the columns other; expected input_ids, or a text column"),
        (tmp_path / "latin.txt", "line 1, column 3: not UTF-8"),
        (tmp_path / "cut.jsonl.gz", "cut.jsonl.gz: cut off: the compressed data end"),
        (write(tmp_path / "a.rst", "a"), "a.rst: not a known kind of file"),
        (write(tmp_path / "1.jsonl", good, "{"), "1.jsonl, line 2, column 2: not JSON"),
        (write(tmp_path / "2.jsonl", "[" * 100_000), "2.jsonl, line 1, column 100000: nested too deeply"),
        (write(tmp_path / "3.jsonl", [1, 2]), "line 1, column 1: an array, where an object (a record) should be"),
        (write(tmp_path / "4.jsonl", {"input_ids": [1, 512]}), "line 1: token id 512, but the model has a vocabulary of 512"),
        (write(tmp_path / "5.jsonl", {"input_ids": [-1]}), "token id -1"),
        (write(tmp_path / "6.jsonl", {"input_ids": [1.5]}), "expected a text, or a list of token ids"),
        (write(tmp_path / "7.jsonl", {"input_ids": 7}), "expected a text, or a list of token ids"),
        (write(tmp_path / "8.jsonl", {"text": "\ud800"}), "line 1: holds half of a surrogate pair"),
        (write(tmp_path / "9.jsonl", {"text": ""}), "too few windows: its 1 records give none"),
        (write(tmp_path / "10.jsonl"), "too few windows: its 0 records give none"),
        (write(tmp_path / "11.jsonl", {"input_ids": [True]}), "expected a text, or a list of token ids"),
        (write(tmp_path / "12.jsonl", {"input_ids": [2**80]}), f"token id {2**80}"),
    ]
    for path, expected in cases:
        with pytest.raises(InputError) as refused:
            windows_of(tiny_qwen3, path)
        assert expected in str(refused.value)


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    model = tiny.save_qwen3(tmp_path / "model")
    for path in model.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(InputError, match=r"holds texts, and there is no tokenizer\. Give --tokenizer"):
        windows_of(model, write(tmp_path / "a.txt", "a text"))


def test_a_bank_without_tokens_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    from arrowbank import build_trunk

    rows = [{"input_ids": [5] * 700}]
    build_trunk(make(tiny_qwen3, TrunkData("a", write(tmp_path / "a.jsonl", *rows))), tmp_path / "trunk")
    with pytest.raises(InputError, match="a bank of trunk, expected tokens or texts"):
        windows_of(tiny_qwen3, tmp_path / "trunk")
    as_token_bank(tmp_path, tiny_qwen3)
    (tmp_path / "tokens" / "data-00001.arrow").unlink()
    with pytest.raises(CorruptBank):
        windows_of(tiny_qwen3, tmp_path / "tokens")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("code=tokens", TrunkData("code", "tokens")),
        ("code=tokens@500", TrunkData("code", "tokens", 500)),
        ("code@500=tokens", TrunkData("code", "tokens", 500)),
        ("code@7=tokens@500", TrunkData("code", "tokens", 500)),
        ("code=me@home/tokens", TrunkData("code", "me@home/tokens")),
        ("code=a=b@9", TrunkData("code", "a=b", 9)),
        ("some/code.jsonl.gz@7", TrunkData("code", "some/code.jsonl.gz", 7)),
    ],
)
def test_sets_are_named_and_capped(value: str, expected: TrunkData) -> None:
    assert data_set(value) == expected


@pytest.mark.parametrize("value", ["", "=tokens", "code=", "code=tokens@0"])
def test_a_set_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InputError, match="--source"):
        data_set(value)


def test_sets_share_the_windows_numbers(tiny_qwen3: Path, tmp_path: Path) -> None:
    a, b = (write(tmp_path / f"{name}.jsonl", {"input_ids": [7] * 500}) for name in "ab")
    config: TrunkConfig = make(tiny_qwen3, TrunkData("a", a), TrunkData("b", b, 48))
    windows = TrunkStage(config).windows
    assert windows.names == ["a"] * 11 + ["b"]
    assert windows.held_out.tolist() == [index == 9 for index in range(12)]
