"""Metrics that a task names: their values by hand, of constants, of rows split over processes; and their averages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtl.checks import InputError
from mtl.training import errors, metrics
from mtl.training.metrics import BUILDERS, Evaluation
from mtl.training.module import MultiTaskModule
from mtl.types import METRICS, MISSING_CLASS, TaskSpec

NAN = math.nan
BINARY = TaskSpec("cola", "binary", metrics=("matthews", "f1", "accuracy", "auroc"), small=True)
CLASSES = TaskSpec("mnli", "multiclass", num_classes=3, metrics=("macro_f1", "matthews", "accuracy"))
REAL = TaskSpec("stsb", "regression", metrics=("pearson", "spearman", "mse"))
TASKS = [BINARY, CLASSES, REAL]

# Probabilities, their labels, and classes by task, with ties and missing labels
LOGITS = [2.0, -1.0, 0.5, -0.5, 3.0, -2.0, 1.0, 0.1, -3.0]
LABELS = [1.0, 0.0, 0.0, 1.0, 1.0, NAN, 1.0, 0.0, 0.0]
PREDICTED = [0, 1, 2, 2, 1, 0, 1, 1, 0]
CLASS = [0, 1, 2, 1, 1, MISSING_CLASS, 0, 2, 0]
VALUES = [1.0, 2.0, 2.0, 3.0, 0.5, 9.0, 4.0, 2.0, 1.0]
SCORES = [0.0, 2.5, 2.5, 5.0, 1.0, NAN, 3.0, 1.0, 0.0]


def f1(predicted: list[int], labels: list[int], chosen: int) -> float:
    """2 TP / (2 TP + FP + FN)."""
    pairs = list(zip(predicted, labels, strict=True))
    true = sum(p == t == chosen for p, t in pairs)
    wrong = sum((p == chosen) != (t == chosen) for p, t in pairs)
    return 2 * true / (2 * true + wrong)


def correlation(x: list[float], y: list[float]) -> float:
    """Covariance divided by both standard deviations."""
    a, b = sum(x) / len(x), sum(y) / len(y)
    products = sum((p - a) * (q - b) for p, q in zip(x, y, strict=True))
    return products / math.sqrt(sum((p - a) ** 2 for p in x) * sum((q - b) ** 2 for q in y))


def matthews(predicted: list[int], labels: list[int], classes: int) -> float:
    """Gorodkin's correlation of the one-hot codes of predictions and labels."""

    def covariance(p: list[int], t: list[int]) -> float:
        shares = [(p.count(c) / len(p), t.count(c) / len(t)) for c in range(classes)]
        return sum(i == j for i, j in zip(p, t, strict=True)) / len(p) - sum(a * b for a, b in shares)

    spread = covariance(predicted, predicted) * covariance(labels, labels)
    return covariance(predicted, labels) / math.sqrt(spread)


