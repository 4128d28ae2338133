"""An output is never an input, whatever either is called; and nothing is changed where a command finds that out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arrowbank import (
    ExportConfig,
    ProbesConfig,
    RunOptions,
    SelectConfig,
    TokenizeConfig,
    build_in2,
    build_probes,
    export,
    merge,
    open_bank,
    select,
    tokenize,
)
from arrowbank.bank.places import require_separate
from arrowbank.cli import main
from arrowbank.cli.demo import write_episodes
from arrowbank.errors import InputError
from tests import arms, dumps, tiny, trunk_banks
from tests.target_banks import make_target_bank

WORLD = """
router/texts router/tokens router/features more/features more/texts more/tokens model other-model arm probes dump targets trunk
episodes train.jsonl chats.jsonl rows.jsonl ids/filler.bin audit.json
"""
ARM = "--arm c --length 600 --examples 6 --triples 2 --vocab 1000"

# verb → its arguments ({out} is what is to be written), and the inputs that an output must not touch
VERBS: dict[str, tuple[str, str]] = {
    "scan": (
        "scan --source t=train.jsonl --source e=episodes --onto more/texts --out {out} --restart",
        "train.jsonl episodes more/texts",
    ),
    "scan a bank": ("scan --source t=router/texts --out {out} --restart", "router/texts"),
    "scan tokens": ("scan --source t=router/tokens --field query=text --out {out} --restart", "router/tokens router/texts"),
    "tokenize": ("tokenize router/texts --tokenizer model --out {out} --restart", "router/texts model"),
    "encode": (
        "encode router/tokens --model model --onto more/features --out {out} --restart",
        "router/tokens router/texts model more/features more/texts more/tokens",
    ),
    "encode --texts": (
        "encode router/tokens --texts copied --model model --out {out} --restart",
        "router/tokens router/texts copied",
    ),
    "merge": (
        "merge router/features more/features --out {out} --restart",
        "router/features more/features router/texts more/tokens",
    ),
    "select": ("select router/features --limit 2 --out {out} --restart", "router/features router/texts router/tokens"),
    "select tokens": ("select router/tokens --limit 2 --out {out} --restart", "router/tokens router/texts"),
    "targets import": ("targets import dump --target-model m --layers 1,2,3 --out {out} --restart", "dump"),
    "targets import --to": ("targets import dump --target-model m --layers 1,2,3 --to deepspec --out {out} --restart", "dump"),
    "targets capture": (
        "targets capture --model model --tokenizer other-model --source chats.jsonl --layers 0 --out {out} --restart",
        "model other-model chats.jsonl",
    ),
    "in2 build": (f"in2 build {ARM} --filler ids/filler.bin --out {{out}} --restart", "ids/filler.bin"),
    "in2 build of banks": (
        f"in2 build {ARM} --filler router/tokens --filler more/texts --tokenizer model --out {{out}} --restart",
        "router/tokens router/texts more/texts model",
    ),
    "in2 probes": ("in2 probes --length 300 --filler ids/filler.bin --vocab 1000 --out {out} --restart", "ids/filler.bin"),
    "in2 score": (
        "in2 score probes --model model --model other-model --out {out} --restart",
        "probes model other-model ids/filler.bin",
    ),
    "trunk build": (
        "trunk build --model model --tokenizer other-model --source a=rows.jsonl --source b=router/tokens --out {out} --restart",
        "model other-model rows.jsonl router/tokens router/texts",
    ),
    "heal": (
        "heal --trunk trunk --model model --draft-from other-model --out {out} --restart",
        "trunk model other-model",
    ),
    "heal --also": ("heal --trunk trunk --model model --out fresh --also nf4={out} --restart", "trunk model"),
    "heal --dump": ("heal --trunk trunk --model model --out fresh --dump {out} --restart", "trunk model"),
    "export npy": ("export router/features --to npy --out {out} --restart", "router/features router/texts router/tokens"),
    "export parquet": ("export router/tokens --to parquet --out {out} --restart", "router/tokens router/texts"),
    "export raw": ("export arm --to raw --out {out} --restart", "arm ids/filler.bin"),
    "export deepspec": ("export targets --to deepspec --out {out} --restart", "targets"),
    "pull": ("pull file://{world}/router/tokens {out}", "router/tokens router/texts"),
    "push": ("push router/tokens file://{out} --restart", "router/tokens router/texts"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Iterator[Path]:
    """A folder with an input of every kind. It is the working directory; no test changes what is in it."""
    folder = tmp_path_factory.mktemp("outputs") / "world"
    for name in ("model", "other-model"):
        shutil.copytree(tiny_qwen3, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("episodes", "ids"):
            Path(name).mkdir()
        for file, first in (("train.jsonl", 0), ("episodes/part.jsonl", 5), ("more.jsonl", 9)):
            lines = (json.dumps({"query": f"question {number}"}) + "\n" for number in range(first, first + 8))
            Path(file).write_text("".join(lines))
        for source, out in (("train.jsonl", "router"), ("more.jsonl", "more")):
            assert main(["build", "--source", f"train={source}", "--model", "model", "--out", out, "--device", "cpu"]) == 0
        shutil.copytree("router/texts", "copied")
        arms.save_filler(Path("ids/filler.bin"))
        build_in2(arms.small(), ["ids/filler.bin"], "arm")
        build_probes(ProbesConfig(length=300, vocab=1000, alphabet=300), ["ids/filler.bin"], "probes")
        dumps.make_dump(Path("dump"))
        make_target_bank(Path("targets"))
        Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in tiny.conversations(3)))
        trunk_banks.write_ids(Path("rows.jsonl"), 20)
        argv = "trunk build --model model --source a=rows.jsonl --window 16 --topk 4 --tokens 400 --out trunk --device cpu"
        assert main(argv.split()) == 0
        assert main(["audit", "router/features", "more/features", "--out", "audit.json"]) == 0
        assert all(Path(name).exists() for name in WORLD.split())
        yield folder


def everything(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Each path under `folder`: inode, time of change, bytes."""
    paths = (path for path in sorted(folder.rglob("*")))
    return {
        path.relative_to(folder).as_posix(): (
            path.lstat().st_ino,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in paths
    }


def refused(argv: list[str], world: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says; it must end with code 2 and leave every byte, and the folder beside the world, as they are."""
    before = everything(world.parent)
    capsys.readouterr()
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert everything(world.parent) == before
    return said


def dotted(path: Path) -> str:
    return f"{path.parent}/./nowhere/../{path.name}/."


def relative(path: Path) -> str:
    return os.path.relpath(path)


def linked(path: Path) -> str:
    """Through a symbolic link to the folder above."""
    link = Path("..", "links", path.parent.name)
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(path.parent)
    return str(link / path.name)


SAME: dict[str, Callable[[Path], str]] = {"the same": str, "dotted": dotted, "relative": relative, "linked": linked}
CASES = [(verb, place) for verb, (_, inputs) in VERBS.items() for place in inputs.split()]


def arguments(verb: str, world: Path, out: str) -> list[str]:
    return [part.format(out=out, world=world) for part in VERBS[verb][0].split()]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "place"), CASES)
def test_an_output_is_no_input(world: Path, capsys: pytest.CaptureFixture[str], verb: str, place: str) -> None:
    for spell in SAME.values():
        said = refused(arguments(verb, world, spell(world / place)), world, capsys)
        assert "input and output are the same" in said or "the output is inside an input" in said, said
        assert "Nothing was changed." in said


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "place"), CASES)
def test_an_output_is_not_inside_an_input(world: Path, capsys: pytest.CaptureFixture[str], verb: str, place: str) -> None:
    if (world / place).is_dir():
        for spell in SAME.values():
            said = refused(arguments(verb, world, f"{spell(world / place)}/deep/in it"), world, capsys)
            assert "the output is inside an input" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "place"), CASES)
def test_an_output_does_not_contain_an_input(world: Path, capsys: pytest.CaptureFixture[str], verb: str, place: str) -> None:
    for spell in SAME.values():
        said = refused(arguments(verb, world, spell((world / place).parent)), world, capsys)
        assert "the output contains an input" in said or "inside an input" in said or "are the same" in said, said


def test_build_writes_beside_its_sources_but_not_onto_what_it_reads(
    world: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["build", "--source", "t=router/texts", "--model", "model", "--restart", "--out"]
    assert "input and output are the same" in refused([*argv, "router"], world, capsys)
    argv = ["build", "--source", "t=train.jsonl", "--model", "model", "--onto", "router", "--restart", "--out"]
    assert "--onto router" in refused([*argv, "router"], world, capsys)
    assert "inside an input (found --onto router" in refused([*argv, "router/texts/new"], world, capsys)
    for out in ("model", "episodes"):
        argv = ["build", "--source", "t=episodes", "--model", "model", "--restart", "--out", out]
        assert "the output is inside an input" in refused(argv, world, capsys)
    shutil.copy("train.jsonl", tmp_path)
    shutil.copytree("model", tmp_path / "model")
    argv = ["build", "--source", f"t={tmp_path}/train.jsonl", "--model", f"{tmp_path}/model", "--device", "cpu", "--out"]
    assert main([*argv, str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "model", "texts", "tokens", "features"}


@pytest.mark.parametrize(
    "outputs",
    [
        "--out fresh --also nf4=fresh",
        "--out fresh --also nf4=./fresh/.",
        "--out fresh --also nf4=fresh/deep",
        "--out fresh/deep --also nf4=fresh",
        "--out fresh --also nf4=fresh.heal",
        "--out fresh --also nf4=other --also int8=other",
        "--out fresh --dump fresh",
        "--out fresh --dump fresh.heal/drafts",
        "--out fresh --also nf4=other --dump ../world/other",
    ],
)
def test_outputs_are_apart_from_each_other(world: Path, capsys: pytest.CaptureFixture[str], outputs: str) -> None:
    said = refused(["heal", "--trunk", "trunk", "--model", "model", *outputs.split()], world, capsys)
    assert "overlaps another output of the same command" in said


def test_folders_that_are_made_beside_an_output_are_outputs(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The texts of a selection, the taps of a trunk bank, the state of a healing."""
    for name in ("few-texts", "few-taps", "few.heal"):
        shutil.copytree("router/texts" if name == "few-texts" else "model", name)
    shutil.copytree("router/tokens", "few-tokens")
    verbs = {
        "few-texts": "select few-tokens --texts few-texts --limit 2 --out few",
        "few-taps": "trunk build --model few-taps --source a=rows.jsonl --layers 0 --out few",
        "few.heal": "heal --trunk trunk --model few.heal --out few",
    }
    try:
        for name, argv in verbs.items():
            assert f"{name}: input and output are the same" in refused([*argv.split(), "--restart"], world, capsys)
    finally:
        for name in (*verbs, "few-tokens"):
            shutil.rmtree(name)


@pytest.mark.parametrize(
    "file", ["data-00000.arrow", "manifest.json", "state.json", "README.md", "data-00007.arrow", "build.jsonl"]
)
@pytest.mark.parametrize("bank", ["router/features", "targets"])
def test_a_single_file_is_never_written_over_one_of_a_bank(
    world: Path, capsys: pytest.CaptureFixture[str], file: str, bank: str
) -> None:
    audit = ["audit", "router/features", "more/features", "--out", f"{bank}/{file}"]
    assert f"{file} is a file of the bank in" in refused(audit, world, capsys)
    vocab = ["targets", "vocab", "targets", "--draft-vocab", "4", "--vocab-size", "100", "--out", f"./{bank}/{file}"]
    assert f"{file} is a file of the bank in" in refused(vocab, world, capsys)


def test_a_single_file_is_never_written_over_an_input(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = ["--source", "a=train.jsonl", "--source", "b=episodes"]
    for out in ("train.jsonl", "episodes/part.jsonl", f"{world}/../world/train.jsonl"):
        assert "the output is an input file" in refused(["audit", "router/features", *sources, "--out", out], world, capsys)
    Path("report.html").hardlink_to("audit.json")
    try:
        said = refused(["report", "router/features", "--audit", "audit.json", "--out", "report.html"], world, capsys)
        assert "the output is an input file" in said
    finally:
        Path("report.html").unlink()
    Path("page.html").symlink_to("targets/data-00000.arrow")
    try:
        assert "is a file of the bank in" in refused(["report", "targets", "--out", "page.html"], world, capsys)
    finally:
        Path("page.html").unlink()


@pytest.mark.parametrize("file", ["train.jsonl", "model/model.safetensors", "model/config.json"])
def test_a_single_file_is_never_written_over_a_file_of_another_kind(
    world: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    audit = ["audit", "router/features", "more/features", "--out", file]
    assert "holds something else than an audit, and was left as it is" in refused(audit, world, capsys)
    vocab = ["targets", "vocab", "targets", "--draft-vocab", "4", "--vocab-size", "100", "--out", file]
    assert "holds something else than a vocabulary map, and was left as it is" in refused(vocab, world, capsys)


def test_a_single_file_replaces_an_older_one_of_its_kind_and_an_empty_one(world: Path, tmp_path: Path) -> None:
    for file in ("audit.json", "map.safetensors"):
        (tmp_path / file).touch()
    for size in ("4", "5"):
        assert main(["audit", "router/features", "more/features", "--out", str(tmp_path / "audit.json")]) == 0
        vocab = ["targets", "vocab", "targets", "--draft-vocab", size, "--vocab-size", "100"]
        assert main([*vocab, "--out", str(tmp_path / "map.safetensors")]) == 0


def test_a_file_may_be_put_beside_those_of_a_bank(tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank")
    for _ in range(2):
        assert main(["targets", "vocab", str(tmp_path / "bank"), "--draft-vocab", "4", "--vocab-size", "100"]) == 0
        assert main(["report", str(tmp_path / "bank"), "--out", str(tmp_path / "bank" / "report.html")]) == 0
    assert {"vocab-4.safetensors", "report.html"} <= {path.name for path in (tmp_path / "bank").iterdir()}
    assert main(["verify", str(tmp_path / "bank")]) == 0


def test_the_check_belongs_to_the_functions(world: Path) -> None:
    before = everything(world)
    with pytest.raises(InputError, match="input and output are the same"):
        tokenize(
            TokenizeConfig(tokenizer="model"),
            world / "router" / "texts",
            world / "router" / "texts",
            options=RunOptions(restart=True),
        )
    with pytest.raises(InputError, match="the output is inside an input"):
        build_in2(arms.small(), ["router/tokens"], Path("router/texts/arm"), options=RunOptions(restart=True))
    assert everything(world) == before


def test_shards_that_banks_share_by_hard_links_are_no_overlap(world: Path, tmp_path: Path) -> None:
    bank = world / "router" / "features"
    select(SelectConfig(rows=(0, len(open_bank(bank)))), bank, tmp_path / "all")
    assert (tmp_path / "all" / "data-00000.arrow").samefile(bank / "data-00000.arrow")
    merge([bank, world / "more" / "features"], tmp_path / "merged")
    merge([tmp_path / "all", bank], tmp_path / "all-again")
    merge([bank, world / "more" / "features"], tmp_path / "merged", restart=True)
    with pytest.raises(InputError, match="input and output are the same"):
        merge([bank, tmp_path / "all"], tmp_path / "all")


def test_a_single_file_is_known_under_another_name(tmp_path: Path) -> None:
    """A hard link, or a file that is mounted elsewhere."""
    (tmp_path / "out").mkdir()
    arms.save_filler(tmp_path / "out" / "raw.bin")
    (tmp_path / "filler.bin").hardlink_to(tmp_path / "out" / "raw.bin")
    with pytest.raises(InputError, match="contains an input file under another name"):
        require_separate([("--out", tmp_path / "out")], [("--filler", tmp_path / "filler.bin")])
    require_separate([("--out", tmp_path / "else")], [("--filler", tmp_path / "filler.bin")])


def test_places_that_do_not_exist_yet_are_told_apart(tmp_path: Path) -> None:
    def apart(one: str, other: str) -> bool:
        try:
            require_separate([("--out", tmp_path / one), ("--also", tmp_path / other)], [])
        except InputError:
            return False
        return True

    (tmp_path / "link").symlink_to(tmp_path / "later")
    assert apart("a", "b")
    assert apart("a/b", "a/bc")
    assert apart("ab", "a")
    assert not apart("a", "a/b")
    assert not apart("a/b/c", "a")
    assert not apart("x/../a", "a")
    assert not apart("link", "later")
    assert not apart("link/deep", "later")


def test_addresses_are_no_places_here_but_for_folders_of_this_machine(tmp_path: Path) -> None:
    require_separate(
        [("--out", tmp_path / "out")], [("BANK", "hf://datasets/org/out"), ("BANK", "s3://bucket/out"), ("--onto", None)]
    )
    with pytest.raises(InputError, match="are the same"):
        require_separate([("--out", tmp_path / "out")], [("BANK", f"file://{tmp_path}/out")])


# --restart


def a_cache(folder: Path) -> None:
    export(ExportConfig(format="deepspec"), "targets", folder)


def an_export(folder: Path) -> None:
    export(ExportConfig(format="npy"), "router/features", folder)


def a_healing(folder: Path) -> None:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"digest": "0" * 64, "recipe": {"lr": 1}}))
    (folder / "state.safetensors").write_bytes(b"days of training")


def strangers(folder: Path) -> None:
    """Files that look like arrowbank's to a careless eye, or that a careless sweep would take."""
    (folder / "journal" / "work").mkdir(parents=True)
    for name in (
        "thesis.tex",
        "README.md",
        ".thesis.tex.tmp",
        ".thesis.99999999.tmp",
        "journal/2024.json",
        "journal/work/notes.md",
    ):
        (folder / name).write_text("years of work")


def a_diary(folder: Path) -> None:
    (folder / "journal").mkdir(parents=True)
    (folder / "journal" / "2024.json").write_text("[]")


def a_site(folder: Path) -> None:
    """A web application's folder: its manifest.json is another one."""
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"name": "app", "icons": []}))


