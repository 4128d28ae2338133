"""The golden dump becomes the golden caches, byte for byte: in one step, and through a bank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arrowbank.cli import main
from tests.kill import tree_bytes

GOLDEN = Path(__file__).parent / "golden" / "targets"
RULES = ("ones_except_first", "all_ones", "from_dump")
OURS = ("source_engine_dump", "converter")  # what another program says otherwise of the same cache
SHARD_BYTES = "6000"


def importing(rule: str, out: Path, *more: str) -> list[str]:
    return [
        *["targets", "import", str(GOLDEN / "dump"), "--out", str(out), "--target-model", "org/target", "--layers", "1,11,21"],
        *["--loss-mask", rule, "--on-nonfinite", "keep", *more],
    ]


def manifest(cache: Path) -> dict[str, Any]:
    found = json.loads((cache / "manifest.json").read_text())
    return {name: value for name, value in found.items() if name not in OURS}


def assert_golden(cache: Path, rule: str) -> None:
    golden = GOLDEN / f"cache_{rule}"
    files, wanted = tree_bytes(cache), tree_bytes(golden)
    assert files.pop("manifest.json")
    assert files.pop("arrowbank-export.json")  # ours, beside the cache's own files
    assert wanted.pop("manifest.json")
    assert files == wanted
    assert manifest(cache) == manifest(golden)
    text = (cache / "manifest.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True)


@pytest.mark.parametrize("rule", RULES)
def test_the_dump_becomes_the_golden_cache_in_one_step(rule: str, tmp_path: Path) -> None:
    assert main(importing(rule, tmp_path / "cache", "--to", "deepspec", "--max-shard-bytes", SHARD_BYTES)) == 0
    assert_golden(tmp_path / "cache", rule)


@pytest.mark.parametrize("rule", RULES)
def test_the_dump_becomes_the_golden_cache_through_a_bank(rule: str, tmp_path: Path) -> None:
    assert main(importing(rule, tmp_path / "bank")) == 0
    exporting = ["export", str(tmp_path / "bank"), "--to", "deepspec", "--out", str(tmp_path / "cache")]
    assert main([*exporting, "--max-shard-bytes", SHARD_BYTES]) == 0
    assert_golden(tmp_path / "cache", rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_golden_cache_comes_back_from_a_bank(rule: str, tmp_path: Path) -> None:
    golden = GOLDEN / f"cache_{rule}"
    assert main(["targets", "import", str(golden), "--out", str(tmp_path / "bank"), "--on-nonfinite", "keep"]) == 0
    exporting = ["export", str(tmp_path / "bank"), "--to", "deepspec", "--out", str(tmp_path / "cache")]
    assert main([*exporting, "--max-shard-bytes", SHARD_BYTES]) == 0
    assert_golden(tmp_path / "cache", rule)


def test_an_infinity_is_refused_unless_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = importing("all_ones", tmp_path / "bank")
    at = argv.index("--on-nonfinite")
    assert main(argv[:at] + argv[at + 2 :]) == 2
    assert "NaN or Inf" in capsys.readouterr().err
