"""Combine losses of tasks by a scalarizer of TorchJD: uncertainty weighting, DWA and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mtl.distributed import world_size
from mtl.networks.base import MultiTaskNetwork
from mtl.training.weighting.base import TaskLosses, Weighting, seeded_rng, sum_by_task
from mtl.training.weighting.state import attributes, set_attributes


@runtime_checkable
class ComparesEpochs(Protocol):
    """A scalarizer that changes at the end of each epoch, as TorchJD's DWA."""

    def step(self) -> None:
        """Update the state."""


class LossWeighting(Weighting):
    """Combine the task losses into one loss f(L_1, ..., L_T) by ``scalarizer``, a `torchjd.scalarization.Scalarizer`.

    ``scalarizer`` is a module, or a function of ``shape`` that returns one. The weights in force are the derivatives
    df/dL_t at the losses of all processes, so that several processes equal one. For a task without a label in the
    batch, the latest loss is used as a constant, and the scalarizer's parameter of this task gets no gradient. Where f
    is not linear in the losses, each accumulated batch is weighted separately.

    ``latest [T]``: the latest losses; -1 before the first.
    """

    latest: Tensor

    def __init__(
        self, network: MultiTaskNetwork, num_tasks: int, scalarizer: Callable[..., Any], seed: int = 0
    ) -> None:
        super().__init__(network, num_tasks, seed)
        self.scalarizer: Any = scalarizer if isinstance(scalarizer, nn.Module) else scalarizer(shape=num_tasks)
        self.register_buffer("latest", torch.full((num_tasks,), -1.0))

    def forward(self, parts: Sequence[TaskLosses], step: int) -> Tensor:
        losses, global_losses, labels = sum_by_task(parts, self.num_tasks)
        present = labels > 0
        latest = torch.where(present, global_losses, self.latest.to(global_losses.dtype))
        mean = global_losses.sum() / present.sum().clamp(min=1)
        values = torch.where(latest < 0, mean, latest).requires_grad_()
        self.latest.copy_(latest)
        parameters = list(self.scalarizer.parameters())
        with seeded_rng(self.seed, step, values):
            value = self.scalarizer(values)
        weights, *gradients = torch.autograd.grad(value, [values, *parameters])
        self.current_weights = weights = torch.where(present, weights, 0.0)
        total: Tensor = value.detach() + world_size() * (weights * (losses - losses.detach())).sum()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            total = total + (torch.where(present, gradient, 0.0) * (parameter - parameter.detach())).sum()
        return total + torch.stack([term for part in parts for term in part.auxiliary]).sum()

    def end_epoch(self) -> None:
        if isinstance(self.scalarizer, ComparesEpochs):
            self.scalarizer.step()

    def get_extra_state(self) -> dict[str, Any]:
        return attributes(self.scalarizer)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        set_attributes(self.scalarizer, state, self.latest.device)
