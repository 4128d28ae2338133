"""A few rows of a bank as a Markdown table: texts cut short, the first of many ids, and of hidden states only how many there are."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from arrowbank.bank import Bank
from arrowbank.bank.cards import as_text

ROWS = 3
TEXT = 80
VALUES = 6
DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64", "uint16": "bfloat16 (as uint16)"}


def sample_table(bank: Bank) -> str:
    """The first rows of `bank`, all columns."""
    table = bank.slice(0, min(ROWS, len(bank)))
    lines = ["| " + " | ".join(map(as_text, table.column_names)) + " |", "|" + " --- |" * table.num_columns]
    lines += [
        "| " + " | ".join(_cell(table.column(name)[row]) for name in table.column_names) + " |" for row in range(table.num_rows)
    ]
    return "\n".join(lines) + "\n"


def _cell(value: pa.Scalar) -> str:
    if not value.is_valid:
        return ""
    kind = value.type
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return _list(value.values)
    if pa.types.is_binary(kind):
        return f"`{value.as_py()[:4].hex()}…`"
    if pa.types.is_floating(kind):
        return f"{value.as_py():.4g}"
    return _text(str(value.as_py()))


def _list(values: pa.Array) -> str:
    """Numbers: the first ones and how many; lists of lists: their shape."""
    if pa.types.is_fixed_size_list(values.type):
        inner = str(values.type.value_type)
        return f"{len(values):,} × {values.type.list_size:,} {DTYPES.get(inner, inner)}"
    shown = [_number(number) for number in values.slice(0, VALUES).to_pylist()]
    more = f", … {len(values):,} in all" if len(values) > VALUES else ""
    return f"[{', '.join(shown)}{more}]"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else _text(str(value))


def _text(text: str) -> str:
    """A text cut short."""
    line = " ".join(text.split())
    return as_text(f"{line[: TEXT - 1]}…" if len(line) > TEXT else line)
