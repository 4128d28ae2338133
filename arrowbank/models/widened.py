"""bfloat16 linear layers on a CPU that has no bfloat16 instructions.

There, torch multiplies bfloat16 at about a tenth of its float32 rate. A bfloat16 is a float32 with 16 zero bits, and bfloat16
hardware sums its products in float32: so the same product on widened operands, rounded once at the end, has the same meaning
and runs at the float32 rate. Activations between layers stay bfloat16. The price is float32's memory for these weights.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class WidenedLinear(nn.Module):
    """`linear`, a bfloat16 nn.Linear, with its weights kept in float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        self.weight = nn.Parameter(linear.weight.detach().float(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.float(), self.weight, self.bias).to(self.dtype)


def widen_linears(model: nn.Module) -> None:
    """Replace every plain bfloat16 nn.Linear of `model` in place; subclasses (quantised ones, say) are left alone."""
    for name, child in model.named_children():
        if type(child) is nn.Linear and child.weight.dtype is torch.bfloat16:
            setattr(model, name, WidenedLinear(child))
        else:
            widen_linears(child)
