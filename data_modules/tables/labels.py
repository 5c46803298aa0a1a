"""Turn columns of a table into the labels of tasks."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import polars as pl
import torch
from torch import Tensor

from mtl.chains import check_chains
from mtl.checks import InputError, format_value, join_names, require
from mtl.objectives import Objective
from mtl.options import Names, TaskName, valid
from mtl.types import MISSING_CLASS, TaskSpec, check_metrics
from mtl.types.metrics import OF_FEW_POSITIVES

from ..files.reading import quote
from .cells import Cells, as_text, parse_numbers, texts_of
from .inference import find_format, quote_format
from .label_options import LOSS_OF_OPTION, Cell, LabelOptions
from .options import TableOptions, TaskOptions
from .statistics import Counts, Moments
from .vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_LABEL = 1e18  # the largest label of a regression; the squares of much larger ones overflow in float32
MAX_CLASSES_LISTED = 10  # classes in a message
UNKNOWN_CLASS = -1  # of a label that the training rows do not have
NO_LABEL = "no training row has a label for task"
RARE_CLASS_FRACTION = 0.05  # a class with a smaller fraction of the labels is rare
FEW_POSITIVES = 0.2  # share of positives below which accuracy says little of a binary task
METRICS_OF_RARE_CLASSES = ("accuracy", "macro_f1", "logloss")  # the default metrics of a multiclass task with one
METRICS_OF_NUMBERS = ("mse", "mae", "r2")  # the default metrics of a regression
KIND_OF_OPTION = dict.fromkeys(("positive", "pos_weight", "sampling_rate"), "binary")
KIND_OF_OPTION |= {"class_weights": "multiclass", "standardize": "regression"}


class TargetOptions(LabelOptions):
    """The labels of task ``name``.

    ``normalize_loss``: the loss of a task with classes is divided by that of predicting their shares in the training
    rows, so that it is about 1 at first, as that of a regression in standard units is. ``format``: how the numbers of a
    regression are written, see ``formats.py``.
    """

    name: str
    column: str
    metrics: Names
    normalize_loss: bool = False
    format: str = ""

    @staticmethod
    def from_tasks(tasks: Any) -> list[TargetOptions]:
        """Return the options of each entry of ``data.tasks``, which may be only a kind. Raises InputError."""
        options_by_name = valid(dict[TaskName, TaskOptions], tasks, "data.tasks")
        targets = [TargetOptions.of(name, options) for name, options in options_by_name.items()]
        check_chains(targets, "data.tasks.")
        binary = [target.name for target in targets if target.kind == "binary"]
        for target in (target for target in targets if target.where is not None):
            location = f"data.tasks.{target.name}: where={target.where}"
            others = [name for name in binary if name != target.name]
            hint = f"name another binary task; there are {join_names(others) or 'none'}"
            require(target.where in others, f"{location}: {hint}")
            require(target.after is None, f"{location}: a task has where or after, not both")
        targets_by_name = {target.name: target for target in targets}
        for target in targets:
            find_conditions(target, targets_by_name)
        return targets

    @staticmethod
    def of(name: str, options: LabelOptions) -> TargetOptions:
        """Return the options of task ``name``; raise InputError if they do not fit together."""
        location = f"data.tasks.{name}"
        for option, kind in KIND_OF_OPTION.items():
            value = getattr(options, option)
            fits = value is None or options.kind == kind
            require(fits, f"{location}: {option}={format_value(value)} is for kind={kind}, not {options.kind}")
        for option, loss in LOSS_OF_OPTION.items():
            value = getattr(options, option)
            fits = value is None or options.loss == loss
            require(fits, f"{location}: {option}={format_value(value)} is for loss={loss}")
        first = f"{location}: sampling_rate is for the first task of a chain, not for one after {options.after}"
        require(options.sampling_rate is None or options.after is None, first)
        objective, metrics = Objective(**options.objective), options.metrics or []
        objective.check(location, options.kind)
        check_metrics(location, options.kind, metrics, objective.quantiles)
        weights = options.class_weights
        has_weight = weights is None or isinstance(weights, str) or any(weights.values())
        message = f"{location}.class_weights={format_value(weights)}: at least one weight must be greater than 0"
        require(has_weight, message)
        column = name if options.column is None else str(options.column)
        return TargetOptions(**{**dict(options), "name": name, "column": column, "metrics": metrics})

    def learn(self, train: pl.DataFrame, where: str) -> TaskSpec:
        """Return the TaskSpec, with the names of the classes, of the training rows. Raises InputError."""
        labels = self.new_statistics()
        self.update(labels, train, where)
        return self.finish(labels, where)

    def new_statistics(self) -> Counts | Moments:
        """Return empty statistics of the labels, to which ``update`` adds training rows, all at once or in blocks."""
        return Moments() if self.kind == "regression" else Counts()

    def update(self, labels: Counts | Moments, frame: pl.DataFrame, where: str) -> None:
        """Add the labels of some training rows. Raises InputError, which names the first invalid cell."""
        self._check_type(frame, where)
        if isinstance(labels, Counts):
            labels.add(frame[self.column])
        else:
            values = self.numbers(frame, where)
            labels.add(values.log() if self.transform else values)

    def finish(
        self, labels: Counts | Moments, where: str, earlier: TaskSpec | None = None, level: int = logging.INFO
    ) -> TaskSpec:
        """Return the TaskSpec that follows from the statistics of the labels of all training rows. Raises InputError.

        The classes and the scale are those of ``earlier``, the task of the run that this one starts from. ``level``:
        of the message that describes them.
        """
        if isinstance(labels, Counts):
            return self._spec_of_classes(labels, where, earlier, level)
        require(labels.count > 0, f"{where}, column {self.column!r}: {NO_LABEL} {self.name!r}")
        mean, std = (labels.mean, labels.std or 1.0) if self.standardize is not False else (0.0, 1.0)
        described = "task %s (regression): mean %.4g, standard deviation %.4g"
        logger.log(level, described, self.name, labels.mean, labels.std)
        if earlier is not None:
            mean, std = earlier.mean, earlier.std
        elif self.loss == "poisson":
            require(labels.mean > 0, f"{where}, column {self.column!r}: all labels of task {self.name!r} are 0")
            mean, std = math.log(mean or 1.0), 1.0
        scale = {"mean": mean, "std": std, **self.objective}
        metrics = tuple(self.metrics) or (() if self.loss == "quantile" else METRICS_OF_NUMBERS)
        scale["not_negative"] = not self.transform and labels.smallest >= 0 and (not earlier or earlier.not_negative)
        return TaskSpec(self.name, "regression", weight=self.weight, metrics=metrics, **scale)

    def _spec_of_classes(self, labels: Counts, where: str, earlier: TaskSpec | None, level: int) -> TaskSpec:
        location, count_of = f"{where}, column {self.column!r}", count_classes(labels)
        require(bool(count_of), f"{location}: {NO_LABEL} {self.name!r}")
        classes = list(earlier.classes) if earlier is not None else self._classes(count_of, location)
        counts = [count_of.get(name, 0.5) for name in classes]  # an earlier class without rows has half a label
        metrics, total = tuple(self.metrics), sum(counts)
        is_binary, is_rare = self.kind == "binary", min(counts) < RARE_CLASS_FRACTION * total
        if not metrics and (is_rare or (is_binary and counts[1] < FEW_POSITIVES * total)):
            metrics = OF_FEW_POSITIVES if is_binary else METRICS_OF_RARE_CLASSES
        self._log_classes(classes, counts, metrics, level)
        if self.kind == "multiclass":
            weights: dict[str, Any] = {"class_weights": self._weights_of(classes, counts, location)}
        else:
            balanced = counts[0] / counts[1]
            weights = {"pos_weight": balanced if self.pos_weight == "balanced" else self.pos_weight or 1.0}
            weights["sampling_rate"] = self.sampling_rate or 1.0
        num_classes = len(classes) if self.kind == "multiclass" else 1
        options = {"classes": tuple(classes), "after": self.after, **weights, **self.objective}
        weight = self.weight
        if self.normalize_loss and self.loss is None:
            weight /= -sum(count / total * math.log(count / total) for count in counts)
        return TaskSpec(self.name, self.kind, num_classes, weight, metrics, **options)

    def _log_classes(self, classes: list[str], counts: list[float], metrics: tuple[str, ...], level: int) -> None:
        """Log the fraction of each class of the training rows, and which class is predicted."""
        total = sum(counts)
        parts = [f"{format_value(name)} {count / total:.1%}" for name, count in zip(classes, counts, strict=True)]
        more = ", ..." if len(classes) > MAX_CLASSES_LISTED else ""
        positive = f"; positive: {format_value(classes[1])}" if self.kind == "binary" else ""
        rare = "; rare: more metrics" if metrics != tuple(self.metrics) else ""
        listed = ", ".join(parts[:MAX_CLASSES_LISTED])
        logger.log(level, "task %s (%s): %s%s%s%s", self.name, self.kind, listed, more, positive, rare)

    def targets(self, spec: TaskSpec, frame: pl.DataFrame, where: str) -> Tensor:
        """Return the labels ``[N]`` of the rows of ``frame`` for the task ``spec``.

        They are float32 (binary) or float64 (regression) with NaN for a missing label, or int64 (multiclass) with -100
        for a missing label. Raises InputError, which names the first invalid cell.
        """
        self._check_type(frame, where)
        if self.kind == "regression":
            return torch.from_numpy(self.numbers(frame, where).to_numpy(writable=True))
        ids = self._ids(frame, list(spec.classes), where)
        return ids if self.kind == "multiclass" else torch.where(ids == MISSING_CLASS, torch.nan, ids.float())

    def _check_type(self, frame: pl.DataFrame, where: str) -> None:
        Cells(frame, self.column, where).check_type(f", as it holds the labels of task {self.name!r}")

    def _weights_of(self, classes: list[str], counts: list[float], location: str) -> tuple[float, ...]:
        """Return the weights of the ``classes``, which have ``counts`` training rows; () if all weights are 1."""
        if self.class_weights is None:
            return ()
        if isinstance(self.class_weights, str):
            return tuple(sum(counts) / (len(classes) * count) for count in counts)
        weights = {_to_cell_text(name): weight for name, weight in self.class_weights.items()}
        unknown = ", ".join(format_value(name) for name in weights if name not in classes)
        labels = f"the labels of {location} are {join_names(classes)}"
        require(not unknown, f"data.tasks.{self.name}.class_weights: {unknown}: {labels}")
        return tuple(weights.get(name, 1.0) for name in classes)

    def numbers(self, frame: pl.DataFrame, where: str) -> pl.Series:
        """Return the labels of a regression; raise InputError, with file and row, if one is too large or negative."""
        cells = Cells(frame, self.column, where)
        try:
            values = cells.numbers(self.format)
        except InputError as error:
            likely = find_format(cells, TableOptions(), "number")
            setting = f"'data.columns={{{self.column}: {{format: {quote_format(likely)}}}}}'"
            hint = f", or set {setting}" if likely and not self.format else ""
            labels = cells.column.drop_nulls()
            if not likely and parse_numbers(labels).count() < len(labels) / 2:
                kind = "binary" if labels.n_unique() == 2 else "multiclass"
                text = f"holds text, such as {quote(str(labels[0]))}; use kind={kind}"
                raise InputError(f"data.tasks.{self.name}.kind=regression: column {self.column!r} {text}") from None
            raise InputError(f"{error}{hint}") from None
        if self.transform or self.loss == "poisson":
            rule = "transform=log takes positive labels" if self.transform else "loss=poisson takes no negative labels"
            cells.refuse(values <= 0 if self.transform else values < 0, f": {rule} of task {self.name!r}; empty it")
        cells.refuse(
            values.fill_nan(0.0).abs() > MAX_LABEL,
            f" is too large for a label of task {self.name!r}: beyond {MAX_LABEL:g} the squared error overflows; "
            "correct it, empty it, or divide the column",
        )
        return values

    def _classes(self, counts: Mapping[str, int], location: str) -> list[str]:
        """Return the sorted classes of the training rows; for binary tasks, the positive one last."""
        values = list(counts)
        as_number = parse_numbers(pl.Series(values))
        order = as_number.to_list() if as_number.null_count() == 0 else values
        classes = [value for _, value in sorted(zip(order, values, strict=True))]
        same = f"all {sum(counts.values())} labels of the training rows are {quote(classes[0])}"
        require(len(classes) > 1, f"{location}: {same}; task {self.name!r} needs at least two classes")
        if self.kind == "multiclass":
            return classes
        many = f"its training rows have {len(classes)} different labels, {join_names(classes)}; use kind=multiclass"
        require(len(classes) == 2, f"{location}: task {self.name!r} is binary but {many}")
        positive = None if self.positive is None else _to_cell_text(self.positive)
        option = f"data.tasks.{self.name}: positive={format_value(self.positive)}"
        require(positive in (None, *classes), f"{option}; the labels of {location} are {join_names(classes)}")
        return classes[::-1] if positive == classes[0] else classes

    def _ids(self, frame: pl.DataFrame, classes: list[str], where: str) -> Tensor:
        cells = Cells(frame, self.column, where)
        distinct = cells.column.unique()
        distinct_ids = ids_of((*distinct,), distinct.dtype, (*classes,))
        ids = cells.column.replace_strict(distinct, distinct_ids, return_dtype=pl.Int64)
        new = ids == UNKNOWN_CLASS
        if new.any():
            cells.refuse(
                new,
                f" is a label of task {self.name!r} that does not occur in the training rows ({join_names(classes)}); "
                f"{new.sum()} rows have such labels. Split the rows in another way, or empty these cells",
            )
        return torch.from_numpy(ids.to_numpy(writable=True).astype("int64"))  # without rows, polars knows no type


@lru_cache(maxsize=256)
def ids_of(values: tuple[Any, ...], dtype: pl.DataType, classes: tuple[str, ...]) -> list[int]:
    """Return the class of each of some cells, ``MISSING_CLASS`` if it is empty, or ``UNKNOWN_CLASS``."""
    ids = (Vocabulary([*classes]).encode(pl.Series(values, dtype=dtype)) - 1).tolist()
    texts = texts_of(values, dtype)
    return [MISSING_CLASS if text is None else index for text, index in zip(texts, ids, strict=True)]


def count_classes(labels: Counts) -> dict[str, int]:
    """Return how often each label occurs, as text: 1 and 1.0 are one class."""
    table, counts = labels.table(), Counter[str]()
    for text, count in zip(texts_of((*table["value"],), table["value"].dtype), table["count"], strict=True):
        counts.update({} if text is None else {text: count})
    return counts


def mask_by_conditions(tasks: Sequence[TargetOptions], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``targets`` by task, ``[N]`` each, without the labels that do not count, see ``LabelOptions.where``."""
    masked, tasks_by_name = dict(targets), {task.name: task for task in tasks}
    for task in tasks:
        missing = MISSING_CLASS if task.kind == "multiclass" else math.nan
        for name in find_conditions(task, tasks_by_name):
            masked[task.name] = masked[task.name].masked_fill(targets[name] != 1, missing)
    return masked


def find_conditions(task: TargetOptions, tasks_by_name: Mapping[str, TargetOptions]) -> list[str]:
    """Return the tasks that must be positive for a label of ``task`` to count. Raises InputError for a circle."""
    names = [task.name]
    while (condition := tasks_by_name[names[-1]].where) is not None:
        names.append(condition)
        require(names.count(condition) == 1, f"data.tasks.{task.name}.where: {' where '.join(names)} is a circle")
    return names[1:]


def _to_cell_text(value: Cell) -> str:
    """Return a label as text, as ``as_text`` returns the cells of a table."""
    return as_text(pl.Series([value]))[0] or ""
