"""From a conversation to tokens, and to the tokens that the assistant wrote: those that count in the loss.

The text comes from the tokenizer's own chat template and is tokenised once, whole. Where the template marks what the assistant
says (`{% generation %}`), those marks are the spans. Where it does not, the conversation is rendered turn by turn: the text up
to a turn, with the template's prompt for an answer, must be a prefix of the text with the answer, and that a prefix of the whole;
what the answer adds is the span. A template that rewrites earlier turns fails this, and is refused: any mask would be a guess.

A token counts when all of its characters lie inside one span. One that reaches across a border does not.
"""

from __future__ import annotations

import hashlib
import json
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
        """The text, and the spans that each of the assistant's turns adds to what stands before it."""

        def render(count: int, *, prompt: bool = False) -> str:
            return rendered(messages[:count], prompt=prompt)[0]

        whole, spans = render(len(messages)), []
        for turn in (at for at, message in enumerate(messages) if message["role"] == ASSISTANT):
            if turn == 0:
                raise InputError(
                    f"{record.place}, message 1: is the assistant's, with nothing before it that a template could ask it with. "
                    "Put the user's message before it, or leave the line out."
                )
            before, after = render(turn, prompt=True), render(turn + 1)
            self._require_prefix(record, turn, before, after, "the text up to it, with the prompt for an answer,")
            self._require_prefix(record, turn, after, whole, "the text up to its end")
            spans.append((len(before), len(after)))
        return whole, spans

    def _require_prefix(self, record: Record, turn: int, part: str, longer: str, what: str) -> None:
        if longer.startswith(part):
            return
        at = next((at for at, (left, right) in enumerate(zip(part, longer, strict=False)) if left != right), len(longer))
        found, wanted = (text[max(0, at - _SHOWN // 2) : at + _SHOWN] for text in (longer, part))
        raise InputError(
            f"{record.place}, message {turn + 1} ({ASSISTANT}): {what} is not how the longer text begins: from character {at} on "
            f"it has {found!r}, expected {wanted!r}. The chat template of {self._name!r} rewrites what stands before (it drops "
            "the thinking of earlier turns, say), so which tokens the assistant wrote cannot be told; nothing is guessed. Give "
            "a --tokenizer whose template has {% generation %} tags or keeps earlier turns, data of one answer a line, or token "
            "rows (input_ids, loss_mask)."
        )


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
