"""``mtl.fit`` as an estimator in the style of scikit-learn, which need not be installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import polars as pl

from mtl.checks import join_names, require
from mtl.predictions import main_column
from mtl.python.fit import fit
from mtl.training.evaluation import Evaluation
from mtl.training.metrics import higher_is_better, mean_of_defined
from mtl.use.frames import to_polars
from mtl.use.trained import TrainedModel

try:
    from sklearn.base import BaseEstimator as Base
except ImportError:
    Base = object


class MultiTaskModel(Base):  # type: ignore[misc]  # scikit-learn has no types
    """Train on a table ``X`` of inputs and a table ``Y`` with a column of labels for each task.

    ``Y`` may also have columns of weights, and a ``group_column`` that ``ignore`` names; a column for nothing else is
    an error, since a table has no other way to tell an input from a label.

    ``tasks`` and ``options`` are those of ``mtl.fit``, such as ``gate``, ``max_epochs`` and ``seed``. ``X`` and ``Y``
    are DataFrames of polars or pandas, or dicts of columns. ``model_`` is the trained model after ``fit``, which also
    explains, gives probabilities and saves.
    """

    def __init__(self, tasks: Mapping[str, str | Mapping[str, Any]], **options: Any) -> None:
        self.tasks, self.options = tasks, options

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"tasks": self.tasks, **self.options}

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor."""
        self.tasks = params.pop("tasks", self.tasks)
        self.options = {**self.options, **params}
        return self

    def fit(self, X: Any, Y: Any) -> Self:  # noqa: N803  (scikit-learn's names)
        """Train a new network on the rows of ``X`` and ``Y``. Raises InputError."""
        self.model_: TrainedModel = fit(self._beside(X, Y), self.tasks, **{"progress": False, **self.options})
        return self

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return a table of the classes and values that are predicted, with a column for each task, like ``X``.

        Classes are text. ``model_.predict`` has the probabilities too.
        """
        predictions = self.model_.predict(X)
        columns = {main_column(task): task.name for task in self.model_.spec.tasks}
        table = predictions[list(columns)]
        return table.rename(columns) if isinstance(table, pl.DataFrame) else table.rename(columns=columns)

    def score(self, X: Any, Y: Any) -> float:  # noqa: N803
        """Return the mean of the tasks' main metrics; those of which lower is better, such as mse, are negated.

        Name the metrics with ``{"kind": "regression", "metrics": ["r2"]}`` to have all on one scale.
        """
        metrics = self.model_.evaluate(self._beside(X, Y))
        mains = Evaluation(self.model_.spec.tasks).main_metrics().items()
        signs = {f"{task}/{main}": 1 if higher_is_better(main) else -1 for task, main in mains}
        return mean_of_defined([sign * metrics[name] for name, sign in signs.items() if name in metrics])

    def _beside(self, inputs: Any, labels: Any) -> pl.DataFrame:
        """Return the table with the columns of both; raise InputError if one of ``labels`` would become an input."""
        left, right = to_polars(inputs), to_polars(labels)
        require(len(left) == len(right), f"X has {len(left)} rows, and Y has {len(right)}")
        twice = [name for name in right.columns if name in left.columns]
        require(not twice, f"X and Y both have {join_names(twice)}: labels must not be inputs")
        tasks = self.tasks if isinstance(self.tasks, Mapping) else {}  # ``fit`` refuses others
        options_by_task = {name: options if isinstance(options, Mapping) else {} for name, options in tasks.items()}
        expected: set[Any] = {str(options.get("column") or name) for name, options in options_by_task.items()}
        expected |= {options.get("weight_column") for options in options_by_task.values()}
        expected |= {self._option("weight_column")}
        expected |= {self._option("group_column")} & {*(self._option("ignore") or ())}
        others = [name for name in right.columns if name not in expected]
        need = "Y has the labels and weights of the tasks, and a group_column that is named in ignore"
        require(not others, f"Y has {join_names(others)}, which would become inputs: {need}; leave the others out")
        return left.hstack(right)

    def _option(self, name: str) -> Any:
        """Return an option of the data, given as a keyword or by its full name."""
        return (self.options.get("options") or {}).get(f"data.{name}", self.options.get(name))
