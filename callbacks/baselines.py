"""Test other models beside the network: a constant prediction, models of a table, and the blend of all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, Trainer

from mtl.table_models import MAX_OUTPUTS
from mtl.table_models.base import Constant
from mtl.table_models.blend import blend_outputs
from mtl.training.bootstrap import MAX_RESAMPLE_ROWS, MIN_ROWS, RESAMPLES, standard_errors
from mtl.training.evaluation import Evaluation
from mtl.training.labeled_predictions import UNDEFINED, LabeledPredictions
from mtl.training.measurements import BLEND, LEAD, NETWORK, Key, Measurement, Measurements
from mtl.training.metrics import metric_names, value_of
from mtl.training.module import MultiTaskModule
from mtl.types import RANKING, TOP, Batch, TaskSpec, metric_family

from .after_training import update


class Baselines(Callback):
    """Compute the metrics of a constant prediction, of the module's ``other_models`` and of the blend on the test rows.

    The constant is ``TaskSpec.constant``; it ranks nothing, so it has no metrics that rank the rows of groups. The
    values, and the network's lead in the main metrics with its standard error, are in the ``measured`` of the module.
    """

    def __init__(self) -> None:
        self._constant: Constant | None = None
        self._evaluations: dict[str, Evaluation] = {}  # by model

    def on_test_epoch_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        """Make the evaluations, after ``AfterTraining.on_test_start``."""
        alone = [_by_itself(task) for task in pl_module.tasks.values() if task.constant]
        self._constant = Constant(alone, {}) if alone else None
        tasks_by_model = {"constant": alone} if alone else {}
        if (others := pl_module.other_models) is not None:
            tasks_by_model |= {name: [*pl_module.tasks.values()] for name in others.models}
            tasks_by_model[BLEND] = [*others.tasks.values()]
        self._evaluations = {n: Evaluation(tasks).to(pl_module.device) for n, tasks in tasks_by_model.items()}

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: MultiTaskModule, outputs: Any, batch: Batch, *index: int
    ) -> None:
        if not len(batch) or not self._evaluations:
            return
        by_model = {"constant": self._constant(batch.inputs)} if self._constant else {}
        if (others := pl_module.other_models) is not None:
            by_model |= others.predict(batch.inputs)
            on_cpu = {name: value.cpu() for name, value in outputs["predictions"].items()}
            by_model[BLEND] = blend_outputs(others.weights, {NETWORK: on_cpu, **by_model})
        for name, evaluation in self._evaluations.items():
            update(evaluation, by_model[name], batch)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        for name, evaluation in self._evaluations.items():
            values = {f"{name}:test/{metric}": value for metric, value in evaluation.compute().items()}
            for key, (value, _) in Measurements.of(values).items():
                # The loss of another model is infinite for a prediction far outside of the training rows
                if key.metric != "loss" or name == BLEND:
                    pl_module.measured[key] = Measurement(value if math.isfinite(value) else math.nan)
            pl_module.predictions["test", name] = evaluation.gathered()
        evaluations = {NETWORK: pl_module.evaluation, **self._evaluations}
        pl_module.measured.update(leads(evaluations, BLEND if BLEND in evaluations else NETWORK))
        self._evaluations = {}


def leads(evaluations: Mapping[str, Evaluation], in_use: str) -> Measurements:
    """Return the main metric of each task of the model in use minus that of each other one, with its standard error.

    The errors are those of a bootstrap over the test rows. A lead is known in the first process only, and left out
    where its error is undefined, and for more than ``MAX_OUTPUTS`` tasks, as trees. Every process has to call this.
    """
    measurements, gathered = Measurements(), {model: part.gathered() for model, part in evaluations.items()}
    models = sorted(evaluations, key=lambda model: model != in_use)  # the one in use first
    tasks = evaluations[in_use].tasks if len(evaluations[in_use].tasks) <= MAX_OUTPUTS else {}
    for task_name, task in tasks.items():
        metric = evaluations[in_use].metrics_of[task_name][0]
        measured = [model for model in models if metric in evaluations[model].metrics_of.get(task_name, ())]
        rows = {model: gathered[model][task_name] for model in measured if task_name in gathered[model]}
        if len(rows) < 2 or len(rows[in_use]) < MIN_ROWS:
            continue
        # Sorted, so that the draws do not depend on the order of the rows
        columns = [(part.likelihood, part.prediction, part.label) for part in rows.values()]
        order = torch.from_numpy(np.lexsort([value.numpy() for part in columns for value in part if value.dim()]))
        bare = {"row_id": UNDEFINED, "weight": UNDEFINED, "output": UNDEFINED}  # no metric reads them
        ordered = [replace(part, **bare).at(order) for part in rows.values()]
        differences = partial(_differences, task, metric)
        errors, _ = standard_errors(differences, ordered, metric, RESAMPLES, MAX_RESAMPLE_ROWS)
        for model, difference, sem in zip([*rows][1:], differences(ordered), errors, strict=True):
            if sem is not None:
                measurements[Key("test", task_name, metric, f"{in_use}{LEAD}{model}")] = Measurement(difference, sem)
    return measurements


def _differences(task: TaskSpec, metric: str, rows: Sequence[LabeledPredictions]) -> list[float]:
    """Return the metric of the first model minus that of each other one."""
    first, *others = (value_of(task.kind, metric, part) for part in rows)
    return [first - other for other in others]


def _by_itself(task: TaskSpec) -> TaskSpec:
    """Return the task of a constant, which predicts no probability given the task before, and ranks nothing."""
    metrics = tuple(name for name in metric_names(task) if metric_family(name) not in (*RANKING, *TOP))
    return replace(task, after=None, calibration=None, metrics=metrics)
