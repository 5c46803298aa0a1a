"""What gates and networks return, and what parts of a network may be asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """The output of a gate.

    ``weights``: ``[B, T, E]``, or ``[T, E]`` from a static gate; >= 0.
    ``losses``: auxiliary terms by name, multiplied by their weight, summed over tasks, averaged over the batch.
    ``selectors``: ``[..., T, K, E]``, one distribution over the experts per selection, if the gate has selectors.
    ``tasks``: the indices of the T tasks, None if these are all tasks.
    ``exact_zeros``: the gate's promise that no gradient passes through a weight that is exactly 0, so that its expert
    need not be computed. A gate that also learns from experts that it has switched off (straight-through) leaves it
    False: all experts are then computed, unless no gradient is taken.
    ``measured``: (gate, whole numbers) of each gate that adapts to what it measures in training, see ``AdaptiveGate``.
    """

    weights: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    selectors: Tensor | None = None
    exact_zeros: bool = False
    tasks: Sequence[int] | None = None
    measured: tuple[tuple[Any, Tensor], ...] = ()


@dataclass(frozen=True)
class NetworkOutput:
    """The output of a network: ``predictions[task]`` is ``[B]`` (logit or value), ``[B, C]`` (class logits) or,
    with ``C = TaskSpec.outputs`` above 1, ``[B, C]`` (quantiles).

    ``TaskTensors`` spare the steps of hundreds of tasks one operation for each.

    The values of a regression are in standard units, see ``TaskSpec.unstandardize``. The predictions of a span task are
    ``[B, S, 2]``: the logits of each token to be the first and the last token of the answer; padding has the lowest
    value of the dtype.
    ``routings``: one for each mixture or routed layer, in order; its name is the layer's path in the network, so that
    ``network.get_submodule(name)`` is the layer. ``losses``: the auxiliary terms to add to the task losses.
    ``hidden``: the states of each layer, embeddings first, for distillation (where gates route by task, those of the
    batch's last task); empty if the network has none to compare. ``members``: the predictions of the K members of an
    ensemble by task, ``[K, B, ...]``, each of which has a loss of its own; empty for a single network.
    ``representation [B, t, H]``: what the heads of the t tasks read, if it is the mixture of the last routing, or the
    same for all tasks where there is no routing, then perhaps as ``[B, 1, H]``.
    """

    predictions: Mapping[str, Tensor]
    routings: Mapping[str, Routing] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)
    hidden: tuple[Tensor, ...] = ()
    members: Mapping[str, Tensor] = field(default_factory=dict)
    representation: Tensor | None = None


@runtime_checkable
class OwnsTaskParameters(Protocol):
    """A module that knows which of its parameters belong to single tasks."""

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """Return the parameters, also of its parts, that single tasks reach, or whose rows they reach.

        Each comes with the indices of the tasks that it belongs to.
        """


@runtime_checkable
class Exportable(Protocol):
    """A module that has another form in an exported program, which cannot choose operations by values."""

    def constant(self) -> nn.Module:
        """Return the module in that form, with the same outputs in evaluation."""


@runtime_checkable
class Prunable(Protocol):
    """A module from which the part that one task uses can be cut out."""

    def only(self, task: int) -> nn.Module:
        """Return the part of the task with index ``task``, with the same outputs in evaluation. Raises InputError."""


def sum_losses(routings: Mapping[str, Routing]) -> dict[str, Tensor]:
    """Return the auxiliary losses of all routings by name; losses of the same name are added."""
    losses: dict[str, Tensor] = {}
    for routing in routings.values():
        for name, value in routing.losses.items():
            losses[name] = losses[name] + value if name in losses else value
    return losses
