"""The metrics that a task may name. They are computed from all rows of an evaluation, so batches do not matter.

Curves and calibration use torchmetrics, whose import would delay what needs names of metrics alone, such as
``mtl report``. The others are ours. Most take a line or two; three kinds differ from those of
torchmetrics. Its R2 treats labels of a small scale as constant. Its correlations with a constant are NaN, where GLUE
defines them as 0. Its ranking metrics loop over the groups in Python (NDCG of 6040 users takes 7 s, and 0.2 s here) and
break ties by the order of the rows. An undefined metric is NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import polars as pl
import scipy  # imports its parts at their first use
import torch
from torch import Tensor

from mtl.objectives import OF_QUANTILES
from mtl.training.labeled_predictions import UNDEFINED, LabeledPredictions
from mtl.types import TaskKind, TaskSpec, metric_family


@dataclass(frozen=True)
class Metric:
    """A metric: its function of rows, and whether higher values are better (None: neither)."""

    compute: Callable[..., Tensor]
    higher_is_better: bool | None = True


def positives(rows: LabeledPredictions) -> Tensor:
    """Return the predicted classes ``[N]``, 0 or 1, of a binary task, with a threshold of 0.5."""
    return (rows.prediction > 0.5).long()


def auroc(prediction: Tensor, label: Tensor) -> Tensor:
    """Return the area under the ROC curve, the true positive rate over the false positive rate.

    ``prediction [N]``, ``label [N]``.
    """
    from torchmetrics.functional.classification import binary_auroc

    return binary_auroc(prediction, label, validate_args=False) if 0 < label.sum() < len(label) else UNDEFINED


def one_versus_rest_auroc(rows: LabeledPredictions) -> Tensor:
    """Return the mean over the classes of the AUROC of each against all others; classes without rows are left out."""
    values = [auroc(scores, (rows.label == number).long()) for number, scores in enumerate(rows.scores.unbind(1))]
    return torch.stack([value.cpu() for value in values]).nanmean()


def average_precision(rows: LabeledPredictions) -> Tensor:
    """Return the average precision, sum_n (R_n - R_(n-1)) P_n over the thresholds, with recall R and precision P."""
    from torchmetrics.functional.classification import binary_average_precision

    return binary_average_precision(rows.prediction, rows.label, validate_args=False) if rows.label.any() else UNDEFINED


def calibration_error(confidence: Tensor, correct: Tensor) -> Tensor:
    """Return the expected calibration error in 15 bins of equal width (Guo et al. 2017).

    It is the mean distance between the mean ``confidence [N]`` of a bin and its share of ``correct [N]`` predictions,
    weighted by the number of rows in the bin.
    """
    from torchmetrics.functional.classification import binary_calibration_error

    return binary_calibration_error(confidence, correct.long(), n_bins=15, validate_args=False)


def log_loss(likelihood: Tensor) -> Tensor:
    """Return the mean of -log p over the probabilities ``likelihood [N]`` of the labels, with p at least 2.2e-16."""
    return -likelihood.clamp(min=torch.finfo(torch.float64).eps).log().mean()


def normalized_entropy(rows: LabeledPredictions) -> Tensor:
    """Return the log loss over that of the share of positive labels as a constant prediction (He et al. 2014).

    Below 1 is better than the constant. It is undefined if all labels are equal.
    """
    share = rows.label.double().mean()
    constant = -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share))
    return binary_log_loss(rows) / constant if constant > 0 else UNDEFINED


def calibration_ratio(rows: LabeledPredictions) -> Tensor:
    """Return the sum of the predictions over that of the labels (He et al. 2014); above 1, predictions are too high."""
    return rows.prediction.double().sum() / rows.label.sum() if rows.label.any() else UNDEFINED


def binary_log_loss(rows: LabeledPredictions) -> Tensor:
    return log_loss(torch.where(rows.label == 1, rows.prediction, 1 - rows.prediction))


def top(rows: LabeledPredictions, name: str, k: int) -> Tensor:
    """Return the metric ``name`` of the ``k`` per cent of the rows with the highest predictions, at least one row.

    ``precision``: the share of positives among them. ``recall``: the share of all positives that are among them.
    ``lift``: the precision over the share of positives in all rows. Among equal predictions, negatives come first.
    Recall and lift are undefined without a positive.
    """
    count, positives = max(1, round(len(rows.label) * k / 100)), rows.label.double().sum()
    order = rows.label.argsort(stable=True)
    order = order[(-rows.prediction[order]).argsort(stable=True)][:count]
    hits = rows.label[order].double().sum()
    if name == "precision":
        return hits / count
    if not positives:
        return UNDEFINED
    return hits / positives if name == "recall" else hits / count / (positives / len(rows.label))


def grouped_auroc(rows: LabeledPredictions) -> Tensor:
    """Return GAUC, the mean of the AUROC of each group, weighted by its number of rows (Zhou et al. 2018, section 6.2).

    A group is a user, say, and its rows are the impressions. Groups whose labels are all equal, and rows with a
    negative group number, are left out; the metric is undefined if none is left.
    """
    columns = {"group": rows.groups, "label": rows.label.double(), "prediction": rows.prediction}
    table = pl.DataFrame({name: column.numpy() for name, column in columns.items()}).filter(pl.col("group") >= 0)
    table = table.with_columns(rank=pl.col("prediction").rank("average").over("group"))
    size, positives, rank_sum = pl.len().alias("size"), pl.sum("label"), pl.col("label").dot("rank").alias("rank_sum")
    groups = table.group_by("group", maintain_order=True).agg(size, positives, rank_sum)
    size, positives = pl.col("size"), pl.col("label")
    auroc = (pl.col("rank_sum") - positives * (positives + 1) / 2) / (positives * (size - positives))
    groups = groups.filter(positives.is_between(0, size, closed="none"))  # that have both labels
    return torch.tensor(groups.select((auroc * size).sum() / size.sum()).item(), dtype=torch.float64)


def f1(predicted: Tensor, label: Tensor) -> Tensor:
    """Return 2 TP / (2 TP + FP + FN) for bool ``predicted [N]`` and ``label [N]``; 0 if both have no positives."""
    return 2 * (predicted & label).sum().double() / (predicted.sum() + label.sum()).clamp(min=1)


def macro_f1(rows: LabeledPredictions) -> Tensor:
    """Return the mean F1 of the classes that are predicted or labelled."""
    classes = torch.cat([rows.prediction, rows.label]).bincount().nonzero()[:, 0]
    return torch.stack([f1(rows.prediction == number, rows.label == number) for number in classes]).mean()


def matthews(predicted: Tensor, label: Tensor) -> Tensor:
    """Return the Matthews correlation of classes ``predicted [N]`` and ``label [N]``; 0 if one is constant.

    It is (c n - t.p) / sqrt((n^2 - p.p) (n^2 - t.t)) (Gorodkin 2004), with n rows, c correct predictions, and the
    numbers of labels t ``[C]`` and of predictions p ``[C]`` of each class.
    """
    classes = int(torch.maximum(predicted.max(), label.max())) + 1
    p, t = (values.bincount(minlength=classes).double() for values in (predicted, label))  # [C]
    n, c = len(label), (predicted == label).sum().double()
    spread = (n**2 - p @ p) * (n**2 - t @ t)
    return torch.where(spread > 0, (c * n - t @ p) / spread.clamp(min=1).sqrt(), 0.0)


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Return the Pearson correlation of ``x [N]`` and ``y [N]``; 0 if one is constant."""
    if bool(x.min() == x.max()) or bool(y.min() == y.max()):
        return x.new_zeros(())
    x, y = x - x.mean(), y - y.mean()
    return torch.dot(x / x.norm(), y / y.norm())


