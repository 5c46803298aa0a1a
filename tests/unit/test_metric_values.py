"""All metrics against scikit-learn: with and without missing labels, in batches, in two processes; what is undefined.

The numbers were computed once, with scikit-learn 1.9.1 (correlations with SciPy, calibration by hand).
``tests/integration/test_processes.py`` compares two processes with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR, RetrievalNormalizedDCG

from mtl.checks import InputError
from mtl.objectives import OF_QUANTILES
from mtl.training.evaluation import Evaluation
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.metrics import auroc, higher_is_better, ranking, value_of
from mtl.training.module import MultiTaskModule
from mtl.types import METRICS, MISSING_CLASS, TaskSpec, metric_family
from tests.losses import summed_loss
from tests.standins import bare_network

NUMBERED = ("ndcg@2", "hit_rate@1", "precision@30%", "recall@30%", "lift@30%")
CLICK = TaskSpec("click", "binary", metrics=(*(name for name in METRICS["binary"] if "@" not in name), *NUMBERED))
GENRE = TaskSpec("genre", "multiclass", num_classes=3, metrics=METRICS["multiclass"])
STARS = TaskSpec("stars", "regression", metrics=("pearson", *(n for n in METRICS["regression"] if n != "pearson")))
PLAIN = TaskSpec("click", "binary", metrics=("matthews", "f1"), small=True)

LOGITS = torch.tensor([2.0, -1.0, 0.5, -0.5, 3.0, -2.0, 1.0, 0.5, -3.0, 40.0])
CLICKED = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 1, 0, 1])
USERS = torch.tensor([7, 3, 3, 3, 7, 7, 5, 5, 9, 5])
SCORES = [[2.0, 0.0, -1.0], [0.0, 1.0, 0.5], [0.2, 0.1, 1.5], [-1.0, 0.3, 0.4], [0.0, 3.0, 1.0]]
SCORES += [[1.0, 0.5, 0.0], [-0.5, 0.6, 0.1], [0.0, 2.0, 1.0], [1.5, -1.0, 0.0], [0.3, 0.2, 0.1]]
GENRES = torch.tensor([0, 1, 2, 1, 1, 2, 0, 2, 0, 0])
VALUES = torch.tensor([1.0, 2.0, 2.0, 3.0, 0.5, 9.0, 4.0, 2.0, 1.0, -3.0])
TRUTH = torch.tensor([0.0, 2.5, 2.5, 5.0, 1.0, 7.0, 3.0, 1.0, 0.0, -2.0])
WEIGHTS = torch.tensor([1, 2, 0.5, 3, 1, 4, 0, 2, 1, 1.5])
UNLABELLED = [5, 9]

EXPECTED: dict[str, tuple[float, float]] = {  # with all labels, and with some
    "click/auroc": (0.9375, 0.9),
    "click/auprc": (0.9484126984126984, 0.9266666666666665),
    "click/accuracy": (0.8, 0.75),
    "click/f1": (0.8333333333333334, 0.8),
    "click/matthews": (0.5833333333333334, 0.4666666666666667),
    "click/ece": (0.17385184267449227, 0.20241443809035065),
    "click/logloss": (0.33997850528101947, 0.40910713022090284),
    "click/base_rate": (0.6, 0.625),
    "click/ndcg@2": (0.8769765845238191, 0.8769765845238191),
    "click/hit_rate@1": (0.6666666666666666, 0.6666666666666666),
    "click/mrr": (0.8333333333333334, 0.8333333333333334),
    "click/normalized_entropy": (0.5051598983295835, 0.6183945942341004),
    "click/calibration_ratio": (0.9370765552003092, 0.9006512818359476),
    "click/precision@30%": (1.0, 1.0),
    "click/recall@30%": (0.5, 0.4),
    "click/lift@30%": (1.6666666666666667, 1.6),
    "click/gauc": (0.75, 0.5),
    "genre/accuracy": (0.6, 0.625),
    "genre/macro_f1": (0.5738095238095239, 0.6238095238095238),
    "genre/matthews": (0.40004734568283135, 0.43915503282683993),
    "genre/auroc": (0.753968253968254, 0.7833333333333333),
    "genre/ece": (0.24959908172908557, 0.1695844784182659),
    "genre/logloss": (0.8422799397131142, 0.7175733597825202),
    "stars/mse": (1.375, 1.09375),
    "stars/mae": (1.05, 0.9375),
    "stars/rmse": (1.1726039399558574, 1.0458250331675945),
    "stars/r2": (0.7764227642276422, 0.5705521472392638),
    "stars/pearson": (0.9166410449018458, 0.7615732145028105),
    "stars/spearman": (0.9192723907499134, 0.83756543735604),
    "click/loss": (0.35723509664933617, 0.4960047144969037),  # weighted
    "genre/loss": (0.9883298111538887, 0.7227889546239442),  # weighted
    "stars/loss": (2.1484375, 1.6071428571428572),  # weighted
}
LABELS = ("all labels", "missing labels")


def expected(labels: str) -> dict[str, float]:
    return {name: values[LABELS.index(labels)] for name, values in EXPECTED.items()}


def evaluation_of(labels: str, parts: list[list[int]]) -> Evaluation:
    """Return the evaluation of the rows ``parts``, one batch each, with all labels or without some."""
    missing = torch.tensor([labels == "missing labels" and row in UNLABELLED for row in range(10)])
    targets = {"click": CLICKED.masked_fill(missing, math.nan), "genre": GENRES.masked_fill(missing, MISSING_CLASS)}
    targets["stars"] = TRUTH.masked_fill(missing, math.nan)
    predictions = {"click": LOGITS, "genre": torch.tensor(SCORES), "stars": VALUES}
    weights = dict.fromkeys(targets, WEIGHTS / WEIGHTS[~missing].mean())
    evaluation = Evaluation([CLICK, GENRE, STARS])
    for rows in parts:
        own = ({name: value[rows] for name, value in part.items()} for part in (predictions, targets, weights))
        predicted, target, weight = own
        evaluation.update(predicted, target, weights=weight, groups=USERS[rows])
    return evaluation


def check_values(found: dict[str, float], labels: str) -> None:
    assert {name: found[name] for name in EXPECTED} == pytest.approx(expected(labels), abs=1e-6)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("parts", [[[*range(10)]], [[9, 3], [5], [], [0, 1, 2, 4, 6], [8, 7]]], ids=["one", "batches"])
def test_values(labels: str, parts: list[list[int]]) -> None:
    evaluation = evaluation_of(labels, parts)
    found = evaluation.compute()
    check_values(found, labels)
    assert set(found) == set(evaluation.names())
    assert evaluation.undefined(found) == set()
    named = {(task.kind, metric_family(name)) for task in (CLICK, GENRE, STARS) for name in task.metrics}
    assert named == {(kind, name) for kind, names in METRICS.items() for name in names if kind != "span"}  # all of them


def one_task(task: TaskSpec, prediction: Any, target: Any, **more: Any) -> tuple[dict[str, float], set[str]]:
    """Return the metrics of a task, and which are undefined."""
    evaluation = Evaluation([task])
    evaluation.update({task.name: torch.tensor(prediction)}, {task.name: torch.tensor(target)}, **more)
    found = evaluation.compute()
    return found, evaluation.undefined(found)


NO_POSITIVE = ("ndcg@2", "hit_rate@1", "mrr", "calibration_ratio", "recall@30%", "lift@30%")
UNDEFINED: list[tuple[TaskSpec, Any, Any, set[str]]] = [
    (CLICK, [0.5, -1.0], [0.0, 0.0], {*("auroc", "auprc", "normalized_entropy", "gauc"), *NO_POSITIVE}),
    (CLICK, [0.5, -1.0], [1.0, 1.0], {"auroc", "normalized_entropy", "gauc"}),
    (GENRE, [[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]], [1, 1], {"auroc"}),
    (STARS, [1.0, 2.0], [3.0, 3.0], {"r2"}),
    (STARS, [1.0], [3.0], {"r2"}),
]


@pytest.mark.parametrize(("task", "prediction", "target", "names"), UNDEFINED)
def test_undefined_metrics_are_nan(task: TaskSpec, prediction: Any, target: Any, names: set[str]) -> None:
    """And give no warning, which would be an error here."""
    found, undefined = one_task(task, prediction, target, groups=torch.zeros(len(target), dtype=torch.int64))
    nan = {name for name, value in found.items() if math.isnan(value)}
    assert {name.partition("/")[2] for name in nan if "/" in name} == names
    assert undefined == nan


def test_classes_that_do_not_occur_and_labels_of_a_small_scale() -> None:
    found, undefined = one_task(GENRE, SCORES[:5], [0, 1, 0, 1, 1])
    assert not undefined
    assert found["genre/auroc"] == pytest.approx((5 / 6 + 1) / 2)  # of class 0, one of the six pairs is in wrong order
    found, _ = one_task(STARS, [1e-4, 2e-4, 3e-4], [1e-4, 2e-4, 4e-4])
    assert found["stars/r2"] == pytest.approx(1 - 1 / (14 / 3))  # which is not taken for constant


def ranked(name: str, predictions: list[float], targets: list[int], groups: list[int], k: int | None = None) -> float:
    rows = LabeledPredictions(torch.tensor(predictions).double(), torch.tensor(targets), groups=torch.tensor(groups))
    return float(ranking(rows, name, k))


@pytest.mark.parametrize(
    ("name", "k", "theirs"),
    [
        ("ndcg", 3, RetrievalNormalizedDCG),
        ("ndcg", 99, RetrievalNormalizedDCG),
        ("hit_rate", 2, RetrievalHitRate),
        ("mrr", None, RetrievalMRR),
    ],
)
def test_ranking_of_torchmetrics(name: str, k: int | None, theirs: Any) -> None:
    scores, groups = torch.rand(200), torch.randint(-1, 30, (200,))  # -1: of no group
    labels, own = (torch.rand(200) < 0.2).long(), groups >= 0
    metric = theirs(top_k=k, empty_target_action="skip")
    metric.update(scores[own], labels[own], indexes=groups[own])
    assert ranked(name, scores.tolist(), labels.tolist(), groups.tolist(), k) == pytest.approx(float(metric.compute()))


def test_grouped_auroc_is_the_weighted_mean_over_the_groups() -> None:
    scores, groups = torch.randint(6, (300,)).double() / 5, torch.randint(-1, 25, (300,))  # with ties
    labels, sums = (torch.rand(300) < 0.3).long(), np.zeros(2)
    for group in range(25):
        own = groups == group
        if 0 < labels[own].sum() < own.sum():
            sums += np.array([float(auroc(scores[own], labels[own])), 1.0]) * int(own.sum())
    rows = LabeledPredictions(scores, labels, groups=groups)
    assert value_of("binary", "gauc", rows) == pytest.approx(sums[0] / sums[1])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_equal_predictions_are_no_merit(order: list[int]) -> None:
    labels = [[1, 0, 0][row] for row in order]
    assert ranked("mrr", [0.5] * 3, labels, [0] * 3) == pytest.approx(1 / 3)
    assert ranked("hit_rate", [0.5] * 3, labels, [0] * 3, 2) == 0


@pytest.mark.parametrize("logit", [-5.92, -3.85, 0.3, 40.0])
def test_equal_logits_are_equal_predictions(logit: float) -> None:
    """torch.sigmoid may give the last few numbers of a tensor another last bit."""
    labels = torch.arange(1003) % 3 == 0
    evaluation = Evaluation([CLICK])
    evaluation.update({"click": torch.full((1003,), logit)}, {"click": labels.float()}, groups=torch.zeros(1003).long())
    assert evaluation.compute()["click/auroc"] == 0.5


def test_ranking_needs_groups() -> None:
    with pytest.raises(InputError, match="task 'click': mrr ranks the rows of each group; the data have no groups"):
        one_task(CLICK, [1.0], [1.0])


def test_pos_weight_multiplies_the_loss_of_positives() -> None:
    tasks = [TaskSpec("a", "binary"), TaskSpec("a", "binary", pos_weight=3.0)]
    (plain, count), (weighted, same) = (summed_loss(task, LOGITS, CLICKED) for task in tasks)
    positives = F.softplus(-LOGITS[CLICKED == 1]).sum()
    torch.testing.assert_close(weighted, plain + 2 * positives)
    assert count == same == 10
    own = TaskSpec("a", "binary", pos_weight=3.0, metrics=("logloss",))
    found, _ = one_task(own, LOGITS.tolist(), CLICKED.tolist())
    assert found["a/loss"] == pytest.approx(float(weighted) / 10)
    assert found["a/logloss"] == pytest.approx(float(plain) / 10)  # metrics are without weights


def test_direction_of_every_metric() -> None:
    everything = {name.replace("@K", "@5") for names in [*METRICS.values(), OF_QUANTILES] for name in names}
    lower = {"logloss", "normalized_entropy", "ece", "mse", "mae", "rmse", "pinball"}
    better = {name: higher_is_better(f"val/x/{name}") for name in everything | {"loss"}}
    assert {name for name, higher in better.items() if higher is None} == {
        *("base_rate", "calibration_ratio", "coverage")
    }
    assert {name for name, higher in better.items() if higher is False} == lower | {"loss"}
    assert (higher_is_better("val/average"), higher_is_better("val/experts_per_sample")) == (True, None)


CONSTANT: list[tuple[TaskSpec, Tensor, Tensor]] = [
    (CLICK, torch.full((10,), 4.0), torch.tensor([1.0] * 7 + [0.0] * 3)),
    (CLICK, torch.full((10,), -4.0), torch.tensor([1.0] * 7 + [0.0] * 3)),
    (CLICK, torch.linspace(-1, 1, 10), torch.ones(10)),
    (CLICK, torch.full((10,), 4.0), torch.ones(10)),
    (GENRE, torch.tensor([[0.0, 1.0, 0.0]] * 4), torch.tensor([0, 1, 2, 1])),
    (STARS, torch.full((3,), 0.1), torch.tensor([1.0, 2.0, 4.0])),
    (STARS, torch.tensor([1.0, 2.0, 4.0]), torch.full((3,), 0.1)),
    (STARS, torch.tensor([1.0]), torch.tensor([2.0])),
]


@pytest.mark.parametrize(("task", "prediction", "target"), CONSTANT)
def test_correlation_with_a_constant_is_zero(task: TaskSpec, prediction: Tensor, target: Tensor) -> None:
    correlations = tuple(name for name in task.metrics if name in ("matthews", "pearson", "spearman"))
    evaluation = Evaluation([TaskSpec("x", task.kind, task.num_classes, metrics=correlations)])
    evaluation.update({"x": prediction}, {"x": target})
    found = evaluation.compute()
    assert {found[f"x/{name}"] for name in correlations} == {0.0}


def test_without_names_the_metrics_are_those_of_the_kind() -> None:
    names = Evaluation([TaskSpec("a", "binary"), TaskSpec("b", "multiclass", 3), TaskSpec("c", "regression")]).names()
    assert names == ["loss", "a/loss", "a/auroc", "a/accuracy", "b/loss", "b/accuracy", "c/loss", "c/mse"]


@pytest.mark.parametrize(
    ("tasks", "names"),
    [
        ([PLAIN, STARS], ["average", "small_average"]),
        ([GENRE, STARS], ["average"]),
        ([PLAIN, TaskSpec("x", "binary")], []),  # not every task names its metrics
        ([PLAIN, TaskSpec("x", "regression", metrics=("mse", "pearson"))], []),  # of mse, lower is better
    ],
)
def test_averages_are_there_only_if_they_mean_something(tasks: list[TaskSpec], names: list[str]) -> None:
    evaluation = Evaluation(tasks)
    predictions = {"click": LOGITS, "genre": torch.tensor(SCORES), "stars": VALUES, "x": VALUES}
    targets = {"click": CLICKED, "genre": GENRES, "stars": TRUTH, "x": CLICKED}
    used = [task.name for task in tasks]
    evaluation.update({name: predictions[name] for name in used}, {name: targets[name] for name in used})
    whole = [name for name in evaluation.names() if "/" not in name]
    assert whole == ["loss", *names]
    assert [name for name in evaluation.compute() if "/" not in name] == whole
    optimizer: Callable[..., Any] = torch.optim.SGD
    logged = MultiTaskModule(bare_network(), tasks, optimizer).logged_names()
    assert [name for name in logged if "average" in name] == [f"val/{name}" for name in names]


def test_tasks_without_labels_are_left_out_of_the_averages() -> None:
    evaluation = Evaluation([PLAIN, STARS])
    evaluation.update({"stars": torch.tensor([1.0, 2.0])}, {"stars": torch.tensor([1.0, 3.0])})
    found = evaluation.compute()
    assert found["average"] == found["stars/pearson"] == pytest.approx(1.0)
    assert "small_average" not in found


WEIGHTS_OF = [{"pos_weight": 0.0}, {"pos_weight": math.inf}, {"kind": "regression", "pos_weight": 2.0}]
UNITS = [{"std": 0}, {"std": math.nan}, {"mean": math.inf}, {"kind": "binary", "std": 2}]
CLASS_WEIGHTS = [("binary", 1, (1.0, 2.0)), ("multiclass", 3, (1.0, 2.0)), ("multiclass", 2, (1.0, -2.0))]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "regression", "metrics": ("accuracy",)}, "metrics=.*a regression task has mse, mae, .*; not accuracy"),
    ({"metrics": ("f1", "mathews")}, "metrics=.*a binary task has auroc, auprc, .*; not mathews"),
    *((options, "pos_weight=") for options in WEIGHTS_OF),
    *(({"kind": "regression"} | options, "mean=") for options in UNITS),
    ({"loss": "quantile", "quantiles": (0.5,)}, "loss=quantile is for kind=regression, not binary"),
    ({"kind": "regression", "loss": "quantile"}, "loss=quantile needs quantiles"),
    ({"kind": "regression", "loss": "quantile", "quantiles": (0.9, 0.1)}, "must ascend between 0 and 1"),
    ({"kind": "regression", "loss": "hubr"}, "loss=hubr is for kind=no task"),
    ({"transform": "log"}, "transform=log is for kind=regression, not binary"),
    *(({"kind": k, "num_classes": c, "class_weights": w}, "class_weights=") for k, c, w in CLASS_WEIGHTS),
    *((options, "") for options in ({"kind": "ranking"}, {"weight": -1.0}, {"num_classes": 4}, {"kind": "multiclass"})),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_impossible_tasks_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"task 'x'.*{message}"):
        TaskSpec(**{"name": "x", "kind": "binary"} | options)
