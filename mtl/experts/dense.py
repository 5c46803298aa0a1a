"""Dense experts, stacked: all experts of a layer are one parameter and one matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.functional import relu_dropout
from mtl.types import require


class StackedLinear(nn.Module):
    """Apply E affine maps. ``weight [E, H, D]`` Glorot uniform per map, ``bias [E, H]`` zero."""

    def __init__(self, num_experts: int, input_dim: int, output_dim: int) -> None:
        super().__init__()
        bound = (6.0 / (input_dim + output_dim)) ** 0.5
        self.weight = nn.Parameter(torch.empty(num_experts, output_dim, input_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_experts, output_dim))

    def forward(self, x: Tensor, subset: Sequence[int] | None = None) -> Tensor:
        """Map ``x [B, D]``, the same for all, or ``[B, E, D]`` to ``[B, E, H]``; E counts ``subset`` if given."""
        weight, bias = (
            (self.weight, self.bias) if subset is None else (self.weight[list(subset)], self.bias[list(subset)])
        )
        if x.dim() == 2:  # one product for all experts, and no transposition before the mixture
            return F.linear(x, weight.flatten(0, 1), bias.flatten()).view(len(x), *bias.shape)
        return torch.baddbmm(bias[:, None], x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


class StackedDense(nn.Module):
    """Stack of ``units`` dense layers for each of E experts, each followed by relu and dropout.

    With no units the experts pass their input on; ``output_dim`` says how wide the result is.
    """

    def __init__(self, num_experts: int, input_dim: int, units: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        require(0 <= dropout < 1, f"dropout={dropout}: must be at least 0 and less than 1")
        require(all(width >= 1 for width in units), f"units={list(units)}: every layer needs at least 1 unit")
        widths = [input_dim, *units]
        self.layers = nn.ModuleList(StackedLinear(num_experts, a, b) for a, b in pairwise(widths))
        self.num_experts, self.dropout, self.output_dim = num_experts, dropout, widths[-1]

    def forward(self, x: Tensor, subset: Sequence[int] | None = None) -> Tensor:
        """Map ``[B, D]`` or ``[B, E, D]`` to ``[B, E, H]``."""
        if not self.layers and x.dim() == 2:
            return x[:, None].expand(-1, self.num_experts if subset is None else len(subset), -1)
        for layer in self.layers:
            x = relu_dropout(layer(x, subset), self.dropout, self.training)
        return x
