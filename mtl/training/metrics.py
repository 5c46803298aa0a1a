"""Accumulate losses and metrics over one pass through the data, task by task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryCalibrationError,
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassF1Score,
)

from mtl.checks import InputError, require
from mtl.distributed import all_reduce_sum, gather_tensors
from mtl.functional import KeepsDigits, at_least_float32
from mtl.training.correlation import BinaryMatthews, MulticlassMatthews, Pearson, Spearman
from mtl.training.errors import ERRORS, MeanErrors, TaskSums
from mtl.training.losses import summed_losses
from mtl.training.ranking import Ranking
from mtl.training.scores import AUROC, R2, AveragePrecision, BaseRate, LogLoss, OneVersusRestAUROC
from mtl.training.spans import SpanScore, best_spans
from mtl.types import METRICS, TaskKind, TaskSpec, has_float64, labelled, metric_family, widest

BUILDERS: dict[TaskKind, dict[str, Callable[..., Metric]]] = {  # of mtl.types.METRICS, but for those in ERRORS
    "binary": {
        "auroc": AUROC,
        "auprc": AveragePrecision,
        "accuracy": BinaryAccuracy,
        "f1": BinaryF1Score,
        "matthews": BinaryMatthews,
        "ece": partial(BinaryCalibrationError, n_bins=15),
        "logloss": LogLoss,
        "base_rate": BaseRate,
        "ndcg@K": partial(Ranking, "ndcg"),
        "hit_rate@K": partial(Ranking, "hit_rate"),
        "mrr": partial(Ranking, "mrr"),
    },
    "multiclass": {
        "accuracy": partial(MulticlassAccuracy, average="micro"),
        "macro_f1": partial(MulticlassF1Score, average="macro"),
        "matthews": MulticlassMatthews,
        "auroc": OneVersusRestAUROC,
        "ece": partial(MulticlassCalibrationError, n_bins=15),
        "logloss": LogLoss,
    },
    "regression": {
        "r2": R2,
        "pearson": Pearson,
        "spearman": Spearman,
    },
    "span": {name: partial(SpanScore, name) for name in METRICS["span"]},
}
DEFAULTS: dict[TaskKind, tuple[str, ...]] = {
    "binary": ("auroc", "accuracy"),
    "multiclass": ("accuracy",),
    "regression": ("mse",),
    "span": METRICS["span"],
}


def metric_names(task: TaskSpec) -> tuple[str, ...]:
    """Return the metrics that the task names, or else the default ones of its kind; the first is the main one."""
    return tuple(task.metrics) or DEFAULTS[task.kind]


def task_metrics(task: TaskSpec) -> dict[str, Metric]:
    """Return fresh metrics by name, but for those in ``ERRORS``."""
    own: dict[str, Any] = {"num_classes": task.num_classes} if task.kind == "multiclass" else {}
    if task.kind == "span":
        require(task.scorer is not None, f"task {task.name!r}: a task of kind span needs a scorer")
        own = {"scorer": task.scorer}
    metrics = {}
    for name in metric_names(task):
        if name not in ERRORS:
            first = {"k": int(name.partition("@")[2])} if "@" in name else {}
            metrics[name] = BUILDERS[task.kind][metric_family(name)](**own, **first, dist_sync_fn=gather_tensors)
    if task.kind == "regression":  # in float64 the sums hardly depend on the order of the rows
        metrics = {name: metric.set_dtype(torch.float64) for name, metric in metrics.items()}
    return metrics


def averages(tasks: Sequence[TaskSpec]) -> dict[str, list[str]]:
    """Return the main metrics that ``average`` and ``small_average`` are means of, as ``<task>/<metric>``.

    There are no averages unless every task names its metrics, and of each main one higher is better; and no
    ``small_average`` if no task is small.
    """
    mains = {task.name: metric_names(task)[0] for task in tasks}
    if not all(task.metrics and higher_is_better(mains[task.name]) for task in tasks):
        return {}
    everyone = [f"{task.name}/{mains[task.name]}" for task in tasks]
    small = [f"{task.name}/{mains[task.name]}" for task in tasks if task.small]
    return {"average": everyone, "small_average": small} if small else {"average": everyone}


def mean_of_defined(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN, NaN if all are."""
    defined = [value for value in values if not math.isnan(value)]
    return statistics.fmean(defined) if defined else math.nan


