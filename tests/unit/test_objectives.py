"""Losses by task: by hand and from scikit-learn, missing labels, weights, units, quantiles; means of tasks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mtl.objectives import LOSSES
from mtl.predictions import columns, to_predictions
from mtl.training.distillation import prediction_losses
from mtl.training.epoch import LossMeter
from mtl.training.evaluation import Evaluation
from mtl.training.losses import task_loss_sums
from mtl.types import MISSING_CLASS, TaskSpec
from tests.losses import summed_loss

NAN = math.nan
# Labels and predictions in the units of the labels, and weights of the rows; the third row has no label
LABELS, VALUES, WEIGHTS = [0.5, 2.0, NAN, 7.0, 1.0], [1.0, 1.5, 9.0, 2.0, 4.0], [1.0, 2.0, 5.0, 0.5, 3.0]
QUANTILES = {"loss": "quantile", "quantiles": (0.1, 0.5, 0.9)}
# Sums of weights times losses: scikit-learn 1.9.1's weighted means times 6.5, the sum of the weights; Huber by hand:
# |e| = 0.5, 0.5, 5, 3 and delta = 2 give 0.125, 0.125, 8, 4
GOLDEN: dict[str, tuple[dict[str, Any], float]] = {
    "mae": ({"loss": "mae"}, 2.0 * 6.5),
    "huber": ({"loss": "huber", "delta": 2.0}, 0.125 + 2 * 0.125 + 0.5 * 8 + 3 * 4),
    "poisson": ({"loss": "poisson"}, 1.0815295393694255 * 6.5),
    "one quantile": ({"loss": "quantile", "quantiles": (0.9,)}, 0.6307692307692307 * 6.5),
    "quantiles": (QUANTILES, (1.3692307692307695 + 1.0 + 0.6307692307692307) / 3 * 6.5),
    "log": ({"transform": "log"}, sum(w * math.log(x) ** 2 for x, w in ((2, 1), (0.75, 2), (3.5, 0.5), (4, 3)))),
}


def predicted(task: TaskSpec) -> torch.Tensor:
    """Return what a network would predict for VALUES, with gradients."""
    standard = task.standardize(torch.tensor(VALUES))
    return (standard if task.outputs == 1 else standard[:, None].repeat(1, task.outputs)).requires_grad_()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values_of_regressions(name: str) -> None:
    """Of a task in its own units; with another scale, the loss is that in standard units."""
    options, golden = GOLDEN[name]
    task, label, weight = TaskSpec("y", "regression", **options), torch.tensor(LABELS).double(), torch.tensor(WEIGHTS)
    prediction = predicted(task)
    total, count = summed_loss(task, prediction, label, weight)
    assert (float(total.detach()), int(count)) == (pytest.approx(golden, rel=1e-6), 4)
    total.backward()
    assert (prediction.grad[2] == 0).all()
    assert (prediction.grad[[0, 1, 3, 4]] != 0).all()
    if task.is_log:
        return
    scaled = TaskSpec("y", "regression", mean=3.0, std=2.0, **options)
    again = summed_loss(scaled, predicted(scaled), label, weight)[0]
    own = {**options, "delta": 4.0} if name == "huber" else options  # delta is in standard units
    expected = summed_loss(TaskSpec("y", "regression", **own), prediction, label, weight)[0]
    torch.testing.assert_close(again, expected / (4 if name == "huber" else 2))


def test_a_poisson_loss_does_not_depend_on_the_unit() -> None:
    """Counts a thousand times as large have the same loss if the mean is, and metrics in their own units."""
    task = TaskSpec("y", "regression", metrics=("mae",), loss="poisson", mean=math.log(1000))
    plain = TaskSpec("y", "regression", loss="poisson")
    label, z = torch.tensor([0.0, 2.0, NAN]), torch.tensor([0.3, -0.2, 1.0])
    assert float(summed_loss(task, z, label * 1000)[0]) == pytest.approx(
        float(summed_loss(plain, z, label)[0]), rel=1e-6
    )
    evaluation = Evaluation([task])
    evaluation.update({"y": z}, {"y": label * 1000})
    expected = 1000 * (math.exp(0.3) + abs(math.exp(-0.2) - 2)) / 2
    assert evaluation.compute()["y/mae"] == pytest.approx(expected, rel=1e-6)


LOGITS = [0.3, -2.0, 1.0]
BINARY_LABELS = [1.0, 0.0, NAN]


def test_golden_values_of_classes() -> None:
    p, q = 1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(-2.0))  # of the labels of both rows
    logits, labels = torch.tensor(LOGITS).double(), torch.tensor(BINARY_LABELS)
    focal = TaskSpec("y", "binary", loss="focal", gamma=1.5, pos_weight=3.0)
    expected = -3 * (1 - p) ** 1.5 * math.log(p) - (1 - q) ** 1.5 * math.log(q)
    assert float(summed_loss(focal, logits, labels)[0]) == pytest.approx(expected)
    smooth = TaskSpec("y", "binary", smoothing=0.2)
    expected = -sum(0.9 * math.log(x) + 0.1 * math.log(1 - x) for x in (p, q))
    assert float(summed_loss(smooth, logits, labels)[0]) == pytest.approx(expected)
    scores = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]]).double()
    r = math.exp(1) / (1 + math.exp(1) + math.exp(2))
    focal = TaskSpec("y", "multiclass", 3, loss="focal", gamma=2.0, class_weights=(1.0, 4.0, 1.0))
    labels = torch.tensor([1, MISSING_CLASS])
    assert float(summed_loss(focal, scores, labels)[0]) == pytest.approx(-4 * (1 - r) ** 2 * math.log(r))
    smooth = TaskSpec("y", "multiclass", 3, smoothing=0.3)
    others = math.log(r / math.e) + math.log(r * math.e)
    assert float(summed_loss(smooth, scores, labels)[0]) == pytest.approx(-0.8 * math.log(r) - 0.1 * others)


def test_weights_multiply_the_whole_smoothed_loss_of_a_row() -> None:
    """So the best prediction for a row does not depend on its weight."""
    options: dict[str, Any] = {"smoothing": 0.2}
    logits, labels = torch.tensor(LOGITS).double(), torch.tensor([1.0, 0.0, 0.0])
    plain, own = (TaskSpec("y", "binary", pos_weight=w, **options) for w in (1.0, 5.0))
    first = float(summed_loss(plain, logits[:1], labels[:1])[0])
    all_rows = [float(summed_loss(task, logits, labels)[0]) for task in (plain, own)]
    assert all_rows[1] == pytest.approx(all_rows[0] + 4 * first)
    scores, labels = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0]]).double(), torch.tensor([1, 0])
    plain, own = (TaskSpec("y", "multiclass", 3, class_weights=weights, **options) for weights in ((), (3.0, 1.0, 9.0)))
    second = float(summed_loss(plain, scores[1:], labels[1:])[0])
    all_rows = [float(summed_loss(task, scores, labels)[0]) for task in (plain, own)]
    assert all_rows[1] == pytest.approx(all_rows[0] + 2 * second)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("kind", ["binary", "multiclass"])
def test_the_gradient_of_a_focal_loss_is_finite(kind: Any, gamma: float) -> None:
    task = TaskSpec("y", kind, 2 if kind == "multiclass" else 1, loss="focal", gamma=gamma)
    logits = torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4])
    logits = (torch.stack([-logits, logits], 1) if kind == "multiclass" else logits).requires_grad_()
    label = torch.tensor([1, 0, MISSING_CLASS, 1, 1]) if kind == "multiclass" else torch.tensor([1.0, 0, NAN, 1, 1])
    summed_loss(task, logits, label)[0].backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[2] == 0).all()


def test_tasks_of_many_losses_at_once_equal_one_at_a_time() -> None:
    options = [{}, *(options for options, _ in GOLDEN.values()), {"loss": "huber"}, {"transform": "log", "loss": "mae"}]
    tasks = {str(i): TaskSpec(str(i), "regression", mean=0.5 * i, std=1.0 + i, **o) for i, o in enumerate(options)}
    tasks |= {f"c{g}": TaskSpec(f"c{g}", "binary", loss="focal", gamma=g) for g in (1.0, 2.0)}
    tasks |= {f"s{s}": TaskSpec(f"s{s}", "binary", smoothing=s) for s in (0.0, 0.1)}
    tasks |= {"classes": TaskSpec("classes", "multiclass", 3)}
    predictions = {name: torch.randn(5, *([task.outputs] if task.outputs > 1 else [])) for name, task in tasks.items()}
    targets = {n: torch.tensor([1.0, 0, NAN, 1, 1] if t.kind == "binary" else LABELS) for n, t in tasks.items()}
    targets["classes"] = torch.tensor([0, 2, MISSING_CLASS, 1, 1])
    with torch.inference_mode():  # as in the validation before training
        task_loss_sums(tasks, predictions, targets)
    names, totals, _ = task_loss_sums(tasks, {n: p.clone().requires_grad_() for n, p in predictions.items()}, targets)
    totals.sum().backward()
    assert sorted(names) == sorted(tasks)
    for name, total in zip(names, totals, strict=True):
        torch.testing.assert_close(total.detach(), summed_loss(tasks[name], predictions[name], targets[name])[0])


def test_quantiles_are_columns_that_do_not_cross() -> None:
    task = TaskSpec("price", "regression", mean=1.0, std=2.0, **QUANTILES)
    values = to_predictions(task, torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]]))
    found = {name: column.to_list() for name, column in columns(task, values).items()}
    assert found == {f"price_quantile_{q}": [v, v] for q, v in ((0.1, 1.0), (0.5, 3.0), (0.9, 5.0))}
    [name] = columns(TaskSpec("price", "regression", loss="quantile", quantiles=(0.95,)), torch.zeros(2))
    assert name == "price_quantile_0.95"


def test_metrics_of_quantiles() -> None:
    """Predictions 0, 1 and 4 of labels -1, 2, 4 and none: e = label - prediction, metrics of one value take 1."""
    task = TaskSpec("y", "regression", metrics=("pinball", "coverage", "mae", "r2"), **QUANTILES)
    evaluation = Evaluation([task])
    evaluation.update({"y": torch.tensor([[4.0, 1.0, 0.0]] * 4)}, {"y": torch.tensor([-1.0, 2.0, 4.0, NAN])})
    found = evaluation.compute()
    each = [(0.9 + 1.0 + 0.5) / 3, (0.2 + 0.5 + 0.2) / 3, (0.4 + 1.5 + 0.0) / 3]
    assert found["y/pinball"] == pytest.approx(sum(each) / 3)
    assert found["y/coverage"] == pytest.approx(2 / 3)
    assert found["y/mae"] == pytest.approx((2 + 1 + 3) / 3)
    one = TaskSpec("y", "regression", loss="quantile", quantiles=(0.9,))
    evaluation = Evaluation([one])
    evaluation.update({"y": torch.tensor([1.0, 1.0, NAN])}, {"y": torch.tensor([0.0, 2.0, NAN])})
    assert evaluation.compute()["y/coverage"] == 0.5


BINARY = TaskSpec("a", "binary", weight=0.5)
CLASSES = TaskSpec("c", "multiclass", num_classes=3)
REAL = TaskSpec("d", "regression", weight=2.0)


def target_for(task: TaskSpec, labels: list[float]) -> torch.Tensor:
    if task.kind == "multiclass":
        return torch.tensor([MISSING_CLASS if label != label else int(label) for label in labels])
    return torch.tensor(labels)


def prediction_for(task: TaskSpec, rows: int) -> torch.Tensor:
    return torch.randn(*((rows, 3) if task.kind == "multiclass" else (rows,)), requires_grad=True)


@pytest.mark.parametrize("task", [BINARY, CLASSES, REAL], ids=lambda task: task.kind)
def test_a_batch_without_labels_adds_exactly_zero(task: TaskSpec) -> None:
    prediction = prediction_for(task, 3)
    total, count = summed_loss(task, prediction, target_for(task, [NAN, NAN, NAN]))
    assert (float(total.detach()), int(count)) == (0.0, 0)
    (total / count.clamp(min=1)).backward()
    assert (prediction.grad == 0).all()


def test_auroc_keeps_the_order_of_large_logits() -> None:
    evaluation = Evaluation([BINARY])
    evaluation.update({"a": torch.tensor([20.0, 30.0])}, {"a": torch.tensor([0.0, 1.0])})
    assert evaluation.compute()["a/auroc"] == pytest.approx(1.0)


def test_half_precision_predictions_are_compared_in_float32() -> None:
    logits = torch.tensor([12.0], dtype=torch.bfloat16)
    assert summed_loss(BINARY, logits, torch.tensor([1.0]))[0].dtype == torch.float32


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_mean_over_no_labels_is_undefined(weight: float) -> None:
    """Also if the only labels are those of a task without a weight."""
    silent, other = TaskSpec("x", "regression"), TaskSpec("y", "regression", weight=weight)
    evaluation = Evaluation([silent, other])
    evaluation.update({"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.full((2,), NAN), "y": torch.zeros(2)})
    found = evaluation.compute()
    assert found["y/loss"] == 1
    assert "x/loss" not in found
    assert found["loss"] == 1 if weight else math.isnan(found["loss"])
    assert ("loss" in evaluation.undefined(found)) == (weight == 0)


def test_meter_counts_rows() -> None:
    meter = LossMeter([BINARY, REAL])
    meter.update(["d"], torch.tensor([6.0]), torch.tensor([3]))
    meter.update(["a", "d"], torch.tensor([1.0, 2.0]), torch.tensor([4, 1]))
    assert meter.compute() == pytest.approx({"loss": 0.5 * 0.25 + 2 * 2.0, "a/loss": 0.25, "d/loss": 2.0})


@pytest.mark.parametrize(
    ("kind", "loss"), [(kind, loss) for kind, losses in LOSSES.items() for loss in (None, *losses)]
)
def test_a_batch_without_rows_adds_nothing(kind: Any, loss: Any) -> None:
    """A process may get one in evaluation."""
    options: dict[str, Any] = {"quantiles": (0.1, 0.5, 0.9)} if loss == "quantile" else {}
    task = TaskSpec("y", kind, num_classes=3 if kind == "multiclass" else 1, loss=loss, **options)
    shape = (0, 7, 2) if kind == "span" else (0, task.outputs) if task.outputs > 1 else (0,)
    prediction = torch.zeros(shape, requires_grad=True)
    target = torch.zeros(0, 2).long() if kind == "span" else torch.zeros(0)
    target = target.long() if kind == "multiclass" else target
    total, count = summed_loss(task, prediction, target)
    total.backward()
    assert (total.item(), count.item(), prediction.grad.shape) == (0, 0, shape)
    assert prediction_losses(task, prediction, prediction).shape == (0,)
    if kind != "span":
        evaluation = Evaluation([task])
        evaluation.update({"y": prediction.detach()}, {"y": target})
        assert evaluation.undefined(evaluation.compute()) >= {"loss", "y/loss"}
