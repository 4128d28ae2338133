"""One reader of records: every stage gives the same bytes for the same records, whatever they are in. Bad lines are named."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard

from arrowbank import CaptureConfig, ModelConfig, ScanConfig, TrunkData, build_in2, build_trunk, capture, open_bank, scan
from arrowbank.bank.manifest import MANIFEST
from arrowbank.cli import main
from arrowbank.errors import ArrowbankError, InputError
from arrowbank.inputs.bad_lines import BadLine, parse_line
from arrowbank.inputs.records import Records
from arrowbank.inputs.sources import find_source, named_source
from tests import arms, hub_server, s3_server, tiny, trunk_banks

WORDS = tiny.texts(30)
RECORDS: list[dict[str, Any]] = [
    {
        "id": f"r{number}",
        "query": f'a "quoted" \\ query,\t{number}\nof two lines',
        "text": text,
        "input_ids": [5 + number % 7] * 60,
    }
    for number, text in enumerate(WORDS)
]
RECORDS[3]["query"] = None
RECORDS[4]["query"] = " Grüße 😀 "


def as_lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def as_csv(records: list[dict[str, Any]], delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(records[0])
    for record in records:
        writer.writerow(json.dumps(value) if isinstance(value, list) else value for value in record.values())
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def as_table(records: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(records)


def save_table(write: Callable[[pa.Table, str], None]) -> Callable[[Path, list[dict[str, Any]]], None]:
    return lambda path, records: write(as_table(records), str(path))


def bytes_of(make: Callable[[list[dict[str, Any]]], bytes]) -> Callable[[Path, list[dict[str, Any]]], None]:
    return lambda path, records: [path.write_bytes(make(records))][0] and None


def save_stream(table: pa.Table, path: str) -> None:
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)


FILES: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "a.jsonl": bytes_of(as_lines),
    "a.JSONL": bytes_of(as_lines),
    "a.ndjson": bytes_of(as_lines),
    "a.jsonl.gz": bytes_of(lambda records: gzip.compress(as_lines(records))),
    "a.ndjson.GZ": bytes_of(lambda records: gzip.compress(as_lines(records))),
    "a.jsonl.zst": bytes_of(lambda records: zstandard.compress(as_lines(records))),
    "lines.json": bytes_of(as_lines),
    "array.json": bytes_of(lambda records: b"\xef\xbb\xbf \n" + json.dumps(records, indent=1).encode()),
    "array.json.gz": bytes_of(lambda records: gzip.compress(json.dumps(records).encode())),
    "a.csv": bytes_of(lambda records: as_csv(records, ",")),
    "a.csv.zst": bytes_of(lambda records: zstandard.compress(as_csv(records, ","))),
    "a.TSV": bytes_of(lambda records: as_csv(records, "\t")),
    "a.parquet": save_table(lambda table, path: pq.write_table(table, path, row_group_size=7)),
    "a.feather": save_table(lambda table, path: pyarrow.feather.write_feather(table, path, compression="zstd")),
    "a.Arrow": save_table(save_stream),
}


def save(folder: Path, form: str) -> str:
    """The records in a form; the place to be given for them."""
    folder.mkdir(exist_ok=True)
    if form in FILES:
        FILES[form](folder / form, RECORDS)
        return str(folder / form)
    dataset = datasets.Dataset(as_table(RECORDS))
    if form == "saved dataset":
        dataset.save_to_disk(str(folder / "saved"), num_shards=2)
        return str(folder / "saved")
    if form == "split":
        datasets.DatasetDict({"test": dataset.select([0]), "train": dataset}).save_to_disk(str(folder / "splits"))
        return str(folder / "splits:train")
    parts = {"part-0.jsonl": as_lines(RECORDS[:9]), "part-1.jsonl.gz": gzip.compress(as_lines(RECORDS[9:]))}
    if form in ("folder", "pattern"):
        for name, data in parts.items():
            (folder / name).write_bytes(data)
        (folder / "about.json").write_text("{}")
        return str(folder if form == "folder" else folder / "part-*")
    if form == "file address":
        return f"file://{save(folder, 'a.jsonl')}"
    store = fsspec.filesystem("memory")
    root = f"/{folder.name}-{os.getpid()}"
    for name, data in parts.items():
        store.pipe_file(f"{root}/{name}", data)
    if form == "address of a table":
        FILES["a.parquet"](folder / "a.parquet", RECORDS)
        store.pipe_file(f"{root}-table/a.parquet", (folder / "a.parquet").read_bytes())
        return f"memory:/{root}-table/a.parquet"
    if form == "address of a split":
        store.put(save(folder, "split").removesuffix(":train"), f"{root}-splits", recursive=True)
        return f"memory:/{root}-splits:train"
    return f"memory:/{root}/part-*" if form == "pattern of addresses" else f"memory:/{root}"


FORMS = [
    *FILES,
    *("saved dataset", "split", "folder", "pattern", "file address"),
    *("address of a folder", "pattern of addresses", "address of a table", "address of a split"),
]


def run_scan(place: str, out: Path, model: Path, **options: Any) -> Any:
    fields = options.pop("fields", (("query", "query"), ("text", "text")))
    return scan(ScanConfig(sources=(("s", place),), fields=fields, **options), out)


def run_capture(place: str, out: Path, model: Path, **options: Any) -> Any:
    config = CaptureConfig(
        model=ModelConfig(model=str(model), device="cpu"), data=place, target_layer_ids=(0,), min_loss_tokens=1, **options
    )
    return capture(config, out)


def run_trunk(place: str, out: Path, model: Path, **options: Any) -> Any:
    return build_trunk(trunk_banks.make(model, TrunkData("a", place), **options), out)


def run_in2(place: str, out: Path, model: Path, **options: Any) -> Any:
    return build_in2(arms.small(length=100, triples=1, vocab=4096, examples=3, tokenizer=str(model), **options), [place], out)


STAGES: dict[str, Callable[..., Any]] = {"scan": run_scan, "capture": run_capture, "trunk": run_trunk, "in2": run_in2}


def shards(bank: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(bank.glob("data-*.arrow"))}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> dict[str, dict[str, bytes]]:
    """What each stage makes of plain JSON lines."""
    folder = tmp_path_factory.mktemp("wanted")
    place = save(folder / "records", "a.jsonl")
    for stage, run in STAGES.items():
        run(place, folder / stage, tiny_qwen3)
    return {stage: shards(folder / stage) for stage in STAGES}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_records_give_the_same_bytes_in_every_form(
    tmp_path: Path, tiny_qwen3: Path, wanted: dict[str, dict[str, bytes]], stage: str, form: str
) -> None:
    place = save(tmp_path / "records", form)
    STAGES[stage](place, tmp_path / "out", tiny_qwen3)
    assert wanted[stage]
    assert shards(tmp_path / "out") == wanted[stage]


@pytest.mark.parametrize("stage", ["scan", "trunk", "in2"])
def test_a_text_file_has_a_text_a_line(tmp_path: Path, tiny_qwen3: Path, stage: str) -> None:
    texts = [*WORDS * 2, '  "quoted" \\ and\tindented']
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(texts).encode())
    (tmp_path / "a.jsonl").write_bytes(as_lines([{"text": text} for text in texts]))
    options: dict[str, Any] = {"scan": {"fields": (("text", "text"),)}}.get(stage, {})
    STAGES[stage](str(tmp_path / "a.jsonl"), tmp_path / "of-lines", tiny_qwen3, **options)
    STAGES[stage](str(tmp_path / "a.txt"), tmp_path / "of-text", tiny_qwen3)
    assert shards(tmp_path / "of-text") == shards(tmp_path / "of-lines")


def test_text_files_beside_others_need_their_fields_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.jsonl").write_text('{"query": "b"}\n')
    sources = (("a", str(tmp_path / "a.txt")), ("b", str(tmp_path / "b.jsonl")))
    with pytest.raises(InputError, match="Name all fields"):
        scan(ScanConfig(sources=sources), tmp_path / "out")
    scan(ScanConfig(sources=sources, fields=(("query", "query"), ("text", "text"))), tmp_path / "out")
    assert list(open_bank(tmp_path / "out").dataset["text"][:]) == ["a", "b"]


def test_build_and_audit_take_every_form_too(tmp_path: Path, bpe_tokenizer: Path) -> None:
    fields = ["--field", "query=query", "--field", "text=text"]
    encoder = ["--encoder", "tests.banks:TableEncoder", "--tokenizer", str(bpe_tokenizer)]
    places = [
        save(tmp_path / form.replace(" ", "-"), form) for form in ("a.jsonl", "a.TSV", "array.json.gz", "split", "pattern")
    ]
    found = []
    for number, place in enumerate(places):
        out = tmp_path / f"out-{number}"
        assert main(["build", "--source", f"train={place}", *fields, *encoder, "--out", str(out)]) == 0
        found.append(shards(out / "features"))
        sources = ["--source", f"train={place}", "--source", f"eval={places[0]}"]
        audit = ["audit", str(out / "features"), *sources, *fields, "--out", str(out / "audit.json")]
        assert main(audit) == 0
        found.append(json.loads((out / "audit.json").read_text()))
    assert found[0]
    assert found[1]["rows"]
    assert found == found[:2] * len(places)


# bad lines

BAD: dict[str, tuple[bytes, str]] = {
    "a.jsonl": (b"{oops", r"line 2, column 2: not JSON"),
    "b.json": (b'{"query": "\xff"}', r"line 2, column 12: not UTF-8 \(byte 0xff\)"),
    "c.jsonl.gz": (b"[1, 2]", r"line 2, column 1: an array, where an object \(a record\) should be"),
    "d.ndjson.zst": (b"[" * 100_000, r"line 2, column 100000: nested too deeply"),
    "e.csv": (b"1,2,3", r"line 3: 3 cells, where the header has 4"),
    "f.tsv": (b"a\t\xff\tb\tc", r"line 3, column 3: not UTF-8 \(byte 0xff\)"),
    "g.csv": (b'a,b,c,"[1, 2"', r"line 3: column 'input_ids': not JSON"),
    "h.csv": (b'"a"x,b,c,d', r"line 3: not CSV"),
}


def save_with_bad_line(path: Path, bad: bytes) -> str:
    record = {"id": "r", "query": "q", "text": " ".join(WORDS), "input_ids": [7] * 400}
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    separator = {".csv": ",", ".tsv": "\t"}.get(Path(name).suffix)
    lines = as_csv([record] * 2, separator).splitlines() if separator else as_lines([record] * 2).splitlines()
    data = b"\n".join([*lines[:-1], bad, lines[-1]]) + b"\n"
    path.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)(data))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_line_is_named_or_skipped_and_counted_in_the_same_way(
    tmp_path: Path, tiny_qwen3: Path, stage: str, name: str
) -> None:
    bad, words = BAD[name]
    if stage == "scan" and name == "g.csv":
        return  # the scan does not look at the ids
    place = save_with_bad_line(tmp_path / name, bad)
    with pytest.raises(InputError, match=rf"{name}, {words}.*Fix the line, or give --on-bad-line skip"):
        STAGES[stage](place, tmp_path / "out", tiny_qwen3)
    made = STAGES[stage](place, tmp_path / "skipped", tiny_qwen3, on_bad_line="skip")
    assert (made["fillers"][0] if stage == "in2" else made["counts"])["bad_lines"] == 1


@pytest.mark.parametrize("stage", ["scan", "capture", "trunk"])
def test_python_s_own_numbers_are_read_where_nobody_asks_for_them(tmp_path: Path, tiny_qwen3: Path, stage: str) -> None:
    numbers = ', "loss": NaN, "high": Infinity, "low": -Infinity, "long": ' + "1" * 5000 + "}"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one)[:-1] + numbers + "\n" for one in RECORDS))
    (tmp_path / "plain.jsonl").write_bytes(as_lines(RECORDS))
    for name in ("a", "plain"):
        STAGES[stage](str(tmp_path / f"{name}.jsonl"), tmp_path / name, tiny_qwen3)
    assert shards(tmp_path / "a") == shards(tmp_path / "plain")


# hostile files

HOSTILE: dict[str, tuple[bytes, str]] = {
    "cut.jsonl.gz": (gzip.compress(as_lines(RECORDS))[:-20], "cut off"),
    "cut.csv.zst": (zstandard.compress(as_csv(RECORDS, ","))[:-20], "cut off"),
    "plain.jsonl.gz": (as_lines(RECORDS), r"not readable as .gz data"),
    "cut.json": (json.dumps(RECORDS).encode()[:-30], r"element 30: not JSON"),
    "more.json": (json.dumps(RECORDS).encode() + b"x", r"element 31: not JSON \(Extra data\)"),
    "latin.json": (b'[{"query": "\xe9"}]', r"element 1: not UTF-8 \(byte 0xe9\)"),
    "deep.json": (b"[" * 200_000, r"element 1, column \d+: nested too deeply"),
    "numbers.json": (b"[1, 2]", r"element 1, column 1: a number, where an object"),
    "open.csv": (b'query,text\n"a,b\n' * 2, r"line 2: not CSV"),
    "twice.csv": (b"query,query\n1,2\n", r"line 1: a header with two columns named 'query'"),
    "cut.parquet": (b"PAR1" + b"\0" * 40, "not readable as Parquet data"),
    "cut.feather": (b"ARROW1\0\0" + b"\1" * 40, "not readable as Arrow data"),
    "none.jsonl": (b"", "No text|holds no sample|too few windows|too short"),
    "none.json": (b"", "No text|holds no sample|too few windows|too short"),
    "nothing.json": (b"[ ]", "No text|holds no sample|too few windows|too short"),
    "none.csv": (b"", "No text|holds no sample|too few windows|too short"),
    "none.parquet": (b"", "not readable as Parquet data"),
    "none.arrow": (b"", "not readable as Arrow data|not a regular file"),
    "unknown.xyz": (b"{}", "unknown.xyz.*not a known kind of file. Known are .*.jsonl.*.parquet"),
    "packed.parquet.gz": (gzip.compress(b"PAR1"), "not a known kind of file"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("stage", STAGES)
def test_a_hostile_file_is_an_error_that_says_what_is_wrong(tmp_path: Path, tiny_qwen3: Path, stage: str, name: str) -> None:
    data, words = HOSTILE[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ArrowbankError, match=words):
        STAGES[stage](str(tmp_path / name), tmp_path / "out", tiny_qwen3)
    assert not (tmp_path / "out" / "state.json").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.json.gz", "a.csv", "a.tsv.zst", "a.txt"])
@pytest.mark.parametrize("stage", ["scan", "capture", "trunk"])
def test_a_record_longer_than_the_limit_is_named(tmp_path: Path, tiny_qwen3: Path, stage: str, name: str) -> None:
    if stage == "capture" and name == "a.txt":
        return  # lines of text are no samples
    long = "x" * 3000
    bare = name.removesuffix(".gz").removesuffix(".zst")
    lines = {
        "a.jsonl": f'{{"query": "q", "input_ids": [1, 2]}}\n{{"query": "{long}"}}\n',
        "a.json": f'[{{"query": "q", "input_ids": [1, 2]}}, {{"query": "{long}"}}]',
        "a.csv": f'query,input_ids\nq,"[1, 2]"\n"{long[:1500]}\n{long[:1500]}",\n',
        "a.tsv": f"query\tinput_ids\nq\t[1]\n{long}\t\n",
        "a.txt": f"a\n\n{long}\n",
    }[bare].encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(lines))
    number = {"a.jsonl": "line 2", "a.json": "element 2", "a.csv": "line 4", "a.tsv": "line 3", "a.txt": "line 3"}[bare]
    with pytest.raises(InputError, match=rf"{name}, {number}: longer than 2,000 bytes.*--max-line-bytes"):
        STAGES[stage](str(tmp_path / name), tmp_path / "out", tiny_qwen3, max_line_bytes=2000)


@pytest.mark.parametrize("stage", ["capture", "trunk"])
def test_a_table_without_the_columns_is_refused(tmp_path: Path, tiny_qwen3: Path, stage: str) -> None:
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="a table of the columns body; expected one of"):
        STAGES[stage](str(tmp_path / "a.parquet"), tmp_path / "out", tiny_qwen3)


@pytest.mark.parametrize("stage", ["scan", "trunk", "in2"])
def test_a_table_with_a_column_twice_is_refused(tmp_path: Path, tiny_qwen3: Path, stage: str) -> None:
    table = pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"])
    for name in ("a.parquet", "a.arrow"):
        (pq.write_table if name == "a.parquet" else save_stream)(table, str(tmp_path / name))
        with pytest.raises(InputError, match=rf"{name}: not readable as \w+ data \(two columns named 'text'\)"):
            STAGES[stage](str(tmp_path / name), tmp_path / "out", tiny_qwen3)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_named_pipe_is_not_waited_for(tmp_path: Path, tiny_qwen3: Path, stage: str, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"{name}: not a regular file"):
        STAGES[stage](str(tmp_path / name), tmp_path / "out", tiny_qwen3)


def test_long_json_arrays_are_read_a_piece_at_a_time(tmp_path: Path) -> None:
    records = [{"text": "x" * (number % 5000), "number": number, "list": [[1, {"a": "]"}]]} for number in range(2000)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    assert [one.value for one in Records(tmp_path / "a.json", ["text"])] == records


# names and places


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("train=a/b.jsonl", ("train", "a/b.jsonl")),
        ("a/train.jsonl.gz", ("train", "a/train.jsonl.gz")),
        ("data/splits:test", ("test", "data/splits:test")),
        ("data/train-*.parquet", ("train", "data/train-*.parquet")),
        ("./year=2024/a.csv", ("a", "./year=2024/a.csv")),
        ("hf://datasets/org/name", ("name", "hf://datasets/org/name")),
        ("https://host/a.jsonl?sig=x=y", ("a", "https://host/a.jsonl?sig=x=y")),
        ("eval=https://host/a.jsonl?sig=x", ("eval", "https://host/a.jsonl?sig=x")),
        ("folder/", ("folder", "folder/")),
    ],
)
def test_a_source_is_a_name_and_a_place_or_a_place(value: str, expected: tuple[str, str]) -> None:
    assert named_source(value) == expected


def test_a_place_alone_names_its_source_and_the_old_option_is_taken(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = save(tmp_path / "records", "a.csv")
    assert main(["scan", "--source", place, "--field", "query=query", "--out", str(tmp_path / "texts")]) == 0
    assert set(open_bank(tmp_path / "texts").dataset["source"][:]) == {"a"}
    argv = ["targets", "capture", "--model", str(tiny_qwen3), "--layers", "0", "--min-loss-tokens", "1", "--dry-run"]
    capsys.readouterr()
    assert main([*argv, "--data", place, "--out", str(tmp_path / "targets")]) == 0
    assert "--data is now --source" in capsys.readouterr().err


def test_samples_without_an_id_are_named_by_their_source(tmp_path: Path, tiny_qwen3: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"input_ids": [1, 2, 3]}\n')
    run_capture(str(tmp_path / "a.jsonl"), tmp_path / "plain", tiny_qwen3)
    run_capture(str(tmp_path / "a.jsonl"), tmp_path / "named", tiny_qwen3, source_name="chats")
    assert open_bank(tmp_path / "plain").dataset["sample"][:] == ["a.jsonl:2"]
    assert open_bank(tmp_path / "named").dataset["sample"][:] == ["chats:2"]


def test_splits_are_named_where_none_is_given(tmp_path: Path) -> None:
    place = save(tmp_path, "split").removesuffix(":train")
    with pytest.raises(InputError, match=r"several splits \(test, train\)\. Give one of them, as in .*splits:test"):
        find_source("a", place)
    with pytest.raises(InputError, match="none 'dev'"):
        find_source("a", f"{place}:dev")
    (tmp_path / "plain").mkdir()
    with pytest.raises(InputError, match="no files of records"):
        find_source("a", f"{tmp_path / 'plain'}:train")


def test_a_split_of_a_folder_is_the_files_of_its_name(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl.gz", "training.jsonl", "test.csv"):
        (tmp_path / name).write_bytes(b"")
    assert [file.path.name for file in find_source("a", f"{tmp_path}:train").files] == ["train-0.jsonl", "train-1.jsonl.gz"]
    with pytest.raises(InputError, match="no files of the split 'dev', files of test, train"):
        find_source("a", f"{tmp_path}:dev")


def test_options_about_lines_are_refused_for_tables(tmp_path: Path, tiny_qwen3: Path) -> None:
    place = save(tmp_path, "a.parquet")
    for stage in ("scan", "capture", "trunk"):
        with pytest.raises(InputError, match=r"on_bad_line|--on-bad-line"):
            STAGES[stage](place, tmp_path / "out", tiny_qwen3, on_bad_line="skip")


# stores


@pytest.mark.slow
def test_records_in_a_bucket_are_read_and_their_login_is_in_no_message(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, dict[str, bytes]]
) -> None:
    with s3_server.serving(monkeypatch, tmp_path) as address:
        store = fsspec.filesystem("s3", key="ada", secret="l0velace")
        for name in ("a.jsonl.gz", "a.parquet"):
            FILES[name](tmp_path / name, RECORDS)
            store.put(str(tmp_path / name), f"{address}/data/{name}")
        login = address.replace("s3://", "s3://ada:l0velace@")
        for number, place in enumerate(("data/a.jsonl.gz", "data/a.parquet", "data/*.gz")):
            run_scan(f"{login}/{place}", tmp_path / f"out-{number}", tiny_qwen3)
            assert shards(tmp_path / f"out-{number}") == wanted["scan"]
            assert "l0velace" not in (tmp_path / f"out-{number}" / MANIFEST).read_text()
        with pytest.raises(InputError, match=r"^s3://banks/data/none\.jsonl \(source 's'\): no such file"):
            run_scan(f"{login}/data/none.jsonl", tmp_path / "none", tiny_qwen3)


@pytest.mark.slow
def test_records_on_the_hub_are_read(tmp_path: Path, wanted: dict[str, dict[str, bytes]]) -> None:
    for name in ("a.jsonl.gz", "a.parquet"):
        FILES[name](tmp_path / name, RECORDS)
    with hub_server.serving() as hub:
        hub.repos["org/name"] = hub_server.Repo(private=True)
        hub.repos["org/name"].add(
            {
                "README.md": (b"# Data", False),
                "data/train-0.jsonl.gz": ((tmp_path / "a.jsonl.gz").read_bytes(), True),
                "data/test-0.parquet": ((tmp_path / "a.parquet").read_bytes(), True),
            }
        )
        environment = {**os.environ, **hub.environment(tmp_path)}
        for number, place in enumerate(
            ("/data/train-0.jsonl.gz", "/data/test-0.parquet", "/data/*.parquet", ":train", "@main/data:test")
        ):
            argv = ["--source", f"s=hf://datasets/org/name{place}", "--field", "query=query", "--field", "text=text"]
            done = subprocess.run(
                [sys.executable, "-m", "arrowbank", "scan", *argv, "--out", str(tmp_path / f"out-{number}")],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert shards(tmp_path / f"out-{number}") == wanted["scan"]


@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize(
    "line", [b"1", b"1.5", b"1e400", b"-0", b"NaN", b"9" * 5000, b"[]", b'"x"', b"true", b"null"], ids=range(10)
)
def test_a_line_that_is_no_object_says_what_it_is(line: bytes, numbers: bool) -> None:
    with pytest.raises(BadLine, match="where an object"):
        parse_line(line, 3, numbers=numbers)
