"""A layer that mixes experts for each task, with weights from a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        self, x: Tensor, inputs: Mapping[str, Tensor] | None = None, tasks: Sequence[int] | None = None
    ) -> tuple[Tensor, Routing]:
        """Map ``x [B, D]``, or images ``[B, C, H, W]``, to the mixtures ``[B, T, H]`` and their routing.

        ``inputs``: the raw inputs, for gates that read one; ``tasks``: indices of the wanted tasks (default all).
        """
        seen = x if self.trunk is None else self.trunk(x)
        routing: Routing = self.gate(seen.flatten(1), inputs, tasks)
        mixed: Tensor = self.dispatch(self.experts, x, routing)
        return mixed, routing

    @torch.no_grad()
    def only(self, task: int) -> MixtureOfExperts:
        """Return the part that one task uses; its gate must be static. A gate of one task serves all tasks."""
        if self.gate.input_dim is not None:
            raise InputError("a gate that depends on the example cannot be pruned: train with network.static_gate=true")
        weights = self.gate(None, None, [task if self.gate.num_tasks > 1 else 0]).weights  # [1, E]
        used = weights[0].nonzero().flatten().tolist()
        return MixtureOfExperts(self.experts.subset(used), FixedGate.of(weights[:, used]), execution="dense")
