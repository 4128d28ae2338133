"""The format on disk: what is written, when it opens, and what every kind of damage is called."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest

from arrowbank import open_bank
from arrowbank.bank import BankWriter
from arrowbank.bank.columns import binary_column, fixed_list_column, list_column
from arrowbank.bank.manifest import dataset_info
from arrowbank.bank.processes import ABANDONED_S, temporary_beside
from arrowbank.errors import (
    ArrowbankError,
    BankLocked,
    ContractError,
    CorruptBank,
    DiskFull,
    IncompleteBank,
    InputError,
    PlanMismatch,
)
from tests.kill import kill_at, tree_bytes

RECIPE = {"from": "nothing", "batches": {"max_batch": 4}}


def rows(start: int, count: int) -> pa.RecordBatch:
    values = np.arange(start, start + count, dtype=np.int32)
    return pa.record_batch(
        {
            "text": pa.array([f"text {value}" for value in values], pa.large_string()),
            "sha1": binary_column(np.full((count, 20), start, np.uint8)),
            "input_ids": list_column(values, np.arange(count + 1, dtype=np.int32)),
            "features": fixed_list_column(np.full((count, 3), start + 0.1, np.float16)),
        }
    )


def write(folder: Path, *, shards: int = 3, recipe: dict[str, object] = RECIPE, commit: bool = True, **options: object) -> None:
    """A bank of 4-row shards; what is there is kept."""
    with BankWriter(folder, kind="things", recipe=recipe, **options) as bank:  # type: ignore[arg-type]
        if bank.committed:
            return
        for index in range(shards):
            if index not in bank.done_shards:
                bank.write_shard(index, rows(4 * index, 4))
        if commit:
            bank.commit(rows=4 * shards, manifest={"colour": "blue"})


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def test_datasets_opens_it_with_every_type_kept(tmp_path: Path) -> None:
    write(tmp_path / "bank")
    dataset = datasets.load_from_disk(str(tmp_path / "bank"))
    assert dataset.num_rows == 12
    assert dataset.features["features"] == datasets.List(datasets.Value("float16"), length=3)
    assert dataset.features["text"] == datasets.Value("large_string")
    assert dataset[4]["text"] == "text 4"
    assert dataset.data.column("features").type == pa.list_(pa.float16(), 3)


def test_each_shard_is_a_stream_of_one_batch_and_the_info_is_what_datasets_infers(tmp_path: Path) -> None:
    write(tmp_path / "bank")
    with pa.ipc.open_stream(tmp_path / "bank" / "data-00001.arrow") as stream:
        batches = list(stream)
    assert [batch.num_rows for batch in batches] == [4]
    assert batches[0].equals(rows(4, 4))
    inferred = datasets.Features.from_arrow_schema(batches[0].schema).to_dict()
    info = json.loads((tmp_path / "bank" / "dataset_info.json").read_text())
    assert info["features"] == inferred == dataset_info(batches[0].schema)["features"]


def test_the_manifest_counts_and_hashes_every_file(tmp_path: Path) -> None:
    write(tmp_path / "bank")
    manifest = open_bank(tmp_path / "bank").manifest
    names = {path.name for path in (tmp_path / "bank").iterdir()}
    assert names == {entry["name"] for entry in manifest["files"]} | {"manifest.json", "state.json", "build.jsonl", "README.md"}
    sums = tree_bytes(tmp_path / "bank")
    for entry in manifest["files"]:
        assert entry["sha256"] == sums[entry["name"]]
        assert entry["bytes"] == (tmp_path / "bank" / entry["name"]).stat().st_size
    assert [entry["rows"] for entry in manifest["files"] if entry["rows"]] == [4, 4, 4]
    assert (manifest["rows"], manifest["complete"], manifest["colour"]) == (12, True, "blue")


def test_two_runs_write_the_same_bytes_but_for_the_log(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")


def test_rows_and_slices_across_shards(tmp_path: Path) -> None:
    write(tmp_path / "bank")
    bank = open_bank(tmp_path / "bank")
    assert (len(bank), bank.columns) == (12, ["text", "sha1", "input_ids", "features"])
    assert bank.slice(3, 9, ["text"])["text"].to_pylist() == [f"text {row}" for row in range(3, 9)]
    assert bank.slice(5, 5).num_rows == 0
    assert bank.dataset[11]["text"] == "text 11"


def test_before_the_commit_nothing_opens_it(tmp_path: Path) -> None:
    write(tmp_path / "bank", commit=False)
    with pytest.raises(IncompleteBank, match=r"not committed .*12 rows|not committed"):
        open_bank(tmp_path / "bank")
    with pytest.raises(FileNotFoundError):
        datasets.load_from_disk(str(tmp_path / "bank"))
    assert json.loads((tmp_path / "bank" / "manifest.json").read_text())["complete"] is False


def test_a_commit_with_rows_missing_is_refused(tmp_path: Path) -> None:
    with BankWriter(tmp_path / "bank", kind="things", recipe=RECIPE) as bank:
        bank.write_shard(0, rows(0, 4))
        bank.write_shard(2, rows(8, 4))
        with pytest.raises(IncompleteBank, match="8 of 12 rows are there, in shards 0, 2"):
            bank.commit(rows=12)


@pytest.mark.slow
def test_every_moment_of_death_is_made_good_by_the_same_command(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    wanted = tree_bytes(tmp_path / "whole")
    for moment in range(1, 500):
        folder = tmp_path / f"killed-{moment}"
        outcome = kill_at(moment, write, folder)
        assert outcome.error == ""
        if not outcome.killed:
            break
        if not (folder / "state.json").exists() and (folder / "manifest.json").exists():
            with pytest.raises(IncompleteBank):
                open_bank(folder)
        write(folder)
        assert tree_bytes(folder) == wanted, f"killed at moment {moment}"
    assert moment > 40  # Python 3.10: pathlib keeps functions of os of its own, which are not counted
    assert tree_bytes(folder) == wanted


def test_another_recipe_is_an_error_that_names_the_fields(tmp_path: Path) -> None:
    write(tmp_path / "bank", commit=False)
    before = tree_bytes(tmp_path / "bank")
    with pytest.raises(PlanMismatch, match=r"batches.max_batch: found 4, wanted 8\n.*--restart") as caught:
        write(tmp_path / "bank", recipe={"from": "nothing", "batches": {"max_batch": 8}})
    assert caught.value.fields == {"batches.max_batch": (4, 8)}
    assert tree_bytes(tmp_path / "bank") == before


@pytest.mark.parametrize("committed", [True, False])
def test_restart_throws_the_old_work_away(tmp_path: Path, committed: bool) -> None:
    write(tmp_path / "bank", commit=committed)
    write(tmp_path / "bank", shards=1, recipe={"other": 1}, restart=True)
    write(tmp_path / "fresh", shards=1, recipe={"other": 1})
    assert tree_bytes(tmp_path / "bank") == tree_bytes(tmp_path / "fresh")


@pytest.mark.parametrize("data", [b"{", b'{"format": "arrowbank/2", "kind": "things"}'])
def test_restart_begins_anew_where_the_manifest_is_damaged(tmp_path: Path, data: bytes) -> None:
    write(tmp_path / "bank", shards=3)
    write(tmp_path / "wanted", shards=1)
    (tmp_path / "bank" / "manifest.json").write_bytes(data)
    with pytest.raises(CorruptBank, match=r"manifest\.json"):
        write(tmp_path / "bank", shards=1, recipe={"other": 1})
    write(tmp_path / "bank", shards=1, restart=True)
    assert tree_bytes(tmp_path / "bank") == tree_bytes(tmp_path / "wanted")


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis.tex.*new or empty folder"):
        write(tmp_path, restart=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match="is a file"):
        write(tmp_path / "thesis.tex")


def hold(folder: Path, ready: object, leave: object) -> None:
    with BankWriter(folder, kind="things", recipe=RECIPE):
        ready.set()  # type: ignore[attr-defined]
        leave.wait(60)  # type: ignore[attr-defined]


def test_a_second_writer_is_told_who_holds_the_bank(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ready, leave = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(tmp_path / "bank", ready, leave))
    holder.start()
    try:
        assert ready.wait(60)
        with pytest.raises(BankLocked, match=f"holder: process {holder.pid} on "):
            write(tmp_path / "bank")
        holder.kill()
        holder.join()
        write(tmp_path / "bank")  # the dead hold nothing
    finally:
        holder.kill()
        holder.join()
    assert len(open_bank(tmp_path / "bank")) == 12


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(("damage", "words"), [(cut, "cut or changed"), (flip_a_bit, "sha256 differs"), (remove, "missing")])
def test_a_damaged_shard_with_a_receipt_stops_a_resume_and_is_made_again_when_named(
    tmp_path: Path, damage: object, words: str
) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "bank", commit=False)
    damage(tmp_path / "bank" / "data-00001.arrow")  # type: ignore[operator]
    before = tree_bytes(tmp_path / "bank")
    with pytest.raises(CorruptBank, match=rf"data-00001.arrow.*{words}.*--shards 1 "):
        write(tmp_path / "bank")
    assert tree_bytes(tmp_path / "bank") == before
    write(tmp_path / "bank", redo=[1])
    assert tree_bytes(tmp_path / "bank") == tree_bytes(tmp_path / "whole")


def test_a_shard_without_a_receipt_is_made_again(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "bank", commit=False)
    (tmp_path / "bank" / "journal" / "data-00001.arrow.json").unlink()
    flip_a_bit(tmp_path / "bank" / "data-00001.arrow")
    write(tmp_path / "bank")
    assert tree_bytes(tmp_path / "bank") == tree_bytes(tmp_path / "whole")


@pytest.mark.parametrize("damage", [cut, flip_a_bit, remove])
def test_a_committed_bank_gets_one_shard_made_again_and_keeps_the_others(tmp_path: Path, damage: object) -> None:
    write(tmp_path / "bank")
    whole = tree_bytes(tmp_path / "bank")
    others = (tmp_path / "bank" / "data-00000.arrow").stat().st_mtime_ns
    damage(tmp_path / "bank" / "data-00001.arrow")  # type: ignore[operator]
    write(tmp_path / "bank", redo=[1])
    assert tree_bytes(tmp_path / "bank") == whole
    assert (tmp_path / "bank" / "data-00000.arrow").stat().st_mtime_ns == others


def test_a_committed_bank_with_a_cut_shard_is_refused_by_reader_and_writer(tmp_path: Path) -> None:
    write(tmp_path / "bank")
    cut(tmp_path / "bank" / "data-00002.arrow")
    with pytest.raises(CorruptBank, match=r"data-00002.arrow: \d+ bytes on disk, the manifest says"):
        open_bank(tmp_path / "bank")
    with pytest.raises(CorruptBank, match=r"data-00002.arrow.*--shards 2 "):
        write(tmp_path / "bank")


def test_a_shard_cut_at_a_batch_boundary_is_noticed_although_arrow_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "bank")
    path = tmp_path / "bank" / "data-00001.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, rows(0, 1).schema):
        pass  # a valid stream of no batches
    with pytest.raises(CorruptBank):
        open_bank(tmp_path / "bank")


def test_the_contract(tmp_path: Path) -> None:
    write(tmp_path / "bank")
    open_bank(tmp_path / "bank", expect={"colour": "blue", "recipe.batches.max_batch": 4})
    with pytest.raises(ContractError, match="colour is 'blue', expected 'red'") as caught:
        open_bank(tmp_path / "bank", expect={"colour": "red"})
    assert caught.value.field == "colour"
    with pytest.raises(ContractError, match=r"taste is None, expected 'sour'. The manifest has: colour, "):
        open_bank(tmp_path / "bank", expect={"taste": "sour"})


def test_what_is_no_bank_is_said_with_the_likely_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        open_bank(tmp_path / "absent")
    write(tmp_path / "built" / "features")
    with pytest.raises(InputError, match=r"Did you mean .*built/features"):
        open_bank(tmp_path / "built")
    (tmp_path / "built" / "features" / "manifest.json").write_text("{ not json")
    with pytest.raises(CorruptBank, match="not readable as JSON"):
        open_bank(tmp_path / "built" / "features")


@pytest.mark.parametrize("text", ["{}", '{"_data_files": []}', '{"_data_files": [{"filename": "../../etc/passwd"}]}', "[]"])
def test_a_state_that_names_other_files_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path / "bank")
    (tmp_path / "bank" / "state.json").write_text(text)
    with pytest.raises(CorruptBank, match="does not list the shards"):
        open_bank(tmp_path / "bank")


def write_with_little_room(folder: Path) -> None:
    """A target for a child process, where files may grow to 2 kB only: the system then refuses as it does on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    big = pa.record_batch({"x": np.arange(1000)})
    with BankWriter(folder, kind="things", recipe=RECIPE) as bank, pytest.raises(DiskFull, match="Make room and run the same"):
        bank.write_shard(0, big)


