"""What people do without meaning harm, and what disks do to them: an answer each time, and no traceback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arrowbank.bank.verify import verify
from arrowbank.cli import main
from tests import arms, banks, feature_banks


def save(folder: Path, rows: int = 12) -> Path:
    vectors = np.random.default_rng(1).standard_normal((rows, 8)).astype(np.float16)
    feature_banks.save_features(folder, vectors)
    return folder


def no_text_any_more(folder: Path, text: bytes) -> None:
    """Let a byte of a text in the first shard be one that UTF-8 has not; the file's size stays."""
    shard = folder / "data-00000.arrow"
    whole = shard.read_bytes()
    assert text in whole
    shard.write_bytes(whole.replace(text, b"\xff" + text[1:], 1))


def test_text_that_is_no_text_any_more_fails_its_proof_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    banks.make_texts(tmp_path / "texts")
    no_text_any_more(tmp_path / "texts", b"text number 3 ")
    failed = {check.name: check.detail for check in verify(tmp_path / "texts") if not check.ok}
    assert set(failed) == {"hashes", "values"}
    assert "data-00000.arrow" in failed["values"]
    bank = save(tmp_path / "features")
    no_text_any_more(bank, b"text 3")
    assert main(["report", str(bank), "--out", str(tmp_path / "page.html")]) == 2
    assert "arrowbank verify" in capsys.readouterr().err
    assert main(["report", str(bank), "--verify", "--out", str(tmp_path / "page.html")]) == 1


def test_a_report_takes_the_folder_one_is_in_and_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = arms.build_small(tmp_path, "a")
    monkeypatch.chdir(arm)
    pages = [tmp_path / name for name in ("named.html", "here.html", "address.html")]
    for place, page in zip((str(arm), ".", f"file://{arm}"), pages, strict=True):
        assert main(["report", place, "--out", str(page)]) == 0
    assert len({page.read_bytes() for page in pages}) == 1
