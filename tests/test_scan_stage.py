"""The stage `scan`: what is a text, what is refused and in which words, every kind of source, growth, and death."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank import RunOptions, ScanConfig, estimate_scan, open_bank, scan, verify
from arrowbank.cli import main
from arrowbank.errors import ArrowbankError, CorruptBank, InputError, PlanMismatch, WorkerDied
from arrowbank.features.scan_pool import ScanWorkers
from tests.kill import kill_after, kill_at, tree_bytes

EPISODES = [
    {
        "query": f"what is {row % 40}?",
        "candidates": [{"text": f"it is {row % 7} — näher", "id": row}, {"text": "same"}],
        "extra": [row],
    }
    for row in range(300)
]


def lines(episodes: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(episode, ensure_ascii=False) + "\n" for episode in episodes).encode()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def texts_of(folder: Path) -> list[str]:
    return list(open_bank(folder).dataset["text"][:])


def scan_bytes(folder: Path, data: bytes, **options: object) -> tuple[list[str], dict[str, int]]:
    """The texts and the counts of one file."""
    source = write(folder / "train.jsonl", data)
    manifest = scan(ScanConfig(sources=(("train", str(source)),), **options), folder / "out")  # type: ignore[arg-type]
    return texts_of(folder / "out"), manifest["counts"]


def plain(episodes: list[dict[str, object]]) -> list[tuple[str, str]]:
    """The rule as a plain loop: (text, kind) of every unique text in first-seen order."""
    rows: dict[str, str] = {}
    for episode in episodes:
        found = [("query", episode.get("query"))]
        candidates = episode.get("candidates")
        for candidate in candidates if isinstance(candidates, list) else ():
            if isinstance(candidate, dict):
                found.append(("candidate", candidate.get("text")))
        for kind, text in found:
            if isinstance(text, str) and text.strip():
                rows.setdefault(text.strip().encode("utf-8", "replace").decode(), kind)
    return list(rows.items())


values = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["a", " a ", "b", "\u3000", "\x1c", "é", "e\u0301"]),
    st.none(),
    st.integers(),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["text", "x"]), st.text(max_size=3), max_size=2),
)
candidates = st.one_of(values, st.lists(st.one_of(values, st.fixed_dictionaries({"text": values})), max_size=4))
episodes = st.lists(
    st.dictionaries(st.sampled_from(["query", "candidates", "other"]), st.one_of(values, candidates)), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(episodes, st.booleans())
def test_any_episodes_give_what_the_plain_loop_gives(
    tmp_path_factory: pytest.TempPathFactory, found: list[dict[str, object]], ascii_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = write(
        folder / "a.jsonl",
        "".join(json.dumps(one, ensure_ascii=ascii_only) + "\n" for one in found).encode("utf-8", "surrogatepass"),
    )
    wanted = plain(found)
    config = ScanConfig(sources=(("train", str(source)),))
    if not wanted:
        with pytest.raises(InputError, match="No text is in the sources"):
            scan(config, folder / "out")
        return
    scan(config, folder / "out")
    dataset = open_bank(folder / "out").dataset
    assert list(zip(dataset["text"][:], dataset["kind"][:], strict=True)) == wanted
    assert dataset["sha1"][:] == [hashlib.sha1(text.encode()).digest() for text, _ in wanted]


# what is fine


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b'\xef\xbb\xbf{"query":"a"}\r\n{"query":"b"}', ["a", "b"]),
        (b'\n  \n{"query":"a"}\n\r\n', ["a"]),
        (b'{"query":"a\\u0000b"}\n', ["a\0b"]),
        (b'{"query":"a","query":"b"}\n', ["b"]),
        (b'{"query":"a","z":123456789012345678901234567890,"y":1e999}\n', ["a"]),
        (b'{"query":"x\\ud83d\\ude00"}\n', ["x😀"]),
    ],
)
def test_awkward_but_fine(tmp_path: Path, data: bytes, texts: list[str]) -> None:
    assert scan_bytes(tmp_path, data)[0] == texts


@pytest.mark.slow
def test_a_line_of_a_hundred_megabytes(tmp_path: Path) -> None:
    data = b'{"query":"' + b"x" * 100_000_000 + b'"}\n{"query":"after"}\n'
    texts, _ = scan_bytes(tmp_path, data)
    assert [len(text) for text in texts] == [100_000_000, 5]


def test_what_is_no_text_is_skipped_and_counted(tmp_path: Path) -> None:
    data = b'{"query":3,"candidates":[{"text":true},{"text":null},"bare",7,{"text":"ok"},{"text":"  "}]}\n'
    texts, counts = scan_bytes(tmp_path, data + b'{"query":"lone \\ud800","candidates":"oops"}\n')
    assert texts == ["ok", "lone ?"]
    wanted = {"not_text": 2, "not_object": 2, "not_list": 1, "empty": 1, "lone_surrogates": 1, "episodes": 2, "bad_lines": 0}
    assert {name: counts[name] for name in wanted} == wanted


def test_fields_of_other_shapes(tmp_path: Path) -> None:
    data = b'{"turns":["one","two"],"meta":{"title":"three","parts":[{"body":["four"]}]}}\n'
    fields = (("turn", "turns[]"), ("title", "meta.title"), ("body", "meta.parts[].body[]"))
    texts, _ = scan_bytes(tmp_path, data, fields=fields)
    assert texts == ["one", "two", "three", "four"]
    assert open_bank(tmp_path / "out").dataset["kind"][:] == ["turn", "turn", "title", "body"]


# what is refused


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"query":"ok"}\n{"query": oops}\n', r"train.jsonl, line 2, column 11: not JSON"),
        (b'{"query":"ok"}\n{"query":"a\xffb"}\n', r"line 2, column 12: not UTF-8 \(byte 0xff\)"),
        (b'{"query":"ok","z":"a\xffb"}\n', r"line 1, column 21: not UTF-8"),
        (b'{"query":"a"}{"query":"b"}\n', r"line 1, column 14: not JSON \(Extra data\)"),
        (b'{"query":\n"a"}\n', r"line 1, column \d+: not JSON"),
        (b'{"query":"a\x01b"}\n', r"line 1, column 12: not JSON \(Invalid control character"),
        (b'{"query":"a","z":"\\q"}\n', r"line 1, column 19: not JSON"),
        (b'{"query":"a",}\n', r"line 1, column 1[34]: not JSON"),
        (b"[1, 2]\n", r"line 1, column 1: an array, where an object"),
        (b'{"query":"a","z":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", r"line 1, column \d+: nested too deeply"),
        (b"", r"No text is in the sources: 0 episodes"),
        (b'{"question":"a"}\n', r"No text is in the sources: 1 episodes have none at query or candidates"),
    ],
)
def test_bad_lines_are_named_and_leave_nothing_committed(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        scan_bytes(tmp_path, data)
    assert not (tmp_path / "out" / "state.json").exists()


def test_bad_lines_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    data = b'{"query":"a"}\n{"query": oops}\n[1]\n{"query":"\xff"}\n{"query":"b"}\n'
    texts, counts = scan_bytes(tmp_path, data, on_bad_line="skip")
    assert (texts, counts["bad_lines"], counts["episodes"]) == (["a", "b"], 3, 2)


@pytest.mark.parametrize("value", [b"3", b"true", b"[]", b"{}"])
def test_strict_refuses_what_is_no_text(tmp_path: Path, value: bytes) -> None:
    with pytest.raises(InputError, match=r"train.jsonl, line 2: a number, bool, list or object at query"):
        scan_bytes(tmp_path, b'{"query":"a"}\n{"query":' + value + b"}\n", strict=True)


@pytest.mark.parametrize(
    ("name", "data"), [("a.jsonl.gz", gzip.compress(lines(EPISODES))), ("a.jsonl.zst", zstandard.compress(lines(EPISODES)))]
)
def test_a_torn_archive_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    source = write(tmp_path / name, data[:-20])
    with pytest.raises(InputError, match=name):
        scan(ScanConfig(sources=(("train", str(source)),)), tmp_path / "out")


def test_sources_that_are_not_there_or_of_no_known_kind(tmp_path: Path) -> None:
    write(tmp_path / "notes.rst", b"hello")
    (tmp_path / "empty").mkdir()
    for path, words in (
        ("absent.jsonl", "no such file"),
        ("notes.rst", "not a known kind of file"),
        ("empty", "no files of records"),
    ):
        with pytest.raises(InputError, match=words):
            scan(ScanConfig(sources=(("train", str(tmp_path / path)),)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# the same from every kind of source


def test_every_kind_of_source_gives_the_same_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"query": one["query"], "candidates": one["candidates"]} for one in EPISODES])
    write(tmp_path / "plain.jsonl", lines(EPISODES))
    write(tmp_path / "zipped.jsonl.gz", gzip.compress(lines(EPISODES)))
    write(tmp_path / "zstandard.jsonl.zst", zstandard.compress(lines(EPISODES)))
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=70)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=50)
    with pa.OSFile(str(tmp_path / "file.feather"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table, max_chunksize=50)
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "part-0.jsonl", lines(EPISODES[:100]))
    write(tmp_path / "folder" / "part-1.jsonl.gz", gzip.compress(lines(EPISODES[100:])))
    wanted = plain(EPISODES)
    for name in (
        "plain.jsonl",
        "zipped.jsonl.gz",
        "zstandard.jsonl.zst",
        "table.parquet",
        "stream.arrow",
        "file.feather",
        "saved",
        "folder",
    ):
        scan(ScanConfig(sources=(("train", str(tmp_path / name)),)), tmp_path / f"out-{name}")
        dataset = open_bank(tmp_path / f"out-{name}").dataset
        assert list(zip(dataset["text"][:], dataset["kind"][:], strict=True)) == wanted, name


def test_sources_are_in_the_manifest_by_content(tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "t.jsonl", lines(EPISODES[:50])), write(tmp_path / "e.jsonl", lines(EPISODES[40:60]))
    manifest = scan(ScanConfig(sources=(("train", str(train)), ("eval", str(held_out)))), tmp_path / "out")
    assert manifest["train_sha256"] == hashlib.sha256(train.read_bytes()).hexdigest()
    assert manifest["eval_sha256"] == hashlib.sha256(held_out.read_bytes()).hexdigest()
    assert manifest["sources"][1] == {
        "name": "eval",
        "file": "e.jsonl",
        "bytes": held_out.stat().st_size,
        "sha256": manifest["eval_sha256"],
    }
    dataset = open_bank(tmp_path / "out").dataset
    assert set(dataset["source"][:]) == {"train"}  # all of eval's texts were seen before
    assert all(check.ok for check in verify(tmp_path / "out"))


def test_duplicates_are_counted_where_they_come_and_add_up_when_a_bank_grows(tmp_path: Path) -> None:
    episodes = [{"query": "a", "candidates": [{"text": "b"}, {"text": "a"}]}, {"query": " b ", "candidates": [{"text": ""}]}]
    train = write(tmp_path / "t.jsonl", lines(episodes))  # type: ignore[arg-type]  # a and b, each once more
    held_out = write(tmp_path / "e.jsonl", lines([{"query": "b"}, {"query": "c"}]))
    manifest = scan(ScanConfig(sources=(("train", str(train)), ("eval", str(held_out)))), tmp_path / "out")
    assert manifest["source_duplicates"] == {"train": 2, "eval": 1}
    assert sum(manifest["source_duplicates"].values()) == manifest["counts"]["duplicates"]
    grown = scan(ScanConfig(sources=(("more", str(held_out)),), onto=str(tmp_path / "out")), tmp_path / "grown")
    assert grown["source_duplicates"] == {"train": 2, "eval": 1, "more": 2}


# however it is made


def test_processes_write_the_same_bytes(tmp_path: Path) -> None:
    many = [
        {"query": f"question {row} {'x' * (row % 300)}", "candidates": [{"text": f"answer {row % 900}"}]}
        for row in range(20_000)
    ]
    source = write(tmp_path / "a.jsonl", lines(many))  # type: ignore[arg-type]
    config = ScanConfig(sources=(("train", str(source)),))
    for workers in (1, 2, 3):
        scan(config, tmp_path / f"out-{workers}", options=RunOptions(workers=workers))
    assert tree_bytes(tmp_path / "out-2") == tree_bytes(tmp_path / "out-1") == tree_bytes(tmp_path / "out-3")
    assert texts_of(tmp_path / "out-1") == [text for text, _ in plain(many)]  # type: ignore[arg-type]


# what it will take


@pytest.mark.parametrize("form", ["lines", "gzip", "parquet"])
def test_an_estimate_of_small_sources_is_what_is_written(tmp_path: Path, form: str) -> None:
    rows = [{"query": f"q{row % 300} {'é' * (row % 50)}", "candidates": [{"text": f"a {row}"}]} for row in range(3000)]
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    else:
        text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        (tmp_path / ("a.jsonl.gz" if form == "gzip" else "a.jsonl")).write_bytes(
            gzip.compress(text) if form == "gzip" else text
        )
    (file,) = tmp_path.iterdir()
    config = ScanConfig(sources=(("train", file), ("twice", file)))
    found = estimate_scan(config, tmp_path / "out", options=RunOptions(budget_gb=1))
    assert [path for path in tmp_path.iterdir() if path != file] == []
    manifest = scan(config, tmp_path / "out")
    shards = list((tmp_path / "out").glob("data-*.arrow"))
    assert (found.rows, found.shards, found.fits) == (manifest["rows"], len(shards), True)
    assert abs(sum(path.stat().st_size for path in shards) - found.shard_bytes) < 2500 * found.shards
    assert found.counts["input_bytes"] == found.counts["sampled_bytes"] == 2 * file.stat().st_size
    texts = open_bank(tmp_path / "out").dataset["text"]
    assert found.counts["text_bytes"] == sum(len(text.encode()) for text in texts)
    grown = estimate_scan(replace(config, onto=tmp_path / "out"), tmp_path / "grown")
    assert (grown.rows, grown.counts["text_bytes"]) == (0, 0), "rows of the old bank are not written again"


@pytest.mark.slow
def test_an_estimate_of_large_sources_reads_a_part_of_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for name, rows in (("short", 400_000), ("long", 30_000)):
        text = (f"{name} {row} {'x' * int(rng.integers(1, 40 if name == 'short' else 2000))}" for row in range(rows))
        (tmp_path / f"{name}.txt").write_text("\n".join(text))
    config = ScanConfig(sources=(("short", tmp_path / "short.txt"), ("long", tmp_path / "long.txt")))
    found, manifest = estimate_scan(config, tmp_path / "out"), scan(config, tmp_path / "out")
    assert found.counts["sampled_bytes"] < found.counts["input_bytes"]
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("data-*.arrow"))
    assert abs(found.rows - manifest["rows"]) < 0.05 * manifest["rows"]
    assert abs(found.shard_bytes - size) < 0.05 * size


@pytest.mark.slow
def test_an_estimate_of_many_files_opens_some_of_them(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(300):
        (tmp_path / "many" / f"{number:03}.txt").write_text("\n".join(f"{number} {row} {'x' * 90}" for row in range(1500)))
    config = ScanConfig(sources=(("many", tmp_path / "many"),))
    found, manifest = estimate_scan(config, tmp_path / "out"), scan(config, tmp_path / "out")
    assert found.counts["sampled_bytes"] < found.counts["input_bytes"] / 3
    assert abs(found.rows - manifest["rows"]) < 0.02 * manifest["rows"]
    unread = tmp_path / "many" / "001.txt"
    unread.write_bytes(b"\xff" * 1000)
    assert estimate_scan(config, tmp_path / "out").rows > 0, "it is the scan that refuses it"
    with pytest.raises(InputError, match=r"001\.txt"):
        scan(config, tmp_path / "again")


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a.jsonl", lines(EPISODES))
    argv = ["scan", "--source", f"train={source}", "--out", str(tmp_path / "out"), "--budget-gb", "0.0000001"]
    assert main(argv) == 2
    assert "the texts bank takes" in (error := capsys.readouterr().err)
    assert "the budget is 100 bytes" in error
    assert main([*argv, "--dry-run", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["phase"], found["fits"], found["tokens"]) == ("estimate", False, None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", ["--engine ray", "--worker 0/2", "--shards 0", "--rows 0:1"])
def test_a_scan_is_not_made_in_parts(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "a.jsonl", lines(EPISODES))
    for more in ([], ["--dry-run"]):
        argv = ["scan", "--source", f"train={source}", "--out", str(tmp_path / "out"), *words.split(), *more]
        assert main(argv) == 2
        assert re.search(rf"{words.split()[0]}: has no effect with scan, whose .*one process", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_an_old_spelling_of_workers_works_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "a.jsonl", lines(EPISODES))
    assert main(["scan", "--source", f"train={source}", "--out", str(tmp_path / "out"), "--num-proc", "1"]) == 0
    assert "--workers" in capsys.readouterr().err


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("source") / "train.jsonl", lines(EPISODES))


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, str]:
    scan(ScanConfig(sources=(("train", str(source)),)), source.parent / "whole")
    return tree_bytes(source.parent / "whole")


@pytest.mark.slow
def test_every_moment_of_death_is_made_good_by_the_same_command(source: Path, whole: dict[str, str]) -> None:
    config = ScanConfig(sources=(("train", str(source)),))
    for moment in range(1, 500):
        out = source.parent / f"killed-{moment}"
        outcome = kill_at(moment, scan, config, out)
        assert outcome.error == ""
        if not outcome.killed:
            break
        scan(config, out)
        assert tree_bytes(out) == whole, f"killed at moment {moment}"
    assert moment > 30


def test_killed_from_outside_with_processes(source: Path, whole: dict[str, str]) -> None:
    config = ScanConfig(sources=(("train", str(source)),))
    rng = np.random.default_rng(3)
    for _ in range(5):
        kill_after(float(rng.uniform(0.01, 0.4)), scan, config, source.parent / "random", options=RunOptions(workers=2))
    scan(config, source.parent / "random")
    assert tree_bytes(source.parent / "random") == whole


def children_scanning() -> list[int]:
    """The worker processes of a scan that this process runs."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
            command = (status.parent / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if parent == os.getpid() and b"arrowbank.features.scan_worker" in command:
            found.append(int(status.parent.name))
    return found


def test_a_killed_worker_ends_the_scan_with_what_to_do(tmp_path: Path) -> None:
    rules = ScanConfig(sources=(("train", "unused"),)).rules

    def blocks() -> Iterator[tuple[int, bytes]]:
        for number in range(50):
            if number == 10:
                (child,) = children_scanning()
                os.kill(child, signal.SIGKILL)
            yield number, lines(EPISODES)

    seen = []

    def scan_all(crew: ScanWorkers) -> None:
        for _, extracted in crew.map(blocks()):
            extracted.texts(bytes(len(extracted.extract.kinds))).result()
            seen.append(extracted)

    with ScanWorkers(rules, 1) as crew, pytest.raises(WorkerDied, match=r"was killed by signal 9.*Run the same command again"):
        scan_all(crew)
    assert 0 < len(seen) <= 10
    assert children_scanning() == []


def test_a_changed_source_or_option_is_another_plan(source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    changed = write(tmp_path / "train.jsonl", lines(EPISODES))
    config = ScanConfig(sources=(("train", str(changed)),))
    scan(config, out)
    assert tree_bytes(out) == whole
    before = (out / "state.json").stat().st_mtime_ns
    scan(config, out)
    assert (out / "state.json").stat().st_mtime_ns == before
    write(changed, lines(EPISODES[1:]))
    with pytest.raises(PlanMismatch, match="sha256"):
        scan(config, out)
    with pytest.raises(PlanMismatch, match="strict: found false, wanted true"):
        scan(ScanConfig(sources=(("train", str(source)),), strict=True), out)
    assert tree_bytes(out) == whole
    scan(config, out, options=RunOptions(restart=True))
    assert texts_of(out) == [text for text, _ in plain(EPISODES[1:])]


# growth


def test_a_grown_bank_keeps_the_old_rows_and_shards(source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    more = write(tmp_path / "more.jsonl", b'{"query":"what is 3?","candidates":[{"text":"quite new"}]}\n{"query":"new, too"}\n')
    old = source.parent / "whole"
    manifest = scan(ScanConfig(sources=(("more", str(more)),), onto=str(old)), tmp_path / "grown")
    count = len(open_bank(old))
    assert texts_of(tmp_path / "grown") == [*texts_of(old), "quite new", "new, too"]
    assert manifest["generations"] == [count, count + 2]
    assert (tmp_path / "grown" / "data-00000.arrow").read_bytes() == (old / "data-00000.arrow").read_bytes()
    assert tree_bytes(old) == whole
    assert all(check.ok for check in verify(tmp_path / "grown"))


def test_growth_onto_what_is_no_good_bank_is_refused(source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(source.parent / "whole", tmp_path / "old")
    path = tmp_path / "old" / "data-00000.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    config = ScanConfig(sources=(("more", str(source)),), onto=str(tmp_path / "old"))
    with pytest.raises(CorruptBank, match=r"data-00000\.arrow"):
        scan(config, tmp_path / "out")
    with pytest.raises(InputError, match="input and output are the same"):
        scan(config, tmp_path / "old")
    (tmp_path / "old" / "state.json").unlink()
    with pytest.raises(ArrowbankError, match="not committed"):
        scan(config, tmp_path / "out")
