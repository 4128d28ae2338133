"""An audit counts what a plain loop over the episodes counts, and says so by its exit code."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrowbank import Audit, AuditConfig, audit
from arrowbank.bank import FeatureBank
from arrowbank.cli import main
from arrowbank.errors import ContractError, InputError
from arrowbank.features.audit import EXAMPLES, AuditExample, AuditRow
from arrowbank.features.scan import ScanConfig, read_keys, scan
from tests.feature_banks import save_features

THRESHOLD = 0.9
KINDS = ("query", "candidate")
FIELDS = (("query", "query"), ("candidate", "candidates[].text"))

Episode = dict[str, Any]


def awkward_episodes(seed: int, count: int) -> list[Episode]:
    """Episodes over few texts: repeated ones, white space around them, queries that are candidates elsewhere, nothing, no text."""
    rng = random.Random(seed)

    def text() -> Any:
        plain = f"text {rng.randrange(count * 2)}"
        return rng.choice([plain, plain, plain, f"  {plain}\n", f"\t{plain}", "", "   ", None, 7])

    return [{"query": text(), "candidates": [{"text": text()} for _ in range(rng.randrange(4))]} for _ in range(count)]


def texts_of(episode: Episode) -> Iterator[tuple[str, str]]:
    """(kind, text) in order."""
    for kind, text in [("query", episode["query"]), *[("candidate", one["text"]) for one in episode["candidates"]]]:
        if isinstance(text, str) and text.strip():
            yield kind, text.strip()


def first_kinds(episodes: list[Episode]) -> dict[str, str]:
    found: dict[str, str] = {}
    for episode in episodes:
        for kind, text in texts_of(episode):
            found.setdefault(text, kind)
    return found


class Splits:
    """Three files of episodes, and a bank of random few-dimensional vectors, so that many texts are near each other."""

    def __init__(self, folder: Path) -> None:
        self.episodes = {name: awkward_episodes(seed, 120) for seed, name in enumerate(("train", "eval", "test"))}
        self.paths = {name: folder / f"{name}.jsonl" for name in self.episodes}
        for name, episodes in self.episodes.items():
            self.paths[name].write_text("".join(json.dumps(one) + "\n" for one in episodes))
        self.kinds = {name: first_kinds(episodes) for name, episodes in self.episodes.items()}
        texts = first_kinds([one for episodes in self.episodes.values() for one in episodes])
        self.texts, vectors = list(texts), np.random.default_rng(1).standard_normal((len(texts), 4))
        self.vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
        self.bank = save(folder / "bank", self.texts, list(texts.values()), self.vectors)

    def config(self, *names: str, **options: Any) -> AuditConfig:
        sources = tuple((name, str(self.paths[name])) for name in names)
        return AuditConfig(scan=ScanConfig(sources=sources, fields=FIELDS), threshold=THRESHOLD, **options)

    def plain(self, name: str, against: str) -> tuple[list[AuditRow], list[AuditExample]]:
        """The audit of a split as loops over all pairs."""
        others = [text for text in self.texts if text in self.kinds[against]]
        counts = {kind: [0, 0, 0] for kind in KINDS}
        examples = []
        for text in self.texts:
            kind = self.kinds[name].get(text)
            if kind is None:
                continue
            counts[kind][0] += 1
            if text in self.kinds[against]:
                counts[kind][1] += 1
                continue
            cosines = [self.cosine(text, other) for other in others]
            if max(cosines) >= np.float32(THRESHOLD):
                counts[kind][2] += 1
                nearest = others[cosines.index(max(cosines))]
                examples.append(AuditExample(text, nearest, float(max(cosines)), kind, name, against))
        rows = [AuditRow(kind, name, against, *numbers) for kind, numbers in counts.items()]
        return rows, sorted(examples, key=lambda one: -one.cosine)

    def cosine(self, one: str, other: str) -> np.float32:
        a, b = (self.vectors[self.texts.index(text)].astype(np.float64) for text in (one, other))
        return np.float32((a / np.linalg.norm(a) * b).sum() / np.sqrt((b * b).sum()))


def save(
    folder: Path, texts: list[str], kinds: list[str], vectors: Any, model: str = "the model", prompt: str = ""
) -> FeatureBank:
    fields = {"tokenizer_fingerprint": "t", "special_tokens": True, "prompt": prompt}
    return save_features(
        folder, vectors, texts, kinds=kinds, normalize=True, shard_rows=97, model={"model_sha256": model}, fields=fields
    )


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    return Splits(tmp_path_factory.mktemp("splits"))


def test_an_audit_counts_what_a_plain_loop_counts(splits: Splits) -> None:
    found = audit(splits.config("train", "eval", "test"), splits.bank.folder)
    plain = [splits.plain(name, "train") for name in ("eval", "test")]
    assert found.rows == [row for rows, _ in plain for row in rows]
    assert all(min(row.texts, row.exact, row.near) > 0 for row in found.rows)  # else it would prove little
    pairs = sorted((pair for _, pairs in plain for pair in pairs), key=lambda pair: -pair.cosine)
    assert len(pairs) > EXAMPLES
    assert found.examples == pairs[:EXAMPLES]


def test_any_split_may_be_the_one_that_the_others_are_audited_against(splits: Splits) -> None:
    found = audit(splits.config("train", "eval", against="eval"), splits.bank.folder)
    assert found.rows == splits.plain("train", "eval")[0]


def test_a_split_may_have_several_sources(splits: Splits) -> None:
    both = ScanConfig(
        sources=tuple((name, str(splits.paths[path])) for name, path in (("a", "train"), ("b", "eval"), ("a", "eval")))
    )
    found = audit(AuditConfig(scan=both), splits.bank.folder)
    assert sum(row.texts for row in found.rows) == found.exact == len(splits.kinds["eval"])


def test_two_banks_are_compared_whole(splits: Splits, tmp_path: Path) -> None:
    banks = []
    for name in ("train", "eval"):
        own = [row for row, text in enumerate(splits.texts) if text in splits.kinds[name]]
        texts = [splits.texts[row] for row in own]
        banks.append(save(tmp_path / name, texts, [splits.kinds[name][text] for text in texts], splits.vectors[own]).folder)
    found = audit(AuditConfig(threshold=THRESHOLD), *banks)
    wanted = {row.kind: (row.texts, row.exact, row.near) for row in splits.plain("eval", "train")[0]}
    assert {row.kind: (row.texts, row.exact, row.near) for row in found.rows} == wanted
    assert {(row.source, row.against) for row in found.rows} == {(str(banks[1]), str(banks[0]))}


@pytest.mark.parametrize(("field", "options"), [("model_sha256", {"model": "another"}), ("prompt", {"prompt": "query: "})])
def test_banks_of_two_encoders_are_refused(splits: Splits, tmp_path: Path, field: str, options: dict[str, str]) -> None:
    other = save(tmp_path / "other", ["a"], ["query"], splits.vectors[:1], **options)
    with pytest.raises(ContractError, match=f"{field} is") as caught:
        audit(AuditConfig(), splits.bank.folder, other.folder)
    assert caught.value.field == field


def test_a_bank_without_the_sources_texts_is_refused(splits: Splits, tmp_path: Path) -> None:
    small = save(tmp_path / "small", splits.texts[1:], ["query"] * (len(splits.texts) - 1), splits.vectors[1:])
    with pytest.raises(InputError, match=r"lacks texts of train \([1-9].*that it was built with"):
        audit(splits.config("train", "eval"), small.folder)


def test_what_cannot_be_audited_is_refused(splits: Splits) -> None:
    one = (("train", "a.jsonl"),)
    with pytest.raises(InputError, match="needs two splits, such as train and eval; found train"):
        AuditConfig(scan=ScanConfig(sources=(*one, *one)))
    with pytest.raises(InputError, match="no such source; there are train, eval"):
        splits.config("train", "eval", against="test")
    with pytest.raises(InputError, match="threshold is 95"):
        AuditConfig(threshold=95)
    with pytest.raises(InputError, match="max_shared is -1"):
        AuditConfig(max_shared=-1)
    with pytest.raises(InputError, match="--against names a source"):
        AuditConfig(against="train")
    for other in (None, splits.bank.folder):
        config = AuditConfig() if other is None else splits.config("train", "eval")
        with pytest.raises(InputError, match="either --source twice or more with one bank, or two banks"):
            audit(config, splits.bank.folder, other)


def test_the_limit_is_on_exact_and_near_together() -> None:
    rows = [AuditRow("query", "eval", "train", 9, 2, 1), AuditRow("candidate", "eval", "train", 9, 0, 3)]
    assert Audit(threshold=1, max_shared=6, rows=rows, examples=[]).ok
    assert not Audit(threshold=1, max_shared=5, rows=rows, examples=[]).ok
    assert Audit(threshold=1, max_shared=None, rows=rows, examples=[]).ok


@pytest.mark.parametrize("workers", [0, 2])
def test_keys_are_read_as_the_scan_reads_them(splits: Splits, tmp_path: Path, workers: int) -> None:
    config = splits.config("train", "eval").scan
    assert config is not None
    blocks = list(read_keys(config, workers=workers))
    manifest = scan(config, tmp_path / "texts")
    digests = np.concatenate([block.digests for block in blocks])
    assert len(digests) == manifest["counts"]["texts_seen"]
    assert len({digest.tobytes() for digest in digests}) == manifest["rows"]
    assert [block.source for block in blocks] == ["train", "eval"]


# the command line


def test_the_command_says_counts_and_fails_above_the_limit(
    splits: Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [word for name in ("train", "eval") for word in ("--source", f"{name}={splits.paths[name]}")]
    argv = ["audit", str(splits.bank.folder), *sources, "--threshold", str(THRESHOLD), "--out", str(tmp_path / "audit.json")]
    assert main(argv) == 0
    table = capsys.readouterr().out
    rows, _ = splits.plain("eval", "train")
    for row in rows:
        assert f"{row.kind:<9}  eval    train  " in table
    shared = sum(row.exact + row.near for row in rows)
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["threshold"] == THRESHOLD
    assert written["max_shared"] is None
    assert [AuditRow(**row) for row in written["rows"]] == rows
    assert 0 < len([AuditExample(**pair) for pair in written["examples"]]) <= EXAMPLES
    assert main([*argv, "--max-shared", str(shared)]) == 0
    assert main([*argv, "--max-shared", str(shared - 1)]) == 1
    assert f"{sum(row.exact for row in rows)} texts are shared exactly and" in capsys.readouterr().err
    assert main([*argv, "--json"]) == 0
    *_, done = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert done == {"phase": "done", **written}
    assert main([*argv[:4]]) == 2
    assert "needs two splits" in capsys.readouterr().err
