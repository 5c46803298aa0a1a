"""Networks of several levels of experts, each of which reads the mixtures of the level below (PLE, AdaTT)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mtl.experts.base import Experts
from mtl.experts.dispatch import Execution
from mtl.gates.base import Gate
from mtl.networks.base import MultiTaskNetwork
from mtl.networks.cgc import TaskExperts
from mtl.networks.mixture import MixtureOfExperts
from mtl.types import Routing


class LeveledNetwork(MultiTaskNetwork):
    """Base of networks with ``levels``, in which units have experts and gates; see ``add_levels``.

    The T tasks are units 0 to T - 1, and what they share is unit T. Experts and gate of a unit read the unit's mixture
    of the level below, and in the first level the bottom's output. The last level mixes for the tasks alone.
    """

    def add_levels(
        self,
        num_levels: int,
        counts: Mapping[int, int],
        experts: Callable[..., Experts],
        upper_experts: Callable[..., Experts] | None,
        gates: Callable[[int, int | None], Gate],
        static_gate: bool,
        execution: Execution,
    ) -> int:
        """Add ``levels``, and return the width of the last one's mixtures.

        ``counts``: the number of experts of each unit, in their order in the stack. ``experts(num_experts=,
        input_dim=)`` makes those of a unit in the first level, ``upper_experts`` in the others (None: ``experts`` too).
        ``gates(num_units, width)`` returns the gates of the first ``num_units`` units over all experts, which read
        ``width`` numbers, or None if they are static.
        """
        shape: Any = self.bottom.output_dim  # D, or (C, H, W)
        units = [unit for unit, count in counts.items() if count]
        self.levels = Levels()
        for number in range(num_levels):
            upper, last = number > 0, number == num_levels - 1
            make = upper_experts if upper and upper_experts else experts
            stack = TaskExperts([make(num_experts=counts[unit], input_dim=shape) for unit in units], units)
            width = shape if isinstance(shape, int) else math.prod(shape)
            mixed = len(self.tasks) if last else len(units)
            gate = gates(mixed, None if static_gate else width)
            sizes = ((len(units), shape) if upper else shape, mixed, stack.num_experts)
            options: dict[str, Any] = {"gate_dim": width, "execution": execution}
            self.levels.append(MixtureOfExperts(*sizes, gate, stack, static_gate, **options))
            shape = stack.output_dim
        return int(shape)

    def mix(
        self, x: Tensor, inputs: Mapping[str, Tensor], task_ids: Sequence[int]
    ) -> tuple[Tensor, dict[str, Routing]]:
        """See ``MultiTaskNetwork``."""
        mixed: tuple[Tensor, dict[str, Routing]] = self.levels(x, inputs, task_ids)
        return mixed


class Levels(nn.ModuleList):
    """Mixtures of experts, first to last, each of which reads those below it; ``levels`` in the network."""

    def forward(
        self, x: Tensor, inputs: Mapping[str, Tensor], task_ids: Sequence[int]
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Map the bottom's ``x [B, D]``, or images, to the last mixtures of the tasks ``task_ids`` ``[B, t, H]``.

        Also return the routings by name. The levels below the last compute the mixtures of all tasks, and the shared.
        """
        routings: dict[str, Routing] = {}
        for number, level in enumerate(self):
            tasks = task_ids if number == len(self) - 1 else None
            below = None if number == 0 else x if tasks is None else x[:, tasks]  # what each gate reads, [B, t, D]
            x, routings[f"levels.{number}"] = level(x, inputs, tasks, gate_x=below)
        return x, routings

    def only(self, task: int) -> Levels:
        """Return the part that one task uses: from the last level down, the experts in use and what they read."""
        pruned, rows = Levels(), [task]
        layers: Any = reversed(self)
        for layer in layers:
            part = layer.only(*rows)
            pruned.insert(0, part)
            if not isinstance(part.input_dim, int) and len(part.input_dim) == 2:  # (T + 1, D): reads a level below
                rows = sorted(set(part.experts.rows))
                part.experts.rows = [rows.index(row) for row in part.experts.rows]
                part.input_dim = (len(rows), part.input_dim[1])
        return pruned
