"""Define what crosses a border between data, network, engine and callbacks.

Shape letters used throughout: B batch, T tasks, E experts, K selections, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

TaskKind = Literal["binary", "multiclass", "regression"]
KINDS: tuple[TaskKind, ...] = ("binary", "multiclass", "regression")
MISSING_CLASS = -100  # a class label that is not known; a missing float label is NaN


class InputError(ValueError):
    """Report something the user gave that cannot be used.

    The message says what was given, where, what is accepted and what to do; the program prints it alone,
    without a traceback, and exits with 1.
    """


class Stopped(Exception):  # noqa: N818  (not an error)
    """Say that a run was asked to stop by signal ``number`` and how to go on with it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


def require(condition: bool, message: str) -> None:
    """Raise ``InputError(message)`` unless ``condition`` holds."""
    if not condition:
        raise InputError(message)


@dataclass(frozen=True)
class Categorical:
    """One id per row, an integer in ``[0, size)``; tensor ``[B]`` of int64 or int32."""

    size: int


@dataclass(frozen=True)
class Numeric:
    """``width`` real numbers per row; tensor ``[B, width]``."""

    width: int


@dataclass(frozen=True)
class Image:
    """One image per row; tensor ``[B, channels, height, width]``, uint8 or float.

    ``mean`` and ``std`` are of values in [0, 1]; networks bring images to mean 0 and deviation 1 with them.
    """

    channels: int
    height: int
    width: int
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Tokens:
    """One token sequence per row; tensor ``[B, length]`` of ids in ``[0, vocab)``."""

    vocab: int
    length: int


InputSpec = Categorical | Numeric | Image | Tokens


@dataclass(frozen=True)
class TaskSpec:
    """Name one task, its kind, and its weight in the summed loss.

    ``num_classes`` is the number of classes of a multiclass task and 1 for the other kinds.
    """

    name: str
    kind: TaskKind
    num_classes: int = 1
    weight: float = 1.0

    def __post_init__(self) -> None:
        require(self.kind in KINDS, f"task {self.name!r}: kind={self.kind!r} is none of {', '.join(KINDS)}")
        require(self.weight >= 0, f"task {self.name!r}: weight={self.weight} is negative")
        many = self.kind == "multiclass"
        fits = self.num_classes >= 2 if many else self.num_classes == 1
        require(fits, f"task {self.name!r}: num_classes={self.num_classes} does not fit kind={self.kind}")


@dataclass(frozen=True)
class DataSpec:
    """Describe a data set to the network: inputs by name, tasks in order.

    ``extras`` carries tensors of a simulated truth (the true experts, the group of each task) that a
    network or a callback made for that simulation reads by name; real data has none.
    """

    inputs: Mapping[str, InputSpec]
    tasks: Sequence[TaskSpec]
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.tasks]


@dataclass  # not frozen: Lightning converts precision inside it
class Batch:
    """Hold ``inputs[name]: [B, ...]`` and ``targets[task]: [B]``; only the tasks this batch is for.

    Float targets mark a missing label with NaN, class targets with ``MISSING_CLASS``.
    """

    inputs: dict[str, Tensor]
    targets: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def select(self, index: Tensor) -> Batch:
        """Return the rows of ``index [N]`` as a new batch."""
        return Batch(
            {name: value.index_select(0, index) for name, value in self.inputs.items()},
            {name: value.index_select(0, index) for name, value in self.targets.items()},
        )

    def is_on(self, device: torch.device) -> bool:
        """Say whether all tensors are on ``device``."""
        return all(value.device == device for value in chain(self.inputs.values(), self.targets.values()))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on ``device``; Lightning calls this before each step."""
        return Batch(
            {name: value.to(device, non_blocking=non_blocking) for name, value in self.inputs.items()},
            {name: value.to(device, non_blocking=non_blocking) for name, value in self.targets.items()},
        )

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; the DataLoader calls this when asked to pin."""
        return Batch(
            {name: value.pin_memory() for name, value in self.inputs.items()},
            {name: value.pin_memory() for name, value in self.targets.items()},
        )


@dataclass(frozen=True)
class Routing:
    """Hold what a gate decided.

    ``weights``: ``[B, T, E]``, or ``[T, E]`` from a static gate; >= 0.
    ``losses``: auxiliary terms by name, already times their weight, summed over tasks, averaged over the batch.
    ``selectors``: ``[..., T, K, E]``, one distribution over the experts per selection, where the gate has them.
    ``tasks``: the positions of the tasks that T stands for, where these are not all.
    ``exact_zeros``: no gradient passes a weight that is exactly 0, so that its expert can be left out; False where the
    gate learns from experts that it has switched off.
    """

    weights: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    selectors: Tensor | None = None
    exact_zeros: bool = True
    tasks: Sequence[int] | None = None


@dataclass(frozen=True)
class NetworkOutput:
    """Hold ``predictions[task]``: ``[B]`` (logit or value) or ``[B, C]`` (class logits), and how they were routed.

    ``routing`` is None for networks without a gate; ``losses`` are the auxiliary terms to add to the task losses.
    """

    predictions: dict[str, Tensor]
    routing: Routing | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