def test_a_full_disk_ends_with_what_to_do_and_a_resume_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    with BankWriter(tmp_path / "bank", kind="things", recipe=RECIPE) as bank:
        bank.write_shard(0, rows(0, 4))
    outcome = kill_at(0, write_with_little_room, tmp_path / "bank")
    assert outcome.error == ""
    assert not list((tmp_path / "bank").glob(".*.tmp"))  # what did not fit makes room again
    write(tmp_path / "bank")
    assert tree_bytes(tmp_path / "bank") == tree_bytes(tmp_path / "whole")


def test_an_unwritable_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written"):
        write(tmp_path / "file" / "bank")
    if os.geteuid():  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(InputError, match=r"cannot be written"):
            write(tmp_path / "closed" / "bank")


def leave_a_temporary(path: Path) -> None:
    """A target for a child process: what a writer that is killed while it writes the file `path` leaves there."""
    temporary_beside(path).write_text("half a shard")


def test_leftovers_of_ended_processes_of_this_host_are_swept_and_no_others(tmp_path: Path) -> None:
    write(tmp_path / "bank", commit=False)
    shard = tmp_path / "bank" / "data-00000.arrow"
    kill_at(0, leave_a_temporary, shard)
    (left,) = shard.parent.glob(".*.tmp")
    ended = subprocess.Popen(["true"])
    ended.wait()
    running = temporary_beside(shard)
    elsewhere = left.with_name(re.sub("-[0-9a-f]{8}-", "-01234567-", left.name, count=1))
    old = elsewhere.with_name(elsewhere.name.replace("-01234567-", "-89abcdef-"))
    reused = running.with_name(re.sub(r"-\d+(-[0-9a-f]{8}\.tmp)", r"-1\1", running.name))  # the id of a process, started later
    earlier = [shard.with_name(f".{shard.name}.{pid}-01234567.tmp") for pid in (ended.pid, os.getpid())]
    foreign = shard.with_name(".notes.tmp")
    for path in (running, elsewhere, old, reused, *earlier, foreign):
        path.write_text("half a shard")
    day_ago = time.time() - ABANDONED_S - 60
    for path in (old, running, foreign):
        os.utime(path, (day_ago, day_ago))
    write(tmp_path / "bank")
    assert set(shard.parent.glob(".*.tmp")) == {running, elsewhere, earlier[1], foreign}


