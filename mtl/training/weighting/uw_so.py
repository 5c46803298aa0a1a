"""Soft optimal uncertainty weighting, UW-SO (Kirchdorfer et al. 2024, arXiv 2408.07985)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mtl.options import Positive, validated


class SoftOptimalUncertainty(nn.Module):
    """Add the losses with the weights softmax(1 / (L T)), as constants: a task counts for more, the smaller its loss L.

    1 / L is the optimal weight of uncertainty weighting (up to a factor). The larger the ``temperature`` T, the more
    equal the weights. The losses must be positive.
    """

    @validated
    def __init__(self, shape: int | Sequence[int], temperature: Positive = 20.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, losses: Tensor) -> Tensor:
        """Return the weighted sum of ``losses [T]``."""
        smallest = torch.finfo(losses.dtype).tiny
        weights = (1 / losses.detach().clamp(min=smallest) / self.temperature).softmax(0)
        return (weights * losses).sum()
