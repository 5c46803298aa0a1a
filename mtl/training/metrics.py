"""Accumulate losses and metrics over one pass through the data, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError

from mtl.distributed import all_reduce_sum, gather_tensors
from mtl.functional import at_least_float32
from mtl.training.losses import labelled, summed_losses
from mtl.types import TaskSpec


def task_metrics(task: TaskSpec) -> dict[str, Metric]:
    """Return fresh metrics for a task: AUROC and accuracy, accuracy, or mean squared error, by its kind."""
    if task.kind == "binary":
        return {
            "auroc": BinaryAUROC(dist_sync_fn=gather_tensors),
            "accuracy": BinaryAccuracy(dist_sync_fn=gather_tensors),
        }
    if task.kind == "multiclass":
        return {"accuracy": MulticlassAccuracy(task.num_classes, average="micro", dist_sync_fn=gather_tensors)}
    return {
        # In float64 the sums hardly depend on the order of the rows
        "mse": MeanSquaredError(dist_sync_fn=gather_tensors).set_dtype(torch.float64)
    }


class LossMeter(nn.Module):
    """Sum each task's losses over labelled rows, so that the mean does not depend on how rows are batched.

    ``sums [2, T]``, float64: this process's summed losses and numbers of labels.
    """

    sums: Tensor

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        super().__init__()
        self.tasks = list(tasks)
        self.index_of = {task.name: index for index, task in enumerate(self.tasks)}
        self._constants: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self.register_buffer("sums", torch.zeros(2, len(self.tasks), dtype=torch.float64), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> LossMeter:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch declares no types for it
        self.sums = self.sums.double()  # keep float64, which a half-precision trainer would convert
        return self

    def update(self, names: Sequence[str], totals: Tensor, counts: Tensor) -> None:
        """Add the summed losses and numbers of labels ``[len(names)]`` of a batch."""
        index, _ = self.constants(tuple(names), totals)
        self.sums.index_add_(1, index, torch.stack([totals.detach().double(), counts.double()]))

    def constants(self, names: tuple[str, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices and the weights of the named tasks, on the device and in the precision of ``like``.

        They are cached, since copying them to a device in each step would wait for the device.
        """
        key = (names, like.device, like.dtype)
        if key not in self._constants:
            index = torch.tensor([self.index_of[name] for name in names], device=like.device)
            weights = like.new_tensor([self.tasks[task].weight for task in index.tolist()])
            self._constants[key] = index, weights
        return self._constants[key]

    def compute(self) -> dict[str, float]:
        """Return the mean loss by task, and ``loss``, their weighted sum; tasks without a label are left out.

        The means are over the rows of all processes, so every process has to call this.
        """
        result, weighted = {}, 0.0
        for task, (loss, count) in zip(self.tasks, all_reduce_sum(self.sums).t().tolist(), strict=True):
            if count:
                result[f"{task.name}/loss"] = loss / count
                weighted += task.weight * loss / count
        return {"loss": weighted, **result}

    def reset(self) -> None:
        self.sums.zero_()


class Evaluation(nn.Module):
    """Accumulate losses and metrics of one evaluation pass; each task has its own metrics."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        super().__init__()
        self.meter = LossMeter(tasks)
        self.tasks = {task.name: task for task in tasks}
        self.metrics = nn.ModuleDict({str(i): nn.ModuleDict(task_metrics(task)) for i, task in enumerate(tasks)})

    def update(self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Add a batch: ``predictions[task]`` as a network gives them, ``targets[task] [B]``."""
        self.meter.update(*summed_losses(self.tasks, predictions, targets))
        for name, prediction in predictions.items():
            task, target = self.tasks[name], targets[name]
            mask = labelled(task, target)
            prediction, target = at_least_float32(prediction)[mask], target[mask]
            if task.kind == "regression":
                prediction, target = prediction.double(), target.double()
            if task.kind == "binary":
                # torchmetrics guesses for each batch whether it gets logits, so give it probabilities. In float32 the
                # sigmoid of all logits above 17 is 1, and they would tie
                prediction, target = prediction.double().sigmoid(), target.long()
            if len(target):
                for metric in self._of(name).values():
                    metric.update(prediction, target)

    def compute(self) -> dict[str, float]:
        """Return ``loss``, ``<task>/loss`` and ``<task>/<metric>`` over the pass."""
        result = self.meter.compute()
        for name in self.tasks:
            if f"{name}/loss" in result:
                for metric_name, metric in self._of(name).items():
                    result[f"{name}/{metric_name}"] = float(metric.compute())
        return result

    def names(self) -> list[str]:
        """Return the names of all values that ``compute`` may return: the loss first, then task by task."""
        return ["loss", *(f"{task}/{name}" for task in self.tasks for name in ("loss", *self._of(task)))]

    def reset(self) -> None:
        self.meter.reset()
        for name in self.tasks:
            for metric in self._of(name).values():
                metric.reset()

    def _of(self, name: str) -> dict[str, Metric]:
        metrics = self.metrics[str(self.meter.index_of[name])]
        assert isinstance(metrics, nn.ModuleDict)
        return {key: metric for key, metric in metrics.items() if isinstance(metric, Metric)}
