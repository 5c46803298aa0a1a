"""Compare two models over many tasks, which are the units of the statistics, by how many labels the tasks have."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mtl.files.formatting import p_value
from mtl.files.tables import Table
from mtl.report.statistics import defined, one_sample, summarise

RANGES = {"all": (0, math.inf), "below 50": (0, 50), "50 to 199": (50, 200), "200 or more": (200, math.inf)}


def gains_over_tasks(gains: Mapping[str, float | None], labels: Mapping[str, int], title: str) -> Table:
    """Return the mean gain over the tasks with its 95 % interval, also by how many ``labels`` they have, if known.

    An undefined gain is None. The intervals are those of Student's t test over the tasks.
    """
    rows = []
    for name, (low, high) in RANGES.items() if labels else [("all", RANGES["all"])]:
        tasks = [task for task in gains if low <= labels.get(task, 0) < high]
        values = defined(gains[task] for task in tasks)
        if difference := one_sample(summarise(values)):
            better = f"{sum(gain > 0 for gain in values) / len(values):.0%}"
            rows.append([name, f"{len(values)} of {len(tasks)}", difference.text(), p_value(difference.p), better])
    return Table(["labels", "tasks", "mean gain", "p", "better"], rows, title)
