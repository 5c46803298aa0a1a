"""Compute the gradient of each task separately, so that a method can combine them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtl.checks import require
from mtl.distributed import all_reduce_sum, world_size
from mtl.networks.base import MultiTaskNetwork
from mtl.training.weighting.base import TaskLosses, Weighting, shared_parameters, sum_by_task


class JacobianWeighting(Weighting):
    """Combine the gradients of the tasks at the P parameters that they share; a subclass implements ``combine``.

    Only gradients at shared parameters (bottom, experts, embeddings, a gate that all tasks share) are combined.
    Parameters of single tasks (heads, gates) get the gradient of their own task. Gradients of auxiliary losses are
    added as usual.

    The Jacobian ``[T, P]`` is kept until the end of an optimiser step. It takes T times the memory of the shared
    parameters, and a step takes one backward pass for each task. Methods are not linear, so the rows are summed over
    the batches of a step and over all processes before they are combined. Accumulated and distributed steps therefore
    equal a step on the whole batch. (TorchJD's `autogram` would need only the Gramian, not the Jacobian. But it hooks
    the calls of modules, and experts compute from stacked parameters that no module call uses row by row.)
    """

    needs_task_gradients = True

    def __init__(self, network: MultiTaskNetwork, num_tasks: int, seed: int = 0) -> None:
        super().__init__(network, num_tasks, seed)
        title = type(network).__name__
        require(num_tasks > 1, "weighting: this method compares the gradients of tasks, but there is only one task")
        shared, task_specific = shared_parameters(network)
        require(
            bool(shared),
            f"weighting: this method combines the gradients of parameters that tasks share, and {title} has none; use "
            "weighting=fixed, or a method on losses such as weighting=uncertainty",
        )
        self._shared, self._task_specific = shared, task_specific  # lists are no submodules: the network has them
        self._jacobian: Tensor | None = None  # [T, P], summed over the batches of the step so far
        self._labels: Tensor | None = None  # [T]

    def combine(self, jacobian: Tensor, labels: list[float], step: int) -> Tensor:
        """Combine the ``jacobian [T, P]`` into one gradient ``[P]``; tasks without ``labels`` have rows of zeros."""
        raise NotImplementedError

    def forward(self, parts: Sequence[TaskLosses], step: int) -> Tensor:
        auxiliary = torch.stack([term for part in parts for term in part.auxiliary]).sum()
        tasks = torch.stack([part.local_losses.sum() for part in parts]).sum() * world_size()
        with torch.autocast(tasks.device.type, enabled=False):  # backward passes use the dtypes of the forward pass
            rows, used = task_jacobian(parts, self._shared, self.num_tasks)
            of_single_tasks = grads_wrt(tasks + auxiliary, self._task_specific)
            of_shared = grads_wrt(auxiliary, self._shared)
        labels = sum_by_task(parts, self.num_tasks)[2]
        # DDP waits for a gradient of every parameter that is used
        of_shared = [
            torch.zeros_like(parameter) if gradient is None and is_used else gradient
            for parameter, gradient, is_used in zip(self._shared, of_shared, used, strict=True)
        ]
        trained = [*self._shared, *self._task_specific]
        pairs = [pair for pair in zip(trained, [*of_shared, *of_single_tasks], strict=True) if pair[1] is not None]
        pairs += [(parameter, torch.zeros_like(parameter)) for parameter in self.parameters()]
        parameters, gradients = zip(*pairs, strict=True)
        keep = functools.partial(self._keep, rows, labels)
        apply: Any = GivenGradients.apply
        return apply((tasks + auxiliary).detach(), gradients, keep, *parameters)

    def _keep(self, rows: Tensor, labels: Tensor, factor: Tensor) -> None:
        """Add ``factor`` times the ``rows`` of a batch to the Jacobian of the step."""
        rows *= factor
        self._jacobian = rows if self._jacobian is None else self._jacobian.add_(rows)
        self._labels = labels if self._labels is None else self._labels + labels

    def check(self, gradients: Tensor, step: int) -> None:
        """Raise InputError if one is not finite: solvers would fail on it, or hide it."""
        message = f"step {step}: the gradient of a task is NaN or infinite; a smaller learning rate may help"
        require(bool(torch.isfinite(gradients).all()), message)

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        assert self._jacobian is not None
        assert self._labels is not None
        jacobian = all_reduce_sum(self._jacobian) if world_size() > 1 else self._jacobian
        self.check(jacobian, step)
        combined = self.combine(jacobian, self._labels.tolist(), step)
        self._jacobian = self._labels = None
        pieces = torch.split(combined, [parameter.numel() for parameter in self._shared])
        for parameter, piece in zip(self._shared, pieces, strict=True):
            if parameter.grad is not None:
                parameter.grad += piece.view_as(parameter)


def task_jacobian(
    parts: Sequence[TaskLosses], shared: Sequence[nn.Parameter], num_tasks: int
) -> tuple[Tensor, list[bool]]:
    """Return the tasks' gradients at the ``shared`` parameters ``[T, P]``, and for each, whether a task uses it."""
    sizes = [parameter.numel() for parameter in shared]
    dtype = functools.reduce(torch.promote_types, (p.dtype for p in shared), torch.float32)
    rows = torch.zeros(num_tasks, sum(sizes), dtype=dtype, device=shared[0].device)
    used = [False] * len(sizes)
    for part in parts:
        for task, loss in zip(part.task_ids, part.local_losses.unbind(), strict=True):
            gradients = grads_wrt(loss, shared)
            for index, (place, gradient) in enumerate(zip(torch.split(rows[task], sizes), gradients, strict=True)):
                if gradient is not None:
                    place += (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
                    used[index] = True
    return rows, used


class GivenGradients(torch.autograd.Function):
    """Return ``value`` with given ``gradients`` at ``parameters``; ``keep``, if given, is called with the incoming one.

    ``parameters`` may be other tensors too: the backward pass goes on from them.

    Lightning can then call backward on one loss as usual: it scales for accumulation, and DDP averages over processes.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], keep: Any, *parameters: Tensor) -> Tensor:
        ctx.gradients, ctx.keep = gradients, keep
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        if ctx.keep is not None:
            ctx.keep(outer[0])
        return None, None, None, *(gradient * outer[0] for gradient in ctx.gradients)


def grads_wrt(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of ``loss`` at ``parameters``; None where it does not depend on one."""
    if not loss.requires_grad or not parameters:
        return [None] * len(parameters)
    return list(torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True))
