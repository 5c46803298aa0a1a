"""Static mixture of known experts, to test whether a gate finds the true ones (DSelect-k, supplement C.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.checks import require
from mtl.experts.base import Experts
from mtl.gates.base import Gate
from mtl.gates.permuted import Permutation
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads, NoHeads
from mtl.networks.mmoe import MMoE
from mtl.nn.dropout import Masks
from mtl.types import DataSpec, TaskSpec


class FrozenExperts(Experts):
    """Experts that do not train: expert e is a sum of U ReLU units, f_e(x) = sum_u relu(w_eu . x).

    ``weight [E, U, D]``. Without ``summed`` the output of an expert is its U units.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, summed: bool = True) -> None:
        super().__init__(len(weight), 1 if summed else weight.shape[1])
        self.summed = summed
        self.register_buffer("weight", weight.clone())

    def outputs(self, x: Tensor, subset: Sequence[int] | None = None, masks: Masks | None = None) -> Tensor:
        """Map ``x [B, D]`` to ``[B, E, 1]``, or to the units ``[B, E, U]``."""
        weight = self.weight if subset is None else self.weight[list(subset)]
        units = F.linear(x, weight.flatten(0, 1)).view(len(x), *weight.shape[:2])  # [B, E, U]
        units = units.relu()
        return units.sum(-1, keepdim=True) if self.summed else units


class LogisticHeads(NoHeads):
    """Map the number x of a task, its mixture, to a logit: ``scale [T]`` * x + ``bias [T]``."""

    def __init__(self, tasks: Sequence[TaskSpec], input_dim: int) -> None:
        super().__init__(tasks, input_dim)
        self.scale, self.bias = nn.Parameter(torch.ones(len(tasks))), nn.Parameter(torch.zeros(len(tasks)))

    def forward(self, x: Tensor, task_ids: Sequence[int]) -> dict[str, Tensor]:
        """Map ``x [B, len(task_ids), 1]`` to logits ``[B]`` by task name."""
        numbers = super().forward(x, task_ids).items()
        return {name: y * self.scale[task] + self.bias[task] for task, (name, y) in zip(task_ids, numbers, strict=True)}

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """See ``Heads``."""
        return dict.fromkeys(self.parameters(), range(len(self.tasks)))

    @torch.no_grad()
    def only(self, task: int) -> LogisticHeads:
        """Return a copy of the unit of one task."""
        unit = LogisticHeads([self.tasks[task]], self.input_dim)
        unit.load_state_dict({name: value[[task]] for name, value in self.state_dict().items()})
        return unit


class FrozenExpertsMoE(MMoE):
    """Mix the frozen experts of simulated data with a static gate, then apply one logistic unit per task.

    ``spec.ground_truth["expert_weight"]``: see ``FrozenExperts``. If the data has a logistic unit on several numbers
    (``spec.ground_truth["unit_weight"] [U]``, ``["unit_bias"]``), the network has one too, with ``true_unit`` the
    data's own. The gate and the logistic units train; with ``true_unit`` only the gate.
    """

    def __init__(
        self,
        spec: DataSpec,
        gate: Callable[..., Gate],
        permutation: Callable[..., Permutation] | None = None,
        true_unit: bool = False,
    ) -> None:
        has_experts, vectors = "expert_weight" in spec.ground_truth, "unit_weight" in spec.ground_truth
        require(has_experts, "network=frozen_experts needs data with known experts, such as data=synthetic_recovery")
        message = "network.true_unit=true needs data with a logistic unit: data.design=published"
        require(vectors or not true_unit, message)
        experts = FrozenExperts(spec.ground_truth["expert_weight"], summed=not vectors)
        parts = (TabularBottom, lambda **sizes: experts, gate, Heads if vectors else LogisticHeads)
        options: dict[str, Any] = {"static_gate": True, "execution": "dense", "permutation": permutation}
        super().__init__(spec, experts.num_experts, *parts, **options)
        if true_unit:
            for parameter, name in zip(self.heads.parameters(), ("unit_weight", "unit_bias"), strict=True):
                parameter.requires_grad_(False).copy_(spec.ground_truth[name].expand_as(parameter))
