"""Nothing is deleted without --restart, --restart deletes only what is of the kind being written, and a power cut costs a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from arrowbank import (
    ExportConfig,
    RunOptions,
    SelectConfig,
    TokenizeConfig,
    build_in2,
    export,
    import_targets,
    import_to_deepspec,
    open_bank,
    pull,
    select,
    tokenize,
)
from arrowbank.bank import BankWriter
from arrowbank.bank.verify import verify
from arrowbank.errors import ArrowbankError, CorruptBank, InputError, PlanMismatch
from tests import arms, exports, joined_banks
from tests.dumps import make_dump
from tests.kill import kill_at, tree_bytes
from tests.target_banks import import_config, make_target_bank
from tests.test_bank import RECIPE, rows
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


@pytest.mark.parametrize("counts", [{"dropped": []}, {"dropped": {"nonfinite": "1"}}, [], None])
def test_a_manifest_of_other_types_is_not_committed_again(tmp_path: Path, counts: object) -> None:
    dump, config = tmp_path / "dump", import_config()
    make_dump(dump)
    import_targets(config, dump, tmp_path / "bank")
    (tmp_path / "bank" / "state.json").unlink()
    path = tmp_path / "bank" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"counts": counts}))
    before = tree_bytes(tmp_path / "bank")
    with pytest.raises(CorruptBank, match=r"manifest\.json.*counts"):
        import_targets(config, dump, tmp_path / "bank")
    after = tree_bytes(tmp_path / "bank")
    assert {name: after[name] for name in after if name != "journal/lock"} == before


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


@pytest.mark.slow
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


def test_hidden_files_of_other_programs_stay_in_the_folder(tmp_path: Path) -> None:
    hidden = [".notes.tmp", ".notes.99999999.tmp", ".git/.index.99999999.tmp", ".git/.index.99999999-01234567.tmp"]
    for name in hidden:
        (tmp_path / "bank" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bank" / name).write_text("mine")
    write(tmp_path / "bank")
    write(tmp_path / "bank", recipe=OTHER, restart=True)
    assert {name for name in hidden if (tmp_path / "bank" / name).exists()} == set(hidden)


def test_restart_deletes_files_that_are_no_shards_of_an_unfinished_bank(tmp_path: Path) -> None:
    for commit in (True, False):
        out = tmp_path / f"bank-{commit}"
        with BankWriter(out, kind="things", recipe=RECIPE) as bank:
            bank.write_shard(0, rows(0, 4))
            bank.write_file("raw_00000.bin", lambda file: file.write(b"raw"))
            if commit:
                bank.commit(rows=4)
        (out / "notes.txt").write_text("mine")
        write(out, recipe=OTHER, restart=True)
        assert not (out / "raw_00000.bin").exists()
        assert (out / "notes.txt").read_text() == "mine"


def test_a_pull_goes_on_where_a_power_cut_took_the_manifest(tmp_path: Path) -> None:
    write(tmp_path / "bank")
    write(tmp_path / "other", recipe=OTHER)
    for damage in ("empty", "cut"):
        for left in ("data-00001.arrow", "state.json"):
            out = tmp_path / f"{damage}-{left}"
            shutil.copytree(tmp_path / "bank", out)
            (out / left).unlink()
            (out / "journal" / "parts").mkdir(parents=True)
            DAMAGES[damage](out / "manifest.json")
            pull(f"file://{tmp_path / 'bank'}", out)
            assert tree_bytes(out) == tree_bytes(tmp_path / "bank")
    DAMAGES["empty"](tmp_path / "other" / "manifest.json")
    (tmp_path / "other" / "data-00002.arrow").write_bytes(b"rows of another bank")
    before = tree_bytes(tmp_path / "other")
    with pytest.raises(InputError, match="holds another bank"):
        pull(f"file://{tmp_path / 'bank'}", tmp_path / "other")
    assert tree_bytes(tmp_path / "other") == before


def test_an_interrupted_pull_is_built_on_by_the_command_that_made_the_bank(tmp_path: Path) -> None:
    """What is half fetched is thrown away by the commit, and stops nothing."""
    write(tmp_path / "bank")
    shutil.copytree(tmp_path / "bank", tmp_path / "pulled", ignore=shutil.ignore_patterns("state.json", "data-0000[12].arrow"))
    parts = tmp_path / "pulled" / "journal" / "parts"
    (parts / ".cache").mkdir(parents=True)
    (parts / "data-00001.arrow").write_bytes(b"half")
    write(tmp_path / "pulled")
    assert tree_bytes(tmp_path / "pulled") == tree_bytes(tmp_path / "bank")
    assert not (tmp_path / "pulled" / "journal").exists()


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


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_counts_of_a_shard_are_made_again_with_it(tmp_path: Path, bpe_tokenizer: Path, damage: str) -> None:
    joined_banks.save_texts(tmp_path / "texts", [f"text {number}" for number in range(12)])
    config = TokenizeConfig(tokenizer=str(bpe_tokenizer), shard_rows=4)
    tokenize(config, tmp_path / "texts", tmp_path / "whole", options=RunOptions(workers=1))
    found = 0
    for moment in range(20, 400, 7):
        out = tmp_path / f"out-{moment}"
        if not kill_at(moment, tokenize, config, tmp_path / "texts", out, options=RunOptions(workers=1)).killed:
            break
        for path in (out / "journal" / "work").glob("*.json"):
            found += path.name.startswith("counts")
            if path.name.startswith("counts"):
                DAMAGES[damage](path)
        tokenize(config, tmp_path / "texts", out, options=RunOptions(workers=1))
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")
    assert found


# exports


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small exports of all formats, name → folder."""
    return exports.export_everything(tmp_path_factory.mktemp("left-alone"))


