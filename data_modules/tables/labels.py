"""Turn columns of a table into the labels of tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, require
from mtl.types import MISSING_CLASS, TaskKind, TaskSpec, check_metrics

from ..files.reading import quote
from ..options import check_task_name, flag, names, number, refused, shown
from .columns import as_text, cell, numbers, parse
from .kinds import check_type
from .statistics import Counts, Moments

logger = logging.getLogger(__name__)

HEAVIEST = 1e9  # the largest weight of a task or of its positive rows
LIGHTEST = 1e-9  # the smallest weight of positive rows
LARGEST = 1e18  # of a regression's labels: the squares of much larger ones overflow in float32
KINDS: tuple[TaskKind, ...] = ("binary", "multiclass", "regression")  # labels of these are values of one column
OPTIONS = ("column", "kind", "weight", "positive", "metrics", "standardise", "pos_weight", "class_weights")
BALANCED = "balanced"
ONLY = {"positive": "binary", "pos_weight": "binary", "class_weights": "multiclass", "standardise": "regression"}


@dataclass(frozen=True)
class Labels:
    """The labels of task ``name``: their ``column`` and how to read it.

    ``binary``: two distinct values; ``positive``, or else the last one in sorted order, becomes 1. ``multiclass``: the
    sorted distinct values of the training rows become classes 0, 1, ... ``regression``: numbers; ``standardise``: the
    network predicts them with mean 0 and standard deviation 1 over the labelled training rows, and metrics are in the
    units of the column. Values are sorted as numbers if all are numbers, else as text.

    ``metrics``: names of those to report, the main one first; none: those that fit the kind. ``pos_weight`` multiplies
    the loss of the positive rows of a binary task, "balanced": by negatives / positives among the labelled training
    rows. ``class_weights`` multiply that of the rows of each class that they name, "balanced": by N / (C * N_c) for a
    class with N_c of the N labelled training rows. Metrics are without these weights.
    """

    name: str
    column: str
    kind: TaskKind
    weight: float = 1.0
    positive: str | None = None
    metrics: tuple[str, ...] = ()
    standardise: bool = True
    pos_weight: float | str = 1.0
    class_weights: Mapping[str, float] | str | None = None

    @staticmethod
    def of(name: str, options: Any, example: str) -> Labels:
        """Return the Labels of one entry of ``data.tasks``; raise InputError if an option is wrong."""
        here = f"data.tasks.{check_task_name('data.tasks', name)}"
        require(isinstance(options, Mapping), f"{here}={shown(options)}: must give column and kind, {example}")
        unknown = [shown(key) for key in options if key not in OPTIONS]
        require(not unknown, f"{here}: unknown option: {', '.join(unknown)}; accepted are {', '.join(OPTIONS)}")
        kind = options.get("kind")
        known = isinstance(kind, str) and kind in KINDS
        require(known, f"{here}: kind={shown(kind)} must be one of {', '.join(KINDS)}, {example}")
        weight = number(f"tasks.{name}.weight", options.get("weight", 1.0), 0, HEAVIEST)
        for option, only in ONLY.items():
            given = options.get(option)
            require(given is None or kind == only, f"{here}: {option}={shown(given)} is for kind={only}, not {kind}")
        metrics = names(f"tasks.{name}.metrics", options.get("metrics") or [], "[accuracy,f1]")
        check_metrics(here, kind, metrics)
        standardise, pos_weight = options.get("standardise"), options.get("pos_weight")
        if isinstance(pos_weight, str) and pos_weight != BALANCED:
            raise refused(f"tasks.{name}.pos_weight", pos_weight, "a positive number, or balanced")
        if not (pos_weight is None or isinstance(pos_weight, str)):
            pos_weight = number(f"tasks.{name}.pos_weight", pos_weight, LIGHTEST, HEAVIEST)
        return Labels(
            name,
            _column(here, name, options, example),
            kind,
            weight,
            _positive(here, options.get("positive")),
            tuple(metrics),
            True if standardise is None else flag(f"tasks.{name}.standardise", standardise),
            1.0 if pos_weight is None else pos_weight,
            _class_weights(f"tasks.{name}.class_weights", options.get("class_weights")),
        )

    def learnt(self, train: pl.DataFrame, where: str) -> TaskSpec:
        """Return the TaskSpec that follows from the training rows, with the names of the classes. Raises InputError."""
        found = self.collector()
        self.collect(found, train, where)
        return self.conclude(found, where)

    def collector(self) -> Counts | Moments:
        """Return what ``collect`` fills: from training rows, all at once or in blocks."""
        return Moments() if self.kind == "regression" else Counts()

    def collect(self, found: Counts | Moments, frame: pl.DataFrame, where: str) -> None:
        """Add the labels of some training rows. Raises InputError, which names the first bad cell."""
        self._check_type(frame, where)
        found.add(frame[self.column] if isinstance(found, Counts) else self.numbers(frame, where))

    def conclude(self, found: Counts | Moments, where: str) -> TaskSpec:
        """Return the TaskSpec that follows from all labels of the training rows. Raises InputError."""
        if isinstance(found, Counts):
            return self._of_classes(found, where)
        self._require_labels(found.count, where)
        mean, std = self._scale(found.mean, found.std)
        return TaskSpec(self.name, "regression", weight=self.weight, metrics=self.metrics, mean=mean, std=std)

    def _of_classes(self, found: Counts, where: str) -> TaskSpec:
        here, table = f"{where}, column {self.column!r}", found.table()
        text = table.select(value=as_text(table["value"]), count="count").drop_nulls("value")
        numbers = dict(text.group_by("value").agg(pl.col("count").sum()).iter_rows())  # 1 and 1.0 are one class
        self._require_labels(len(numbers), where)
        classes = self._classes(numbers, here)
        listed = ", ".join(f"{index}={shown(value)}" for index, value in enumerate(classes[:10]))
        logger.info("task %s (%s): %s%s", self.name, self.kind, listed, ", ..." if len(classes) > 10 else "")
        each = [numbers[name] for name in classes]
        if self.kind == "multiclass":
            weights = {"class_weights": self._weights_of(classes, each, here)}
        else:
            weights = {"pos_weight": each[0] / each[1] if isinstance(self.pos_weight, str) else self.pos_weight}
        many = len(classes) if self.kind == "multiclass" else 1
        return TaskSpec(self.name, self.kind, many, self.weight, self.metrics, classes=tuple(classes), **weights)

    def _require_labels(self, count: int, where: str) -> None:
        here = f"{where}, column {self.column!r}"
        require(count > 0, f"{here}: no training row has a label for task {self.name!r}")

    def targets(self, spec: TaskSpec, frame: pl.DataFrame, where: str) -> Tensor:
        """Return the labels ``[N]`` of the rows of ``frame`` for the task ``spec`` that was learnt.

        They are float32 (binary), float64 (regression), with NaN for a missing one, or int64 (multiclass), with -100.
        Raises InputError, which names the first bad cell.
        """
        self._check_type(frame, where)
        if self.kind == "regression":
            return torch.from_numpy(self.numbers(frame, where).to_numpy(writable=True))
        ids = self._ids(frame, list(spec.classes), where)
        return ids if self.kind == "multiclass" else torch.where(ids == MISSING_CLASS, torch.nan, ids.float())

    def _check_type(self, frame: pl.DataFrame, where: str) -> None:
        check_type(frame[self.column], where, f", as it holds the labels of task {self.name!r}")

    def _weights_of(self, classes: list[str], counts: list[int], here: str) -> tuple[float, ...]:
        """Return the weight of each class, which has ``counts`` training rows; () if all are 1."""
        if self.class_weights is None:
            return ()
        if isinstance(self.class_weights, str):
            return tuple(sum(counts) / (len(classes) * count) for count in counts)
        unknown = [shown(name) for name in self.class_weights if name not in classes]
        require(
            not unknown,
            f"data.tasks.{self.name}.class_weights: {', '.join(unknown)}: the labels of {here} are "
            f"{', '.join(map(shown, classes[:10]))}{', ...' if len(classes) > 10 else ''}",
        )
        return tuple(self.class_weights.get(name, 1.0) for name in classes)

    def numbers(self, frame: pl.DataFrame, where: str) -> pl.Series:
        """Return the labels of a regression task; raise InputError, with file and row, if a label is too large."""
        values = numbers(frame, self.column, where)
        large = (values.fill_nan(0.0).abs() > LARGEST).arg_true()
        if len(large):
            raise InputError(
                f"{cell(frame, self.column, large[0], where)} is too large for a label of task {self.name!r}: beyond "
                f"{LARGEST:g} the squared error overflows; correct it, empty it, or divide the column"
            )
        return values

    def _classes(self, counts: Mapping[str, int], here: str) -> list[str]:
        """Return the sorted classes of the training rows; for binary tasks, the positive one last."""
        values = list(counts)
        as_number = parse(pl.Series(values))
        order = as_number.to_list() if as_number.null_count() == 0 else values
        classes = [value for _, value in sorted(zip(order, values, strict=True))]
        require(
            len(classes) > 1,
            f"{here}: all {sum(counts.values())} labels of the training rows are {quote(classes[0])}; "
            f"task {self.name!r} needs at least two classes",
        )
        if self.kind == "multiclass":
            return classes
        require(
            len(classes) == 2,
            f"{here}: task {self.name!r} is binary but its training rows have {len(classes)} different labels, "
            f"{', '.join(map(shown, classes[:5]))}{', ...' if len(classes) > 5 else ''}; use kind=multiclass",
        )
        require(
            self.positive in (None, *classes),
            f"data.tasks.{self.name}: positive={shown(self.positive)}; the labels of {here} are "
            f"{', '.join(map(shown, classes))}",
        )
        return classes[::-1] if self.positive == classes[0] else classes

    def _ids(self, frame: pl.DataFrame, classes: list[str], where: str) -> Tensor:
        text = as_text(frame[self.column])
        ids = text.replace_strict(classes, range(len(classes)), default=None, return_dtype=pl.Int64)
        new = (text.is_not_null() & ids.is_null()).arg_true()
        if len(new):
            raise InputError(
                f"{cell(frame, self.column, new[0], where)} is a label of task {self.name!r} that does not occur in "
                f"the training rows ({', '.join(map(shown, classes[:10]))}); {len(new)} rows have such labels. "
                "Split the rows in another way, or empty these cells"
            )
        return torch.from_numpy(ids.fill_null(MISSING_CLASS).to_numpy(writable=True))

    def _scale(self, mean: float, std: float) -> tuple[float, float]:
        """Return mean and standard deviation of the labels, 1 if they are constant; (0, 1) without ``standardise``."""
        if self.standardise:
            logger.info("task %s (regression): mean %.4g, standard deviation %.4g", self.name, mean, std)
            return mean, std if std > 0 else 1.0
        size = max(abs(mean), std)
        if size > 100 or 0 < size < 0.01:
            logger.warning(
                "task %s: its labels have mean %.3g and standard deviation %.3g; networks learn faster if both are "
                "near 1, particularly with several tasks: leave out standardise=false, or divide the column",
                self.name,
                mean,
                std,
            )
        return 0.0, 1.0


def _column(here: str, name: str, options: Mapping[str, Any], example: str) -> str:
    """Return the column of a task, by default the one of the task's name."""
    column = options.get("column")
    if isinstance(column, int) and not isinstance(column, bool):
        return str(column)  # a name such as 2024
    good = column is None or (isinstance(column, str) and bool(column))
    require(good, f"{here}: column={shown(column)} must be the name of a column, {example}")
    return name if column is None else str(column)


def _positive(here: str, positive: Any) -> str | None:
    """Return the label that becomes 1, as text like the cells of a table."""
    if positive is None:
        return None
    require(
        isinstance(positive, str | int | float),
        f"{here}: positive={shown(positive)} must be one of the two labels of the column",
    )
    return _cell_text(positive)


def _class_weights(option: str, weights: Any) -> Mapping[str, float] | str | None:
    """Return the weights by class, whose names are text like the cells of a table; or "balanced", or None."""
    if weights is None:
        return None
    if weights == BALANCED:
        return BALANCED
    if not isinstance(weights, Mapping) or not weights or not any(weights.values()):
        raise refused(option, weights, "a mapping from classes to numbers, not all 0, as in {rock: 2}, or balanced")
    return {_cell_text(name): number(f"{option}.{name}", weight, 0, HEAVIEST) for name, weight in weights.items()}


def _cell_text(value: str | int | float) -> str:
    """Return a label as text, as ``as_text`` returns the cells of a table."""
    return str(as_text(pl.Series([value]))[0]) if isinstance(value, bool | float) else str(value).strip()
