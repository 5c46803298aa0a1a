"""Compute over the rows of all processes; with one process, each function is its plain counterpart.

A batch is the batch of all processes together. DDP averages gradients over the processes, so a sum over the rows of
one process has to be scaled by ``world_size``, or the sum over all processes is taken by a function that autograd
differentiates.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

K = TypeVar("K")


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def warn_if_waiting(ranks: Sequence[int], processes: int, silent: bool = False, seconds: float = 30) -> Iterator[None]:
    """Print one line if some processes are still missing after ``seconds``, and continue to wait.

    ``ranks``: the ranks of this machine, out of ``processes`` in all. ``silent``: another process of this machine
    prints.
    """

    def say() -> None:
        if not dist.is_initialized() and not silent:
            local_ranks = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            print(
                f"still waiting for some of the {processes} processes of this run: this machine has {local_ranks}; "
                f"start the same command on the machines of the others",
                file=sys.stderr,
                flush=True,
            )

    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def destroy_process_group() -> None:
    """Leave the gloo process group before the interpreter exits; otherwise gloo's threads may abort the process.

    For NCCL, Lightning does this itself.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def all_reduce_sum(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over all processes, without gradient."""
    values = values.detach().clone()
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def batch_mean(values: Tensor) -> Tensor:
    """Return the mean of ``values [B]`` over the batch; of a scalar, the scalar itself.

    With several processes each returns its own share: the average of the shares is the mean. In evaluation, where no
    gradient is taken, it is the mean over this process's rows.
    """
    if values.dim() == 0 or world_size() == 1 or not torch.is_grad_enabled():
        return values.mean()
    rows = all_reduce_sum(values.new_tensor(len(values), dtype=torch.float64))
    return values.sum() * (world_size() / rows).to(values.dtype)


def batch_sum(values: Tensor) -> Tensor:
    """Return the sum of ``values [B, ...]`` over the batch of all processes; every process can differentiate it."""
    values = values.sum(0)
    if world_size() == 1 or not torch.is_grad_enabled():
        return values
    return _AllReduce.apply(values)  # type: ignore[no-untyped-call]  # torch declares no types for it


def gather(value: Any) -> list[Any]:
    """Return the values of all processes (any Python objects) in order of rank.

    Tensors in them should be on the CPU: those of another GPU would stay there.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rows(columns: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Return the rows of all processes, in order of rank, in the first process, and nothing in the others.

    ``columns [N, ...]`` are on the CPU, as is what is returned; N may differ, and a process may have none.
    """
    if world_size() == 1:
        return dict(columns)
    everyone = gather({name: (tuple(value.shape), value.dtype) for name, value in columns.items() if len(value)})
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    rows = {}
    for name, (shape, dtype) in {name: layout for part in everyone for name, layout in part.items()}.items():
        counts = [part[name][0][0] if name in part else 0 for part in everyone]
        if dist.get_rank():
            if len(columns.get(name, ())):
                dist.send(_bytes(columns[name].contiguous()).to(device), 0)
            continue
        rows[name] = torch.empty(sum(counts), *shape[1:], dtype=dtype)
        for rank, part in enumerate(torch.split(rows[name], counts)):
            if rank and len(part):
                received = _bytes(part) if device == "cpu" else torch.empty_like(_bytes(part), device=device)
                dist.recv(received, rank)
                _bytes(part).copy_(received)
            elif len(part):
                part.copy_(columns[name])
    return rows


def _bytes(values: Tensor) -> Tensor:
    """Return a view of ``values`` as bytes: backends send no booleans, nor all types of floats."""
    return values.view(torch.uint8)


def broadcast(value: Tensor) -> Tensor:
    """Return the first process's value."""
    if world_size() > 1:
        value = value.clone()
        dist.broadcast(value, 0)
    return value


def summon_full_params(trainer: Any) -> AbstractContextManager[None]:
    """Inside this context all parameters are whole; every process must enter it. See ``ShardedStrategy``."""
    sharded = hasattr(trainer.strategy, "summon_full_params")
    return trainer.strategy.summon_full_params() if sharded else nullcontext()


class RowShards(list[Tensor]):
    """A tensor that the processes of a run divided by rows: the rows of each one, in order of rank.

    ``check`` is called with the number of a piece before its values are read.
    """

    def __init__(self, pieces: Iterable[Tensor], check: Callable[[int], object] = lambda number: None) -> None:
        super().__init__(pieces)
        self.check = check

    @property
    def shape(self) -> torch.Size:
        return torch.Size([sum(map(len, self)), *self[0].shape[1:]])

    def joined(self) -> Tensor:
        """Return the tensor."""
        for number in range(len(self)):
            self.check(number)
        return self[0] if len(self) == 1 else torch.cat(list(self))

    def rows(self, first: int, end: int) -> Tensor:
        """Return the rows [first, end), as far as there are any; no others are read."""
        starts = accumulate(map(len, self), initial=0)
        parts = [part[max(0, first - start) : max(0, end - start)] for part, start in zip(self, starts, strict=False)]
        for number, part in enumerate(parts):
            if len(part):
                self.check(number)
        return torch.cat(parts)


def gather_full(value: Any) -> Any:
    """Return a tensor that is divided among the processes as a whole; every process must call this.

    Other values are returned as they are.
    """
    return value.detach().full_tensor() if hasattr(value, "full_tensor") else value


def local_shard(value: Any, like: Any) -> Any:
    """Return this process's part of ``value``, a tensor or ``RowShards``, if ``like`` is sharded and of the same shape.

    Otherwise return ``value``, as a tensor.
    """
    if not hasattr(like, "full_tensor") or value.shape != like.shape or hasattr(value, "full_tensor"):
        return value.joined() if isinstance(value, RowShards) else value
    from torch.distributed.tensor import DTensor  # its import takes a while

    pieces, mesh = value if isinstance(value, RowShards) else RowShards([value]), like.device_mesh
    size = -(-len(like) // mesh.size())
    rows = pieces.rows(mesh.get_local_rank() * size, (mesh.get_local_rank() + 1) * size).to(like.device)
    return DTensor.from_local(rows, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


class _AllReduce(torch.autograd.Function):
    """Sum over processes. Every process gets the whole sum, so the gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return all_reduce_sum(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return all_reduce_sum(grads[0])
