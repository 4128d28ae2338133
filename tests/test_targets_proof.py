"""`targets verify --model`: a bank that is a layer off, or of the wrong norm, or of another model, is found out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arrowbank import ImportConfig, import_targets, import_to_deepspec
from arrowbank.bank.checks import Check
from arrowbank.cli import main
from arrowbank.errors import InputError
from arrowbank.models import ModelConfig
from arrowbank.targets.check_model import verify_targets
from tests import tiny
from tests.dumps import Tensors, make_dump

LAYERS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 whose final norm has weights of its own: else head and argmax could not tell the two norms apart."""
    from transformers import Qwen3ForCausalLM

    folder = tiny.save_qwen3(tmp_path_factory.mktemp("models") / "target", layers=LAYERS)
    made = Qwen3ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        made.model.norm.weight.copy_(torch.linspace(0.1, 3, made.config.hidden_size))
    made.save_pretrained(folder)
    return folder


def computed(model: Path, layers: tuple[int, ...], norm: str, *, shift: int = 0) -> Callable[[int, Tensors], Tensors]:
    """What a plain forward pass of transformers gives for a dump's samples; `shift`: taps of other layers than named."""
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM.from_pretrained(model)
    last_block: list[torch.Tensor] = []
    made.model.layers[-1].register_forward_hook(lambda block, args, out: last_block.append(out))

    def change(row: int, tensors: Tensors) -> Tensors:
        with torch.inference_mode():
            out = made(tensors["input_ids"][None], output_hidden_states=True)
        states = [*out.hidden_states[:-1], last_block.pop()]
        last = out.hidden_states[-1] if norm == "post" else states[-1]
        return tensors | {
            "target_hidden_states": torch.stack([states[layer + 1 + shift][0] for layer in layers], dim=1).bfloat16(),
            "target_last_hidden_states": last[0].bfloat16(),
        }

    return change


