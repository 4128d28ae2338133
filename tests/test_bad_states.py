"""Hidden states that are zero, constant or the same everywhere: refused wherever NaN is, by every importer, capture and every export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arrowbank import (
    CaptureConfig,
    ExportConfig,
    ImportConfig,
    ModelConfig,
    capture,
    export,
    import_targets,
    import_to_deepspec,
    open_bank,
    verify,
)
from arrowbank.bank.bad_states import find_bad_states
from arrowbank.bank.floats import bfloat16_bits
from arrowbank.errors import BadVector
from tests import tiny
from tests.dumps import Tensors, make_dump
from tests.exports import TARGETS

TAPS, LAST = "target_hidden_states", "target_last_hidden_states"


def zero_token(tensors: Tensors) -> None:
    tensors[TAPS][3, 1] = 0


def zero_token_of_both_signs(tensors: Tensors) -> None:
    tensors[LAST][3] = torch.tensor([0.0, -0.0] * 4)


def constant_token(tensors: Tensors) -> None:
    tensors[LAST][8] = -1.5


def zero_layer(tensors: Tensors) -> None:
    tensors[TAPS][:, 2] = 0


def same_vector(tensors: Tensors) -> None:
    tensors[TAPS][:, 0] = tensors[TAPS][4, 0].clone()


def same_last(tensors: Tensors) -> None:
    tensors[LAST][:] = tensors[LAST][4].clone()


FAULTS = [zero_token, zero_token_of_both_signs, constant_token, zero_layer, same_vector, same_last]
MESSAGE = "all zero, one value throughout, or the same at every position"


def bad_dump(folder: Path, fault: Callable[[Tensors], None]) -> Path:
    def change(row: int, tensors: Tensors) -> Tensors:
        if row == 2:
            fault(tensors)
        return tensors

    make_dump(folder, (5, 1, 9, 4), change=change)
    return folder


def config(**options: Any) -> ImportConfig:
    return ImportConfig(
        **({"target_model": "org/target", "target_layer_ids": (1, 11, 21), "last_hidden_norm": "post"} | options)
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_an_import_refuses_leaves_out_or_keeps_them(tmp_path: Path, fault: Callable[[Tensors], None]) -> None:
    dump = bad_dump(tmp_path / "dump", fault)
    for importer in (import_targets, import_to_deepspec):
        with pytest.raises(BadVector, match=f"s2.safetensors: vectors that are {MESSAGE}"):
            importer(config(), dump, tmp_path / f"refused-{importer.__name__}")
    import_targets(config(on_nonfinite="drop"), dump, tmp_path / "dropped")
    assert [open_bank(tmp_path / "dropped").read(row).name for row in range(3)] == [
        "s0.safetensors",
        "s1.safetensors",
        "s3.safetensors",
    ]
    manifest = import_targets(config(on_nonfinite="keep"), dump, tmp_path / "kept")
    assert manifest["counts"]["kept"] == 4
    assert sum(manifest["constant"].values()) in (1, 9)
    assert not all(check.ok for check in verify(tmp_path / "kept"))


@pytest.mark.parametrize("fault", FAULTS)
def test_no_export_writes_them_and_no_importer_reads_them_back(tmp_path: Path, fault: Callable[[Tensors], None]) -> None:
    dump = bad_dump(tmp_path / "dump", fault)
    for norm, formats in (("post", TARGETS), ("pre", ("speculators",))):
        bank = tmp_path / norm
        import_targets(config(last_hidden_norm=norm, on_nonfinite="keep"), dump, bank)
        for format in formats:
            with pytest.raises(BadVector, match=f"s2.safetensors: vectors that are {MESSAGE}"):
                export(ExportConfig(format=format), bank, tmp_path / "refused" / format)
            export(ExportConfig(format=format, on_nonfinite="keep"), bank, tmp_path / "kept" / format)
    for format in ("deepspec", "speculators"):
        source, same = tmp_path / "kept" / format, ImportConfig()
        with pytest.raises(BadVector, match=MESSAGE):
            import_targets(same, source, tmp_path / "again" / format)
        import_targets(ImportConfig(on_nonfinite="drop"), source, tmp_path / "less" / format)
        assert len(open_bank(tmp_path / "less" / format)) == 3


@pytest.mark.parametrize("spans", ["all", "supervised"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_capture_refuses_a_model_that_gives_them(tmp_path: Path, spans: Any, norm: Any) -> None:
    model = tiny.save_qwen3(tmp_path / "model", layers=3)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():  # a final norm whose weights were never loaded; or a model that knows no tokens
        (loaded.model.norm.weight if norm == "post" else loaded.model.embed_tokens.weight).zero_()
    loaded.save_pretrained(model)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [' + ",".join(map(str, range(3, 30))) + "]}\n")
    asked = CaptureConfig(
        model=ModelConfig(model=str(model), device="cpu"),
        data=rows,
        target_layer_ids=(0,),
        last_hidden_norm=norm,
        spans=spans,
        min_loss_tokens=1,
    )
    with pytest.raises(BadVector, match=MESSAGE):
        capture(asked, tmp_path / "bank")


def test_a_token_repeated_is_no_fault_and_neither_are_seven() -> None:
    random = np.random.default_rng(0).standard_normal((1, 3 * 8)).astype(np.float32)
    same = bfloat16_bits(np.repeat(random, 9, axis=0))
    layers = ["1", "11", "21"]
    assert find_bad_states(same, layers, np.arange(9, dtype=np.int32)).constant == dict.fromkeys(layers, 9)
    assert not find_bad_states(same, layers, np.full(9, 5, np.int32))
    assert not find_bad_states(same[:7], layers, np.arange(7, dtype=np.int32))


def test_nan_is_counted_once() -> None:
    values = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    values[2, 8:] = np.nan
    found = find_bad_states(bfloat16_bits(values), ["0", "last"], np.arange(4, dtype=np.int32))
    assert (found.nonfinite, found.constant, found.first) == ({"last": 8}, {}, 2)
