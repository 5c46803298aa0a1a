"""The estimator in the style of scikit-learn: tables, arrays, probabilities, scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, get_scorer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

import mtl
from mtl.checks import InputError
from tests.unit.test_fit import QUICK, as_pandas, visits


def test_estimator_is_cloned_searched_and_scored() -> None:
    rows = as_pandas(visits())
    inputs, labels = rows[["age", "city"]], rows[["clicked", "minutes"]]
    tasks = {"clicked": "binary", "minutes": {"kind": "regression", "metrics": ["mae"]}}
    estimator = clone(mtl.MultiTaskModel(tasks, **QUICK))
    search = GridSearchCV(estimator, {"gate": ["topk", "softmax"]}, cv=2, error_score="raise").fit(inputs, labels)
    best = search.best_estimator_
    metrics = best.model_.evaluate(rows)
    assert best.score(inputs, labels) == pytest.approx((metrics["clicked/auroc"] - metrics["minutes/mae"]) / 2)
    predicted = best.predict(inputs.iloc[5:9])
    assert list(predicted) == ["clicked", "minutes"]
    assert list(predicted.index) == [5, 6, 7, 8]
    with pytest.raises(InputError, match="X and Y both have clicked"):
        estimator.fit(rows, labels)


def test_surplus_column_of_labels_is_no_input() -> None:
    """A column of Y that belongs to no task is an error; weights and an ignored group are read, and are no inputs."""
    rows = visits().with_columns(weight=pl.lit(2.0), user=pl.int_range(pl.len()) % 7, other=pl.col("minutes") + 1)
    tasks = {"clicked": {"kind": "binary", "weight_column": "weight", "metrics": ["mrr"]}}
    inputs, labels = rows[["age", "city"]], rows[["clicked", "weight", "user"]]
    estimator = mtl.MultiTaskModel(tasks, group_column="user", ignore=["user"], **QUICK)
    assert estimator.fit(inputs, labels).model_.columns == ["age", "city"]
    assert 0 < estimator.score(inputs, labels) <= 1
    for label in ("minutes", "other"):
        with pytest.raises(InputError, match=f"Y has {label}, which would become inputs"):
            estimator.fit(inputs, labels.with_columns(rows[label]))
    with pytest.raises(InputError, match="Y has user, which would become inputs"):
        estimator.set_params(ignore=[]).fit(inputs, labels)


def test_estimator_takes_arrays_in_a_pipeline() -> None:
    """Columns by their place; what comes out is an array too, and probabilities add up to 1."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(200, 3)) * [1, 10, 100]
    labels = np.column_stack([inputs[:, 0] > 0, inputs[:, 1]])
    tasks = {"clicked": "binary", "minutes": "regression"}
    pipeline = make_pipeline(StandardScaler(), mtl.MultiTaskModel(tasks, **QUICK)).fit(inputs, labels)
    assert pipeline[-1].model_.columns == ["0", "1", "2"]
    assert pipeline.predict(inputs[:5]).shape == (5, 2)
    [probabilities] = pipeline.predict_proba(inputs[:5])
    assert probabilities.sum(1) == pytest.approx(np.ones(5))
    first = dict(zip(pipeline[-1].classes_[0], probabilities[0], strict=True))
    assert max(first, key=first.__getitem__) == pipeline.predict(inputs[:1])[0, 0]
    with pytest.raises(InputError, match="shape \\[5, 2\\] is no table with 3 columns:"):
        pipeline[-1].predict(inputs[:5, :2])
    with pytest.raises(InputError, match="shape \\[5, 1\\] is no table with 2 columns: clicked, minutes"):
        pipeline[-1].fit(inputs[:5], labels[:5, :1])


def test_estimator_of_one_task_takes_a_column_and_says_when_it_is_not_trained() -> None:
    rows = as_pandas(visits())
    estimator = mtl.MultiTaskModel({"plan": "multiclass"}, **QUICK)
    with pytest.raises(NotFittedError, match="call fit first"):
        estimator.predict(rows)
    kept = rows[rows["plan"].notna()]
    estimator.fit(kept[["age", "city"]], kept["plan"].rename("other name"))
    assert estimator.predict_proba(kept[["age", "city"]]).shape == (len(kept), 3)
    assert list(estimator.classes_) == ["gold", "none", "silver"]
    regression = mtl.MultiTaskModel({"minutes": "regression"}, **QUICK).fit(rows[["age"]], rows["minutes"])
    assert not hasattr(regression, "predict_proba")


@pytest.mark.parametrize("dtype", [bool, np.int64, np.float64, "str"])
def test_classes_are_those_of_the_labels(dtype: Any) -> None:
    """So that scikit-learn's scores can compare them; by the names of classes, true comes after false."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(200, 2))
    labels = (inputs[:, 0] + draw.normal(size=200) > 0).astype(int).astype(dtype)
    estimator = mtl.MultiTaskModel({"label": "binary"}, **QUICK)
    assert is_classifier(estimator)
    assert cross_val_score(estimator, inputs, labels, cv=2, scoring="roc_auc", error_score="raise").min() > 0.6
    predicted = estimator.fit(inputs, labels).predict(inputs)
    assert estimator.classes_.tolist() == sorted(set(labels.tolist()))
    best = estimator.classes_[estimator.predict_proba(inputs).argmax(1)]
    assert accuracy_score(labels, predicted) == np.mean(predicted == labels) == np.mean(best == labels)


def test_classes_are_sorted_as_scikit_learn_expects() -> None:
    """The network orders them by number, and the positive class last."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(300, 2))
    options = QUICK | {"max_epochs": 8, "lr": 0.03}
    names = np.array(["100", "9", "10"])[np.digitize(inputs[:, 0], [-0.5, 0.5])]
    estimator = mtl.MultiTaskModel({"size": "multiclass"}, **options).fit(inputs, names)
    assert estimator.classes_.tolist() == ["10", "100", "9"]
    assert get_scorer("roc_auc_ovr")(estimator, inputs, names) > 0.9
    answers = np.where(inputs[:, 0] > 0, "no", "yes")
    estimator = mtl.MultiTaskModel({"answer": {"kind": "binary", "positive": "no"}}, **options).fit(inputs, answers)
    assert estimator.classes_.tolist() == ["no", "yes"]
    assert get_scorer("roc_auc")(estimator, inputs, answers) > 0.9
    assert np.mean(estimator.predict(inputs) == answers) > 0.8


@pytest.mark.parametrize(
    "name",
    [
        "check_estimators_unfitted",
        "check_estimators_pickle",
        "check_methods_subset_invariance",
        "check_dict_unchanged",
        "check_n_features_in",
        "check_fit_idempotent",
    ],
)
def test_scikit_learn_accepts_the_estimator(name: str) -> None:
    """Its other checks want sentences of its own, or an estimator that refuses missing values."""
    options = {"network": "shared_bottom", "blend": "none", "max_epochs": 1}
    getattr(estimator_checks, name)("MultiTaskModel", mtl.MultiTaskModel({"y": "regression"}, **options))