def ranks(values: Tensor) -> Tensor:
    """Return the ranks ``[N]`` of ``values [N]``, from 1; equal values share the mean of their ranks."""
    return torch.from_numpy(scipy.stats.rankdata(values)).to(values.dtype)


def mean_squared_error(rows: LabeledPredictions) -> Tensor:
    """Return the mean of the squared differences of predictions and labels."""
    return (rows.prediction - rows.label).square().mean()


def r2(rows: LabeledPredictions) -> Tensor:
    """Return R^2 = 1 - sum (t - p)^2 / sum (t - mean)^2 with labels t and predictions p, the explained variance."""
    if bool(rows.label.min() == rows.label.max()):
        return UNDEFINED
    unexplained = (rows.label - rows.prediction).square().sum()
    return 1 - unexplained / (rows.label - rows.label.mean()).square().sum()


def ranking(rows: LabeledPredictions, name: str, k: int | None = None) -> Tensor:
    """Return the mean over the groups of the ranking metric ``name``; with ``k``, only the first k rows count.

    The candidates are the labelled rows of the group in the split. For a recommender, a group is a user: its candidates
    are the items that the user has seen and the sampled unseen ones, not the whole catalogue. They are ranked by
    prediction, the highest first; among equal predictions, negatives come first. With r_i = 1 if the row of rank i is
    positive and P positives in all:

    ``ndcg``: sum_(i <= k) r_i / log2(i + 1), divided by its largest value, sum_(i <= min(k, P)) 1 / log2(i + 1).
    ``hit_rate``: 1 if one of the first k rows is positive, else 0. ``mrr``: 1 / rank of the first positive row.

    The mean leaves out groups without a positive row, and rows with a negative group number, which belong to no group.
    If no group is left, the metric is undefined (NaN). A group that has only positives counts as 1.
    """
    in_group = rows.groups >= 0
    prediction, label, groups = rows.prediction[in_group], rows.label[in_group], rows.groups[in_group]
    if not len(groups):
        return UNDEFINED
    order = torch.arange(len(groups), device=groups.device)
    for key in (label, -prediction, groups):  # stable sorts, the last key first
        order = order[key[order].argsort(stable=True)]
    group = (groups[order].diff(prepend=groups[order[:1]]) > 0).cumsum(0)  # [N], numbered from 0
    sizes = group.bincount()  # [G]
    rank = 1 + torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group]  # within the group
    positive = label[order].double()
    counted = positive if k is None else positive * (rank <= k)
    none = positive.new_zeros(len(sizes))
    count = none.index_add(0, group, positive).long()
    if name == "ndcg":
        gains = 1 / torch.arange(2, 2 + int(sizes.max()), device=group.device).double().log2()  # of ranks 1, 2, ...
        most = count.clamp(min=1, max=k)
        values = none.index_add(0, group, counted * gains[rank - 1]) / gains.cumsum(0)[most - 1]
    else:  # the first positive row gives 1 (hit_rate) or its reciprocal rank (mrr)
        worth = counted if name == "hit_rate" else counted / rank
        values = none.scatter_reduce(0, group, worth, "amax")
    return values[count > 0].mean()  # NaN without groups


