"""ReLU routing (ReMoE: Wang et al. 2025): weights that an adaptive L1 penalty makes sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from mtl.checks import require
from mtl.distributed import batch_mean, batch_sum
from mtl.gates.adaptive import AdaptiveGate
from mtl.gates.base import WEIGHT_RANGE, check_k
from mtl.options import Count, Positive, validated
from mtl.types import Routing

MIN_L1, MAX_L1 = 1e-30, 1e30  # a coefficient of 0 could not grow again, and an infinite one not shrink


class ReMoEGate(AdaptiveGate):
    """weights = relu(W x + b), with a penalty that grows until a task uses ``k`` experts on average.

    A sample may use more experts than another, or none; the weights need not sum to 1. The penalty of a task is
    lambda * mean_B sum_i f_i weights_i with f_i = E / (k B) * (rows whose weight i is positive), which also balances
    the load; ``balance=False`` is plain L1, with f_i = 1. lambda starts at ``initial_l1`` and is multiplied by
    ``l1_factor`` after a step with more than ``k`` experts per row, and divided by it after one with fewer. It is the
    buffer ``l1 [T]``: each task has its own, where the paper has one for all layers. The paper starts at 1e-8 and takes
    a factor of 1.2. In runs of a few thousand steps this grows faster than the weights can follow, and switches off all
    experts of a task for good (benchmarks/accuracy/gates.md).

    Parameters ``weight [T, E, D]``, ``bias [T, E]``. The paper's routers have no bias. Ours starts around 1/E, so that
    the mixture starts near the mean of all experts. There is no static version: in trials its tasks lost all experts.
    """

    sums_to_one = False
    l1: Tensor

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        k: Count = 2,
        initial_l1: Positive = 1e-4,
        l1_factor: Annotated[float, Field(gt=1)] = 1.02,
        balance: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        check_k(k, num_experts)
        require(input_dim is not None, "the ReMoE gate cannot be static: a weight that is 0 for all rows stays 0")
        self.k, self.l1_factor, self.balance = k, l1_factor, balance
        self.register_buffer("l1", torch.full((self.num_gates,), float(initial_l1)))
        self.add_linear("", (self.num_gates, num_experts), WEIGHT_RANGE)
        with torch.no_grad():
            self.get_parameter("bias").add_(1 / num_experts)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        weights = self.affine(x, "", tasks).relu()  # [B, T, E]
        active = weights > 0
        penalty = (self._factors(active) * weights).sum(-1)  # [B, T]
        l1 = self.l1 if tasks is None else self.l1[tasks]
        losses = {"l1": batch_mean((l1.to(weights.dtype) * penalty).sum(-1))}
        excess = (active.sum(-1) - self.k).sum(0)  # [T]: experts above k, summed over the rows
        return Routing(weights, losses, exact_zeros=True, measured=self.measure(excess, tasks))

    def _factors(self, active: Tensor) -> Tensor | float:
        """Return f ``[T, E]`` for ``active [B, T, E]``; the batch is that of all processes."""
        if not self.balance:
            return 1.0
        used = batch_sum(active.to(self.l1.dtype))
        rows = batch_sum(used.new_ones(len(active)))
        return self.num_experts / (self.k * rows.clamp(min=1)) * used

    def state(self) -> Tensor:
        return self.l1

    def adapt(self, measured: Tensor) -> None:
        self.l1.mul_(self.l1_factor ** measured.sign().to(self.l1.dtype)).clamp_(MIN_L1, MAX_L1)
