"""Define the contract of a weighting, and the plain sum of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtl.distributed import world_size
from mtl.networks.base import MultiTaskNetwork
from mtl.networks.heads import Heads
from mtl.nn.functional import KeepsBufferPrecision
from mtl.nn.seeds import derive_seed
from mtl.types import NetworkOutput, OwnsTaskParameters


@dataclass(frozen=True)
class TaskLosses:
    """The terms of the loss of one batch with N tasks.

    ``task_ids`` and ``task_index [N]``: the indices of the tasks in the network's list. ``local_losses [N]``: this
    process's share of their losses, times the weights of ``TaskSpec``. ``global_losses [N]``: the sum of these shares
    over all processes, without gradient; ``label_counts [N]``: the number of labels behind it. ``auxiliary``: scalars
    that belong to no task. ``output``: of the network for this batch.
    """

    task_ids: list[int]
    task_index: Tensor
    local_losses: Tensor
    global_losses: Tensor
    label_counts: Tensor
    auxiliary: list[Tensor]
    output: NetworkOutput


class Weighting(KeepsBufferPrecision):
    """Base of all weightings, which combine the losses of T tasks into one.

    ``network`` is the network that is trained. Random numbers depend only on ``seed`` and the optimiser step, so that
    they are the same in all processes and in a resumed run. Parameters of a weighting are trained with the network, by
    the same optimiser but without weight decay.
    """

    needs_task_gradients = False  # whether the method compares gradients of parameters that tasks share
    needs_losses_after_step = False  # whether it is told the losses of a step's last batch after the step
    reads_representation = False  # whether it needs ``NetworkOutput.representation`` for each task, [B, t, H]

    def __init__(self, network: MultiTaskNetwork, num_tasks: int, seed: int = 0) -> None:
        super().__init__()
        self.num_tasks, self.seed = num_tasks, seed
        self.current_weights: Tensor | None = None  # the latest weights of the tasks [T], if the method has any

    def forward(self, parts: Sequence[TaskLosses], step: int) -> Tensor:
        """Return the loss to differentiate, of one batch or of several batches of one step.

        DDP averages gradients over processes, so each process's share is multiplied by their number. ``step``: the
        number of the optimiser step, from 0.
        """
        raise NotImplementedError

    def before_step(self, step: int) -> None:
        """Write combined gradients into ``grad`` if ``forward`` has kept them back; called before clipping."""

    def after_step(self, parts: Sequence[TaskLosses]) -> None:
        """Learn from the losses that the step's last batch has after it, if the method ``needs_losses_after_step``."""

    def end_epoch(self) -> None:
        """Update the state of a method that changes once per epoch."""


class FixedWeighting(Weighting):
    """Add the losses, with the fixed weights of the tasks."""

    def forward(self, parts: Sequence[TaskLosses], step: int) -> Tensor:
        losses = []
        for part in parts:
            first, *rest = part.auxiliary
            losses += [world_size() * part.local_losses.sum() + first, *rest]
        return torch.stack(losses).sum()


def sum_by_task(parts: Sequence[TaskLosses], num_tasks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this process's losses, the losses of all processes and the numbers of labels, by task: each ``[T]``."""
    index = torch.cat([part.task_index for part in parts])
    names = ("local_losses", "global_losses", "label_counts")
    values = [torch.cat([getattr(part, name) for part in parts]) for name in names]
    losses, global_losses, labels = (value.new_zeros(num_tasks).index_add(0, index, value) for value in values)
    return losses, global_losses, labels


@contextmanager
def seeded_rng(seed: int, step: int, like: Tensor) -> Iterator[None]:
    """Seed the generators of the CPU and of ``like``'s device by ``seed`` and ``step``; restore them afterwards.

    All processes then draw the same numbers, whatever else they have drawn, and so does a resumed run.
    """
    with torch.random.fork_rng([like.device] if like.is_cuda else []):
        torch.manual_seed(derive_seed(seed, step))
        yield


def shared_parameters(network: MultiTaskNetwork) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters that tasks share, and those that belong to single tasks.

    A task-specific parameter, or each row of it, as in a gate's weight ``[T, E, D]``, has a gradient from the loss of
    one task only. Modules with a method ``task_parameters`` name them, for themselves and all of their submodules, and
    all parameters of a module that serves a single task are such. If another task comes ``after`` the task of such a
    parameter, its loss depends on the outputs of both, so the parameter counts as shared. All others are shared.
    """
    earlier = {task.after for task in network.tasks}
    owned = {id(parameter) for parameter, names in _by_owner(network, []) if earlier.isdisjoint(names)}
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    shared = [parameter for parameter in trained if id(parameter) not in owned]
    return shared, [parameter for parameter in trained if id(parameter) in owned]


def _by_owner(module: nn.Module, names: Sequence[str]) -> Iterator[tuple[nn.Parameter, Sequence[str]]]:
    """Yield the task-specific parameters with the names of their tasks; ``names``: the tasks that ``module`` serves."""
    names = [task.name for task in module.tasks] if isinstance(module, MultiTaskNetwork | Heads) else names
    if len(names) == 1:
        yield from ((parameter, names) for parameter in module.parameters())
    elif isinstance(module, OwnsTaskParameters):
        for parameter, task_ids in module.task_parameters().items():
            yield parameter, [names[task] for task in task_ids]
    else:
        for part in module.children():
            yield from _by_owner(part, names)