def export_again(made: dict[str, Path], name: str, out: Path, *, restart: bool = False, other: bool = False) -> None:
    """Run what made the export `name`, into `out`; `other`: with other settings."""
    folder = made[name].parents[1]
    if name == "deepspec-import":
        import_to_deepspec(
            import_config(limit=1 if other else None), folder / "post-dump", out, options=RunOptions(restart=restart)
        )
        return
    source = "pre" if name == "speculators" else "post" if name in exports.TARGETS else "features"
    bank = folder / source if name not in exports.TOKENS else folder / "c"
    if other:
        bank = other_bank(bank)
    config = ExportConfig(format=name, max_shard_bytes=500 if name == "deepspec" else None)
    export(config, bank, out, restart=restart)


def other_bank(bank: Path) -> Path:
    """A bank of the same kind with other rows."""
    other = bank.parent / f"other-{bank.name}"
    if not other.exists():
        kind = open_bank(bank).kind
        if kind == "targets":
            norm = {"pre": {"last_hidden_norm": "pre"}}.get(bank.name, {})
            make_target_bank(other, dump={"seed": 7, "lengths": (2,)}, **norm)
        elif kind == "in2":
            filler = arms.save_filler(bank.parent / "other.bin", seed=9)
            build_in2(arms.small(), [filler], other)
        else:
            select(SelectConfig(rows=(0, 16)), bank, other)
    return other


