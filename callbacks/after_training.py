"""Pass the validation rows through the models that are tested, after the training: blend, numbers, calibration."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Timer
from torch import Tensor

from mtl.checkpoints.files import Checkpoint, put_after_training, read, using
from mtl.checks import join_names
from mtl.distributed import gather, gather_rows
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.nn.calibration import Calibration
from mtl.nn.functional import at_least_float32
from mtl.options import Positive, validated
from mtl.predictions import distribution, main_number, readable
from mtl.table_models import Choice, check_packages, choose_models
from mtl.table_models.blend import blend_outputs, choose_weights
from mtl.table_models.fitted import FittedModels
from mtl.training.evaluation import Evaluation, predict_batches
from mtl.training.fit_calibration import METHODS, fit_calibration
from mtl.training.labeled_predictions import LabeledPredictions, labelled_after
from mtl.training.measurements import BLEND, NETWORK, Measurements
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, TaskSpec

log = logging.getLogger(__name__)

BEFORE_TEST = 0.9  # part of the time limit until the test

Outputs = Mapping[str, Mapping[str, Tensor]]  # by model and task


class AfterTraining(Callback):
    """Fit the models of a table that are blended with the network, and pass the validation rows once through all.

    They choose the weights of the ``blend``, see ``mtl.table_models.choose_models`` and ``choose_weights``, and give
    the numbers of the validation, in the ``measured`` of the module, and its predictions, which are not calibrated.
    They teach the ``Calibration`` of each task, and of a table how predictions are distributed, with which ``mtl
    drift`` compares later ones: both are of the blend, or of the network if there is none. All this is written into the
    checkpoint that is tested.

    Regressions always get the scores of their intervals; ``classes``: tasks with classes are calibrated too. Of a task
    after another, the rows count in which the task before it is positive, since the network predicts the probability
    given that. A test without a training before it has what its checkpoint holds.

    ``time_limit``: seconds from the construction; models of a table for which no time is left are left out.
    """

    @validated
    def __init__(
        self, dirpath: str, blend: Choice = "none", classes: bool = False, time_limit: Positive | None = None
    ) -> None:
        self.dirpath, self.blend, self.kinds = dirpath, blend, ("regression", *(METHODS if classes else ()))
        self.time_limit = time_limit
        self._deadline = math.inf if time_limit is None else time.monotonic() + BEFORE_TEST * time_limit
        check_packages(blend)
        self._trained, self._ended = False, False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trained = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note whether the time limit ended the training; the test restores the state of callbacks."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        timers = [callback for callback in callbacks if isinstance(callback, Timer)]
        self._ended = trainer.current_epoch < (trainer.max_epochs or 0) and any(
            (timer.time_remaining() or 0) <= 0 for timer in timers
        )

    def on_test_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        path = Path(trainer.ckpt_path or Path(self.dirpath) / "last.ckpt")
        if not self._trained:
            checkpoint = read(path) if path.is_file() else Checkpoint({}, path)
            pl_module.other_models = None
            with using(checkpoint):
                if stored := checkpoint.get("blend"):
                    pl_module.other_models = FittedModels.restore(stored, checkpoint.calibrated(data.spec))
            return
        tasks, is_table = list(pl_module.tasks.values()), data.labelled is not None
        calibrated = {task.name: task for task in tasks if task.kind in self.kinds}
        is_limited = self.time_limit is not None
        names = choose_models(self.blend, data.spec.inputs, tasks, is_limited) if is_table else []
        if names:
            log.info("fitting %s, to blend with the network", join_names(names))
        others = FittedModels.fit(names, data.spec, data, trainer.is_global_zero, self._deadline)
        unfitted = [name for name in names if name not in others.models]
        unfitted += [f"{n} for {len(m.left_out)} of {len(tasks)} tasks" for n, m in others.models.items() if m.left_out]
        self._report_left_out(trainer, unfitted)
        outputs_of = pl_module.tasks if others.models else calibrated
        models = [NETWORK, *others.models, *([BLEND] if others.models else [])]
        evaluations = {name: Evaluation(tasks, outputs_of).to(pl_module.device) for name in models}
        rows: list[tuple[Batch, Outputs]] = []  # of a table, which are compared with later ones; without inputs
        batches, context = validation_batches(trainer, pl_module), trainer.precision_plugin.forward_context
        for batch, output in predict_batches(pl_module, batches, pl_module.device, context=context):
            outputs: Outputs = {NETWORK: output.predictions, **others.predict(batch.inputs)}
            for name, by_task in outputs.items():
                update(evaluations[name], by_task, batch)
            if is_table:
                on_cpu = {name: {task: value.cpu() for task, value in part.items()} for name, part in outputs.items()}
                rows.append((Batch({}, batch.targets, batch.weights, batch.groups, batch.row_ids), on_cpu))
        if others.models:
            by_model = {name: evaluations[name].gathered() for name in models[:-1]}
            left_out = {name: model.left_out for name, model in others.models.items()}
            weights = gather(choose_weights(tasks, by_model, left_out) if trainer.is_global_zero else {})[0]
            others = pl_module.other_models = replace(others, weights=weights)
            rows = [(batch, {**outputs, BLEND: blend_outputs(weights, outputs)}) for batch, outputs in rows]
            for batch, outputs in rows:
                update(evaluations[BLEND], outputs[BLEND], batch)
        for name, evaluation in evaluations.items():
            values = {f"val/{key}": value for key, value in evaluation.compute().items()}
            if len(values) > 1:  # else no row has a label
                measured = Measurements.of(values)
                pl_module.measured.update({key._replace(model=name): value for key, value in measured.items()})
            pl_module.predictions["val", name] = evaluation.gathered()
        in_use = pl_module.predictions["val", models[-1]]
        calibrations = gather(fit_calibrations(calibrated, in_use) if trainer.is_global_zero else {})[0]
        specs = {task.name: replace(task, calibration=calibrations.get(task.name)) for task in tasks}
        if others.models:
            pl_module.other_models = replace(others, tasks=specs)
        else:
            pl_module.tasks, pl_module.evaluation.tasks = specs, {**specs}
        predicted = distributions(specs, [outputs[models[-1]] for _, outputs in rows])
        if trainer.is_global_zero and path.is_file():
            plain = {name: asdict(calibration) for name, calibration in calibrations.items()}
            put_after_training(path, calibration=plain, predicted=predicted, blend=others.state())

    def _report_left_out(self, trainer: Trainer, models: Sequence[str]) -> None:
        """Warn of what the time limit has left out."""
        ended = f"the training ended in epoch {trainer.current_epoch} of at most {trainer.max_epochs}"
        left_out = [ended] if self._ended else []
        left_out += [f"left out: {join_names(models)}"] if models else []
        if self.time_limit is not None and left_out:
            log.warning("time_limit=%g: %s", self.time_limit, "; ".join(left_out))


def update(evaluation: Evaluation, outputs: Mapping[str, Tensor], batch: Batch) -> None:
    """Add to ``evaluation`` what a model returned for ``batch``, perhaps for other tasks too and on another device."""
    by_task = {task: outputs[task].to(label.device) for task, label in batch.targets.items() if task in outputs}
    evaluation.update(by_task, batch.targets, batch.row_ids, batch.weights, batch.groups)


def validation_batches(trainer: Trainer, module: MultiTaskModule) -> Iterator[Batch]:
    """Yield the validation batches of the training, on the device and in the precision of the network."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
    loader, limit = data.val_dataloader(), trainer.limit_val_batches
    most = limit if isinstance(limit, int) else None if limit == 1 else int(limit * len(loader))
    for batch in islice(loader, most):
        yield module.converted(trainer.strategy.batch_to_device(batch))


