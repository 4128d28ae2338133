"""Which tokens the assistant wrote, in templates that rewrite earlier turns: against the same template with {% generation %} tags.

The templates are written after the public descriptions of their families. `[[` and `]]` stand where the tags go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrowbank.inputs.records import Record
from arrowbank.models import load_tokenizer
from arrowbank.targets.conversations import ChatTokenizer
from tests import tiny

QWEN3 = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|im_end|>
{% endif -%}
{%- elif m.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' -}}[[{%- set content = m.content or '' -%}
{%- set thought = m.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}<think>
{{ thought.strip() }}
</think>

{{ content.lstrip() }}{%- else -%}{{ content.lstrip() }}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- if not loop.first or content %}
{% endif %}<tool_call>
{{ call.function | tojson }}
</tool_call>{%- endfor -%}{{- '<|im_end|>\\n' -}}]]{%- else -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}[[{{ m.content | trim }}<|eot_id|>]]{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}[[{{ m.content | trim }}<end_of_turn>\n]]"
    "{% else %}{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}[[{{ '\\n' }}{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n"
    "{% else %}<think></think>\n{% endif %}{{ m.content.strip() }}]]{% else %}\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEEPSEEK = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% elif m.role == 'assistant' %}<Assistant>"
    "[[{{ m.content.split('</think>')[-1] }}</s>]]{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant>{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "[[{% if loop.last and m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}]]"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TEMPLATES = {"qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA, "glm": GLM, "deepseek": DEEPSEEK, "gpt-oss": GPT_OSS}

USER, AGAIN = {"role": "user", "content": "Open the file"}, {"role": "user", "content": "Close it, please"}
ANSWER, LAST = {"role": "assistant", "content": "The file is open."}, {"role": "assistant", "content": "Closed, and gone.\n"}
CALL = {"type": "function", "function": {"name": "open", "arguments": {"path": "a"}}}
TOOL = {"role": "tool", "content": "ok"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one answer": [USER, ANSWER],
    "two answers": [USER, ANSWER, AGAIN, LAST],
    "three answers": [USER, ANSWER, AGAIN, LAST, USER, ANSWER],
    "a system message": [{"role": "system", "content": "Be brief."}, USER, ANSWER, AGAIN, LAST],
    "thinking in a field": [
        USER,
        ANSWER | {"reasoning_content": "hm", "thinking": "hm"},
        AGAIN,
        LAST | {"reasoning_content": "aha", "thinking": "aha"},
    ],
    "a question behind": [USER, ANSWER, AGAIN],
    "the same words twice": [USER, ANSWER, USER, ANSWER],
    "an answer that is in the question": [{"role": "user", "content": ANSWER["content"]}, ANSWER, AGAIN, ANSWER],
    "special characters": [USER, {"role": "assistant", "content": "<|im_end|> é \U0001f600 {{ x }}"}, AGAIN, LAST],
}
QWEN_ONLY: dict[str, list[dict[str, Any]]] = {
    "thinking in the text": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOpen."}, AGAIN, LAST],
    "a call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL, ANSWER],
    "a call with words, two responses": [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
        TOOL,
        {"role": "tool", "content": "fine"},
        ANSWER,
        AGAIN,
        LAST,
    ],
    "a call behind thinking": [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        TOOL,
        ANSWER | {"reasoning_content": "aha"},
        AGAIN,
        LAST | {"reasoning_content": "so"},
    ],
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """chats(family, tagged): the BPE tokenizer with that template, made once."""
    made: dict[tuple[str, bool], ChatTokenizer] = {}

    def get(family: str, tagged: bool) -> ChatTokenizer:
        if (family, tagged) not in made:
            folder: Path = tmp_path_factory.mktemp("chat")
            begin, end = ("{% generation %}", "{% endgeneration %}") if tagged else ("", "")
            template = TEMPLATES[family].replace("[[", begin).replace("]]", end)
            tiny.save_bpe_tokenizer(folder, chat_template=template)
            made[family, tagged] = ChatTokenizer(load_tokenizer(str(folder)), str(folder))
        return made[family, tagged]

    return get


CASES = [(family, name, messages) for family in TEMPLATES for name, messages in CONVERSATIONS.items()]
CASES += [("qwen3", name, messages) for name, messages in QWEN_ONLY.items()]


@pytest.mark.parametrize(
    ("family", "messages"), [(one, messages) for one, _, messages in CASES], ids=[f"{f}-{n}" for f, n, _ in CASES]
)
def test_the_spans_are_those_of_the_tags(family: str, messages: list[dict[str, Any]], chats: Any) -> None:
    record = Record("chats.jsonl, line 3", "a", {"messages": messages})
    ids, mask = chats(family, tagged=False).tokens(record)
    tagged_ids, tagged_mask = chats(family, tagged=True).tokens(record)
    assert ids.tolist() == tagged_ids.tolist()
    assert mask.tolist() == tagged_mask.tolist()
    assert np.count_nonzero(mask) > 0
