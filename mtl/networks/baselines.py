"""Networks without a gate: one shares everything, one shares nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from mtl.networks.heads import Heads, wanted_tasks
from mtl.options import validated
from mtl.types import DataSpec, NetworkOutput


class SharedBottom(nn.Module):
    """One bottom and one stack of dense layers for all tasks, one head per task."""

    @validated
    def __init__(
        self,
        spec: DataSpec,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., nn.Module],
        heads: Callable[..., Heads],
    ) -> None:
        super().__init__()
        self.tasks = list(spec.tasks)
        self.bottom = bottom(inputs=spec.inputs)
        self.trunk = experts(num_experts=1, input_dim=self.bottom.output_dim)
        self.heads = heads(tasks=self.tasks, input_dim=self.trunk.output_dim)

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        wanted = wanted_tasks(self.tasks, tasks)
        shared = self.trunk(self.bottom(inputs)).expand(-1, len(wanted), -1)  # [B, T, H]
        return NetworkOutput(self.heads(shared, wanted))


class SingleTask(nn.Module):
    """A separate network for each task: nothing is shared, so one run trains T single-task baselines."""

    @validated
    def __init__(
        self,
        spec: DataSpec,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., nn.Module],
        heads: Callable[..., Heads],
    ) -> None:
        super().__init__()
        self.tasks = list(spec.tasks)
        self.networks = nn.ModuleList(
            SharedBottom(replace(spec, tasks=[task]), bottom, experts, heads) for task in self.tasks
        )

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        predictions: dict[str, Tensor] = {}
        for index in wanted_tasks(self.tasks, tasks):
            predictions |= self.networks[index](inputs).predictions
        return NetworkOutput(predictions)

    def task_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that belong to single tasks: all."""
        return list(self.parameters())