def higher_is_better(name: str) -> bool | None:
    """Return whether higher values of a logged name are better, as of ``val/click/auroc``; None if it is not known."""
    last = metric_family(name.rpartition("/")[2])
    if last in ("average", "small_average"):
        return True
    for builders in BUILDERS.values():
        if last in builders:
            builder: Any = builders[last]
            better: bool | None = getattr(builder, "func", builder).higher_is_better
            return better
    return False if last == "loss" or last in ERRORS else None


def mode_of(monitor: str, mode: str = "auto") -> str:
    """Return ``mode``, min or max; for "auto", max if higher values of ``monitor`` are known to be better, else min."""
    if mode == "auto":
        return "max" if higher_is_better(monitor) else "min"
    return mode


def on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``values`` on the CPU."""
    return {name: value.cpu() for name, value in values.items()}


class LossMeter(TaskSums):
    """Sum each task's losses over labelled rows, so that the mean does not depend on how rows are batched.

    ``sums [2, T]``: this process's summed losses and numbers of labels.
    """

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        super().__init__(tasks, 2)
        self._constants: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def update(self, names: Sequence[str], totals: Tensor, counts: Tensor) -> None:
        """Add the summed losses and numbers of labels ``[len(names)]`` of a batch."""
        index, _ = self.constants(tuple(names), totals)
        self.sums.index_add_(1, index, torch.stack([widest(totals.detach()), widest(counts)]))

    def constants(self, names: tuple[str, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices and the weights of the named tasks, on the device and in the precision of ``like``.

        They are cached, since copying them to a device in each step would wait for the device.
        """
        key = (names, like.device, like.dtype)
        if key not in self._constants:
            numbers = [self.index_of[name] for name in names]
            index = torch.tensor(numbers, device=like.device)
            weights = like.new_tensor([self.tasks[number].weight for number in numbers])
            self._constants[key] = index, weights
        return self._constants[key]

    def compute(self) -> dict[str, float]:
        """Return the mean loss by task, and ``loss``, their weighted sum; tasks without a label are left out.

        ``loss`` is NaN if no task with a weight above 0 has a label. The means are over the rows of all processes,
        so every process has to call this.
        """
        sums = zip(self.tasks, all_reduce_sum(self.sums).t().tolist(), strict=True)
        means = {task: loss / count for task, (loss, count) in sums if count}
        weighted = [task.weight * mean for task, mean in means.items() if task.weight]
        return {"loss": sum(weighted) if weighted else math.nan} | {f"{t.name}/loss": mean for t, mean in means.items()}


