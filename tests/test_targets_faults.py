"""`targets verify --model` cannot be fooled: a table of faults in small doses, and of differences that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arrowbank import ImportConfig, import_targets
from arrowbank.bank.checks import Check
from arrowbank.models import ModelConfig
from arrowbank.targets.check_model import choose, reach, verify_targets
from tests import tiny
from tests.dumps import Tensors, make_dump

LAYERS, TAPS = 5, (0, 1, 3)
LENGTHS = (300, 120, 40, 7, 90, 300, 64, 33)
States = dict[int, Tensors]
Spoil = Callable[[States], None]
TARGET, LAST = "target_hidden_states", "target_last_hidden_states"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 that answers: its head is sharp, so that next tokens are no ties."""
    from transformers import Qwen3ForCausalLM

    folder = tiny.save_qwen3(tmp_path_factory.mktemp("models") / "target", layers=LAYERS)
    made = Qwen3ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        made.model.norm.weight.copy_(torch.linspace(0.1, 3, made.config.hidden_size))
        for name, weight in made.named_parameters():
            if "layers" in name and weight.ndim == 2:
                weight.mul_(0.3)
    made.save_pretrained(folder)
    return folder


def run(model: Path, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Callable[[torch.Tensor], Tensors]:
    """A plain pass of transformers over one sample's ids."""
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention, dtype=dtype)
    last_block: list[torch.Tensor] = []
    made.model.layers[-1].register_forward_hook(lambda block, args, out: last_block.append(out))

    def states(ids: torch.Tensor) -> Tensors:
        with torch.inference_mode():
            out = made(ids[None], output_hidden_states=True)
        every = [*out.hidden_states[:-1], last_block.pop()]
        return {
            TARGET: torch.stack([state[0] for state in every], dim=1).float(),
            LAST: out.hidden_states[-1][0].float().clone(),
        }

    return states


def bank_of(
    tmp_path: Path, model: Path, spoil: Spoil | None = None, *, import_options: dict[str, Any] | None = None, **options: Any
) -> Path:
    """A bank of true states, spoiled."""
    states, kept = run(model, **options), {}
    draw = torch.Generator().manual_seed(0)
    for row, length in enumerate(LENGTHS):
        ids = torch.randint(0, 500, (length,), generator=draw)
        true = states(ids)
        kept[row] = {
            "input_ids": ids,
            "every": true[TARGET],
            TARGET: true[TARGET][:, [t + 1 for t in TAPS]],
            LAST: true[LAST].clone(),
        }
    if spoil is not None:
        spoil(kept)

    def change(row: int, tensors: Tensors) -> Tensors:
        mine = kept[row]
        return tensors | {
            "input_ids": mine["input_ids"].to(tensors["input_ids"].dtype),
            TARGET: mine[TARGET].bfloat16(),
            LAST: mine[LAST].bfloat16(),
        }

    make_dump(tmp_path / "dump", LENGTHS, change=change, vocab=500)
    config = ImportConfig(target_model="m", last_hidden_norm="post", **{LAYER_OPTION: TAPS}, **(import_options or {}))
    import_targets(config, tmp_path / "dump", tmp_path / "bank")
    return tmp_path / "bank"


LAYER_OPTION = next(name for name in ("layers", "target_layer_ids") if name in ImportConfig.__dataclass_fields__)


def proof(folder: Path, model: Path, **options: Any) -> dict[str, Check]:
    return {check.name: check for check in verify_targets(folder, ModelConfig(model=str(model), device="cpu"), **options)}


def noise(share: float, states: torch.Tensor) -> torch.Tensor:
    drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    return states + share * drawn * states.norm(dim=-1, keepdim=True) / states.shape[-1] ** 0.5


def noise_in_samples(kept: States) -> None:
    for row in (1, 4, 6):
        kept[row][TARGET] = noise(1.0, torch.zeros_like(kept[row][TARGET]) + kept[row][TARGET].norm(dim=-1, keepdim=True) / 6)


def noise_after_token_256(kept: States) -> None:
    for row in (0, 5):
        kept[row][TARGET][256:] = noise(1.0, kept[row][TARGET][256:])


def another_request(kept: States) -> None:
    kept[5][TARGET], kept[5][LAST] = kept[0][TARGET].clone(), kept[0][LAST].clone()


def swapped_requests(kept: States) -> None:
    kept[0][TARGET], kept[5][TARGET] = kept[5][TARGET], kept[0][TARGET]


def displaced(step: int) -> Spoil:
    def spoil(kept: States) -> None:
        for name in (TARGET, LAST):
            true = kept[0][name].clone()
            kept[0][name][200:290] = true[200 + step : 290 + step]

    return spoil


def one_stretch(kept: States) -> None:
    kept[1][TARGET][40:72, 1] = noise(0.5, kept[1][TARGET][40:72, 1])


