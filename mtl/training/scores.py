"""Metrics that torchmetrics lacks, or for which it returns a number where they are undefined: here they are NaN then.

Each class that can be undefined says in ``needs`` what it needs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, MulticlassAUROC
from torchmetrics.utilities import dim_zero_cat

from mtl.training.correlation import Pearson


class AUROC(BinaryAUROC):
    """Area under the curve of the true positive rate over the false positive rate."""

    needs = "positive and negative labels"

    def compute(self) -> Tensor:  # type: ignore[override]  # torchmetrics' own differs from its base class
        target = dim_zero_cat(self.target)
        return super().compute() if 0 < target.sum() < len(target) else torch.tensor(torch.nan)


class AveragePrecision(BinaryAveragePrecision):
    """Area under the curve of precision over recall, without interpolation: the sum of precision * rise of recall."""

    needs = "a positive label"

    def compute(self) -> Tensor:  # type: ignore[override]  # torchmetrics' own differs from its base class
        return super().compute() if dim_zero_cat(self.target).sum() > 0 else torch.tensor(torch.nan)


class OneVersusRestAUROC(MulticlassAUROC):
    """Mean over the classes of the AUROC of each against all others; classes that no row has are left out."""

    needs = "labels of at least two classes"

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__(num_classes, average="none", **options)

    def compute(self) -> Tensor:  # type: ignore[override]  # torchmetrics' own differs from its base class
        counts = dim_zero_cat(self.target).bincount(minlength=self.num_classes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the classes that are left out
            values: Tensor = super().compute()
        return values[(counts > 0) & (counts < counts.sum())].mean()  # of no classes: NaN


class RowMean(Metric):
    """Base of metrics that are the mean over all rows of a value of each row, in float64."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, num_classes: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def each(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the value of each row ``[B]``, from probabilities (``[B]`` or ``[B, C]``) and labels ``[B]``."""
        raise NotImplementedError

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add the rows of a batch, as ``each`` takes them."""
        self.total += self.each(predictions, targets).double().sum()
        self.count += len(targets)

    def compute(self) -> Tensor:
        return self.total / self.count


class LogLoss(RowMean):
    """Mean of -log p, with p the predicted probability of the label, at least 2.2e-16."""

    higher_is_better = False

    def each(self, predictions: Tensor, targets: Tensor) -> Tensor:
        classes = predictions if predictions.dim() == 2 else torch.stack([1 - predictions, predictions], 1)
        chosen = classes.gather(1, targets[:, None])[:, 0]
        return -chosen.clamp(min=torch.finfo(torch.float64).eps).log()


class BaseRate(RowMean):
    """Share of positive labels: the precision of calling every row positive."""

    def each(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return targets


class R2(Pearson):
    """Share of the labels' variance that the predictions explain, 1 - sum (t - p)^2 / sum (t - mean)^2.

    Keeps all rows; torchmetrics takes labels of a small scale for constant ones.
    """

    needs = "labels that differ"

    def compute(self) -> Tensor:
        predictions, targets = dim_zero_cat(self.predictions), dim_zero_cat(self.targets)
        if bool(targets.min() == targets.max()):
            return torch.tensor(torch.nan)
        unexplained: Tensor = (targets - predictions).square().sum() / (targets - targets.mean()).square().sum()
        return 1 - unexplained