def fit_calibrations(tasks: Mapping[str, TaskSpec], rows: Mapping[str, LabeledPredictions]) -> dict[str, Calibration]:
    """Return what each of ``tasks`` learns from its labelled ``rows``, which have the outputs of the model in use."""
    calibrations, messages = dict[str, Calibration](), list[str]()
    for name, task in tasks.items():
        labelled = labelled_after(task, rows)
        weight = labelled.weight if labelled.weight.dim() else torch.ones(len(labelled))
        calibration, message = fit_calibration(task, labelled.output, labelled.label, weight)
        if calibration is not None:
            calibrations[name] = calibration
        messages += [f"task {name}: {message}"] * bool(message)
    if len(messages) > MAX_LISTED_TASKS:
        calibrated = [name for name in calibrations if tasks[name].kind != "regression"]
        messages = [f"calibrated: {len(calibrated)} of {len(messages)} tasks"]
    for message in messages:
        log.info("%s", message)
    return calibrations


def distributions(tasks: Mapping[str, TaskSpec], outputs: Sequence[Mapping[str, Tensor]]) -> dict[str, dict[str, Any]]:
    """Return the distribution of the predictions of each task over the rows of all processes; {} in all but the first.

    ``outputs``: for each batch of this process, those of a model by task. Predictions are calibrated and corrected as
    ``TrainedModel.predict`` does it, since later ones are compared with them. One of them that is NaN or infinite
    leaves the task out.
    """
    parts: dict[str, list[Tensor]] = {}
    for batch in outputs:
        for name, value in readable(tasks, {n: at_least_float32(value) for n, value in batch.items()}).items():
            if name in tasks:
                parts.setdefault(name, []).append(main_number(tasks[name], value))
    numbers = gather_rows({name: torch.cat(values) for name, values in parts.items()})
    finite = {name: value for name, value in numbers.items() if bool(value.isfinite().all())}
    return {name: distribution(tasks[name], value) for name, value in finite.items()}
