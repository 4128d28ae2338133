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
from dataclasses import dataclass
from typing import Any

import yaml

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10_000_000, "1M<n<10M"))
LONGEST = 1000  # characters of a string
UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, what changes the direction of text, halves of surrogate pairs, line ends
JOINERS = "\u200c\u200d"  # scripts and emoji need them
FOLDER = "path/to/this/folder"  # where a reader puts the bank's own
LOAD = f'from datasets import load_from_disk\n\nbank = load_from_disk("{FOLDER}")'
MATRIX = (
    f'from arrowbank import open_bank\n\nbank = open_bank("{FOLDER}")\n'
    'row = bank.rows(["a text"])  # −1 where it is absent\n'
    "matrix = bank.matrix  # [N, D] float16, memory-mapped"
)
TARGET_ROW = f'from arrowbank import open_targets\n\nrow = open_targets("{FOLDER}")[0]'
WINDOW = (
    f'from arrowbank import open_trunk\n\nbank = open_trunk("{FOLDER}")\nwindow = bank.read(0)\n'
    "print(window.topk_ids.shape, window.hidden.shape)  # (S, k) (S, H)"
)
ANSWERS = (
    f'from datasets import load_from_disk\n\nrows = load_from_disk("{FOLDER}").with_format("numpy")\n'
    'answers = rows[0]["input_ids"][rows[0]["answer_mask"] == 1]'
)
NEEDLES = {
    "a": "none: plain filler, the control for drift",
    "b": "immediately before its probe",
    "c": "anywhere far enough before its probe",
}


@dataclass(frozen=True)
class Description:
    """What a bank is: its title, facts by name in the order to be read, tags of the hub, and the Python that opens it."""

    title: str
    facts: dict[str, object]
    tags: tuple[str, ...] = ()
    snippet: str = LOAD


def describe_bank(manifest: Mapping[str, Any]) -> Description:
    """The description of the bank with this manifest, of whatever kind. Facts that the manifest does not have are left out."""
    make = _KINDS.get(manifest["kind"])
    found = make(manifest) if make else Description(f"Bank of {manifest['kind']}", {"rows": manifest.get("rows")})
    facts = found.facts | _made_from(manifest)
    return Description(found.title, {name: v for name, v in facts.items() if v not in (None, "")}, found.tags, found.snippet)


def _made_from(manifest: Mapping[str, Any]) -> dict[str, object]:
    """What a bank that was merged or selected says of the banks that it is made of."""
    merged, selected = manifest.get("merged"), manifest.get("selected")
    return {
        "merged from": merged and f"{len(merged['parts'])} banks, {merged['shared']:,} rows that several have kept once",
        "selected from": selected and f"a bank of {selected['rows']:,} rows",
    }


def card(manifest: Mapping[str, Any]) -> str:
    """The README.md of a bank: front matter, the facts as a list, and how to open it."""
    about = describe_bank(manifest)
    return (
        f"{front_matter(front(manifest, about))}\n# {as_text(about.title)}\n\n{fact_list(about.facts)}\n"
        f"## Open it\n\n```python\n{about.snippet}\n```\n\n"
        "`arrowbank verify` proves every file of this folder against `manifest.json`, which says in full what made it.\n"
    )


def front(manifest: Mapping[str, Any], about: Description) -> dict[str, Any]:
    """The fields of a card that the hub and `load_dataset` read."""
    size = next((name for limit, name in SIZES if int(manifest["rows"]) < limit), "10M<n<100M")
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


# kind by kind


def _texts(manifest: Mapping[str, Any]) -> Description:
    sources = [f"{entry['name']}: {entry['file']} ({entry['bytes']:,} bytes)" for entry in manifest.get("sources", ())]
    facts = {
        "unique texts": manifest.get("rows"),
        "by kind": manifest.get("kinds"),
        "by source": manifest.get("source_rows"),
        "duplicates left out": _count(manifest, "duplicates"),
        "made from": sources,
    }
    return Description("Unique texts", facts)


def _tokens(manifest: Mapping[str, Any]) -> Description:
    facts = {
        "texts": manifest.get("rows"),
        "tokens": _count(manifest, "tokens"),
        "tokenizer": manifest.get("tokenizer"),
        "at most tokens a text": manifest.get("max_tokens"),
        "special tokens": "yes" if manifest.get("special_tokens") else "no",
        "truncated": _count(manifest, "truncated"),
        "texts without a token (stored as the token 0)": _count(manifest, "empty"),
    }
    return Description("Tokens", facts)


