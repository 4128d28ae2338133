"""Banks fetched from a hub, into a folder and into the cache of `open_bank`: the real client against tests/hub_server.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_from_disk
from hypothesis import given
from hypothesis import strategies as st

from arrowbank import open_bank, pull, push, verify
from arrowbank.bank.manifest import FORMAT
from arrowbank.bank.remote.fetch import parsed_manifest
from arrowbank.errors import CorruptBank, IncompleteBank, InputError, RemoteError
from tests.banks import make_texts
from tests.hub_server import Hub
from tests.kill import cli, kill_at, tree_bytes

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes/text content:DeprecationWarning")

REPO = "org/texts"
ADDRESS = f"hf://datasets/{REPO}"
ROOT = Path(__file__).parents[1]


@pytest.fixture
def pushed(hub: Hub, tmp_path: Path) -> Hub:
    """A hub with a bank of 40 texts in four shards."""
    make_texts(tmp_path / "texts", 40, shard_rows=10)
    push(tmp_path / "texts", REPO)
    hub.gets.clear()
    return hub


def tree(folder: Path) -> dict[str, str]:
    """What is the bank's: without card and plot."""
    return {name: digest for name, digest in tree_bytes(folder).items() if name not in ("README.md", "plot.svg")}


@pytest.mark.slow
def test_a_pulled_bank_is_the_bank(pushed: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = pull(REPO, out)
    assert tree(out) == tree(tmp_path / "texts")
    assert manifest == json.loads((out / "manifest.json").read_text())
    assert (out / "README.md").read_bytes() == pushed.repos[REPO].files["README.md"][0]
    assert (out / "plot.svg").exists()
    assert not (out / "journal").exists()
    assert all(check.ok for check in verify(out))
    assert load_from_disk(str(out))["text"] == load_from_disk(str(tmp_path / "texts"))["text"]


@pytest.mark.slow
def test_a_pull_again_fetches_nothing_large_and_keeps_an_edited_card(pushed: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pull(REPO, out)
    (out / "README.md").write_text("mine")
    before = tree_bytes(out)
    pushed.gets.clear()
    pull(REPO, out)
    assert tree_bytes(out) == before
    assert set(pushed.gets) == {"manifest.json", "state.json"}


@pytest.mark.slow
def test_what_is_damaged_or_gone_here_is_fetched_again(pushed: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pull(REPO, out)
    data = (out / "data-00001.arrow").read_bytes()
    (out / "data-00001.arrow").write_bytes(data[:-1] + b"x")
    (out / "data-00002.arrow").unlink()
    pushed.gets.clear()
    pull(REPO, out)
    assert tree(out) == tree(tmp_path / "texts")
    assert {name for name in pushed.gets if name.endswith(".arrow")} == {"data-00001.arrow", "data-00002.arrow"}


@pytest.mark.slow
def test_a_pull_killed_at_any_moment_does_not_open_and_goes_on(pushed: Hub, tmp_path: Path) -> None:
    """At one moment in 23: the client has many of its own."""
    moment, died = 1, 0
    while True:
        out = tmp_path / f"out-{moment}"
        outcome = kill_at(moment, cli_there, pushed.environment(tmp_path), "pull", REPO, str(out))
        if not outcome.killed:
            assert not outcome.error
            break
        died += 1
        if not (out / "state.json").exists():
            with pytest.raises((InputError, IncompleteBank)):
                open_bank(out)
            with pytest.raises(FileNotFoundError):
                load_from_disk(str(out))
        there = {path.name for path in out.glob("data-*.arrow")}
        pushed.gets.clear()
        pull(REPO, out)
        assert tree(out) == tree(tmp_path / "texts")
        assert not (out / "journal").exists()
        assert not there & set(pushed.gets)
        moment += 23
    assert died > 4


def cli_there(environment: dict[str, str], *argv: str) -> None:
    """The command line in a process of the fork server, which has read its environment before this hub was there."""
    import os

    from huggingface_hub import constants

    os.environ.update(environment)
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
    constants.ENDPOINT = environment["HF_ENDPOINT"]
    constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    cli(*argv)


@pytest.mark.slow
def test_a_bank_that_is_being_mended_does_not_open(pushed: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pull(REPO, out)
    data = (out / "data-00001.arrow").read_bytes()
    (out / "data-00001.arrow").write_bytes(data[:-1] + b"x")
    pushed.refuse = lambda method, path: path.endswith(".arrow")
    with pytest.raises(RemoteError, match=r"data-00001.arrow: this login may not do that"):
        pull(REPO, out)
    with pytest.raises(IncompleteBank):
        open_bank(out)
    pushed.refuse = lambda method, path: False
    pull(REPO, out)
    assert tree(out) == tree(tmp_path / "texts")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data-00003.arrow", "dataset_info.json", "state.json", "manifest.json"])
def test_other_bytes_on_the_hub_never_become_a_bank(pushed: Hub, tmp_path: Path, name: str) -> None:
    pushed.spoil(REPO, name)
    with pytest.raises(CorruptBank, match=name):
        pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out" / "state.json").exists()
    with pytest.raises((InputError, IncompleteBank)):
        open_bank(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../escaped.arrow", "/etc/escaped", "a/b", "..", "state.json", ".hidden", "a\\b", "journal"])
def test_a_manifest_that_reaches_out_of_its_folder_is_refused(pushed: Hub, tmp_path: Path, name: str) -> None:
    files = pushed.repos[REPO].files
    manifest = json.loads(files["manifest.json"][0])
    manifest["files"][0]["name"] = name
    pushed.edit(REPO, {"manifest.json": (json.dumps(manifest).encode(), False), name: files["data-00000.arrow"]})
    before = tree_bytes(tmp_path)
    with pytest.raises(CorruptBank, match="not a plain name in the bank's folder"):
        pull(REPO, tmp_path / "out")
    assert {name: digest for name, digest in tree_bytes(tmp_path).items() if not name.startswith("hf/")} == before


def test_a_manifest_that_was_edited_is_refused_before_a_file_is_fetched(pushed: Hub, tmp_path: Path) -> None:
    files = pushed.repos[REPO].files
    manifest = json.loads(files["manifest.json"][0]) | {"train_sha256": "0" * 64}
    pushed.edit(REPO, {"manifest.json": (json.dumps(manifest).encode(), False)})
    with pytest.raises(CorruptBank, match=r"org/texts.*/manifest\.json: .*changed after the bank was committed"):
        pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def a_manifest(**entry: object) -> bytes:
    """A manifest of one file, of which `entry` may say something else."""
    file = {"name": "data-00000.arrow", "rows": 1, "bytes": 1, "sha256": "0" * 64, **entry}
    fields = {"format": FORMAT, "kind": "texts", "plan_digest": "0" * 64, "recipe": {}, "rows": 1, "complete": True}
    return json.dumps({**fields, "files": [file]}).encode()


@pytest.mark.parametrize("entry", [{"bytes": "1"}, {"bytes": 1.5}, {"bytes": None}, {"sha256": "x"}, {"sha256": 7}])
def test_a_file_in_a_manifest_has_bytes_and_a_sha256(entry: dict[str, object]) -> None:
    assert parsed_manifest(a_manifest(), "there")["rows"] == 1
    with pytest.raises(CorruptBank, match=r"says nothing usable of files\[0\]"):
        parsed_manifest(a_manifest(**entry), "there")


@given(st.text(max_size=12) | st.integers() | st.none())
def test_any_name_that_passes_stays_in_its_folder(name: object) -> None:
    try:
        parsed_manifest(a_manifest(name=name), "there")
    except CorruptBank:
        return
    folder = Path("/bank")
    assert isinstance(name, str)
    assert (folder / name).resolve().parent == folder


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.dictionaries(st.text(max_size=5), inner)))
def test_a_malformed_manifest_is_one_of_our_errors(value: object) -> None:
    found = {"format": FORMAT, **value} if isinstance(value, dict) else value
    with pytest.raises((CorruptBank, InputError)):
        parsed_manifest(json.dumps(found).encode(), "there")


@pytest.mark.slow
def test_another_bank_here_is_left_as_it_is(pushed: Hub, tmp_path: Path) -> None:
    make_texts(tmp_path / "out", 7)
    before = tree_bytes(tmp_path / "out")
    with pytest.raises(InputError, match="holds another bank than hf://datasets/org/texts, and was left as it is"):
        pull(REPO, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"holds files that are not arrowbank's \(thesis.tex"):
        pull(REPO, tmp_path / "mine")
    assert tree_bytes(tmp_path / "out") == before
    assert tree_bytes(tmp_path / "mine").keys() == {"thesis.tex"}


@pytest.mark.slow
def test_a_revision_is_a_commit_or_a_tag(pushed: Hub, tmp_path: Path) -> None:
    pushed.repos[REPO].tags["v1"] = pushed.repos[REPO].head
    pushed.edit(REPO, {"state.json": (b"{}", False)})
    with pytest.raises(CorruptBank):
        pull(REPO, tmp_path / "now")
    pull(REPO, tmp_path / "tag", revision="v1")
    pull(f"{ADDRESS}@{pushed.repos[REPO].tags['v1']}", tmp_path / "commit")
    assert tree(tmp_path / "tag") == tree(tmp_path / "commit") == tree(tmp_path / "texts")
    with pytest.raises(InputError, match="has no such revision"):
        pull(REPO, tmp_path / "none", revision="v2")
    with pytest.raises(InputError, match="names the revision v1, and --revision v2"):
        pull(f"{ADDRESS}@v1", tmp_path / "both", revision="v2")


def test_what_is_no_bank_is_said_so(pushed: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no such dataset repository, or this login may not see it"):
        pull("org/absent", tmp_path / "out")
    del pushed.repos[REPO].files["manifest.json"]
    with pytest.raises(InputError, match=r"no bank there \(no manifest.json\)"):
        pull(REPO, tmp_path / "out")
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(InputError, match="this login may not see it"):
        pull(REPO, tmp_path / "out")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteError, match="HF_HUB_OFFLINE is set"):
        pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_address_is_fetched_once_and_opened_from_the_cache(pushed: Hub, tmp_path: Path) -> None:
    bank = open_bank(ADDRESS, expect={"text_count": 40})
    assert bank.folder.parent == tmp_path / "cache"
    assert tree(bank.folder) == tree(tmp_path / "texts")
    pushed.gets.clear()
    assert open_bank(ADDRESS).folder == bank.folder
    assert set(pushed.gets) == {"manifest.json"}
    assert all(check.ok for check in verify(ADDRESS))
    pushed.repos[REPO].tags["v1"] = pushed.repos[REPO].head
    assert open_bank(f"{ADDRESS}@v1").folder != bank.folder


@pytest.mark.slow
def test_offline_the_bank_that_was_fetched_is_opened(pushed: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_bank(ADDRESS).folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert open_bank(ADDRESS).folder == folder
    with pytest.raises(RemoteError, match="HF_HUB_OFFLINE is set"):
        open_bank(f"{ADDRESS}@v1")


@pytest.mark.slow
def test_a_bank_that_changed_is_fetched_anew(pushed: Hub, tmp_path: Path) -> None:
    from arrowbank import PushConfig

    old = open_bank(ADDRESS)
    make_texts(tmp_path / "other", 5)
    push(tmp_path / "other", REPO, PushConfig(restart=True))
    assert len(open_bank(ADDRESS)) == 5
    assert len(old) == 40
    assert len(list((tmp_path / "cache").glob("*/state.json"))) == 2


@pytest.mark.slow
def test_a_cached_bank_that_was_not_fetched_to_its_end_goes_on(pushed: Hub, tmp_path: Path) -> None:
    folder = open_bank(ADDRESS).folder
    (folder / "state.json").unlink()
    (folder / "data-00001.arrow").unlink()
    pushed.gets.clear()
    assert len(open_bank(ADDRESS)) == 40
    assert [name for name in pushed.gets if name.endswith(".arrow")] == ["data-00001.arrow"]


@pytest.mark.slow
def test_two_processes_that_open_an_address_fetch_it_once(pushed: Hub) -> None:
    code = f"from arrowbank import open_bank; print(len(open_bank({ADDRESS!r})))"
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120) for process in both] == [("40\n", "")] * 2
    assert pushed.gets.count("data-00000.arrow") == 1


@pytest.mark.slow
def test_progress_counts_every_byte_once(pushed: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from arrowbank.cli import main

    assert main(["pull", REPO, str(tmp_path / "out"), "--json"]) == 0
    out, err = capfd.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    total = sum(entry["bytes"] for entry in events[-1]["manifest"]["files"])
    assert [(event["phase"], event.get("done"), event.get("total")) for event in events[:-1]][-1] == ("pull", total, total)
    assert err == ""  # nor does the client draw bars of its own
