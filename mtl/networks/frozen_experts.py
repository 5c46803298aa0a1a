"""Static mixture of known experts: can a gate find the true ones? (DSelect-k, supplement C.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from mtl.experts.kernels import mix
from mtl.gates.base import Gate
from mtl.networks.heads import wanted_tasks
from mtl.permutation import Permutation
from mtl.types import DataSpec, NetworkOutput, require


class FrozenExpertsMoE(nn.Module):
    """Mix frozen experts, given by the simulated data, with a static gate; then one logistic unit per task.

    An expert is a sum of U ReLU units: f_e(x) = sum_u relu(w_eu . x), ``spec.extras["expert_weight"] [E, U, D]``.
    Only the gate and the logistic units (``scale [T]``, ``bias [T]``) train.
    """

    expert_weight: Tensor

    def __init__(
        self,
        spec: DataSpec,
        gate: Callable[..., Gate],
        input_name: str = "x",
        permutation: Callable[..., Permutation] | None = None,
    ) -> None:
        super().__init__()
        known = "expert_weight" in spec.extras
        require(known, "network=frozen_experts needs data that gives its experts, as data=synthetic_recovery does")
        self.tasks, self.input_name = list(spec.tasks), input_name
        self.register_buffer("expert_weight", spec.extras["expert_weight"].clone())
        num_experts = len(self.expert_weight)
        self.gate = gate(num_tasks=len(self.tasks), num_experts=num_experts, input_dim=None, inputs=spec.inputs)
        self.permutation = permutation and permutation(num_experts=num_experts, num_tasks=len(self.tasks))
        self.head_scale = nn.Parameter(self.expert_weight.new_ones(len(self.tasks)))
        self.head_bias = nn.Parameter(self.expert_weight.new_zeros(len(self.tasks)))

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        wanted = wanted_tasks(self.tasks, tasks)
        x = inputs[self.input_name]
        units = F.linear(x, self.expert_weight.flatten(0, 1)).view(len(x), *self.expert_weight.shape[:2])  # [B, E, U]
        outputs = units.relu().sum(-1, keepdim=True)  # [B, E, 1]
        routing = self.gate(None, inputs, wanted)
        if self.permutation is not None:
            routing = self.permutation(routing, wanted, self.gate.sums_to_one)
        mixed = mix(outputs, routing.weights).squeeze(-1)  # [B, T]
        logits = mixed * self.head_scale[wanted] + self.head_bias[wanted]
        names = [self.tasks[index].name for index in wanted]
        return NetworkOutput(dict(zip(names, logits.unbind(-1), strict=True)), routing, routing.losses)
