"""Which rows are predicted wrongly, and pictures of them."""

from __future__ import annotations

import math

import pytest
import torch

from mtl.report.errors import Predicted, pictures_of_errors, residuals
from mtl.types import MISSING_CLASS, TaskSpec


def test_errors_are_those_of_rows_with_a_label() -> None:
    binary, number = TaskSpec("click", "binary"), TaskSpec("size", "regression")
    several = TaskSpec("kind", "multiclass", num_classes=3)
    found = Predicted.of(binary, torch.tensor([0.9, 0.2, 0.3]), torch.tensor([1.0, math.nan, 1.0]), 10)
    assert found.row.tolist() == [10, 12]
    assert torch.allclose(found.error, torch.tensor([0.1, 0.7]).double())
    chances = torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.3, 0.2]])
    found = Predicted.of(several, chances, torch.tensor([2, MISSING_CLASS]), 0)
    assert (found.row.tolist(), found.prediction.tolist()) == ([0], [1])
    assert torch.allclose(found.error, torch.tensor([0.9]).double())
    quantiles = TaskSpec("size", "regression", loss="quantile", quantiles=(0.1, 0.5, 0.9))
    found = Predicted.of(quantiles, torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([5.0]).double(), 0)
    assert found.error.tolist() == [3.0]  # of the median
    found = Predicted.of(number, torch.arange(21.0), torch.zeros(21).double(), 0)
    assert residuals([found])[0].rows == [["size", "1.0000", "5.0000", "10.0000", "15.0000", "19.0000"]]


def test_a_task_with_one_class_among_the_rows_has_no_roc() -> None:
    task = TaskSpec("_click$", "binary")
    none = Predicted.of(task, torch.linspace(0, 1, 30), torch.zeros(30), 0)
    assert [each.caption.partition(";")[0] for each in pictures_of_errors([none])] == ["Reliability"]
    both = Predicted.of(TaskSpec("buy", "binary"), torch.linspace(0, 1, 30), torch.arange(30) % 2.0, 0)
    drawn = pictures_of_errors([none, both])
    assert ["_click$" in each.caption for each in drawn] == [False, True, True]


def test_a_confusion_matrix_sums_the_rarer_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TaskSpec("kind", "multiclass", num_classes=30)
    label = torch.arange(30).repeat_interleave(torch.arange(1, 31))
    found = Predicted.of(task, torch.eye(30)[(label + 1) % 30], label, 0)
    seen = []
    monkeypatch.setattr("mtl.report.errors.picture", lambda figure, caption: seen.append(figure))
    pictures_of_errors([found])
    [axes] = [axes for axes in seen[0].axes if axes.get_ylabel() == "label"]
    assert [each.get_text() for each in axes.get_xticklabels()] == [*map(str, range(11, 30)), "11 others"]
    assert sum(int(text.get_text()) for text in axes.texts) == len(label)
