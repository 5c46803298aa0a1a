"""Gates that adapt after each training step to what they measured in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn

from mtl.distributed import all_reduce_sum
from mtl.gates.base import Gate


class AdaptiveGate(Gate):
    """Base of gates that measure in training and adapt after each step, without a gradient.

    ``route`` puts the result of ``measure`` into ``Routing.measured``. After each step, the training loop passes it to
    ``update_adaptive_gates``; in this program a callback does so.
    """

    def state(self) -> Tensor | None:
        """Return the buffer ``[num_gates, ...]`` that ``adapt`` changes; None: with these options there is none."""
        raise NotImplementedError

    def adapt(self, measured: Tensor) -> None:
        """Update ``state()`` after a step from what the gate measured: ``measured``, of the same shape.

        It is the sum over all batches of the step, in all processes, and 0 for a gate without rows.
        """
        raise NotImplementedError

    def measure(self, values: Tensor, tasks: list[int] | None) -> tuple[tuple[Self, Tensor], ...]:
        """Return ``Routing.measured``, for ``values [t, ...]`` of the wanted tasks; nothing in evaluation."""
        if not self.training:
            return ()
        values = values.detach().long()
        if self.shared:
            values = values.sum(0, keepdim=True)
        elif tasks is not None:
            index = torch.tensor(tasks, device=values.device)
            values = values.new_zeros(self.num_gates, *values.shape[1:]).index_copy(0, index, values)
        return ((self, values),)


@torch.no_grad()
def update_adaptive_gates(network: nn.Module, measured: Iterable[tuple[AdaptiveGate, Tensor]]) -> None:
    """Let the gates of ``network`` adapt to what they ``measured`` in the batches of a step.

    All processes must call this after each step; the states of the gates stay equal in all of them.
    """
    states = {part: part.state() for part in network.modules() if isinstance(part, AdaptiveGate)}
    sums = {gate: state.new_zeros(state.shape, dtype=torch.long) for gate, state in states.items() if state is not None}
    if not sums:
        return
    for gate, values in measured:
        sums[gate] += values
    together = all_reduce_sum(torch.cat([values.flatten() for values in sums.values()]))
    parts = torch.split(together, [values.numel() for values in sums.values()])
    for gate, part in zip(sums, parts, strict=True):
        gate.adapt(part.view_as(sums[gate]))
