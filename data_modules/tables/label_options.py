"""What a user says of the labels of tasks. Imports nothing slow, so that a mistyped kind is answered at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mtl.objectives import Loss
from mtl.options import FilePath, Name, Names, NonEmpty, NonNegative, OpenFraction, Positive, StrictModel, Text

MAX_WEIGHT = 1e9  # the largest weight of a task or of its positive rows
MIN_POS_WEIGHT = 1e-9  # the smallest weight of positive rows
Cell = Text | int | float | bool
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
LOSS_OF_OPTION = {"delta": "huber", "gamma": "focal", "quantiles": "quantile"}
QUANTILES = [0.1, 0.5, 0.9]  # of loss=quantile, by default


class LabelRules(StrictModel):
    """How to read the labels of a task from the cells of a column.

    ``binary``: two distinct values; ``positive``, or else the last one in sorted order, becomes 1. ``multiclass``: the
    sorted distinct values of the training rows become classes 0, 1, ... ``regression``: numbers; ``standardize``: the
    network predicts them with mean 0 and standard deviation 1 over the labelled training rows, and metrics are in the
    units of the column. Values are sorted as numbers if all are numbers, else as text.

    ``metrics``: the metrics to report, the main one first; by default they follow from the kind. ``pos_weight``
    multiplies the losses of the positive rows of a binary task; "balanced" means negatives / positives among the
    labelled training rows. ``class_weights`` multiply the losses of the rows of the named classes; "balanced" means
    N / (C * N_c) for a class with N_c of the N labelled training rows and C classes. Metrics ignore these weights.
    ``sampling_rate``: the fraction of the negatives of a binary task that is left in the table; predictions are those
    for all rows, see ``mtl.predictions.to_predictions``.

    ``loss`` and the options below it: see ``mtl.objectives.Objective``. With ``transform="log"``, mean and standard
    deviation are those of the logarithms; a Poisson loss standardizes by the mean label.
    """

    kind: Literal["binary", "multiclass", "regression"]
    weight: Weight = 1.0
    positive: Cell | None = None
    metrics: Names | None = None
    standardize: bool | None = None
    pos_weight: Literal["balanced"] | Annotated[float, Field(ge=MIN_POS_WEIGHT, le=MAX_WEIGHT)] | None = None
    class_weights: Literal["balanced"] | dict[Cell, Weight] | None = None
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    loss: Loss | None = None
    delta: Positive | None = None
    gamma: NonNegative | None = None
    quantiles: NonEmpty[OpenFraction] | None = None
    transform: Literal["log"] | None = None
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def objective(self) -> dict[str, Any]:
        """The loss of the task, as arguments of ``Objective`` and ``TaskSpec``."""
        options = {name: value for name in LOSS_OF_OPTION if (value := getattr(self, name)) is not None}
        if self.loss == "quantile":
            options["quantiles"] = tuple(sorted(self.quantiles or QUANTILES))
        return options | {"loss": self.loss, "transform": self.transform, "smoothing": self.smoothing}


def as_options(entry: Any) -> Any:
    """Return the options of a task or a column, which may be only a kind."""
    return {"kind": entry} if isinstance(entry, str) else entry


class LabelOptions(LabelRules):
    """The options of a task's labels; ``column`` is by default the column with the task's name.

    ``weight_column``: as for the whole table, for this task alone. ``after``: see ``TaskSpec``. ``where``: a binary
    task; labels of rows in which it is not positive, or has no label, do not count in training, validation and test.
    Its labels count only where its own ``where`` holds.
    Classes, and the mean and the standard deviation of a regression, are still those of the whole column.
    ``pattern``: the pattern that stood for the column, see ``tables/patterns.py``.
    """

    column: Name | int | None = None
    weight_column: Name | None = None
    after: Name | None = None
    where: Name | None = None
    pattern: Name | None = None


class TextTaskOptions(LabelRules):
    """The options of a task of texts: its file, the one or two columns of texts, and the column of the labels."""

    path: FilePath
    text: Name | Annotated[Names, Field(min_length=1, max_length=2)]
    label: Name | int
    val_path: FilePath | None = None
    test_path: FilePath | None = None