def ranks(values: list[float]) -> list[float]:
    """The mean of the places that equal values share when sorted."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def expected() -> dict[str, float]:
    kept = [row for row, label in enumerate(LABELS) if label == label]
    labels = [int(LABELS[row]) for row in kept]
    logits = [LOGITS[row] for row in kept]
    positive = [int(logit > 0) for logit in logits]
    right = [
        a > b for a, t in zip(logits, labels, strict=True) if t for b, u in zip(logits, labels, strict=True) if not u
    ]
    classes, predicted = ([column[row] for row in kept] for column in (CLASS, PREDICTED))
    values, scores = ([column[row] for row in kept] for column in (VALUES, SCORES))
    return {
        "cola/matthews": matthews(positive, labels, 2),
        "cola/f1": f1(positive, labels, 1),
        "cola/accuracy": sum(p == t for p, t in zip(positive, labels, strict=True)) / len(kept),
        "cola/auroc": sum(right) / len(right),
        "mnli/macro_f1": sum(f1(predicted, classes, chosen) for chosen in range(3)) / 3,
        "mnli/matthews": matthews(predicted, classes, 3),
        "mnli/accuracy": sum(p == t for p, t in zip(predicted, classes, strict=True)) / len(kept),
        "stsb/pearson": correlation(values, scores),
        "stsb/spearman": correlation(ranks(values), ranks(scores)),
        "stsb/mse": sum((p - t) ** 2 for p, t in zip(values, scores, strict=True)) / len(kept),
    }


def add(evaluation: Evaluation, rows: slice) -> None:
    scores = torch.nn.functional.one_hot(torch.tensor(PREDICTED), 3).float()
    predictions = {"cola": torch.tensor(LOGITS), "mnli": scores, "stsb": torch.tensor(VALUES)}
    targets = {"cola": torch.tensor(LABELS), "mnli": torch.tensor(CLASS), "stsb": torch.tensor(SCORES)}
    names = [name for name in evaluation.tasks if name in predictions]
    evaluation.update({n: predictions[n][rows] for n in names}, {n: targets[n][rows] for n in names})


@pytest.mark.parametrize("cuts", [[0, 9], [0, 1, 5, 6, 9]], ids=["one batch", "batches"])
def test_values_by_hand(cuts: list[int]) -> None:
    evaluation = Evaluation(TASKS)
    for start, end in itertools.pairwise(cuts):
        add(evaluation, slice(start, end))
    found = evaluation.compute()
    assert {name: found[name] for name in expected()} == pytest.approx(expected(), abs=1e-6)
    mains = [found["cola/matthews"], found["mnli/macro_f1"], found["stsb/pearson"]]
    assert found["average"] == pytest.approx(sum(mains) / 3)
    assert found["small_average"] == found["cola/matthews"]
    assert set(found) == set(evaluation.names())


@pytest.mark.parametrize("cut", [4, 9], ids=["both have rows", "one has none"])
def test_two_processes_report_the_values_of_all_rows(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each metric sees its own rows; what it would gather from the other process is handed to it."""
    monkeypatch.setattr(metrics, "gather_tensors", lambda value, group=None: [value, other.pop(0)])
    monkeypatch.setattr(errors, "all_reduce_sum", lambda sums: sums + theirs.errors.sums)
    mine, theirs = Evaluation(TASKS), Evaluation(TASKS)
    add(mine, slice(0, cut))
    if cut < 9:
        add(theirs, slice(cut, 9))
    assert mine.errors.compute()["mse"] == pytest.approx({"stsb": expected()["stsb/mse"]})
    for task in TASKS:
        for name, metric in mine._of(task.name).items():
            metric.distributed_available_fn = lambda: True
            twin = theirs._of(task.name)[name]
            states = [getattr(twin, state) for state in twin._reductions]
            other = [  # an empty list is sent as an empty tensor
                (torch.cat(state) if state else torch.tensor([])) if isinstance(state, list) else state
                for state in states
            ]
            other = [value.double() if value.is_floating_point() else value for value in other]
            assert float(metric.compute()) == pytest.approx(expected()[f"{task.name}/{name}"], abs=1e-6), name


CONSTANT: list[tuple[TaskSpec, torch.Tensor, torch.Tensor]] = [
    (BINARY, torch.full((10,), 4.0), torch.tensor([1.0] * 7 + [0.0] * 3)),
    (BINARY, torch.full((10,), -4.0), torch.tensor([1.0] * 7 + [0.0] * 3)),
    (BINARY, torch.linspace(-1, 1, 10), torch.ones(10)),
    (BINARY, torch.full((10,), 4.0), torch.ones(10)),
    (CLASSES, torch.tensor([[0.0, 1.0, 0.0]] * 4), torch.tensor([0, 1, 2, 1])),
    (REAL, torch.full((3,), 0.1), torch.tensor([1.0, 2.0, 4.0])),
    (REAL, torch.tensor([1.0, 2.0, 4.0]), torch.full((3,), 0.1)),
    (REAL, torch.tensor([1.0]), torch.tensor([2.0])),
]


