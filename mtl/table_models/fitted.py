"""Fit models of a table after the training of a network, and keep them in its checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtl.distributed import gather
from mtl.table_models import MAX_ROWS, MODELS
from mtl.table_models.base import TableModel
from mtl.table_models.blend import Weights
from mtl.training.measurements import NETWORK
from mtl.types import Bag, Batch, DataSpec, Numeric, TaskSpec

SUM_ERROR = 1e-6  # of weights that add up to 1


@dataclass(frozen=True)
class FittedModels:
    """The models of a table beside the network, by name, and how they are blended.

    ``weights``: those of the blend, see ``mtl.table_models.blend.choose_weights``; at first, the network alone.
    ``tasks``: those of the blend, with its calibrations.
    """

    models: Mapping[str, TableModel]
    weights: Weights
    tasks: Mapping[str, TaskSpec]

    @classmethod
    def fit(
        cls, names: Sequence[str], spec: DataSpec, data: Any, is_first: bool, deadline: float = math.inf
    ) -> FittedModels:
        """Fit the models ``names`` to at most ``MAX_ROWS`` training rows of the data module ``data``.

        The first process fits them, and the others take what they have learnt. Without training rows there are none.
        ``deadline``, by ``time.monotonic()``: after it no model is begun, and one that has not ended is left out, of
        trees for the tasks that have none yet.
        """
        with torch.inference_mode(False), torch.enable_grad():  # Lightning tests without gradients
            splits = [data.sample(split, MAX_ROWS) if is_first else None for split in ("train", "val")]
            rows = [_of_conditional_tasks(part, spec.tasks) for part in splits if part is not None]
            fitted: dict[str, TableModel] = {}
            for name in names if rows else ():
                if time.monotonic() < deadline:
                    model = MODELS[name](spec.tasks, spec.inputs)
                    model.deadline = deadline
                    model.fit(*rows)
                    if len(model.left_out) < len(spec.tasks) and is_finite(model):
                        fitted[name] = model
        states = {name: model.state_dict() for name, model in fitted.items()}
        alone = {task.name: {NETWORK: 1.0} for task in spec.tasks}  # until the weights are chosen
        return cls.restore({"models": gather(states)[0], "weights": alone}, spec)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, plain data and tensors; {} without models."""
        models = {name: dict(model.state_dict()) for name, model in self.models.items()}
        return {"models": models, "weights": dict(self.weights)} if models else {}

    @classmethod
    def restore(cls, state: Mapping[str, Any], spec: DataSpec) -> FittedModels:
        """Return the models whose ``state()`` this is; ``spec`` has the calibrations of the blend."""
        models = {name: MODELS[name](spec.tasks, spec.inputs) for name in state["models"]}
        for name, model in models.items():
            model.load_learned(state["models"][name])
        check_models(models, state["weights"], spec)
        return cls(models, dict(state["weights"]), {task.name: task for task in spec.tasks})

    @torch.no_grad()
    def predict(self, inputs: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the outputs of each model by task, on the CPU, but of tasks for which it had no time."""
        inputs = {name: value.cpu() for name, value in inputs.items()}
        return {
            name: {task: output for task, output in model(inputs).items() if task not in model.left_out}
            for name, model in self.models.items()
        }


def _of_conditional_tasks(rows: Batch, tasks: Sequence[TaskSpec]) -> Batch:
    """Return ``rows`` in which a task after another has a label only where that one is positive, see ``mtl.chains``."""
    after = {task.name: task.after for task in tasks if task.after}
    targets = {
        name: target.where(rows.targets[after[name]] == 1, torch.nan) if name in after else target
        for name, target in rows.targets.items()
    }
    return Batch(rows.inputs, targets, rows.weights)


@torch.no_grad()
def check_models(models: Mapping[str, TableModel], weights: Weights, spec: DataSpec) -> None:
    """Raise ValueError unless all numbers are finite, the weights of each task add up to 1, and a row is predicted."""
    for task in spec.tasks:
        of_task = weights[task.name]
        accepted = {NETWORK, *(name for name, model in models.items() if task.name not in model.left_out)}
        is_one = abs(sum(of_task.values()) - 1) <= SUM_ERROR  # false for NaN
        if not of_task.keys() <= accepted or min(of_task.values()) < 0 or not is_one:
            raise ValueError(f"the blend of task {task.name} has the weights {of_task}")
    row = {name: _empty_row(column) for name, column in spec.inputs.items()}
    for name, model in models.items():
        model(row)
        if not is_finite(model):
            raise ValueError(f"a number of the model {name} is NaN or infinite")


def is_finite(model: TableModel) -> bool:
    """Return whether all numbers that ``model`` has learnt are finite; those of few rows may not be."""
    return all(bool(value.isfinite().all()) for value in model.state_dict().values() if value.is_floating_point())


def _empty_row(column: Any) -> Tensor:
    if isinstance(column, Numeric):
        return torch.zeros(1, column.width)
    return torch.zeros(1, *((column.length,) if isinstance(column, Bag) else ()), dtype=torch.long)
