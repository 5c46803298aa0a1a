"""GradNorm (Chen et al. 2018): weights that make tasks train at similar rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mtl.networks.base import MultiTaskNetwork
from mtl.options import NonNegative, validated
from mtl.training.weighting.base import TaskLosses, sum_by_task
from mtl.training.weighting.jacobian import JacobianWeighting


class GradNorm(JacobianWeighting):
    """Learn weights w that make G_t = w_t |gradient of L_t| equal to mean(G) r_t^alpha, for all tasks (equations 1, 2).

    r_t is L_t / L_t(0) over its mean: tasks that train slowly get larger gradients, the more so the larger ``alpha``.
    The gradients are those at all shared parameters. w = T softmax(``logits``), so that the weights stay positive and
    sum to T; logits are trained on the sum over tasks of |G_t - mean(G) r_t^alpha|, with the target as a constant, by
    the optimiser of the network. w multiplies all of a task's gradient, at its own parameters as well.

    A task without labels in a step changes no weight. ``first [T]``: the losses of a task's first step; 0 before it.
    """

    first: Tensor

    @validated
    def __init__(self, network: MultiTaskNetwork, num_tasks: int, alpha: NonNegative = 1.5, seed: int = 0) -> None:
        super().__init__(network, num_tasks, seed)
        self.alpha = alpha
        self.logits = nn.Parameter(torch.zeros(num_tasks))
        self.register_buffer("first", torch.zeros(num_tasks))
        self._sums: Tensor | None = None  # [2, T]: summed losses and numbers of batches of the step so far

    def weights(self) -> Tensor:
        """Return the weights of the tasks, ``[T]``."""
        return self.num_tasks * self.logits.softmax(0)

    def forward(self, parts: Sequence[TaskLosses], step: int) -> Tensor:
        _, global_losses, labels = sum_by_task(parts, self.num_tasks)
        sums = torch.stack([global_losses, (labels > 0).to(global_losses.dtype)])
        self._sums = sums if self._sums is None else self._sums + sums
        self.current_weights = weights = self.weights().detach()
        weighted = [
            replace(part, local_losses=part.local_losses * weights[part.task_index].to(part.local_losses.dtype))
            for part in parts
        ]
        return super().forward(weighted, step)

    def combine(self, jacobian: Tensor, labels: list[float], step: int) -> Tensor:
        assert self._sums is not None
        losses, batches = self._sums
        losses, present, self._sums = losses / batches.clamp(min=1), batches > 0, None
        self.first.copy_(torch.where(present & (self.first == 0), losses, self.first))
        norms = jacobian.norm(dim=1)[present]  # G_t, which includes the weights
        rates = (losses / self.first.clamp(min=torch.finfo(losses.dtype).tiny))[present]
        if len(norms) > 1:
            target = norms.mean() * (rates / rates.mean()) ** self.alpha
            with torch.enable_grad():
                weights = self.weights()
                scaled = weights[present] * (norms / weights[present].detach())
                loss = (scaled - target).abs().sum()
            self.logits.grad = torch.autograd.grad(loss, self.logits)[0]
        return jacobian.sum(0)