def proof(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def checks_of(tmp_path: Path, model: Path, *, true: str = "post", label: str = "post", shift: int = 0, **options: Any) -> Any:
    layers = options.pop("target_layer_ids", (0, 1, 3))
    make_dump(tmp_path / "dump", (30, 12, 25), change=computed(model, (0, 1, 3), true, shift=shift), vocab=500)
    config = ImportConfig(target_model="m", target_layer_ids=layers, last_hidden_norm=label, **options)
    import_targets(config, tmp_path / "dump", tmp_path / "bank")
    return proof(verify_targets(tmp_path / "bank", ModelConfig(model=str(model))))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("options", [{}, {"codec": "fp8"}, {"spans": "supervised"}], ids=str)
def test_hidden_states_as_labelled_are_proved(tmp_path: Path, model: Path, norm: str, options: dict[str, Any]) -> None:
    found = checks_of(tmp_path, model, true=norm, label=norm, **options)
    assert all(check.ok for check in found.values()), found
    assert "taps are layers 0, 1, 3 of 5" in found["layers"].detail
    assert f"labelled {norm}, they are {norm}" in found["norm"].detail


@pytest.mark.parametrize("shift", [1, -1])
def test_a_bank_that_is_a_layer_off_is_found_out(tmp_path: Path, model: Path, shift: int) -> None:
    found = checks_of(tmp_path, model, shift=shift)
    assert [name for name, check in found.items() if not check.ok] == ["layers"]
    assert f"all taps are {shift:+d} layers from their labels" in found["layers"].detail
    assert f"tap 2 is labelled layer 3 and is layer {3 + shift}" in found["layers"].detail


@pytest.mark.parametrize(("true", "label"), [("post", "pre"), ("pre", "post")])
def test_a_bank_of_the_wrong_norm_is_found_out(tmp_path: Path, model: Path, true: str, label: str) -> None:
    found = checks_of(tmp_path, model, true=true, label=label)
    assert [name for name, check in found.items() if not check.ok] == ["norm"]
    assert f"labelled {label}, they are {true}" in found["norm"].detail
    said = re.findall(r"(post|pre): [\d.]+% off, ([\d.]+)% of next tokens agree", found["norm"].detail)
    agreement = {norm: float(percent) for norm, percent in said}
    assert agreement[true] > 95
    assert agreement[true] > agreement[label]


def test_an_unknown_norm_is_named(tmp_path: Path, model: Path) -> None:
    found = checks_of(tmp_path, model, true="pre", label="unknown")
    assert found["norm"].ok
    assert "export with --last-hidden-norm pre" in found["norm"].detail


def test_layers_that_nobody_named_are_named_and_not_passed(tmp_path: Path, model: Path) -> None:
    found = checks_of(tmp_path, model, target_layer_ids=None)
    assert not found["layers"].ok
    assert "they are 0, 1, 3" in found["layers"].detail


def test_hidden_states_of_another_model_are_like_no_layer(tmp_path: Path, model: Path, tiny_qwen3: Path) -> None:
    make_dump(tmp_path / "dump", (30, 12), change=computed(model, (0, 1), "post"), vocab=500)
    import_targets(ImportConfig(target_model="m", target_layer_ids=(0, 1)), tmp_path / "dump", tmp_path / "bank")
    from transformers import Qwen3ForCausalLM

    other = Qwen3ForCausalLM.from_pretrained(tiny_qwen3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(torch.linspace(-1, 2, weight.shape[-1]))
    other.save_pretrained(tmp_path / "other")
    found = proof(verify_targets(tmp_path / "bank", ModelConfig(model=str(tmp_path / "other"))))
    assert "is like no layer" in found["layers"].detail
    assert "like neither convention" in found["norm"].detail
    assert not found["layers"].ok
    assert not found["norm"].ok


def test_embeddings_are_layer_minus_one_and_a_cache_is_proved_too(tmp_path: Path, model: Path) -> None:
    make_dump(tmp_path / "dump", (30, 12), change=computed(model, (-1, 4), "post"), vocab=500)
    config = ImportConfig(target_model="m", target_layer_ids=(-1, 4))
    import_to_deepspec(config, tmp_path / "dump", tmp_path / "cache")
    found = proof(verify_targets(tmp_path / "cache", ModelConfig(model=str(model))))
    assert all(check.ok for check in found.values()), found
    assert "taps are layers -1, 4 of 5" in found["layers"].detail


def test_a_model_of_another_shape_is_refused(tmp_path: Path, model: Path) -> None:
    make_dump(tmp_path / "dump")
    import_targets(ImportConfig(target_model="m", target_layer_ids=(0, 1, 2)), tmp_path / "dump", tmp_path / "bank")
    with pytest.raises(InputError, match=r"hidden states of width 8, up to layer 2; .* has width 32 and layers 0 to 4"):
        verify_targets(tmp_path / "bank", ModelConfig(model=str(model)))


def test_the_command_line_says_so_with_its_exit_code(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dump(tmp_path / "dump", (30, 12), change=computed(model, (0, 1, 3), "post", shift=1), vocab=500)
    bank = str(tmp_path / "bank")
    argv = ["targets", "import", str(tmp_path / "dump"), "--out", bank, "--target-model", "m", "--layers"]
    assert main([*argv, "0,1,3"]) == 0
    assert main(["targets", "verify", bank]) == 0
    capsys.readouterr()
    assert main(["targets", "verify", bank, "--model", str(model)]) == 1
    assert "FAIL  layers    all taps are +1 layers from their labels" in capsys.readouterr().out
    assert main([*argv, "1,2,4", "--restart"]) == 0
    assert main(["targets", "verify", bank, "--model", str(model)]) == 0


def test_all_tokens_are_looked_at(tmp_path: Path, model: Path) -> None:
    def late(
        row: int, tensors: Tensors
    ) -> Tensors:  # the loss, and so all that is kept, is at the end; and it is no state of the model
        return tensors | {"loss_mask": (torch.arange(len(tensors["input_ids"])) > 280).long()}

    make_dump(tmp_path / "dump", (300, 290), change=late, layers=3, width=32, vocab=500)
    config = ImportConfig(target_model="m", target_layer_ids=(0, 1, 3), spans="supervised")
    import_targets(config, tmp_path / "dump", tmp_path / "bank")
    found = proof(verify_targets(tmp_path / "bank", ModelConfig(model=str(model))))
    assert {"layers", "norm"} <= {name for name, check in found.items() if not check.ok}
