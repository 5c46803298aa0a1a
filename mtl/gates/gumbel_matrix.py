"""Gumbel-Matrix routing: a learnt binary task x component matrix (Maziarz et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtl.distributed import broadcast
from mtl.functional import at_least_float32, logistic_noise
from mtl.gates.base import Gate
from mtl.options import InnerShare, NotNegative, Positive, Share, validated
from mtl.types import Routing


class GumbelMatrixGate(Gate):
    """Connect task t with component c with probability p_tc, and average the connected components.

    Parameter ``logits [T, C]``: log p - log(1 - p), the difference of the two complementary logits of a binary
    Gumbel-softmax; p starts at ``initial_probability``. In training a matrix is drawn for each batch, the same in all
    processes. Its gradient is straight-through: the forward pass uses the binary value, the backward pass the gradient
    of sigmoid((logit + logistic noise) / ``temperature``), so that connections that are off learn too. Evaluation takes
    the most likely matrix (a connection of probability 1/2 is on), or draws one if ``sample_in_evaluation``. Weights
    ``[T, C]`` are each row divided by its sum; a row without connections gives zeros. ``budget_weight`` times
    max(0, mean p - ``budget``) limits the expected share of connections. The gate does not depend on the example.
    """

    sums_to_one = False  # a row may be empty
    budget_weight: Tensor
    temperature: Tensor

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        temperature: Positive = 1.0,
        initial_probability: InnerShare = 0.5,
        budget: Share = 1.0,
        budget_weight: NotNegative = 0.0,
        sample_in_evaluation: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, None, **common)
        self.budget, self.sample_in_evaluation = budget, sample_in_evaluation
        self.add_schedulable("budget_weight", budget_weight)
        self.add_schedulable("temperature", temperature)
        start = torch.full((self.num_gates, num_experts), float(initial_probability))
        self.logits = nn.Parameter(start.logit())

    def probabilities(self) -> Tensor:
        """Return p, ``[T, C]``."""
        return torch.sigmoid(at_least_float32(self.logits))

    def connections(self) -> Tensor:
        """Return the most likely matrix, 0 or 1, ``[T, C]``."""
        p = self.probabilities().detach()
        return (self.logits >= 0).to(p.dtype) + 0.0 * p  # NaN stays NaN

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        drawn = self.training or self.sample_in_evaluation
        matrix = self._draw(at_least_float32(self.logits)) if drawn else self.connections()
        matrix = matrix if tasks is None else matrix[tasks]
        weights = matrix / matrix.sum(-1, keepdim=True).clamp(min=1.0)
        excess = (self.probabilities().mean() - self.budget).clamp(min=0.0)
        losses = {"budget": self.budget_weight.to(excess.dtype) * excess}
        return Routing(weights, losses, exact_zeros=not drawn)

    def _draw(self, logits: Tensor) -> Tensor:
        noisy = logits + broadcast(logistic_noise(logits.detach()))
        relaxed = torch.sigmoid(noisy / self.temperature)
        hard = (noisy > 0).to(relaxed.dtype)
        return hard + (relaxed - relaxed.detach())  # in this order the value is exactly 0 or 1
