"""Names and links in what is no bank: models and checkpoints, exports and caches, dumps, saved datasets, healings.

As in test_names.py, victims outside of the folder have to be there at the end, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from datasets import Dataset
from safetensors.torch import load_file, save_file

from arrowbank import ExportConfig, ImportConfig, ScanConfig, export, import_targets, scan, verify_in2
from arrowbank.bank.names import UnsafeName
from arrowbank.cli import main
from arrowbank.errors import ArrowbankError, CorruptBank, InputError
from arrowbank.formats.deepspec import DeepSpecCache
from arrowbank.formats.export_folder import ExportFolder
from arrowbank.formats.sidecar import HIDDEN_SIDECAR, SIDECAR, sealed, sidecar_bytes
from arrowbank.formats.speculators import SpeculatorsFolder
from arrowbank.formats.tokens import TokenExport
from arrowbank.models import ModelConfig, describe, load_tokenizer, resolve_model
from arrowbank.mtp.checkpoint import Checkpoint
from arrowbank.mtp.draft_files import load_draft, save_draft
from arrowbank.mtp.heal_folder import HealFolder
from arrowbank.report.healed import tell_healing
from arrowbank.targets.importer import import_to_deepspec
from tests import arms, drafts
from tests.dumps import make_dump
from tests.feature_banks import save_features
from tests.target_banks import make_target_bank
from tests.test_names import SECRET, nested, tree

ESCAPES = ["../outside/victim.txt", "{outside}/victim.txt", "a/b.safetensors", "..", "", ".x", "a\nb", "a\\b", 7, None]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("victim.txt", "data_0.ckpt", "fed.bin", "lock"):
        (folder / name).write_bytes(SECRET)
    before = tree(folder)
    yield folder
    assert {name: tree(folder)[name] for name in before} == before


def replaced(name: object, outside: Path) -> Any:
    return name.format(outside=outside) if isinstance(name, str) else name


def move_out(file: Path, outside: Path) -> None:
    """Leave a link to the same bytes in the file's place."""
    target = outside / f"moved-{file.name}"
    shutil.move(file, target)
    file.symlink_to(target)


# models


class Canary:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.fixture
def sharded(tmp_path: Path, tiny_qwen3: Path) -> Path:
    """The model in two weight files with an index; a third file, of the first one's tensors, and pickles are beside it."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen3, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    write_index(folder, {name: file for file, part in parts.items() for name in part})
    for place in (folder, tmp_path):
        shutil.copy(folder / "model-1.safetensors", place / "other.safetensors")
        (place / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "ran")))
    return folder


def write_index(folder: Path, places: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_the_model_in_two_files_is_good(sharded: Path) -> None:
    assert describe(ModelConfig(model=str(sharded), device="cpu")).fingerprint
    assert Checkpoint(sharded).names


MODEL_NAMES: list[Any] = [
    *(
        "pytorch_model.bin",
        "../pytorch_model.bin",
        "../other.safetensors",
        "{beside}/other.safetensors",
        "sub/../other.safetensors",
    ),
    *(
        "other.SAFETENSORS",
        "other.safetensors.bin",
        "other.pt",
        "",
        ".",
        "..",
        "a\0.safetensors",
        "a\n.safetensors",
        ".x.safetensors",
    ),
    *("\\other.safetensors", 7, None, ["other.safetensors"], True),
]


@pytest.mark.parametrize("name", MODEL_NAMES, ids=lambda name: ascii(name)[:30])
def test_an_index_names_safetensors_files_of_its_folder(sharded: Path, name: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before torch or transformers see the folder."""
    places = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    name = name.format(beside=sharded.parent) if isinstance(name, str) else name
    write_index(sharded, {**places, sorted(places)[0]: name})
    for look in (
        lambda: resolve_model(str(sharded)),
        lambda: describe(ModelConfig(model=str(sharded))),
        lambda: Checkpoint(sharded),
    ):
        with pytest.raises(InputError, match=r"model\.safetensors\.index\.json: lists"):
            look()
    assert main(["estimate", "--model", str(sharded), "--texts", "9"]) == 2
    assert not (sharded.parent / "ran").exists()