class Evaluation(KeepsDigits):
    """Accumulate losses and metrics of one evaluation pass; each task has its own metrics."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        super().__init__()
        self.meter = LossMeter(tasks)
        self.tasks = {task.name: task for task in tasks}
        self.metrics = nn.ModuleDict({str(i): nn.ModuleDict(task_metrics(task)) for i, task in enumerate(tasks)})
        self.shown = {task.name: metric_names(task) for task in tasks}
        self.errors = MeanErrors([task for task in tasks if not ERRORS.keys().isdisjoint(self.shown[task.name])])
        self.averages = averages(tasks)

    def update(
        self,
        predictions: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        rows: Tensor | None = None,
        weights: Mapping[str, Tensor] | None = None,
        groups: Tensor | None = None,
    ) -> None:
        """Add a batch: ``predictions[task]`` as a network gives them, ``targets[task] [B]``.

        Span tasks need ``rows [B]``, by which their scorers know the rows; they are scored on all, labelled or not.
        ``weights`` and ``groups``: see ``Batch``. Weights count in the losses alone: all labelled rows are alike to
        metrics.
        """
        if not all(has_float64(prediction.device) for prediction in predictions.values()):
            predictions, targets, weights = on_cpu(predictions), on_cpu(targets), on_cpu(weights or {})
            rows, groups = (None if value is None else value.cpu() for value in (rows, groups))
        self.meter.update(*summed_losses(self.tasks, predictions, targets, weights))
        self.errors.update(predictions, targets)
        for name, prediction in predictions.items():
            task, target = self.tasks[name], targets[name]
            if not self._of(name):
                continue
            if task.kind == "span":
                self._update_spans(task, prediction, rows)
                continue
            mask = labelled(task, target)
            prediction, target = at_least_float32(prediction)[mask], target[mask]
            if task.kind == "regression":
                prediction, target = task.in_units(prediction), target.double()
            if task.kind == "binary":
                # torchmetrics guesses for each batch whether it gets logits, so give it probabilities. In float32 the
                # sigmoid of all logits above 17 is 1, and they would tie
                prediction, target = prediction.double().sigmoid(), target.long()
            if task.kind == "multiclass":
                prediction = prediction.double().softmax(-1)
            if len(target):
                self._update_metrics(task, prediction, target, None if groups is None else groups[mask])

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Stay on the CPU instead of moving to a device without float64."""
        if not has_float64(fn(torch.zeros(())).device):
            return self
        super()._apply(fn, recurse)
        return self

    def compute(self) -> dict[str, float]:
        """Return ``loss``, ``<task>/loss`` and ``<task>/<metric>`` over the pass, and the averages over tasks if any.

        Like the loss, an average leaves out tasks without a label; and a task whose main metric is undefined, NaN.
        """
        result, errors = self.meter.compute(), self.errors.compute()
        for name in self.tasks:
            if f"{name}/loss" in result:
                own = self._of(name)
                for shown in self.shown[name]:
                    value = float(own[shown].compute()) if shown in own else errors[shown][name]
                    result[f"{name}/{shown}"] = value
        found = {name: [result[main] for main in mains if main in result] for name, mains in self.averages.items()}
        means = {name: mean_of_defined(values) for name, values in found.items() if values}
        return {"loss": result["loss"], **means, **result}

    def undefined(self, result: Mapping[str, float]) -> dict[str, str]:
        """Return for each value that is NaN in ``result``, which ``compute`` returned, what it needs to be defined.

        They include the averages if all of their metrics are NaN, but no value that is NaN because a prediction is.
        """
        found: dict[str, str] = dict.fromkeys(self.averages, "a task whose main metric is defined")
        if not any(task.weight and f"{name}/loss" in result for name, task in self.tasks.items()):
            found["loss"] = "a label of a task with a weight above 0"
        for name in self.tasks:
            for metric_name, metric in self._of(name).items():
                if hasattr(metric, "needs") and math.isfinite(result.get(f"{name}/loss", math.nan)):
                    found[f"{name}/{metric_name}"] = str(metric.needs)
        return {name: needs for name, needs in found.items() if math.isnan(result.get(name, 0.0))}

    def main_metrics(self) -> dict[str, str]:
        """Return the name of the first metric of each task."""
        return {name: shown[0] for name, shown in self.shown.items()}

    def names(self) -> list[str]:
        """Return the names of all values that ``compute`` may return: the whole network's first, then task by task."""
        by_task = (f"{task}/{name}" for task in self.tasks for name in ("loss", *self.shown[task]))
        return ["loss", *self.averages, *by_task]

    def reset(self) -> None:
        self.meter.reset()
        self.errors.reset()
        for name in self.tasks:
            for metric in self._of(name).values():
                metric.reset()

    def _update_metrics(self, task: TaskSpec, prediction: Tensor, target: Tensor, groups: Tensor | None) -> None:
        for name, metric in self._of(task.name).items():
            if not isinstance(metric, Ranking):
                metric.update(prediction, target)
                continue
            if groups is None:
                raise InputError(f"task {task.name!r}: {name} ranks the rows of each group; the data have no groups")
            metric.update(prediction, target, groups)

    def _update_spans(self, task: TaskSpec, prediction: Tensor, rows: Tensor | None) -> None:
        require(rows is not None, f"task {task.name!r}: evaluation of a task of kind span needs the input row")
        assert rows is not None
        assert task.scorer is not None
        if len(rows):
            found = best_spans(at_least_float32(prediction), task.scorer.context[rows.cpu()], task.scorer.max_answer)
            for metric in self._of(task.name).values():
                metric.update(rows, *found)

    def _of(self, name: str) -> dict[str, Metric]:
        metrics = self.metrics[str(self.meter.index_of[name])]
        assert isinstance(metrics, nn.ModuleDict)
        return {key: metric for key, metric in metrics.items() if isinstance(metric, Metric)}
