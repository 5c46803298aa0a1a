"""Draw where the predictions of a network are wrong: of probabilities, of classes and of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_precision_recall_curve,
    binary_roc,
    multiclass_confusion_matrix,
)

from mtl.analysis.figures import look
from mtl.files.escaping import escape_mathtext
from mtl.files.formatting import number
from mtl.files.tables import Table
from mtl.predictions import class_names
from mtl.report.page import Picture, picture
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.metrics import value_of
from mtl.types import KINDS, TaskSpec

_SIZE = (4.2, 3.5)  # inches: about 400 pixels
_GROUPS = 10  # points of a reliability diagram
_MAX_CLASSES = 20  # rows of a confusion matrix
_MAX_POINTS = 2000  # of a picture
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MAX_CLASS_CHARS = 14  # characters of a class at an axis
Predictions = tuple[TaskSpec, LabeledPredictions]


def pictures_of_errors(predictions: Sequence[Predictions]) -> list[Picture]:
    """Return the pictures of all tasks, with their labelled rows: those of binary tasks share theirs."""
    kinds = {kind: [pair for pair in predictions if pair[0].kind == kind] for kind in KINDS}
    drawn = [_of_binary(kinds["binary"], *curve) for curve in _BINARY if kinds["binary"]]
    drawn += [_confusion(*pair) for pair in kinds["multiclass"]]
    return [*filter(None, drawn), *(_scatter(*pair) for pair in kinds["regression"])]


def residuals(predictions: Sequence[Predictions]) -> list[Table]:
    """Return the quantiles of prediction minus label of the regressions, if there are any."""
    errors = {task.name: rows.prediction - rows.label for task, rows in predictions if task.kind == "regression"}
    rows = [[name, *map(number, np.quantile(error.numpy(), _QUANTILES))] for name, error in errors.items()]
    header = ["task", *(f"{level:.0%}" for level in _QUANTILES)]
    return [Table(header, rows, "Prediction minus label: quantiles")] if rows else []


def recalls(predictions: Sequence[Predictions]) -> list[Table]:
    """Return for each multiclass task how many rows of its most frequent classes are predicted right."""
    tables = []
    for task, rows in (pair for pair in predictions if pair[0].kind == "multiclass"):
        names, right = class_names(task), rows.label[rows.label == rows.prediction]
        columns = [c.bincount(minlength=len(names)).tolist() for c in (rows.label, rows.prediction, right)]
        counts = sorted(zip(names, *columns, strict=True), key=lambda row: -row[1])[:_MAX_CLASSES]
        table = [[name, f"{n:,}", f"{times:,}", number(hits / n if n else None)] for name, n, times, hits in counts]
        tables.append(Table(["class", "labels", "predicted", "recall"], table, f"{task.name}: recall by class"))
    return tables


def _reliability(axes: Axes, rows: LabeledPredictions, style: dict[str, Any]) -> None:
    order = rows.prediction.argsort()
    groups = [rows.at(part) for part in order.tensor_split(_GROUPS) if len(part)]
    points = [(float(group.prediction.mean()), float(group.label.double().mean())) for group in groups]
    axes.plot(*zip(*points, strict=True), **style, marker="o", markersize=4)


def _roc(axes: Axes, rows: LabeledPredictions, style: dict[str, Any]) -> None:
    false, true, _ = binary_roc(rows.prediction, rows.label)
    axes.plot(_thin(false), _thin(true), **style)


def _precision(axes: Axes, rows: LabeledPredictions, style: dict[str, Any]) -> None:
    precision, recall, _ = binary_precision_recall_curve(rows.prediction, rows.label)
    axes.plot(_thin(recall), _thin(precision), **style)


_BINARY: tuple[tuple[Callable[..., None], str, str, str, str], ...] = (  # metric of the legend, labels of the axes
    (_reliability, "ece", "mean predicted probability", "share of positive rows", "Reliability"),
    (_roc, "auroc", "false positive rate", "true positive rate", "ROC curve"),
    (_precision, "auprc", "recall", "precision", "Precision and recall"),
)


def _of_binary(
    predictions: Sequence[Predictions], draw: Callable[..., None], metric: str, across: str, up: str, title: str
) -> Picture | None:
    """Draw one curve for each task whose test rows have both classes; None if there is no such task."""
    figure, axes = _axes(across, up, title)
    _draw_curves(axes, predictions, draw, metric)
    if not axes.lines:
        return None
    if draw is _reliability:
        caption = f"{_GROUPS} groups of equally many rows, by prediction: on the diagonal, probabilities are right"
    else:
        left_out = [task.name for task, rows in predictions if not _has_both_classes(rows)]
        caption = f"Undefined, since the test rows have one class: {', '.join(left_out)}" if left_out else ""
    return picture(figure, caption, title)


def draw_reliability(axes: Axes, predictions: Sequence[Predictions]) -> None:
    """Draw the share of positive rows over the predicted probability, of each binary task."""
    draw, metric, across, up, title = _BINARY[0]
    _label(axes, across, up, title)
    _draw_curves(axes, predictions, draw, metric)


def _draw_curves(axes: Axes, predictions: Sequence[Predictions], draw: Callable[..., None], metric: str) -> None:
    for index, (task, rows) in enumerate(predictions):
        if draw is _reliability or _has_both_classes(rows):
            name = f"{value_of('binary', metric, rows):.3f}  {escape_mathtext(task.name)}"
            draw(axes, rows, look(index) | {"linewidth": 1.6, "label": name})
    if not axes.lines:
        return
    if draw is not _precision:
        axes.axline((0, 0), slope=1, color="0.5", linewidth=0.8, linestyle=":", zorder=0)
    if draw is _reliability:
        ends = [*axes.get_xlim(), *axes.get_ylim()]
        axes.set(xlim=(min(ends), max(ends)), ylim=(min(ends), max(ends)))
    else:
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axes.legend(fontsize=8, title=metric, title_fontsize=8, alignment="left")


def _has_both_classes(rows: LabeledPredictions) -> bool:
    return 0 < int(rows.label.sum()) < len(rows)


def _confusion(task: TaskSpec, rows: LabeledPredictions) -> Picture:
    """Draw the counts of each pair of label and prediction; colours are shares of the rows of a label."""
    classes = class_names(task)
    place, names = torch.arange(len(classes)), classes
    if len(classes) > _MAX_CLASSES:
        often = rows.label.bincount(minlength=len(classes)).argsort(descending=True, stable=True)
        kept = often[: _MAX_CLASSES - 1].sort().values
        place = torch.full((len(classes),), len(kept))
        place[kept] = torch.arange(len(kept))
        names = [*(classes[index] for index in kept.tolist()), f"{len(classes) - len(kept)} others"]
    counts = multiclass_confusion_matrix(place[rows.prediction], place[rows.label], len(names)).numpy()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    figure, axes = _axes("predicted", "label", task.name, 1.6 + 0.38 * len(names))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.grid(False)
    for row, column in np.ndindex(*counts.shape):
        ink = "black" if shares[row, column] < 0.6 else "white"
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=7, color=ink)
    short = [name if len(name) <= _MAX_CLASS_CHARS else f"{name[: _MAX_CLASS_CHARS - 1]}…" for name in names]
    short = [escape_mathtext(name) for name in short]
    axes.set_xticks(range(len(names)), short, rotation=90 if max(map(len, short)) > 2 else 0, fontsize=8)
    axes.set_yticks(range(len(names)), short, fontsize=8)
    figure.colorbar(image, ax=axes, label="share of the rows of a label")
    return picture(figure, "Number of test rows", f"{task.name}: test rows by label and predicted class")


def _scatter(task: TaskSpec, rows: LabeledPredictions) -> Picture:
    label, prediction = _thin(rows.label), _thin(rows.prediction)
    figure, axes = _axes("label", "prediction", task.name)
    axes.scatter(label, prediction, s=9, alpha=0.3, color=look(0)["color"], linewidths=0)
    if task.is_log and min(label.min(), prediction.min()) > 0:
        axes.set(xscale="log", yscale="log")
    ends = min(label.min(), prediction.min()), max(label.max(), prediction.max())
    axes.plot(ends, ends, color="0.5", linewidth=0.8, linestyle=":", zorder=3)
    some = f"{len(label):,} of {len(rows):,} test rows; on" if len(label) < len(rows) else "On"
    return picture(figure, f"{some} the dotted line, both are equal", f"{task.name}: prediction over label")


def _axes(across: str, up: str, title: str, size: float = 0.0) -> tuple[Figure, Axes]:
    """Return a figure and its panel with names of its axes; ``size``: its width and height in inches if larger."""
    figure = Figure(figsize=(max(_SIZE[0], size), max(_SIZE[1], size)), layout="constrained")
    axes = figure.add_subplot()
    _label(axes, across, up, title)
    return figure, axes


def _label(axes: Axes, across: str, up: str, title: str) -> None:
    axes.set(xlabel=across, ylabel=up)
    axes.set_title(escape_mathtext(title), fontsize=10)
    axes.grid(alpha=0.25)


def _thin(values: Tensor) -> Any:
    """Return at most ``_MAX_POINTS`` of the values, at equal distances, with the first and the last one."""
    if len(values) <= _MAX_POINTS:
        return values.double().numpy()
    return values[torch.linspace(0, len(values) - 1, _MAX_POINTS).long()].double().numpy()
