"""From a conversation to tokens, and to the tokens that the assistant wrote: those that count in the loss.

The text comes from the tokenizer's own chat template and is tokenised once, whole. Where the template marks what the assistant
says (`{% generation %}`), those marks are the spans. Where it does not, the whole conversation is rendered once more with a mark behind the
content of every message. Without its marks that text must be the text: then each mark stands where its content ends, whatever the template
does to earlier turns (drops their thinking, groups tool responses). An answer begins behind the mark of the message before it and what
the template puts there to ask for an answer; it ends behind its own mark with what the template puts there to end a turn. What
cannot be told so is refused: any mask would be a guess.

A token counts when all of its characters lie inside one span. One that reaches across a border does not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.manifest import canonical_json
from arrowbank.errors import InputError
from arrowbank.inputs.records import Record, is_text
from arrowbank.models.tokenizer import tokenizing
from arrowbank.targets.chat_template import TAG, TemplateError, shared_renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TextSpan = tuple[int, int]

ASSISTANT = "assistant"
TOKEN = re.compile(r"<[|｜]?[\w▁ ]+[|｜]?>")  # as templates write the tokens that end a turn
MARK = re.compile("\ue0d1\\d+\ue0d2")
THINKING = re.compile(r"\s*(<think>\s*(</think>\s*)?)?|\s*</think>\s*")
_SHOWN = 40  # characters around a difference


class ChatTokenizer:
    """Conversations → (ids [S] int32, loss mask [S] uint8), by the chat template of `tokenizer`, which is called `name`.

    Raises InputError for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
        from tokenizers import Tokenizer, processors

        if not tokenizer.chat_template:
            raise InputError(
                f"tokenizer of {name!r} has no chat template, so conversations cannot become text. Give --tokenizer with one, or "
                "data of token rows (input_ids, loss_mask)."
            )
        self._tokenizer, self._name, self._renderer = tokenizer, name, shared_renderer()
        # A post-processor may add special tokens, which are not wanted here, or trim blanks off the tokens' offsets
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.post_processor = processors.ByteLevel(trim_offsets=False)

    @property
    def template_sha256(self) -> str:
        """sha256 of the chat template's text (of all of them as canonical JSON, where there are several)."""
        template: str | dict[str, str] = self._tokenizer.chat_template
        return hashlib.sha256(template.encode() if isinstance(template, str) else canonical_json(template)).hexdigest()

    @property
    def dated(self) -> bool:
        """Whether the chat template asks for the day, so that another day may give other tokens."""
        return "strftime_now" in json.dumps(self._tokenizer.chat_template)

    def tokens(self, record: Record) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """The tokens of a conversation, and which of them the assistant wrote.

        Raises InputError for a conversation that is none, or that the template refuses, or whose turns it does not keep.
        """
        messages, tools = _messages(record), _tools(record)
        text, spans = self._text_and_spans(record, messages, tools)
        if not is_text(text):
            raise InputError(f"{record.place}: holds half of a surrogate pair, which is no text. Repair it, or leave it out.")
        with tokenizing():
            encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        return ids, inside(np.array(encoding.offsets, np.int64).reshape(-1, 2), spans)

    def _text_and_spans(
        self, record: Record, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[str, list[TextSpan]]:
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise InputError(f"tokenizer of {self._name!r}: {error} Give another --tokenizer.") from error
        render = partial(self._render, record, template, tools)
        return render(messages) if TAG.search(template) else self._turn_by_turn(record, messages, render)

    def _render(
        self,
        record: Record,
        template: str,
        tools: list[Any] | None,
        messages: list[dict[str, Any]],
        *,
        prompt: bool = False,
    ) -> tuple[str, list[TextSpan]]:
        """The text of some messages, with the template's prompt for an answer, and the spans that the template itself marks."""
        special = self._tokenizer.special_tokens_map
        try:
            return self._renderer.render(template, messages=messages, tools=tools, add_generation_prompt=prompt, **special)
        except TemplateError as error:
            raise InputError(
                f"{record.place}: the chat template of {self._name!r} {error}. Repair or leave out the line, or give another "
                "--tokenizer."
            ) from error

    def _turn_by_turn(
        self, record: Record, messages: list[dict[str, Any]], rendered: Callable[..., tuple[str, list[TextSpan]]]
    ) -> tuple[str, list[TextSpan]]:
        """The text, and the spans that the assistant's turns have in it."""

        def render(some: list[dict[str, Any]], *, prompt: bool = False) -> str:
            return rendered(some, prompt=prompt)[0]

        whole, marked = render(messages), [_marked(message, number) for number, message in enumerate(messages)]
        text = render(marked)
        if MARK.sub("", text) != whole:
            raise self._refusal(record, 0, "the template looks at what messages say, and gives another text with a mark in it")
        spans = []
        for turn in (at for at, message in enumerate(messages) if message["role"] == ASSISTANT):
            if turn == 0:
                raise InputError(
                    f"{record.place}, message 1: is the assistant's, with nothing before it that a template could ask it with. "
                    "Put the user's message before it, or leave the line out."
                )
            start = self._start(record, turn, text, render(marked[:turn], prompt=True))
            spans.append((start, self._end(record, turn, text, start, marked, render)))
        removed = [found.span() for found in MARK.finditer(text)]

        def place(at: int) -> int:
            return at - sum(min(end, at) - begin for begin, end in removed if begin < at)

        return whole, [(place(start), place(end)) for start, end in spans]

    def _start(self, record: Record, turn: int, text: str, before: str) -> int:
        """Where an answer begins in the marked text: behind what asks for it, which `before` ends with."""
        mark = mark_of(turn - 1)
        if (
            mark not in before or mark not in text
        ):  # a message without content: the text before must be how the longer one begins
            if text.startswith(before):
                return len(before)
            raise self._refusal(
                record, turn, "the message before it has no content to be found by, and what stands before is rewritten"
            )
        asked = before[before.index(mark) + len(mark) :]
        begin = text.index(mark) + len(mark)
        same = next((at for at, (one, other) in enumerate(zip(asked, text[begin:], strict=False)) if one != other), len(asked))
        if not THINKING.fullmatch(asked[same:]):  # a prompt may open the thinking that an earlier turn no longer has
            raise self._refusal(
                record,
                turn,
                f"the prompt for an answer is not how it begins (found {text[begin:][:_SHOWN]!r}, expected {asked!r})",
            )
        return begin + same

    def _end(
        self,
        record: Record,
        turn: int,
        text: str,
        start: int,
        marked: list[dict[str, Any]],
        render: Callable[[list[dict[str, Any]]], str],
    ) -> int:
        """Where an answer ends in the marked text: behind its mark, and what the template puts there to end a turn."""
        alone, mark = render(marked[: turn + 1]), mark_of(turn)
        if mark in text and mark in alone:
            begin, ending = text.index(mark) + len(mark), alone[alone.index(mark) + len(mark) :]
            if text.startswith(ending, begin):
                return begin + len(ending)
            blank = len(ending) - len(ending.lstrip())  # of the content, which the template may not trim
            closing = TOKEN.match(text, begin + blank)
            if closing and TOKEN.match(ending, blank) and text.startswith(ending[:blank], begin):
                return closing.end()  # <|return|> at the end, <|end|> before it
            raise self._refusal(record, turn, "what ends it as the last message is not what ends it here")
        # a call without words: it ends with what ends an answer of words alone
        words = render([*marked[:turn], {"role": ASSISTANT, "content": mark}])
        if mark in words and (ending := words[words.index(mark) + len(mark) :]).strip():
            following = text.find(mark_of(turn + 1), start)
            at = text.find(ending, start, following if following >= 0 else len(text))
            if at >= start:
                return at + len(ending)
        raise self._refusal(record, turn, "it has no content, and where it ends cannot be told")

    def _refusal(self, record: Record, turn: int, what: str) -> InputError:
        return InputError(
            f"{record.place}, message {turn + 1}: {what}. Which tokens the assistant wrote cannot be told from the chat template of "
            f"{self._name!r}; nothing is guessed. Give a --tokenizer whose template has {{% generation %}} tags, data of one answer a "
            "line, or token rows (input_ids, loss_mask)."
        )


def mark_of(number: int) -> str:
    """What stands behind the content of message `number`: private characters, which no template looks for."""
    return f"\ue0d1{number}\ue0d2"


def _marked(message: dict[str, Any], number: int) -> dict[str, Any]:
    """The message with its mark behind the last character of its content that is no blank, as templates may trim the rest."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return message
    end = len(content.rstrip())
    return {**message, "content": content[:end] + mark_of(number) + content[end:]}


def inside(offsets: npt.NDArray[np.int64], spans: Sequence[TextSpan]) -> npt.NDArray[np.uint8]:
    """Which tokens, by their character offsets [S, 2], lie wholly inside one of `spans`: [S] uint8. A token of no characters
    does not."""
    mask = np.zeros(len(offsets), np.bool_)
    starts, ends = offsets.T
    for start, end in spans:
        mask |= (starts >= start) & (ends <= end) & (starts < ends)
    return mask.astype(np.uint8)


def _messages(record: Record) -> list[dict[str, Any]]:
    found = record.value["messages"]
    if not isinstance(found, list) or not found:
        raise InputError(f"{record.place}: messages is {_short(found)}, expected a list of at least one message.")
    return list(_checked(record, found))


def _checked(record: Record, found: list[Any]) -> Iterator[dict[str, Any]]:
    """The messages without their nulls."""
    for number, given in enumerate(found, 1):
        message = {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else {}
        said_by_call = "tool_calls" in message and "content" not in message
        if not isinstance(message.get("role"), str) or not (said_by_call or isinstance(message.get("content"), str)):
            raise InputError(
                f"{record.place}, message {number}: {_short(given)}, expected an object whose role and content are strings."
            )
        yield message


def _tools(record: Record) -> list[Any] | None:
    tools = record.value.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError(f"{record.place}: tools is {_short(tools)}, expected a list of JSON schemas, or none.")
    return tools


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