def test_a_shard_is_adopted_with_its_bytes(tmp_path: Path) -> None:
    write(tmp_path / "old")
    entry = next(entry for entry in open_bank(tmp_path / "old").manifest["files"] if entry["name"] == "data-00000.arrow")
    with BankWriter(tmp_path / "new", kind="things", recipe={"onto": 1}) as bank:
        bank.adopt_shard(0, tmp_path / "old" / "data-00000.arrow", rows=4, sha256=entry["sha256"])
        bank.commit(rows=4)
    shutil.rmtree(tmp_path / "old")
    assert open_bank(tmp_path / "new").slice(0, 4, ["text"])["text"].to_pylist() == ["text 0", "text 1", "text 2", "text 3"]


def test_a_shard_that_is_a_symbolic_link_is_adopted_as_the_file_it_stands_for(tmp_path: Path) -> None:
    write(tmp_path / "old")
    entry = next(entry for entry in open_bank(tmp_path / "old").manifest["files"] if entry["name"] == "data-00000.arrow")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "data-00000.arrow").symlink_to("../old/data-00000.arrow")
    with BankWriter(tmp_path / "deep" / "new", kind="things", recipe={"onto": 1}) as bank:
        bank.adopt_shard(0, tmp_path / "cache" / "data-00000.arrow", rows=4, sha256=entry["sha256"])
        bank.commit(rows=4)
    assert not (tmp_path / "deep" / "new" / "data-00000.arrow").is_symlink()
    assert len(open_bank(tmp_path / "deep" / "new")) == 4


