"""Folders of other programs become target banks: vLLM's connector, SpecForge, Model-Optimizer, speculators, as their sources write them."""

from __future__ import annotations

import fcntl
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from arrowbank import ExportConfig, ImportConfig, RunOptions, export, import_targets, open_bank, verify
from arrowbank.errors import ArrowbankError, BadVector, InputError
from arrowbank.report.folders import describe_any
from arrowbank.targets.importer import find_rows
from tests import dumps, tiny
from tests.dumps import bits
from tests.target_banks import LAYERS, MODEL, make_target_bank

H, L = 8, 3
LENGTHS = (5, 9, 3)


class Made:
    """A sample: ids [S], mask [S], states [S, L + 1, H], the last slot before the final norm or after it."""

    def __init__(self, length: int, seed: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 50, (length,), generator=random)
        self.mask = torch.randint(0, 2, (length,), generator=random)
        self.states = torch.randn(length, L + 1, H, generator=random).to(dtype)


def make(dtype: torch.dtype = torch.bfloat16) -> list[Made]:
    return [Made(length, row, dtype) for row, length in enumerate(LENGTHS)]


def write_vllm(folder: Path, made: list[Made]) -> list[str]:
    """vllm 0.32.0, distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py: `_write_tensors` and `wait_for_save`."""
    folder.mkdir(parents=True)
    names = [f"cmpl-{row}-9f3a" for row in range(len(made))]
    for name, one in zip(names, made, strict=True):
        (folder / f"{name}.safetensors.lock").touch()
        save_file({"hidden_states": one.states, "token_ids": one.ids.clone()}, folder / f"{name}.safetensors")
    return names


def write_specforge(folder: Path, made: list[Made], *, group: int = 2000, gz: bool = False, dspark: bool = False) -> None:
    """sgl-project/SpecForge, scripts/prepare_hidden_states.py: `_save_tensor` and the group's folders (2000 or 5000 rows by release);
    `.ckpt.gz` as specforge 0.2.0's runtime/data_plane/offline_reader.py takes it."""
    for row, one in enumerate(made):
        start = row // group * group
        path = folder / f"rows_{start}-{start + group}" / f"data_{row}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        point = {"input_ids": one.ids.view(-1), "loss_mask": one.mask.view(-1)}
        taps, last = one.states[:, :-1].flatten(1), one.states[:, -1]
        if dspark:
            point |= {"hidden_states": taps.clone(), "target_last_hidden_states": last.clone()}
        else:
            point |= {"hidden_state": last.clone().unsqueeze(0).cpu(), "aux_hidden_state": taps.clone().unsqueeze(0).cpu()}
        torch.save(point, path)
        if gz:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()


def write_modelopt(folder: Path, made: list[Made], *, prenorm: bool | None = None, mask: bool = True) -> None:
    """NVIDIA/Model-Optimizer, examples/speculative_decoding/collect_hidden_states/compute_hidden_states_hf.py: `dump_hidden_states`; the
    fields that newer ones add are those that modelopt 0.47.0's speculative/eagle/utils.py reads."""
    folder.mkdir(parents=True)
    for row, one in enumerate(made):
        saved: dict[str, Any] = {
            "input_ids": one.ids.unsqueeze(0).squeeze(0).cpu(),
            "hidden_states": one.states[:, -1].unsqueeze(0).squeeze(0).cpu(),
            "aux_hidden_states": torch.cat([one.states[:, layer] for layer in range(L)], dim=-1),
            "conversation_id": row,
        }
        saved |= {"loss_mask": one.mask} if mask else {}
        saved |= {} if prenorm is None else {"hidden_states_prenorm": prenorm}
        with (folder / f"{row}.pt").open("wb") as file:
            torch.save(saved, file)


def write_speculators(folder: Path, made: list[Made], *, files: int | None = None) -> None:
    """speculators 0.9.0: `prepare-data` saves the dataset; cli/generate_offline_data.py moves vLLM's files beside it, as many as are
    asked for."""
    rows = {
        "input_ids": [one.ids.tolist() for one in made],
        "loss_mask": [one.mask.tolist() for one in made],
        "seq_len": [len(one.ids) for one in made],
    }
    datasets.Dataset.from_dict(rows).with_format("torch").save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for row, one in list(enumerate(made))[:files]:
        save_file({"hidden_states": one.states, "token_ids": one.ids}, folder / "hidden_states" / f"hs_{row}.safetensors")


def write_masks(path: Path, made: list[Made], names: list[str] | None = None) -> Path:
    rows = [{"input_ids": one.ids.tolist(), "loss_mask": one.mask.tolist()} for one in reversed(made)]
    for row, name in zip(rows, reversed(names or []), strict=False):
        row["id"] = name  # type: ignore[assignment]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


