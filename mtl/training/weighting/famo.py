"""FAMO (Liu et al. 2023, arXiv 2306.03792): weights that lower the losses of all tasks at the same rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtl.distributed import world_size
from mtl.options import NotNegative, Positive, validated
from mtl.training.weighting.base import Terms, Weighting, by_task

SMALLEST = 1e-8  # loss of a task


class FAMO(Weighting):
    """Minimise c sum_t z_t log L_t, where z = softmax(``logits``) and c makes the weights c z_t / L_t sum to 1.

    After the step, the losses of its last batch are computed again, without gradients. With d_t = log L_t before minus
    log L_t after it, Adam with the rate ``lr`` and ``weight_decay`` lowers the sum of z_t d_t (algorithm 1): the task
    that has gained least counts for more in the next step. No gradient of a single task is needed.

    A task without labels in a step counts in neither. ``logits [T]`` are trained here, not by the network's optimiser.
    """

    compares_steps = True

    @validated
    def __init__(
        self, network: nn.Module, num_tasks: int, lr: Positive = 0.025, weight_decay: NotNegative = 1e-3, seed: int = 0
    ) -> None:
        super().__init__(network, num_tasks, seed)
        self.logits = nn.Parameter(torch.zeros(num_tasks), requires_grad=False)
        self._adam = torch.optim.Adam([self.logits], lr=lr, weight_decay=weight_decay)
        self._before: tuple[Tensor, Tensor] | None = None  # losses of the last batch, and which tasks have labels: [T]

    def forward(self, parts: Sequence[Terms], step: int) -> Tensor:
        losses, everywhere, labels = by_task(parts, self.num_tasks)
        there, everywhere = labels > 0, everywhere.clamp(min=SMALLEST)
        self._before = everywhere, there
        weights = torch.where(there, self.logits.softmax(0).to(everywhere.dtype) / everywhere, 0.0)
        self.in_force = weights = weights / weights.sum().clamp(min=SMALLEST)
        others = torch.stack([term for part in parts for term in part.others]).sum()
        return world_size() * (weights * losses).sum() + others

    def after_step(self, parts: Sequence[Terms]) -> None:
        assert self._before is not None
        before, there = self._before
        after = by_task(parts, self.num_tasks)[1].clamp(min=SMALLEST)
        fall = torch.where(there, before.log() - after.log(), 0.0).to(self.logits.dtype)
        shares = self.logits.softmax(0)
        self.logits.grad = shares * (fall - (shares * fall).sum())  # the softmax's Jacobian times the fall
        self._adam.step()
        self.logits.grad = self._before = None

    def get_extra_state(self) -> dict[str, Any]:
        return self._adam.state_dict()

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self._adam.load_state_dict(dict(state))
