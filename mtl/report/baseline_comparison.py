"""Say whether the model in use is better than the others that it was tested beside."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mtl.checks import join_names
from mtl.files.formatting import number, with_interval
from mtl.report.statistics import Difference, Verdict
from mtl.table_models.blend import Weights, in_words, mean_weights
from mtl.training.measurements import NETWORK, Measurements
from mtl.training.metrics import higher_is_better

CONSTANT = "constant"  # the name of the prediction that does not depend on the inputs
_A_CONSTANT = "a constant"  # in sentences


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


def describe_task(measured: Measurements, task: str, metric: str, sem: float | None = None) -> str:
    """Say how good the main ``metric`` of a task is, beside a constant and the best other model, and what to do next.

    ``sem``: the standard error of the metric over the test rows, None if it is unknown.
    """
    value, higher = measured.value(task, metric, model=measured.in_use), higher_is_better(metric)
    if value is None:
        return f"{task}: {metric} is undefined on these test rows. Next: test on rows with labels of every kind."
    ends = Difference(value, sem, 1, 1, math.inf).interval
    if ends and higher is not None:  # no value is better than a perfect one
        ends = (ends[0], min(ends[1], 1.0)) if higher else (max(ends[0], 0.0), ends[1])
    size = with_interval(value, ends, sign="") if ends else number(value)
    leads = {model: improvement(measured, model, task, metric) for model in measured.models()}
    known = {model: lead for model, lead in leads.items() if lead and model not in (CONSTANT, measured.in_use)}
    best = min(known, key=lambda model: known[model].mean, default="")
    names = {CONSTANT: _A_CONSTANT} | ({best: f"{best}, the best other model"} if best else {})
    phrases = [
        _phrase(lead, name, number(measured.value(task, metric, model=model)))
        for model, name in names.items()
        if (lead := leads.get(model))
    ]
    beside = f", {' and '.join(phrases)}" if phrases else ""
    return f"{task}: {metric} {size}{beside}. Next: {_next_step(leads.get(CONSTANT), known.get(best), best)}."


def _phrase(lead: Difference, name: str, value: str) -> str:
    if lead.sem is None:  # too few rows, or too many tasks
        return f"beside {name} ({value})"
    link = "against" if lead.verdict() == Verdict.UNDECIDED else "than"
    by = "" if name == _A_CONSTANT and lead.verdict() == Verdict.BETTER else f", lead {lead.text()}"
    return f"{lead.verdict()} {link} {name} ({value}{by})"


def _next_step(of_constant: Difference | None, of_best: Difference | None, best: str) -> str:
    """Return what follows from the leads over a constant and over the ``best`` other model, None if unknown."""
    if of_constant and of_constant.sem and of_constant.verdict() != Verdict.BETTER:
        return "check its labels and inputs, since nothing shows that these inputs predict it"
    if any(lead and lead.sem is None for lead in (of_constant, of_best)):
        return "test on more rows, since these do not tell a difference from chance"
    if of_best is None:
        return "look below where it is wrong, or search better options with mtl tune"
    return {
        Verdict.WORSE: f"use {best}, or search better options with mtl tune",
        Verdict.UNDECIDED: "more test rows would decide it; until then the simpler of the two will do",
    }.get(of_best.verdict(), "look below where it is wrong")


def describe_many_tasks(measured: Measurements, mains: Mapping[str, str]) -> str:
    """Say in how many tasks the value is better than that of each other model; "" if there is none."""
    parts = []
    for model in measured.models():
        leads = [improvement(measured, model, *main) for main in mains.items()] if model != measured.in_use else []
        if means := [lead.mean for lead in leads if lead]:
            parts.append(f"{model} in {sum(mean > 0 for mean in means)} of {len(means)} tasks")
    ending = "Chance is not excluded in any one task. Next: look below at the worst tasks."
    return f"Better than {join_names(parts)} where both have a value. {ending}" if parts else ""


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
