"""Progressive layered extraction (PLE), and customized gate control (CGC) as its single level (Tang et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from mtl.checks import require
from mtl.experts.base import Experts
from mtl.experts.dispatch import Execution
from mtl.gates.base import Gate
from mtl.gates.gumbel_matrix import GumbelMatrixGate
from mtl.gates.joined import JoinedGates
from mtl.gates.permuted import Permutation, permuted
from mtl.networks.base import MultiTaskNetwork
from mtl.networks.cgc import OwnedExperts, SpreadGate
from mtl.networks.heads import Heads, SumHeads
from mtl.networks.mixture import MixtureOfExperts
from mtl.options import Count, CountOrZero, validated
from mtl.types import DataSpec, Routing


class PLE(MultiTaskNetwork):
    """Bottom, ``num_levels`` CGC layers, one head per task.

    In every level task k sees ``num_experts`` experts, ``num_own`` of its own and the others shared by all tasks, and
    mixes them by its gate; a shared gate mixes all experts. The experts and the gate of task k read the mixture of task
    k in the level below, and the shared ones read the shared mixture (Tang et al. 2020, section 4.2). All of the first
    level reads the bottom's output. The last level has no shared gate, since nothing would read its mixture.

    ``upper_experts``: the experts above the first level, which read vectors even if the first reads images (default:
    ``experts``). For the other options see ``MMoE``.
    """

    @validated
    def __init__(
        self,
        spec: DataSpec,
        num_experts: Count,
        num_own: CountOrZero,
        num_levels: Count,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., Experts],
        gate: Callable[..., Gate],
        heads: Callable[..., Heads | SumHeads],
        upper_experts: Callable[..., Experts] | None = None,
        static_gate: bool = False,
        execution: Execution = "auto",
        permutation: Callable[..., Permutation] | None = None,
    ) -> None:
        super().__init__(spec, bottom)
        require(num_own <= num_experts, f"num_own={num_own}: must be at most num_experts={num_experts}")
        require(
            num_levels == 1 or 0 < num_own < num_experts,
            f"num_own={num_own}: a task sees {num_experts} experts (num_experts); with num_levels={num_levels}, some "
            "must be its own and some shared",
        )
        shape: Any = self.bottom.output_dim  # D, or (C, H, W)
        num_tasks, num_shared = len(self.tasks), num_experts - num_own
        counts = {num_tasks: num_shared, **dict.fromkeys(range(num_tasks), num_own)}  # the shared experts come first
        owners = [owner for owner, count in counts.items() if count]
        self.levels = Levels()
        for number in range(num_levels):
            upper, last = number > 0, number == num_levels - 1
            make = upper_experts if upper and upper_experts else experts
            parts = OwnedExperts([make(num_experts=counts[owner], input_dim=shape) for owner in owners], owners)
            width = shape if isinstance(shape, int) else math.prod(shape)
            build = partial(gate, input_dim=None if static_gate else width, inputs=spec.inputs)
            seen = permuted(build(num_tasks=num_tasks, num_experts=num_experts), permutation)
            gates: Gate = SpreadGate(seen, num_own)
            if not last:
                shared = permuted(build(num_tasks=1, num_experts=parts.num_experts), permutation)
                gates = JoinedGates({"tasks": gates, "shared": shared}, num_owners=num_tasks)
            sizes = ((num_tasks + 1, shape) if upper else shape, gates.num_tasks, parts.num_experts)
            options: dict[str, Any] = {"gate_dim": width, "execution": execution}
            self.levels.append(MixtureOfExperts(*sizes, gates, parts, static_gate, **options))
            shape = parts.output_dim
        budgeted = [module for module in self.levels.modules() if isinstance(module, GumbelMatrixGate)]
        GumbelMatrixGate.share_budget(budgeted)
        self.heads = heads(tasks=self.tasks, input_dim=shape)

    def mix(self, x: Tensor, inputs: Mapping[str, Tensor], wanted: Sequence[int]) -> tuple[Tensor, dict[str, Routing]]:
        """See ``MultiTaskNetwork``."""
        return self.levels(x, inputs, wanted)

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """Return the parameters that single tasks reach, with the indices of the tasks.

        These are heads, a task's own experts in the last level, and its gates in the last two levels. Below, all tasks
        reach the experts and the gates of a task through a shared gate.
        """
        levels: Any = self.levels[-2:]
        experts, own = levels[-1].experts, self.heads.task_parameters()
        for level in levels:
            own |= level.gate.task_parameters()
        parts = zip(experts.rows, experts.parts, strict=True)
        own |= {p: [row] for row, part in parts if row < len(self.tasks) for p in part.parameters()}
        return own


class Levels(nn.ModuleList):
    """Mixtures of experts, first to last, each of which reads those below it; ``levels`` in the network."""

    def forward(
        self, x: Tensor, inputs: Mapping[str, Tensor], wanted: Sequence[int]
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Map the bottom's ``x [B, D]``, or images, to the last mixtures of the ``wanted`` tasks ``[B, t, H]``.

        Also return the routings by name. The levels below the last compute the mixtures of all tasks, and the shared.
        """
        routings: dict[str, Routing] = {}
        for number, level in enumerate(self):
            tasks = wanted if number == len(self) - 1 else None
            below = None if number == 0 else x if tasks is None else x[:, tasks]  # what each gate reads, [B, t, D]
            x, routings[f"levels.{number}"] = level(x, inputs, tasks, gate_x=below)
        return x, routings

    def only(self, task: int) -> Levels:
        """Return the part that one task uses: from the last level down, the experts in use and what they read."""
        kept, rows = Levels(), [task]
        layers: Any = reversed(self)
        for layer in layers:
            part = layer.only(*rows)
            kept.insert(0, part)
            if not isinstance(part.input_dim, int) and len(part.input_dim) == 2:  # (T + 1, D): reads a level below
                rows = sorted(set(part.experts.rows))
                part.experts.rows = [rows.index(row) for row in part.experts.rows]
                part.input_dim = (len(rows), part.input_dim[1])
        return kept
