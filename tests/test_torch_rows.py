"""`to_torch` of target banks: tensors of the right types that own their memory, batches, and DataLoader workers."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from arrowbank import ImportConfig, collate_targets, import_targets, open_bank
from arrowbank.errors import ContractError, InputError
from tests import tiny
from tests.dumps import LAYERS, LENGTHS, WIDTH, Tensors, make_dump

CONFIG = ImportConfig(target_model="org/target", target_layer_ids=(1, 11, 21), max_shard_bytes=700, loss_mask="from_dump")


@pytest.fixture
def made(tmp_path: Path) -> list[Tensors]:
    made = make_dump(tmp_path / "dump")
    import_targets(CONFIG, tmp_path / "dump", tmp_path / "bank")
    return made


def test_rows_are_dicts_of_tensors(made: list[Tensors], tmp_path: Path) -> None:
    targets = open_bank(tmp_path / "bank", expect={"target_model_name_or_path": "org/target"}).to_torch()
    assert len(targets) == len(LENGTHS)
    for row in (0, 2, 3, -1):
        found, true = targets[row], made[row]
        length = LENGTHS[row]
        assert set(found) == {"input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states"}
        assert torch.equal(found["input_ids"], true["input_ids"])
        assert torch.equal(found["loss_mask"], true["loss_mask"].to(torch.uint8))
        assert found["target_hidden_states"].dtype is torch.bfloat16
        assert torch.equal(found["target_hidden_states"], true["target_hidden_states"].reshape(length, LAYERS * WIDTH))
        assert torch.equal(found["target_last_hidden_states"], true["target_last_hidden_states"])
    found = targets[0]
    found["target_hidden_states"].zero_()  # its own memory: the bank is as it was
    assert targets[0]["target_hidden_states"].any()
    for row in (4, -5):
        with pytest.raises(IndexError):
            targets[row]


def test_a_batch_is_padded_behind(made: list[Tensors], tmp_path: Path) -> None:
    targets = open_bank(tmp_path / "bank").to_torch()
    batch = collate_targets([targets[row] for row in (3, 2)])
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 5, [1] * 9]
    assert batch["input_ids"].shape == batch["loss_mask"].shape == (2, 9)
    assert batch["target_hidden_states"].shape == (2, 9, LAYERS * WIDTH)
    assert batch["target_last_hidden_states"].dtype is torch.bfloat16
    assert torch.equal(batch["target_last_hidden_states"][0, :4], made[3]["target_last_hidden_states"])
    assert not batch["target_hidden_states"][0, 4:].any()
    assert not batch["loss_mask"][0, 4:].any()


def test_workers_of_a_loader_map_the_bank_themselves(made: list[Tensors], tmp_path: Path) -> None:
    targets = open_bank(tmp_path / "bank").to_torch()
    assert len(pickle.dumps(targets)) < 2000
    loader = DataLoader(
        targets, batch_size=2, num_workers=2, collate_fn=collate_targets, multiprocessing_context="forkserver", shuffle=False
    )
    rows = [batch["input_ids"][at][batch["attention_mask"][at] == 1] for batch in loader for at in range(2)]
    for row, tensors in zip(rows, made, strict=True):
        assert torch.equal(row, tensors["input_ids"])


def test_only_a_target_bank_of_what_is_expected_is_opened(made: list[Tensors], tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="target_layer_ids"):
        open_bank(tmp_path / "bank", expect={"target_layer_ids": [1, 2, 3]}).to_torch()
    texts = tiny.save_texts_bank(tmp_path / "texts", ["a"])
    with pytest.raises(InputError, match="a bank of texts has no PyTorch rows of its own, expected features or targets"):
        open_bank(texts).to_torch()
