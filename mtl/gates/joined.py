"""Join several gates into one: of tasks with parameters of their own, or of tasks and of shared experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from mtl.gates.base import Gate
from mtl.types import InputSpec, Routing, sum_losses


class JoinedGates(Gate):
    """Several ``gates`` over the same experts as one: the tasks of the first gate, then those of the second, and so on.

    ``num_owners``: only so many of the tasks are tasks of the network, and own the parameters of their gates (default:
    all). Those after them are units that all tasks share.
    """

    def __init__(self, gates: Mapping[str, Gate], num_owners: int | None = None) -> None:
        parts = list(gates.values())
        counts = [gate.num_tasks for gate in parts]
        super().__init__(sum(counts), parts[0].num_experts, parts[0].input_dim)
        self.gates = nn.ModuleDict(gates)
        self.first = [0, *accumulate(counts)][:-1]  # the task that each gate begins with
        self.gate_of = [index for index, count in enumerate(counts) for _ in range(count)]  # of each task
        self.num_owners = self.num_tasks if num_owners is None else num_owners
        self.sums_to_one = all(gate.sums_to_one for gate in parts)
        self.reads_inputs = any(gate.reads_inputs for gate in parts)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        task_ids = list(range(self.num_tasks)) if tasks is None else tasks
        gates, parts = list(self.gates.values()), []
        for index, group in groupby(range(len(task_ids)), key=lambda column: self.gate_of[task_ids[column]]):
            columns = list(group)
            part = x if x is None or x.dim() == 2 else x[:, columns]
            parts.append(gates[index](part, inputs, [task_ids[column] - self.first[index] for column in columns]))
        return joined(parts)

    def active_fraction(self, selectors: Tensor | None) -> float:
        gates: list[Any] = list(self.gates.values())
        if {(type(gate), gate.num_tasks) for gate in gates} == {(type(gates[0]), 1)}:  # all need the same products
            return float(gates[0].active_fraction(selectors))
        if selectors is None or selectors.shape[-3] < self.num_tasks:  # of some tasks only: count all products
            return 1.0
        parts = zip(gates, selectors.split([gate.num_tasks for gate in gates], -3), strict=True)
        products = [sum(p.numel() for p in gate.parameters()) for gate in gates]
        active = (n * gate.active_fraction(part) for n, (gate, part) in zip(products, parts, strict=True))
        return sum(active) / sum(products)

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        owned: dict[nn.Parameter, Sequence[int]] = {}
        gates: Any = self.gates.values()
        for gate, first in zip(gates, self.first, strict=True):
            if first < self.num_owners:
                rows = gate.task_parameters() if gate.num_tasks > 1 else dict.fromkeys(gate.parameters(), range(1))
                owned |= {p: [first + task for task in tasks] for p, tasks in rows.items()}
        return owned


def separate_gates(
    gate: Callable[..., Gate],
    names: Sequence[str],
    num_experts: int,
    input_dim: int | None,
    inputs: Mapping[str, InputSpec] | None = None,
) -> Gate:
    """Return one gate per task of ``names``, made by the factory ``gate``, for batches of one task.

    A step on the batch of one task then changes only the gate of that task. With stacked parameters, momentum and
    weight decay would also change the gates of tasks that get no gradient. A gate that all tasks share, or that has no
    parameters, is made once for all of them.
    """
    sizes = {"num_experts": num_experts, "input_dim": input_dim, "inputs": inputs}
    built = gate(num_tasks=len(names), **sizes)
    if built.shared or not list(built.parameters()):
        return built
    return JoinedGates({task_key(name): gate(num_tasks=1, **sizes) for name in names})


def task_key(name: str) -> str:
    """Return the key of task ``name`` in a ModuleDict, which refuses dots and the names of its own attributes.

    Different names have different keys.
    """
    return "task_" + name.replace("%", "%25").replace(".", "%2E")


def joined(routings: Sequence[Routing]) -> Routing:
    """Return the routings of several tasks as one: tasks are joined, losses of the same name are added."""
    if len(routings) == 1:
        return routings[0]
    selectors = [routing.selectors for routing in routings if routing.selectors is not None]
    return Routing(
        torch.cat([routing.weights for routing in routings], -2),  # [B, T, E]
        sum_losses({str(index): routing for index, routing in enumerate(routings)}),
        torch.cat(selectors, -3) if len(selectors) == len(routings) else None,
        all(routing.exact_zeros for routing in routings),
        [task for routing in routings for task in routing.tasks or ()] or None,
        tuple(pair for routing in routings for pair in routing.measured),
    )
