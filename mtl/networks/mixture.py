"""A layer that mixes experts for each task, with weights from a gate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mtl.checks import InputError, require
from mtl.experts.base import Experts
from mtl.experts.dispatch import Dispatch, Execution
from mtl.gates.base import Gate
from mtl.gates.fixed import FixedGate
from mtl.gates.permuted import Permutation, permuted
from mtl.nn.functional import at_least_float32
from mtl.types import InputSpec, Routing


class MixtureOfExperts(nn.Module):
    """Mix the outputs of E experts for each of T tasks, by the weights of a gate: an ordinary layer of any network.

    ``input_dim``: D, or (C, H, W) of images. ``gate`` and ``experts``: a module, or a factory for one, such as
    ``partial(CometGate, k=2)``, called as ``gate(num_tasks=, num_experts=, input_dim=, inputs=)`` or
    ``experts(num_experts=, input_dim=)``. With ``static_gate`` the weights do not depend on the example.

    ``trunk(num_experts=1, input_dim=)``: a small network, shared by all tasks, that computes the gate's input from the
    layer's input. ``permutation(num_experts=, num_tasks=)`` adds local search around the gate. ``inputs`` describes the
    raw inputs, for gates that read one. ``execution``: see ``Dispatch``. ``gate_dim``: the width of ``gate_x`` of
    ``forward``, if the gate reads that instead of all of x. Raises InputError if sizes do not agree.
    """

    def __init__(
        self,
        input_dim: int | Sequence[int],
        num_tasks: int,
        num_experts: int,
        gate: Gate | Callable[..., Gate],
        experts: Experts | Callable[..., Experts],
        static_gate: bool = False,
        trunk: Callable[..., nn.Module] | None = None,
        permutation: Callable[..., Permutation] | None = None,
        inputs: Mapping[str, InputSpec] | None = None,
        execution: Execution = "auto",
        gate_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.input_dim, sizes = input_dim, {"num_experts": num_experts}
        self.experts = experts if isinstance(experts, Experts) else experts(**sizes, input_dim=input_dim)
        self.trunk = trunk and trunk(num_experts=1, input_dim=input_dim)
        shape: Any = gate_dim or (input_dim if self.trunk is None else self.trunk.output_dim)
        width = None if static_gate else shape if isinstance(shape, int) else math.prod(shape)
        if not isinstance(gate, Gate):
            gate = gate(num_tasks=num_tasks, **sizes, input_dim=width, inputs=inputs)
        self.gate, self.dispatch = permuted(gate, permutation), Dispatch(execution)
        expected = {"num_tasks": num_tasks, "num_experts": num_experts, "input_dim": width}
        built = {"num_tasks": gate.num_tasks, "num_experts": gate.num_experts, "input_dim": gate.input_dim or width}
        require(built == expected, f"a gate with {_listed(built)} does not fit into a mixture with {_listed(expected)}")
        count = self.experts.num_experts
        require(count == num_experts, f"{count} experts do not fit into a mixture with num_experts={num_experts}")

    def forward(
        self,
        x: Tensor,
        inputs: Mapping[str, Tensor] | None = None,
        tasks: Sequence[int] | None = None,
        groups: Tensor | None = None,
        num_groups: int | None = None,
        gate_x: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """Map ``x [B, D]``, or images ``[B, C, H, W]``, to the mixtures ``[B, T, H]`` and their routing.

        Raises InputError for an ``x`` of another shape.

        ``inputs``: the raw inputs, for gates that read one; ``tasks``: indices of the wanted tasks (default all).
        ``groups [B]``: the group of each sample, from 0; the gate then routes each group, by the mean of its samples,
        and all samples of a group use the same experts. The routing has weights ``[groups, T, E]``. ``num_groups``: by
        default the largest group plus 1; to find it, the program waits for the device. ``gate_x``: what the gate reads
        instead of x, ``[B, gate_dim]``, or one for each of the t wanted tasks, ``[B, t, gate_dim]``; not with groups.
        """
        shape = [self.input_dim] if isinstance(self.input_dim, int) else list(self.input_dim)
        if list(x.shape[1:]) != shape:
            flat = "; flatten tokens with x.flatten(0, 1)" if x.dim() == 3 and len(shape) == 1 else ""
            raise InputError(f"x {list(x.shape)}: this layer takes x [B, {', '.join(map(str, shape))}]{flat}")
        gate_input = (x if self.trunk is None else self.trunk(x)).flatten(1) if gate_x is None else gate_x
        if groups is None:
            routing: Routing = self.gate(gate_input, inputs, tasks)
            mixed: Tensor = self.dispatch(self.experts, x, routing)
            return mixed, routing
        count = int(groups.max()) + 1 if num_groups is None else num_groups
        routing = self.gate(group_means(gate_input, groups, count), None, tasks)
        per_sample = routing if routing.weights.dim() == 2 else replace(routing, weights=routing.weights[groups])
        return self.dispatch(self.experts, x, per_sample), routing

    def extra_repr(self) -> str:
        """Return the sizes of the layer, as ``print(layer)`` shows them."""
        return f"tasks={self.gate.num_tasks}, experts={self.experts.num_experts}, inputs={self.input_dim}"

    def only(self, *tasks: int) -> MixtureOfExperts:
        """Return the part that ``tasks`` use; the gate must be static. A gate of one task serves all tasks."""
        if not self.is_static:
            raise InputError("a gate that depends on the example cannot be pruned: train with network.static_gate=true")
        return self._constant([task if self.gate.num_tasks > 1 else 0 for task in tasks])

    def constant(self) -> MixtureOfExperts:
        """Return the layer in a form that can be exported: dense, and with only the used experts of a static gate."""
        if self.is_static:
            return self._constant(None)
        layer = copy.deepcopy(self)
        layer.dispatch = Dispatch("dense")
        for part in layer.gate.modules():
            if isinstance(part, Permutation) and not part.is_hard:
                part.harden()  # evaluation uses the hard permutation anyway
        return layer

    @property
    def is_static(self) -> bool:
        """Whether the weights are the same for all examples."""
        return self.gate.input_dim is None and not self.gate.reads_inputs

    @torch.no_grad()
    def _constant(self, tasks: Sequence[int] | None) -> MixtureOfExperts:
        """Return the layer with the current weights of its static gate and only the experts that ``tasks`` use."""
        weights = self.gate(None, None, tasks).weights  # [T, E]
        used = (weights != 0).any(0).nonzero().flatten().tolist() or [0]  # without connections: an expert of weight 0
        gate, experts = FixedGate.of(weights[:, used]), self.experts.subset(used)
        return MixtureOfExperts(self.input_dim, len(weights), len(used), gate, experts, execution="dense")


def _listed(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def group_means(x: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the mean of the rows of ``x [B, D]`` of each group, ``[count, D]``; ``groups [B]`` counts from 0.

    The mean of a group without rows is 0, since NaN would spread through losses that average over the groups.
    """
    wide = at_least_float32(x)  # bfloat16 does not count beyond 256
    sums = wide.new_zeros(count, x.shape[1]).index_add(0, groups, wide)
    return (sums / groups.bincount(minlength=count).clamp(min=1)[:, None]).to(x.dtype)
