"""Names, links and JSON in folders from strangers: nothing outside of the folder is read, written, deleted or sent.

Every test has real victims outside the folder, and compares their bytes afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowbank import EncodeConfig, encode, pull, verify
from arrowbank.bank import BankWriter
from arrowbank.bank.journal import Journal
from arrowbank.bank.locks import FolderLock
from arrowbank.bank.manifest import MAX_JSON_BYTES, MAX_JSON_DEPTH, Receipt, parsed_json, read_json
from arrowbank.bank.manifest_checks import read_manifest
from arrowbank.bank.names import UnsafeName, check_names, checked_place, name_fault, own_folder, place_fault
from arrowbank.cli import main
from arrowbank.errors import ArrowbankError, CorruptBank, InputError
from tests.banks import make_texts, make_tokens
from tests.target_banks import make_target_bank

SECRET = b"a victim outside of the folder\n"

# file names that no folder may list, each for a reason of its own
BAD_NAMES: list[Any] = [
    *("../victim.txt", "/etc/hostname", "a/b", "a/../../victim.txt", "..", ".", "", "/", ".hidden", "...", "~/../x/"),
    *("a\\b", "..\\victim.txt", "C:x", "C:\\x", "a:stream", 'a"b'),
    *(
        "a\0b",
        "a\nb",
        "a\tb",
        "a\x1b[31m",
        "a\x7f",
        "a\u202eb",
        "a\u2066b",
        "a\u200bb",
        "a\ufeffb",
        "\ud800",
        "a\u2028b",
        "a\xa0b",
    ),
    *("a ", " a", "a.", "e\u0301", "x" * 256, "é" * 128),
    *("manifest.json", "state.json", "journal", "README.md", "build.jsonl", "MANIFEST.JSON", "State.json", "Journal"),
    *(None, 7, True, ["a"], {"a": 1}),
]


def short(value: object) -> str:
    return ascii(value)[:24]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of victims, which must be the same at the end."""
    folder = tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    for name in (
        "victim.txt",
        "lock",
        ".left.99999999.tmp",
        "sub/.left.99999998.tmp",
        "data-00000.arrow.json",
        "state.json",
        "build.jsonl",
    ):
        (folder / name).write_bytes(SECRET)
    before = tree(folder)
    yield folder
    assert tree(folder) == before


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit(bank: Path, change: Callable[[dict[str, Any]], object], name: str = "manifest.json") -> None:
    """Change the JSON object in a file of a bank."""
    value = json.loads((bank / name).read_text())
    change(value)
    (bank / name).write_text(json.dumps(value))