ALL: dict[TaskKind, dict[str, Metric]] = {  # mtl.types.METRICS, except the metrics of spans
    "binary": {
        "auroc": Metric(lambda rows: auroc(rows.prediction, rows.label)),
        "auprc": Metric(average_precision),
        "accuracy": Metric(lambda rows: (positives(rows) == rows.label).double().mean()),
        "f1": Metric(lambda rows: f1(positives(rows) == 1, rows.label == 1)),
        "matthews": Metric(lambda rows: matthews(positives(rows), rows.label)),
        "ece": Metric(lambda rows: calibration_error(rows.prediction, rows.label), False),
        "logloss": Metric(binary_log_loss, False),
        "normalized_entropy": Metric(normalized_entropy, False),
        "calibration_ratio": Metric(calibration_ratio, None),
        "precision@K%": Metric(partial(top, name="precision")),
        "recall@K%": Metric(partial(top, name="recall")),
        "lift@K%": Metric(partial(top, name="lift")),
        "gauc": Metric(grouped_auroc),
        "base_rate": Metric(lambda rows: rows.label.double().mean(), None),
        "ndcg@K": Metric(partial(ranking, name="ndcg")),
        "hit_rate@K": Metric(partial(ranking, name="hit_rate")),
        "mrr": Metric(partial(ranking, name="mrr")),
    },
    "multiclass": {
        "accuracy": Metric(lambda rows: (rows.prediction == rows.label).double().mean()),
        "macro_f1": Metric(macro_f1),
        "matthews": Metric(lambda rows: matthews(rows.prediction, rows.label)),
        "auroc": Metric(one_versus_rest_auroc),
        "ece": Metric(lambda rows: calibration_error(rows.confidence, rows.prediction == rows.label), False),
        "logloss": Metric(lambda rows: log_loss(rows.likelihood), False),
    },
    "regression": {
        "mse": Metric(mean_squared_error, False),
        "mae": Metric(lambda rows: (rows.prediction - rows.label).abs().mean(), False),
        "rmse": Metric(lambda rows: mean_squared_error(rows).sqrt(), False),
        "r2": Metric(r2),
        "pearson": Metric(lambda rows: pearson(rows.prediction, rows.label)),
        "spearman": Metric(lambda rows: pearson(ranks(rows.prediction), ranks(rows.label))),
        "pinball": Metric(lambda rows: rows.pinball.mean(), False),
        "coverage": Metric(lambda rows: rows.covered.double().mean(), None),
    },
    "span": {},
}
DEFAULTS: dict[TaskKind, tuple[str, ...]] = {
    "binary": ("auroc", "accuracy"),
    "multiclass": ("accuracy",),
    "regression": ("mse",),
    "span": ("f1", "exact_match"),
}


