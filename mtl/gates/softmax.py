"""Softmax gate (MMoE: Ma et al. 2018, equation 7): every expert gets a positive weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtl.gates.base import WEIGHT_RANGE, Gate
from mtl.options import validated
from mtl.types import Routing


class SoftmaxGate(Gate):
    """weights = softmax(W x + b). Parameters ``weight [T, E, D]``, ``bias [T, E]``; static: only the bias."""

    @validated
    def __init__(self, num_tasks: int, num_experts: int, input_dim: int | None = None, **common: Any) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        self.add_linear("", (self.num_gates, num_experts), WEIGHT_RANGE)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        return Routing(self.affine(x, "", tasks).softmax(-1), exact_zeros=True)
