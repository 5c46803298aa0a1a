"""Compute over the rows of all processes; with one process, each function is its plain counterpart.

A batch is the batch of all processes together. DDP averages gradients over the processes, so a sum over the rows of
one process counts ``world_size`` times, or the sum of all is taken in a way that autograd sees.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtl.functional import apply


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def part() -> None:
    """Leave the group of processes: one that ends as a member of it may be aborted instead (gloo's threads still run).

    Lightning sees to this where NCCL connects the processes.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def total(values: Tensor) -> Tensor:
    """Return the sum of ``values`` of all processes, without gradient."""
    values = values.detach().clone()
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def batch_mean(values: Tensor) -> Tensor:
    """Return the mean of ``values [B]`` over the batch; of a scalar, itself.

    Over several processes the results of each differ, and their average is the mean. Evaluation, where no gradient is
    taken, looks at its own process alone.
    """
    if values.dim() == 0 or world_size() == 1 or not torch.is_grad_enabled():
        return values.mean()
    rows = total(values.new_tensor(len(values), dtype=torch.float64))
    return values.sum() * (world_size() / rows).to(values.dtype)


def batch_sum(values: Tensor) -> Tensor:
    """Return the sum of ``values [B, ...]`` over the batch, the same in each process and differentiable there."""
    values = values.sum(0)
    if world_size() == 1 or not torch.is_grad_enabled():
        return values
    return apply(_AllReduce, values)


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, plain Python, in order of rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_tensors(value: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensors of all processes, in order of rank; for torchmetrics.

    They may differ in length, and an empty one in its type.
    """
    values: list[Tensor] = gather(value.cpu())
    dtype = next((other.dtype for other in values if other.numel()), value.dtype)
    return [other.to(value.device, dtype) for other in values]


def from_first(value: Tensor) -> Tensor:
    """Return the first process's value."""
    if world_size() > 1:
        value = value.clone()
        dist.broadcast(value, 0)
    return value


class _AllReduce(torch.autograd.Function):
    """Sum over processes; each has the whole result, so the gradient is the sum of what each makes of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return total(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return total(grads[0])
