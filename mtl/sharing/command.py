"""The command ``mtl share``: its runs, and what they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from mtl.checks import require
from mtl.config import build
from mtl.config.check import checked_run
from mtl.options import valid
from mtl.overrides import key_of
from mtl.sharing.answer import ALONE, GROUPS
from mtl.sharing.grouping import partition
from mtl.sharing.studies import Comparison, Setting, ShareOptions
from mtl.tune.command import checked, run_trials, working
from mtl.tune.launch import Launch, Launcher
from mtl.tune.queue import study_of

MIN_SEEDS = 3  # with fewer, Student's t test finds next to nothing


def share(
    cfg: DictConfig, run_overrides: Sequence[str], launcher: Callable[[Path], Launch] | None = None
) -> Comparison:
    """Do the runs that ``cfg``, the composed ``conf/share.yaml``, asks for and that are missing; return what they show.

    ``run_overrides``: options of mtl train for all runs. ``launcher(folder)`` returns what does the runs, in folders
    below ``folder``; by default processes of their own do them.
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
    base = list(comparison.settings.values())
    monitor = str(checked([setting.definition for setting in base])[0].monitor)
    launch = (launcher or Launcher)(folder)

    def run(settings: Sequence[Setting], seeds: int, later: int | None = 0) -> None:
        if not options.show:
            run_trials([(setting.definition, monitor) for setting in settings], seeds, cfg, storage, launch, later)

    with working(cfg, folder, options.show) as storage:
        seeds = options.seeds
        for num_timed in (
            (1, min(MIN_SEEDS, seeds)) if options.budget else ()
        ):  # again, since first runs are often slower
            run(base, num_timed, later=None)
            seeds = _seeds_within_budget(options, comparison.settings, storage, num_timed)
        comparison.seeds = range(options.seed, options.seed + seeds)
        run(base, seeds, later=seeds * (len(tasks) > 2))  # those in groups, unless all tasks will share, or none
        affinity = comparison.affinity()
        if np.isfinite(affinity[~np.eye(len(tasks), dtype=bool)]).any():
            comparison.groups = partition(affinity, options.groups)
            if 1 < len(comparison.groups) < len(tasks):
                comparison.settings[GROUPS] = comparison.of_groups(comparison.groups)
                run([comparison.settings[GROUPS]], seeds)
    return comparison


def _seeds_within_budget(
    options: ShareOptions, base: Mapping[str, Setting], storage: BaseStorage, num_timed: int
) -> int:
    """Return how many seeds fit into the budget.

    A setting's runs are assumed to take as long as its first ``num_timed`` ones, on average. Networks of groups are
    assumed to take as long as those of single tasks.
    """
    seconds = {}
    for name, setting in base.items():
        study = study_of(setting.definition.name, storage)
        first = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])[:num_timed] if study else []
        require(bool(first), f"budget: the first run of {name} has failed, so its time is not known")
        seconds[name] = max(1e-3, sum(trial.user_attrs.get("seconds", 0.0) for trial in first) / len(first))
    budget, min_seeds = 60 * (options.budget or 0.0), min(MIN_SEEDS, options.seeds)
    seconds_per_seed = sum(seconds.values()) + seconds[ALONE]  # of a seed: all settings and the groups
    needed = f"{min_seeds} seeds of all settings take about {math.ceil(min_seeds * seconds_per_seed / 60)} minutes"
    require(budget >= min_seeds * seconds_per_seed, f"budget={options.budget:g}: {needed}")
    return min(options.seeds, int(budget / seconds_per_seed))
