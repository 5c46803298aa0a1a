"""Multi-gate mixture of experts (MMoE: Ma et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mtl.checks import require
from mtl.experts.base import Experts
from mtl.experts.dispatch import Execution
from mtl.gates.base import Gate
from mtl.gates.permuted import Permutation
from mtl.networks.base import MultiTaskNetwork
from mtl.networks.heads import Heads, NoHeads
from mtl.networks.mixture import MixtureOfExperts
from mtl.options import Count, validated
from mtl.types import DataSpec, Routing


class MMoE(MultiTaskNetwork):
    """Bottom, stacked experts, one gate per task on the bottom's output, one head per task.

    ``bottom(inputs=)``, ``experts(num_experts=, input_dim=)``, ``gate(num_tasks=, num_experts=, input_dim=, inputs=)``
    and ``heads(tasks=, input_dim=)`` are factories; their sizes follow from ``spec``. With ``static_gate`` the gates do
    not depend on the example. ``gate_trunk(num_experts=1, input_dim=)`` is a small network, shared by all tasks, that
    computes the gates' input from the bottom's output. ``permutation(num_experts=, num_tasks=)`` adds local search
    around the gate. ``execution``: see ``Dispatch``.
    """

    @validated
    def __init__(
        self,
        spec: DataSpec,
        num_experts: Count,
        bottom: Callable[..., nn.Module],
        experts: Callable[..., Experts],
        gate: Callable[..., Gate],
        heads: Callable[..., Heads | NoHeads],
        static_gate: bool = False,
        execution: Execution = "auto",
        permutation: Callable[..., Permutation] | None = None,
        gate_trunk: Callable[..., nn.Module] | None = None,
    ) -> None:
        super().__init__(spec, bottom)
        fits = not (static_gate and gate_trunk)
        require(fits, "static_gate=true: a static gate has no input, so remove gate_trunk")
        shape: Any = self.bottom.output_dim  # D, or (C, H, W)
        self.mixture = MixtureOfExperts(
            shape,
            len(self.tasks),
            num_experts,
            gate,
            experts,
            static_gate=static_gate,
            trunk=gate_trunk,
            permutation=permutation,
            inputs=spec.inputs,
            execution=execution,
        )
        self.heads = heads(tasks=self.tasks, input_dim=self.mixture.experts.output_dim)

    def mix(
        self, x: Tensor, inputs: Mapping[str, Tensor], task_ids: Sequence[int]
    ) -> tuple[Tensor, dict[str, Routing]]:
        """See ``MultiTaskNetwork``."""
        mixed, routing = self.mixture(x, inputs, task_ids)
        return mixed, {"mixture": routing}
