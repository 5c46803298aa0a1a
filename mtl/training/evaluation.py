"""Accumulate losses and metrics over one pass through the data, task by task."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.chains import joint_logits
from mtl.checks import InputError, require
from mtl.distributed import gather, gather_rows
from mtl.nn.functional import KeepsBufferPrecision, at_least_float32, has_float64, sigmoid_keeping_ties
from mtl.training.epoch import LossMeter
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.losses import LossSums, pinball
from mtl.training.metrics import averages, mean_of_defined, metric_names, value_of
from mtl.types import RANKING, Batch, NetworkOutput, TaskSpec, has_label, metric_family
from mtl.types.task_tensors import group_by, map_tasks, stack_tasks

Columns = dict[str, Tensor]  # [N, ...] each
OF_ROWS = ("row_id", "groups")  # columns that all tasks share


class Evaluation(KeepsBufferPrecision):
    """Accumulate losses and metrics of one evaluation pass; each task has its own metrics.

    Losses are kept as sums. Metrics need the rows of their tasks, which each process keeps to the end, on the CPU. The
    first process then has those of all processes, in the order of their numbers, so metrics do not depend on how the
    rows were divided into batches, nor among the processes. ``outputs``: tasks whose rows keep the network's outputs,
    as those with quantiles or calibrated classes do.
    """

    def __init__(self, tasks: Sequence[TaskSpec], outputs: Collection[str] = ()) -> None:
        super().__init__()
        self.meter, self.outputs = LossMeter(tasks), outputs
        self.tasks = {task.name: task for task in tasks}
        self.metrics_of = {task.name: metric_names(task) for task in tasks}
        self.averages = averages(tasks)
        ranking = ((task, metric) for task in self.tasks for metric in reversed(self.metrics_of[task]))
        self._ranking = {task: metric for task, metric in ranking if metric_family(metric) in RANKING}  # the first one
        self._loss_sums = LossSums(dict(self.tasks))
        # Of each batch and each group of tasks that are alike, columns [B, n, ...], but those of OF_ROWS [B]
        self._blocks: list[tuple[list[str], Columns]] = []
        self._num_rows = 0  # of all batches
        self._gathered: dict[str, Columns] | None = None  # the rows of all processes, in the first one
        for task in tasks:
            scored = task.kind != "span" or task.scorer is not None
            require(scored, f"task {task.name!r}: a task of kind span needs a scorer")

    def update(
        self,
        predictions: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        row_ids: Tensor | None = None,
        weights: Mapping[str, Tensor] | None = None,
        groups: Tensor | None = None,
    ) -> None:
        """Add a batch: ``predictions[task]`` as returned by a network, ``targets[task] [B]``.

        ``row_ids``, ``weights`` and ``groups``: see ``Batch``. Without ``row_ids``, rows are numbered as they
        come; span tasks need them for their scorers, and are scored on all rows, labelled or not. Weights
        affect only the losses, not the metrics.
        """
        if not all(has_float64(prediction.device) for prediction in predictions.values()):
            predictions, targets = map_tasks(predictions, Tensor.cpu), map_tasks(targets, Tensor.cpu)
            weights = map_tasks(weights or {}, Tensor.cpu)
        for name in self._ranking.keys() & predictions.keys() if groups is None else ():
            ranks = f"{self._ranking[name]} ranks the rows of each group; the data have no groups"
            raise InputError(f"task {name!r}: {ranks}")
        outputs = predictions
        if any(self.tasks[name].calibration for name in outputs):
            predictions = {name: self.tasks[name].calibrate(value) for name, value in outputs.items()}
        predictions = joint_logits(self.tasks, predictions)
        self.meter.update(*self._loss_sums(predictions, targets, weights))
        self._gathered = None
        size = len(next(iter(targets.values()), ()))
        ids = torch.arange(self._num_rows, self._num_rows + size) if row_ids is None else row_ids
        for names in group_by(predictions, self._group_key).values():
            prediction, target = stack_tasks(predictions, names), stack_tasks(targets, names)
            columns = self._columns(names, prediction, target, row_ids) | {"row_id": ids}
            if self.tasks[names[0]].kind == "binary" and groups is not None:
                columns["groups"] = groups
            columns |= {"weight": stack_tasks(weights, names)} if weights else {}
            if self._keeps_outputs(names[0]):
                columns["output"] = at_least_float32(stack_tasks(outputs, names))
            self._blocks.append((names, {name: value.cpu() for name, value in columns.items()}))
        self._num_rows += size

    def _group_key(self, name: str) -> Hashable:
        """Return what tasks have in common whose columns are computed together."""
        task = self.tasks[name]
        alone = name if task.kind == "span" else ""
        return task.kind, task.outputs, "auroc" in self.metrics_of[name], self._keeps_outputs(name), alone

    def _keeps_outputs(self, name: str) -> bool:
        task = self.tasks[name]
        is_mapped = task.kind != "regression" and task.calibration is not None
        return name in self.outputs or bool(task.quantiles) or is_mapped

    def _columns(self, names: Sequence[str], prediction: Tensor, target: Tensor, row_ids: Tensor | None) -> Columns:
        """Return what metrics need of a batch ``[B, n, ...]``: predictions and labels, or the input of a scorer."""
        task = self.tasks[names[0]]
        if task.kind == "span":
            require(row_ids is not None, f"task {task.name!r}: evaluation of a task of kind span needs row_ids")
            assert row_ids is not None
            assert task.scorer is not None
            context = task.scorer.context[row_ids.cpu()]
            best = best_spans(at_least_float32(prediction[:, 0]), context, task.scorer.max_answer)
            return {name: value[:, None] for name, value in zip(("spans", "scores", "null_scores"), best, strict=True)}
        if task.kind != "multiclass":
            return {"prediction": prediction, "label": target}
        scores = at_least_float32(prediction).double().softmax(-1)  # [B, n, C]
        confidence, best_class = scores.max(-1)
        likelihood = scores.gather(2, target.clamp(min=0)[..., None])[..., 0]
        columns = {"prediction": best_class, "label": target, "confidence": confidence, "likelihood": likelihood}
        return columns | {"scores": scores} if "auroc" in self.metrics_of[names[0]] else columns

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Stay on the CPU instead of moving to a device without float64."""
        if not has_float64(fn(torch.zeros(())).device):
            return self
        super()._apply(fn, recurse)
        return self

    def compute(self) -> dict[str, float]:
        """Return ``loss``, ``<task>/loss`` and ``<task>/<metric>`` over the pass, and the averages over tasks if any.

        Like the loss, an average leaves out tasks without a label. It also leaves out tasks whose main metric is
        undefined (NaN). Every process has to call this; the first one computes the metrics, all return them.
        """
        result = self.meter.compute()
        metrics: dict[str, float] = {}
        for name, columns in self._rows().items():
            task = self.tasks[name]
            if f"{name}/loss" not in result:
                continue
            if task.kind == "span":
                assert task.scorer is not None
                order = ("row_id", "spans", "scores", "null_scores")
                values = task.scorer.score(*(columns[column] for column in order))
            else:
                rows = LabeledPredictions(**columns)
                values = {metric: value_of(task.kind, metric, rows) for metric in self.metrics_of[name]}
            metrics |= {f"{name}/{metric}": values[metric] for metric in self.metrics_of[name]}
        result |= gather(metrics)[0]
        mains = {name: [result[main] for main in names if main in result] for name, names in self.averages.items()}
        means = {name: mean_of_defined(numbers) for name, numbers in mains.items() if numbers}
        return {"loss": result["loss"], **means, **result}

    def gathered(self) -> dict[str, LabeledPredictions]:
        """Return the labelled rows of each task, by number, of all processes in the first one, and {} in the others.

        Tasks without a label, and those of kind span, are left out. Every process has to call this.
        """
        rows = {name: columns for name, columns in self._rows().items() if self.tasks[name].kind != "span"}
        return {name: LabeledPredictions(**columns) for name, columns in rows.items() if len(columns["label"])}

    def _rows(self) -> dict[str, Columns]:
        """Return the labelled rows of ``gathered``, and what a scorer needs of all rows of the tasks of kind span.

        The processes exchange rows once. Tasks without rows are left out.
        """
        if self._gathered is None:
            rows = gather_rows({(task, name): column for task, name, column in self._labelled_columns()})
            self._gathered, by_task = {}, group_by(rows, lambda key: key[0])
            for name, task in ((name, task) for name, task in self.tasks.items() if name in by_task):
                order = rows[name, "row_id"].argsort(stable=True)
                ordered = {column: rows.pop((name, column))[order] for _, column in by_task[name]}
                self._gathered[name] = ordered if task.kind == "span" else _as_compared(task, ordered)
        return self._gathered

    def _labelled_columns(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield task, name and values of the columns of this process's labelled rows; of a span task, of all rows."""
        parts: dict[str, list[Columns]] = {name: [] for name in self.tasks}
        for names, block in self._blocks:
            columns = {name: [part] * len(names) if name in OF_ROWS else part.unbind(1) for name, part in block.items()}
            for index, task in enumerate(names):
                parts[task].append({name: column[index] for name, column in columns.items()})
        for task, batches in parts.items():
            whole = {name: torch.cat([batch[name] for batch in batches]) for batch in batches[:1] for name in batch}
            has_all = not whole or self.tasks[task].kind == "span"
            mask = slice(None) if has_all else has_label(self.tasks[task], whole["label"])
            yield from ((task, name, column[mask]) for name, column in whole.items())

    def undefined(self, result: Mapping[str, float]) -> set[str]:
        """Return the names of the values that are undefined: ``result``, of ``compute``, lacks them or has NaN.

        If a loss is NaN or infinite, the cause is a prediction, not missing labels: no NaN then counts as undefined.
        """
        broken = any(not math.isfinite(result.get(f"{name}/loss", 0.0)) for name in self.tasks)
        return {name for name in self.names() if name not in result or (math.isnan(result[name]) and not broken)}

    def main_metrics(self) -> dict[str, str]:
        """Return the name of the first metric of each task."""
        return {name: metrics[0] for name, metrics in self.metrics_of.items()}

    def names(self) -> list[str]:
        """Return the names of all values that ``compute`` may return: the whole network's first, then task by task."""
        by_task = (f"{task}/{name}" for task in self.tasks for name in ("loss", *self.metrics_of[task]))
        return ["loss", *self.averages, *by_task]

    def reset(self) -> None:
        self.meter.reset()
        self._blocks, self._num_rows = [], 0
        self._gathered = None


@torch.no_grad()
def predict_batches(
    network: Callable[..., NetworkOutput],
    batches: Iterable[Batch],
    device: torch.device,
    tasks: Sequence[str] | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[tuple[Batch, NetworkOutput]]:
    """Yield each batch, moved to ``device``, with what ``network`` returns for it.

    ``tasks``: those to predict, by default those of each batch. ``context``: entered for each call of the network, such
    as one of autocast.
    """
    for batch in batches:
        batch = batch.to(device)
        with context():
            output = network(batch.inputs, list(batch.targets) if tasks is None else tasks)
        yield batch, output


def as_compared(task: TaskSpec, prediction: Tensor) -> Tensor:
    """Return predictions ``[N]`` as metrics compare them: see ``LabeledPredictions``."""
    if task.kind == "multiclass":
        return prediction
    prediction = at_least_float32(prediction)
    if task.kind == "binary":
        return sigmoid_keeping_ties(prediction)  # in float32, all sigmoids of logits above 17 are 1
    return task.point_prediction(task.unstandardize(prediction))


def best_spans(logits: Tensor, context: Tensor, max_answer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best span of each row, ``[B, 2]``, its score ``[B]``, and the score ``[B]`` of having no answer.

    ``logits [B, S, 2]`` are the logits s of the first and e of the last token. The best span (i, j) has the largest
    s_i + e_j among the spans of at most ``max_answer`` tokens from ``context[b, 0]`` to ``context[b, 1]``; its score is
    -inf if there is no such span. The score of having no answer is s_0 + e_0 (BERT, Devlin et al. 2019).
    """
    place = torch.arange(logits.shape[1], device=logits.device)
    first, last = context.to(logits.device).unbind(1)
    outside = (place < first[:, None]) | (place > last[:, None])  # [B, S]
    start, end = logits.masked_fill(outside[..., None], -torch.inf).unbind(-1)
    longest = min(max_answer, logits.shape[1])
    ends = F.pad(end, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # [B, S, longest]: e_i, e_(i+1), ...
    score, best = (start[..., None] + ends).flatten(1).max(1)
    spans = torch.stack([best // longest, best // longest + best % longest], 1)
    return spans, score, logits[:, 0].sum(-1)


def _as_compared(task: TaskSpec, columns: Columns) -> Columns:
    """Return the columns of ``LabeledPredictions``: labelled rows with predictions as metrics compare them."""
    prediction, label = as_compared(task, columns["prediction"]), columns["label"]
    if task.kind != "regression":
        return columns | {"prediction": prediction, "label": label.long()}
    label = label.double()
    rows = columns | {"prediction": prediction, "label": label}
    if task.quantiles:
        quantiles = task.unstandardize(at_least_float32(columns["prediction"]))
        several = quantiles.reshape(-1, task.outputs)  # [N, Q], ascending
        above = (several[:, 0] <= label) | (task.outputs == 1)
        levels = label.new_tensor(task.quantiles)
        rows |= {"pinball": pinball(levels, several, label), "covered": above & (label <= several[:, -1])}
    return rows
