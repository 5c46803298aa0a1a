"""Turn columns of a table into the labels of tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from data_modules.tables.columns import as_text, cell, numbers, parse
from mtl.types import KINDS, MISSING_CLASS, InputError, TaskKind, TaskSpec, require

logger = logging.getLogger(__name__)

OPTIONS = ("column", "kind", "weight", "positive")


@dataclass(frozen=True)
class Labels:
    """The labels of task ``name``: their ``column`` and how to read it.

    ``binary``: two distinct values; ``positive``, or else the last one in sorted order, becomes 1. ``multiclass``: the
    sorted distinct values of the training rows become classes 0, 1, ... ``regression``: numbers. Values are sorted as
    numbers if all are numbers, else as text.
    """

    name: str
    column: str
    kind: TaskKind
    weight: float = 1.0
    positive: str | None = None

    @staticmethod
    def of(name: str, options: Any, example: str) -> Labels:
        """Return the Labels of one entry of ``data.tasks``; raise InputError if an option is wrong."""
        here = f"data.tasks.{name}"
        require(isinstance(options, Mapping), f"{here}={options!r}: must give column and kind, {example}")
        unknown = [key for key in options if key not in OPTIONS]
        require(not unknown, f"{here}: unknown option: {', '.join(unknown)}; accepted are {', '.join(OPTIONS)}")
        kind, weight, positive = options.get("kind"), options.get("weight", 1.0), options.get("positive")
        require(kind in KINDS, f"{here}: kind={kind} must be one of {', '.join(KINDS)}, {example}")
        fits = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < float("inf")
        require(fits, f"{here}: weight={weight!r} must be a number of at least 0")
        require(positive is None or kind == "binary", f"{here}: positive={positive} is for kind=binary, not {kind}")
        positive = None if positive is None else as_text(pl.Series([positive], strict=False))[0]
        return Labels(name, str(options.get("column") or name), kind, float(weight), positive)

    def encode(
        self, frames: Mapping[str, pl.DataFrame], where: Mapping[str, str]
    ) -> tuple[TaskSpec, dict[str, Tensor]]:
        """Return the TaskSpec and the labels ``[N]`` of each split; ``where`` names the file of each split in messages.

        Labels are float32 (binary, regression; NaN if missing) or int64 (multiclass; -100 if missing). Raises
        InputError, which names the first bad cell.
        """
        train = frames["train"][self.column]
        here = f"{where['train']}, column {self.column!r}"
        require(
            as_text(train).null_count() < len(train),
            f"{here}: no training row has a label for task {self.name!r}",
        )
        if self.kind == "regression":
            values = {name: numbers(frame, self.column, where[name]) for name, frame in frames.items()}
            self._warn_about_scale(values["train"])
            spec = TaskSpec(self.name, "regression", weight=self.weight)
            return spec, {name: torch.from_numpy(v.to_numpy(writable=True)).float() for name, v in values.items()}
        classes = self._classes(train, here)
        ids = {name: self._ids(frame, classes, where[name]) for name, frame in frames.items()}
        shown = ", ".join(f"{number}={value}" for number, value in enumerate(classes[:10]))
        logger.info("task %s (%s): %s%s", self.name, self.kind, shown, ", ..." if len(classes) > 10 else "")
        if self.kind == "multiclass":
            return TaskSpec(self.name, "multiclass", len(classes), self.weight), ids
        floats = {name: torch.where(value == MISSING_CLASS, torch.nan, value.float()) for name, value in ids.items()}
        return TaskSpec(self.name, "binary", weight=self.weight), floats

    def _classes(self, column: pl.Series, here: str) -> list[str]:
        """Return the sorted classes of the training rows; for binary tasks, the positive one last."""
        values = as_text(column).drop_nulls().unique().to_list()
        as_number = parse(pl.Series(values))
        order = as_number.to_list() if as_number.null_count() == 0 else values
        classes = [value for _, value in sorted(zip(order, values, strict=True))]
        require(
            len(classes) > 1,
            f"{here}: all {len(column) - column.null_count()} labels of the training rows are {classes[0]!r}; "
            f"task {self.name!r} needs at least two classes",
        )
        if self.kind == "multiclass":
            return classes
        require(
            len(classes) == 2,
            f"{here}: task {self.name!r} is binary but its training rows have {len(classes)} different labels, "
            f"{', '.join(classes[:5])}{', ...' if len(classes) > 5 else ''}; use kind=multiclass",
        )
        require(
            self.positive in (None, *classes),
            f"data.tasks.{self.name}: positive={self.positive}; the labels of {here} are {', '.join(classes)}",
        )
        return classes[::-1] if self.positive == classes[0] else classes

    def _ids(self, frame: pl.DataFrame, classes: list[str], where: str) -> Tensor:
        text = as_text(frame[self.column])
        ids = text.replace_strict(classes, range(len(classes)), default=None, return_dtype=pl.Int64)
        new = (text.is_not_null() & ids.is_null()).arg_true()
        if len(new):
            raise InputError(
                f"{cell(frame, self.column, new[0], where)} is a label of task {self.name!r} that does not occur in "
                f"the training rows ({', '.join(classes[:10])}); {len(new)} rows have such labels. Split the rows in "
                "another way, or empty these cells"
            )
        return torch.from_numpy(ids.fill_null(MISSING_CLASS).to_numpy(writable=True))

    def _warn_about_scale(self, values: pl.Series) -> None:
        mean, std = values.drop_nans().mean(), values.drop_nans().std(ddof=0)
        assert isinstance(mean, float)
        assert isinstance(std, float)
        size = max(abs(mean), std)
        if size > 100 or 0 < size < 0.01:
            logger.warning(
                "task %s: its labels have mean %.3g and standard deviation %.3g; networks learn faster if both are "
                "near 1, particularly with several tasks: divide the column",
                self.name,
                mean,
                std,
            )
