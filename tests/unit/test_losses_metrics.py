"""Missing labels take no part; sums do not depend on batches; each task has metrics of its own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mtl.training.evaluation import Evaluation, LossMeter
from mtl.training.losses import summed_loss
from mtl.types import MISSING_CLASS, TaskSpec

NAN = float("nan")
BINARY = TaskSpec("a", "binary", weight=0.5)
SECOND = TaskSpec("b", "binary")
CLASSES = TaskSpec("c", "multiclass", num_classes=3)
REAL = TaskSpec("d", "regression", weight=2.0)


def target_for(task: TaskSpec, labels: list[float]) -> torch.Tensor:
    if task.kind == "multiclass":
        return torch.tensor([MISSING_CLASS if label != label else int(label) for label in labels])
    return torch.tensor(labels)


def prediction_for(task: TaskSpec, rows: int) -> torch.Tensor:
    return torch.randn(*((rows, 3) if task.kind == "multiclass" else (rows,)), requires_grad=True)


@pytest.mark.parametrize("task", [BINARY, CLASSES, REAL], ids=lambda task: task.kind)
def test_missing_labels_take_no_part(task: TaskSpec) -> None:
    prediction = prediction_for(task, 4)
    total, count = summed_loss(task, prediction, target_for(task, [1, NAN, 0, NAN]))
    rest, _ = summed_loss(task, prediction[[0, 2]], target_for(task, [1, 0]))
    torch.testing.assert_close(total, rest)
    assert count == 2
    total.backward()
    assert (prediction.grad[[1, 3]] == 0).all()
    assert (prediction.grad[[0, 2]] != 0).any()


@pytest.mark.parametrize("task", [BINARY, CLASSES, REAL], ids=lambda task: task.kind)
def test_a_batch_without_labels_adds_exactly_zero(task: TaskSpec) -> None:
    prediction = prediction_for(task, 3)
    total, count = summed_loss(task, prediction, target_for(task, [NAN, NAN, NAN]))
    assert (float(total.detach()), int(count)) == (0.0, 0)
    (total / count.clamp(min=1)).backward()
    assert (prediction.grad == 0).all()


def test_losses_are_the_standard_ones() -> None:
    logits, labels = torch.tensor([0.3, -2.0]), torch.tensor([1.0, 0.0])
    expected = F.binary_cross_entropy(logits.sigmoid(), labels, reduction="sum")
    torch.testing.assert_close(summed_loss(BINARY, logits, labels)[0], expected)
    torch.testing.assert_close(summed_loss(REAL, logits, labels)[0], (logits - labels).square().sum())
    scores, classes = torch.randn(2, 3), torch.tensor([2, 0])
    expected = -(scores[0].log_softmax(-1)[2] + scores[1].log_softmax(-1)[0])
    torch.testing.assert_close(summed_loss(CLASSES, scores, classes)[0], expected)


def test_auroc_keeps_the_order_of_large_logits() -> None:
    evaluation = Evaluation([BINARY])
    evaluation.update({"a": torch.tensor([20.0, 30.0])}, {"a": torch.tensor([0.0, 1.0])})
    assert evaluation.compute()["a/auroc"] == pytest.approx(1.0)


def test_half_precision_predictions_are_compared_in_float32() -> None:
    logits = torch.tensor([12.0], dtype=torch.bfloat16)
    assert summed_loss(BINARY, logits, torch.tensor([1.0]))[0].dtype == torch.float32


def test_a_task_without_labels_is_left_out() -> None:
    evaluation = Evaluation([BINARY, REAL])
    evaluation.update({"d": torch.ones(2)}, {"d": torch.zeros(2)})
    assert evaluation.compute() == pytest.approx({"loss": 2.0, "d/loss": 1.0, "d/mse": 1.0})
    evaluation.reset()
    assert math.isnan(evaluation.compute()["loss"])


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
