"""Learn from the validation rows, after the training, how to calibrate the network that is tested."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from mtl.checkpoints.files import put_calibration
from mtl.distributed import gather, gather_rows
from mtl.nn.calibration import Calibration
from mtl.nn.functional import at_least_float32
from mtl.options import validated
from mtl.training.calibrating import METHODS, learnt
from mtl.training.module import MultiTaskModule
from mtl.types import labelled

log = logging.getLogger(__name__)


class CalibrationAfterTraining(Callback):
    """Fit the ``Calibration`` of each task before the test, and write it into the checkpoint that is tested.

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
        loader, limit = data.val_dataloader() if tasks else (), trainer.limit_val_batches
        most = limit if isinstance(limit, int) else None if limit == 1 else int(limit * len(loader))
        for batch in islice(loader, most):
            batch = pl_module.converted(trainer.strategy.batch_to_device(batch))
            with trainer.precision_plugin.forward_context():
                outputs = pl_module(batch.inputs, list(batch.targets)).predictions
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
        if trainer.is_global_zero and path.is_file():
            put_calibration(path, {name: asdict(each) for name, each in found.items()})
