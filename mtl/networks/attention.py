"""Target attention over a list (deep interest network, DIN: Zhou et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from mtl.options import Count


class TargetAttention(nn.Module):
    """Sum the elements of a history, each times its relevance to a target (Zhou et al. 2018, equation 3).

    The activation unit, dense layers of ``units`` with PReLU and a linear one, maps the embeddings of an element h and
    of the target t, their difference and their product to the weight of the element:

        v = sum_j a(h_j, t) h_j,    a(h, t) = unit([h, t, h - t, h * t])

    As in the paper, the weights are not normalized: their sum tells how much of the history is about the target.
    Padding has weight 0, and an empty history gives zeros.
    """

    def __init__(self, dim: int, units: Sequence[Count]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise([4 * dim, *units]):
            layers += [nn.Linear(a, b), nn.PReLU(b)]
        self.unit = nn.Sequential(*layers, nn.Linear([4 * dim, *units][-1], 1))

    def forward(self, history: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """Map ``history [B, S, D]`` and ``target [B, D]`` to ``[B, D]``; ``mask [B, S]`` is False at padding."""
        t = target[:, None].expand_as(history)
        pairs = torch.cat([history, t, history - t, history * t], -1)  # [B, S, 4 D]
        weights = self.unit(pairs.flatten(0, 1)).view(mask.shape)  # PReLU has its units in dimension 1
        return (weights.masked_fill(~mask, 0)[..., None] * history).sum(1)
