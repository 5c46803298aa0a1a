"""Correlations of predictions with labels, as GLUE defines them: the correlation with a constant is 0.

torchmetrics has the same metrics, but its Matthews correlation of a constant prediction is not 0 (issue 3355), its
Pearson correlation of a constant is NaN, and it computes in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryConfusionMatrix, MulticlassConfusionMatrix
from torchmetrics.utilities import dim_zero_cat


def matthews(confusion: Tensor) -> Tensor:
    """Return the Matthews correlation of ``confusion [C, C]``: rows by label, columns by predicted class.

    With n rows, c of them correct, t labels and p predictions by class, it is
    (c n - t p) / sqrt((n^2 - p p) (n^2 - t t)) (Gorodkin 2004).
    """
    counts = confusion.double()
    rows, correct, labels, predicted = counts.sum(), counts.trace(), counts.sum(1), counts.sum(0)
    spread = (rows**2 - predicted @ predicted) * (rows**2 - labels @ labels)
    correlation: Tensor = (correct * rows - labels @ predicted) / spread.clamp(min=1).sqrt()
    return torch.where(spread > 0, correlation, 0.0)


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Return the Pearson correlation of ``x [N]`` and ``y [N]``."""
    if bool(x.min() == x.max()) or bool(y.min() == y.max()):
        return x.new_zeros(())
    x, y = x - x.mean(), y - y.mean()
    correlation: Tensor = (x / x.norm()) @ (y / y.norm())
    return correlation


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each of ``values [N]``, from 1; equal values share the mean of their ranks."""
    _, index, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    mean: Tensor = last - (counts - 1) / 2
    return mean[index].to(values.dtype)


class BinaryMatthews(BinaryConfusionMatrix):
    """Matthews correlation of the labels with the predictions, by a threshold of 0.5."""

    higher_is_better = True

    def compute(self) -> Tensor:
        return matthews(self.confmat)


class MulticlassMatthews(MulticlassConfusionMatrix):
    """Matthews correlation of the labels with the most probable classes."""

    higher_is_better = True

    def compute(self) -> Tensor:
        return matthews(self.confmat)


class Pearson(Metric):
    """Pearson correlation. Keeps all rows: a sum of products would lose digits where the mean is large."""

    higher_is_better = True
    full_state_update = False
    predictions: list[Tensor]
    targets: list[Tensor]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("predictions", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add ``predictions [B]`` and ``targets [B]``."""
        self.predictions.append(predictions)
        self.targets.append(targets)

    def compute(self) -> Tensor:
        return pearson(dim_zero_cat(self.predictions), dim_zero_cat(self.targets))


class Spearman(Pearson):
    """Spearman correlation: the Pearson correlation of the ranks."""

    def compute(self) -> Tensor:
        return pearson(ranks(dim_zero_cat(self.predictions)), ranks(dim_zero_cat(self.targets)))
