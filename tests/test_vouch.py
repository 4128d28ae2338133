"""A manifest vouches for itself: whatever is changed in a bank, `verify` finds it; what is cheap to find keeps the bank from opening."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from arrowbank import ExportConfig, RunOptions, SelectConfig, export, import_targets, merge, open_bank, select, verify
from arrowbank.bank.names import UnsafeName
from arrowbank.cli import main
from arrowbank.errors import ArrowbankError, CorruptBank, InputError
from arrowbank.report.folders import describe_any
from tests import every_bank, target_banks
from tests.mutations import JSON_FILES, WRITERS, another, canonical, free_reason, mutate, put, reseal

TRIES = 20  # of each bank, for each of its JSON files and for the rest

# What neither recipe nor rows decide: the digest in state.json is all that vouches for it. A part of a name after * is any place in a
# list, and counts.* are the counts of what became no row.
FREE = {
    # names, paths and hashes of what the bank was made from, where the recipe knows contents only
    *("sources.*.file", "source", "texts.path", "tokenizer", "model_path", "fillers.*.path", "trunk.name", "trunk.plan_digest"),
    *("selected.plan_digest", "selected.rows", "merged.parts.*.plan_digest", "merged.largest_difference"),
    # of texts and tokens behind a bank, whose contents are in its recipe
    *(
        "sources.*.name",
        "sources.*.bytes",
        "sources.*.sha256",
        "train_sha256",
        "eval_sha256",
        "fields.*.*",
        "texts.plan_digest",
    ),
    *("kinds.query", "kinds.candidate", "kinds.title", "max_tokens", "max_key_tokens", "special_tokens", "prompt", "on_long"),
    "effective_recipe",
    *("tokenizer_fingerprint", "limit", "generations"),
    # of the model behind a trunk bank
    *("chain", "num_hidden_layers", "vocab_size"),
    # counts of what became no row, and of what was lost in the codec
    *(f"counts.{name}" for name in ("episodes", "empty", "truncated", "not_text", "not_object", "not_list", "bad_lines")),
    *("counts.lone_surrogates", "source_duplicates.train", "source_duplicates.eval"),
    *(f"counts.dropped.{name}" for name in ("nonfinite", "quarantined", "duplicate", "few_loss_tokens", "not_selected")),
    *(f"codec_error.{layer}.{measure}" for layer in ("1", "11", "21", "last") for measure in ("cosine", "relative")),
}


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> every_bank.Banks:
    return every_bank.Banks(tmp_path_factory.mktemp("banks"))


@pytest.fixture
def edited(banks: every_bank.Banks, tmp_path: Path) -> Callable[..., Path]:
    """edited(name, edit, sealed=False): a copy of a bank whose manifest `edit` has changed; `sealed`: with digests that fit."""

    def make(name: str, edit: Callable[[dict[str, Any]], object], *, sealed: bool = False) -> Path:
        folder = Path(shutil.copytree(banks[name], tmp_path / name))
        if sealed:
            reseal(folder, edit)
        else:
            manifest = json.loads((folder / "manifest.json").read_text())
            edit(manifest)
            (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return make


def failed(folder: Path) -> dict[str, str]:
    """The checks that fail, and what they say."""
    return {check.name: check.detail for check in verify(folder) if not check.ok}


@pytest.mark.slow
@pytest.mark.parametrize("name", every_bank.MAKERS)
def test_every_bank_is_what_it_says(banks: every_bank.Banks, name: str) -> None:
    assert failed(banks[name]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", every_bank.MAKERS)
def test_every_mutation_is_found(banks: every_bank.Banks, name: str) -> None:
    folder, rng = banks[name], random.Random(name)
    for file in (*JSON_FILES, None):
        for _ in range(TRIES):
            mutation = mutate(folder, rng, file)
            try:
                found = failed(folder)
            finally:
                mutation.undo()
            assert bool(found) != bool(mutation.free), f"{mutation} ({mutation.free or 'not found'}): {found}"
    assert failed(folder) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", every_bank.MAKERS)
def test_a_consistent_lie_is_found_where_recipe_or_rows_decide(banks: every_bank.Banks, name: str) -> None:
    """Every value of the manifest in turn is changed, and all digests with it."""
    folder, rng = banks[name], random.Random(name)
    kept = {path: path.read_bytes() for path in (folder / "manifest.json", folder / "state.json")}
    stated = {key: value for key, value in json.loads(kept[folder / "manifest.json"]).items() if key not in WRITERS}
    for path, value in leaves(stated):
        other = next(other for _ in range(99) if canonical(other := another(value, rng)) != canonical(value) and other == other)

        def edit(manifest: dict[str, Any], path: tuple[str | int, ...] = path, other: object = other) -> None:
            inside: Any = manifest
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = other

        reseal(folder, edit)
        found = failed(folder)
        for file, data in kept.items():
            put(file, data)
        spelled = ".".join("*" if isinstance(key, int) else key for key in path)
        assert found or spelled in FREE, f"{name}: {spelled} became {other!r}, and nobody says so"


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every (path, value) of a document that holds no other value; generations are one."""
    inside = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    if not inside or path == ("generations",):
        yield path, value
    for key, part in inside if path != ("generations",) else ():
        yield from leaves(part, (*path, key))


