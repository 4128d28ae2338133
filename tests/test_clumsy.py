"""What people do without meaning harm, and what disks do to them: an answer each time, and no traceback."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from arrowbank import open_bank
from arrowbank.bank.verify import verify
from arrowbank.cli import main
from arrowbank.cli.first import interrupted, welcome
from arrowbank.secrets import redact
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
    assert main(["report", str(bank), "--out", str(tmp_path / "page.html")]) == 1
    assert "FAIL  page" in (said := capsys.readouterr().err)
    assert "data-00000.arrow: column text: Invalid UTF8" in said
    assert main(["report", str(bank), "--verify", "--out", str(tmp_path / "page.html")]) == 1


def test_a_report_takes_the_folder_one_is_in_and_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = arms.build_small(tmp_path, "a")
    monkeypatch.chdir(arm)
    pages = [tmp_path / name for name in ("named.html", "here.html", "address.html")]
    for place, page in zip((str(arm), ".", f"file://{arm}"), pages, strict=True):
        assert main(["report", place, "--out", str(page)]) == 0
    assert len({page.read_bytes() for page in pages}) == 1


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("manifest.json", []),
        ("manifest.json", {"format": "arrowbank/2"}),
        ("config.json", []),
        ("config.json", {"architectures": ["XForCausalLM"], "text_config": []}),
        ("report.json", []),
        ("arrowbank-export.json", 3),
    ],
)
def test_info_and_the_welcome_live_with_files_of_other_people(
    tmp_path: Path, name: str, contents: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "plan.json").write_text("[]")
    (tmp_path / "inside" / name).write_text(json.dumps(contents))
    assert main(["info", str(tmp_path / "inside")]) in (0, 2)
    banks.make_texts(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    assert "texts, 40 rows, committed" in welcome(tmp_path)


def test_a_bank_with_a_torn_receipt_still_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    banks.make_texts(tmp_path / "my texts")
    (tmp_path / "my texts" / "state.json").unlink()
    (tmp_path / "my texts" / "journal").mkdir()
    for number, contents in enumerate(("", "[]", "{}")):
        (tmp_path / "my texts" / "journal" / f"data-0000{number}.json").write_text(contents)
    assert main(["info", str(tmp_path / "my texts")]) == 0
    assert "not committed" in capsys.readouterr().out
    assert main(["info", "/dev/null"]) == 2


def test_what_info_says_to_run_next_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bank = save(tmp_path / "a bank's")
    assert main(["info", str(bank), "--json"]) == 0
    for line in json.loads(capsys.readouterr().out)["next"].splitlines():
        assert str(bank) in shlex.split(line)


def test_info_of_an_address_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "s3://me:secret@bucket/bank"]) == 2
    assert "arrowbank pull s3://bucket/bank DIR" in capsys.readouterr().err
    assert main(["info", f"file://{save(tmp_path / 'bank')}"]) == 0


@pytest.mark.parametrize(
    "argv",
    [
        "select {bank} --limit 1 --out s3://bucket/x",
        "merge {bank} {bank} --out memory://x",
        "export {bank} --to parquet --out gs://bucket/x",
        "pull file://{bank} s3://bucket/x",
        "report {bank} --out s3://bucket/x.html",
    ],
)
def test_an_address_to_write_to_is_no_folder(
    tmp_path: Path, argv: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bank = save(tmp_path / "bank")
    monkeypatch.chdir(tmp_path)
    assert main(argv.format(bank=bank).split()) == 2
    assert f"{argv.split()[-1]}: an address" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bank"]


def test_no_password_of_an_address_is_ever_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    banks.make_texts(tmp_path / "bank")
    bank, place = str(tmp_path / "bank"), f"memory://me:s@cret@{tmp_path.name}/bank"
    assert redact(place) == f"memory://{tmp_path.name}/bank"
    assert main(["push", bank, place]) == 0
    assert main(["pull", place, str(tmp_path / "pulled")]) == 0
    assert main(["pull", place, str(tmp_path / "pulled"), "--json"]) == 0
    assert main(["targets", "verify", place, "--model", "m"]) == 2
    assert main(["heal", "--trunk", place, "--model", "m", "--out", str(tmp_path / "healed")]) == 2
    assert main(["in2", "build", "--filler", place, "--arm", "a", "--out", str(tmp_path / "arm")]) == 2
    assert main(["in2", "verify", place]) == 1
    assert main(["pull", "hf://me:s@cret@datasets/x", str(tmp_path / "other")]) == 2
    said = capsys.readouterr()
    assert "cret" not in said.out + said.err
    assert "cret" not in interrupted(["push", bank, place])


def test_a_place_that_cannot_be_connected_to_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "ftp://127.0.0.1:1/bank", str(tmp_path / "bank")]) == 2
    assert "arrowbank: ftp://127.0.0.1:1/bank: Connection" in capsys.readouterr().err


def test_the_command_that_goes_on_throws_nothing_away() -> None:
    assert interrupted(["build", "--restart", "--out=x"]).endswith("\n  arrowbank build --out=x")
    assert "demo" in interrupted(["demo"])
    assert "trunk build" in interrupted(["trunk", "build", "--model", "m"])
    for argv in (["report", "b", "--out", "p.html"], ["audit", "b", "--out", "f"], ["search", "b", "push"]):
        assert interrupted(argv) == "arrowbank: interrupted."


@pytest.mark.parametrize("place", ["memory://", "s3:///", "://"])
def test_an_address_of_nothing_is_no_folder_here(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    banks.make_texts(tmp_path / "bank")
    monkeypatch.chdir(tmp_path)
    assert main(["push", "bank", place]) == 2
    assert main(["pull", place, "pulled"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bank"]


@pytest.mark.slow
def test_bytes_that_are_no_text_go_in_and_out(tmp_path: Path) -> None:
    bank = save(tmp_path / "bank")
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "arrowbank", "lookup", str(bank), b"\xff", "--json"],
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout) == {"text": "\udcff", "row": -1, "vector": None}
    asked = "import sys; from arrowbank.cli import main; main(['info', '.']); print(repr(input()))"
    done = subprocess.run(
        [sys.executable, "-c", asked],
        input=b"a\xffb\n",
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        timeout=120,
    )
    assert "a\ufffdb" in done.stdout.decode()


@pytest.mark.parametrize(
    ("out", "words"), [("full", "a folder"), ("s3://b/x.json", "an address"), ("file/x", "cannot be written")]
)
def test_an_audit_says_before_it_begins_that_its_file_cannot_be(
    tmp_path: Path, out: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("file").write_text("x")
    assert main(["audit", "no bank", "none", "--out", out]) == 2
    assert words in capsys.readouterr().err


def test_a_page_in_a_folder_that_is_a_file_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["report", str(save(tmp_path / "bank")), "--points", "0", "--out", str(tmp_path / "file" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_an_audit_makes_the_folder_of_its_file_and_takes_no_option_for_nothing(tmp_path: Path) -> None:
    bank = str(save(tmp_path / "bank"))
    assert main(["audit", bank, bank, "--out", str(tmp_path / "new" / "audit.json")]) == 0
    assert json.loads((tmp_path / "new" / "audit.json").read_text())["rows"]
    assert main(["audit", bank, bank, "--field", "query=query"]) == 2


def test_a_selection_never_throws_away_the_texts_that_it_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    banks.make_texts(tmp_path / "few-texts")
    banks.make_tokens(tmp_path / "tokens", tmp_path / "few-texts")
    argv = ["select", str(tmp_path / "tokens"), "--limit", "3", "--out", str(tmp_path / "few"), "--restart"]
    assert main(argv) == 2
    assert "input and output are the same" in capsys.readouterr().err
    assert len(open_bank(tmp_path / "few-texts")) == 40


@pytest.mark.parametrize(
    "change",
    [
        {"kind": ["texts"]},
        {"rows": "40"},
        {"recipe": []},
        {"files": None},
        {"files": [[]]},
        {"files": [{"name": "data-00000.arrow", "bytes": 1, "sha256": "0"}]},
        {"files": [{"name": "a", "bytes": 1, "sha256": "0", "rows": None}] * 2},
    ],
)
def test_a_manifest_that_somebody_has_edited_is_a_failed_check(
    tmp_path: Path, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    banks.make_texts(tmp_path / "texts")
    path = tmp_path / "texts" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (check,) = verify(tmp_path / "texts")
    assert f"nothing usable of {next(iter(change))}" in check.detail
    assert main(["info", str(tmp_path / "texts")]) == 2
    assert "damaged: arrowbank verify" in welcome(tmp_path)


def test_texts_behind_tokens_may_be_at_an_address(tmp_path: Path) -> None:
    banks.make_texts(tmp_path / "texts")
    banks.make_tokens(tmp_path / "tokens", tmp_path / "texts")
    shutil.move(tmp_path / "texts", tmp_path / "moved")
    argv = ["select", str(tmp_path / "tokens"), "--limit", "3", "--out", str(tmp_path / "few")]
    assert main(argv) == 2
    assert main([*argv, "--texts", f"file://{tmp_path / 'moved'}"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["--episodes", "0"], ["--episodes", "-5"], ["--out", "file"], ["--out", "s3://b/demo"]])
def test_a_demo_of_nothing_or_nowhere_is_refused_before_it_begins(
    tmp_path: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("arrowbank.cli.demo.minilm", lambda: "model")
    Path("file").write_text("x")
    assert main(["demo", *argv]) == 2
    assert "arrowbank: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_an_interrupt_before_the_verb_begins_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(arguments: list[str], prog_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("arrowbank.cli.app", stop)
    assert main(["demo"]) == 130
    assert "this goes on from there:\n  arrowbank demo" in capsys.readouterr().err
