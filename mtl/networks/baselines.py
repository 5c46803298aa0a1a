"""Networks without a gate: one shares everything, one nothing, one within groups of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from mtl.checks import require
from mtl.networks.base import MultiTaskNetwork, select_tasks
from mtl.networks.heads import Heads
from mtl.options import Name, NonEmpty, validated
from mtl.types import DataSpec, NetworkOutput, Routing


class SharedBottom(MultiTaskNetwork):
    """One bottom and one stack of dense layers for all tasks, one head per task."""

    @validated
    def __init__(
        self,
        spec: DataSpec,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., nn.Module],
        heads: Callable[..., Heads],
    ) -> None:
        super().__init__(spec, bottom)
        self.trunk = experts(num_experts=1, input_dim=self.bottom.output_dim)
        self.heads = heads(tasks=self.tasks, input_dim=self.trunk.output_dim)

    def mix(
        self, x: Tensor, inputs: Mapping[str, Tensor], task_ids: Sequence[int]
    ) -> tuple[Tensor, dict[str, Routing]]:
        """See ``MultiTaskNetwork``."""
        return self.trunk(x), {}  # [B, 1, H]


class Grouped(MultiTaskNetwork):
    """A separate ``SharedBottom`` for each of the ``groups`` of tasks; None: one group of all."""

    @validated
    def __init__(
        self,
        spec: DataSpec,
        groups: Sequence[NonEmpty[Name]] | None,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., nn.Module],
        heads: Callable[..., Heads],
    ) -> None:
        super().__init__(spec)
        tasks_by_name = {task.name: task for task in spec.tasks}
        groups = [list(tasks_by_name)] if groups is None else groups
        fits = sorted(name for group in groups for name in group) == sorted(tasks_by_name)
        message = f"groups={[list(group) for group in groups]}: must contain each task once: {', '.join(tasks_by_name)}"
        require(fits, message)
        parts = [replace(spec, tasks=[tasks_by_name[name] for name in group]) for group in groups]
        self.networks = nn.ModuleList(SharedBottom(part, bottom, experts, heads) for part in parts)
        self.groups = [list(group) for group in groups]

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        names = [self.tasks[index].name for index in select_tasks(self.tasks, tasks)]
        predictions: dict[str, Tensor] = {}
        for network, group in zip(self.networks, self.groups, strict=True):
            if group_names := [name for name in group if name in names]:
                predictions |= network(inputs, group_names).predictions
        return NetworkOutput({name: predictions[name] for name in names})


class SingleTask(Grouped):
    """A separate network for each task: nothing is shared, so one run trains T single-task baselines."""

    @validated
    def __init__(
        self,
        spec: DataSpec,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., nn.Module],
        heads: Callable[..., Heads],
    ) -> None:
        super().__init__(spec, [[task.name] for task in spec.tasks], bottom, experts, heads)
