"""Static mixture of known experts, to test whether a gate finds the true ones (DSelect-k, supplement C.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.dropout import Masks
from mtl.experts.base import Experts
from mtl.gates.base import Gate
from mtl.gates.permuted import Permutation
from mtl.networks.heads import wanted_tasks
from mtl.networks.mixture import MixtureOfExperts
from mtl.types import DataSpec, NetworkOutput, require, sum_losses


class FrozenExperts(Experts):
    """Experts that do not train: expert e is a sum of U ReLU units, f_e(x) = sum_u relu(w_eu . x).

    ``weight [E, U, D]``.
    """

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__(len(weight), 1)
        self.register_buffer("weight", weight.clone())

    def outputs(self, x: Tensor, subset: Sequence[int] | None = None, masks: Masks | None = None) -> Tensor:
        """Map ``x [B, D]`` to ``[B, E, 1]``."""
        weight = self.weight if subset is None else self.weight[list(subset)]
        units = F.linear(x, weight.flatten(0, 1)).view(len(x), *weight.shape[:2])  # [B, E, U]
        return units.relu().sum(-1, keepdim=True)


class LogisticUnits(nn.Module):
    """Map one number x per task to a logit: ``scale [T]`` * x + ``bias [T]``."""

    def __init__(self, scale: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(scale), nn.Parameter(bias)

    def forward(self, x: Tensor, wanted: Sequence[int]) -> Tensor:
        """Map ``x [B, len(wanted)]`` to logits of the same shape."""
        return x * self.scale[wanted] + self.bias[wanted]

    def task_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are of single tasks: all."""
        return list(self.parameters())

    @torch.no_grad()
    def only(self, task: int) -> LogisticUnits:
        """Return a copy of the unit of one task."""
        return LogisticUnits(self.scale[[task]].clone(), self.bias[[task]].clone())


class FrozenExpertsMoE(nn.Module):
    """Mix the frozen experts of simulated data with a static gate, then apply one logistic unit per task.

    ``spec.extras["expert_weight"]``: see ``FrozenExperts``. Only the gate and the logistic units train.
    ``permutation(num_experts=, num_tasks=)`` adds local search around the gate.
    """

    def __init__(
        self,
        spec: DataSpec,
        gate: Callable[..., Gate],
        input_name: str = "x",
        permutation: Callable[..., Permutation] | None = None,
    ) -> None:
        super().__init__()
        known = "expert_weight" in spec.extras
        require(known, "network=frozen_experts needs data with known experts, such as data=synthetic_recovery")
        self.tasks, self.input_name = list(spec.tasks), input_name
        experts = FrozenExperts(spec.extras["expert_weight"])
        self.mixture = MixtureOfExperts(
            experts.weight.shape[-1],
            len(self.tasks),
            experts.num_experts,
            gate,
            experts,
            static_gate=True,
            permutation=permutation,
            inputs=spec.inputs,
            execution="dense",
        )
        ones = experts.weight.new_ones(len(self.tasks))
        self.head = LogisticUnits(ones, torch.zeros_like(ones))

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        wanted = wanted_tasks(self.tasks, tasks)
        mixed, routing = self.mixture(inputs[self.input_name], inputs, wanted)  # [B, T, 1]
        logits = self.head(mixed.squeeze(-1), wanted)
        names = [self.tasks[index].name for index in wanted]
        predictions = dict(zip(names, logits.unbind(-1), strict=True))
        routings = {"mixture": routing}
        return NetworkOutput(predictions, routings, sum_losses(routings))
