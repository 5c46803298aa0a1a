"""A layer that mixes experts for each task, with weights from a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mtl.experts.base import Experts
from mtl.experts.dispatch import Dispatch, Execution
from mtl.gates.base import Gate
from mtl.gates.fixed import FixedGate
from mtl.types import InputError, Routing


class MixtureOfExperts(nn.Module):
    """Mix the outputs of ``experts`` for each task by the weights of ``gate``.

    ``trunk``: a small network, shared by all tasks, that computes the gate's input from the layer's input.
    ``execution``: see ``Dispatch``.
    """

    def __init__(
        self, experts: Experts, gate: Gate, trunk: nn.Module | None = None, execution: Execution = "auto"
    ) -> None:
        super().__init__()
        self.experts, self.trunk, self.gate, self.dispatch = experts, trunk, gate, Dispatch(execution)

    def forward(
        self,
        x: Tensor,
        inputs: Mapping[str, Tensor] | None = None,
        tasks: Sequence[int] | None = None,
        groups: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """Map ``x [B, D]``, or images ``[B, C, H, W]``, to the mixtures ``[B, T, H]`` and their routing.

        ``inputs``: the raw inputs, for gates that read one; ``tasks``: indices of the wanted tasks (default all).
        ``groups [B]``: the group of each sample, from 0; the gate then routes each group, by the mean of its samples,
        and all samples of a group use the same experts. The routing has weights ``[groups, T, E]``.
        """
        seen = (x if self.trunk is None else self.trunk(x)).flatten(1)
        if groups is None:
            routing: Routing = self.gate(seen, inputs, tasks)
            mixed: Tensor = self.dispatch(self.experts, x, routing)
            return mixed, routing
        routing = self.gate(group_means(seen, groups), None, tasks)
        per_sample = routing if routing.weights.dim() == 2 else replace(routing, weights=routing.weights[groups])
        return self.dispatch(self.experts, x, per_sample), routing

    @torch.no_grad()
    def only(self, task: int) -> MixtureOfExperts:
        """Return the part that one task uses; its gate must be static. A gate of one task serves all tasks."""
        if self.gate.input_dim is not None:
            raise InputError("a gate that depends on the example cannot be pruned: train with network.static_gate=true")
        weights = self.gate(None, None, [task if self.gate.num_tasks > 1 else 0]).weights  # [1, E]
        used = weights[0].nonzero().flatten().tolist()
        return MixtureOfExperts(self.experts.subset(used), FixedGate.of(weights[:, used]), execution="dense")


def group_means(x: Tensor, groups: Tensor) -> Tensor:
    """Return the mean of the rows of ``x [B, D]`` of each group, ``[groups, D]``; ``groups [B]`` counts from 0."""
    count = int(groups.max()) + 1
    sums = x.new_zeros(count, x.shape[1]).index_add(0, groups, x)
    return sums / torch.bincount(groups, minlength=count)[:, None].to(x.dtype)
