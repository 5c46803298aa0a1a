"""``mtl.fit`` as an estimator in the style of scikit-learn, which need not be installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import polars as pl

from mtl.checks import InputError, join_names, require
from mtl.data_modules.tables.cells import texts_of
from mtl.predictions import class_names, main_column
from mtl.python.fit import fit
from mtl.training.evaluation import Evaluation
from mtl.training.metrics import higher_is_better, mean_of_defined
from mtl.types import TaskSpec
from mtl.use.frames import is_pandas, like, to_polars
from mtl.use.trained import TrainedModel

try:
    from sklearn.base import BaseEstimator as Base
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.metaestimators import available_if
except ImportError:
    Base, NotFittedError = object, InputError

    def available_if(check: Callable[[Any], bool]) -> Any:
        """Return a decorator that leaves the method as it is."""
        return lambda method: method


def _may_have_classes(estimator: Any) -> bool:
    return not hasattr(estimator, "model_") or bool(estimator._tasks_with_classes())


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
        inputs, labels = _to_table(X), to_polars(_to_table(Y, self._label_columns()))
        model = fit(self._beside(inputs, labels), self.tasks, **{"progress": False, **self.options})
        self.model_: TrainedModel = replace(model, pandas=is_pandas(X))
        self._input_columns = to_polars(inputs).columns
        self.n_features_in_ = len(self._input_columns)
        columns = dict(zip(self.tasks, self._label_columns(), strict=True))
        tasks = self._tasks_with_classes()
        self._classes = {task.name: _classes_of(task, labels[columns[task.name]]) for task in tasks}
        classes = [series.sort().to_numpy() for series in self._classes.values()]  # scikit-learn's are sorted
        self.classes_ = classes[0] if len(self.model_.spec.tasks) == len(classes) == 1 else classes
        return self

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return a table of the classes and values that are predicted, with a column for each task, like ``X``.

        For an array ``X``, it is an array ``[N, T]``, or ``[N]`` with one task. Classes are those of the labels.
        """
        predictions, predicted = self._predictions(X), {}
        for task in self.model_.spec.tasks:
            column, classes = predictions[main_column(task)], self._classes.get(task.name)
            predicted[task.name] = column if classes is None else column.replace_strict(class_names(task), classes)
        table = pl.DataFrame(predicted)
        if _is_array(X):
            return table.to_numpy()[:, 0] if table.width == 1 else table.to_numpy()
        return like(X, table, indexed=True)

    @available_if(_may_have_classes)  # type: ignore[untyped-decorator]  # scikit-learn has no types
    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """Return the probabilities ``[N, C]`` of the classes, in the order of ``classes_``.

        With several tasks, both are lists with an entry for each task that has classes. If all are regressions, there
        is no such method, as scikit-learn expects.
        """
        predictions, arrays = self._predictions(X), []
        require(bool(self._classes), "all tasks are regressions, so there are no probabilities: use predict")
        for task in self._tasks_with_classes():
            if task.kind == "binary":
                positive = predictions[f"{task.name}_probability"].to_numpy()
                array = np.column_stack([1 - positive, positive])
            else:
                array = predictions[[f"{task.name}_probability_{name}" for name in class_names(task)]].to_numpy()
            arrays.append(array[:, self._classes[task.name].arg_sort().to_numpy()])
        return arrays[0] if len(self.model_.spec.tasks) == 1 else arrays

    def score(self, X: Any, Y: Any) -> float:  # noqa: N803
        """Return the mean of the tasks' main metrics; those of which lower is better, such as mse, are negated.

        Name the metrics with ``{"kind": "regression", "metrics": ["r2"]}`` to have all on one scale.
        """
        labels = to_polars(_to_table(Y, self._label_columns()))
        metrics = self._fitted().evaluate(self._beside(self._to_inputs(X), labels))
        mains = Evaluation(self.model_.spec.tasks).main_metrics().items()
        signs = {f"{task}/{main}": 1 if higher_is_better(main) else -1 for task, main in mains}
        return mean_of_defined([sign * metrics[name] for name, sign in signs.items() if name in metrics])

    def __sklearn_tags__(self) -> Any:
        """Say what scikit-learn asks of estimators: kinds of inputs and labels; classes, numbers, or both."""
        from sklearn.utils import ClassifierTags, RegressorTags

        tags = super().__sklearn_tags__()
        kinds = {options.get("kind") for options in self._options_by_task().values()}
        input_tags, target_tags = tags.input_tags, tags.target_tags
        input_tags.allow_nan = input_tags.categorical = input_tags.string = True
        target_tags.required, target_tags.multi_output = True, len(self.tasks) > 1
        target_tags.single_output = len(self.tasks) == 1
        if len(self.tasks) == 1 and kinds <= {"binary", "multiclass"}:
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags(multi_class=kinds != {"binary"})
        elif kinds == {"regression"}:
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
        return tags

    def _predictions(self, X: Any) -> pl.DataFrame:  # noqa: N803
        return self._fitted().predict(to_polars(self._to_inputs(X)))

    def _to_inputs(self, X: Any) -> Any:  # noqa: N803
        """Return ``X`` as a table; an array must have the columns of the training, in order. Raises InputError."""
        self._fitted()
        return _to_table(X, self._input_columns) if _is_array(X) else X

    def _beside(self, inputs: Any, right: pl.DataFrame) -> pl.DataFrame:
        """Return the table with the columns of both; raise InputError if one of the labels would become an input."""
        left = to_polars(inputs)
        require(len(left) == len(right), f"X has {len(left)} rows, and Y has {len(right)}")
        twice = [name for name in right.columns if name in left.columns]
        require(not twice, f"X and Y both have {join_names(twice)}: labels must not be inputs")
        expected: set[Any] = {*self._label_columns(), self._option("weight_column")}
        expected |= {options.get("weight_column") for options in self._options_by_task().values()}
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
        return [str(options.get("column") or name) for name, options in self._options_by_task().items()]

    def _options_by_task(self) -> dict[str, Mapping[str, Any]]:
        tasks = self.tasks if isinstance(self.tasks, Mapping) else {}  # ``fit`` refuses others
        return {name: options if isinstance(options, Mapping) else {"kind": options} for name, options in tasks.items()}

    def _option(self, name: str) -> Any:
        """Return an option of the data, given as a keyword or by its full name."""
        return (self.options.get("options") or {}).get(f"data.{name}", self.options.get(name))


def _is_array(rows: Any) -> bool:
    return isinstance(rows, list | tuple | np.ndarray)


def _classes_of(task: TaskSpec, labels: pl.Series) -> pl.Series:
    """Return the classes ``[C]`` of a task in the network's order, as values of its column of labels."""
    values = labels.drop_nulls().unique()
    texts, names = texts_of((*values,), values.dtype), class_names(task)
    return values[[texts.index(name) for name in names]] if {*names} <= {*texts} else pl.Series(names)


def _to_table(rows: Any, names: Sequence[str] | None = None) -> Any:
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
