"""The command ``mtl share``, without composing configurations, for which the caller passes a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import polars as pl
from omegaconf import DictConfig
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from mtl.analysis.conflicts import as_table, matrix
from mtl.checks import require
from mtl.config import build
from mtl.report.runs import Named, read_named_runs
from mtl.runs.console import make_lasting
from mtl.sharing import settings as options_of
from mtl.sharing.answer import ALONE, GROUPS, TOGETHER, Gain, gains
from mtl.sharing.grouping import Group, partition, predicted, rounds_of_pairs
from mtl.sharing.settings import Setting, Settings, Share
from mtl.tune.command import Composer, checked, queues_of, say
from mtl.tune.launch import Launch, run_folder
from mtl.tune.queue import study_of
from mtl.tune.storage import open_storage, reached
from mtl.tune.work import stoppable, work

LEAST = 3  # seeds: with fewer, Student's t test finds next to nothing


@dataclass
class Measured:
    """Everything that is known after (or, with ``show=true``, during) the runs.

    ``affinity [T, T]``: of the row's task to the column's, in percent; ``gains [T, T]``: those that the groups were
    chosen by, the affinity or the gains of trained pairs. ``seeds``: the numbers of the seeds of all settings.
    """

    tasks: list[str]
    folder: Path
    seeds: range
    settings: dict[str, Setting]
    affinity: np.ndarray
    gains: np.ndarray
    pairs: dict[str, Setting] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    def runs(self, settings: Mapping[str, Setting]) -> dict[Path, Named]:
        """Return the run folders of some settings, each with its setting and seed."""
        labels = {name: setting.definition.label for name, setting in settings.items()}
        numbered = [(name, seed) for name in settings for seed in self.seeds]
        return {run_folder(self.folder, labels[name], seed - self.seeds.start): (name, seed) for name, seed in numbered}

    def gains_over_alone(self, settings: Mapping[str, Setting]) -> list[Gain]:
        """Return the gains of the tasks in some settings, corrected together; see ``mtl.sharing.answer.gains``."""
        runs = read_named_runs(self.runs({ALONE: self.settings[ALONE], **settings}))
        return gains(runs, {name: setting.mates for name, setting in settings.items()})


def share(cfg: DictConfig, options: Sequence[str], compose: Composer, launcher: Callable[[Path], Launch]) -> Measured:
    """Do the runs that ``cfg``, the composed ``conf/share.yaml``, asks for and that are missing; return what they show.

    ``options``: words of mtl train for all runs. ``compose(words)`` returns the checked configuration of a run.
    ``launcher(folder)`` returns what does the runs, in folders below ``folder``.
    """
    make_lasting()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the workers' own lines say the same
    given = options_of.read(cfg)
    first = compose([*given.fixed, *options])
    data: Any = build.build_data(first)
    data.prepare_data()
    data.setup()
    tasks = data.spec.task_names
    require(len(tasks) > 1, f"data has one task, {tasks[0]}: sharing needs two or more")
    title = given.name or str(first.choices.data)
    made = Settings(given, title, tasks, options, bool(first.task_batches))
    folder = Path(first.paths.output_dir) / "share" / title
    base = made.base()
    monitor = str(checked([setting.definition for setting in base.values()], compose)[0].monitor)
    require(not given.show or cfg.storage or (folder / "study.db").exists(), f"{folder}: nothing has been run yet")
    storage = open_storage(cfg.storage, folder)
    launch = launcher(folder)

    def run(chosen: Sequence[Setting], seeds: int) -> None:
        if not given.show:
            queues = queues_of([setting.definition for setting in chosen], monitor, storage, cfg, seeds)
            work(queues, launch, cfg.max_failures, say)

    with reached(cfg.storage, folder), stoppable():
        if given.budget:
            run(list(base.values()), 1)
        seeds, rounds = _within(given, base, storage)
        unknown = np.full((len(tasks), len(tasks)), np.nan)
        found = Measured(tasks, folder, range(given.seed, given.seed + seeds), dict(base), unknown, unknown)
        run(list(base.values()), seeds)
        found.gains = found.affinity = affinity_of(found)
        if given.pairs:
            chosen = rounds_of_pairs(found.affinity)[:rounds]
            found.pairs = {f"pairs {number}": made.of_groups(each, "pairs") for number, each in enumerate(chosen, 1)}
            run(list(found.pairs.values()), seeds)
            found.gains = unknown
            for each in found.gains_over_alone(found.pairs):
                found.gains[tasks.index(each.mates[0]), tasks.index(each.task)] = each.found.mean
        if np.isfinite(found.gains[~np.eye(len(tasks), dtype=bool)]).any():
            found.groups = partition(found.gains, given.groups)
            if 1 < len(found.groups) < len(tasks):
                found.settings[GROUPS] = made.of_groups(found.groups)
                run([found.settings[GROUPS]], seeds)
    return found


def _within(given: Share, base: Mapping[str, Setting], storage: BaseStorage) -> tuple[int, int | None]:
    """Return how many seeds, and how many rounds of pairs, fit into the budget, by the times of the first runs.

    Networks of groups and of pairs are assumed to take as long as those of single tasks.
    """
    if not given.budget:
        return given.seeds, None
    seconds = {name: _seconds(setting, storage) for name, setting in base.items()}
    require(all(seconds.values()), "budget: a first run has failed or is not there, so the times are not known")
    each, least = sum(seconds.values()) + seconds[ALONE], min(LEAST, given.seeds)  # each: of a seed, with the groups
    seeds = min(given.seeds, int(60 * given.budget / each))
    needed = f"{least} seeds of all settings take about {math.ceil(least * each / 60)} minutes"
    require(seeds >= least, f"budget={given.budget:g}: {needed}")
    return seeds, int((60 * given.budget - seeds * each) / (seeds * seconds[ALONE]))


def _seconds(setting: Setting, storage: BaseStorage) -> float:
    study = study_of(setting.definition.name, storage)
    first = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])[:1] if study else []
    return float(first[0].user_attrs["seconds"]) if first else 0.0


def affinity_of(found: Measured) -> np.ndarray:
    """Return TAG's affinities in percent, means over the joint runs and the first half of each; NaN without any.

    Later the gradients of related tasks are mostly noise too.
    """
    files = [path / "conflict.csv" for path in found.runs({TOGETHER: found.settings[TOGETHER]})]
    tables = [pl.read_csv(file, schema_overrides={"value": pl.Float64}) for file in files if file.exists()]
    early = pl.col("step") <= pl.max_horizontal(pl.max("step") / 2, pl.min("step"))
    tables = [table.filter(early) for table in tables]
    return 100 * matrix(pl.concat(tables) if tables else as_table([]), "affinity", found.tasks)


def predicted_gain(found: Measured) -> float:
    """Return the mean over tasks of the gain that the groups were chosen by, in its percent."""
    return sum(sum(predicted(group, found.gains)) for group in found.groups) / len(found.tasks)
