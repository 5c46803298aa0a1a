"""Task-aware top-1 gate (MT-TaG: Gupta et al. 2022): each task sends a sample to one expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtl.gates.balance import balance_loss
from mtl.gates.base import WEIGHT_RANGE, Gate, check_number
from mtl.kinds import NotNegative
from mtl.types import Routing


class TaskTop1Gate(Gate):
    """Send a sample to the most probable expert of softmax(W_t x + b_t), weighted by that probability.

    The probability is not renormalised, since the gate gets its gradient through it. ``shared=True`` is the Switch gate
    without task awareness (MT-Switch). ``balance_weight`` adds the Switch Transformer's balance loss. Parameters
    ``weight [T, E, D]``, ``bias [T, E]``; a static gate has only the bias.
    """

    sums_to_one = False

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        balance_weight: NotNegative = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        check_number("balance_weight", balance_weight)
        self.balance_weight = balance_weight
        self.add_affine("", (self.num_gates, num_experts), WEIGHT_RANGE)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        probabilities = self.affine(x, "", tasks).softmax(-1)  # [B, T, E]
        best = probabilities.argmax(-1, keepdim=True)
        selected = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(-1, best, True)
        losses = {}
        if self.balance_weight > 0:
            shape = (-1, *selected.shape[-2:])
            losses["balance"] = self.balance_weight * balance_loss(probabilities.view(shape), selected.view(shape))
        return Routing(probabilities.masked_fill(~selected, 0.0), losses)
