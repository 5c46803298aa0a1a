"""Learn from the validation rows, after the training, how to calibrate the network that is tested."""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
from mtl.training.calibrating import METHODS, calibrated, conformal_scores
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, labelled

log = logging.getLogger(__name__)


class CalibrationAfterTraining(Callback):
    """Fit the ``Calibration`` of each task before the test, and write it into the checkpoint that is tested.

    Regressions always get the scores of their intervals; ``classes``: tasks with classes are calibrated too. Of a task
    after another, the rows count in which the task before it is positive, since the network predicts the probability
    given that. A test without a training before it has the calibration of its checkpoint.
    """

    @validated
    def __init__(self, dirpath: str, classes: bool = False) -> None:
        self.dirpath, self.classes = dirpath, classes
        self._trained = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trained = True

    def on_test_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if not self._trained:
            return
        kinds, found = ("regression", *(METHODS if self.classes else ())), dict[str, Calibration]()
        names = [name for name, task in pl_module.tasks.items() if task.kind in kinds]
        parts: dict[str, list[dict[str, Tensor]]] = {name: [] for name in names}
        for batch in _validation(trainer) if names else ():
            for name, columns in _columns(pl_module, batch, trainer, names):
                parts[name].append(columns)
        for name in names:
            rows = {key: torch.cat([part[key] for part in parts[name]]) for key in (parts[name] or [{}])[0]}
            rows = gather_rows(rows)
            if not rows:
                continue
            task = pl_module.tasks[name]
            if task.kind == "regression":
                found[name] = conformal_scores(task, rows["output"], rows["label"])
                continue
            made, said = calibrated(task, rows["output"], rows["label"], rows["weight"])
            log.info("task %s: %s", name, said)
            if made is not None:
                found[name] = made
        found = gather(found)[0]  # process 0 has all rows
        for name, task in pl_module.tasks.items():
            pl_module.tasks[name] = pl_module.evaluation.tasks[name] = replace(task, calibration=found.get(name))
        path = Path(trainer.ckpt_path or Path(self.dirpath) / "last.ckpt")
        if trainer.is_global_zero and path.is_file():
            put_calibration(path, {name: asdict(each) for name, each in found.items()})


def _validation(trainer: Trainer) -> Iterator[Batch]:
    """Yield this process's batches of the validation rows, as many as a validation has."""
    loader, limit = trainer.datamodule.val_dataloader(), trainer.limit_val_batches  # type: ignore[attr-defined]
    most = limit if isinstance(limit, int) else None if limit == 1.0 else int(limit * len(loader))
    for batch in islice(loader, most):
        yield trainer.strategy.batch_to_device(batch)


def _columns(
    module: MultiTaskModule, batch: Batch, trainer: Trainer, names: list[str]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the outputs, the labels and the weights of the rows that count for each task, on the CPU."""
    with trainer.precision_plugin.forward_context():
        output: Any = module(module.converted(batch).inputs, list(batch.targets))
    for name in names:
        if name in batch.targets:
            task, label = module.tasks[name], batch.targets[name]
            known = labelled(task, label) if task.after is None else ~label.isnan() & (batch.targets[task.after] == 1)
            weight = batch.weights.get(name, torch.ones_like(label, dtype=torch.float32))
            columns = {"output": at_least_float32(output.predictions[name]), "label": label, "weight": weight}
            yield name, {key: value[known].cpu() for key, value in columns.items()}
