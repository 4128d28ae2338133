"""What a bank is in words, from its manifest alone: a title, facts, and the lines of Python that open it. The dataset card says them.

The same for two runs of one plan: no times, no hosts. The card is prose for people, who edit it on the hub: it is no part of
what the manifest vouches for.

A manifest may come from a stranger: every string of it gets into a card as `as_text` or `as_code` makes it, or through YAML's own
writer.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import yaml

from arrowbank.bank.kinds import Description, kind_of
from arrowbank.bank.manifest import BankManifest

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10_000_000, "1M<n<10M"))
LONGEST = 1000  # characters of a string
UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, what changes the direction of text, halves of surrogate pairs, line ends
JOINERS = "\u200c\u200d"  # scripts and emoji need them


def describe_bank(manifest: BankManifest) -> Description:
    """The description of the bank with this manifest, of whatever kind. Facts that the manifest does not have are left out."""
    found = kind_of(manifest.kind).describe(manifest)
    facts = found.facts | _made_from(manifest)
    return Description(found.title, {name: v for name, v in facts.items() if v not in (None, "")}, found.tags, found.snippet)


def _made_from(manifest: BankManifest) -> dict[str, object]:
    """What a bank that was merged or selected says of the banks that it is made of."""
    merged, selected = manifest.merged, manifest.selected
    return {
        "merged from": merged and f"{len(merged.parts)} banks, {merged.shared:,} rows that several have kept once",
        "selected from": selected and f"a bank of {selected.rows:,} rows",
    }


def card(manifest: BankManifest) -> str:
    """The README.md of a bank: front matter, the facts as a list, and how to open it."""
    about = describe_bank(manifest)
    return (
        f"{front_matter(front(manifest, about))}\n# {as_text(about.title)}\n\n{fact_list(about.facts)}\n"
        f"## Open it\n\n```python\n{about.snippet}\n```\n\n"
        "`arrowbank verify` proves every file of this folder against `manifest.json`, which says in full what made it.\n"
    )


def front(manifest: BankManifest, about: Description) -> dict[str, Any]:
    """The fields of a card that the hub and `load_dataset` read."""
    size = next((name for limit, name in SIZES if manifest.rows < limit), "10M<n<100M")
    return {
        "tags": ["arrowbank", *about.tags],
        "size_categories": [size],
        # the shards alone: a mirror's .npy and .jsonl beside them are no rows
        "configs": [{"config_name": "default", "data_files": "data-*.arrow"}],
    }


def front_matter(fields: Mapping[str, Any]) -> str:
    """`fields` as the YAML block that begins a card."""
    return f"---\n{yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True)}---\n"


def fact_list(facts: Mapping[str, object]) -> str:
    """Facts as a Markdown list."""
    return "".join(f"- {as_text(name)}: {plain(value)}\n" for name, value in facts.items())


class Code(str):
    """A fact to be shown as code: a digest."""

    __slots__ = ()


def plain(value: object) -> str:
    """A fact for people, in Markdown."""
    if isinstance(value, Code):
        return as_code(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{plain(count)} {as_text(str(name))}" for name, count in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else as_text(str(value))


def as_text(text: str) -> str:
    """`text` in one line, as Markdown that shows it and nothing else: no markup, HTML, table cell, or character that cannot be seen."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(_one_line(text), quote=False))


def as_code(text: str) -> str:
    """`text` in one line as a Markdown code span, of more backticks than it has in a row."""
    line = _one_line(text).replace("|", "¦")  # a code span does not protect it in a table
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    line = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
    return "".join("\ufffd" if unicodedata.category(one) in UNSEEN and one not in JOINERS else one for one in line)
