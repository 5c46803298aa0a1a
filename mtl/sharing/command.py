"""The command ``mtl share``: its runs, and what they show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from mtl.checks import require
from mtl.config import build
from mtl.config.check import checked_run
from mtl.jobs.job import Do
from mtl.jobs.work import JobList, checked_runs, work, working
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.options import valid
from mtl.overrides import key_of
from mtl.sharing.answer import ALONE, GROUPS
from mtl.sharing.grouping import partition
from mtl.sharing.settings import Comparison, ShareOptions
from mtl.types import has_label

MIN_SEEDS = 3  # with fewer, Student's t test finds next to nothing


def share(cfg: DictConfig, run_overrides: Sequence[str], do: Do | None = None) -> Comparison:
    """Do the runs that ``cfg``, the composed ``conf/share.yaml``, asks for and that are missing; return what they show.

    ``run_overrides``: options of mtl train for all runs. ``do``: see ``mtl.jobs.work.work``.
    """
    options: ShareOptions = valid(ShareOptions, OmegaConf.to_container(cfg, resolve=True), "")
    first = checked_run(run_overrides)
    data: Any = build.build_data(first)
    data.prepare_data()
    data.setup()
    tasks = data.spec.task_names
    require(len(tasks) > 1, f"data has one task, {tasks[0]}: sharing needs two or more")
    folder = Path(first.paths.output_dir) / "share" / (options.name or str(first.choices.data))
    own_splits = data.random_split and not any(key_of(override) == "data.seed" for override in run_overrides)
    comparison = Comparison(options, folder, tasks, run_overrides, bool(first.task_batches), own_splits)
    if comparison.are_many:
        reason = f"more than {MAX_LISTED_TASKS} are compared with the models of a table, see blend="
        require(data.labelled is not None and first.blend != "none", f"data has {len(tasks)} tasks: {reason}")
        targets = data.splits["train"].targets if hasattr(data, "splits") else {}
        comparison.labels = {
            t.name: int(has_label(t, targets[t.name]).sum()) for t in data.spec.tasks if t.name in targets
        }
    monitor = str(checked_runs([setting.overrides for setting in comparison.settings.values()])[0].monitor)

    common: Any = {"seed": options.seed, "count": options.seeds, "retries": options.retries}
    jobs = partial(JobList, folder=folder, monitor=monitor, **common)

    def run(sources: Sequence[JobList], seeds: int, later: int | None = 0) -> None:
        for source in sources:
            source.count = seeds
        if not options.show:
            work(sources, options.max_failures, later, do)

    with working(folder, options.show):
        base, seeds = (
            {name: jobs(setting=setting, seed=options.seed) for name, setting in comparison.settings.items()},
            options.seeds,
        )
        # Again with more runs, since first ones are often slower
        for num_timed in (1, min(MIN_SEEDS, seeds)) if options.budget else ():
            run([*base.values()], num_timed, later=None)
            seeds = _seeds_within_budget(options, base)
        comparison.seeds = range(options.seed, options.seed + seeds)
        # Later ones are those in groups, unless all tasks will share, or none
        run([*base.values()], seeds, later=seeds * (len(tasks) > 2 and not comparison.are_many))
        if comparison.are_many:
            return comparison
        affinity = comparison.affinity()
        if np.isfinite(affinity[~np.eye(len(tasks), dtype=bool)]).any():
            comparison.groups = partition(affinity, options.groups)
            if 1 < len(comparison.groups) < len(tasks):
                comparison.settings[GROUPS] = comparison.of_groups(comparison.groups)
                run([jobs(setting=comparison.settings[GROUPS])], seeds)
    return comparison


def _seeds_within_budget(options: ShareOptions, base: Mapping[str, JobList]) -> int:
    """Return how many seeds fit into the budget.

    A setting's runs are assumed to take as long as those that have ended, on average. Networks of groups are assumed
    to take as long as those of single tasks.
    """
    seconds = {}
    for name, source in base.items():
        spent = [result.seconds for result in source.ended().values() if not result.error]
        require(bool(spent), f"budget: the first run of {name} has failed, so its time is not known")
        seconds[name] = max(1e-3, sum(spent) / len(spent))
    budget, min_seeds = 60 * (options.budget or 0.0), min(MIN_SEEDS, options.seeds)
    seconds_per_seed = sum(seconds.values()) + seconds.get(ALONE, 0.0)  # of a seed: all settings and the groups
    needed = f"{min_seeds} seeds of all settings take about {math.ceil(min_seeds * seconds_per_seed / 60)} minutes"
    require(budget >= min_seeds * seconds_per_seed, f"budget={options.budget:g}: {needed}")
    return min(options.seeds, int(budget / seconds_per_seed))
