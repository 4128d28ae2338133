"""Banks at fsspec addresses: in memory, on a disk, and on S3 (moto's server and the real s3fs)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowbank import PushConfig, open_bank, pull, push
from arrowbank.bank.remote.addresses import parse_address
from arrowbank.cli import main
from arrowbank.errors import (
    ArrowbankError,
    CorruptBank,
    IncompleteBank,
    InputError,
    MissingDependency,
    PlanMismatch,
    RemoteError,
)
from arrowbank.share.destinations import ObjectPlace
from tests import s3_server
from tests.banks import make_texts
from tests.kill import tree_bytes

MEMORY = "memory://banks/texts"
SHARDS = [f"data-{index:05d}.arrow" for index in range(4)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ARROWBANK_CACHE", str(tmp_path / "cache"))
    yield
    memory().store.clear()


def memory() -> fsspec.AbstractFileSystem:
    return fsspec.filesystem("memory")


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    make_texts(tmp_path / "texts", 40, shard_rows=10)
    return tmp_path / "texts"


def tree(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree_bytes(folder).items() if name not in ("README.md", "plot.svg")}


def spoil(name: str) -> None:
    path = f"/banks/texts/{name}"
    data = memory().cat_file(path)
    memory().pipe_file(path, bytes([data[0] ^ 1]) + data[1:])


@pytest.mark.parametrize("place", ["memory://banks/texts", "file://{folder}/there/texts", "memory://banks/texts/"])
def test_there_and_back(bank: Path, tmp_path: Path, place: str) -> None:
    address = place.format(folder=tmp_path)
    done = push(bank, address)
    assert done["kept"] == 0
    assert set(done["sent"]) >= {"manifest.json", "state.json", "README.md", *SHARDS}
    assert done["sent"][-1] == "state.json"
    pull(address, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(bank)
    assert len(open_bank(address)) == 40
    assert push(bank, address)["sent"] == []
    card = (tmp_path / "out" / "README.md").read_text()
    assert f'open_bank("{done["address"]}")' in card
    assert "load_dataset" not in card


def test_a_folder_of_this_machine_is_opened_where_it_is(bank: Path) -> None:
    assert open_bank(f"file://{bank}").folder == bank


def test_a_push_goes_on_after_a_refusal(bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    put = type(memory()).put_file

    def put_some(self: fsspec.AbstractFileSystem, local: str, remote: str, **options: object) -> None:
        if len(sent) == 2:
            raise PermissionError(f"no more today: {remote}")
        sent.append(Path(remote).name)
        put(self, local, remote, **options)

    monkeypatch.setattr("arrowbank.bank.remote.stores.AT_ONCE", 1)
    monkeypatch.setattr(type(memory()), "put_file", put_some)
    with pytest.raises(RemoteError, match="PermissionError: no more today"):
        push(bank, MEMORY)
    for refused in (lambda: pull(MEMORY, tmp_path / "out"), lambda: open_bank(MEMORY)):
        with pytest.raises(IncompleteBank, match="a push to it has not ended"):
            refused()
    monkeypatch.setattr(type(memory()), "put_file", put)
    done = push(bank, MEMORY)
    assert len(sent) == 2
    assert not set(sent) & set(done["sent"])
    pull(MEMORY, tmp_path / "out")


def test_what_was_written_is_read_back(bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = type(memory()).put_file

    def put_otherwise(self: fsspec.AbstractFileSystem, local: str, remote: str, **options: object) -> None:
        put(self, local, remote, **options)
        if remote.endswith(SHARDS[1]):
            spoil(SHARDS[1])

    monkeypatch.setattr(type(memory()), "put_file", put_otherwise)
    with pytest.raises(CorruptBank, match=rf"{MEMORY}/data-00001.arrow: .* bytes of other contents, the manifest says"):
        push(bank, MEMORY)
    assert not memory().exists("/banks/texts/state.json")
    push(bank, MEMORY, PushConfig(read_back=False))  # sizes are right: the pull will tell
    with pytest.raises(CorruptBank, match=SHARDS[1]):
        pull(MEMORY, tmp_path / "out")
    monkeypatch.setattr(type(memory()), "put_file", put)
    assert set(push(bank, MEMORY)["sent"]) == {SHARDS[1], "state.json"}
    pull(MEMORY, tmp_path / "out")


def test_a_partial_file_goes_on_where_it_stopped(bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arrowbank.bank.remote.objects.BLOCK", 256)
    push(bank, MEMORY)
    got: list[tuple[str, int | None]] = []
    cat = type(memory()).cat_file

    def cat_some(self: fsspec.AbstractFileSystem, path: str, start: int | None = None, end: int | None = None) -> bytes:
        got.append((Path(path).name, start))
        if len(got) == stop:
            raise ConnectionResetError("the line went dead")
        return cat(self, path, start=start, end=end)

    monkeypatch.setattr(type(memory()), "cat_file", cat_some)
    monkeypatch.setattr("arrowbank.bank.remote.stores.AT_ONCE", 1)
    stop = 6
    with pytest.raises(RemoteError, match="the line went dead"):
        pull(MEMORY, tmp_path / "out")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out" / "journal" / "parts").iterdir()}
    name, size = max(sizes.items(), key=lambda item: item[1])  # the next one may have begun as well
    assert 0 < size < (bank / name).stat().st_size
    with pytest.raises(IncompleteBank):
        open_bank(tmp_path / "out")
    stop = 0
    got.clear()
    pull(MEMORY, tmp_path / "out")
    assert min(start for file, start in got if file == name and start is not None) == size
    assert tree(tmp_path / "out") == tree(bank)


def test_one_failure_ends_the_other_downloads(bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(bank, MEMORY)
    monkeypatch.setattr("arrowbank.bank.remote.objects.BLOCK", 16)
    failed, cat = threading.Event(), type(memory()).cat_file

    def cat_some(self: fsspec.AbstractFileSystem, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if path.endswith(SHARDS[3]):
            failed.set()
            raise ConnectionResetError("the line went dead")
        if ".arrow" in path:
            failed.wait(30)
            time.sleep(0.2)
        return cat(self, path, start=start, end=end)

    monkeypatch.setattr(type(memory()), "cat_file", cat_some)
    with pytest.raises(RemoteError, match="the line went dead"):
        pull(MEMORY, tmp_path / "out")
    parts = {path.name: path.stat().st_size for path in (tmp_path / "out" / "journal" / "parts").iterdir()}
    assert set(SHARDS[:3]) <= set(parts)
    assert all(parts[name] < (bank / name).stat().st_size for name in SHARDS)


def test_another_bank_there_is_kept_until_a_restart(bank: Path, tmp_path: Path) -> None:
    push(bank, MEMORY)
    make_texts(tmp_path / "other", 15, shard_rows=10)
    with pytest.raises(PlanMismatch, match="holds another bank"):
        push(tmp_path / "other", MEMORY)
    push(tmp_path / "other", MEMORY, PushConfig(restart=True))
    assert {name.rpartition("/")[2] for name in memory().ls("/banks/texts", detail=False)} >= {*SHARDS[:2], "state.json"}
    assert not memory().exists(f"/banks/texts/{SHARDS[3]}")
    assert len(open_bank(MEMORY)) == 15


def test_a_card_that_somebody_wrote_there_is_not_lost(bank: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "README.md").write_text("mine")
    with pytest.raises(InputError, match=r"holds README\.md"):
        push(bank, f"file://{tmp_path / 'there'}")
    assert [(path.name, path.read_text()) for path in (tmp_path / "there").iterdir()] == [("README.md", "mine")]


def test_public_is_the_hubs(bank: Path) -> None:
    with pytest.raises(InputError, match="--public is for repositories on the hub"):
        push(bank, MEMORY, PushConfig(public=True))


def test_nothing_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="memory://nowhere: no bank there"):
        pull("memory://nowhere", tmp_path / "out")
    with pytest.raises(InputError, match="has no revisions"):
        pull(MEMORY, tmp_path / "out", revision="main")
    with pytest.raises(InputError, match="Protocol not known: nosuch"):
        open_bank("nosuch://a/b")


def test_without_s3fs_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    for call in (lambda: open_bank("s3://bucket/bank"), lambda: pull("s3://bucket/bank", tmp_path / "out")):
        with pytest.raises(MissingDependency, match=r"pip install 'arrowbank\[s3\]'"):
            call()


# addresses


@pytest.mark.parametrize(
    ("value", "repo", "revision", "url"),
    [
        ("org/name", "org/name", None, ""),
        ("hf://datasets/org/name", "org/name", None, ""),
        ("hf://datasets/org/na.me@refs/pr/1", "org/na.me", "refs/pr/1", ""),
        ("s3://bucket/a/prefix/", "", None, "s3://bucket/a/prefix"),
        ("memory://x", "", None, "memory://x"),
    ],
)
def test_addresses(value: str, repo: str, revision: str | None, url: str) -> None:
    found = parse_address(value)
    assert (found.repo, found.revision, found.url) == (repo, revision, url)


@pytest.mark.parametrize(
    "value",
    [
        "name",
        "./folder",
        "../a/b",
        "a/b/c",
        "/tmp/bank",
        "",
        "hf://org/name",
        "hf://datasets/name",
        "hf://datasets/a/b/c",
        "a b/c",
    ],
)
def test_what_is_no_address_is_refused(value: str) -> None:
    with pytest.raises(InputError, match="expected"):
        parse_address(value)


@given(st.text(max_size=30) | st.from_regex(r"hf://[a-z/@.]*", fullmatch=True))
def test_parsing_any_text_gives_an_address_or_our_error(value: str) -> None:
    try:
        found = parse_address(value)
    except ArrowbankError:
        return
    assert bool(found.repo) != bool(found.url)
    assert parse_address(found.shown).shown == found.shown


def test_a_password_in_an_address_is_not_shown(tmp_path: Path) -> None:
    place = ObjectPlace(parse_address("memory://ada:secret@host/bank"), read_back=True)
    assert place.shown == "memory://host/bank"
    with pytest.raises(InputError) as found:
        pull("memory://ada:secret@host/bank", tmp_path / "out")
    assert "secret" not in str(found.value)


# S3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A bucket on a server of this test's own, with the credentials for it in the environment."""
    with s3_server.serving(monkeypatch, tmp_path, AWS_ACCESS_KEY_ID="ada", AWS_SECRET_ACCESS_KEY="lovelace") as address:
        yield address


