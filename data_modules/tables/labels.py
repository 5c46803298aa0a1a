"""Turn columns of a table into the labels of tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from data_modules.files.reading import quote
from data_modules.options import check_task_name, flag, number, shown
from data_modules.tables.columns import as_text, cell, check_kind, numbers, parse
from mtl.types import MISSING_CLASS, InputError, TaskKind, TaskSpec, require

logger = logging.getLogger(__name__)

HEAVIEST = 1e9  # the largest weight of a task
LARGEST = 1e18  # of a regression's labels: the squares of much larger ones overflow in float32
KINDS: tuple[TaskKind, ...] = ("binary", "multiclass", "regression")  # labels of these are values of one column
OPTIONS = ("column", "kind", "weight", "positive", "standardise")


@dataclass(frozen=True)
class Labels:
    """The labels of task ``name``: their ``column`` and how to read it.

    ``binary``: two distinct values; ``positive``, or else the last one in sorted order, becomes 1. ``multiclass``: the
    sorted distinct values of the training rows become classes 0, 1, ... ``regression``: numbers; ``standardise``: the
    network predicts them with mean 0 and standard deviation 1 over the labelled training rows, and metrics are in the
    units of the column. Values are sorted as numbers if all are numbers, else as text.
    """

    name: str
    column: str
    kind: TaskKind
    weight: float = 1.0
    positive: str | None = None
    standardise: bool = True

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
        positive = _positive(here, kind, options.get("positive"))
        standardise = flag(f"tasks.{name}.standardise", options.get("standardise", True))
        require(
            "standardise" not in options or kind == "regression",
            f"{here}: standardise={shown(standardise)} is for kind=regression, not {kind}",
        )
        return Labels(name, _column(here, name, options, example), kind, weight, positive, standardise)

    def encode(
        self, frames: Mapping[str, pl.DataFrame], where: Mapping[str, str]
    ) -> tuple[TaskSpec, dict[str, Tensor]]:
        """Return the TaskSpec and the labels ``[N]`` of each split; ``where`` names the file of each split in messages.

        Raises InputError, which names the first bad cell.
        """
        for name, frame in frames.items():
            self._check_kind(frame, where[name])
        spec = self.learnt(frames["train"], where["train"])
        return spec, {name: self.targets(spec, frame, where[name]) for name, frame in frames.items()}

    def learnt(self, train: pl.DataFrame, where: str) -> TaskSpec:
        """Return the TaskSpec that follows from the training rows, with the names of the classes. Raises InputError."""
        self._check_kind(train, where)
        column, here = train[self.column], f"{where}, column {self.column!r}"
        require(
            as_text(column).null_count() < len(column),
            f"{here}: no training row has a label for task {self.name!r}",
        )
        if self.kind == "regression":
            mean, std = self._scale(self._numbers(train, where))
            return TaskSpec(self.name, "regression", weight=self.weight, mean=mean, std=std)
        classes = self._classes(column, here)
        listed = ", ".join(f"{index}={shown(value)}" for index, value in enumerate(classes[:10]))
        logger.info("task %s (%s): %s%s", self.name, self.kind, listed, ", ..." if len(classes) > 10 else "")
        many = len(classes) if self.kind == "multiclass" else 1
        return TaskSpec(self.name, self.kind, many, self.weight, classes=tuple(classes))

    def targets(self, spec: TaskSpec, frame: pl.DataFrame, where: str) -> Tensor:
        """Return the labels ``[N]`` of the rows of ``frame`` for the task ``spec`` that was learnt.

        They are float32 (binary, regression; NaN if missing) or int64 (multiclass; -100 if missing). Raises
        InputError, which names the first bad cell.
        """
        self._check_kind(frame, where)
        if self.kind == "regression":
            return torch.from_numpy(self._numbers(frame, where).to_numpy(writable=True)).float()
        ids = self._ids(frame, list(spec.classes), where)
        return ids if self.kind == "multiclass" else torch.where(ids == MISSING_CLASS, torch.nan, ids.float())

    def _check_kind(self, frame: pl.DataFrame, where: str) -> None:
        check_kind(frame, self.column, where, f", as it holds the labels of task {self.name!r}")

    def _numbers(self, frame: pl.DataFrame, where: str) -> pl.Series:
        """Return the labels of a regression task; raise InputError, with file and row, if a label is too large."""
        values = numbers(frame, self.column, where)
        large = (values.fill_nan(0.0).abs() > LARGEST).arg_true()
        if len(large):
            raise InputError(
                f"{cell(frame, self.column, large[0], where)} is too large for a label of task {self.name!r}: beyond "
                f"{LARGEST:g} the squared error overflows; correct it, empty it, or divide the column"
            )
        return values

    def _classes(self, column: pl.Series, here: str) -> list[str]:
        """Return the sorted classes of the training rows; for binary tasks, the positive one last."""
        values = as_text(column).drop_nulls().unique().to_list()
        as_number = parse(pl.Series(values))
        order = as_number.to_list() if as_number.null_count() == 0 else values
        classes = [value for _, value in sorted(zip(order, values, strict=True))]
        require(
            len(classes) > 1,
            f"{here}: all {len(column) - column.null_count()} labels of the training rows are {quote(classes[0])}; "
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

    def _scale(self, values: pl.Series) -> tuple[float, float]:
        """Return mean and standard deviation of the labels, 1 if they are constant; (0, 1) without ``standardise``."""
        labels = values.drop_nans()
        mean, std = labels.mean(), labels.std(ddof=0)
        assert isinstance(mean, float)
        assert isinstance(std, float)
        if self.standardise:
            logger.info("task %s (regression): mean %.4g, standard deviation %.4g", self.name, mean, std)
            return mean, 1.0 if labels.min() == labels.max() else std
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


def _positive(here: str, kind: str, positive: Any) -> str | None:
    """Return the label that becomes 1, as text like the cells of a table."""
    if positive is None:
        return None
    require(kind == "binary", f"{here}: positive={shown(positive)} is for kind=binary, not {kind}")
    require(
        isinstance(positive, str | int | float),
        f"{here}: positive={shown(positive)} must be one of the two labels of the column",
    )
    if isinstance(positive, bool | float):
        return str(as_text(pl.Series([positive]))[0])
    return str(positive).strip()
