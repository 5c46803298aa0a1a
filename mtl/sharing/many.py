"""Decide whether sharing pays over more tasks than can each have a network: gains of joint runs, tasks as the units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtl.files.tables import Table
from mtl.report.baseline_comparison import CONSTANT
from mtl.report.many_tasks import gains_over_tasks
from mtl.report.runs import FINISHED, Runs
from mtl.report.statistics import Value, defined, gain, one_sample, summarise
from mtl.sharing.answer import EQUIVALENCE_MARGIN_PERCENT, TOGETHER, in_words
from mtl.training.measurements import BLEND, LEAD, NETWORK, Key
from mtl.training.metrics import higher_is_better

RULE = (
    "Against single tasks: by how many percent the main metric of the network on test rows is better than that of the "
    "linear model or trees of the task alone, whichever is best on validation rows. Interval and p (Student's t test) "
    "are over the tasks."
)
Gains = dict[str, dict[str, Value]]  # by setting and task, in percent; None is undefined


def gains_of_many(runs: Runs, split: str, reference: str | None = None) -> Gains:
    """Return by how much each task is better in a joint network than in the best model of it alone, mean over runs.

    ``reference``: a setting, whose run of the same seed takes the place of the models of single tasks.
    """
    rows = runs.table.filter(state=FINISHED).rows(named=True)
    by_seed = {row["seed"]: row for row in rows if row["setting"] == reference}
    alone, gains = models_alone(runs), dict[str, dict[str, list[float]]]()
    for row in rows:
        for task, metric in runs.main.items() if row["setting"] != reference else ():
            if reference is None:
                other = _best_alone(row, alone, task, metric, split)
            else:
                other = by_seed.get(row["seed"], {}).get(str(Key(split, task, metric)))
            value = gain(row.get(str(Key(split, task, metric))), other, higher_is_better(metric) is not False)
            gains.setdefault(row["setting"], {}).setdefault(task, []).append(value)
    return {name: {task: summarise(values).mean for task, values in of.items()} for name, of in gains.items()}


def models_alone(runs: Runs) -> list[str]:
    """Return the models that each predict a task by itself."""
    models = {key.model for key in map(Key.of, runs.table.columns) if key.split == "test" and LEAD not in key.model}
    return sorted(models - {NETWORK, BLEND, CONSTANT})


def _best_alone(row: Mapping[str, Any], models: list[str], task: str, metric: str, split: str) -> Value:
    """Return the value, in a run, of the model that is best on the validation rows; None if there is none."""
    on_validation = {model: row.get(str(Key("val", task, metric, model))) for model in models}
    values = {model: number for model, value in on_validation.items() for number in defined([value])}
    choose = min if higher_is_better(metric) is False else max
    best = choose(values, key=values.__getitem__) if values else ""
    return row.get(str(Key(split, task, metric, best)))


def recommend_joint(runs: Runs) -> tuple[str, str]:
    """Return the setting that is best on validation rows, and a sentence on it and what its test rows say."""
    on_validation = {name: summarise([*of.values()]).mean for name, of in gains_of_many(runs, "val").items()}
    means = {name: mean for name, mean in on_validation.items() if mean is not None}
    best = max(means, key=means.__getitem__, default=TOGETHER)
    difference = one_sample(summarise([*gains_of_many(runs, "test").get(best, {}).values()]))
    p = None if difference is None or difference.p is None else min(1.0, len(means) * difference.p)
    verdict = difference.verdict(p, EQUIVALENCE_MARGIN_PERCENT) if difference else "undefined"
    models = " and ".join(models_alone(runs))
    return best, (
        f"Recommended: {in_words(best)}, which is best on validation rows, blended with {models}. Without the blend, "
        f"the network against these models on test rows: {verdict}"
    )


def tables_of_many(runs: Runs, labels: Mapping[str, int]) -> list[Table]:
    """Return the gains on test rows by numbers of labels, also those of gates over ``TOGETHER``."""
    return [
        gains_over_tasks(by_task, labels, f"{name} against {other}, %")
        for other, reference in (("single tasks", None), (TOGETHER, TOGETHER))
        for name, by_task in gains_of_many(runs, "test", reference).items()
    ]
