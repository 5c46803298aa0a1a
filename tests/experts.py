"""A kind of experts that the program does not have, written as a user would write it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.experts.base import Experts
from mtl.nn.dropout import Masks


class GatedExperts(Experts):
    """Gated linear units with dropout: f_e(x) = (W_e x + b_e) * sigmoid(V_e x + c_e) (Dauphin et al. 2017).

    ``weight [E, 2 H, D]`` holds W and V, ``bias [E, 2 H]`` b and c. Mixing, sparse execution and pruning are inherited.
    """

    def __init__(self, num_experts: int, input_dim: int, units: int, dropout: float = 0.0) -> None:
        super().__init__(num_experts, units, dropout)
        bound = (6.0 / (input_dim + units)) ** 0.5
        self.weight = nn.Parameter(torch.empty(num_experts, 2 * units, input_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_experts, 2 * units))

    def outputs(self, x: Tensor, subset: Sequence[int] | None = None, masks: Masks | None = None) -> Tensor:
        """Map ``x [B, D]`` to ``[B, E, H]``."""
        chosen = slice(None) if subset is None else list(subset)
        weight, bias = self.weight[chosen], self.bias[chosen]
        y = F.linear(x, weight.flatten(0, 1)).unflatten(1, bias.shape) + bias  # [B, E, 2 H]
        h = F.glu(y, -1)
        return h if masks is None else masks(h, 0, subset)
