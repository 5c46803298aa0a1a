"""Softmax selectors: DSelect-k's ablation, with softmax in place of the binary codes (section 4 of its paper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtl.gates.base import WEIGHT_RANGE, Gate, entropy_loss
from mtl.options import Count, NonNegative, Positive, validated
from mtl.types import Routing


class SoftmaxSelectorGate(Gate):
    """weights = sum_j softmax(w)_j softmax(beta_j / temperature): k selectors over all experts.

    The weights become sparse when ``entropy_weight``, or a schedule that lowers ``temperature``, drives each selector
    to one expert. Parameters ``selector_weight [T, K, E, D]``, ``selector_bias [T, K, E]``, ``mix_weight [T, K, D]``,
    ``mix_bias [T, K]``; a static gate has only the biases.
    """

    entropy_weight: Tensor
    temperature: Tensor

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        k: Count = 2,
        temperature: Positive = 1.0,
        entropy_weight: NonNegative = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        self.k = k
        self.add_scheduled_buffer("entropy_weight", entropy_weight)
        self.add_scheduled_buffer("temperature", temperature, persistent=True)
        self.add_linear("selector_", (self.num_gates, k, num_experts), WEIGHT_RANGE)
        self.add_linear("mix_", (self.num_gates, k), WEIGHT_RANGE)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        selectors = (self.affine(x, "selector_", tasks) / self.temperature).softmax(-1)  # [B, T, K, E]
        mix = self.affine(x, "mix_", tasks).softmax(-1)  # [B, T, K]
        weights = (mix[..., None] * selectors).sum(-2)
        losses = {"entropy": entropy_loss(selectors, self.entropy_weight)}
        return Routing(weights, losses, selectors, exact_zeros=True)
