"""Conversations and token rows: which tokens a sample has, which of them the assistant wrote, and what is refused."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from arrowbank.errors import InputError
from arrowbank.inputs.records import Record
from arrowbank.models import load_tokenizer
from arrowbank.targets.conversations import ChatTokenizer, inside
from arrowbank.targets.target_rows import (
    ASSISTANT_TOKENS,
    GIVEN,
    ONES_EXCEPT_FIRST,
    RowCounts,
    RowMaker,
    RowRules,
    TokenRow,
    loss_mask_rule,
    samples_at,
)
from tests import banks, tiny

VOCAB = 512
QUESTION, ANSWER = {"role": "user", "content": "Open the file"}, {"role": "assistant", "content": "The file is open."}
CHAT = [QUESTION, ANSWER, {"role": "user", "content": "Close it"}, {"role": "assistant", "content": "Closed, and gone."}]

# drops what earlier answers thought, as Qwen3's does
FORGETS = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.role == 'assistant' and loop.last %}<think>{{ message.thought }}</think>\n{% endif %}"
    "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# its prompt for an answer is not how an answer begins
OTHER_PROMPT = tiny.CHAT_TEMPLATE.replace("<|im_start|>assistant\n{% endif", "<|im_start|>model\n{% endif")
BARE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def chat_tokenizer(folder: Path, template: str | None) -> ChatTokenizer:
    tiny.save_bpe_tokenizer(folder, **({"chat_template": template} if template else {}))
    return ChatTokenizer(load_tokenizer(str(folder)), str(folder))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatTokenizer]:
    """chats(template): the BPE tokenizer with that chat template, made once."""
    made: dict[str, ChatTokenizer] = {}

    def get(template: str) -> ChatTokenizer:
        if template not in made:
            made[template] = chat_tokenizer(tmp_path_factory.mktemp("chat"), template)
        return made[template]

    return get


def record(messages: Any, **fields: Any) -> Record:
    return Record("chats.jsonl, line 3", "a", {"messages": messages, **fields})


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def maker(path: Path, chat: ChatTokenizer | None = None, **rules: Any) -> RowMaker:
    records = samples_at(path)
    given: dict[str, Any] = {"max_length": 64, "min_loss_tokens": 1, "limit": None, "vocab_size": VOCAB, "max_positions": None}
    return RowMaker(records, RowRules(loss_mask=loss_mask_rule(records), model="m", **(given | rules)), chat)


def assistant_text(chat: ChatTokenizer, messages: list[dict[str, str]]) -> list[str]:
    """The pieces of text whose tokens count, decoded."""
    ids, mask = chat.tokens(record(messages))
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    pieces = [ids[start:stop] for start, stop in edges.reshape(-1, 2)]
    return [chat._tokenizer.decode(piece) for piece in pieces]


# which tokens count


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, tiny.TAGGED_TEMPLATE])
def test_the_assistants_tokens_count_and_no_others(chats: Callable[[str], ChatTokenizer], template: str) -> None:
    chat = chats(template)
    assert assistant_text(chat, CHAT) == ["The file is open.<|im_end|>\n", "Closed, and gone.<|im_end|>\n"]
    assert assistant_text(chat, CHAT[:1]) == []


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, tiny.TAGGED_TEMPLATE, BARE])
def test_tokens_are_those_of_the_tokenizers_own_template(chats: Callable[[str], ChatTokenizer], template: str) -> None:
    chat = chats(template)
    for sample in tiny.conversations(9):
        ids, mask = chat.tokens(record(sample["messages"]))
        assert ids.tolist() == chat._tokenizer.apply_chat_template(sample["messages"])["input_ids"]
        assert (ids.dtype, mask.dtype, len(ids)) == (np.int32, np.uint8, len(mask))


ROLES = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=12)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(ROLES)
def test_tags_and_prefixes_give_the_same_masks(chats: Callable[[str], ChatTokenizer], said: list[tuple[str, str]]) -> None:
    messages = [{"role": "user", "content": "Hello"}, *({"role": role, "content": text} for role, text in said)]
    by_turns = chats(tiny.CHAT_TEMPLATE).tokens(record(messages))
    tagged = chats(tiny.TAGGED_TEMPLATE).tokens(record(messages))
    assert np.array_equal(by_turns[0], tagged[0])
    assert np.array_equal(by_turns[1], tagged[1])


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_token_across_a_border_does_not_count(tmp_path: Path, trimmed: bool) -> None:
    """ "assistant " is the prompt and "the end" the answer: the token " the" is of both. Some tokenizers cut blanks off offsets."""
    tiny.save_bpe_tokenizer(tmp_path, chat_template=BARE)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trimmed)
    chat = ChatTokenizer(tokenizer, "m")
    [answer] = assistant_text(chat, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "the end"}])
    assert answer == " end"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 40), max_size=6))
def test_inside_is_what_it_says(lengths: list[int], cuts: list[int]) -> None:
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = np.stack([ends - lengths, ends], axis=1).reshape(-1, 2).astype(np.int64)
    cuts = sorted(cuts[: len(cuts) // 2 * 2])
    spans = list(zip(cuts[::2], cuts[1::2], strict=True))
    wanted = [
        any(set(range(start, end)) <= set(range(*span)) for span in spans) and end > start for start, end in offsets.tolist()
    ]
    assert inside(offsets, spans).tolist() == wanted


def test_tools_reach_the_template(chats: Callable[[str], ChatTokenizer]) -> None:
    chat = chats("{% for tool in tools or [] %}{{ tool.name }};{% endfor %}" + tiny.CHAT_TEMPLATE)
    ids, _ = chat.tokens(record(CHAT, tools=[{"name": "lookup"}]))
    assert chat._tokenizer.decode(ids).startswith("lookup;")


# what is refused


def test_a_prompt_that_is_not_how_an_answer_begins_is_refused(chats: Callable[[str], ChatTokenizer]) -> None:
    with pytest.raises(InputError, match=r"line 3, message 2: the prompt for an answer is not how it begins"):
        chats(OTHER_PROMPT).tokens(record(CHAT))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "messages is [], expected a list of at least one message"),
        ("hello", 'messages is "hello", expected a list'),
        ([QUESTION, "hello"], 'message 2: "hello", expected an object whose role and content are strings'),
        ([{"content": "hello"}], "message 1: "),
        ([{"role": "user", "content": 3}], "message 1: "),
        ([{"role": "user", "content": None}], "message 1: "),
        ([ANSWER], "message 1: is the assistant's, with nothing before it"),
        ([QUESTION, {"role": "assistant", "content": "\ud800"}], "holds half of a surrogate pair"),
    ],
)
def test_conversations_that_are_none(chats: Callable[[str], ChatTokenizer], messages: Any, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        chats(tiny.CHAT_TEMPLATE).tokens(record(messages))
    assert str(refused.value).startswith("chats.jsonl, line 3")
    assert expected in str(refused.value)


def test_what_the_template_itself_refuses(chats: Callable[[str], ChatTokenizer]) -> None:
    chat = chats("{{ raise_exception('Only two roles, please') }}")
    with pytest.raises(InputError, match=r"line 3: the chat template of .* does not take this .*Only two roles, please"):
        chat.tokens(record(CHAT))


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no chat template"):
        chat_tokenizer(tmp_path, None)


def test_the_templates_digest_tells_templates_apart(chats: Callable[[str], ChatTokenizer]) -> None:
    assert chats(tiny.CHAT_TEMPLATE).template_sha256 != chats(tiny.TAGGED_TEMPLATE).template_sha256


# files


LINES = [{"id": "first", "input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_lines_plain_and_compressed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    text = b"\xef\xbb\xbf" + json.dumps(LINES[0]).encode() + b"\r\n\n"
    suffix = {bytes: "", gzip.compress: ".gz", zstandard.compress: ".zst"}[pack]
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(pack(text) + pack(json.dumps(LINES[1]).encode()))  # of compressed data, two members
    rows = list(maker(path))
    assert [row.name for row in rows] == ["first", f"{path.name}:3"]
    assert [row.input_ids.tolist() for row in rows] == [[5, 6, 7], [8, 9]]
    assert [row.loss_mask.tolist() for row in rows] == [[0, 1, 1], [0, 1]]


def test_a_saved_dataset_and_a_token_bank(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [False, True, False]}, {"input_ids": [8], "loss_mask": [True]}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert loss_mask_rule(samples_at(tmp_path / "saved")) == GIVEN
    found = list(maker(tmp_path / "saved"))
    assert [(row.name, row.loss_mask.tolist()) for row in found] == [("saved:0", [0, 1, 0]), ("saved:1", [1])]
    banks.make_texts(tmp_path / "texts", 6, shard_rows=4)
    tokens = banks.make_tokens(tmp_path / "tokens", tmp_path / "texts", 6)
    assert loss_mask_rule(samples_at(tmp_path / "tokens")) == ONES_EXCEPT_FIRST
    assert [row.input_ids.tolist() for row in maker(tmp_path / "tokens", min_loss_tokens=0)] == tokens
    before = samples_at(tmp_path / "saved").sha256
    datasets.Dataset.from_list(rows[:1]).save_to_disk(str(tmp_path / "saved"))
    assert samples_at(tmp_path / "saved").sha256 != before


BAD_LINES = [
    (b"{", "column 2: not JSON"),
    (b"[1]", "an array, where an object (a record) should be"),
    (b'{"input_ids": "\xff"}', "not UTF-8 (byte 0xff)"),
    (b"{}", "found the fields of nothing; expected messages"),
    (b'{"text": "a"}', "found the fields text; expected messages"),
    (b'{"messages": [], "input_ids": [1]}', "messages and input_ids both"),
    (b'{"input_ids": []}', "expected a list of whole numbers"),
    (b'{"input_ids": 5}', "expected a list of whole numbers"),
    (b'{"input_ids": [1, 2.5]}', "input_ids[1] is 2.5, expected a whole number from 0"),
    (b'{"input_ids": [true]}', "input_ids[0] is True"),
    (b'{"input_ids": [-1]}', "input_ids[0] is -1"),
    (b'{"input_ids": [99999999999]}', "input_ids[0] is 99999999999"),
    (b'{"input_ids": [3, 512]}', "token id 512, but model 'm' has a vocabulary of 512"),
    (b'{"input_ids": [3], "id": [1]}', "id is [1], expected a string"),
    (b'{"input_ids": [3], "id": "\\udfff"}', 'id is "\\udfff", expected a string'),
    (b'{"input_ids": [3], "loss_mask": [1]}', "is token ids with a loss mask"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "is a conversation (messages)"),
]


@pytest.mark.parametrize(("line", "expected"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"input_ids": [1, 2]}\n\n' + line + b"\n")
    with pytest.raises(InputError) as refused:
        list(maker(path))
    assert str(refused.value).startswith(f"{path}, line 3")
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("mask", "expected"), [([1], "loss_mask has 1 entries, expected one for each of 2"), ([0, 2], "loss_mask[1] is 2")]
)
def test_a_bad_loss_mask_is_named(tmp_path: Path, mask: list[int], expected: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"input_ids": [1, 2], "loss_mask": mask}])
    with pytest.raises(InputError) as refused:
        list(maker(path))
    assert expected in str(refused.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        samples_at(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(InputError, match="holds no sample"):
        maker(tmp_path / "empty.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(LINES[0]).encode())[:-5])
    with pytest.raises(InputError, match="cut off: the compressed data end in the middle"):
        maker(tmp_path / "cut.jsonl.gz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="no files of records and no saved dataset"):
        maker(tmp_path / "folder")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(LINES)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(InputError, match=r"several splits \(train\)\. Give one of them, as in .*splits:train"):
        maker(tmp_path / "splits")


# what is kept


def test_truncated_and_dropped_samples_are_counted(tmp_path: Path) -> None:
    values = [
        {"input_ids": list(range(10)), "loss_mask": [0] * 5 + [1] * 5},
        {"input_ids": list(range(10)), "loss_mask": [0] * 8 + [1] * 2},  # too few left after the cut
        {"input_ids": list(range(6)), "loss_mask": [1] * 6},
        {"input_ids": list(range(6)), "loss_mask": [0] * 6},
    ]
    rows = maker(write_lines(tmp_path / "rows.jsonl", values), max_length=8, min_loss_tokens=3)
    assert [(row.name, len(row.input_ids)) for row in rows] == [("rows.jsonl:1", 8), ("rows.jsonl:3", 6)]
    assert rows.counts == RowCounts(kept=2, truncated=1, few_loss_tokens=2)
    some = maker(rows.records.path, max_length=8, min_loss_tokens=3, limit=2)
    assert len(list(some)) == 1
    assert some.counts == RowCounts(kept=1, truncated=1, few_loss_tokens=1)
    with pytest.raises(InputError, match="none of 4 samples has 14 loss tokens within its first 8 tokens"):
        list(maker(rows.records.path, max_length=8, min_loss_tokens=14))


def test_a_sample_past_the_models_positions_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"input_ids": [1] * 9}])
    with pytest.raises(InputError, match=r"line 1: 9 tokens, but model 'm' has 8 positions. Give --max-length 8"):
        list(maker(path, max_positions=8))
    assert len(list(maker(path, max_positions=8, max_length=8))) == 1


def test_conversations_without_answers_are_dropped(tmp_path: Path, chats: Callable[[str], ChatTokenizer]) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT[:1]}, {"messages": CHAT[:2], "id": 7}])
    assert loss_mask_rule(samples_at(path)) == ASSISTANT_TOKENS
    rows = maker(path, chats(tiny.CHAT_TEMPLATE))
    kept: list[TokenRow] = list(rows)
    assert [row.name for row in kept] == ["7"]
    assert rows.counts == RowCounts(kept=1, few_loss_tokens=1)