# what is in the folder, by name: a folder of the world that is copied, or what makes it
THERE: dict[str, str | Callable[[Path], None]] = {
    "texts": "router/texts",
    "tokens": "router/tokens",
    "features": "router/features",
    "in2": "arm",
    "in2-probes": "probes",
    "targets": "targets",
    "trunk": "trunk",
    "a model": "model",
    "sources": "episodes",
    "deepspec": a_cache,
    "npy": an_export,
    "a healing": a_healing,
    "a stranger's": strangers,
    "a diary": a_diary,
    "a site": a_site,
}
WRITES = {
    "scan": "texts",
    "tokenize": "tokens",
    "encode": "features",
    "merge": "features",
    "select": "features",
    "select tokens": "tokens",
    "targets import": "targets",
    "targets import --to": "deepspec",
    "targets capture": "targets",
    "in2 build": "in2",
    "in2 probes": "in2-probes",
    "in2 score": "scores",
    "trunk build": "trunk",
    "heal": "nothing",
    "heal --also": "nothing",
    "heal --dump": "drafts",
    "export npy": "npy",
    "export parquet": "parquet",
    "export raw": "raw",
    "export deepspec": "deepspec",
    "pull": "tokens",
    "push": "tokens",
}


# commands of VERBS that would be refused for another reason before they look at the folder, as they are refused for the folder alone
RUNS = {
    "encode": "encode router/tokens --model model --device cpu --out {out} --restart",
    "targets capture": "targets capture --model model --source rows.jsonl --layers 0 --min-loss-tokens 1 --restart --out {out}",
    "trunk build": "trunk build --model model --source a=rows.jsonl --window 16 --topk 4 --tokens 400 --device cpu --out {out} --restart",
}
# a refusal is for the folder where it says one of these
FOR_THE_FOLDER = (
    *(
        "this command writes one of",
        "expected a bank of",
        "holds another bank",
        "holds a bank of",
        "expected this bank or nothing",
    ),
    *("is no part of this format", "holds another export", "of which there is no record", "is there already and not empty"),
    *("expected the work of a healing or nothing", "holds the work of another healing"),
)


