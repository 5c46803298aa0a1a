"""Static mixture of known experts, to test whether a gate finds the true ones (DSelect-k, supplement C.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.checks import require
from mtl.dropout import Masks
from mtl.experts.base import Experts
from mtl.gates.base import Gate
from mtl.gates.permuted import Permutation
from mtl.networks.heads import Heads, wanted_tasks
from mtl.networks.mixture import MixtureOfExperts
from mtl.types import DataSpec, NetworkOutput, sum_losses


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


class LogisticUnits(nn.Module):
    """Map one number x per task to a logit: ``scale [T]`` * x + ``bias [T]``."""

    def __init__(self, scale: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(scale), nn.Parameter(bias)

    def forward(self, x: Tensor, wanted: Sequence[int]) -> Tensor:
        """Map ``x [B, len(wanted)]`` to logits of the same shape."""
        return x * self.scale[wanted] + self.bias[wanted]

    def task_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that belong to single tasks: all."""
        return list(self.parameters())

    @torch.no_grad()
    def only(self, task: int) -> LogisticUnits:
        """Return a copy of the unit of one task."""
        return LogisticUnits(self.scale[[task]].clone(), self.bias[[task]].clone())


class FrozenExpertsMoE(nn.Module):
    """Mix the frozen experts of simulated data with a static gate, then apply one logistic unit per task.

    ``spec.extras["expert_weight"]``: see ``FrozenExperts``. If the data has a logistic unit on several numbers
    (``spec.extras["unit_weight"] [U]``, ``["unit_bias"]``), the network has one too, with ``true_unit`` the data's own.
    The gate and the logistic units train; with ``true_unit`` only the gate.
    ``permutation(num_experts=, num_tasks=)`` adds local search around the gate.
    """

    def __init__(
        self,
        spec: DataSpec,
        gate: Callable[..., Gate],
        input_name: str = "x",
        permutation: Callable[..., Permutation] | None = None,
        true_unit: bool = False,
    ) -> None:
        super().__init__()
        known = "expert_weight" in spec.extras
        require(known, "network=frozen_experts needs data with known experts, such as data=synthetic_recovery")
        self.tasks, self.input_name = list(spec.tasks), input_name
        vectors = "unit_weight" in spec.extras
        require(
            vectors or not true_unit, "network.true_unit=true needs data with a logistic unit: data.design=published"
        )
        experts = FrozenExperts(spec.extras["expert_weight"], summed=not vectors)
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
        self.head: LogisticUnits | Heads
        self.head = Heads(self.tasks, experts.output_dim) if vectors else LogisticUnits(ones, torch.zeros_like(ones))
        if true_unit:
            for parameter, name in zip(self.head.parameters(), ("unit_weight", "unit_bias"), strict=True):
                parameter.requires_grad_(False).copy_(spec.extras[name].expand_as(parameter))

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        wanted = wanted_tasks(self.tasks, tasks)
        x = inputs[self.input_name]
        mixed, routing = self.mixture(x, inputs, wanted)  # [B, T, 1 or U]
        if isinstance(self.head, LogisticUnits):
            logits = self.head(mixed.squeeze(-1), wanted).unbind(1)
            predictions = {self.tasks[index].name: value for index, value in zip(wanted, logits, strict=True)}
        else:
            predictions = self.head(mixed, wanted)
        routings = {"mixture": routing}
        return NetworkOutput(predictions, routings, sum_losses(routings))