def test_a_weight_file_is_no_link_out_of_its_folder(sharded: Path, tmp_path: Path) -> None:
    move_out(sharded / "model-2.safetensors", tmp_path)
    with pytest.raises(InputError, match="a symbolic link out of the folder"):
        resolve_model(str(sharded))


def test_the_hubs_cache_of_a_model_is_read(sharded: Path, tmp_path: Path) -> None:
    """Every file of a snapshot is a link to a blob."""
    snapshot, blobs = (tmp_path / "hub" / "models--org--name" / name for name in ("snapshots/0123", "blobs"))
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.copy(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    assert (
        describe(ModelConfig(model=str(snapshot), device="cpu")).fingerprint
        == describe(ModelConfig(model=str(sharded))).fingerprint
    )
    assert load_tokenizer(str(snapshot))


@pytest.mark.parametrize("places", [[], "x", None, 7])
def test_a_weight_map_is_a_map(sharded: Path, places: Any) -> None:
    write_index(sharded, places)
    with pytest.raises(InputError, match="weight_map"):
        resolve_model(str(sharded))


@pytest.mark.parametrize(
    "data", [nested(100_000), nested(100), b"[]", b"{", b""], ids=["deep", "nested", "list", "cut", "empty"]
)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_json_of_a_model_has_limits(sharded: Path, name: str, data: bytes) -> None:
    (sharded / name).write_bytes(data)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        describe(ModelConfig(model=str(sharded)))


@pytest.mark.parametrize("path", ["../outside", "/etc", "..", "a\nb"])
def test_the_modules_of_a_model_are_in_its_folder(sharded: Path, outside: Path, path: str) -> None:
    (outside / "config.json").write_text('{"pooling_mode": "cls"}')
    steps = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": path}]
    (sharded / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(InputError, match=r"modules\.json: lists"):
        describe(ModelConfig(model=str(sharded)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> drafts.Made:
    return drafts.make("llama, canonical", tmp_path_factory.mktemp("draft"))


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer/vocab.json", "folder", "model.safetensors"])
def test_a_healed_copy_has_nothing_from_elsewhere(made: drafts.Made, tmp_path: Path, outside: Path, name: str) -> None:
    """A checkpoint with a link to a secret would have it published with the copy."""
    source = tmp_path / "source"
    shutil.copytree(made.folder, source)
    draft = load_draft(made.trunk(), source)
    (source / name).parent.mkdir(exist_ok=True)
    if name == "model.safetensors":
        move_out(source / name, outside)
    else:
        (source / name).symlink_to(outside if name == "folder" else outside / "victim.txt")
    with pytest.raises(InputError, match="cannot be copied"):
        save_draft(draft, source, tmp_path / "copy", provenance={})
    assert not (tmp_path / "copy").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# exports and caches


def test_a_cache_names_its_own_shards(tmp_path: Path, outside: Path) -> None:
    make_dump(tmp_path / "dump")
    config = ImportConfig(target_model="org/target", target_layer_ids=(1, 11, 21))
    import_to_deepspec(config, tmp_path / "dump", tmp_path / "cache")
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    for name in ESCAPES:
        changed = {**manifest, "shards": [{"shard_id": 0, "file_name": replaced(name, outside)}]}
        (tmp_path / "cache" / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(CorruptBank, match="its shards are"):
            DeepSpecCache(tmp_path / "cache")
    (tmp_path / "cache" / "manifest.json").write_text(json.dumps(manifest))
    DeepSpecCache(tmp_path / "cache")
    for name in ("shard-00000.bin", "samples.idx", "manifest.json"):
        shutil.copytree(tmp_path / "cache", tmp_path / name, symlinks=True)
        move_out(tmp_path / name / name, outside)
        with pytest.raises(UnsafeName, match="a symbolic link out of the folder"):
            DeepSpecCache(tmp_path / name)
    (tmp_path / "cache" / "manifest.json").write_bytes(nested(100_000))
    with pytest.raises(InputError, match="nested more than"):
        DeepSpecCache(tmp_path / "cache")


def edit_sidecar(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a sidecar, and make its digest right."""
    sidecar = json.loads(path.read_text())
    change(sidecar)
    path.write_bytes(sidecar_bytes(sealed({name: value for name, value in sidecar.items() if name != "digest"})))


@pytest.mark.parametrize("format", ["raw", "megatron", "nanotron"])
def test_an_export_of_an_arm_names_its_own_files(tmp_path: Path, outside: Path, format: str) -> None:
    arm = arms.build_small(tmp_path)
    export(ExportConfig(format=format), arm, tmp_path / "out")
    TokenExport(tmp_path / "out")
    for number, name in enumerate([*ESCAPES, ".arrowbank/x", "arrowbank-export.json"]):
        copy = shutil.copytree(tmp_path / "out", tmp_path / f"copy-{number}")
        given = replaced(name, outside)
        shutil.copy(sorted(copy.glob("in2*"))[0], copy / "other.bin")

        def change(said: dict[str, Any], given: Any = given) -> None:
            said["files"][0]["name"] = said["shards"][0]["name"] = given

        edit_sidecar(copy / SIDECAR, change)
        with pytest.raises(CorruptBank):
            TokenExport(copy)
        assert main(["verify", str(copy)]) == 1
    for path in sorted((tmp_path / "out").iterdir()):
        copy = shutil.copytree(tmp_path / "out", tmp_path / path.name, symlinks=True)
        move_out(copy / path.name, outside)
        with pytest.raises(UnsafeName, match="a symbolic link out of the folder"):
            TokenExport(copy)
        assert main(["verify", str(copy)]) == 1
        (outside / f"moved-{path.name}").unlink()


@pytest.mark.parametrize("format", ["parquet", "specforge-dflash", "npy"])
def test_every_export_lists_files_of_its_folder(tmp_path: Path, outside: Path, format: str) -> None:
    """The sidecar's names, and its own place: the one of Parquet is in a hidden folder, which may be a link, too."""
    if format == "specforge-dflash":
        make_target_bank(tmp_path / "bank")
    else:
        save_features(tmp_path / "bank", np.ones((3, 4), np.float16), mirror=False)
    export(ExportConfig(format=format), tmp_path / "bank", tmp_path / "out")
    sidecar = tmp_path / "out" / (HIDDEN_SIDECAR if format == "parquet" else SIDECAR)
    assert main(["verify", str(tmp_path / "out")]) == 0
    kept = sidecar.read_bytes()
    for name in ["../outside/victim.txt", str(outside / "victim.txt"), "a/../../outside/victim.txt", "..", "a\nb"]:

        def change(said: dict[str, Any], name: str = name) -> None:
            digest = xxhash.xxh3_128(SECRET).hexdigest()
            said["files"].append({"name": name, "bytes": len(SECRET), "xxh3_128": digest})

        edit_sidecar(sidecar, change)
        assert main(["verify", str(tmp_path / "out")]) == 1
        sidecar.write_bytes(kept)
    for link in {sidecar, sidecar.parent} - {tmp_path / "out"}:
        move_out(link, outside)
        held = tree(outside)
        assert main(["verify", str(tmp_path / "out")]) in (1, 2)
        for restart in (True, False):
            with pytest.raises(UnsafeName, match="a symbolic link"):
                export(ExportConfig(format=format), tmp_path / "bank", tmp_path / "out", restart=restart)
        assert tree(outside) == held
        link.unlink()
        shutil.move(outside / f"moved-{link.name}", link)


def test_an_arm_has_no_raw_shard_that_its_manifest_does_not_list(tmp_path: Path, outside: Path) -> None:
    """Names that follow from the options are looked up in the manifest, too."""
    arm = arms.build_small(tmp_path)
    manifest = json.loads((arm / "manifest.json").read_text())
    raw = next(entry["name"] for entry in manifest["files"] if entry["name"].endswith(".bin"))
    manifest["files"] = [entry for entry in manifest["files"] if entry["name"] != raw]
    (arm / "manifest.json").write_text(json.dumps(manifest))
    move_out(arm / raw, outside)
    assert not all(check.ok for check in verify_in2([arm]))


@pytest.fixture
def speculators(tmp_path: Path) -> Path:
    make_target_bank(tmp_path / "bank", last_hidden_norm="pre")
    export(ExportConfig(format="speculators"), tmp_path / "bank", tmp_path / "out")
    return tmp_path / "out"


def test_a_speculators_folder_names_its_own_files(speculators: Path, outside: Path) -> None:
    SpeculatorsFolder(speculators)
    state = json.loads((speculators / "state.json").read_text())
    for name in ESCAPES:
        changed = {**state, "_data_files": [{"filename": replaced(name, outside)}]}
        (speculators / "state.json").write_text(json.dumps(changed))
        with pytest.raises(ArrowbankError):
            SpeculatorsFolder(speculators)
    (speculators / "state.json").write_text(json.dumps(state))
    for name in (
        state["_data_files"][0]["filename"],
        "state.json",
        SIDECAR,
        "hidden_states/hs_1.safetensors",
        "hidden_states",
    ):
        copy = speculators.parent / name.replace("/", "-")
        shutil.copytree(speculators, copy, symlinks=True)
        move_out(copy / name, outside)
        with pytest.raises(UnsafeName, match="a symbolic link out of the folder"):
            SpeculatorsFolder(copy)


@pytest.mark.parametrize("where", ["rows_0-2000", "journal", "journal/rows_0-2000%2Fdata_0.ckpt.json"])
@pytest.mark.parametrize("restart", [True, False])
def test_an_export_writes_through_no_link(tmp_path: Path, outside: Path, where: str, restart: bool) -> None:
    out = tmp_path / "out"
    (out / where).parent.mkdir(parents=True)
    (out / where).symlink_to(outside / "victim.txt" if where.endswith("json") else outside)
    writer = ExportFolder(out, {"a": 1}, owns=("rows_*-*/data_*.ckpt",), last="last.json", restart=restart)
    with pytest.raises(UnsafeName, match="a symbolic link"), writer as folder:
        folder.write("rows_0-2000/data_0.ckpt", lambda file: file.write(b"x"))


@pytest.mark.parametrize("name", ["../outside/victim.txt", "rows_0-2000/../../outside/victim.txt", "a//b", "/etc/hostname"])
def test_a_receipt_of_an_export_names_a_file_of_it(tmp_path: Path, outside: Path, name: str) -> None:
    digest = hashlib.sha256(b'{"a":1}').hexdigest()
    out = tmp_path / "out"
    (out / "journal").mkdir(parents=True)
    receipt = {"name": name, "rows": None, "bytes": len(SECRET), "sha256": "", "plan_digest": digest, "seconds": 0.0}
    (out / "journal" / f"{name.replace('/', '%2F')}.json").write_text(json.dumps(receipt))
    with pytest.raises(UnsafeName, match="not a plain name"):
        ExportFolder(out, {"a": 1}, owns=("*",), last="last.json", restart=False).__enter__()


# what stages read


@pytest.mark.parametrize("name", [name for name in ESCAPES if name != "a/b.safetensors"], ids=ascii)
def test_a_dump_names_files_of_its_folder(tmp_path: Path, outside: Path, name: Any) -> None:
    make_dump(tmp_path / "dump", lines=lambda row, good: {"file": replaced(name, outside) if row == 2 else good})
    with pytest.raises(InputError, match=r"index\.jsonl line 3") as raised:
        import_targets(ImportConfig(target_model="org/target"), tmp_path / "dump", tmp_path / "bank")
    assert str(raised.value).isprintable()


def test_a_dump_in_the_hubs_cache_is_read(tmp_path: Path) -> None:
    snapshot, blobs = (tmp_path / "datasets--org--name" / name for name in ("snapshots/0123", "blobs"))
    make_dump(snapshot)
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        shutil.move(file, blobs / f"{number:040x}")
        file.symlink_to(f"../../blobs/{number:040x}")
    import_targets(ImportConfig(target_model="org/target"), snapshot, tmp_path / "bank")


@pytest.mark.parametrize("name", ESCAPES, ids=ascii)
def test_a_saved_dataset_names_files_of_its_folder(tmp_path: Path, outside: Path, name: Any) -> None:
    Dataset.from_dict({"query": ["a text"]}).save_to_disk(str(tmp_path / "saved"))
    secret = pa.table({"query": ["a secret"]})
    with pa.OSFile(str(outside / "secret.arrow"), "wb") as file, pa.ipc.new_stream(file, secret.schema) as stream:
        stream.write_table(secret)
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    state["_data_files"] = [{"filename": str(replaced(name, outside)).replace("victim.txt", "secret.arrow") if name else name}]
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    config = ScanConfig(sources=(("train", str(tmp_path / "saved")),), fields=(("query", "query"),))
    with pytest.raises(ArrowbankError):
        scan(config, tmp_path / "texts")
    assert not (tmp_path / "texts").exists()


# healings


def heal_folder(tmp_path: Path, **files: Any) -> Path:
    work = tmp_path / "out.heal"
    work.mkdir()
    counts = {"score": 1.0, "rates": [0.5], "rows": [2], "sets": {}, "control": {"score": 0.0, "rates": [0.0], "rows": [2]}}
    report = {"before": counts, "after": counts, "best_step": 0, "steps": 0, "plan": "0", "files": [files]}
    (work / "report.json").write_text(json.dumps(report))
    return work


@pytest.mark.parametrize("name", ["../outside/victim.txt", "{outside}/victim.txt", "a/b", ".."])
def test_a_report_of_a_healing_hashes_nothing_elsewhere(tmp_path: Path, outside: Path, name: str) -> None:
    (tmp_path / "copy").mkdir()
    file = replaced(name, outside)
    work = heal_folder(
        tmp_path, folder=str(tmp_path / "copy"), codec="keep", draft_bytes=1, accepted={"score": 1.0}, sha256={file: "0" * 64}
    )
    with pytest.raises(CorruptBank, match="not a plain name"):
        tell_healing(work, full=True)


def test_a_restarted_healing_removes_copies_beside_it_only(tmp_path: Path, outside: Path) -> None:
    work = heal_folder(tmp_path, folder=str(outside))
    assert HealFolder(tmp_path / "out", {}).earlier_copies() == [tmp_path / "outside"]
    (tmp_path / "deep").mkdir()
    work.rename(tmp_path / "deep" / "out.heal")
    assert HealFolder(tmp_path / "deep" / "out", {}).earlier_copies() == [tmp_path / "deep" / "outside"]


@pytest.mark.parametrize("name", ["journal", "fed.bin", "state.safetensors", "plan.json"])
def test_a_healing_writes_through_no_link(tmp_path: Path, outside: Path, name: str) -> None:
    work = tmp_path / "out.heal"
    work.mkdir()
    (work / "plan.json").write_text(json.dumps({"digest": "0" * 64, "recipe": {}}))
    (work / name).unlink(missing_ok=True)
    (work / name).symlink_to(outside if name == "journal" else outside / "fed.bin")
    with pytest.raises(UnsafeName, match="a symbolic link"), HealFolder(tmp_path / "out", {}):
        pass
