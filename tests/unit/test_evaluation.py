"""Evaluation at its edges: what a run meets only once its data is uneven."""

from __future__ import annotations

import pytest
import torch

from mtl.training.evaluation import Evaluation
from mtl.types import MISSING_CLASS, TaskSpec

TASKS = [
    TaskSpec("click", "binary"),
    TaskSpec("kind", "multiclass", num_classes=3),
    TaskSpec("seconds", "regression"),
    TaskSpec("buy", "binary"),
]


def test_auroc_counts_pairs_and_ties_as_half() -> None:
    scores, labels = torch.randint(-3, 4, (60,)).float() / 2, torch.randint(2, (60,)).float()
    pairs = [(a, b) for a in scores[labels == 1].tolist() for b in scores[labels == 0].tolist()]
    expected = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    evaluation = Evaluation([TASKS[0]])
    for start in range(0, 60, 7):
        evaluation.update({"click": scores[start : start + 7]}, {"click": labels[start : start + 7]})
    assert evaluation.compute()["click/auroc"] == pytest.approx(expected, abs=1e-6)


def test_a_batch_of_small_logits_is_not_taken_for_probabilities() -> None:
    """Logits in [0, 1] look like probabilities; ranked beside another batch's, they must be logits all the same."""
    evaluation = Evaluation([TASKS[0]])
    evaluation.update({"click": torch.tensor([0.2, 0.3])}, {"click": torch.tensor([1.0, 1.0])})
    evaluation.update({"click": torch.tensor([-0.3, -2.0])}, {"click": torch.tensor([0.0, 0.0])})
    result = evaluation.compute()
    assert result["click/auroc"] == pytest.approx(1.0)
    assert result["click/accuracy"] == pytest.approx(1.0)


def test_uneven_missing_labels_and_splits() -> None:
    """Means are over labelled rows of the whole pass, so a batch with few or no labels must not weigh as much."""
    scores, values = torch.randn(12, 3), torch.randn(12)
    classes = torch.tensor([0, 1, 2, 0, *[MISSING_CLASS] * 7, 1])
    real = torch.tensor([float("nan")] * 5 + [1.0, 2.0, 3.0, 4.0] + [float("nan")] * 3)
    known, seen = classes != MISSING_CLASS, ~real.isnan()
    expected = {
        "kind/accuracy": float((scores.argmax(-1) == classes)[known].float().mean()),
        "kind/loss": float(-scores.log_softmax(-1)[known, classes[known]].mean()),
        "seconds/loss": float((values - real)[seen].square().mean()),
    }
    for splits in ([12], [4, 4, 4], [1, 11], [5, 6, 1]):
        evaluation, start = Evaluation(TASKS), 0
        for size in splits:
            part = slice(start, start + size)
            predictions = {"kind": scores[part], "seconds": values[part]}
            evaluation.update(predictions, {"kind": classes[part], "seconds": real[part]})
            start += size
        result = evaluation.compute()
        assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert result["seconds/mse"] == pytest.approx(expected["seconds/loss"], rel=1e-5)
