"""The two golden files with awkward contents give exactly the rows, keys and kinds that they must."""

from __future__ import annotations

import json
from pathlib import Path

from arrowbank import ScanConfig, open_bank, scan

GOLDEN = Path(__file__).parent / "golden" / "scan"


def test_the_golden_files_give_the_golden_rows(tmp_path: Path) -> None:
    sources = tuple((name, str(GOLDEN / f"{name}.jsonl")) for name in ("train", "eval"))
    manifest = scan(ScanConfig(sources=sources), tmp_path / "texts")
    dataset = open_bank(tmp_path / "texts").dataset
    rows = [json.loads(line) for line in (GOLDEN / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    index = json.loads((GOLDEN / "index.json").read_text())
    assert list(zip(dataset["kind"][:], dataset["text"][:], strict=True)) == [(row["kind"], row["text"]) for row in rows]
    assert {key.hex(): row for row, key in enumerate(dataset["sha1"][:])} == index
    assert [key.hex() for key in dataset["sha1"][:]] == list(index)
    assert manifest["kinds"] == json.loads((GOLDEN / "kinds.json").read_text())
