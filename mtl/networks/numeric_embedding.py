"""Embed numbers, so that a network can treat small differences of a column as trees do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.nn.functional import KeepsBufferPrecision
from mtl.options import Count, validated

SOFT_BOUND = 3.0  # standard deviations from which on numbers are squeezed


def soft_clip(numbers: Tensor) -> Tensor:
    """Return x / sqrt(1 + (x / 3)^2) for numbers ``[...]`` in standard units, since a few may be far from all others.

    From RealMLP (Holzmüller et al. 2024, arXiv 2407.04491).
    """
    return numbers / (1 + (numbers / SOFT_BOUND).square()).sqrt()


class SoftClip(nn.Module):
    """Return numbers ``soft_clip`` if they have edges, and others, such as marks of missing numbers, as they are.

    ``edges``: of each number, see ``PiecewiseLinearEmbedding``.
    """

    column: Tensor

    def __init__(self, edges: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.register_buffer("column", _with_edges(edges), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [B, width]`` to the same shape."""
        return x.index_copy(1, self.column, soft_clip(x[:, self.column]))


def _with_edges(edges: Sequence[Sequence[float]]) -> Tensor:
    """Return the indices ``[C]`` of the numbers with two edges or more, which have bins."""
    return torch.tensor([index for index, column_edges in enumerate(edges) if len(column_edges) > 1], dtype=torch.int64)


class PiecewiseLinearEmbedding(KeepsBufferPrecision):
    """Give each number with edges a piecewise-linear embedding beside the number itself.

    The edges e_0 < ... < e_m of a column divide its range into m bins. A number x becomes the vector with one entry per
    bin, 0 above x, 1 below x, and linear in the bin of x (Gorishniy et al. 2022, arXiv 2203.05556, section 3.2):

        p_i(x) = clamp((x - e_(i-1)) / (e_i - e_(i-1)), 0, 1)

    Its embedding is W p(x) + v x + b, with parameters of the column's own. W starts at 0, so the embedding starts
    linear. The numbers themselves are ``soft_clip``.

    ``edges``: for each number its edges, in the units of the inputs. A number without edges is 1 where the number
    before it is missing: there p is 0. It stays as it is.
    """

    lower: Tensor
    width: Tensor
    column: Tensor
    mark: Tensor

    @validated
    def __init__(self, edges: Sequence[Sequence[float]], dim: Count) -> None:
        super().__init__()
        indices = _with_edges(edges)
        columns: list[int] = indices.tolist()
        bins = max((len(edges[column]) - 1 for column in columns), default=1)
        # A column with fewer bins has empty ones at infinity, whose entries are always 0
        lower, width = torch.full((len(columns), bins), math.inf), torch.ones(len(columns), bins)
        for row, column in enumerate(columns):
            e = torch.tensor(edges[column], dtype=torch.float64)
            lower[row, : len(e) - 1], width[row, : len(e) - 1] = e[:-1], e.diff()
        self.register_buffer("lower", lower, persistent=False)
        self.register_buffer("width", width, persistent=False)
        # Column of the mark of each number; one without a mark reads a column of zeros that ``forward`` appends
        marks = [column + 1 if column + 1 < len(edges) and not edges[column + 1] else len(edges) for column in columns]
        self.register_buffer("mark", torch.tensor(marks, dtype=torch.int64), persistent=False)
        self.register_buffer("column", indices, persistent=False)
        self.weight = nn.Parameter(torch.zeros(len(columns), bins, dim))
        self.slope = nn.Parameter(torch.randn(len(columns), dim) / 2)
        self.bias = nn.Parameter(torch.randn(len(columns), dim) / 2)
        self.output_dim = len(edges) + len(columns) * dim

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [B, width]`` to ``[B, output_dim]``."""
        numbers = x[:, self.column]  # [B, C]
        soft = soft_clip(numbers)
        inside = ((numbers[..., None] - self.lower) / self.width).clamp(0, 1)  # [B, C, m]
        missing = F.pad(x, (0, 1))[:, self.mark, None]
        inside = inside * (1 - missing)
        inside, linear = inside.to(self.weight.dtype), soft.to(self.slope.dtype)[..., None] * self.slope
        embedded = torch.einsum("bcm,cmd->bcd", inside, self.weight) + linear + self.bias
        return torch.cat([x.index_copy(1, self.column, soft), embedded.flatten(1).to(x.dtype)], 1)
