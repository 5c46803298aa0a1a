"""Decide whether sharing pays over more tasks than can each have a network: gains of joint runs, tasks as the units."""

from __future__ import annotations

from collections.abc import Mapping

from mtl.files.tables import Table
from mtl.report.baseline_comparison import CONSTANT
from mtl.report.many_tasks import gains_over_tasks
from mtl.report.runs import FINISHED, Runs
from mtl.report.statistics import defined
from mtl.sharing.answer import TOGETHER
from mtl.training.measurements import BLEND, LEAD, NETWORK, Key
from mtl.training.metrics import higher_is_better

RULE = (
    "Against single tasks: how much better the network is than the linear model or trees of the task alone, whichever "
    "is best on its validation rows, in the main metric on the test rows. The tasks are the units of interval and p "
    "(Student's t test)."
)
Gains = dict[str, dict[str, float | None]]  # by setting and task; None is unknown


def gains_of_many(runs: Runs, split: str) -> Gains:
    """Return by how much each task is better in a joint network than in the best model of it alone, mean over runs."""
    done, gains = runs.table.filter(state=FINISHED), Gains()
    models = {key.model for key in map(Key.of, done.columns) if key.split == "test" and LEAD not in key.model}
    alone = sorted(models - {NETWORK, BLEND, CONSTANT})
    for (setting,), group in done.group_by("setting", maintain_order=True):
        means = group.fill_nan(None).mean().row(0, named=True)  # over the runs
        for task, metric in runs.main.items():
            sign = -1.0 if higher_is_better(metric) is False else 1.0
            on_val = {model: means.get(str(Key("val", task, metric, model))) for model in alone}
            known = {model: sign * value for model, value in on_val.items() if value is not None}
            pair = [NETWORK, max(known, key=known.__getitem__)] if known else [NETWORK]
            values = defined(means.get(str(Key(split, task, metric, model))) for model in pair)
            gains.setdefault(str(setting), {})[task] = sign * (values[0] - values[1]) if len(values) > 1 else None
    return gains


def tables_of_many(gains: Gains, labels: Mapping[str, int]) -> list[Table]:
    """Return the ``gains`` by numbers of labels, and those of gates over ``TOGETHER``."""
    tables = [gains_over_tasks(by_task, labels, f"{name} against single tasks") for name, by_task in gains.items()]
    for name, by_task in gains.items():
        pairs = [(task, gain, gains.get(TOGETHER, {}).get(task)) for task, gain in by_task.items()]
        apart = {task: gain - other for task, gain, other in pairs if gain is not None and other is not None}
        tables += [gains_over_tasks(apart, labels, f"{name} against {TOGETHER}")] if name != TOGETHER else []
    return tables
