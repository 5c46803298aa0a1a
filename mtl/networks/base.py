"""Define the contract of a network: what the trainer, checkpoints and exports may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from mtl.checks import InputError, require
from mtl.types import DataSpec, NetworkOutput, Routing, TaskSpec, sum_losses


class MultiTaskNetwork(nn.Module):
    """Base of all networks: map raw inputs to one prediction for each task of ``spec``.

    A subclass implements ``mix`` and sets ``heads``, which map what ``mix`` returns to predictions (see ``Heads``); or
    it replaces ``forward``. ``bottom(inputs=)`` is a factory; None: there is no bottom that all tasks share. The
    trainer, checkpoints and exports call the other methods; a subclass overrides those whose defaults do not fit it.

    ``encoder_config`` is the configuration of an encoder of `transformers`, stored in checkpoints. A class that
    ``reads_files`` has an argument ``load_pretrained`` and, if it is true, takes its first weights from files.
    """

    reads_files: ClassVar[bool] = False

    def __init__(self, spec: DataSpec, bottom: Callable[..., nn.Module] | None = None) -> None:
        super().__init__()
        self.tasks: list[TaskSpec] = list(spec.tasks)
        self.bottom: Any = None if bottom is None else bottom(inputs=spec.inputs)
        self.heads: Any = None
        self.expand_representation = False  # whether the weighting needs ``representation`` for each task
        self.encoder_config: dict[str, Any] = {}

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch. Raises InputError for an unknown task."""
        task_ids = select_tasks(self.tasks, tasks)
        mixed, routings = self.mix(self.bottom(inputs), inputs, task_ids)
        if self.expand_representation:
            mixed = mixed.expand(-1, len(task_ids), -1)
        return NetworkOutput(self.heads(mixed, task_ids), routings, sum_losses(routings), representation=mixed)

    def mix(
        self, x: Tensor, inputs: Mapping[str, Tensor], task_ids: Sequence[int]
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Return what the heads of the tasks ``task_ids`` read, and the routings by name.

        ``x [B, D]``, or images: the bottom's output. ``inputs``: the raw inputs, for gates that read one. ``task_ids``:
        the indices of the t tasks, in order. The first result is ``[B, t, H]``, or ``[B, 1, H]`` if it is the same for
        all tasks; see also ``NetworkOutput.representation``, and ``NetworkOutput.routings`` for the names.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither mix nor a forward of its own")

    def parameter_options(self) -> dict[nn.Parameter, dict[str, float]]:
        """Return options of the optimiser for some parameters; see ``mtl.training.optimizers.build_optimizer``."""
        return {}

    def fsdp_units(self) -> Sequence[nn.Module]:
        """Return the parts that a trainer which divides the parameters gathers one after another."""
        return ()

    def convert_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the weights of another network, by name, as weights of this one; see ``start_from``."""
        return state


def check_network(network: object) -> None:
    """Raise InputError unless ``network`` is a ``MultiTaskNetwork``."""
    fits = isinstance(network, MultiTaskNetwork)
    require(fits, f"network: {type(network).__name__} must be a mtl.MultiTaskNetwork; see docs/extend.md")


def select_tasks(tasks: Sequence[TaskSpec], names: Sequence[str] | None) -> list[int]:
    """Return the indices of the named tasks, in the order of ``tasks``; None means all. Raises InputError."""
    if names is None:
        return list(range(len(tasks)))
    requested = set(names)
    task_ids = [index for index, task in enumerate(tasks) if task.name in requested]
    if len(task_ids) < len(requested):
        unknown, available = requested - {task.name for task in tasks}, ", ".join(task.name for task in tasks)
        raise InputError(f"no such task: {', '.join(sorted(unknown))}; there are {available}")
    return task_ids