def list_file(bank: Path, name: object, source: Path | None = None) -> None:
    """Have the manifest list one more file, which is as it says where there is one."""
    data = source.read_bytes() if source else b""
    entry = {"name": name, "rows": None, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(bank, lambda manifest: manifest["files"].append(entry))


# the rules


@pytest.mark.parametrize("name", BAD_NAMES, ids=short)
def test_a_bad_name_is_refused(name: object) -> None:
    with pytest.raises(UnsafeName, match="not a plain name") as raised:
        check_names([name], "there", reserved=("manifest.json", "state.json", "journal", "README.md", "build.jsonl"))
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("names", [("a", "a"), ("a.bin", "A.bin"), ("ﬁle", "file"), ("STRASSE", "straße")])
def test_a_name_twice_is_refused_whatever_case_means(names: tuple[str, str]) -> None:
    with pytest.raises(UnsafeName, match="listed twice"):
        check_names(names, "there")


@pytest.mark.parametrize(
    "name", ["data-00000.arrow", "features.f16.npy", "in2c_train_00000.json", "model-00001-of-2.safetensors", "a b"]
)
def test_a_plain_name_passes(name: str) -> None:
    assert check_names([name], "there") == [name]
    assert name_fault(f"{name}/{name}", nested=True) == ""


@given(st.text(max_size=20), st.booleans())
def test_what_passes_stays_in_its_folder(name: str, nested: bool) -> None:
    if not name_fault(name, nested=nested):
        path = Path("/nowhere/folder") / name
        assert path.resolve() == path
        assert path.is_relative_to("/nowhere/folder")
        assert path != Path("/nowhere/folder")
        assert nested or path.parent == Path("/nowhere/folder")


def test_a_link_may_stay_in_its_folder_and_the_folder_may_be_one(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("x")
    (folder / "inside").symlink_to("file")
    (folder / "out").symlink_to(outside / "victim.txt")
    (folder / "gone").symlink_to(outside / "absent")
    (folder / "loop").symlink_to("loop")
    (folder / "dir").symlink_to(outside)
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    (tmp_path / "link").symlink_to(folder)
    for place in (folder, tmp_path / "link"):
        faults = {
            name: place_fault(place, name) for name in ("file", "inside", "absent", "out", "gone", "loop", "dir", "sub", "pipe")
        }
        assert [name for name, fault in faults.items() if not fault] == ["file", "inside", "absent"]
        assert place_fault(place, "dir/victim.txt")
        assert place_fault(place, "dir/absent")


def test_the_hubs_cache_may_link_to_its_blobs_and_nowhere_else(tmp_path: Path, outside: Path) -> None:
    repo = tmp_path / "datasets--org--name"
    snapshot = repo / "snapshots" / "0123"
    (snapshot / "part").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "ab").write_text("x")
    (repo / "other").write_text("x")
    for name, target in {
        "good": "../../blobs/ab",
        "part/good": "../../../blobs/ab",
        "other": "../../other",
        "refs": "../../../outside/victim.txt",
    }.items():
        (snapshot / name).symlink_to(target)
    (repo / "blobs" / "cd").symlink_to(outside / "victim.txt")
    (snapshot / "through").symlink_to("../../blobs/cd")
    found = {name: bool(place_fault(snapshot, name)) for name in ("good", "part/good", "other", "refs", "through")}
    assert found == {"good": False, "part/good": False, "other": True, "refs": True, "through": True}
    assert place_fault(snapshot / "part", "good") == ""
    elsewhere = tmp_path / "moved" / "snapshots" / "0123"
    elsewhere.mkdir(parents=True)
    (tmp_path / "moved" / "blobs").symlink_to(outside)
    (elsewhere / "file").symlink_to("../../blobs/victim.txt")
    assert place_fault(elsewhere, "file")


def test_an_own_folder_has_no_links(tmp_path: Path, outside: Path) -> None:
    assert own_folder(tmp_path / "new", "journal/parts") == tmp_path / "new" / "journal" / "parts"
    (tmp_path / "new" / "journal" / "work").mkdir()
    (tmp_path / "new" / "journal" / "work" / "map").symlink_to(outside)
    with pytest.raises(UnsafeName, match="a symbolic link"):
        own_folder(tmp_path / "new", "journal")
    (tmp_path / "bank").mkdir()
    (tmp_path / "bank" / "journal").symlink_to(outside)
    for name in ("journal", "journal/parts"):
        with pytest.raises(UnsafeName, match="a symbolic link"):
            own_folder(tmp_path / "bank", name)
    assert not (outside / "parts").exists()


# JSON


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_json_within_the_limits_is_read() -> None:
    assert parsed_json(b'{"a": [1, 2.5, "\xc3\xa9", null]}') == {"a": [1, 2.5, "é", None]}
    parsed_json(nested(MAX_JSON_DEPTH))
    assert parsed_json(b'{"a": Infinity, "b": 1, "b": 2}', strict=False) == {"a": float("inf"), "b": 2}
    assert parsed_json(b'"\\ud83d\\ude00"') == "😀"


@pytest.mark.parametrize(
    "data",
    [
        *(nested(MAX_JSON_DEPTH + 1), nested(1000), nested(200_000), b'{"a":' * 100_000, b'{"a":' * 70 + b"1" + b"}" * 70),
        *(b'{"a": 1, "a": 2}', b'[{"b": {"a": 1, "a": 1}}]', b"NaN", b'{"a": -Infinity}', b"1" * 5000, b'"\\ud800"'),
        *(b"", b"{", b"\xff\xfe{", b"\x00" * 9, b'"' + b"x" * 99 + b'"', b"'a'", b"[1,]"),
    ],
    ids=lambda data: short(data[:20]),
)
def test_json_past_the_limits_is_a_corrupt_file(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(CorruptBank, match=r"x\.json: not readable as JSON"):
        read_json(tmp_path / "x.json", max_bytes=max(len(data) - 1, 0) if data.startswith(b'"x') else MAX_JSON_BYTES)


def test_json_that_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptBank, match="not a regular file"):
        read_json(tmp_path / "pipe")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "dataset_info.json", "vocab-4.safetensors"])
def test_a_bank_with_a_named_pipe_in_it_is_not_waited_for(tmp_path: Path, name: str) -> None:
    make_target_bank(tmp_path / "bank")
    (tmp_path / "bank" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "bank" / name)
    # in a process of its own: what waits for the pipe waits for ever
    for verb in (["verify"], ["report", "--out", str(tmp_path / "report.html")]):
        argv = [sys.executable, "-m", "arrowbank", verb[0], str(tmp_path / "bank"), *verb[1:]]
        code = subprocess.run(argv, timeout=60, check=False, capture_output=True).returncode
        assert code in (1, 2) or (verb[0] == "report" and name.startswith("vocab"))  # a report shows no map