def _features(manifest: Mapping[str, Any]) -> Description:
    encoding = manifest.get("encoding", {})
    normalised = ", L2-normalised" if encoding.get("normalize") else ""
    facts = {
        "vectors": f"{manifest['rows']:,} × {manifest.get('hidden_size')}, float16{normalised}",
        "model": manifest.get("model_path"),
        "pooling": encoding.get("pooling", "the encoder's own"),
        "at most tokens a text": manifest.get("max_key_tokens"),
        "texts by kind": manifest.get("kinds"),
    }
    return Description("Feature bank", facts, ("feature-extraction",), MATRIX if "bank" in manifest else LOAD)


def _targets(manifest: Mapping[str, Any]) -> Description:
    layers = manifest.get("target_layer_ids")
    facts = {
        "target model": manifest.get("target_model_name_or_path"),
        "samples": _count(manifest, "kept"),
        "tokens": _count(manifest, "tokens"),
        "tokens in the loss": f"{_count(manifest, 'loss_tokens'):,} ({manifest.get('loss_mask')})",
        "layers (what decoder block i puts out)": layers if layers is not None else f"{manifest.get('layers')}, ids not said",
        "last hidden states": f"{manifest.get('last_hidden_norm')} norm",
        "stored as": manifest.get("codec"),
    }
    return Description("Target bank", facts, ("speculative-decoding",), TARGET_ROW)


def _in2(manifest: Mapping[str, Any]) -> Description:
    facts = {
        "examples": f"{manifest['rows']:,} of {manifest['T']:,} tokens",
        "needles": NEEDLES[manifest["arm"]],
        "least distance": manifest.get("d_min") if manifest["arm"] == "c" else None,
        "triples of needle, probe and answer": manifest.get("triples"),
        "decoys": manifest.get("decoys_placed"),
        "seed": str(manifest.get("seed")),
    }
    return Description(f"IN2 arm {manifest['arm']}", facts, ("long-context",), ANSWERS)


def _probes(manifest: Mapping[str, Any]) -> Description:
    recipe = manifest["recipe"]
    facts = {
        "trials": f"{manifest['rows']:,} of {recipe['length']:,} tokens, in {recipe['blocks']:,} blocks",
        "positions (1: right before the probe; lower is farther)": recipe["positions"],
        "the probe's places": recipe["probe_pos"],
        "controls": "absent (no needle), null (another key's needle)",
        "seed": str(recipe["seed"]),
    }
    return Description("IN2 probes", facts, ("long-context",), ANSWERS)


def _trunk(manifest: Mapping[str, Any]) -> Description:
    counts = manifest["counts"]
    facts = {
        "model": manifest["model_path"],
        "windows": f"{counts['windows']:,} of {manifest['window']:,} tokens, {counts['held_out']:,} held out",
        "sets": {name: facts["windows"] for name, facts in manifest["sets"].items()},
        "tokens": counts["tokens"],
        "next tokens a row": manifest["topk"],
        "hidden states": f"{manifest['hidden_norm']} norm, {manifest['hidden_dtype']}, width {manifest['hidden_size']:,}",
    }
    return Description("Trunk bank", facts, ("speculative-decoding",), WINDOW)


def _taps(manifest: Mapping[str, Any]) -> Description:
    facts = {
        "model": manifest["model_path"],
        "held-out windows": _count(manifest, "windows"),
        "tokens": _count(manifest, "tokens"),
        "layers (what decoder block i puts out, before any norm, float16)": manifest["layers"],
    }
    return Description("Taps of a trunk bank", facts, ("speculative-decoding",))


def _drafts(manifest: Mapping[str, Any]) -> Description:
    names = ("windows", "chain", "kept", "hidden_size")
    return Description("Drafts", {name.replace("_", " "): manifest.get(name) for name in names}, ("speculative-decoding",))


def _count(manifest: Mapping[str, Any], name: str) -> int | None:
    found = manifest.get("counts", {}).get(name)
    return None if found is None else int(found)


_KINDS = {
    "texts": _texts,
    "tokens": _tokens,
    "features": _features,
    "targets": _targets,
    "in2": _in2,
    "in2-probes": _probes,
    "trunk": _trunk,
    "taps": _taps,
    "drafts": _drafts,
}
