"""Choose from which probability on a binary task counts as positive, and measure decisions with that threshold."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from mtl.chains import chain
from mtl.checks import require
from mtl.nn.functional import sigmoid_keeping_ties
from mtl.options import Positive
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.types import TaskSpec

Rule = Literal["f1"] | dict[Literal["fp", "fn"], Positive]  # the highest F1, or the least cost of wrong decisions


def choose_thresholds(
    tasks: Mapping[str, TaskSpec], validation: Mapping[str, LabeledPredictions], rule: Rule
) -> dict[str, float]:
    """Return the threshold of each binary task whose ``validation`` rows have both classes.

    ``validation``: the labelled rows of each task, whose predictions are not calibrated yet, as they are stored.
    ``tasks`` have the calibrations. Tasks whose negatives were sampled are left out: their rows lack most negatives.
    Raises InputError if no task has a threshold.
    """
    thresholds = {}
    for task in (task for task in tasks.values() if task.kind == "binary" and task.name in validation):
        rows, steps = validation[task.name], chain(task, tasks)
        has_chain = steps[0].sampling_rate == 1 and all(step.name in validation for step in steps)
        if has_chain and 0 < int(rows.label.sum()) < len(rows):
            thresholds[task.name] = best_threshold(_calibrated(task, tasks, validation), rule)
    why = "no binary task has validation rows of both classes (those with a sampling_rate do not count)"
    require(bool(thresholds), f"threshold: {why}")
    return thresholds


def decisions(
    tasks: Mapping[str, TaskSpec],
    validation: Mapping[str, LabeledPredictions],
    rows: Mapping[str, LabeledPredictions],
    rule: Rule,
) -> dict[str, dict[str, float | None]]:
    """Return ``measure_decisions`` of each task on its labelled ``rows``, with the threshold that ``validation`` chose.

    Raises InputError, see ``choose_thresholds``.
    """
    thresholds = choose_thresholds(tasks, validation, rule)
    return {name: measure_decisions(rows[name], at, rule) for name, at in thresholds.items() if name in rows}


def best_threshold(rows: LabeledPredictions, rule: Rule) -> float:
    """Return the threshold with the highest F1, or the least cost, on ``rows``: positive is what is predicted above it.

    It is in the middle between two predictions, or between one and 0 or 1. Of equally good ones it is the highest.
    """
    prediction, order = rows.prediction.double().sort(descending=True)
    hits = torch.cat([torch.zeros(1), rows.label[order]]).double().cumsum(0)  # [N + 1]: true positives of the first k
    count, positives = torch.arange(len(hits)), hits[-1]
    gain = 2 * hits / (count + positives) if rule == "f1" else -_cost(count - hits, positives - hits, rule)
    edges = torch.cat([torch.ones(1), prediction, torch.zeros(1)]).double()  # [N + 2]
    apart = edges[:-1] > edges[1:]  # rows of equal predictions are on the same side
    best = int(gain.where(apart, -torch.inf).argmax())
    return float(edges[best] + edges[best + 1]) / 2


def measure_decisions(rows: LabeledPredictions, threshold: float, rule: Rule) -> dict[str, float | None]:
    """Return what is measured of labelled ``rows`` if those above the ``threshold`` are taken for positive.

    ``predicted`` is their share; ``cost``, if the ``rule`` has costs, the mean of a row. None is undefined.
    """
    predicted, label = rows.prediction.double() > threshold, rows.label == 1
    hits, chosen, positives = (float(part.sum()) for part in (predicted & label, predicted, label))
    cost = {} if rule == "f1" else {"cost": _cost(chosen - hits, positives - hits, rule) / len(rows)}
    return {
        "threshold": threshold,
        **cost,
        "precision": hits / chosen if chosen else None,
        "recall": hits / positives if positives else None,
        "f1": 2 * hits / (chosen + positives) if chosen + positives else None,
        "predicted": chosen / len(rows),
        "accuracy": float((predicted == label).double().mean()),
    }


def _cost(false_positives: Any, false_negatives: Any, costs: Mapping[Any, float]) -> Any:
    """Return the cost of wrong decisions; a kind without an entry in ``costs`` costs 1."""
    return costs.get("fp", 1.0) * false_positives + costs.get("fn", 1.0) * false_negatives


def _calibrated(
    task: TaskSpec, tasks: Mapping[str, TaskSpec], validation: Mapping[str, LabeledPredictions]
) -> LabeledPredictions:
    """Return the validation rows of ``task`` with calibrated predictions.

    Of a task after another, the calibration is of the probability given that one, which is their quotient.
    """
    rows = validation[task.name]
    if not any(step.calibration for step in chain(task, tasks)):
        return rows
    if task.after is None:
        return replace(rows, prediction=sigmoid_keeping_ties(task.calibrate(rows.prediction.logit())))
    stored, before = validation[task.after], _calibrated(tasks[task.after], tasks, validation)
    rows = rows.at(torch.isin(rows.row_id, before.row_id))
    # Rows are in the order of their numbers
    p_stored, p_before = (part.prediction[torch.searchsorted(part.row_id, rows.row_id)] for part in (stored, before))
    conditional = (rows.prediction / p_stored.clamp(min=sys.float_info.min)).clamp(0, 1)
    return replace(rows, prediction=sigmoid_keeping_ties(task.calibrate(conditional.logit())) * p_before)
