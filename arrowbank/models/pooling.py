"""From T hidden states to one vector, and on through the modules of a sentence-transformers folder.

Batches hold texts of one length, so there is no padding to mask: the mean over T is the masked mean. Sums are taken in float32 whatever
the model computes in, and the modules behind the pooling run in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from arrowbank.errors import InputError
from arrowbank.models.describe import ModelInfo
from arrowbank.models.sentence_folder import Head


def pool(hidden_NTD: torch.Tensor, how: str, skip: int = 0) -> torch.Tensor:
    """(N, T, D) hidden states → (N, D) float32.

    By "mean", "mean_sqrt" (the sum over the root of T), "weighted_mean" (weights 1 … T), "last", "cls" (the first token) or "max";
    several joined by "+" are concatenated. The first `skip` tokens do not count. By "none": (N, T, D) float32, all tokens.
    """
    if how == "none":
        return hidden_NTD.float()
    parts = [_pooled(hidden_NTD[:, skip:], one, skip) for one in how.split("+")]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _pooled(hidden_NTD: torch.Tensor, how: str, skip: int) -> torch.Tensor:
    count = hidden_NTD.shape[1]
    if how == "mean":
        return hidden_NTD.mean(dim=1, dtype=torch.float32)
    if how == "mean_sqrt":
        root: float = max(count, 1) ** 0.5
        return hidden_NTD.sum(dim=1, dtype=torch.float32) / root
    if how == "weighted_mean":
        weights = torch.arange(skip + 1, skip + count + 1, device=hidden_NTD.device, dtype=torch.float32)
        weighted: torch.Tensor = (hidden_NTD * weights[:, None]).sum(dim=1, dtype=torch.float32) / weights.sum()
        return weighted
    if how == "last":
        return hidden_NTD[:, -1].float()
    if how == "cls":
        return hidden_NTD[:, 0].float()
    if how == "max":
        return hidden_NTD.amax(dim=1).float()
    raise InputError(
        f"pooling is {how!r}; expected mean, mean_sqrt, weighted_mean, last, cls, max, or some of these joined by +"
    )


class Normalize(nn.Module):
    """(N, D) → (N, D), each of norm 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return functional.normalize(vectors, p=2, dim=-1)


class Dense(nn.Module):
    """(N, D) → (N, E): a linear layer and its activation, with the input added where the folder says so."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        sizes = int(config["in_features"]), int(config["out_features"])
        self.linear = nn.Linear(*sizes, bias=bool(config.get("bias", True)))
        self.activation: nn.Module = getattr(nn, str(config.get("activation_function", "Tanh")).rpartition(".")[2])()
        self.residual: nn.Module | None = None
        if config.get("use_residual"):
            self.residual = nn.Identity() if sizes[0] == sizes[1] else nn.Linear(*sizes, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.linear(vectors))
        return out if self.residual is None else out + self.residual(vectors)


class First(nn.Module):
    """(N, D) → (N, E): the first E numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors[:, : self.width]


def load_head(head: Head) -> nn.Module:
    """The module, float32, its weights loaded. InputError where they are not those that its config asks for."""
    if head.kind == "Normalize":
        return Normalize()
    try:
        tensors = {name.removeprefix("norm."): value.float() for name, value in load_file(head.weights).items()}
        module = Dense(dict(head.config)) if head.kind == "Dense" else nn.LayerNorm(len(tensors["weight"]))
        module.load_state_dict(tensors)
    except (SafetensorError, RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise InputError(
            f"{head.weights}: does not hold the weights of {head.kind} ({reason}). Save the model again."
        ) from None
    return module.eval().requires_grad_(False)


def heads_of(info: ModelInfo) -> nn.Sequential:
    """(N, D) pooled → (N, E) float32: the modules of the model's folder."""
    if info.sentence is None:
        return nn.Sequential()
    cut = [First(info.sentence.truncate_dim)] if info.sentence.truncate_dim is not None else []
    return nn.Sequential(*map(load_head, info.sentence.heads), *cut)
