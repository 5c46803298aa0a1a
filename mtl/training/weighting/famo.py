"""FAMO (Liu et al. 2023, arXiv 2306.03792): weights that lower the losses of all tasks at the same rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtl.distributed import world_size
from mtl.networks.base import MultiTaskNetwork
from mtl.options import NonNegative, Positive, validated
from mtl.training.weighting.base import TaskLosses, Weighting, sum_by_task

MIN_LOSS = 1e-8  # smaller losses of a task, and sums of weights, count as this
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam


class FAMO(Weighting):
    """Minimise c sum_t z_t log L_t, where z = softmax(``logits``) and c makes the weights c z_t / L_t sum to 1.

    After the step, the losses of its last batch are computed again, without gradients. With d_t = log L_t before minus
    log L_t after it, Adam with the rate ``lr`` and ``weight_decay`` lowers the sum of z_t d_t (algorithm 1): the task
    that has gained least counts for more in the next step. No gradient of a single task is needed.

    A task without labels in a step counts in neither. ``logits [T]`` and the moments of Adam are buffers: parameters
    would be trained by the network's optimiser too, or divided among processes.
    """

    needs_losses_after_step = True
    logits: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor

    @validated
    def __init__(
        self,
        network: MultiTaskNetwork,
        num_tasks: int,
        lr: Positive = 0.025,
        weight_decay: NonNegative = 1e-3,
        seed: int = 0,
    ) -> None:
        super().__init__(network, num_tasks, seed)
        self.lr, self.weight_decay = lr, weight_decay
        for name in ("logits", "first", "second"):
            self.register_buffer(name, torch.zeros(num_tasks))
        self.register_buffer("steps", torch.zeros(()))
        self._before: tuple[Tensor, Tensor] | None = None  # losses of the last batch, and which tasks have labels: [T]

    def forward(self, parts: Sequence[TaskLosses], step: int) -> Tensor:
        losses, global_losses, labels = sum_by_task(parts, self.num_tasks)
        there, global_losses = labels > 0, global_losses.clamp(min=MIN_LOSS)
        self._before = global_losses, there
        weights = torch.where(there, self.logits.softmax(0).to(global_losses.dtype) / global_losses, 0.0)
        self.current_weights = weights = weights / weights.sum().clamp(min=MIN_LOSS)
        auxiliary = torch.stack([term for part in parts for term in part.auxiliary]).sum()
        return world_size() * (weights * losses).sum() + auxiliary

    def after_step(self, parts: Sequence[TaskLosses]) -> None:
        assert self._before is not None
        (before, there), self._before = self._before, None
        after = sum_by_task(parts, self.num_tasks)[1].clamp(min=MIN_LOSS)
        fall = torch.where(there, before.log() - after.log(), 0.0).to(self.logits.dtype)
        shares = self.logits.softmax(0)
        gradient = shares * (fall - (shares * fall).sum()) + self.weight_decay * self.logits
        self.steps += 1
        moments = []
        for moment, value, beta in zip((self.first, self.second), (gradient, gradient.square()), BETAS, strict=True):
            moment.lerp_(value, 1 - beta)
            moments.append(moment / (1 - beta**self.steps))
        mean, square = moments
        self.logits -= self.lr * mean / (square.sqrt() + EPSILON)
