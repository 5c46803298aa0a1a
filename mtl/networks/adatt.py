"""AdaTT: tasks that learn which experts of other tasks to add to their own (Li et al. 2023, arXiv 2304.04959)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mtl.experts.base import Experts
from mtl.experts.dispatch import Execution
from mtl.gates.base import Gate, GateWrapper
from mtl.networks.heads import Heads, NoHeads
from mtl.networks.levels import LeveledNetwork
from mtl.options import Count, CountOrZero, validated
from mtl.types import DataSpec, Routing


class NativeExpertsGate(GateWrapper):
    """The gates of a level of AdaTT: to the weights of ``gate`` it adds weights of the unit's own experts.

    A unit is a task, or the shared experts. ``gate``: that of the U units that this level mixes, over all E experts, of
    which ``counts[u]`` in a row belong to unit u. The weights of a unit's own experts, ``native [U, E]``, are the same
    for all examples. They are learnt, from U(-c^-1/2, c^-1/2) for c own experts; if every unit has one expert, they are
    1 (the authors' code).
    """

    owned: Tensor

    def __init__(self, gate: Gate, counts: Sequence[int]) -> None:
        super().__init__(gate)
        self.sums_to_one = False
        owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        owned = torch.arange(gate.num_tasks)[:, None] == owners  # [U, E]
        self.register_buffer("owned", owned, persistent=False)
        learnt = max(counts) > 1
        bounds = owned.sum(1, keepdim=True).clamp(min=1).rsqrt()
        native = (2 * torch.rand(owned.shape) - 1) * bounds if learnt else torch.ones(owned.shape)
        self.native = nn.Parameter(native, requires_grad=learnt)

    def change(self, routing: Routing, tasks: list[int] | None) -> Routing:
        units = slice(None) if tasks is None else tasks
        native = self.native[units] * self.owned[units]
        return replace(routing, weights=routing.weights + native.to(routing.weights.dtype))

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        return {**super().task_parameters(), self.native: range(self.num_tasks)}


class AdaTT(LeveledNetwork):
    """Bottom, ``num_levels`` levels of experts, one head per task.

    In each level a task has ``num_task_experts`` experts, and there are ``num_shared_experts`` of all tasks. The
    mixture of a task is that of all experts by its gate, plus its own experts with weights that do not depend on the
    example, see ``NativeExpertsGate``. The experts and the gate of a task read its mixture of the level below; the
    shared experts are mixed like those of a task. All of the first level reads the bottom's output. For the other
    options see ``MMoE``.
    """

    @validated
    def __init__(
        self,
        spec: DataSpec,
        num_task_experts: Count,
        num_shared_experts: CountOrZero,
        num_levels: Count,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., Experts],
        gate: Callable[..., Gate],
        heads: Callable[..., Heads | NoHeads],
        upper_experts: Callable[..., Experts] | None = None,
        static_gate: bool = False,
        execution: Execution = "auto",
    ) -> None:
        super().__init__(spec, bottom)
        num_tasks = len(self.tasks)
        counts = {**dict.fromkeys(range(num_tasks), num_task_experts), num_tasks: num_shared_experts}

        def gates(num_units: int, width: int | None) -> Gate:
            sizes = {"num_tasks": num_units, "num_experts": sum(counts.values()), "input_dim": width}
            return NativeExpertsGate(gate(**sizes, inputs=spec.inputs), list(counts.values()))

        width = self.add_levels(num_levels, counts, experts, upper_experts, gates, static_gate, execution)
        self.heads = heads(tasks=self.tasks, input_dim=width)

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """Return the parameters that single tasks reach: heads, and the gates of the last level."""
        last: Any = self.levels[-1]
        return self.heads.task_parameters() | last.gate.task_parameters()