# what is found without reading a row

LABELS: dict[str, object] = {
    "target_layer_ids": [1, 11, 20],
    "last_hidden_norm": "pre",
    "target_model_name_or_path": "org/other",
    "layer_id_convention": "block_input",
    "loss_mask": "all_ones",
    "hidden_size": 4,
    "num_hidden_layers": 22,
    "vocab_size": 50,
    "codec": "fp8",
    "source": "elsewhere",
    "model_fingerprint": "0" * 64,
}


@pytest.mark.parametrize("name", ["targets", "targets-captured", "targets-merged", "targets-selected"])
@pytest.mark.parametrize("label", LABELS)
def test_a_target_bank_of_edited_labels_does_not_open(edited: Callable[..., Path], name: str, label: str) -> None:
    folder = edited(name, lambda manifest: manifest.update({label: LABELS[label]}))
    for use in (
        lambda: open_bank(folder),
        lambda: open_bank(folder, expect={label: LABELS[label]}),
        lambda: open_bank(folder).to_torch(),
        lambda: export(ExportConfig(format="deepspec"), folder, folder.parent / "out"),
        lambda: merge([folder, folder], folder.parent / "out"),
        lambda: select(SelectConfig(limit=1), folder, folder.parent / "out"),
    ):
        with pytest.raises(CorruptBank, match=r"manifest\.json: .*changed after the bank was committed"):
            use()
    assert not (folder.parent / "out").exists()
    assert main(["export", str(folder), "--to", "deepspec", "--out", str(folder.parent / "out")]) == 2
    assert set(failed(folder)) == {"opens"}


@pytest.mark.parametrize("name", ["targets", "targets-captured", "targets-merged", "targets-selected"])
@pytest.mark.parametrize("label", ["target_layer_ids", "last_hidden_norm", "target_model_name_or_path", "loss_mask", "codec"])
def test_labels_are_held_against_the_recipe_also_by_a_commit_that_vouches_for_them(
    edited: Callable[..., Path], name: str, label: str
) -> None:
    with pytest.raises(CorruptBank, match=rf"{label} is .*, expected "):
        open_bank(edited(name, lambda manifest: manifest.update({label: LABELS[label]}), sealed=True))


def test_the_command_that_made_a_bank_does_not_take_an_edited_one_for_its_own(banks: every_bank.Banks, tmp_path: Path) -> None:
    config, dump = target_banks.import_config(), banks.dump("dump")
    import_targets(config, dump, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(path.read_text().replace('"last_hidden_norm": "post",\n  "layer', '"last_hidden_norm": "pre",\n  "layer'))
    with pytest.raises(CorruptBank, match='last_hidden_norm is "pre", expected "post"'):
        import_targets(config, dump, tmp_path / "out")
    import_targets(config, dump, tmp_path / "out", options=RunOptions(restart=True))
    assert failed(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "tests.banks:Other"),
        ("max_tokens", 9),
        ("train_sha256", "0" * 64),
        ("tokenizer", "x"),
        ("dim", 25),
        ("rows", 7),
    ],
)
def test_expect_is_not_met_by_an_edit(edited: Callable[..., Path], field: str, value: object) -> None:
    names = {"model": "model_path", "max_tokens": "max_key_tokens", "dim": "hidden_size"}
    folder = edited("features", lambda manifest: manifest.update({names.get(field, field): value}))
    with pytest.raises(CorruptBank, match=r"manifest\.json|rows"):
        open_bank(folder, expect={field: value})


def test_the_recipe_is_what_the_plan_digest_says(edited: Callable[..., Path]) -> None:
    with pytest.raises(CorruptBank, match=r"plan_digest is .*, expected "):
        open_bank(edited("features", lambda manifest: manifest["recipe"].update(normalize=False)))


