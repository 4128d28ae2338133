"""Nothing is deleted without --restart, --restart deletes only what is of the kind being written, and a power cut costs a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from arrowbank import (
    TokenizeConfig,
    open_bank,
    tokenize,
)
from arrowbank.bank.verify import verify
from arrowbank.errors import ArrowbankError, CorruptBank, PlanMismatch
from tests import joined_banks
from tests.kill import kill_at, tree_bytes
from tests.test_bank import write as write_things

OTHER = {"from": "other settings"}


def write(folder: Path, **options: object) -> None:
    write_things(folder, **options)  # type: ignore[arg-type]


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of each shard: of one that was not written again they are as they were."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("data-*.arrow")}


# a bank without its commit


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A bank of which only state.json has not been copied yet."""
    write(tmp_path / "bank")
    shutil.copytree(tmp_path / "bank", tmp_path / "copy", ignore=shutil.ignore_patterns("state.json"))
    return tmp_path / "copy"


@pytest.mark.parametrize("left", ["all", "shards only", "one shard", "no shard", "parts"])
def test_a_bank_without_its_commit_is_kept_from_other_settings(copied: Path, left: str) -> None:
    for path in copied.iterdir():
        kept = {"shards only": ".arrow", "one shard": "data-00001.arrow", "no shard": "info.json", "parts": "nothing"}
        if left != "all" and path.name != "manifest.json" and not path.name.endswith(kept[left]):
            path.unlink()
    if left == "parts":
        (copied / "journal" / "parts").mkdir(parents=True)
        (copied / "journal" / "parts" / "data-00000.arrow").write_bytes(b"half of a sha")
    before = tree_bytes(copied)
    with pytest.raises(
        PlanMismatch, match=r"Its state\.json is missing or damaged.*pull.*Give --restart .*another folder to keep it"
    ):
        write(copied, recipe=OTHER)
    assert tree_bytes(copied) == before
    write(copied, recipe=OTHER, restart=True, shards=1)
    assert len(open_bank(copied)) == 4
    assert not (copied / "journal").exists()


def test_work_that_nothing_came_of_yet_gives_way_to_other_settings(tmp_path: Path) -> None:
    write(tmp_path / "bank", shards=0, commit=False)
    write(tmp_path / "bank", recipe=OTHER)
    write(tmp_path / "wanted", recipe=OTHER)
    assert tree_bytes(tmp_path / "bank") == tree_bytes(tmp_path / "wanted")


@pytest.mark.parametrize("state", [None, b"", b"{", b"[]", b'{"_data_files": []}'])
def test_the_same_command_commits_a_bank_that_lacks_only_its_commit(copied: Path, state: bytes | None) -> None:
    if state is not None:
        (copied / "state.json").write_bytes(state)
    before = states(copied)
    write(copied)
    assert tree_bytes(copied) == tree_bytes(copied.parent / "bank")
    assert states(copied) == before
    assert all(check.ok for check in verify(copied))


@pytest.mark.parametrize(
    "missing", [["data-00001.arrow"], ["dataset_info.json"], ["README.md"], ["data-00000.arrow", "data-00002.arrow"]]
)
@pytest.mark.parametrize("cut", [False, True])
def test_the_same_command_makes_what_a_copy_lacks_and_keeps_the_rest(copied: Path, missing: list[str], cut: bool) -> None:
    if cut and missing == ["README.md"]:
        pytest.skip("nothing vouches for the card")
    for name in missing:
        data = (copied / name).read_bytes()
        (copied / name).unlink()
        if cut:
            (copied / name).write_bytes(data[:-7])
    before = states(copied)
    write(copied)
    assert tree_bytes(copied) == tree_bytes(copied.parent / "bank")
    after = states(copied)
    assert {name: after[name] for name in before if name not in missing} == {
        name: found for name, found in before.items() if name not in missing
    }


def test_a_bank_that_lacks_files_is_committed_after_death_at_any_moment(copied: Path) -> None:
    (copied / "data-00001.arrow").unlink()
    (copied / "state.json").write_bytes(b"")
    wanted = tree_bytes(copied.parent / "bank")
    for moment in range(1, 200):
        folder = copied.parent / f"killed-{moment}"
        shutil.copytree(copied, folder)
        outcome = kill_at(moment, write, folder)
        assert outcome.error == ""
        write(folder)
        assert tree_bytes(folder) == wanted, f"killed at moment {moment}"
        if not outcome.killed:
            break
    assert moment > 20


# a power cut


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another value": lambda path: path.write_bytes(b"[7]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_committed_bank_is_healed_by_the_same_command(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path / "bank")
    wanted = tree_bytes(tmp_path / "bank")
    DAMAGES[damage](tmp_path / "bank" / name)
    if name == "manifest.json" and damage == "another value":  # JSON that no writer wrote
        with pytest.raises(ArrowbankError):
            write(tmp_path / "bank")
        return
    write(tmp_path / "bank")
    assert tree_bytes(tmp_path / "bank") == wanted


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["manifest.json", "journal/data-00001.arrow.json", "build.jsonl"])
def test_an_unfinished_bank_is_healed_by_the_same_command(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "bank", commit=False)
    DAMAGES[damage](tmp_path / "bank" / name)
    if name == "manifest.json" and damage == "another value":
        with pytest.raises(ArrowbankError):
            write(tmp_path / "bank")
        return
    before = states(tmp_path / "bank")
    write(tmp_path / "bank")
    assert tree_bytes(tmp_path / "bank") == tree_bytes(tmp_path / "whole")
    changed = {shard for shard, found in states(tmp_path / "bank").items() if found != before[shard]}
    assert changed == ({"data-00001.arrow"} if "receipt" in name or "journal" in name else set())


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros"])
@pytest.mark.parametrize("restart", [True, False])
def test_a_damaged_manifest_of_other_settings_is_left_alone(tmp_path: Path, damage: str, restart: bool) -> None:
    for name, commit in (("committed", True), ("begun", False)):
        write(tmp_path / name, commit=commit)
        DAMAGES[damage](tmp_path / name / "manifest.json")
        before = tree_bytes(tmp_path / name)
        with pytest.raises(CorruptBank, match=r"Nothing else in the folder says that it is this bank.*another folder"):
            write(tmp_path / name, recipe=OTHER, restart=restart)
        assert tree_bytes(tmp_path / name) == before


def test_an_empty_manifest_with_nothing_beside_it_is_written_again(tmp_path: Path) -> None:
    write(tmp_path / "wanted")
    for name, extra in (("new", []), ("begun", ["journal"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"")
        for folder in extra:
            (tmp_path / name / folder).mkdir()
        write(tmp_path / name)
        assert tree_bytes(tmp_path / name) == tree_bytes(tmp_path / "wanted")


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_counts_of_a_shard_are_made_again_with_it(tmp_path: Path, bpe_tokenizer: Path, damage: str) -> None:
    joined_banks.save_texts(tmp_path / "texts", [f"text {number}" for number in range(12)])
    config = TokenizeConfig(tokenizer=str(bpe_tokenizer), shard_rows=4)
    tokenize(config, tmp_path / "texts", tmp_path / "whole", num_proc=1)
    found = 0
    for moment in range(20, 400, 7):
        out = tmp_path / f"out-{moment}"
        if not kill_at(moment, tokenize, config, tmp_path / "texts", out, num_proc=1).killed:
            break
        for path in (out / "journal" / "work").glob("*.json"):
            found += path.name.startswith("counts")
            if path.name.startswith("counts"):
                DAMAGES[damage](path)
        tokenize(config, tmp_path / "texts", out, num_proc=1)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")
    assert found
