"""The benchmarks' runner: its table, and where it is written. The measuring itself is `make bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import __main__ as runner

ROWS = [
    {"what": "a", "ours": 12345.6, "baseline": 4000.0, "ratio": 3.0864, "goal": 1.7, "unit": "texts/s"},
    {"what": "b", "ours": 0.9999987, "baseline": 1.0, "ratio": 0.9999987, "goal": 0.99999, "unit": "cosine"},
    {"what": "c", "ours": 4.25, "baseline": None, "ratio": None, "goal": "50 ms", "unit": "ms"},
]


def test_every_benchmark_is_found() -> None:
    assert "tokenize" in runner.names()
    assert all((runner.HERE / f"bench_{name}.py").exists() for name in runner.names())


def test_the_table() -> None:
    assert runner.table(ROWS).splitlines()[2:] == [
        "| a | 12,346 texts/s | 4,000 texts/s | 3.09× | 1.7× |",
        "| b | 0.999999 | 1.000000 |  | 0.99999 |",
        "| c | 4.25 ms |  |  | 50 ms |",
    ]


def test_the_table_goes_between_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "README.md", tmp_path / "benchmarks.md"
    monkeypatch.setattr(runner, "PAGES", (first, second))
    first.write_text("nothing here\n")
    assert runner.write("x") is None
    second.write_text(f"before\n{runner.START}\nold\n{runner.END}\nafter\n")
    for text in ("one", "two"):
        assert runner.write(text) == second
    assert second.read_text() == f"before\n{runner.START}\ntwo\n{runner.END}\nafter\n"
    assert first.read_text() == "nothing here\n"


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["nonsense"])
    assert "no benchmark nonsense; there are: " in capsys.readouterr().err


def test_the_machine_is_described() -> None:
    assert "torch" in runner.machine()
