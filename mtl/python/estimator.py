"""``mtl.fit`` as an estimator in the style of scikit-learn, which need not be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import polars as pl

from mtl.checks import InputError, join_names, require
from mtl.predictions import class_names, main_column
from mtl.python.fit import fit
from mtl.training.evaluation import Evaluation
from mtl.training.metrics import higher_is_better, mean_of_defined
from mtl.types import TaskSpec
from mtl.use.frames import to_polars
from mtl.use.trained import TrainedModel

try:
    from sklearn.base import BaseEstimator as Base
    from sklearn.exceptions import NotFittedError
except ImportError:
    Base, NotFittedError = object, InputError


class MultiTaskModel(Base):  # type: ignore[misc]  # scikit-learn has no types
    """Train on a table ``X`` of inputs and a table ``Y`` with a column of labels for each task.

    ``Y`` may also have columns of weights, and a ``group_column`` that ``ignore`` names; a column for nothing else is
    an error, since a table has no other way to tell an input from a label.

    ``tasks`` and ``options`` are those of ``mtl.fit``, such as ``gate``, ``max_epochs`` and ``seed``. ``X`` and ``Y``
    are DataFrames of polars or pandas, or dicts of columns, or arrays: the columns of ``X [N, D]`` are then called 0,
    1, ..., and those of ``Y``, ``[N, T]`` or ``[N]``, are the labels of the tasks in their order. ``model_`` is the
    trained model after ``fit``, which also explains and saves.
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
        names = [np.array(class_names(task)) for task in self._tasks_with_classes()]
        self.classes_ = names[0] if len(self.model_.spec.tasks) == len(names) == 1 else names
        return self

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return a table of the classes and values that are predicted, with a column for each task, like ``X``.

        For an array ``X``, it is an array ``[N, T]``, or ``[N]`` with one task. Classes are text.
        """
        predictions = self._fitted().predict(_table(X))
        columns = {main_column(task): task.name for task in self.model_.spec.tasks}
        table = predictions[list(columns)]
        if _is_array(X):
            return table.to_numpy()[:, 0] if len(columns) == 1 else table.to_numpy()
        return table.rename(columns) if isinstance(table, pl.DataFrame) else table.rename(columns=columns)

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """Return the probabilities ``[N, C]`` of the classes, in the order of ``classes_``.

        With several tasks, both are lists with an entry for each task that has classes. Raises InputError without any.
        """
        predictions, arrays = self._fitted().predict(_table(X)), []
        require(len(self.classes_) > 0, "all tasks are regressions, so there are no probabilities: use predict")
        for task in self._tasks_with_classes():
            if task.kind == "binary":
                positive = np.asarray(predictions[f"{task.name}_probability"])
                arrays.append(np.column_stack([1 - positive, positive]))
            else:
                arrays.append(predictions[[f"{task.name}_probability_{name}" for name in class_names(task)]].to_numpy())
        return arrays[0] if len(self.model_.spec.tasks) == 1 else arrays

    def score(self, X: Any, Y: Any) -> float:  # noqa: N803
        """Return the mean of the tasks' main metrics; those of which lower is better, such as mse, are negated.

        Name the metrics with ``{"kind": "regression", "metrics": ["r2"]}`` to have all on one scale.
        """
        metrics = self._fitted().evaluate(self._beside(X, Y))
        mains = Evaluation(self.model_.spec.tasks).main_metrics().items()
        signs = {f"{task}/{main}": 1 if higher_is_better(main) else -1 for task, main in mains}
        return mean_of_defined([sign * metrics[name] for name, sign in signs.items() if name in metrics])

    def _beside(self, inputs: Any, labels: Any) -> pl.DataFrame:
        """Return the table with the columns of both; raise InputError if one of ``labels`` would become an input."""
        left, right = to_polars(_table(inputs)), to_polars(_table(labels, self._label_columns()))
        require(len(left) == len(right), f"X has {len(left)} rows, and Y has {len(right)}")
        twice = [name for name in right.columns if name in left.columns]
        require(not twice, f"X and Y both have {join_names(twice)}: labels must not be inputs")
        tasks = self.tasks if isinstance(self.tasks, Mapping) else {}  # ``fit`` refuses others
        options_by_task = {name: options if isinstance(options, Mapping) else {} for name, options in tasks.items()}
        expected: set[Any] = {*self._label_columns()}
        expected |= {options.get("weight_column") for options in options_by_task.values()}
        expected |= {self._option("weight_column")}
        expected |= {self._option("group_column")} & {*(self._option("ignore") or ())}
        others = [name for name in right.columns if name not in expected]
        need = "Y has the labels and weights of the tasks, and a group_column that is named in ignore"
        require(not others, f"Y has {join_names(others)}, which would become inputs: {need}; leave the others out")
        return left.hstack(right)

    def _fitted(self) -> TrainedModel:
        """Return the trained model. Raises scikit-learn's NotFittedError before ``fit``."""
        if not hasattr(self, "model_"):
            raise NotFittedError("this MultiTaskModel is not trained: call fit first")
        return self.model_

    def _tasks_with_classes(self) -> list[TaskSpec]:
        return [task for task in self.model_.spec.tasks if task.kind in ("binary", "multiclass")]

    def _label_columns(self) -> list[str]:
        """Return the columns of the tasks, in their order."""
        tasks = self.tasks if isinstance(self.tasks, Mapping) else {}  # ``fit`` refuses others
        columns = {name: options.get("column") for name, options in tasks.items() if isinstance(options, Mapping)}
        return [str(columns.get(name) or name) for name in tasks]

    def _option(self, name: str) -> Any:
        """Return an option of the data, given as a keyword or by its full name."""
        return (self.options.get("options") or {}).get(f"data.{name}", self.options.get(name))


def _is_array(rows: Any) -> bool:
    return isinstance(rows, list | tuple | np.ndarray)


def _table(rows: Any, names: Sequence[str] | None = None) -> Any:
    """Return an array ``[N, D]`` or ``[N]`` as a table with ``names``, by default 0, 1, ...; others as they are.

    A Series of one label gets the name of its task. Raises InputError.
    """
    if not _is_array(rows):
        series = hasattr(rows, "to_frame") and not isinstance(rows, Mapping)
        return rows.rename(names[0]) if series and names is not None and len(names) == 1 else rows
    array = np.asarray(rows)
    array = array[:, None] if array.ndim == 1 and names is not None else array
    columns = names if names is not None else [str(number) for number in range(array.shape[-1])]
    wanted = f"with {len(columns)} columns: {join_names(columns)}" if names is not None else "of two dimensions"
    fits = array.ndim == 2 and array.shape[1] == len(columns)
    require(fits, f"an array of shape {list(array.shape)} is no table {wanted}")
    return {name: array[:, number] for number, name in enumerate(columns)}
