"""Banks pushed to a hub and what lies there then: the real client against a server of our own (tests/hub_server.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from arrowbank import PushConfig, open_bank, pull, push
from arrowbank.bank import BankWriter
from arrowbank.errors import CorruptBank, IncompleteBank, InputError, PlanMismatch, RemoteError
from arrowbank.share import destinations as hub_place
from tests.banks import make_texts
from tests.hub_server import Hub
from tests.kill import tree_bytes

# the hub's client hands files to its HTTP library in a way that the library would rather not see
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes/text content:DeprecationWarning")

REPO = "org/texts"
SHARDS = [f"data-{index:05d}.arrow" for index in range(4)]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    """40 texts in four shards."""
    make_texts(tmp_path / "texts", 40, shard_rows=10)
    return tmp_path / "texts"


def sha256_of(bank: Path) -> dict[str, str]:
    entries = json.loads((bank / "manifest.json").read_text())["files"]
    return {entry["name"]: entry["sha256"] for entry in entries}


def here(hub: Hub, repo: str = REPO) -> set[str]:
    return set(hub.repos[repo].files) - {".gitattributes"}


def test_a_pushed_bank_is_the_bank_and_is_private(hub: Hub, bank: Path) -> None:
    (bank / "notes.txt").write_text("mine")
    (bank / ".data-00000.arrow.77.tmp").write_bytes(b"half")
    done = push(bank, REPO)
    listed = set(sha256_of(bank))
    assert here(hub) == listed | {"manifest.json", "state.json", "README.md", "plot.svg"}
    for name in listed | {"manifest.json", "state.json"}:
        assert hub.repos[REPO].files[name][0] == (bank / name).read_bytes()
    assert hub.repos[REPO].private
    assert (done["private"], done["kept"], done["rows"]) == (True, 0, 40)
    assert done["commit"] == hub.repos[REPO].head
    assert len(hub.puts) == len(SHARDS)  # all else is text


@pytest.mark.slow
def test_a_push_again_sends_nothing(hub: Hub, bank: Path) -> None:
    push(bank, REPO)
    commits, puts = list(hub.repos[REPO].commits), list(hub.puts)
    done = push(bank, f"hf://datasets/{REPO}")
    assert done["sent"] == []
    assert (list(hub.repos[REPO].commits), hub.puts) == (commits, puts)


@pytest.mark.slow
def test_public_is_asked_for_and_never_changed(hub: Hub, bank: Path) -> None:
    push(bank, REPO)
    with pytest.raises(InputError, match="is there already and is private; a push does not change that"):
        push(bank, REPO, PushConfig(public=True))
    assert hub.repos[REPO].private
    push(bank, "org/open", PushConfig(public=True))
    assert not hub.repos["org/open"].private
    with pytest.raises(InputError, match=r"is there already and is public; a push does not change that. Either give --public"):
        push(bank, "org/open")
    assert not hub.repos["org/open"].private


def test_a_bank_that_is_not_committed_is_refused(hub: Hub, bank: Path) -> None:
    (bank / "state.json").unlink()
    with pytest.raises(IncompleteBank, match="not committed"):
        push(bank, REPO)
    assert not hub.repos


def test_a_bank_that_fails_its_proof_is_refused(hub: Hub, bank: Path) -> None:
    path = bank / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-9] + b"\1" + path.read_bytes()[-8:])
    with pytest.raises(CorruptBank, match=r"fails its own proof. hashes: .* data-00001.arrow"):
        push(bank, REPO)
    assert not hub.repos


def test_the_commit_comes_last_and_with_its_card(hub: Hub, bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_place, "PIECE_FILES", 3)
    push(bank, REPO)
    history = [set(files) - {".gitattributes"} for files in hub.repos[REPO].commits.values()]
    cards = [files["README.md"][0] for files in list(hub.repos[REPO].commits.values())[1:]]
    assert history[:2] == [set(), {"manifest.json", "README.md"}]
    assert [("state.json" in names) for names in history] == [False] * (len(history) - 1) + [True]
    assert all(set(SHARDS) <= names for names in history[-2:])
    assert len(history) == 2 + 2 + 1  # five listed files in pieces of three
    assert all(b"this-push-has-not-ended" in card for card in cards[:-1])
    assert b"data-*.arrow" in cards[-1]


@pytest.mark.slow
def test_what_is_committed_is_not_sent_again(hub: Hub, bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_place, "PIECE_FILES", 2)
    hub.refuse = lambda method, path: path.endswith("/batch") and len(hub.puts) >= 2
    with pytest.raises(RemoteError, match=r"this login may not do that .*You may not do that"):
        push(bank, REPO)
    assert set(SHARDS[:2]) <= here(hub)
    assert not {*SHARDS[2:], "state.json"} & here(hub)
    with pytest.raises(IncompleteBank, match="a push to it has not ended"):
        pull(REPO, bank.parent / "out")
    with pytest.raises(IncompleteBank, match="a push to it has not ended"):
        open_bank(f"hf://datasets/{REPO}")
    first = set(hub.puts)
    hub.store.clear()  # what no commit names is not kept for ever
    hub.refuse = lambda method, path: False
    done = push(bank, REPO)
    assert len(hub.puts) == len(set(hub.puts)) == len(SHARDS)
    assert first < set(hub.puts)
    assert not set(SHARDS[:2]) & set(done["sent"])


@pytest.mark.slow
def test_a_dropped_connection_is_tried_again(hub: Hub, bank: Path) -> None:
    third, dropped = sha256_of(bank)[SHARDS[2]], threading.Event()

    def once(sha256: str) -> bool:
        again = dropped.is_set()
        if sha256 == third:
            dropped.set()
        return sha256 == third and not again

    hub.hang_up = once
    push(bank, REPO)
    assert dropped.is_set()
    assert {*SHARDS, "state.json"} <= here(hub)


@pytest.mark.slow
def test_a_killed_push_goes_on_and_sends_no_finished_file_again(hub: Hub, bank: Path) -> None:
    """The process is killed while the third shard is sent and the others are there."""
    third, reached, go_on = sha256_of(bank)[SHARDS[2]], threading.Event(), threading.Event()

    def wait(sha256: str) -> bool:
        if sha256 == third and not go_on.is_set():
            while len(hub.puts) < len(SHARDS) - 1:
                time.sleep(0.01)
            reached.set()
            go_on.wait(60)
            return True
        return False

    hub.hang_up = wait
    process = subprocess.Popen([sys.executable, "-m", "arrowbank", "push", str(bank), REPO], cwd=ROOT, stderr=subprocess.PIPE)
    try:
        assert reached.wait(60)
    finally:
        process.kill()
        process.communicate()
        go_on.set()
    assert "state.json" not in here(hub)
    before = list(hub.puts)
    push(bank, REPO)
    assert {*SHARDS, "state.json"} <= here(hub)
    assert hub.puts[: len(before)] == before
    assert hub.puts[len(before)] == third
    assert len(hub.puts) == len(SHARDS)  # all else is text
    pull(REPO, bank.parent / "out")
    assert tree_bytes(bank).items() - tree_bytes(bank.parent / "out").items() == {("README.md", tree_bytes(bank)["README.md"])}


@pytest.mark.slow
def test_a_file_that_arrives_otherwise_is_an_error_and_is_sent_again(hub: Hub, bank: Path) -> None:
    second = sha256_of(bank)[SHARDS[1]]
    hub.garbled = {second}
    with pytest.raises(
        CorruptBank, match=rf"{REPO}/data-00001.arrow: .* bytes of sha256 .*, the manifest says .*{second[:12]}"
    ):
        push(bank, REPO)
    assert "state.json" not in here(hub)
    hub.garbled, hub.puts = set(), []
    del hub.store[second]
    done = push(bank, REPO)
    assert done["sent"][0] == SHARDS[1]
    assert hub.puts.count(second) == 1
    assert "state.json" in here(hub)


@pytest.mark.slow
@pytest.mark.parametrize("name", [SHARDS[3], "dataset_info.json"])
def test_damage_on_the_hub_is_found_and_mended_by_a_push(hub: Hub, bank: Path, name: str) -> None:
    push(bank, REPO)
    hub.spoil(REPO, name)
    with pytest.raises(CorruptBank, match=f"{REPO}/{name}: "):
        pull(REPO, bank.parent / "out")
    hub.store.clear()
    done = push(bank, REPO)
    assert set(done["sent"]) == {name, "state.json"}
    assert ["state.json" in files for files in list(hub.repos[REPO].commits.values())[-3:]] == [False, False, True]
    pull(REPO, bank.parent / "out")


@pytest.mark.slow
def test_another_bank_is_replaced_only_when_asked(hub: Hub, bank: Path, tmp_path: Path) -> None:
    push(bank, REPO)
    make_texts(tmp_path / "other", 20, shard_rows=10)
    before = dict(hub.repos[REPO].files)
    with pytest.raises(PlanMismatch, match=r"holds another bank, or this one from another run. Give --restart"):
        push(tmp_path / "other", REPO)
    assert hub.repos[REPO].files == before
    sent = push(tmp_path / "other", REPO, PushConfig(restart=True))["sent"]
    assert {name for name in here(hub) if name.endswith(".arrow")} == set(SHARDS[:2])
    assert "state.json" in sent
    assert all("state.json" not in files for files in list(hub.repos[REPO].commits.values())[-3:-1])
    pull(REPO, tmp_path / "out")


@pytest.mark.slow
def test_a_strange_shard_beside_the_bank_is_refused(hub: Hub, bank: Path) -> None:
    push(bank, REPO)
    hub.edit(REPO, {"data-00009.arrow": (b"rows of another", True)})
    with pytest.raises(PlanMismatch, match=r"a shard data-00009.arrow that is not this bank's"):
        push(bank, REPO)
    push(bank, REPO, PushConfig(restart=True))
    assert "data-train.arrow" not in here(hub)


def test_a_repository_with_other_files_is_refused(hub: Hub, bank: Path) -> None:
    push(bank, REPO)
    del hub.repos[REPO].files["manifest.json"]
    with pytest.raises(InputError, match=r"holds data-00000.arrow, and no manifest.json"):
        push(bank, REPO, PushConfig(restart=True))


@pytest.mark.slow
def test_an_edited_card_is_kept_until_a_restart(hub: Hub, bank: Path) -> None:
    push(bank, REPO)
    card = hub.repos[REPO].files["README.md"][0] + b"\nAsk Ada.\n"
    hub.edit(REPO, {"README.md": (card, False)})
    push(bank, REPO)
    assert hub.repos[REPO].files["README.md"][0] == card
    done = push(bank, REPO, PushConfig(restart=True, license="cc-by-4.0"))
    assert done["sent"] == ["README.md"]
    assert hub.repos[REPO].files["README.md"][0].startswith(b"---\nlicense: cc-by-4.0\n")


@pytest.mark.slow
def test_a_grown_bank_sends_only_what_is_new(hub: Hub, tmp_path: Path) -> None:
    """Old shards keep their bytes; the hub has them."""
    make_texts(tmp_path / "texts", 20, shard_rows=10)
    push(tmp_path / "texts", REPO)
    make_texts(tmp_path / "texts", 30, shard_rows=10)
    hub.puts.clear()
    push(tmp_path / "texts", REPO, PushConfig(restart=True))
    digests = sha256_of(tmp_path / "texts")
    assert not {digests[SHARDS[0]], digests[SHARDS[1]]} & set(hub.puts)
    assert digests[SHARDS[2]] in hub.puts


@pytest.mark.slow
def test_the_token_is_sent_and_written_nowhere(hub: Hub, bank: Path, tmp_path: Path) -> None:
    hub.refuse = lambda method, path: path.endswith("/forbidden/commit/main")
    hub.complaint = f"{hub.token} may not do that"  # a server that talks too much

    def run(*argv: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "arrowbank", *argv], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, said = run("push", str(bank), REPO, "--json")
    assert code == 0
    more = [run("push", str(bank), "org/forbidden", "--debug"), run("pull", REPO, str(tmp_path / "out"))]
    assert [code for code, _ in more] == [1, 0]
    assert "Traceback" in more[0][1]
    assert "*** may not do that" in more[0][1]
    assert f"Bearer {hub.token}" in hub.authorizations
    stored = [data for repo in hub.repos.values() for files in repo.commits.values() for data, _ in files.values()]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [data for data in [*stored, *written] if hub.token.encode() in data]
    assert hub.token not in said + more[0][1] + more[1][1]
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert events[-1]["phase"] == "done"
    assert events[-1]["manifest"]["private"] is True
    assert {"verify", "push"} <= {event["phase"] for event in events}


def test_without_a_login_nothing_is_begun(hub: Hub, bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(bank.parent / "no-token"))
    with pytest.raises(InputError, match="no login for the hub here"):
        push(bank, REPO)
    assert not hub.repos


@pytest.mark.parametrize("license", ["", "my own", "a: b", "x\ny"])
def test_a_license_is_an_identifier(license: str) -> None:
    with pytest.raises(InputError, match="expected an identifier"):
        PushConfig(license=license)


def test_a_bank_whose_manifest_vouches_for_its_card_is_refused(hub: Hub, bank: Path) -> None:
    manifest = json.loads((bank / "manifest.json").read_text())
    card = (bank / "README.md").stat().st_size
    manifest["files"].append({"name": "README.md", "rows": None, "bytes": card, "sha256": "0" * 64})
    (bank / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptBank, match=r"README\.md"):
        push(bank, REPO)


def test_an_empty_bank_folder_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        push(tmp_path / "absent", REPO)


def test_a_push_goes_to_no_other_branch(hub: Hub, bank: Path) -> None:
    with pytest.raises(InputError, match="a push goes to the main branch"):
        push(bank, f"hf://datasets/{REPO}@dev")


def test_a_build_that_goes_on_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    with BankWriter(tmp_path / "begun", kind="texts", recipe={}):
        pass
    with pytest.raises(IncompleteBank):
        push(tmp_path / "begun", REPO)
