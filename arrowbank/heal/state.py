"""What a training needs to go on after a crash to the same result: in one safetensors file, published whole at each measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from arrowbank.bank.files import publishing
from arrowbank.bank.manifest import parsed_json
from arrowbank.bank.refusals import raise_refusal
from arrowbank.errors import CorruptBank
from arrowbank.formats.safetensors import write_safetensors
from arrowbank.mtp.codecs import NAMES

STATE = "state.safetensors"


@dataclass
class Progressed:
    """Where a training is. `trace` has a line a measurement; `since_best` measurements ago was the best one; `losses` since the last."""

    step: int = 0
    refreshes: int = 0
    skipped: int = 0
    best_score: float = -1.0
    best_step: int = 0
    since_best: int = 0
    stopped: bool = False
    trace: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def save_state(
    folder: Path,
    progressed: Progressed,
    *,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    optimizer: torch.optim.Adam,
    parameters: Sequence[torch.nn.Parameter],
    plan: str,
) -> None:
    """Publish the state: `weights` by role (now, best, fed), and the optimiser's moments of `parameters` in their order; with the digest
    of the `plan` that it is of.

    Weights that two roles share (the same mapping, as now and best after a better measurement) are written once.
    """
    tensors: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for role, named in weights.items():
        if first.setdefault(id(named), role) == role:
            tensors |= {f"{role}.{name}": tensor for name, tensor in named.items()}
    for index, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"adam.{index}.{name}"] = value.detach().cpu()
    whose = {role: first[id(named)] for role, named in weights.items()}
    metadata = {"progressed": json.dumps(asdict(progressed)), "weights": json.dumps(whose), "plan": plan}
    with publishing(folder / STATE, hash=None) as file:
        write_safetensors(file, {name: (NAMES[tensor.dtype], _bits(tensor)) for name, tensor in tensors.items()}, metadata)


def plan_of(folder: Path) -> str | None:
    """The digest of the plan that the state in `folder` is of; None where there is none that can be read."""
    try:
        with safe_open(folder / STATE, framework="pt") as file:
            return (file.metadata() or {}).get("plan")
    except (OSError, SafetensorError) as error:
        raise_refusal(error, folder / STATE)
        return None


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's own memory as an array; of bfloat16, which NumPy has not, the bits."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def load_state(
    folder: Path, *, roles: Sequence[str], optimizer: torch.optim.Adam, parameters: Sequence[torch.nn.Parameter]
) -> tuple[Progressed, dict[str, dict[str, torch.Tensor]]] | None:
    """The state in `folder`, the moments put into `optimizer`; None where there is none, or one that a power cut has damaged."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, Any] = file.metadata() or {}
            progressed = Progressed(**parsed_json(metadata["progressed"].encode(), strict=False))
            whose = parsed_json(metadata["weights"].encode())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, CorruptBank) as error:
        raise_refusal(error, path)
        return None
    for index, parameter in enumerate(parameters):
        prefix = f"adam.{index}."
        moments = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if moments:
            optimizer.state[parameter] = {
                name: value if name == "step" else value.to(parameter.device) for name, value in moments.items()
            }
    weights = {
        role: {name.removeprefix(f"{role}."): value for name, value in tensors.items() if name.startswith(f"{role}.")}
        for role in set(whose.values())
    }
    return progressed, {role: weights[whose[role]] for role in roles}