ENDS = [(name, "arrowbank-export.json") for name in exports.EVERY]
ENDS += [(name, "manifest.json") for name in ("deepspec", "deepspec-import")]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("name", "file"), ENDS)
def test_an_export_whose_last_file_is_damaged_is_healed_by_the_same_command(
    made: dict[str, Path], tmp_path: Path, name: str, file: str, damage: str
) -> None:
    shutil.copytree(made[name], tmp_path / "out")
    (path,) = (tmp_path / "out").rglob(file)
    DAMAGES[damage](path)
    if file == "manifest.json" and damage == "another value":  # of another program, as far as anybody can tell
        with pytest.raises(PlanMismatch):
            export_again(made, name, tmp_path / "out", restart=True)
        return
    export_again(made, name, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(made[name])


@pytest.mark.parametrize("name", exports.EVERY)
def test_an_export_that_nothing_tells_from_another_is_not_replaced_by_it(
    made: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Its sidecar is empty: the same export finds its own bytes, another one does not."""
    shutil.copytree(made[name], tmp_path / "out")
    for path in (tmp_path / "out").rglob("*.json"):
        if path.name in ("arrowbank-export.json", "manifest.json"):
            path.write_bytes(b"")
    before = {name: data for name, data in tree_bytes(tmp_path / "out").items() if "journal" not in name}
    with pytest.raises((PlanMismatch, InputError), match=r"Give --restart|no file of this export"):
        export_again(made, name, tmp_path / "out", other=True)
    assert {name: data for name, data in tree_bytes(tmp_path / "out").items() if "journal" not in name} == before
    with pytest.raises((PlanMismatch, InputError), match=r"Give --restart|no file of this export"):
        export_again(made, name, tmp_path / "out", other=True)
    shutil.rmtree(tmp_path / "out" / "journal")
    export_again(made, name, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(made[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", exports.EVERY)
def test_an_export_is_replaced_by_one_of_its_format_only(made: dict[str, Path], tmp_path: Path, name: str) -> None:
    for other in exports.EVERY:
        if other.removesuffix("-import") == name.removesuffix("-import"):
            continue
        out = tmp_path / other
        shutil.copytree(made[other], out)
        for restart in (False, True):
            before = tree_bytes(out)
            with pytest.raises((PlanMismatch, InputError)):
                export_again(made, name, out, restart=restart)
            assert tree_bytes(out) == before
    shutil.copytree(made[name], tmp_path / "out")
    with pytest.raises(PlanMismatch, match="Give --restart"):
        export_again(made, name, tmp_path / "out", other=True)
    assert tree_bytes(tmp_path / "out") == tree_bytes(made[name])
    export_again(made, name, tmp_path / "out", other=True, restart=True)
    export_again(made, name, tmp_path / "fresh", other=True)
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("raw", "mine.bin"),
        ("npy", "mine.npy"),
        ("parquet", "data-77.parquet"),
        ("deepspec", "shard-00099.bin"),
        ("modelopt", "mine.pt"),
    ],
)
def test_a_file_that_an_export_did_not_write_stays(made: dict[str, Path], tmp_path: Path, name: str, stray: str) -> None:
    shutil.copytree(made[name], tmp_path / "out")
    (tmp_path / "out" / stray).write_bytes(b"years of work")
    for options in ({"other": True}, {"other": True, "restart": True}):
        with pytest.raises((PlanMismatch, InputError)):
            export_again(made, name, tmp_path / "out", **options)
    assert (tmp_path / "out" / stray).read_bytes() == b"years of work"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / stray).write_bytes(b"years of work")
    for extra in (None, "journal"):
        if extra:
            (tmp_path / "mine" / extra).mkdir()
        for restart in (False, True):
            with pytest.raises(InputError, match="of which there is no record"):
                export_again(made, name, tmp_path / "mine", restart=restart)
    assert (tmp_path / "mine" / stray).read_bytes() == b"years of work"


def test_a_cache_of_another_program_is_never_replaced(made: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made["deepspec"], out, ignore=shutil.ignore_patterns("arrowbank-export.json"))
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "converter": "their own script"}))
    before = tree_bytes(out)
    for restart in (False, True):
        with pytest.raises(PlanMismatch, match=r"found manifest\.json of another program, expected deepspec"):
            export_again(made, "deepspec", out, restart=restart)
    assert tree_bytes(out) == before


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_receipt_of_an_export_costs_one_file(made: dict[str, Path], tmp_path: Path, damage: str) -> None:
    damaged = 0
    for moment in range(15, 400, 9):
        out = tmp_path / f"out-{moment}"
        if not kill_at(moment, export_again, made, "modelopt", out).killed:
            break
        for path in [*(out / "journal").glob("*.json"), *(out / "journal").glob("export")][:2]:
            DAMAGES[damage](path)
            damaged += 1
        export_again(made, "modelopt", out)
        assert tree_bytes(out) == tree_bytes(made["modelopt"])
    assert damaged
