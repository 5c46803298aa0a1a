"""Pass the validation rows through the network that is tested, after the training: numbers and calibration."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from mtl.checkpoints.files import put_after_training
from mtl.distributed import gather, gather_rows
from mtl.nn.calibration import Calibration
from mtl.nn.functional import at_least_float32
from mtl.options import validated
from mtl.predictions import distribution, main_number, readable
from mtl.training.evaluation import Evaluation, predict_batches
from mtl.training.fit_calibration import METHODS, fit_calibration
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.measurements import NETWORK, Measurements
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, TaskSpec

log = logging.getLogger(__name__)


class AfterTraining(Callback):
    """Pass the validation rows once through the network that is tested, before the test.

    They give its numbers of the validation, in the ``measured`` of the module, and its predictions for them; these are
    not calibrated. They also teach the ``Calibration`` of each task, which is written into the checkpoint that is
    tested. Of a table, also write how the predictions are distributed, with which ``mtl drift`` compares later ones.

    Regressions always get the scores of their intervals; ``classes``: tasks with classes are calibrated too. Of a task
    after another, the rows count in which the task before it is positive, since the network predicts the probability
    given that. A test without a training before it has the calibration of its checkpoint.
    """

    @validated
    def __init__(self, dirpath: str, classes: bool = False) -> None:
        self.dirpath, self.kinds = dirpath, ("regression", *(METHODS if classes else ()))
        self._trained = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trained = True

    def on_test_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if not self._trained:
            return
        tasks = {name: task for name, task in pl_module.tasks.items() if task.kind in self.kinds}
        evaluation = Evaluation(list(pl_module.tasks.values()), outputs=tasks).to(pl_module.device)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        is_table = data.labelled is not None  # only rows of tables are compared with later ones
        all_outputs: dict[str, list[Tensor]] = {}  # of a table; of several classes only the predicted one
        batches, context = validation_batches(trainer, pl_module), trainer.precision_plugin.forward_context
        for batch, output in predict_batches(pl_module, batches, pl_module.device, context=context):
            evaluation.update(output.predictions, batch.targets, batch.row_ids, batch.weights, batch.groups)
            for name, value in output.predictions.items() if is_table else ():
                predicted = value.argmax(-1) if pl_module.tasks[name].kind == "multiclass" else value
                all_outputs.setdefault(name, []).append(at_least_float32(predicted).cpu())
        values = {f"val/{name}": value for name, value in evaluation.compute().items()}
        if len(values) > 1:  # else no row has a label
            pl_module.measured.update(Measurements.of(values))
        rows = pl_module.predictions["val", NETWORK] = evaluation.gathered()
        calibrations = gather(fit_calibrations(tasks, rows) if trainer.is_global_zero else {})[0]
        for name, task in pl_module.tasks.items():
            pl_module.tasks[name] = pl_module.evaluation.tasks[name] = replace(task, calibration=calibrations.get(name))
        path = Path(trainer.ckpt_path or Path(self.dirpath) / "last.ckpt")
        distributed = distributions(pl_module.tasks, {name: torch.cat(parts) for name, parts in all_outputs.items()})
        if trainer.is_global_zero and path.is_file():
            plain = {name: asdict(calibration) for name, calibration in calibrations.items()}
            put_after_training(path, calibration=plain, predicted=distributed)


def validation_batches(trainer: Trainer, module: MultiTaskModule) -> Iterator[Batch]:
    """Yield the validation batches of the training, on the device and in the precision of the network."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
    loader, limit = data.val_dataloader(), trainer.limit_val_batches
    most = limit if isinstance(limit, int) else None if limit == 1 else int(limit * len(loader))
    for batch in islice(loader, most):
        yield module.converted(trainer.strategy.batch_to_device(batch))


def fit_calibrations(tasks: Mapping[str, TaskSpec], rows: Mapping[str, LabeledPredictions]) -> dict[str, Calibration]:
    """Return what each of ``tasks`` learns from its labelled ``rows``, which have the outputs of the network."""
    calibrations, nothing = {}, torch.zeros(0)
    empty = LabeledPredictions(nothing, nothing, row_id=nothing.long(), output=nothing)
    for name, task in tasks.items():
        labelled = rows.get(name, empty)
        if task.after is not None:
            before = rows.get(task.after, empty)
            labelled = labelled.at(torch.isin(labelled.row_id, before.row_id[before.label == 1]))
        weight = labelled.weight if labelled.weight.dim() else torch.ones(len(labelled))
        calibration, message = fit_calibration(task, labelled.output, labelled.label, weight)
        if calibration is not None:
            calibrations[name] = calibration
        if message:
            log.info("task %s: %s", name, message)
    return calibrations


def distributions(tasks: Mapping[str, TaskSpec], outputs: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return the distribution of the predictions of each task over the rows of all processes; {} in all but the first.

    ``outputs``: the network's for the N rows of this process, ``[N]`` or ``[N, Q]``, or the predicted class ``[N]``.
    Predictions are calibrated and corrected as ``TrainedModel.predict`` does it, since later ones are compared with
    them. One of them that is NaN or infinite leaves the task out.
    """
    classes = {name: output for name, output in outputs.items() if tasks[name].kind == "multiclass"}
    others = {name: output for name, output in outputs.items() if name not in classes}
    values = {name: value for name, value in readable(tasks, others).items() if name in tasks}
    numbers = gather_rows({name: main_number(tasks[name], value) for name, value in values.items()} | classes)
    finite = {name: value for name, value in numbers.items() if bool(value.isfinite().all())}
    return {name: distribution(tasks[name], value) for name, value in finite.items()}
