"""STEM: embeddings that all tasks share and embeddings of each task (Su et al. 2024, arXiv 2308.13537)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtl.checks import require
from mtl.experts.base import Experts, mix
from mtl.experts.dispatch import Dispatch
from mtl.gates.base import Gate
from mtl.networks.base import MultiTaskNetwork, select_tasks
from mtl.networks.cgc import TaskExperts
from mtl.networks.heads import Heads, NoHeads
from mtl.networks.mixture import MixtureOfExperts
from mtl.options import Count, validated
from mtl.types import DataSpec, NetworkOutput, Routing, sum_losses


class StopGradientDispatch(Dispatch):
    """Mix all experts for each task, and train experts only by the tasks that ``trains [T, E]`` names."""

    trains: Tensor

    def __init__(self, trains: Tensor) -> None:
        super().__init__("dense")  # what is trained depends on the task, so all experts are computed
        self.register_buffer("trains", trains, persistent=False)

    def forward(self, experts: Experts, x: Tensor, routing: Routing) -> Tensor:
        """See ``Dispatch``."""
        outputs, weights = experts(x), routing.weights
        trained_weights = weights * (self.trains if routing.tasks is None else self.trains[routing.tasks])
        return mix(outputs, trained_weights) + mix(outputs.detach(), weights - trained_weights)


class STEM(MultiTaskNetwork):
    """A bottom of each task and a shared one, experts on each, a gate over all experts, one head per task (STEM-Net).

    ``num_task_experts`` experts of each task read its bottom, ``num_shared_experts`` the shared one. The gate of a task
    reads the sum of the task's bottom and the shared one. Every task mixes all of the experts, but its gradient reaches
    only its own experts and the shared ones: it makes use of what other tasks have learnt without changing it. Each
    bottom has embeddings of its own, so there are T + 1 times as many. For the other options see ``MMoE``.
    """

    @validated
    def __init__(
        self,
        spec: DataSpec,
        num_task_experts: Count,
        num_shared_experts: Count,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., Experts],
        gate: Callable[..., Gate],
        heads: Callable[..., Heads | NoHeads],
        static_gate: bool = False,
    ) -> None:
        super().__init__(spec)
        count = len(self.tasks)
        self.bottoms = nn.ModuleList(bottom(inputs=spec.inputs) for _ in range(count + 1))  # the last is shared
        width: Any = self.bottoms[0].output_dim
        require(isinstance(width, int), "network=stem: tasks share embeddings of rows, and images have none")
        counts = [num_task_experts] * count + [num_shared_experts]
        owned = TaskExperts([experts(num_experts=n, input_dim=width) for n in counts], range(count + 1))
        sizes = ((count + 1, width), count, sum(counts))
        self.mixture = MixtureOfExperts(*sizes, gate, owned, static_gate, inputs=spec.inputs, gate_dim=width)
        owners = torch.arange(count + 1).repeat_interleave(torch.tensor(counts))
        self.mixture.dispatch = StopGradientDispatch((owners == torch.arange(count)[:, None]) | (owners == count))
        self.heads = heads(tasks=self.tasks, input_dim=owned.output_dim)

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        task_ids = select_tasks(self.tasks, tasks)
        x = torch.stack([bottom(inputs) for bottom in self.bottoms], 1)  # [B, T + 1, D]
        mixed, routing = self.mixture(x, inputs, task_ids, gate_x=x[:, task_ids] + x[:, -1:])  # [B, T, H]
        routings = {"mixture": routing}
        return NetworkOutput(self.heads(mixed, task_ids), routings, sum_losses(routings))

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """Return the parameters that single tasks train: heads, gates, and a task's experts and bottom."""
        experts: Any = self.mixture.experts
        parameters = self.heads.task_parameters() | self.mixture.gate.task_parameters()
        for task in range(len(self.tasks)):
            parameters |= {p: [task] for part in (experts.parts[task], self.bottoms[task]) for p in part.parameters()}
        return parameters