@pytest.mark.slow
def test_a_bank_on_s3_is_pushed_pulled_opened_and_loaded(bucket: str, bank: Path, tmp_path: Path) -> None:
    import datasets

    address = f"{bucket}/ada/texts"
    assert main(["push", str(bank), address]) == 0
    assert main(["pull", address, str(tmp_path / "out")]) == 0
    assert tree(tmp_path / "out") == tree(bank)
    assert open_bank(address).dataset["text"] == datasets.load_from_disk(address)["text"]
    assert push(bank, address)["sent"] == []
    spoil_object("ada/texts/data-00002.arrow")
    with pytest.raises(CorruptBank, match=r"data-00002\.arrow"):
        pull(address, tmp_path / "other")
    assert set(push(bank, address)["sent"]) == {"data-00002.arrow", "state.json"}
    with pytest.raises(RemoteError, match=r"NoSuchBucket|bucket does not exist"):
        push(bank, "s3://nobodys/texts")


def spoil_object(key: str) -> None:
    import boto3

    client = boto3.client("s3")
    data = client.get_object(Bucket="banks", Key=key)["Body"].read()
    client.put_object(Bucket="banks", Key=key, Body=bytes([data[0] ^ 1]) + data[1:])
    client.close()


@pytest.mark.slow
def test_a_push_to_s3_that_was_killed_goes_on(bucket: str, bank: Path) -> None:
    code = (
        "import os, s3fs\nfrom arrowbank import push\nfrom arrowbank.bank.remote import stores\nstores.AT_ONCE = 1\nput, sent = "
        "s3fs.S3FileSystem.put_file, []\ndef killed(self, *args, **options):\n    sent.append(args)\n    len(sent) == 3 and "
        f"os.kill(os.getpid(), 9)\n    return put(self, *args, **options)\ns3fs.S3FileSystem.put_file = killed\npush({str(bank)!r}, "
        f"{bucket + '/texts'!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, check=False)
    assert done.returncode == -9
    with pytest.raises(IncompleteBank):
        open_bank(f"{bucket}/texts")
    done_now = push(bank, f"{bucket}/texts")
    assert done_now["kept"] == 3  # manifest and two shards
    assert json.loads((open_bank(f"{bucket}/texts").folder / "manifest.json").read_text())["rows"] == 40


@pytest.mark.parametrize(
    "address",
    [
        *("x://a/b", "://a", "1://a", "github://a", "simplecache://a", "zip://a", "dir://a", "https://[::1/a"),
        # fsspec's own chains of stores end in folders of this machine
        *("simplecache://[::1", "filecache://a::b", "s3://::file://b", "dir://a::b/c", "simplecache::file://b", "zip://a::b"),
    ],
)
def test_an_address_of_no_store_is_refused_and_makes_no_folder_here(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_texts(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    for argv in (["push", "texts", address], ["pull", address, "pulled"], ["verify", address]):
        assert main(argv) in (1, 2)
        said = capsys.readouterr()
        assert address.partition("://")[0] in said.out + said.err
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_two_colons_in_a_name_are_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_texts(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    address = "memory://a::b/c::d"
    assert main(["push", "texts", address]) == 0
    assert main(["pull", address, "pulled"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pulled", "texts"]
    assert (tmp_path / "pulled/manifest.json").read_bytes() == (tmp_path / "texts/manifest.json").read_bytes()


@pytest.mark.parametrize("address", ["ftp:///x", "ftp://#f", "ftp://::/[::1/x", "sftp:///x", "sftp://:22/x", "https:///x"])
def test_a_server_without_a_name_is_refused_before_its_client_is_made(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["pull", address, "pulled"], ["verify", address]):
        assert main(argv) == 2
        assert "names no host" in capsys.readouterr().err