@pytest.mark.parametrize("field", ["_fingerprint", "_split", "_format_type", "_format_kwargs", "_output_all_columns"])
def test_a_state_of_another_value_or_without_it_is_refused(banks: every_bank.Banks, tmp_path: Path, field: str) -> None:
    folder = Path(shutil.copytree(banks["texts"], tmp_path / "bank"))
    state = json.loads((folder / "state.json").read_text())
    for change in ({**state, field: 0}, {name: value for name, value in state.items() if name != field}, {**state, "more": 1}):
        (folder / "state.json").write_text(json.dumps(change))
        with pytest.raises(CorruptBank, match=r"state\.json: .*expected"):
            open_bank(folder)


def test_the_column_types_for_datasets_are_those_of_the_shards(banks: every_bank.Banks, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(banks["features"], tmp_path / "bank"))
    path = folder / "dataset_info.json"
    path.write_text(path.read_text().replace("float16", "float32"))
    with pytest.raises(
        CorruptBank, match=r'dataset_info\.json: features\.features\.feature\.dtype is "float32", expected "float16"'
    ):
        open_bank(folder)
    path.unlink()
    with pytest.raises(CorruptBank, match=r"dataset_info\.json: the file is missing"):
        open_bank(folder)


# what is found by reading


@pytest.mark.parametrize("answer", ["refuses", "a row less"])
def test_verify_opens_a_bank_as_a_trainer_does(banks: every_bank.Banks, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    whole = datasets.load_from_disk(str(banks["texts"]))

    def load(folder: str) -> datasets.Dataset:
        """Another version of `datasets`."""
        if answer == "refuses":
            raise ValueError("no such feature type")
        return whole.select(range(len(whole) - 1))

    monkeypatch.setattr(datasets, "load_from_disk", load)
    found = failed(banks["texts"])
    assert list(found) == ["dataset"]
    assert ("no such feature type" in found["dataset"]) == (answer == "refuses")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda state: state.pop("_manifest"), r"state\.json: does not list the shards|state\.json: does not vouch for format"),
        (
            lambda state: state["_manifest"]["fields"].remove("recipe"),
            r"state\.json: does not vouch for recipe of manifest\.json",
        ),
        (lambda state: state["_manifest"]["fields"].append("more"), r"manifest\.json: more is lacking\. It was changed after"),
        (lambda state: state["_manifest"].update(sha256="0" * 64), r"manifest\.json: a field is not what it was .*state\.json"),
        (lambda state: state["_manifest"].update(more=1), r"state\.json|manifest\.json: a field is not what it was"),
    ],
)
def test_a_commit_that_does_not_vouch_for_the_manifest_is_refused(
    banks: every_bank.Banks, tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    folder = Path(shutil.copytree(banks["texts"], tmp_path / "bank"))
    state = json.loads((folder / "state.json").read_text())
    edit(state)
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(CorruptBank, match=said):
        open_bank(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", every_bank.MAKERS)
def test_no_field_of_a_manifest_is_free(banks: every_bank.Banks, tmp_path: Path, name: str) -> None:
    """Each field in turn is lacking, and each has another value: the bank does not open."""
    folder = banks[name]
    path = folder / "manifest.json"
    before, rng = path.read_bytes(), random.Random(name)
    manifest = json.loads(before)
    try:
        for field in manifest:
            other = {
                **manifest,
                field: next(value for _ in range(99) if (value := another(manifest[field], rng)) != manifest[field]),
            }
            for edit in (other, {key: value for key, value in manifest.items() if key != field}):
                put(path, json.dumps(edit).encode("utf-8", "replace"))
                with pytest.raises((ArrowbankError, UnsafeName)):
                    open_bank(folder)
    finally:
        put(path, before)
    assert len(open_bank(folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["texts", "in2-c"])
@pytest.mark.parametrize("file", ["manifest.json", "state.json"])
def test_every_byte_is_vouched_for(banks: every_bank.Banks, name: str, file: str) -> None:
    """One bit of each byte in turn is flipped: the bank does not open, unless the file still says the same."""
    folder, rng = banks[name], random.Random(f"{name} {file}")
    before = (folder / file).read_bytes()
    try:
        for at, byte in enumerate(before):
            after = before[:at] + bytes([byte ^ 1 << rng.randrange(8)]) + before[at + 1 :]
            put(folder / file, after)
            try:
                open_bank(folder)
            except ArrowbankError:
                opens = False
            else:
                opens = True
            assert opens == bool(free_reason(file, before, after)), f"byte {at}: {before[max(0, at - 20) : at + 20]!r}"
    finally:
        put(folder / file, before)


@pytest.mark.parametrize("edit", [{"shards": 0}, {"shards": 10**30}, {"length": 10**30}, {"shards": None}, {"length": -1}])
def test_a_recipe_of_impossible_numbers_is_a_corrupt_bank(edited: Callable[..., Path], edit: dict[str, Any]) -> None:
    with pytest.raises(CorruptBank, match="manifest"):
        open_bank(edited("in2-c", lambda manifest: manifest["recipe"].update(edit), sealed=True))


def test_a_bank_of_an_earlier_format_says_how_it_is_built_again(edited: Callable[..., Path]) -> None:
    folder = edited("features", lambda manifest: manifest.update(format="arrowbank/1"))
    said = r'manifest\.json: format "arrowbank/1", this version reads .arrowbank/2.\. Build the bank again with `arrowbank encode`, into a'
    for use in (lambda: open_bank(folder), lambda: merge([folder, folder], folder.parent / "out")):
        with pytest.raises(InputError, match=said):
            use()
    assert "arrowbank/1" in failed(folder)["opens"]


def test_a_codec_that_this_version_does_not_know_is_named(edited: Callable[..., Path]) -> None:
    folder = edited("targets", lambda manifest: manifest.update(codec="zstd-bf16"), sealed=True)
    with pytest.raises(
        CorruptBank, match=r'manifest\.json: codec is "zstd-bf16", this version knows bf16, fp8\. Open it with a version'
    ):
        open_bank(folder)


def test_the_command_that_made_a_bank_does_not_vouch_for_an_edit(banks: every_bank.Banks, tmp_path: Path) -> None:
    config, dump = target_banks.import_config(), banks.dump("dump")
    import_targets(config, dump, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "source": "elsewhere"}))
    with pytest.raises(CorruptBank, match="a field is not what it was"):
        import_targets(config, dump, tmp_path / "out")
    path.write_text(json.dumps({**manifest, "trained_by": "me"}))
    assert import_targets(config, dump, tmp_path / "out")["trained_by"] == "me"
    assert failed(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        (
            "features",
            lambda manifest: manifest["files"].insert(0, manifest["files"].pop()),
            "files are not in the order of their names",
        ),
        ("features", lambda manifest: manifest["files"].pop(-4), "features.f16.npy is not in the list of files"),
        ("tokens", lambda manifest: manifest["counts"].update(tokens=1), "counted"),
        ("texts", lambda manifest: manifest["counts"].update(duplicates=1), "of which 1 are duplicates"),
        ("texts-merged", lambda manifest: manifest["merged"].update(shared=1), "1 shared rows"),
        ("texts-merged", lambda manifest: manifest.update(generations=[1, 69]), "ends of shards"),
        ("features", lambda manifest: manifest.update(max_key_tokens=2), "a row has 8 tokens"),
        ("targets-fp8", lambda manifest: manifest["codec_error"].pop("last"), "codec_error is of"),
        ("in2-c", lambda manifest: manifest["survivors"].update(T=1), "survivors is"),
    ],
)
def test_a_count_that_is_not_that_of_the_rows_is_named(
    edited: Callable[..., Path], name: str, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    assert said in failed(edited(name, edit, sealed=True))["manifest"]


# what is free


def test_fields_of_a_trainers_own_are_tolerated_and_listed(edited: Callable[..., Path]) -> None:
    folder = edited("features", lambda manifest: manifest.update(trained_by="me", epochs={"n": 3}))
    assert open_bank(folder, expect={"trained_by": "me", "epochs.n": 3}).manifest["trained_by"] == "me"
    assert failed(folder) == {}
    (detail,) = [check.detail for check in verify(folder) if check.name == "manifest"]
    assert detail.endswith("; extra fields: epochs, trained_by")
    assert open_bank(folder).manifest.extra == describe_any(folder)["extra_fields"] == ["epochs", "trained_by"]


def test_spelling_and_what_is_for_people_are_free(banks: every_bank.Banks, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(banks["features"], tmp_path / "bank"))
    for name in ("manifest.json", "state.json"):
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(dict(reversed(value.items())), indent=7))
    (folder / "README.md").write_text("another card")
    (folder / "build.jsonl").unlink()
    assert failed(folder) == {}