WRITERS: dict[str, tuple[Callable[[Path, list[Made]], object], str]] = {
    "vllm": (write_vllm, "pre"),
    "specforge": (write_specforge, "post"),
    "specforge gz": (lambda folder, made: write_specforge(folder, made, gz=True, group=2), "post"),
    "specforge dspark": (lambda folder, made: write_specforge(folder, made, dspark=True), "post"),
    "modelopt": (write_modelopt, "post"),
    "modelopt prenorm": (lambda folder, made: write_modelopt(folder, made, prenorm=True), "pre"),
    "speculators": (write_speculators, "pre"),
}


def assert_holds(bank: Any, made: list[Made], *, masks: bool = True) -> None:
    assert len(bank) == len(made)
    for row, one in enumerate(made):
        sample = bank.read(row)
        assert sample.input_ids.tolist() == one.ids.tolist()
        assert np.array_equal(sample.taps, bits(one.states[:, :-1].flatten(1)))
        assert np.array_equal(sample.last, bits(one.states[:, -1]))
        assert not masks or sample.loss_mask.tolist() == one.mask.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", WRITERS)
def test_each_becomes_a_bank_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made, (write, norm) = make(dtype), WRITERS[name]
    write(tmp_path / "folder", made)
    joined = {"masks": str(write_masks(tmp_path / "rows.jsonl", made))} if name == "vllm" else {}
    config = ImportConfig(target_model=MODEL, target_layer_ids=LAYERS, **joined)
    manifest = import_targets(config, tmp_path / "folder", tmp_path / "bank", options=RunOptions(workers=1))
    assert (manifest["last_hidden_norm"], manifest["target_layer_ids"]) == (norm, list(LAYERS))
    assert_holds(open_bank(tmp_path / "bank"), made)
    assert all(check.ok for check in verify(tmp_path / "bank"))
    with pytest.raises(InputError, match=r"last_hidden_norm is .*--relabel"):
        import_targets(
            ImportConfig(**{**vars(config), "last_hidden_norm": "post" if norm == "pre" else "pre"}),
            tmp_path / "folder",
            tmp_path / "no",
        )


@pytest.mark.parametrize("name", WRITERS)
def test_info_names_each_and_its_command_works(name: str, tmp_path: Path) -> None:
    from arrowbank.cli import main

    made, (write, _) = make(), WRITERS[name]
    write(tmp_path / "folder", made)
    found = describe_any(tmp_path / "folder")
    kinds = {"vllm": "vLLM", "specforge": "SpecForge", "modelopt": "Model-Optimizer", "speculators": "speculators"}
    assert kinds[name.split()[0]] in found["kind"]
    command = found["next"].splitlines()[-1]
    masks = write_masks(tmp_path / "rows.jsonl", made)
    values = {"NAME": MODEL, "--engine-layers LIST": "--engine-layers 2,12,22,36", "LIST": "1,11,21", "FILE": str(masks)}
    for word, value in (values | {"--out DIR": f"--out {tmp_path / 'bank'}"}).items():
        command = command.replace(word, value)
    assert main(command.split()[1:]) == 0
    bank = open_bank(tmp_path / "bank")
    assert bank.manifest["target_layer_ids"] == [1, 11, 21]
    assert_holds(bank, made)