@pytest.mark.parametrize(("task", "prediction", "target"), CONSTANT)
def test_correlation_with_a_constant_is_zero(task: TaskSpec, prediction: torch.Tensor, target: torch.Tensor) -> None:
    correlations = tuple(name for name in task.metrics if name in ("matthews", "pearson", "spearman"))
    evaluation = Evaluation([TaskSpec("x", task.kind, task.num_classes, metrics=correlations)])
    evaluation.update({"x": prediction}, {"x": target})
    found = evaluation.compute()
    assert {found[f"x/{name}"] for name in correlations} == {0.0}


def test_opposite_and_equal_predictions() -> None:
    values = 1e6 + torch.arange(5.0)  # a large mean
    for sign in (1.0, -1.0):
        evaluation = Evaluation([REAL])
        evaluation.update({"stsb": sign * values}, {"stsb": values})
        found = evaluation.compute()
        assert [found["stsb/pearson"], found["stsb/spearman"]] == pytest.approx([sign, sign], abs=1e-12)
    evaluation = Evaluation([BINARY])
    evaluation.update({"cola": torch.tensor([1.0, -1.0])}, {"cola": torch.tensor([0.0, 1.0])})
    assert evaluation.compute()["cola/matthews"] == pytest.approx(-1.0)


def test_without_names_the_metrics_are_those_of_the_kind() -> None:
    names = Evaluation([TaskSpec("a", "binary"), TaskSpec("b", "multiclass", 3), TaskSpec("c", "regression")]).names()
    assert names == ["loss", "a/loss", "a/auroc", "a/accuracy", "b/loss", "b/accuracy", "c/loss", "c/mse"]


@pytest.mark.parametrize(
    ("tasks", "names"),
    [
        ([BINARY, REAL], ["average", "small_average"]),
        ([CLASSES, REAL], ["average"]),
        ([BINARY, TaskSpec("x", "binary")], []),  # not every task names its metrics
        ([BINARY, TaskSpec("x", "regression", metrics=("mse", "pearson"))], []),  # of mse, lower is better
    ],
)
def test_averages_are_there_only_if_they_mean_something(tasks: list[TaskSpec], names: list[str]) -> None:
    evaluation = Evaluation(tasks)
    add(evaluation, slice(0, 9))
    whole = [name for name in evaluation.names() if "/" not in name]
    assert whole == ["loss", *names]
    assert [name for name in evaluation.compute() if "/" not in name] == whole
    optimizer: Callable[..., Any] = torch.optim.SGD
    logged = MultiTaskModule(torch.nn.Linear(1, 1), tasks, optimizer).logged_names()
    assert [name for name in logged if "average" in name] == [f"val/{name}" for name in names]


def test_tasks_without_labels_are_left_out_of_the_averages() -> None:
    evaluation = Evaluation([BINARY, REAL])
    evaluation.update({"stsb": torch.tensor([1.0, 2.0])}, {"stsb": torch.tensor([1.0, 3.0])})
    found = evaluation.compute()
    assert found["average"] == found["stsb/pearson"] == pytest.approx(1.0)
    assert "small_average" not in found


def test_every_metric_that_a_task_may_name_is_built() -> None:
    built = {kind: set(builders) for kind, builders in BUILDERS.items()}
    built["regression"] |= set(errors.ERRORS)
    assert built == {kind: set(names) for kind, names in METRICS.items()}


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("regression", ("accuracy",), "a regression task has mse, mae, .*; not accuracy"),
        ("binary", ("f1", "mathews"), "a binary task has auroc, auprc, .*; not mathews"),
        ("binary", ("pearson", "macro_f1"), "not pearson, macro_f1"),
    ],
)
def test_metrics_that_do_not_fit_give_one_message(kind: Any, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=f"task 'x': metrics=.*{message}"):
        TaskSpec("x", kind, metrics=names)