def test_where_a_link_is_not_possible_a_shard_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "old")
    path = tmp_path / "old" / "data-00000.arrow"
    entry = next(entry for entry in open_bank(tmp_path / "old").manifest["files"] if entry["name"] == path.name)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)  # what the system says where the new bank lies on another disk
    with BankWriter(tmp_path / "new", kind="things", recipe={"onto": 1}) as bank:
        bank.adopt_shard(0, path, rows=4, sha256=entry["sha256"])
        bank.commit(rows=4)
    assert (tmp_path / "new" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "new" / path.name).stat().st_ino != path.stat().st_ino
    assert len(open_bank(tmp_path / "new")) == 4


def test_all_our_errors_are_one_family() -> None:
    family = (InputError, PlanMismatch, IncompleteBank, ContractError, CorruptBank, BankLocked, DiskFull)
    assert all(issubclass(error, ArrowbankError) for error in family)


def test_another_plan_that_finished_nothing_is_not_in_the_way(tmp_path: Path) -> None:
    with BankWriter(tmp_path / "bank", kind="texts", recipe={"a": 1}):
        pass  # its stage met an error before the first shard
    with BankWriter(tmp_path / "bank", kind="texts", recipe={"a": 2}) as bank:
        bank.write_shard(0, pa.record_batch({"text": ["one"]}))
    with (
        pytest.raises(PlanMismatch, match="a: found 2, wanted 3"),
        BankWriter(tmp_path / "bank", kind="texts", recipe={"a": 3}),
    ):
        pass
    with BankWriter(tmp_path / "bank", kind="texts", recipe={"a": 2}) as bank:
        assert sorted(bank.done_shards) == [0]
