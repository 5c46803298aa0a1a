"""Say whether a network is better than the models that it was tested beside."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mtl.checks import join_names
from mtl.report.statistics import Difference, Verdict
from mtl.training.measurements import Measurements
from mtl.training.metrics import higher_is_better

CONSTANT = "constant"  # the name of the prediction that does not depend on the inputs


def improvement(measured: Measurements, model: str, task: str, metric: str) -> Difference | None:
    """Return by how much the network's ``metric`` of a task is better than that of ``model``, or None if unknown.

    The error is that of the test rows alone, of one training of each; it is None if it was not measured.
    """
    value, other = measured.value(task, metric), measured.value(task, metric, model=model)
    higher = higher_is_better(metric)
    if value is None or other is None or higher is None:
        return None
    error = measured.lead_error(task, metric, model)
    return Difference(value - other, error, 1, 1, math.inf).scaled(1.0 if higher else -1.0)


def compare_with_baselines(measured: Measurements, mains: Mapping[str, str]) -> list[str]:
    """Return a sentence on the tasks in which the network is better or worse than the quick model, if there is one.

    ``mains``: the main metric of each task.
    """
    tasks_by_verdict: dict[str, dict[Verdict, list[str]]] = {}
    for model in measured.models()[1:]:
        for task, metric in mains.items() if model != CONSTANT else ():
            difference = improvement(measured, model, task, metric)
            if difference is not None and difference.sem is not None:
                tasks_by_verdict.setdefault(model, {}).setdefault(difference.verdict(), []).append(task)
    return [
        f"Against {model} on these test rows: "
        f"{'; '.join(f'{verdict} in {join_names(tasks)}' for verdict, tasks in sorted(tasks_of.items()))}."
        for model, tasks_of in tasks_by_verdict.items()
    ]
