"""The command ``mtl share``: its runs, and what they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from mtl.checks import require
from mtl.config import build
from mtl.config.check import checked_run
from mtl.files.formatting import duration
from mtl.jobs.job import Do, say
from mtl.jobs.work import JobList, checked_runs, work, working
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.options import valid
from mtl.overrides import key_of
from mtl.sharing.answer import ALONE, GROUPS, TOGETHER
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
        labelled = [task for task in data.spec.tasks if task.name in targets]
        comparison.labels = {task.name: int(has_label(task, targets[task.name]).sum()) for task in labelled}
    monitor = str(checked_runs([setting.overrides for setting in comparison.settings.values()])[0].monitor)

    common: Any = {"seed": options.seed, "count": options.seeds, "retries": options.retries}
    jobs = partial(JobList, folder=folder, monitor=monitor, **common)

    def run(sources: Sequence[JobList], seeds: int, later: int | None = 0) -> None:
        for source in sources:
            source.count = seeds
        if not options.show:
            work(sources, options.max_failures, later, do)

    with working(folder, options.show):
        base = {name: jobs(setting=setting) for name, setting in comparison.settings.items()}
        names, seeds, can_group = [*base], options.seeds, len(tasks) > 2 and not comparison.are_many
        if options.show:
            ended = {name: count for name, source in base.items() if (count := _count_ended(source))}
            has_core = {ALONE, TOGETHER} & base.keys() <= ended.keys()
            require(has_core, f"{folder}: no run of {ALONE} or {TOGETHER} has ended")
            names, seeds = [*ended], min(ended.values())
        elif options.budget:
            names, can_group, seeds = _fit_budget(comparison, base, can_group, run)
        base = {name: base[name] for name in names}
        comparison.settings = {name: comparison.settings[name] for name in names}
        comparison.seeds = range(options.seed, options.seed + seeds)
        # Later ones are those in groups, unless all tasks will share, or none
        run([*base.values()], seeds, later=seeds * can_group)
        affinity = comparison.affinity() if can_group else np.zeros((0, 0))
        if np.isfinite(affinity[~np.eye(len(affinity), dtype=bool)]).any():
            comparison.groups = partition(affinity, options.groups)
            if 1 < len(comparison.groups) < len(tasks):
                setting = comparison.of_groups(comparison.groups)
                run([source := jobs(setting=setting)], seeds)
                if _count_ended(source) >= seeds:
                    comparison.settings[GROUPS] = setting
                else:  # with show=true
                    comparison.groups = []
    return comparison


def _count_ended(source: JobList) -> int:
    """Return how many runs have ended, with or without success, whenever that was."""
    return sum(bool(job.result() or job.record().get("error")) for job in map(source.job, range(source.count)))


def _fit_budget(
    comparison: Comparison, base: Mapping[str, JobList], can_group: bool, run: Callable[..., None]
) -> tuple[list[str], bool, int]:
    """Do first runs, and return the settings that fit into the budget, whether groups do, and the number of seeds.

    If they do not all fit, groups are left out first, then gates, then seeds; what is left out is said.
    """
    options, core = comparison.options, [name for name in (ALONE, TOGETHER) if name in base]
    run([base[name] for name in core], 1, later=None)
    plans = [([*base], can_group), ([*base], False), (core, can_group), (core, False)]
    budget, fewest = 60 * (options.budget or 0.0), min(MIN_SEEDS, options.seeds)
    fitting = [plan for plan in plans if fewest * _seconds_per_seed(base, *plan) <= budget]
    names, grouped = (fitting or plans[-1:])[0]
    if fitting:  # again with more runs, since first ones are often slower
        run([base[name] for name in names], fewest, later=None)
    most = int(budget / _seconds_per_seed(base, names, grouped))
    seeds = max(fewest if fitting else 1, min(options.seeds, most))
    left_out = [*(name for name in base if name not in names), *[GROUPS] * (can_group and not grouped)]
    if left_out or seeds < options.seeds:
        needed = options.seeds * _seconds_per_seed(base, *plans[0])
        comparison.budget_note = (
            f"budget={options.budget:g} is enough for {seeds} of {options.seeds} seeds"
            f"{' without ' if left_out else ''}{', '.join(left_out)}; all runs take about {duration(needed)}. With "
            f"budget={math.ceil(needed / 60)}, the same command goes on with these runs."
        )
        say(comparison.budget_note)
    return names, grouped, seeds


def _seconds_per_seed(base: Mapping[str, JobList], names: Sequence[str], grouped: bool) -> float:
    """Return how long a run of each of the settings ``names`` takes, and one in groups if ``grouped``.

    A setting's runs are assumed to take as long as those that have ended, on average, or as those of ``TOGETHER``;
    networks of groups, as those of single tasks.
    """
    seconds = dict[str, float]()
    for name in {TOGETHER: 0, **base}:
        spent = [result.seconds for result in base[name].ended().values() if not result.error]
        first = name in (ALONE, TOGETHER)
        require(bool(spent) or not first, f"budget: the first run of {name} has failed, so its time is not known")
        seconds[name] = sum(spent) / len(spent) if spent else seconds[TOGETHER]
    return max(1e-3, sum(seconds[name] for name in names) + (seconds[ALONE] if grouped else 0.0))
