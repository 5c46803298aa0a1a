"""Which rows are predicted wrongly, and pictures of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mtl.report.errors import pictures_of_errors, recalls, residuals
from mtl.training.evaluation import Evaluation
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.types import MISSING_CLASS, TaskSpec


def predicted(task: TaskSpec, output: Tensor, target: Tensor) -> tuple[TaskSpec, LabeledPredictions]:
    """Return the labelled rows of ``target [N]`` with what ``output``, of a network, says of them."""
    evaluation = Evaluation([task])
    evaluation.update({task.name: output}, {task.name: target})
    return task, evaluation.gathered()[task.name]


def test_errors_are_those_of_rows_with_a_label() -> None:
    binary, number = TaskSpec("click", "binary"), TaskSpec("size", "regression")
    several = TaskSpec("kind", "multiclass", num_classes=3)
    _, rows = predicted(binary, torch.tensor([0.9, 0.2, 0.3]).logit(), torch.tensor([1.0, math.nan, 1.0]))
    assert rows.row_id.tolist() == [0, 2]
    assert torch.allclose(rows.error, torch.tensor([0.1, 0.7]).double())
    chances = torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.3, 0.2]])
    _, rows = predicted(several, chances.log(), torch.tensor([2, MISSING_CLASS]))
    assert (rows.row_id.tolist(), rows.prediction.tolist()) == ([0], [1])
    assert torch.allclose(rows.error, torch.tensor([0.9]).double())
    quantiles = TaskSpec("size", "regression", loss="quantile", quantiles=(0.1, 0.5, 0.9))
    _, rows = predicted(quantiles, torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([5.0]).double())
    assert rows.error.tolist() == [3.0]  # of the median
    pair = predicted(number, torch.arange(21.0), torch.zeros(21).double())
    assert residuals([pair])[0].rows == [["size", "1.0000", "5.0000", "10.0000", "15.0000", "19.0000"]]


def test_a_task_with_one_class_among_the_rows_has_no_roc() -> None:
    logits = torch.linspace(0.01, 0.99, 30).logit()
    none = predicted(TaskSpec("_click$", "binary"), logits, torch.zeros(30))
    assert [each.alt for each in pictures_of_errors([none])] == ["Reliability"]
    both = predicted(TaskSpec("buy", "binary"), logits, torch.arange(30) % 2.0)
    drawn = pictures_of_errors([none, both])
    assert ["_click$" in each.caption for each in drawn] == [False, True, True]


def test_a_confusion_matrix_sums_the_rarer_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TaskSpec("kind", "multiclass", num_classes=30)
    label = torch.arange(30).repeat_interleave(torch.arange(1, 31))
    pair = predicted(task, torch.eye(30)[(label + 1) % 30], label)
    seen = []
    monkeypatch.setattr("mtl.report.errors.picture", lambda figure, *texts: seen.append(figure))
    pictures_of_errors([pair])
    [axes] = [axes for axes in seen[0].axes if axes.get_ylabel() == "label"]
    assert [each.get_text() for each in axes.get_xticklabels()] == [*map(str, range(11, 30)), "11 others"]
    assert sum(int(text.get_text()) for text in axes.texts) == len(label)


def test_recalls_by_class_are_those_of_the_confusion_matrix() -> None:
    task = TaskSpec("kind", "multiclass", num_classes=3, classes=("a", "b", "c"))
    label, best = torch.tensor([0, 0, 0, 1, 1, MISSING_CLASS]), torch.tensor([0, 0, 1, 0, 1, 2])
    number = predicted(TaskSpec("size", "regression"), torch.zeros(1), torch.zeros(1).double())
    [table] = recalls([predicted(task, torch.eye(3)[best], label), number])
    assert table.rows == [["a", "3", "3", "0.6667"], ["b", "2", "2", "0.5000"], ["c", "0", "0", "-"]]