def every_second_token(kept: States) -> None:
    kept[0][TARGET][::2] = noise(1.0, kept[0][TARGET][::2])


def quiet_noise(kept: States) -> None:
    kept[4][TARGET][:, 2] = noise(0.3, kept[4][TARGET][:, 2])


def zeros_at_the_end(kept: States) -> None:
    kept[5][TARGET][270:] = 1e-4 * torch.randn(30, len(TAPS), kept[5][TARGET].shape[-1])


def scaled(kept: States) -> None:
    kept[2][TARGET][:, 0] *= 1.3


def another_layer_in_one_sample(kept: States) -> None:
    kept[4][TARGET][:, 1] = kept[4]["every"][:, 3]


def block_before_the_last(kept: States) -> None:
    for mine in kept.values():
        mine[TARGET][:, 2] = mine["every"][:, 3]


def before_the_norm_in_one_sample(kept: States) -> None:
    kept[1][LAST] = kept[1]["every"][:, LAYERS]


def reversed_tokens(kept: States) -> None:
    kept[1][TARGET] = kept[1][TARGET].flip(0)


def a_repeated_row(kept: States) -> None:
    kept[0][TARGET][100:132] = kept[0][TARGET][99].clone()


def a_constant_added(kept: States) -> None:
    kept[6][LAST] = kept[6][LAST] + 0.5


FAULTS: dict[str, tuple[Spoil, str]] = {
    "noise in 40 % of the samples": (noise_in_samples, "sample 1, tap 0"),
    "noise after token 256": (noise_after_token_256, "tokens 25"),
    "another request's states": (another_request, "sample 5, tap 0 (layer 0), all tokens: are those of sample 0"),
    "two requests swapped": (swapped_requests, "are those of sample"),
    "displaced by 8": (displaced(8), "displaced: they are those of 8 tokens later"),
    "displaced by -1": (displaced(-1), "displaced: they are those of 1 tokens earlier"),
    "one stretch of one tap": (one_stretch, "sample 1, tap 1 (layer 1), tokens"),
    "every second token": (every_second_token, "sample 0, tap 0 (layer 0)"),
    "quiet noise in one tap": (quiet_noise, "sample 4, tap 2 (layer 3)"),
    "almost zero at the end": (zeros_at_the_end, "sample 5, tap 0 (layer 0), tokens 2"),
    "a scale": (scaled, "another scale: × 1.3"),
    "another layer in one sample": (another_layer_in_one_sample, "are those of layer 2"),
    "the block before": (block_before_the_last, "tap 2 is labelled layer 3 and is layer 2"),
    "before the norm in one sample": (before_the_norm_in_one_sample, "are pre, labelled post"),
    "tokens reversed": (reversed_tokens, "sample 1, tap 0 (layer 0)"),
    "a row repeated": (a_repeated_row, "sample 0, tap 0 (layer 0), tokens"),
    "a constant added": (a_constant_added, "sample 6, last hidden states"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_found_and_named(name: str, model: Path, tmp_path: Path) -> None:
    spoil, words = FAULTS[name]
    found = proof(bank_of(tmp_path, model, spoil), model, samples="all")
    wrong = {name: check.detail for name, check in found.items() if not check.ok}
    assert any(words in detail for detail in wrong.values()), wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "eager"},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "attention": "eager"},
        {"import_options": {"codec": "fp8"}},
        {"import_options": {"codec": "fp8"}, "dtype": torch.bfloat16},
        {"import_options": {"spans": "supervised"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("samples", [None, "all", 3])
def test_what_is_no_fault_passes(options: dict[str, Any], samples: int | str | None, model: Path, tmp_path: Path) -> None:
    found = proof(bank_of(tmp_path, model, **options), model, samples=samples)
    assert all(check.ok for check in found.values()), {name: check.detail for name, check in found.items() if not check.ok}


def test_what_can_be_found_is_said() -> None:
    assert reach(8, 8, 100) == "all 8 samples and 100 tokens were looked at"
    assert "a defect in 5.0% of the samples is found with probability 0.95" in reach(59, 10_000, 100)


@pytest.mark.parametrize("samples", [1, 2, 3, 8, 59, 99])
def test_samples_are_of_all_places_and_lengths(samples: int) -> None:
    class Rows:
        lengths = np.random.default_rng(0).integers(1, 5000, 100)
        digest = "a digest"

    chosen = choose(Rows(), samples)  # type: ignore[arg-type]
    assert len(chosen) == samples == len(set(chosen.tolist()))
    assert chosen.tolist() == choose(Rows(), samples).tolist()  # type: ignore[arg-type]
    if samples > 2:
        assert {int(Rows.lengths.argmin()), int(Rows.lengths.argmax())} <= set(chosen.tolist())
