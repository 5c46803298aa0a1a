"""Gumbel-softmax gate: a learnt on-off switch per expert (the variant DSelect-k compares with, after AdaShare)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.distributed import batch_mean
from mtl.gates.base import WEIGHT_RANGE, Gate
from mtl.nn.functional import logistic_noise
from mtl.options import NonNegative, OpenFraction, Positive, validated
from mtl.types import Routing


class GumbelSoftmaxGate(Gate):
    """weights = softmax(alpha) * U, with U_i a binary variable that is on with probability psi_i.

    In training U is drawn, with a straight-through gradient: the forward pass uses the binary value, the backward pass
    the gradient of sigmoid((logit psi + logistic noise) / ``temperature``). Evaluation takes the most likely U. Weights
    are not renormalized, so they sum to at most 1. ``sparsity_weight`` times sum_i log psi_i turns experts off.
    Parameters ``weight [T, E, D]``, ``bias [T, E]`` give alpha; ``switch_weight``, ``switch_bias`` of the same shapes
    give logit psi; psi starts at ``initial_probability``. A static gate has only the biases.
    """

    sums_to_one = False
    sparsity_weight: Tensor
    temperature: Tensor

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        temperature: Positive = 1.0,
        sparsity_weight: NonNegative = 0.0,
        initial_probability: OpenFraction = 0.9,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        self.add_scheduled_buffer("sparsity_weight", sparsity_weight)
        self.add_scheduled_buffer("temperature", temperature, persistent=True)
        shape = (self.num_gates, num_experts)
        self.add_linear("", shape, WEIGHT_RANGE)
        self.add_linear("switch_", shape, WEIGHT_RANGE)
        with torch.no_grad():
            self.get_parameter("switch_bias").add_(torch.tensor(initial_probability).logit())

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        logits = self.affine(x, "switch_", tasks)  # [B, T, E]
        noisy = logits + logistic_noise(logits) if self.training else logits
        relaxed = torch.sigmoid(noisy / self.temperature)
        hard = (noisy > 0).to(relaxed.dtype)
        learnt = relaxed if self.training else relaxed.detach()
        switch = hard + (learnt - relaxed.detach())  # in this order the value is exactly 0 or 1
        weights = self.affine(x, "", tasks).softmax(-1) * switch
        loss = self.sparsity_weight * batch_mean(F.logsigmoid(logits).sum((-2, -1)))
        return Routing(weights, {"sparsity": loss}, exact_zeros=not self.training)