def test_an_audit_that_is_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    make_texts(tmp_path / "texts")
    os.mkfifo(tmp_path / "audit.json")
    argv = [sys.executable, "-m", "arrowbank", "report", str(tmp_path / "texts"), "--audit", str(tmp_path / "audit.json")]
    done = subprocess.run(
        [*argv, "--out", str(tmp_path / "page.html")], timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "audit.json" in done.stderr
    assert "not a regular file" in done.stderr


def test_a_source_that_is_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    argv = [
        sys.executable,
        "-m",
        "arrowbank",
        "scan",
        "--source",
        f"t={tmp_path / 'pipe.jsonl'}",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(argv, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pipe.jsonl: not a regular file" in done.stderr


DAMAGES = {
    "deep": nested(100_000),
    "nested": nested(100),
    "twice": b'{"a": 1, "a": 2}',
    **{"object": b"{}", "list": b"[]", "number": b"1", "null": b"null", "empty": b"", "large": b" " * (MAX_JSON_BYTES + 1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "dataset_info.json"])
@pytest.mark.parametrize("data", DAMAGES.values(), ids=DAMAGES)
def test_damaged_json_of_a_bank_is_one_of_our_errors(tmp_path: Path, name: str, data: bytes) -> None:
    make_texts(tmp_path / "texts")
    (tmp_path / "texts" / name).write_bytes(data)
    assert not all(check.ok for check in verify(tmp_path / "texts"))
    assert main(["verify", str(tmp_path / "texts")]) in (1, 2)


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", None, 1 << 63, 10**400], ids=short)
@pytest.mark.parametrize("field", ["rows", "bytes", "shard rows"])
def test_a_count_is_a_count(tmp_path: Path, field: str, value: object) -> None:
    make_texts(tmp_path / "texts")

    def change(manifest: dict[str, Any]) -> None:
        where = manifest if field == "rows" else manifest["files"][0]
        where[field.split()[-1]] = value

    edit(tmp_path / "texts", change)
    with pytest.raises(CorruptBank, match=r"manifest\.json: says nothing usable of"):
        read_manifest(tmp_path / "texts")


# banks: every verb, every kind of name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a feature bank, and its texts and tokens beside it."""
    folder = tmp_path_factory.mktemp("made")
    make_texts(folder / "texts")
    make_tokens(folder / "tokens", folder / "texts")
    encode(EncodeConfig(encoder="tests.banks:TableEncoder", shard_rows=15), folder / "tokens", folder / "bank")
    return folder


@pytest.fixture
def bank(made: Path, tmp_path: Path) -> Path:
    """The feature bank, in a copy of its own."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "bank"


COMMANDS = {
    "verify": ("verify", "{bank}"),
    "info": ("info", "{bank}"),
    "lookup": ("lookup", "{bank}", "a text"),
    "report": ("report", "{bank}", "--out", "{beside}/page.html"),
    "push": ("push", "{bank}", "file://{beside}/pushed"),
    "pull": ("pull", "file://{bank}", "{beside}/pulled"),
    "export": ("export", "{bank}", "--to", "parquet", "--out", "{beside}/exported"),
    "select": ("select", "{bank}", "--where", "kind=query", "--out", "{beside}/selected"),
    "encode": ("encode", "{beside}/tokens", "--encoder", "tests.banks:TableEncoder", "--shard-rows", "15", "--out", "{bank}"),
    "encode --restart": (
        *("encode", "{beside}/tokens", "--encoder", "tests.banks:TableEncoder", "--shard-rows", "15"),
        *("--restart", "--out", "{bank}"),
    ),
    "encode --shards": (
        *("encode", "{beside}/tokens", "--encoder", "tests.banks:TableEncoder", "--shard-rows", "15"),
        *("--shards", "0", "--out", "{bank}"),
    ),
}


def run(verb: str, bank: Path) -> int:
    return main([part.format(bank=bank, beside=bank.parent) for part in COMMANDS[verb]])


def test_the_verbs_do_something_with_a_good_bank(bank: Path) -> None:
    assert {verb: code for verb in COMMANDS if (code := run(verb, bank))} == {"lookup": 1}  # there is no such text


@pytest.mark.parametrize("name", ["../outside/victim.txt", "{outside}/victim.txt", "../texts/data-00000.arrow"])
@pytest.mark.parametrize("verb", COMMANDS)
def test_a_listed_name_never_leads_out_of_the_folder(
    bank: Path, outside: Path, verb: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = bank / name.format(outside=outside)
    list_file(bank, name.format(outside=outside), victim)
    before = tree(bank.parent)
    assert run(verb, bank) in (1, 2)
    said = capsys.readouterr()
    assert "not a plain name in the bank's folder" in said.out + said.err
    after = tree(bank.parent)
    assert {name: after.get(name) for name in before} == before  # nothing is lost, in the folder or outside
    assert all(b"victim" not in data for name, data in after.items() if name not in before)


@pytest.mark.parametrize(
    "what", ["data-00001.arrow", "state.json", "manifest.json", "keys.npy", "dataset_info.json", "journal", "build.jsonl"]
)
@pytest.mark.parametrize("verb", COMMANDS)
def test_a_link_out_of_the_folder_is_not_followed(bank: Path, outside: Path, verb: str, what: str) -> None:
    """The file is moved out, so that its bytes are right, and a link left in its place."""
    (bank / what).rename(outside / f"moved-{what}") if what != "journal" else None
    moved = outside / f"moved-{what}" if what != "journal" else outside
    held = tree(outside)
    (bank / what).symlink_to(moved)
    before = tree(bank.parent)
    code = run(verb, bank)
    assert tree(outside) == held
    if verb.startswith("encode") or what not in ("journal", *["build.jsonl"] * (verb == "pull")):
        assert code in (1, 2)
    after = tree(bank.parent)
    assert {name: after.get(name) for name in before} == before
    if what != "journal":
        moved.unlink()


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("name", ["../outside/victim.txt", "{outside}/victim.txt", "..", "a/b"])
def test_a_scan_deletes_nothing_outside_of_its_folder(
    tmp_path: Path, outside: Path, committed: bool, restart: bool, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_texts(tmp_path / "texts")
    list_file(tmp_path / "texts", name.format(outside=outside))
    if not committed:
        (tmp_path / "texts" / "state.json").unlink()
    (tmp_path / "source.jsonl").write_text(json.dumps({"query": "a text"}) + "\n")
    before = tree(tmp_path)
    argv = [
        "scan",
        "--source",
        f"train={tmp_path / 'source.jsonl'}",
        "--field",
        "query=query",
        "--out",
        str(tmp_path / "texts"),
    ]
    assert main([*argv, *["--restart"] * restart]) == 2
    assert "not a plain name in the bank's folder" in capsys.readouterr().err
    assert {name: data for name, data in tree(tmp_path).items() if "journal/" not in name} == before


# a writer's own folders and files


def build(folder: Path, **options: Any) -> None:
    with BankWriter(folder, kind="texts", recipe={"count": 1}, **options):
        pass


@pytest.mark.parametrize(
    "link",
    ["journal", "journal/lock", "journal/lock-commit", "journal/work", "journal/work/map", "journal/data-00000.arrow.json"],
)
@pytest.mark.parametrize("to", ["", "victim.txt", "absent", "sub"])
@pytest.mark.parametrize("restart", [True, False])
def test_a_writer_writes_through_no_link(tmp_path: Path, outside: Path, link: str, to: str, restart: bool) -> None:
    place = tmp_path / "bank" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(outside / to)
    with pytest.raises(UnsafeName, match="a symbolic link"):
        build(tmp_path / "bank", restart=restart)
    assert place.is_symlink()


@pytest.mark.parametrize("name", ["sub", ".hidden"])
def test_a_sweep_stays_in_the_folder(tmp_path: Path, outside: Path, name: str) -> None:
    build(tmp_path / "bank")
    (tmp_path / "bank" / name).symlink_to(outside)
    (tmp_path / "bank" / ".own.99999999-00000000.tmp").symlink_to(outside / "victim.txt")
    build(tmp_path / "bank", restart=True)
    assert (tmp_path / "bank" / name).is_symlink()


@pytest.mark.parametrize("name", ["build.jsonl", "manifest.json", "state.json", "dataset_info.json", "README.md"])
@pytest.mark.parametrize("restart", [True, False])
def test_a_writer_leaves_what_its_files_link_to(tmp_path: Path, outside: Path, name: str, restart: bool) -> None:
    make_texts(tmp_path / "texts")
    (tmp_path / "texts" / name).unlink()
    (tmp_path / "texts" / name).symlink_to(outside / "victim.txt")
    with (
        pytest.raises(ArrowbankError),
        BankWriter(tmp_path / "texts", kind="texts", recipe={"count": 40}, restart=restart) as bank,
    ):
        bank.log("event")


def test_a_lock_is_no_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "lock").symlink_to(outside / "victim.txt")
    with pytest.raises(InputError, match="a symbolic link"):
        FolderLock(tmp_path)


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if isinstance(name, str)], ids=short)
def test_a_receipt_names_a_file_of_its_bank(tmp_path: Path, outside: Path, name: str) -> None:
    folder = tmp_path / "bank"
    build(folder)
    receipt = {"name": name, "rows": None, "bytes": len(SECRET), "sha256": "0" * 64, "seconds": 0.0}
    receipt["plan_digest"] = json.loads((folder / "manifest.json").read_text())["plan_digest"]
    file = f"{name.replace('/', '%2F')}.json"
    if "\0" in file or "\ud800" in file or len(os.fsencode(file)) > 255:
        (folder / "journal" / "data-00000.arrow.json").write_text(json.dumps(receipt))
        build(folder)  # the receipt of another file than that it is named after is none
        return
    (folder / "journal" / file).write_text(json.dumps(receipt))
    with pytest.raises(CorruptBank):
        build(folder)


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("to", ["victim.txt", "sub", None])
def test_a_receipt_is_of_a_regular_file(tmp_path: Path, outside: Path, restart: bool, to: str | None) -> None:
    """A link out of the folder, or a folder, under the name of a receipt is neither hashed nor deleted."""
    folder = tmp_path / "bank"
    build(folder)
    digest = json.loads((folder / "manifest.json").read_text())["plan_digest"]
    receipt = Receipt(name="a.bin", rows=None, bytes=len(SECRET), sha256=hashlib.sha256(SECRET).hexdigest(), plan_digest=digest)
    Journal(folder, digest).sign(receipt)
    if to is None:
        (folder / "a.bin").mkdir()
    else:
        (folder / "a.bin").symlink_to(outside / to)
    with pytest.raises(UnsafeName):
        build(folder, restart=restart)
    assert (folder / "a.bin").exists()


@pytest.mark.parametrize("change", [{"name": 7}, {"more": 1}, {"name": "other.bin"}, [], None, 7])
def test_a_receipt_that_is_none_vouches_for_nothing(tmp_path: Path, change: Any) -> None:
    folder = tmp_path / "bank"
    build(folder)
    digest = json.loads((folder / "manifest.json").read_text())["plan_digest"]
    receipt: Any = {"name": "a.bin", "rows": None, "bytes": 1, "sha256": "0" * 64, "plan_digest": digest, "seconds": 0.0}
    receipt = {**receipt, **change} if isinstance(change, dict) else change
    (folder / "journal" / "a.bin.json").write_text(json.dumps(receipt))
    with BankWriter(folder, kind="texts", recipe={"count": 1}) as bank:
        assert bank.receipts == {}


@pytest.mark.parametrize(
    "link", ["journal", "journal/parts", "journal/parts/data-00000.arrow", "journal/parts/.cache", "data-00000.arrow"]
)
def test_a_pull_writes_through_no_link(tmp_path: Path, outside: Path, link: str) -> None:
    make_texts(tmp_path / "texts")
    out = tmp_path / "out"
    (out / link).parent.mkdir(parents=True)
    (out / "manifest.json").write_bytes((tmp_path / "texts" / "manifest.json").read_bytes())
    (out / link).symlink_to(outside / "victim.txt" if link.endswith("arrow") else outside)
    with pytest.raises(UnsafeName):
        pull(f"file://{tmp_path / 'texts'}", out)


def test_a_place_to_push_to_is_not_left_by_what_its_manifest_lists(tmp_path: Path, outside: Path) -> None:
    """--restart removes the files that the manifest at the place lists."""
    make_texts(tmp_path / "texts")
    place = tmp_path / "outside-place"
    place.mkdir()
    make_texts(place, 7)
    list_file(place, "../outside/victim.txt", outside / "victim.txt")
    before = tree(place)
    argv = ["push", str(tmp_path / "texts"), f"file://{place}", "--restart"]
    assert main(argv) == 2
    assert tree(place) == before


def test_a_file_of_the_right_name_elsewhere_is_no_file_of_the_bank(tmp_path: Path, outside: Path) -> None:
    with pytest.raises(UnsafeName):
        checked_place(tmp_path, "../outside/victim.txt", "there")
    assert checked_place(tmp_path, "absent", "there") == tmp_path / "absent"
