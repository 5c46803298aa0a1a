"""Gumbel-Matrix routing: a learnt binary task x component matrix (Maziarz et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtl.distributed import broadcast
from mtl.gates.base import Gate
from mtl.nn.functional import at_least_float32, logistic_noise
from mtl.options import Fraction, NonNegative, OpenFraction, Positive, validated
from mtl.types import Routing


class GumbelMatrixGate(Gate):
    """Connect task t with component c with probability p_tc, and average the connected components.

    Parameter ``logits [T, C, 2]``: log p and log(1 - p), from which a binary Gumbel-softmax draws (section 4.1); only
    their difference matters, and p starts at ``initial_probability``. In training a matrix is drawn for each batch, the
    same in all processes. Its gradient is straight-through: the forward pass uses the binary value, the backward pass
    the gradient of sigmoid((difference + logistic noise) / ``temperature``), so that connections that are off learn
    too. Evaluation takes the most likely matrix (a connection of probability 1/2 is on). Weights ``[T, C]`` are each
    row divided by its sum; a row without connections gives zeros. ``budget_weight`` times max(0, mean p - ``budget``)
    limits the expected share of connections; the mean is over all layers of a network (section 4.4), whose gates
    ``share_budget`` connects. The gate does not depend on the example.
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
        initial_probability: OpenFraction = 0.5,
        budget: Fraction = 1.0,
        budget_weight: NonNegative = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, None, **common)
        self.budget = budget
        self.add_scheduled_buffer("budget_weight", budget_weight)
        self.add_scheduled_buffer("temperature", temperature, persistent=True)
        p = torch.full((self.num_gates, num_experts), float(initial_probability))
        self.logits = nn.Parameter(torch.stack([p.log(), (-p).log1p()], -1))
        self.budgeted: tuple[GumbelMatrixGate, ...] = (self,)  # a tuple: they are not parts of this gate

    @staticmethod
    def share_budget(gates: Sequence[GumbelMatrixGate]) -> None:
        """Let the first of the gates penalise the connections of all of them, and the others none."""
        for index, gate in enumerate(gates):
            gate.budgeted = () if index else tuple(gates)

    def difference(self) -> Tensor:
        """Return log p - log(1 - p), ``[T, C]``."""
        return at_least_float32(self.logits[..., 0]) - at_least_float32(self.logits[..., 1])

    def probabilities(self) -> Tensor:
        """Return p, ``[T, C]``."""
        return torch.sigmoid(self.difference())

    def connections(self) -> Tensor:
        """Return the most likely matrix, 0 or 1, ``[T, C]``."""
        difference = self.difference().detach()
        return (difference >= 0).to(difference.dtype) + 0.0 * difference.sigmoid()  # NaN stays NaN

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        matrix = self._draw(self.difference()) if self.training else self.connections()
        matrix = matrix if tasks is None else matrix[tasks]
        total = matrix.sum(-1, keepdim=True)  # whole numbers
        # As clamp(min=1), whose gradient at 1 depends on the version of torch
        weights = matrix / (total + (total == 0))
        return Routing(weights, self._penalty(), exact_zeros=not self.training)

    def _penalty(self) -> dict[str, Tensor]:
        if not self.budgeted:
            return {}
        p = torch.cat([gate.probabilities().flatten() for gate in self.budgeted])
        excess = (p.mean() - self.budget).clamp(min=0.0)
        return {"budget": self.budget_weight.to(excess.dtype) * excess}

    def _draw(self, difference: Tensor) -> Tensor:
        noisy = difference + broadcast(logistic_noise(difference.detach()))
        relaxed = torch.sigmoid(noisy / self.temperature)
        hard = (noisy > 0).to(relaxed.dtype)
        return hard + (relaxed - relaxed.detach())  # in this order the value is exactly 0 or 1
