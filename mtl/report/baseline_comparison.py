"""Say whether the model in use is better than the others that it was tested beside."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mtl.checks import join_names
from mtl.report.statistics import Difference, Verdict
from mtl.table_models.blend import Weights, in_words, mean_weights
from mtl.training.measurements import NETWORK, Measurements
from mtl.training.metrics import higher_is_better

CONSTANT = "constant"  # the name of the prediction that does not depend on the inputs


def improvement(measured: Measurements, model: str, task: str, metric: str) -> Difference | None:
    """Return by how much the ``metric`` of the model in use is better than that of ``model``, or None if unknown.

    The error is that of the test rows alone, of one training of each; it is None if it was not measured.
    """
    value, other = (measured.value(task, metric, model=name) for name in (measured.in_use, model))
    higher = higher_is_better(metric)
    if value is None or other is None or higher is None:
        return None
    error = measured.lead_error(task, metric, model)
    return Difference(value - other, error, 1, 1, math.inf).scaled(1.0 if higher else -1.0)


def compare_with_baselines(
    measured: Measurements, mains: Mapping[str, str], weights: Weights | None = None
) -> list[str]:
    """Return a sentence on each other model: the tasks in which the model in use is better or worse than it.

    ``mains``: the main metric of each task. ``weights``: of the blend.
    """
    tasks_by_verdict: dict[str, dict[Verdict, list[str]]] = {}
    for model in measured.models():
        for task, metric in mains.items() if model not in (CONSTANT, measured.in_use) else ():
            difference = improvement(measured, model, task, metric)
            if difference is not None and difference.sem is not None:
                tasks_by_verdict.setdefault(model, {}).setdefault(difference.verdict(), []).append(task)
    lines = []
    if weights:
        lines.append(f"Predictions are those of a {in_words(weights)}, which the validation rows chose.")
        if not mean_weights(weights)[NETWORK]:
            lines.append(
                "The weight of the network is 0: on the validation rows the other models predict as well without it."
            )
    subject = "the blend is " if weights else ""
    return lines + [
        f"Against {model} on these test rows: {subject}"
        f"{'; '.join(f'{verdict} in {join_names(tasks)}' for verdict, tasks in sorted(tasks_of.items()))}."
        for model, tasks_of in tasks_by_verdict.items()
    ]
