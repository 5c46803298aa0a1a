"""Multi-gate mixture of experts (MMoE: Ma et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mtl.experts.dispatch import Dispatch, Experts
from mtl.gates.base import Gate
from mtl.networks.heads import Heads, wanted_tasks
from mtl.permutation import Permutation
from mtl.types import DataSpec, NetworkOutput, require


class MMoE(nn.Module):
    """Bottom, stacked experts, one gate per task on the bottom's output, one head per task.

    ``bottom(inputs=...)``, ``experts(num_experts=, input_dim=)``, ``gate(num_tasks=, num_experts=, input_dim=,
    inputs=)`` and ``heads(tasks=, input_dim=)`` are factories; their sizes follow from ``spec``. With
    ``static_gate`` the gates do not look at the example; with ``gate_trunk(num_experts=1, input_dim=)`` they look at
    what this small network makes of it, one for all tasks. ``execution``: see ``Dispatch``;
    ``permutation(num_experts=, num_tasks=)``: local search around the gate.
    """

    def __init__(
        self,
        spec: DataSpec,
        num_experts: int,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., Experts],
        gate: Callable[..., Gate],
        heads: Callable[..., Heads],
        static_gate: bool = False,
        execution: str = "auto",
        permutation: Callable[..., Permutation] | None = None,
        gate_trunk: Callable[..., nn.Module] | None = None,
    ) -> None:
        super().__init__()
        require(num_experts >= 1, f"network.num_experts={num_experts}: must be at least 1")
        self.tasks = list(spec.tasks)
        self.bottom = bottom(inputs=spec.inputs)
        shape: Any = self.bottom.output_dim  # D, or (C, H, W)
        self.experts = experts(num_experts=num_experts, input_dim=shape)
        require(not (static_gate and gate_trunk), "network.static_gate=true looks at no example: no gate_trunk either")
        self.gate_trunk = gate_trunk and gate_trunk(num_experts=1, input_dim=shape)
        width: Any = shape if self.gate_trunk is None else self.gate_trunk.output_dim
        gate_width = None if static_gate else width if isinstance(width, int) else math.prod(width)
        self.gate = gate(num_tasks=len(self.tasks), num_experts=num_experts, input_dim=gate_width, inputs=spec.inputs)
        self.permutation = permutation and permutation(num_experts=num_experts, num_tasks=len(self.tasks))
        self.dispatch = Dispatch(execution)
        self.heads = heads(tasks=self.tasks, input_dim=self.experts.output_dim)

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        wanted = wanted_tasks(self.tasks, tasks)
        x = self.bottom(inputs)  # [B, D], or images [B, C, H, W]
        seen = x if self.gate_trunk is None else self.gate_trunk(x)
        routing = self.gate(seen.flatten(1), inputs, None if len(wanted) == len(self.tasks) else wanted)
        if self.permutation is not None:
            routing = self.permutation(routing, wanted, self.gate.sums_to_one)
        mixed = self.dispatch(self.experts, x, routing)  # [B, T, H]
        return NetworkOutput(self.heads(mixed, wanted), routing, routing.losses)
