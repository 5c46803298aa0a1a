"""Chains of binary tasks, each after another, as a purchase after a click (ESMM: Ma et al. 2018, equation 1).

For each task t, a network predicts the logit z_t of P(t | the task before it). The probability of t itself is the
product over the chain from its first task to t, P(t) = prod_s sigmoid(z_s). Loss and metrics compare it with the labels
of all rows, so that the conditional probability too is learnt from all rows, not only from those with a click.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.checks import require
from mtl.types import TaskSpec


class Linked(Protocol):
    """A task with the name of the task before it, if any."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def after(self) -> str | None: ...


L = TypeVar("L", bound=Linked)


def check_chains(tasks: Sequence[Linked], prefix: str) -> None:
    """Raise InputError unless each task is after none or a binary task, without circles; ``prefix`` begins messages."""
    tasks_by_name = {task.name: task for task in tasks}
    for task in tasks:
        location, seen = f"{prefix}{task.name}: after={task.after}", [task.name]
        while task.after is not None:
            require(task.kind == "binary", f"{location}: only binary tasks form chains, and {task.name} is {task.kind}")
            message = f"{location}: there is no task {task.after}; the tasks are {', '.join(tasks_by_name)}"
            require(task.after in tasks_by_name, message)
            require(task.after not in seen, f"{location}: {' after '.join([*seen, task.after])} is a circle")
            seen.append(task.after)
            task = tasks_by_name[task.after]
        require(len(seen) == 1 or task.kind == "binary", f"{location}: {task.name} is not binary but {task.kind}")


def chain(task: L, tasks: Mapping[str, L]) -> list[L]:
    """Return the chain that ends with ``task``, its first task first."""
    return [task] if task.after is None else [*chain(tasks[task.after], tasks), task]


def with_earlier(tasks: Iterable[TaskSpec], tasks_by_name: Mapping[str, TaskSpec]) -> list[TaskSpec]:
    """Return ``tasks`` and those that come before them, in the order of ``tasks_by_name``."""
    wanted = {earlier.name for task in tasks for earlier in chain(task, tasks_by_name)}
    return [task for task in tasks_by_name.values() if task.name in wanted]


def joint_logits(tasks: Mapping[str, TaskSpec], predictions: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return ``predictions`` with the logit of P(t), ``[B]``, for each task t that is after another.

    It is log P - log(1 - P), computed in log space. log P is a sum of logsigmoids. For log(1 - P), log1mexp(log P)
    would do, but its gradient divides 0 by 0 as P approaches 1. Instead, 1 - P = (1 - P(before)) + P(before) (1 - p_t)
    is a sum of terms that are not negative: its logaddexp loses no digits, and values and gradients are finite.
    """
    later = [name for name in predictions if tasks[name].after is not None]
    if not later:
        return predictions
    logits_of = dict(predictions)
    for name in later:
        logits = [predictions[earlier.name] for earlier in chain(tasks[name], tasks)]
        first, *rest = [logit.float() if logit.itemsize < 4 else logit for logit in logits]
        log_p, log_rest = F.logsigmoid(first), F.logsigmoid(-first)
        for logit in rest:
            log_rest = torch.logaddexp(log_rest, log_p + F.logsigmoid(-logit))
            log_p = log_p + F.logsigmoid(logit)
        logits_of[name] = log_p - log_rest
    return logits_of
