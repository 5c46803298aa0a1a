"""Dense experts, stacked: all experts of a layer are one parameter and one matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.experts.kernels import (
    grouped_linear_relu_dropout,
    grouped_linear_relu_dropout_mix,
    linear_relu_dropout,
    linear_relu_dropout_mix,
    mix,
    mix_pairs,
    stacked_linear,
)
from mtl.experts.pairs import Pairs
from mtl.functional import Key, draw_key
from mtl.products import transposed
from mtl.types import require

MANY_EXPERTS = 64  # from here on sparse execution decides how weights lie in memory


class StackedLinear(nn.Module):
    """Apply E affine maps. ``weight [E, H, D]`` Glorot uniform per map, ``bias [E, H]`` zero.

    In memory the weights of few experts are one large matrix ``[E H, D]``, which dense execution multiplies as such.
    Those of ``MANY_EXPERTS`` lie as ``[E, D, H]``: an expert's output on one of its few samples is then a sum of rows.
    Sparse inference takes a third to a half less time for it, sparse training a sixth to a third; dense up to a sixth
    more.
    """

    def __init__(self, num_experts: int, input_dim: int, output_dim: int) -> None:
        super().__init__()
        bound = (6.0 / (input_dim + output_dim)) ** 0.5
        weight = torch.empty(num_experts, output_dim, input_dim).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight if num_experts < MANY_EXPERTS else transposed(weight).transpose(1, 2))
        self.bias = nn.Parameter(torch.zeros(num_experts, output_dim))

    def forward(self, x: Tensor, subset: Sequence[int] | None = None) -> Tensor:
        """Map ``x [B, D]``, the same for all, or ``[B, E, D]`` to ``[B, E, H]``; E counts ``subset`` if given."""
        weight, bias = self.parameters_of(subset)
        if x.dim() == 2 and weight.is_contiguous():  # one product for all experts
            return F.linear(x, weight.flatten(0, 1), bias.flatten()).view(len(x), *bias.shape)
        return stacked_linear(x if x.dim() == 3 else x[:, None].expand(-1, len(weight), -1), weight, bias)

    def parameters_of(self, subset: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the experts in ``subset`` (None: all)."""
        if subset is None:
            return self.weight, self.bias
        return self.weight[list(subset)], self.bias[list(subset)]


class StackedDense(nn.Module):
    """Stack of ``units`` dense layers for each of E experts, each followed by relu and dropout.

    With no units the experts pass their input on; ``output_dim`` says how wide the result is. There are three ways
    to compute, with equal results: all outputs (``forward``), their mixture without keeping more than it needs
    (``mixture``), and that from some outputs (``pairs_mixture``). Equal ``keys`` give equal dropout masks in all.
    """

    def __init__(self, num_experts: int, input_dim: int, units: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        images = isinstance(input_dim, Sequence)  # (C, H, W)
        require(not images, f"dense experts cannot take images {input_dim} as input; experts=conv does")
        require(0 <= dropout < 1, f"dropout={dropout}: must be at least 0 and less than 1")
        require(all(width >= 1 for width in units), f"units={list(units)}: every layer needs at least 1 unit")
        widths = [input_dim, *units]
        self.layers = nn.ModuleList(StackedLinear(num_experts, a, b) for a, b in pairwise(widths))
        self.num_experts, self.dropout = num_experts, dropout
        self.input_dim, self.output_dim = input_dim, widths[-1]

    def draw_keys(self) -> list[Key]:
        """Draw the keys of a step's dropout masks, one per layer."""
        random = self.training and self.dropout > 0
        return [draw_key() if random else 0 for _ in self.layers]

    def forward(self, x: Tensor, subset: Sequence[int] | None = None, keys: Sequence[Key] | None = None) -> Tensor:
        """Map ``[B, D]`` or ``[B, E, D]`` to ``[B, E, H]``; E counts ``subset`` if given."""
        return self._run(self.layers, x, subset, self.draw_keys() if keys is None else keys)

    def mixture(
        self, x: Tensor, weights: Tensor, subset: Sequence[int] | None = None, keys: Sequence[Key] | None = None
    ) -> Tensor:
        """Return the mixtures ``[B, T, H]`` of the experts' outputs on ``x [B, D]``.

        ``weights [B, T, E]`` or ``[T, E]``, where E counts ``subset`` if given.
        """
        keys = self.draw_keys() if keys is None else keys
        x = self._run(self.layers[:-1], x, subset, keys)
        if not self.layers:
            return mix(x, weights)
        weight, bias = self._layer(-1).parameters_of(subset)
        p = self.dropout if self.training else 0.0
        return linear_relu_dropout_mix(x, weight, bias, weights, p, keys[-1], self._rows(len(x), subset, x.device))

    def pairs_mixture(self, x: Tensor, weights: Tensor, pairs: Pairs, keys: Sequence[Key] | None = None) -> Tensor:
        """Return ``mixture`` by ``weights [B, T, E]`` from the outputs on their ``pairs`` alone."""
        return self.gathered_mixture(x.index_select(0, pairs.sample), weights, pairs, keys)

    def gathered_mixture(self, x: Tensor, weights: Tensor, pairs: Pairs, keys: Sequence[Key] | None = None) -> Tensor:
        """Return ``pairs_mixture`` where ``x [P, D]`` are already the inputs of the pairs."""
        keys = self.draw_keys() if keys is None else keys
        p = self.dropout if self.training else 0.0
        rows = pairs.sample * self.num_experts + pairs.expert if p > 0 else pairs.sample  # the ids choose the mask
        for place, key in list(enumerate(keys))[:-1]:
            weight, bias = self._layer(place).parameters_of(None)
            x = grouped_linear_relu_dropout(x, weight, bias, pairs.counts, p, key, rows)
        if not self.layers:
            return mix_pairs(x, weights, pairs)
        weight, bias = self._layer(-1).parameters_of(None)
        return grouped_linear_relu_dropout_mix(x, weight, bias, weights, pairs, p, keys[-1], rows)

    def _layer(self, place: int) -> StackedLinear:
        layer = self.layers[place]
        assert isinstance(layer, StackedLinear)
        return layer

    def _run(self, layers: nn.ModuleList, x: Tensor, subset: Sequence[int] | None, keys: Sequence[Key]) -> Tensor:
        if not self.layers:
            x = x[:, None] if x.dim() == 2 else x
            return x.expand(-1, self.num_experts if subset is None else len(subset), -1)
        p = self.dropout if self.training else 0.0
        for place, key in zip(range(len(layers)), keys, strict=False):
            weight, bias = self._layer(place).parameters_of(subset)
            x = linear_relu_dropout(x, weight, bias, p, key, self._rows(len(x), subset, x.device))
        return x

    def _rows(self, num_samples: int, subset: Sequence[int] | None, device: torch.device) -> Tensor:
        """Return the ids ``[B, E]`` of all pairs, as ``pairs_mixture`` has them."""
        if subset is None:
            return torch.arange(num_samples * self.num_experts, device=device).view(num_samples, self.num_experts)
        experts = torch.tensor(list(subset), dtype=torch.int64, device=device)
        return torch.arange(num_samples, device=device)[:, None] * self.num_experts + experts