def test_what_we_export_comes_back_with_its_own_labels(tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank")
    before = open_bank(tmp_path / "bank")
    for format in ("specforge-eagle3", "specforge-dspark", "modelopt"):
        export(ExportConfig(format=format), tmp_path / "bank", tmp_path / format)
        import_targets(ImportConfig(), tmp_path / format, tmp_path / f"{format}-back")
        back = open_bank(tmp_path / f"{format}-back")
        for label in ("target_layer_ids", "last_hidden_norm", "target_model_name_or_path", "loss_mask", "hidden_size"):
            assert back.manifest[label] == before.manifest[label], (format, label)
        for row in range(len(before)):
            one, other = before.read(row), back.read(row)
            assert all(
                np.array_equal(getattr(one, name), getattr(other, name)) for name in ("input_ids", "loss_mask", "taps", "last")
            )
        with pytest.raises(InputError, match=r"target_layer_ids is .*--relabel"):
            import_targets(ImportConfig(target_layer_ids=(2, 12, 22)), tmp_path / format, tmp_path / "no")


def test_specforge_dflash_has_no_last_hidden_states(tmp_path: Path) -> None:
    make_target_bank(tmp_path / "bank")
    export(ExportConfig(format="specforge-dflash"), tmp_path / "bank", tmp_path / "out")
    with pytest.raises(InputError, match="no last hidden states"):
        import_targets(ImportConfig(), tmp_path / "out", tmp_path / "back")


def test_vllm_masks_come_by_tokens_by_id_or_not_at_all(tmp_path: Path) -> None:
    made = [Made(5, 0, torch.bfloat16), Made(5, 0, torch.bfloat16), Made(9, 1, torch.bfloat16)]
    made[1].mask = 1 - made[1].mask
    names = write_vllm(tmp_path / "folder", made)
    config = {"target_model": MODEL, "engine_layer_ids": (2, 12, 22, 36)}
    rows = str(write_masks(tmp_path / "rows.jsonl", made))
    with pytest.raises(InputError, match=r"2 rows of --masks .* have its tokens"):
        import_targets(ImportConfig(**config, masks=rows), tmp_path / "folder", tmp_path / "bank")
    named = str(write_masks(tmp_path / "named.jsonl", made, names))
    manifest = import_targets(ImportConfig(**config, masks=named), tmp_path / "folder", tmp_path / "bank")
    assert_holds(open_bank(tmp_path / "bank"), made)
    assert (manifest["target_layer_ids"], manifest["num_hidden_layers"], manifest["loss_mask"]) == ([1, 11, 21], 36, "joined")
    few = str(write_masks(tmp_path / "few.jsonl", made[2:]))
    with pytest.raises(InputError, match="no row has its tokens"):
        import_targets(ImportConfig(**config, masks=few), tmp_path / "folder", tmp_path / "few")
    less = import_targets(ImportConfig(**config, masks=few, on_bad_sample="quarantine"), tmp_path / "folder", tmp_path / "few")
    assert (less["rows"], less["counts"]["dropped"]["quarantined"]) == (1, 2)
    plain = import_targets(ImportConfig(**config), tmp_path / "folder", tmp_path / "plain")
    assert plain["loss_mask"] == "ones_except_first"


def test_vllm_masks_of_conversations(tmp_path: Path) -> None:
    from arrowbank.models.tokenizer import load_tokenizer
    from arrowbank.targets.conversations import ChatTokenizer
    from arrowbank.targets.target_rows import samples_at

    model = tiny.save_qwen3(tmp_path / "model", chat_template=tiny.TAGGED_TEMPLATE)
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(chat) + "\n" for chat in tiny.conversations(3)))
    chat = ChatTokenizer(load_tokenizer(str(model)), "m")
    rows = [chat.tokens(record) for record in samples_at(chats)]
    made = []
    for row, (ids, mask) in enumerate(rows):
        one = Made(len(ids), row, torch.bfloat16)
        one.ids, one.mask = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask)
        made.append(one)
    write_vllm(tmp_path / "folder", made)
    config = {"target_model": MODEL, "target_layer_ids": LAYERS, "masks": str(chats)}
    with pytest.raises(InputError, match="Give --tokenizer"):
        import_targets(ImportConfig(**config), tmp_path / "folder", tmp_path / "bank")
    import_targets(ImportConfig(**config, tokenizer=str(model)), tmp_path / "folder", tmp_path / "bank")
    assert_holds(open_bank(tmp_path / "bank"), made)


