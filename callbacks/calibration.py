"""Learn from the validation rows, after the training, how to calibrate the network that is tested."""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
from mtl.training.calibrating import METHODS, learnt
from mtl.training.module import MultiTaskModule
from mtl.types import TaskSpec, labelled

log = logging.getLogger(__name__)


class CalibrationAfterTraining(Callback):
    """Fit the ``Calibration`` of each task before the test, and write it into the checkpoint that is tested.

    Of a table, also write how the predictions are distributed, with which ``mtl drift`` compares later ones.

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
        parts: dict[str, list[dict[str, Tensor]]] = {name: [] for name in tasks}
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        is_table = data.labelled is not None  # only rows of tables are compared with later ones
        all_outputs: dict[str, list[Tensor]] = {}  # of a table; of several classes only the predicted one
        loader, limit = data.val_dataloader() if tasks or is_table else (), trainer.limit_val_batches
        most = limit if isinstance(limit, int) else None if limit == 1 else int(limit * len(loader))
        for batch in islice(loader, most):
            batch = pl_module.converted(trainer.strategy.batch_to_device(batch))
            with trainer.precision_plugin.forward_context():
                outputs = pl_module(batch.inputs, list(batch.targets)).predictions
            for name, output in outputs.items() if is_table else ():
                predicted = output.argmax(-1) if pl_module.tasks[name].kind == "multiclass" else output
                all_outputs.setdefault(name, []).append(at_least_float32(predicted).cpu())
            for name in parts.keys() & batch.targets.keys():
                task, label = tasks[name], batch.targets[name]
                known = labelled(task, label)
                known = known if task.after is None else known & (batch.targets[task.after] == 1)
                weight = batch.weights.get(name, torch.ones(len(label), device=label.device))
                columns = {"output": at_least_float32(outputs[name]), "label": label, "weight": weight}
                parts[name].append({key: value[known].cpu() for key, value in columns.items()})
        found: dict[str, Calibration] = {}
        for name, each in parts.items():
            rows = gather_rows({key: torch.cat([part[key] for part in each]) for key in (each or [{}])[0]})
            made, said = learnt(tasks[name], **rows) if rows else (None, "")
            found |= {} if made is None else {name: made}
            if said:
                log.info("task %s: %s", name, said)
        found = gather(found)[0]  # process 0 has all rows
        for name, task in pl_module.tasks.items():
            pl_module.tasks[name] = pl_module.evaluation.tasks[name] = replace(task, calibration=found.get(name))
        path = Path(trainer.ckpt_path or Path(self.dirpath) / "last.ckpt")
        predicted = distributions(pl_module.tasks, {name: torch.cat(each) for name, each in all_outputs.items()})
        if trainer.is_global_zero and path.is_file():
            calibrations = {name: asdict(each) for name, each in found.items()}
            put_after_training(path, calibration=calibrations, predicted=predicted)


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
