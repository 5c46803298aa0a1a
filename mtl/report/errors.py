"""Draw where the predictions of a network are wrong: of probabilities, of classes and of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from mtl.files.formatting import number
from mtl.files.literals import escape_mathtext
from mtl.files.tables import Table
from mtl.predictions import class_names
from mtl.report.page import Picture, picture
from mtl.training.metrics import Rows, value_of
from mtl.types import TaskSpec, labelled

_SIZE = (4.2, 3.5)  # inches: about 400 pixels
_GROUPS = 10  # points of a reliability diagram
_MOST_CLASSES = 20  # rows of a confusion matrix
_MOST_POINTS = 2000  # of a picture
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_LONGEST = 14  # characters of a class at an axis


@dataclass(frozen=True)
class Predicted:
    """The N rows that have a label of ``task``; ``row [N]`` are their numbers, from 0, among all rows.

    ``prediction [N]``: the probability of the positive class, the number of the most probable class, or a value in the
    units of the labels. ``error [N]``: one minus the probability of the right class, or the distance from the label.
    """

    task: TaskSpec
    row: Tensor
    label: Tensor
    prediction: Tensor
    error: Tensor

    @staticmethod
    def of(task: TaskSpec, values: Tensor, target: Tensor, first: int) -> Predicted:
        """Return the labelled rows of a batch; ``values``: as of ``mtl.predictions.readable``, ``first``: its row."""
        known = labelled(task, target)
        row, values, label = known.nonzero()[:, 0] + first, values[known].double(), target[known]
        if task.kind == "multiclass":
            return Predicted(task, row, label, values.argmax(-1), 1 - values.gather(1, label[:, None])[:, 0])
        values = task.single(values) if task.kind == "regression" else values
        return Predicted(task, row, label, values, (values - label.double()).abs())

    @staticmethod
    def joined(parts: Sequence[Predicted]) -> Predicted:
        names = ("row", "label", "prediction", "error")
        return Predicted(parts[0].task, *(torch.cat([getattr(part, name) for part in parts]) for name in names))


def pictures_of_errors(found: Sequence[Predicted]) -> list[Picture]:
    """Return the pictures of all tasks: those of binary tasks share theirs."""
    binary = [each for each in found if each.task.kind == "binary"]
    drawn = [_of_binary(binary, *each) for each in _BINARY if binary]
    drawn += [_confusion(each) for each in found if each.task.kind == "multiclass"]
    return [*filter(None, drawn), *(_scatter(each) for each in found if each.task.kind == "regression")]


def residuals(found: Sequence[Predicted]) -> list[Table]:
    """Return the quantiles of prediction minus label of the regressions, if there are any."""
    known = [each for each in found if each.task.kind == "regression"]
    rows = [[each.task.name, *map(number, _quantiles(each))] for each in known]
    header = ["task", *(f"{level:.0%}" for level in _QUANTILES)]
    return [Table(header, rows, "Prediction minus label: quantiles")] if rows else []


def _quantiles(found: Predicted) -> list[float]:
    return [float(q) for q in np.quantile((found.prediction - found.label).numpy(), _QUANTILES)]


def _reliability(axes: Axes, found: Predicted, style: dict[str, Any]) -> None:
    order = found.prediction.argsort()
    groups = [part for part in order.tensor_split(_GROUPS) if len(part)]
    points = [(float(found.prediction[part].mean()), float(found.label[part].mean())) for part in groups]
    axes.plot(*zip(*points, strict=True), **style, marker="o", markersize=4)


def _roc(axes: Axes, found: Predicted, style: dict[str, Any]) -> None:
    false, true, _ = binary_roc(found.prediction, found.label.long())
    axes.plot(_thin(false), _thin(true), **style)


def _precision(axes: Axes, found: Predicted, style: dict[str, Any]) -> None:
    precision, recall, _ = binary_precision_recall_curve(found.prediction, found.label.long())
    axes.plot(_thin(recall), _thin(precision), **style)


_BINARY: tuple[tuple[Callable[..., None], str, str, str, str], ...] = (  # metric of the legend, labels of the axes
    (_reliability, "ece", "mean predicted probability", "share of positive rows", "Reliability"),
    (_roc, "auroc", "false positive rate", "true positive rate", "ROC curve"),
    (_precision, "auprc", "recall", "precision", "Precision and recall"),
)


def _of_binary(
    found: Sequence[Predicted], draw: Callable[..., None], metric: str, across: str, up: str, title: str
) -> Picture | None:
    """Draw one curve for each task whose test rows have both classes; None if there is no such task."""
    figure, axes = _axes(across, up, title)
    values = [value_of("binary", metric, Rows(each.prediction, each.label.long())) for each in found]
    both = [0 < float(each.label.mean()) < 1 for each in found]
    for index, (each, value, drawn) in enumerate(zip(found, values, both, strict=True)):
        if drawn or draw is _reliability:
            name = escape_mathtext(each.task.name)
            draw(axes, each, look(index) | {"linewidth": 1.6, "label": f"{value:.3f}  {name}"})
    if not axes.lines:
        return None
    caption = f"{title}; the legend has {metric}"
    if draw is not _precision:
        axes.axline((0, 0), slope=1, color="0.5", linewidth=0.8, linestyle=":", zorder=0)
    if draw is _reliability:
        caption += f". {_GROUPS} groups of equally many rows, by prediction: on the diagonal, probabilities are right"
        ends = [*axes.get_xlim(), *axes.get_ylim()]
        axes.set(xlim=(min(ends), max(ends)), ylim=(min(ends), max(ends)))
    else:
        left_out = [each.task.name for each, drawn in zip(found, both, strict=True) if not drawn]
        caption += f". Undefined, since the test rows have one class: {', '.join(left_out)}" if left_out else ""
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axes.legend(fontsize=8, title=metric, title_fontsize=8, alignment="left")
    return picture(figure, caption)


def _confusion(found: Predicted) -> Picture:
    """Draw the counts of each pair of label and prediction; colours are shares of the rows of a label."""
    classes = class_names(found.task)
    place, names = torch.arange(len(classes)), classes
    if len(classes) > _MOST_CLASSES:
        often = found.label.bincount(minlength=len(classes)).argsort(descending=True, stable=True)
        kept = often[: _MOST_CLASSES - 1].sort().values
        place = torch.full((len(classes),), len(kept))
        place[kept] = torch.arange(len(kept))
        names = [*(classes[index] for index in kept.tolist()), f"{len(classes) - len(kept)} others"]
    counts = multiclass_confusion_matrix(place[found.prediction], place[found.label], len(names)).numpy()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    figure, axes = _axes("predicted", "label", found.task.name, 1.6 + 0.38 * len(names))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.grid(False)
    for row, column in np.ndindex(*counts.shape):
        ink = "black" if shares[row, column] < 0.6 else "white"
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=7, color=ink)
    short = [escape_mathtext(name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…") for name in names]
    axes.set_xticks(range(len(names)), short, rotation=90 if max(map(len, short)) > 2 else 0, fontsize=8)
    axes.set_yticks(range(len(names)), short, fontsize=8)
    figure.colorbar(image, ax=axes, label="share of the rows of a label")
    return picture(figure, f"{found.task.name}: test rows by label and predicted class")


def _scatter(found: Predicted) -> Picture:
    task, label, prediction = found.task, _thin(found.label), _thin(found.prediction)
    figure, axes = _axes("label", "prediction", task.name)
    axes.scatter(label, prediction, s=9, alpha=0.3, color=look(0)["color"], linewidths=0)
    if task.is_log and min(label.min(), prediction.min()) > 0:
        axes.set(xscale="log", yscale="log")
    ends = min(label.min(), prediction.min()), max(label.max(), prediction.max())
    axes.plot(ends, ends, color="0.5", linewidth=0.8, linestyle=":", zorder=3)
    some = f", {len(label):,} of {len(found.label):,} test rows" if len(label) < len(found.label) else ""
    return picture(figure, f"{task.name}: prediction over label{some}; on the dotted line they are equal")


def _axes(across: str, up: str, title: str, size: float = 0.0) -> tuple[Figure, Axes]:
    """Return a figure and its panel with names of its axes; ``size``: its width and height in inches if larger."""
    figure = Figure(figsize=(max(_SIZE[0], size), max(_SIZE[1], size)), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=across, ylabel=up)
    axes.set_title(escape_mathtext(title), fontsize=10)
    axes.grid(alpha=0.25)
    return figure, axes


def _thin(values: Tensor) -> Any:
    """Return at most ``_MOST_POINTS`` of the values, at equal distances, with the first and the last one."""
    if len(values) <= _MOST_POINTS:
        return values.double().numpy()
    return values[torch.linspace(0, len(values) - 1, _MOST_POINTS).long()].double().numpy()
