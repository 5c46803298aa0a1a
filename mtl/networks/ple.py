"""Progressive layered extraction (PLE), and customized gate control (CGC) as its single level (Tang et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from mtl.checks import require
from mtl.experts.base import Experts
from mtl.experts.dispatch import Execution
from mtl.gates.base import Gate
from mtl.gates.gumbel_matrix import GumbelMatrixGate
from mtl.gates.joined import JoinedGates
from mtl.gates.permuted import Permutation, permuted
from mtl.networks.cgc import SpreadGate
from mtl.networks.heads import Heads, NoHeads
from mtl.networks.levels import LeveledNetwork
from mtl.options import Count, CountOrZero, validated
from mtl.types import DataSpec


class PLE(LeveledNetwork):
    """Bottom, ``num_levels`` CGC layers, one head per task.

    In every level task k sees ``num_experts`` experts: ``num_task_experts`` of its own, the others shared by all tasks,
    and mixes them by its gate; a shared gate mixes all experts. The experts and the gate of task k read the mixture of
    task k in the level below, and the shared ones read the shared mixture (Tang et al. 2020, section 4.2). All of the
    first level reads the bottom's output. The last level has no shared gate, since nothing would read its mixture.

    ``upper_experts``: the experts above the first level, which read vectors even if the first reads images (default:
    ``experts``). For the other options see ``MMoE``.
    """

    @validated
    def __init__(
        self,
        spec: DataSpec,
        num_experts: Count,
        num_task_experts: CountOrZero,
        num_levels: Count,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., Experts],
        gate: Callable[..., Gate],
        heads: Callable[..., Heads | NoHeads],
        upper_experts: Callable[..., Experts] | None = None,
        static_gate: bool = False,
        execution: Execution = "auto",
        permutation: Callable[..., Permutation] | None = None,
    ) -> None:
        super().__init__(spec, bottom)
        message = f"num_task_experts={num_task_experts}: must be at most num_experts={num_experts}"
        require(num_task_experts <= num_experts, message)
        require(
            num_levels == 1 or 0 < num_task_experts < num_experts,
            f"num_task_experts={num_task_experts}: a task sees {num_experts} experts (num_experts); with "
            f"num_levels={num_levels}, some must be its own and some shared",
        )
        num_tasks, num_shared_experts = len(self.tasks), num_experts - num_task_experts
        # the shared experts come first
        counts = {num_tasks: num_shared_experts, **dict.fromkeys(range(num_tasks), num_task_experts)}

        def gates(num_units: int, width: int | None) -> Gate:
            build = partial(gate, input_dim=width, inputs=spec.inputs)
            task_gates = permuted(build(num_tasks=num_tasks, num_experts=num_experts), permutation)
            spread = SpreadGate(task_gates, num_task_experts)
            if num_units == num_tasks:
                return spread
            shared_gate = permuted(build(num_tasks=1, num_experts=spread.num_experts), permutation)
            return JoinedGates({"tasks": spread, "shared": shared_gate}, num_owners=num_tasks)

        width = self.add_levels(num_levels, counts, experts, upper_experts, gates, static_gate, execution)
        budgeted = [module for module in self.levels.modules() if isinstance(module, GumbelMatrixGate)]
        GumbelMatrixGate.share_budget(budgeted)
        self.heads = heads(tasks=self.tasks, input_dim=width)

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """Return the parameters that single tasks reach, with the indices of the tasks.

        These are heads, a task's own experts in the last level, and its gates in the last two levels. Below, all tasks
        reach the experts and the gates of a task through a shared gate.
        """
        levels: Any = self.levels[-2:]
        experts, parameters = levels[-1].experts, self.heads.task_parameters()
        for level in levels:
            parameters |= level.gate.task_parameters()
        parts = zip(experts.rows, experts.parts, strict=True)
        parameters |= {p: [row] for row, part in parts if row < len(self.tasks) for p in part.parameters()}
        return parameters
