"""Fixed routing: the patterns that learnt gates are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mtl.checks import require
from mtl.gates.base import Gate, check_k
from mtl.nn.seeds import make_generator
from mtl.options import Count, NonNegative, Seed, validated
from mtl.types import Routing


class FixedGate(Gate):
    """Use weights ``[T, E]`` that never change.

    ``pattern``: ``full``, all experts for all tasks; ``none``, a separate
    block of experts for each task; ``shared_bottom``, the first expert for all tasks; ``random``, ``k`` experts drawn
    with ``seed`` for each task. All experts of a task have equal weights. Alternatively, ``weights`` gives T rows of E
    numbers that sum to 1. The gate does not depend on the example.
    """

    weights: Tensor
    option_buffers = ("weights",)  # ``start_from`` leaves them as they are

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        pattern: Literal["full", "none", "shared_bottom", "random"] = "full",
        k: Count = 1,
        seed: Seed = 0,
        weights: Sequence[Sequence[NonNegative]] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, None, **common)
        table = self._pattern(pattern, k, seed) if weights is None else self._checked([list(row) for row in weights])
        self.register_buffer("weights", table / table.sum(-1, keepdim=True))

    @classmethod
    def of(cls, weights: Tensor) -> FixedGate:
        """Return a gate with exactly these ``weights [T, E]``, which need not sum to 1."""
        gate = cls(*weights.shape)
        gate.weights = weights
        return gate

    def _checked(self, rows: list[list[float]]) -> Tensor:
        fits = [len(row) for row in rows] == [self.num_experts] * self.num_gates
        require(fits, f"weights={rows}: must have {self.num_gates} rows of {self.num_experts} numbers, tasks x experts")
        table = torch.tensor(rows, dtype=torch.get_default_dtype())
        valid = torch.allclose(table.sum(-1), table.new_ones(self.num_gates))
        require(valid, "weights: every row must sum to 1")
        return table

    def _pattern(self, pattern: str, k: int, seed: int) -> Tensor:
        table = torch.zeros(self.num_gates, self.num_experts)
        if pattern == "full":
            table[:] = 1
        elif pattern == "shared_bottom":
            table[:, 0] = 1
        elif pattern == "none":
            block = self.num_experts // self.num_gates
            few = f"{self.num_gates} tasks cannot have experts of their own among {self.num_experts}"
            require(block >= 1, f"pattern=none: {few}; set network.num_experts to {self.num_gates} or more")
            for task, row in enumerate(table):
                row[task * block : (task + 1) * block] = 1
        else:
            check_k(k, self.num_experts)
            generator = make_generator(seed)
            order = torch.rand(table.shape, generator=generator, device="cpu").argsort(-1)
            table.scatter_(-1, order[:, :k].to(table.device), 1.0)
        return table

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        return Routing(self.weights if tasks is None else self.weights[tasks], exact_zeros=True)
