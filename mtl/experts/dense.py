"""Dense experts, stacked: all experts of a layer are one parameter and one matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.experts.assignments import Assignments, mix_assigned
from mtl.experts.base import Experts
from mtl.nn.dropout import Masks
from mtl.nn.linear import affine, grouped_linear, matching
from mtl.options import Count, Dropout, validated


class StackedLinear(nn.Module):
    """Apply E affine maps. ``weight [E, H, D]`` Glorot uniform per map, ``bias [E, H]`` zero."""

    @validated
    def __init__(self, num_experts: int, input_dim: int, output_dim: int) -> None:
        super().__init__()
        bound = (6.0 / (input_dim + output_dim)) ** 0.5
        self.weight = nn.Parameter(torch.empty(num_experts, output_dim, input_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_experts, output_dim))

    def forward(self, x: Tensor, subset: Sequence[int] | None = None) -> Tensor:
        """Map ``x [B, D]``, shared by all, or ``[B, E, D]`` to ``[B, E, H]``. With a ``subset``, E is its length."""
        weight, bias = (p if subset is None else p[list(subset)] for p in (self.weight, self.bias))
        return affine(matching(x, weight), weight, bias)

    def extra_repr(self) -> str:
        """Return the sizes of the maps, as ``print`` shows them."""
        count, outputs, inputs = self.weight.shape
        return f"maps={count}, inputs={inputs}, outputs={outputs}"


class StackedDense(Experts):
    """Stack of ``units`` dense layers for each of E experts, each followed by relu and dropout.

    Without units the experts return their input.
    """

    @validated
    def __init__(
        self, num_experts: Count, input_dim: Count | Sequence[Count], units: Sequence[Count], dropout: Dropout = 0.0
    ) -> None:
        if not isinstance(input_dim, int):  # (C, H, W)
            raise InputError(f"dense experts cannot take images {input_dim} as input; experts=conv does")
        widths = [input_dim, *units]
        super().__init__(num_experts, widths[-1], dropout)
        self.input_dim = input_dim
        self.layers = nn.ModuleList(StackedLinear(num_experts, a, b) for a, b in pairwise(widths))

    def outputs(self, x: Tensor, subset: Sequence[int] | None = None, masks: Masks | None = None) -> Tensor:
        """Map ``x [B, D]``, shared by all experts, or ``[B, E, D]`` to ``[B, E, H]``."""
        for index, linear in enumerate(self.layers):
            x = linear(x, subset).relu()  # [B, E, H]
            x = x if masks is None else masks(x, index, subset)
        x = x if x.dim() == 3 else x[:, None]  # without layers
        return x.expand(-1, self.num_experts if subset is None else len(subset), -1)

    def sparse_mixture(self, x: Tensor, weights: Tensor, pairs: Assignments, masks: Masks | None = None) -> Tensor:
        """See ``Experts``."""
        return self.grouped_mixture(x.index_select(0, pairs.sample), weights, pairs, masks)

    def grouped_mixture(self, x: Tensor, weights: Tensor, pairs: Assignments, masks: Masks | None = None) -> Tensor:
        """Return ``sparse_mixture`` of ``x [P, D]``, one input per pair."""
        for index, linear in enumerate(self.layers):
            weight, bias = linear.parameters()
            x = grouped_linear(x, weight, bias, pairs.expert, pairs.counts).relu()  # [P, H]
            x = x if masks is None else masks.of_pairs(x, index, pairs.sample, pairs.expert)
        return mix_assigned(x, weights, pairs)
