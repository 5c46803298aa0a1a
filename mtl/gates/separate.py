"""Give each task a gate with parameters of its own, for batches of one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtl.gates.base import Gate
from mtl.types import InputSpec, Routing, sum_losses


class SeparateGates(Gate):
    """One gate per task, by name: a step on the batch of one task changes only the gate of that task.

    With stacked parameters, momentum and weight decay would also change the gates of tasks that get no gradient.
    ``gates``: one gate of one task for each name.
    """

    def __init__(self, gates: Mapping[str, Gate]) -> None:
        first = next(iter(gates.values()))
        super().__init__(len(gates), first.num_experts, first.input_dim)
        self.by_task = nn.ModuleDict({task_key(name): gate for name, gate in gates.items()})
        self.names, self.sums_to_one, self.reads_inputs = list(gates), first.sums_to_one, first.reads_inputs

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        wanted = range(self.num_tasks) if tasks is None else tasks
        own = [x] * len(wanted) if x is None or x.dim() == 2 else x.unbind(1)
        gates = [self.by_task[task_key(self.names[task])] for task in wanted]
        return joined([gate(x, inputs) for gate, x in zip(gates, own, strict=True)])

    def needed(self, selectors: Tensor | None) -> float:
        first: Any = next(iter(self.by_task.values()))  # the gates are alike
        return float(first.needed(selectors))

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        return {p: [task] for task, gate in enumerate(self.by_task.values()) for p in gate.parameters()}


def separate_gates(
    gate: Callable[..., Gate],
    names: Sequence[str],
    num_experts: int,
    input_dim: int | None,
    inputs: Mapping[str, InputSpec] | None = None,
) -> Gate:
    """Return one gate per task of ``names``, made by the factory ``gate``.

    A gate that all tasks share, or that has no parameters, is made once for all of them.
    """
    sizes = {"num_experts": num_experts, "input_dim": input_dim, "inputs": inputs}
    built = gate(num_tasks=len(names), **sizes)
    if built.shared or not list(built.parameters()):
        return built
    return SeparateGates({name: gate(num_tasks=1, **sizes) for name in names})


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