@pytest.fixture(scope="module")
def there(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind of THERE, by its name."""
    made = {}
    for name, source in THERE.items():
        made[name] = tmp_path_factory.mktemp("there") / "folder"
        if callable(source):
            source(made[name])
        else:
            shutil.copytree(world / source, made[name])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("verb", WRITES)
def test_restart_deletes_only_what_is_of_the_kind_being_written(
    world: Path, there: dict[str, Path], capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    kinds = ("texts", "tokens", "features", "in2", "in2-probes", "targets", "trunk")
    for name, folder in there.items():
        if WRITES[verb] == name or (
            verb == "push" and not (folder / "state.json").exists()
        ):  # it puts a bank beside other files
            continue
        before = everything(folder)
        capsys.readouterr()
        for restart in (True, False):
            words = RUNS.get(verb, VERBS[verb][0]).format(out=folder, world=world).split()
            argv = [part for part in words if restart or part != "--restart"]
            code, said = main(argv), capsys.readouterr().err
            assert code == 2, (name, said)
            assert everything(folder) == before, name
            assert any(reason in said for reason in FOR_THE_FOLDER), (name, said)
            if WRITES[verb] in kinds and verb not in ("pull", "push"):  # it says what it has found
                found = {
                    "a model": "a model",
                    "deepspec": "an export",
                    "npy": "an export",
                    "a healing": "the state of a healing",
                }
                assert found.get(name, f"a bank of {name}" if name in kinds else "") in said, (name, said)


@pytest.mark.parametrize("name", ["a model", "sources", "a stranger's", "a diary", "a site", "targets", "npy"])
def test_the_state_of_a_healing_is_put_into_no_other_folder(
    world: Path, there: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(there[name], tmp_path / "out.heal")
    before = everything(tmp_path)
    argv = ["heal", "--trunk", "trunk", "--model", "model", "--out", str(tmp_path / "out")]
    for extra in ([], ["--restart"]):
        assert main([*argv, *extra]) == 2
        assert "out.heal: holds" in (said := capsys.readouterr().err), said
        assert everything(tmp_path) == before


def test_the_texts_of_a_selection_and_the_taps_of_a_trunk_bank_are_of_their_kind(
    world: Path, there: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in ("-texts", "-taps"):
        shutil.copytree(there["features"], tmp_path / f"out{suffix}")
    before = everything(tmp_path / "out-texts"), everything(tmp_path / "out-taps")
    assert main(["select", "router/tokens", "--limit", "2", "--out", str(tmp_path / "out"), "--restart"]) == 2
    argv = "trunk build --model model --source a=rows.jsonl --window 16 --topk 4 --tokens 400 --layers 0 --device cpu --restart --out"
    assert main([*argv.split(), str(tmp_path / "out")]) == 2
    assert (everything(tmp_path / "out-texts"), everything(tmp_path / "out-taps")) == before
    assert "holds a bank of features, this command writes one of taps" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_overwrites_no_episodes(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "eval.jsonl").write_text('{"query": "mine"}\n')
    with pytest.raises(InputError, match=r"holds other episodes than the demo would write \(found 18 bytes"):
        write_episodes(tmp_path / "episodes", 5)
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["eval.jsonl"]