def test_a_file_that_vllm_still_writes_and_a_wrong_count_of_layers(tmp_path: Path) -> None:
    (name, *_) = write_vllm(tmp_path / "folder", make())
    with (tmp_path / "folder" / f"{name}.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="vLLM still writes it"):
            import_targets(ImportConfig(target_model=MODEL), tmp_path / "folder", tmp_path / "bank")
    for said in (
        {"engine_layer_ids": (2, 36)},
        {"target_layer_ids": (1, 2)},
        {"target_layer_ids": (1, 11, 20), "engine_layer_ids": (2, 12, 22, 36)},
    ):
        with pytest.raises(InputError, match=r"layers|slots"):
            import_targets(ImportConfig(target_model=MODEL, **said), tmp_path / "folder", tmp_path / "bank")


def test_speculators_makes_files_for_some_rows_only(tmp_path: Path) -> None:
    made = make()
    write_speculators(tmp_path / "folder", made, files=2)
    manifest = import_targets(ImportConfig(target_model=MODEL, target_layer_ids=LAYERS), tmp_path / "folder", tmp_path / "bank")
    assert manifest["counts"]["dropped"] == {"quarantined": 0, "nonfinite": 0, "missing": 1}
    assert_holds(open_bank(tmp_path / "bank"), made[:2])
    (tmp_path / "folder" / "hidden_states" / "hs_0.safetensors").write_bytes(b"torn")
    config = ImportConfig(target_model=MODEL, target_layer_ids=LAYERS, on_bad_sample="quarantine")
    import_targets(config, tmp_path / "folder", tmp_path / "rest")
    assert_holds(open_bank(tmp_path / "rest"), made[1:2])
    assert "hs_0" in (tmp_path / "rest" / "quarantine.jsonl").read_text()


@pytest.mark.parametrize("name", WRITERS)
def test_a_bad_file_is_an_error_or_goes_into_quarantine(name: str, tmp_path: Path) -> None:
    made, (write, _) = make(), WRITERS[name]
    write(tmp_path / "folder", made)
    files = [
        path for path in (tmp_path / "folder").rglob("*") if path.name.endswith((".safetensors", ".ckpt", ".ckpt.gz", ".pt"))
    ]
    bad = sorted(files)[-1]
    bad.write_bytes(bad.read_bytes()[:100])
    config: dict[str, Any] = {"target_model": MODEL, "target_layer_ids": LAYERS}
    with pytest.raises(InputError, match=bad.name):
        import_targets(ImportConfig(**config), tmp_path / "folder", tmp_path / "bank")
    manifest = import_targets(ImportConfig(**config, on_bad_sample="quarantine"), tmp_path / "folder", tmp_path / "bank")
    assert manifest["counts"]["dropped"]["quarantined"] == 1
    assert_holds(open_bank(tmp_path / "bank"), made[:2], masks=name != "vllm")


@pytest.mark.parametrize("name", WRITERS)
def test_zero_constant_and_nan_are_refused_by_each(name: str, tmp_path: Path) -> None:
    for number, fault in enumerate((0.0, 2.5, float("nan"))):
        made, (write, _) = make(), WRITERS[name]
        made[1].states[4, 1] = fault
        write(tmp_path / f"folder-{number}", made)
        config: dict[str, Any] = {"target_model": MODEL, "target_layer_ids": LAYERS}
        with pytest.raises(BadVector):
            import_targets(ImportConfig(**config), tmp_path / f"folder-{number}", tmp_path / "bank")
        kept = import_targets(
            ImportConfig(**config, on_nonfinite="drop"), tmp_path / f"folder-{number}", tmp_path / f"bank-{number}"
        )
        assert kept["rows"] == 2


@pytest.mark.parametrize("shape", [(1, -1, L, H), (1, -1, L * H), (-1,), (-1, L * H), (-1, L, H)])
def test_taps_of_every_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    made = dumps.make_dump(
        tmp_path / "dump", change=lambda row, one: one | {"target_hidden_states": one["target_hidden_states"].reshape(shape)}
    )
    import_targets(ImportConfig(target_model=MODEL, target_layer_ids=LAYERS), tmp_path / "dump", tmp_path / "bank")
    bank = open_bank(tmp_path / "bank")
    for row, one in enumerate(made):
        assert np.array_equal(bank.read(row).taps.reshape(-1), bits(one["target_hidden_states"].reshape(1, -1)).reshape(-1))


def test_an_index_of_another_name(tmp_path: Path) -> None:
    dumps.make_dump(tmp_path / "dump")
    (tmp_path / "dump" / "index.jsonl").rename(tmp_path / "dump" / "samples.jsonl")
    with pytest.raises(InputError, match="--index-name"):
        import_targets(ImportConfig(target_model=MODEL), tmp_path / "dump", tmp_path / "bank")
    assert (
        import_targets(ImportConfig(target_model=MODEL, index_name="samples.jsonl"), tmp_path / "dump", tmp_path / "bank")[
            "rows"
        ]
        == 4
    )
    with pytest.raises(InputError, match="expected the name of a file"):
        ImportConfig(index_name="../samples.jsonl")


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("it ran",))

    write_modelopt(tmp_path / "folder", make())
    saved = torch.load(tmp_path / "folder" / "0.pt", weights_only=True)
    torch.save({**saved, "conversation_id": Bomb()}, tmp_path / "folder" / "1.pt")
    with pytest.raises(InputError, match=r"1\.pt: .*expected plain values and tensors"):
        import_targets(ImportConfig(target_model=MODEL), tmp_path / "folder", tmp_path / "bank")


@pytest.mark.parametrize("name", WRITERS)
def test_damage_anywhere_is_no_traceback(name: str, tmp_path: Path) -> None:
    made, (write, _) = make(), WRITERS[name]
    write(tmp_path / "folder", made)
    files = [
        path for path in (tmp_path / "folder").rglob("*") if path.name.endswith((".safetensors", ".ckpt", ".ckpt.gz", ".pt"))
    ]
    path = min(files)
    whole, random = path.read_bytes(), np.random.default_rng(0)
    for at in random.integers(0, len(whole), 120):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << int(random.integers(8)))]) + whole[at + 1 :])
        try:
            found = find_rows(ImportConfig(target_model=MODEL, on_bad_sample="quarantine"), tmp_path / "folder")
            for row in range(len(found.rows.lengths)):
                found.rows.read(row)
        except ArrowbankError:
            pass
