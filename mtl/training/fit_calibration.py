"""Fit what the validation rows teach after the training: maps of logits, and scores of intervals.

The ``METHODS`` take numpy arrays in float64: the logits ``[N]`` of a binary task or ``[N, C]`` of a multiclass task,
the labels ``[N]`` and the weights ``[N]`` of N rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy  # imports its parts at their first use
import torch
from torch import Tensor

from mtl.checks import InputError
from mtl.files.formatting import number
from mtl.nn.calibration import STEPS, Calibration
from mtl.predictions import interval, outermost
from mtl.training.labeled_predictions import LabeledPredictions, labelled_after
from mtl.training.metrics import calibration_error
from mtl.types import TaskSpec

log = logging.getLogger(__name__)

FOLDS = 5
MIN_LABELS, MIN_CLASS_LABELS = 50, 10  # labels of a task that is calibrated, and of the rarer class of a binary one
KNOTS, MIN_BIN_ROWS = 50, 20  # bins of an isotonic regression, and the rows of a bin
MAX_SLOPE = 100.0  # largest factor of a logit, 1 / MAX_SLOPE the smallest; a positive one keeps the order of rows

Fit = Callable[[Any, Any, Any], Calibration]


def log_losses(logits: Any, label: Any) -> Any:
    """Return the log loss ``[N]`` of each row."""
    if logits.ndim == 1:
        return np.logaddexp(0, np.where(label == 1, -logits, logits))
    return -np.take_along_axis(scipy.special.log_softmax(logits, -1), label.astype(int)[:, None], 1)[:, 0]


def temperature(logits: Any, label: Any, weight: Any) -> Calibration:
    """Return the scale 1 / T of all logits that minimises the log loss (Guo et al. 2017, section 4.2)."""

    def loss(log_scale: float) -> float:
        return float(weight @ log_losses(logits * np.exp(log_scale), label))

    most = np.log(MAX_SLOPE)
    log_scale = scipy.optimize.minimize_scalar(loss, bounds=(-most, most), options={"xatol": 1e-7}).x
    return Calibration(scale=float(np.exp(log_scale)))


def platt(logits: Any, label: Any, weight: Any) -> Calibration:
    """Return the line a * logit + b that minimises the log loss of Platt's targets (Platt 1999, section 2.2).

    They are (n+ + 1) / (n+ + 2) for the n+ positives and 1 / (n- + 2) for the n- negatives, so that the line is finite
    even if it separates the classes.
    """
    positives = weight @ label
    target = np.where(label == 1, (positives + 1) / (positives + 2), 1 / (weight.sum() - positives + 2))

    def loss(line: Any) -> tuple[float, Any]:
        mapped = line[0] * logits + line[1]
        slope = weight * (scipy.special.expit(mapped) - target)
        return weight @ (np.logaddexp(0, mapped) - target * mapped), np.array([slope @ logits, slope.sum()])

    bounds = [(1 / MAX_SLOPE, MAX_SLOPE), (None, None)]
    a, b = scipy.optimize.minimize(loss, (1.0, 0.0), jac=True, bounds=bounds, options={"ftol": 1e-14, "gtol": 1e-9}).x
    return Calibration(scale=float(a), shift=float(b))


def isotonic(logits: Any, label: Any, weight: Any) -> Calibration:
    """Return the isotonic regression of the labels of bins with about as many rows each (Zadrozny and Elkan 2002).

    A knot is the mean logit of a block of bins that share a probability, so that the map rises gently and makes no
    ties. Each bin has one more row with the mean label, so that no probability is 0 or 1.
    """
    bins = int(np.clip(len(logits) // MIN_BIN_ROWS, 2, KNOTS))
    edges = np.unique(np.quantile(logits, np.arange(1, bins) / bins, method="inverted_cdf"))
    index = np.unique(np.searchsorted(edges, logits, side="right"), return_inverse=True)[1]
    total, at, positives = (np.bincount(index, weight * values) for values in (1.0, logits, label))
    share = (positives + np.average(label, weights=weight)) / (total + 1)
    fitted = scipy.optimize.isotonic_regression(share, weights=total + 1)
    starts = fitted.blocks[:-1]
    mean = np.add.reduceat(at, starts) / np.add.reduceat(total, starts)
    mean, first = np.unique(mean.astype(np.float32), return_index=True)  # of the logits' precision: no piece of width 0
    logits_of_blocks = scipy.special.logit(fitted.x[starts][first])
    return Calibration(knots=tuple(zip(mean.tolist(), logits_of_blocks.tolist(), strict=True)))


def measure_calibration(
    tasks: Mapping[str, TaskSpec], rows: Mapping[str, LabeledPredictions]
) -> dict[str, dict[str, float]]:
    """Return log loss and expected calibration error before and after the map of each calibrated task with classes.

    ``rows``: labelled ones by task, with what the network returned; of a task after another, those of its calibration.
    """
    measured = dict[str, dict[str, float]]()
    for task in (task for task in tasks.values() if task.calibration and task.kind in METHODS and task.name in rows):
        labelled = labelled_after(task, rows)
        logits = {"before": labelled.output.double(), "after": task.calibrate(labelled.output.double())}
        values = measured.setdefault(task.name, {}) if len(labelled) else {}
        for name, z in logits.items():
            confidence, best = (z.sigmoid(), torch.ones_like(z)) if z.dim() == 1 else z.softmax(-1).max(-1)
            values[f"logloss {name}"] = float(log_losses(z.numpy(), labelled.label.numpy()).mean())
            values[f"ECE {name}"] = float(calibration_error(confidence, best == labelled.label))
    return measured


def measure_intervals(
    tasks: Mapping[str, TaskSpec], rows: Mapping[str, LabeledPredictions], level: float
) -> dict[str, dict[str, float]]:
    """Return how many labels of each regression are within its intervals, and their mean width, in units.

    ``rows``: labelled ones by task, with what the network returned if the task has quantiles. A task whose validation
    rows were too few for the ``level`` is left out with a warning.
    """
    measured = {}
    for task in (task for task in tasks.values() if task.kind == "regression" and task.name in rows):
        labelled = rows[task.name]
        try:
            margin = task.interval_margin(level)
        except InputError as error:
            log.warning("%s", error)
            continue
        values = task.unstandardize(labelled.output) if task.quantiles else labelled.prediction
        low, high = interval(task, values, margin)
        inside = ((low <= labelled.label) & (labelled.label <= high)).double()
        measured[task.name] = {"level": level, "coverage": float(inside.mean()), "width": float((high - low).mean())}
    return measured


METHODS: dict[str, dict[str, Fit]] = {
    "binary": {"Platt scaling": platt, "isotonic regression": isotonic},
    "multiclass": {"temperature scaling": temperature},
}


def fit_calibration(task: TaskSpec, output: Tensor, label: Tensor, weight: Tensor) -> tuple[Calibration | None, str]:
    """Return what a task learns from N labelled rows, None for nothing, and what a log line says of its classes.

    ``output [N]`` or ``[N, outputs]`` of the network, ``label [N]``, ``weight [N]``. Maps are compared
    by log loss in a cross-validation, since on rows that it has seen an isotonic regression would always win. One is
    taken only if it gains more than a standard error over a simpler one, or none: of few rows, it has flat pieces.
    """
    if task.kind == "regression":
        return conformal_scores(task, output, label), ""
    has_weight, methods = weight > 0, METHODS[task.kind]
    x, y, w = (values[has_weight].double().numpy() for values in (output, label, weight))
    counts = np.unique(y, return_counts=True)[1]
    if len(y) < MIN_LABELS or len(counts) < 2 or (task.kind == "binary" and counts.min() < MIN_CLASS_LABELS):
        of_class = f", {MIN_CLASS_LABELS} of each class" if task.kind == "binary" else ""
        needs = f"this needs {MIN_LABELS} validation rows with labels{of_class}; there are {len(y)}"
        return None, f"not calibrated: {needs}"
    order = np.random.default_rng(0).permutation(len(y))
    fold = np.empty(len(y), int)
    fold[order[y[order].argsort(kind="stable")]] = np.arange(len(y)) % FOLDS  # each has its share of each class
    losses, best = {"": log_losses(x, y)}, ""
    for name, fit in methods.items():  # the simplest first
        held = np.empty_like(x)
        for out in (fold == index for index in range(FOLDS)):
            held[out] = fit(x[~out], y[~out], w[~out]).apply(torch.from_numpy(x[out])).numpy()
        losses[name] = log_losses(held, y)
        gains = w / w.mean() * (losses[best] - losses[name])
        best = name if gains.mean() > gains.std() / math.sqrt(len(gains)) else best
    mean = {name: number(float(np.average(loss, weights=w))) for name, loss in losses.items()}
    if not best:
        others = " and ".join(f"{mean[name]} with {name}" for name in methods)
        return None, f"not calibrated: validation log loss {mean['']}, and not clearly lower cross-validated, {others}"
    before, after = f"validation log loss {mean['']}", f"{mean[best]} after (cross-validated)"
    return methods[best](x, y, w), f"calibrated by {best}: {before} before, {after}"


def conformal_scores(task: TaskSpec, output: Tensor, label: Tensor) -> Calibration:
    """Return the scores of split conformal prediction for the levels 1 / STEPS, 2 / STEPS, ...

    The score of a row is max(low - label, label - high): the distance of the label from the prediction (Vovk et al.
    2005; Lei et al. 2018, algorithm 2) or from the outermost quantiles (Romano et al. 2019, equation 6). That for a
    level is the ceil((n + 1) level)-th smallest of the n rows ``[N]``; it exists for levels up to n / (n + 1). An
    interval then holds the label of a new row with at least this probability, if new rows are like those of the
    validation. Each row counts once, whatever its weight, as in metrics.
    """
    low, high = outermost(task, task.unstandardize(output))
    label, count = label.double().log() if task.transform else label.double(), len(label)
    scores = torch.maximum(low - label, label - high).sort().values.tolist()
    ranks = [-(-(count + 1) * step // STEPS) for step in range(1, STEPS)]  # rounded up
    return Calibration(scores=tuple(scores[r - 1] for r in ranks if r <= count and math.isfinite(scores[r - 1])))