def metric_names(task: TaskSpec) -> tuple[str, ...]:
    """Return the metrics that the task names, or else the default ones of its kind; the first is the main one."""
    return tuple(task.metrics) or (OF_QUANTILES if task.quantiles else DEFAULTS[task.kind])


def value_of(kind: TaskKind, name: str, rows: LabeledPredictions) -> float:
    """Return the metric ``name`` of ``rows``, such as ``ndcg@10`` or ``recall@5%``."""
    k = name.partition("@")[2].removesuffix("%")
    compute = ALL[kind][metric_family(name)].compute
    return float(compute(rows, k=int(k)) if k else compute(rows))


def averages(tasks: Sequence[TaskSpec]) -> dict[str, list[str]]:
    """Return the main metrics, as ``<task>/<metric>``, whose means are ``average`` and ``small_average``.

    Averages exist only if every task names its metrics and higher is better for each main metric. ``small_average``
    also needs a small task.
    """
    mains = {task.name: metric_names(task)[0] for task in tasks}
    if not all(task.metrics and higher_is_better(mains[task.name]) for task in tasks):
        return {}
    everyone = [f"{task.name}/{mains[task.name]}" for task in tasks]
    small = [f"{task.name}/{mains[task.name]}" for task in tasks if task.small]
    return {"average": everyone, "small_average": small} if small else {"average": everyone}


def mean_of_defined(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN, NaN if all are."""
    defined = [value for value in values if not math.isnan(value)]
    return statistics.fmean(defined) if defined else math.nan


def higher_is_better(name: str) -> bool | None:
    """Return whether higher values of a logged name such as ``val/click/auroc`` are better; None if not known."""
    last = metric_family(name.rpartition("/")[2])
    if last in ("average", "small_average", *DEFAULTS["span"]):
        return True
    for metrics in ALL.values():
        if last in metrics:
            return metrics[last].higher_is_better
    return False if last == "loss" else None


def best_value(name: str) -> float | None:
    """Return the value of a perfect prediction, 1 or 0; None if there is none, as of lift, or if it is not known."""
    higher = higher_is_better(name)
    return None if higher is None or metric_family(name) == "lift@K%" else float(higher)


def mode_of(monitor: str, mode: str = "auto") -> str:
    """Return ``mode``, min or max; for "auto", max if higher values of ``monitor`` are known to be better, else min."""
    if mode == "auto":
        return "max" if higher_is_better(monitor) else "min"
    return mode
