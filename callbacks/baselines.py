"""Test a constant prediction and a quick model beside the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, Trainer

from mtl.checks import require_packages
from mtl.distributed import gather
from mtl.options import validated
from mtl.table_models import MAX_OUTPUTS, MAX_ROWS, MODELS, ModelChoice, choose_model
from mtl.table_models.base import Constant, TableModel
from mtl.training.bootstrap import MAX_RESAMPLE_ROWS, MIN_ROWS, RESAMPLES, standard_error
from mtl.training.evaluation import Evaluation
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.measurements import LEAD, Key, Measurement, Measurements
from mtl.training.metrics import metric_names, value_of
from mtl.training.module import MultiTaskModule
from mtl.types import RANKING, TOP, Batch, TaskSpec, metric_family


class Baselines(Callback):
    """Compute the metrics of a constant prediction, and of a quick ``model`` if the data are a table, on the test rows.

    The constant is ``TaskSpec.constant``; it ranks nothing, so it has no metrics that rank the rows of groups. The
    model learns from at most ``MAX_ROWS`` training rows, so it is left out if they are not loaded. ``model``: lightgbm,
    linear, auto (see ``choose_model``) or none. The first process fits it, and each one predicts its own test rows. The
    values, and the network's lead in the main metrics with its standard error, are in the ``measured`` of the module.
    """

    @validated
    def __init__(self, model: ModelChoice = "auto") -> None:
        if model == "lightgbm":
            require_packages("baseline=lightgbm", "bench", "lightgbm")
        self.model = model
        self._models: dict[str, tuple[TableModel, Evaluation]] = {}

    def on_test_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        # Each task by itself: a baseline predicts no probabilities given the task before, and is not calibrated
        tasks = [replace(task, after=None, calibration=None) for task in pl_module.tasks.values() if task.constant]
        self._models = {}
        if not tasks:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        models: dict[str, TableModel] = {"constant": Constant(map(_without_ranks, tasks), data.spec.inputs)}
        name = choose_model(self.model, data.spec.inputs, tasks)
        if name in MODELS:
            model = MODELS[name](tasks, data.spec.inputs)
            with torch.inference_mode(False), torch.enable_grad():  # Lightning tests without gradients
                rows = data.training_sample(MAX_ROWS) if trainer.is_global_zero else None
                fitted = None if rows is None else model.fit(rows.inputs, rows.targets, rows.weights).state_dict()
            if (state := gather(fitted)[0]) is not None:
                model.load_state_dict(state)
                models[name] = model
        self._models = {name: (m, Evaluation(m.tasks).to(pl_module.device)) for name, m in models.items()}

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: MultiTaskModule, outputs: Any, batch: Batch, *index: int
    ) -> None:
        for model, evaluation in self._models.values() if len(batch) else ():
            outputs_by_task = {name: value.to(pl_module.device) for name, value in model.predict(batch.inputs).items()}
            outputs_by_task = {name: value for name, value in outputs_by_task.items() if name in batch.targets}
            evaluation.update(outputs_by_task, batch.targets, batch.row_ids, None, batch.groups)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        for name, (_, evaluation) in self._models.items():
            values = {f"{name}:test/{metric}": value for metric, value in evaluation.compute().items()}
            for key, (value, _) in Measurements.of(values).items():
                if key.metric != "loss":  # infinite: a prediction far outside of the training rows
                    pl_module.measured[key] = Measurement(value if math.isfinite(value) else math.nan)
            pl_module.measured.update(leads(pl_module.evaluation, evaluation, name))
            pl_module.predictions["test", name] = evaluation.gathered()
        self._models = {}


def leads(network: Evaluation, model: Evaluation, of_model: str) -> Measurements:
    """Return the network's main metric of each task minus that of ``model``, with its standard error.

    The error is that of a bootstrap over the test rows. A lead is known in the first process only, and left out where
    its error is undefined, and for more than ``MAX_OUTPUTS`` tasks, as the quick model. ``of_model``: the name of
    ``model``. Every process has to call this.
    """
    measurements, gathered = Measurements(), [evaluation.gathered() for evaluation in (network, model)]
    for name, task in model.tasks.items() if len(model.tasks) <= MAX_OUTPUTS else ():
        metric = network.metrics_of[name][0]
        rows = [by_task[name] for by_task in gathered if name in by_task and metric in model.metrics_of[name]]
        if len(rows) < 2 or len(rows[0]) < MIN_ROWS:
            continue
        # Sorted, so that the draws do not depend on the order of the rows
        columns = [value for part in rows for value in (part.likelihood, part.prediction, part.label) if value.dim()]
        order = torch.from_numpy(np.lexsort([value.numpy() for value in columns]))

        def lead(drawn: Sequence[LabeledPredictions], task: TaskSpec = task, metric: str = metric) -> float:
            of_network, of_other = (value_of(task.kind, metric, part) for part in drawn)
            return of_network - of_other

        ordered = [part.at(order) for part in rows]
        sem, _ = standard_error(lead, ordered, metric, RESAMPLES, MAX_RESAMPLE_ROWS)
        if sem is not None:
            measurements[Key("test", name, metric, LEAD + of_model)] = Measurement(lead(ordered), sem)
    return measurements


def _without_ranks(task: TaskSpec) -> TaskSpec:
    metrics = tuple(name for name in metric_names(task) if metric_family(name) not in (*RANKING, *TOP))
    return replace(task, metrics=metrics)
