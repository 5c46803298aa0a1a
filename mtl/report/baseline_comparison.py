"""Say whether the model in use is better than the others that it was tested beside."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mtl.checks import join_names
from mtl.files.formatting import number, with_interval
from mtl.report.statistics import Difference, Verdict
from mtl.table_models import MAX_OUTPUTS
from mtl.table_models.blend import Weights, in_words, mean_weights
from mtl.training.measurements import NETWORK, Measurements
from mtl.training.metrics import best_value, higher_is_better

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
    value, perfect = measured.value(task, metric, model=measured.in_use), best_value(metric)
    if value is None:
        return f"{task}: {metric} is undefined on these test rows. Next: test on rows with labels of every kind."
    ends = Difference(value, sem, 1, 1, math.inf).interval
    if ends and perfect is not None:  # no value is better than a perfect one
        ends = (ends[0], min(ends[1], perfect)) if perfect else (max(ends[0], perfect), ends[1])
    size = with_interval(value, ends, sign="") if ends else number(value)
    leads = {model: improvement(measured, model, task, metric) for model in measured.models()}
    other_leads = {model: lead for model, lead in leads.items() if lead and model not in (CONSTANT, measured.in_use)}
    best = min(other_leads, key=lambda model: other_leads[model].mean, default="")
    names = {CONSTANT: _A_CONSTANT, best: f"{best}, the best other model"}
    shown = {model: lead for model in names if (lead := leads.get(model))}
    verdicts = dict[str, Verdict | None]()
    for model, lead in shown.items():  # these rows choose the best of the others, so p is corrected (Bonferroni)
        p = None if lead.p is None else min(1.0, lead.p * (len(other_leads) if model == best else 1))
        verdicts[model] = None if lead.sem is None else lead.verdict(p)  # None: of too few rows, or too many tasks
    values = {model: number(measured.value(task, metric, model=model)) for model in shown}
    phrases = [_phrase(lead, verdicts[model], names[model], values[model]) for model, lead in shown.items()]
    beside = f", {' and '.join(phrases)}" if phrases else ""
    has_few_rows = None in verdicts.values() and len({key.task for key in measured if key.task}) <= MAX_OUTPUTS
    next_step = _next_step(verdicts.get(CONSTANT), verdicts.get(best), best, has_few_rows)
    return f"{task}: {metric} {size}{beside}. Next: {next_step}."


def _phrase(lead: Difference, verdict: Verdict | None, name: str, value: str) -> str:
    if verdict is None:
        return f"beside {name} ({value})"
    link = "against" if verdict == Verdict.UNDECIDED else "than"
    by = "" if name == _A_CONSTANT and verdict == Verdict.BETTER else f", lead {lead.text()}"
    return f"{verdict} {link} {name} ({value}{by})"


def _next_step(of_constant: Verdict | None, of_best: Verdict | None, best: str, has_few_rows: bool) -> str:
    """Return what follows from the verdicts on a constant and on the ``best`` other model, None if unknown."""
    if of_constant not in (None, Verdict.BETTER):
        return "check its labels and inputs, since nothing shows that these inputs predict it"
    if has_few_rows:
        return "test on more rows, since these do not tell a difference from chance"
    return {
        Verdict.WORSE: f"use {best}, or search better options with mtl tune",
        Verdict.UNDECIDED: "more test rows would decide it; until then the simpler of the two will do",
        None: "look below where it is wrong, or search better options with mtl tune",
    }.get(of_best, "look below where it is wrong")


def describe_many_tasks(measured: Measurements, mains: Mapping[str, str]) -> str:
    """Say in how many tasks the value is better than that of each other model; "" if there is none."""
    parts = []
    for model in measured.models():
        leads = [improvement(measured, model, *main) for main in mains.items()] if model != measured.in_use else []
        if means := [lead.mean for lead in leads if lead]:
            parts.append(f"{model} in {sum(mean > 0 for mean in means)} of {len(means)} tasks")
    return f"Better than {join_names(parts)} where both have a value." if parts else ""


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
        without = "The weight of the network is 0: on the validation rows the other models predict as well without it."
        lines += [] if mean_weights(weights)[NETWORK] else [without]
    subject = "the blend is " if weights else ""
    for model, tasks_of in tasks_by_verdict.items():
        parts = [f"{verdict} in {join_names(tasks)}" for verdict, tasks in sorted(tasks_of.items())]
        lines.append(f"Against {model} on these test rows: {subject}{'; '.join(parts)}.")
    return lines
