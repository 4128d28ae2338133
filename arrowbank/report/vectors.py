"""Pages of texts, tokens and features: how long texts are, what they are, where they are from, and where their vectors lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc

from arrowbank.bank.files import human_bytes
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.kinds.texts_bank import TextsBank
from arrowbank.bank.kinds.token_features_bank import TokenFeatureBank
from arrowbank.bank.kinds.tokens_bank import TokensBank
from arrowbank.bank.reader import Bank
from arrowbank.drawing.frame import Plot
from arrowbank.drawing.markup import Markup, number, percent, plural, tag
from arrowbank.drawing.plots import bars_of, histogram, shares
from arrowbank.report.atlas import make_atlas, map_section
from arrowbank.report.sample import FEW_ROWS, SOME_ROWS, TEXT_ROWS, names, numbers, of_sample, spread_rows, take
from arrowbank.report.section import Section, Story, plots, table
from arrowbank.report.subject import Subject

PIECE = 2048  # vectors that are in memory as float32 at a time
ALWAYS = ("texts_seen", "duplicates")  # said also where they are zero
COUNTED = {
    "episodes": "episodes read",
    "texts_seen": "texts met",
    "duplicates": "of them met before",
    "empty": "empty ones passed over",
    "not_text": "not a text",
    "not_object": "not an object",
    "not_list": "not a list",
    "lone_surrogates": "with a lone surrogate, now ?",
    "bad_lines": "lines passed over",
}


def tell_texts(subject: Subject) -> Story:
    """The story of a folder that `build` made, or of one of its banks."""
    texts, tokens, features = subject.bank(TextsBank), subject.bank(TokensBank), subject.bank(FeatureBank)
    keyed = features or subject.bank(TokenFeatureBank)
    main = subject.main
    sections: list[Section] = []
    tiles = [(f"{len(main):,}", "texts")]
    data: object = None
    if keyed is not None:
        tiles.append((f"{keyed.hidden_size:,}", "numbers a vector"))
    if features is not None and subject.points and len(features):
        looked = min(subject.points, len(main))
        subject.progress.message(f"{subject.folder}: looking for the nearest texts of {looked:,} of them")
        atlas = make_atlas(features, texts, points=subject.points, neighbours=subject.neighbours)
        sections.append(map_section(atlas, len(features)))
        data = atlas.data()
    if tokens is not None and (counts := tokens.manifest.counts):
        tiles.append((f"{counts['tokens']:,}", "tokens"))
    sections.append(_lengths(texts, tokens, keyed))
    sections.append(_origins(texts, main))
    if features is not None:
        sections.append(_norms(features))
    return Story(tiles, sections, data)


def _lengths(texts: TextsBank | None, tokens: TokensBank | None, features: FeatureBank | TokenFeatureBank | None) -> Section:
    drawn: list[Plot] = []
    if tokens is not None:
        drawn.append(_token_lengths(tokens, tokens.manifest.max_tokens, tokens.manifest.counts or {}))
    elif features is not None:
        drawn.append(_token_lengths(features, features.manifest.max_key_tokens, {}))
    if (worded := texts or features) is not None:
        drawn.append(_text_lengths(worded))
    return Section("Lengths", [plots(*drawn)], short="Lengths")


def _token_lengths(counted: Bank, most_allowed: int | None, counts: Mapping[str, Any]) -> Plot:
    rows = spread_rows(len(counted), SOME_ROWS)
    lengths = numbers(take(counted, ["length"], rows), "length")
    limit = most_allowed or int(lengths.max())
    middle, most = np.percentile(lengths, [50, 99])
    if "truncated" in counts:
        cut = _cut(counts["truncated"], len(counted), f"cut at {limit:,} tokens", "was", "were")
    else:
        cut = _cut(int((lengths >= limit).sum()), len(lengths), f"the most tokens that are allowed, {limit:,}", "has", "have")
    said = f"Median {number(float(middle))}, 99th percentile {number(float(most))} tokens. {cut}{of_sample(rows, len(counted))}"
    found = histogram(lengths, whole=True)
    return bars_of("Tokens a text", found, x_label="tokens", y_label="texts", summary=said, unit="tokens", whole=True)


def _cut(count: int, total: int, what: str, one: str, many: str) -> str:
    if not count:
        return f"No text {one} {what}."
    return f"{plural(count, 'text')} {one if count == 1 else many} {what} ({percent(count, total)})."


def _text_lengths(worded: Bank) -> Plot:
    rows = spread_rows(len(worded), TEXT_ROWS)
    lengths = np.array(pc.utf8_length(take(worded, ["text"], rows).column("text")).to_pylist(), np.float64)
    low, middle, most = np.percentile(lengths, [1, 50, 99])
    said = (
        f"Median {number(float(middle))} characters; {number(float(low))} to {number(float(most))} for 98 % of them, "
        f"{number(float(lengths.max()))} at most.{of_sample(rows, len(worded))}"
    )
    found = histogram(np.minimum(lengths, np.ceil(most)), whole=True)
    title = "Characters a text" if lengths.max() <= most else "Characters a text (the longest 1 % in the last bar)"
    return bars_of(title, found, x_label="characters", y_label="texts", summary=said, unit="characters", whole=True)


def _origins(texts: TextsBank | None, main: Bank) -> Section:
    kinds = {kind: count for kind, count in (main.manifest.kinds or {}).items() if count}
    drawn = []
    if kinds:
        said = ", ".join(f"{number(count)} {kind}" for kind, count in kinds.items())
        drawn.append(
            shares("Texts by kind", kinds, x_label="texts", summary=f"By the field that a text was first seen in: {said}.")
        )
    parts: list[Markup] = []
    if texts is not None:
        drawn += _source_plots(texts)
        parts.append(_crossed(texts))
    if sources := main.manifest.get("sources"):
        parts.append(_source_files(sources))
    if texts is not None and (counts := texts.manifest.counts):
        rows = [(words, counts.get(name, 0)) for name, words in COUNTED.items() if counts.get(name) or name in ALWAYS]
        parts.append(table(("what scan met", "count"), rows, "what scan met"))
    return Section("What the texts are", [plots(*drawn), tag("div", {"class": "tables"}, *parts)], short="Texts")


def _source_plots(texts: TextsBank) -> list[Plot]:
    drawn = []
    by_source = texts.manifest.source_rows or {}
    if by_source:
        said = ", ".join(f"{number(count)} in {name}" for name, count in by_source.items())
        said = f"A text counts for the source that had it first: {said}."
        drawn.append(shares("Unique texts by source", by_source, x_label="texts", summary=said))
    again = texts.manifest.source_duplicates or {}
    if any(again.values()):
        said = " ".join(
            f"Of {number(count + by_source[name])} texts in {name}, {number(count)} had been met before"
            f" ({percent(count, count + by_source[name])})."
            for name, count in again.items()
            if count + by_source[name]
        )
        drawn.append(shares("Duplicates by source", again, x_label="texts met before", summary=said))
    return drawn


def _crossed(texts: Bank) -> Markup:
    """How many texts of each kind each source had first."""
    rows = spread_rows(len(texts), SOME_ROWS)
    found = take(texts, ["kind", "source"], rows)
    pairs: dict[tuple[str, str], int] = {}
    for pair in zip(names(found, "source"), names(found, "kind"), strict=True):
        pairs[pair] = pairs.get(pair, 0) + 1
    sources, kinds = (sorted({pair[at] for pair in pairs}) for at in (0, 1))
    lines = [(source, *(pairs.get((source, kind), 0) for kind in kinds)) for source in sources]
    part = "" if len(rows) == len(texts) else f", of {len(rows):,} rows evenly spread"
    return table((f"source{part}", *kinds), lines, "unique texts by source and kind")


def _source_files(sources: list[dict[str, Any]]) -> Markup:
    rows = [
        (
            entry.get("name"),
            entry.get("file"),
            human_bytes(entry["bytes"]),
            tag("code", None, str(entry.get("sha256", ""))[:12]),
        )
        for entry in sources
    ]
    return table(("source", "file", "bytes", "sha256"), rows, "source files")


def _norms(features: FeatureBank) -> Section:
    rows = spread_rows(len(features), FEW_ROWS)
    found = []
    for start in range(0, len(rows), PIECE):
        found.append(np.linalg.norm(features.take(rows[start : start + PIECE]).astype(np.float32), axis=1))
    norms = np.concatenate(found)
    unit = features.manifest.encoding.normalize
    said = (
        f"{number(float(norms.min()), 6)} to {number(float(norms.max()), 6)}"
        + (", where 1 is meant: float16 keeps eleven bits of each number." if unit else ", as the encoder gives them.")
        + of_sample(rows, len(features), "vector")
    )
    plot = bars_of("Norms of the vectors", histogram(norms), x_label="L2 norm", y_label="vectors", summary=said)
    return Section("Vectors", [plots(plot, _values(features))], short="Vectors")


def _values(features: FeatureBank) -> Plot:
    values = features.take(spread_rows(len(features), PIECE)).astype(np.float32).ravel()
    low, middle, high = np.percentile(values, [1, 50, 99])
    said = f"Median {number(float(middle))}; 98 % lie between {number(float(low))} and {number(float(high))}."
    shown = histogram(values[(values >= low) & (values <= high)])
    return bars_of("Numbers in the vectors, without the outer 2 %", shown, x_label="value", y_label="numbers", summary=said)
