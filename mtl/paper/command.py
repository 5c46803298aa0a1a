"""The command ``mtl reproduce``: the runs of a table of a paper, and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from mtl.files.records import RESULTS
from mtl.paper.definition import Paper, Part, Row, read
from mtl.paper.page import redraw_page, write
from mtl.report.runs import numbers, read_results
from mtl.report.trials import Trials
from mtl.runs.console import with_progress_bar
from mtl.tune.command import best_trials, checked, run_trials, say, working
from mtl.tune.definition import Definition
from mtl.tune.launch import Launcher, run_folder
from mtl.tune.queue import study_of
from mtl.tune.space import write_overrides
from mtl.tune.trials import read_trials

# Options of mtl reproduce and mtl train, or prefixes of them, that do not change the results of a run
WITHOUT_EFFECT = (
    *("hydra.", "paths.", "trust=", "threads="),
    *("heartbeat=", "judge=", "max_failures=", "only=", "page=", "retries=", "scale=", "seed=", "show=", "storage="),
)

NEURON_SCORES = "network.neuron_scores="  # the option whose file is computed from the dense run in the same folder


def reproduce(cfg: DictConfig, name: str, options: Sequence[str], command_overrides: Sequence[str] = ()) -> None:
    """Run what ``cfg``, the composed ``conf/reproduce.yaml``, asks for, and write and print the report.

    ``name``: the name of the file in ``conf/paper``. ``options``: options of mtl train for all runs.
    ``command_overrides``: the other overrides of the command line, whose values are in ``cfg``; the report names the
    overrides that change the file's runs.
    """
    paper = read(cfg, name, options)
    if cfg.judge:
        return redraw_page(paper, Path(cfg.judge))
    stages, firsts = paper.stages(), {}
    groups = list(dict.fromkeys(row.group.key for stage in stages for row in stage))
    for group in with_progress_bar(groups, "checking options"):
        rows = [row for stage in stages for row in stage if row.group.key == group]
        searches = [paper.definition(row, chosen=None) for row in rows if paper.space_of(row)]
        firsts[group] = checked([*searches, *(paper.definition(row, chosen=[]) for row in rows)])[0]
    first = next(iter(firsts.values()))
    folder = Path(first.paths.output_dir) / "paper" / name / paper.file.scale
    with working(cfg, folder, cfg.show) as storage:
        if not cfg.show:
            worker = _Worker(paper, storage, Launcher(folder), cfg, firsts)
            steps = [
                (rows, search)
                for stage in stages
                for rows, search in (([row for row in stage if paper.space_of(row)], True), (stage, False))
                if worker.count(search)
            ]
            left = sum(len(rows) * worker.count(search) for rows, search in steps)
            for rows, search in steps:
                left -= len(rows) * worker.count(search)
                worker.work(rows, search, left)
        chosen = {row.key: choose(paper, row, storage, folder) for row in paper.rows()}
        searched_groups = {
            group.key: trials for group in paper.groups if (trials := searches_of(paper, group, storage, folder))
        }
    say("writing the report")
    changed = [override for override in (*command_overrides, *options) if not override.startswith(WITHOUT_EFFECT)]
    write(paper, chosen, searched_groups, folder, Path(cfg.page) if cfg.page else None, changed)


@dataclass(frozen=True)
class _Worker:
    """Does the searches and runs of ``paper``; ``firsts``: the configuration of a run of each group."""

    paper: Paper
    storage: BaseStorage
    launch: Launcher
    cfg: DictConfig
    firsts: Mapping[str, DictConfig]

    def count(self, search: bool) -> int:
        """Return the number of runs of a row, or of its search."""
        return self.paper.scale.n_trials if search else self.paper.scale.seeds or 0

    def work(self, rows: Sequence[Row], search: bool, later: int) -> None:
        """Do the searches or the runs of some rows; the runs that they refer to have ended. ``later``: see ``work``."""
        count = self.count(search)
        studies: list[tuple[Definition, str]] = []
        for row in rows:
            sources = {
                text: self.planned(self.paper.rows_by_key[key]).label
                for text, key in self.paper.references(row).items()
            }
            definition, first = replace(self.planned(row, search), sources=sources), self.firsts[row.group.key]
            if sources:
                self._rank(definition, count, first)
            studies.append((definition, str(first.monitor)))
        run_trials(studies, count, self.cfg, self.storage, self.launch, later)

    def planned(self, row: Row, search: bool = False) -> Definition:
        """Return the study of a row's search, or of its runs with the overrides that the search has chosen."""
        chosen = (None,) if search else choose(self.paper, row, self.storage, self.launch.folder)
        return self.paper.definition(row, *chosen)

    def _rank(self, definition: Definition, count: int, first: DictConfig) -> None:
        """Write the importance of neurons, if missing, of each dense run that ``count`` trials split into experts."""
        overrides = [override for number in range(count) for override in self.launch.overrides(definition, number)]
        for file in {
            Path(override.partition("=")[2].strip("'")) for override in overrides if override.startswith(NEURON_SCORES)
        }:
            if (file.parent / RESULTS).exists() and not file.exists():
                from mtl.use.neurons import write_neuron_scores  # takes seconds, and few tables need it

                say(f"{file}: ranking the neurons")
                write_neuron_scores(file.parent, file, first.trust, str(first.paths.data_dir))


def choose(paper: Paper, row: Row, storage: BaseStorage, folder: Path) -> tuple[list[str], int]:
    """Return the overrides of the search's best trial, and its number; ([], 0) without a search.

    Trials within the method's limit come before those beyond it.
    """
    if not paper.space_of(row):
        return [], 0
    definition = paper.definition(row, chosen=None)

    def is_beyond_limit(trial: FrozenTrial) -> bool:
        measured = numbers(read_results(run_folder(folder, definition.label, trial.number))[0])
        return not all(measured.get(column, math.inf) <= limit for column, limit in row.method.limit.items())

    study = study_of(definition.name, storage)
    best = sorted(best_trials(study) if study else [], key=is_beyond_limit)[:1]
    return (write_overrides(best[0].params), best[0].number) if best else ([], 0)


def searches_of(paper: Paper, group: Part, storage: BaseStorage, folder: Path) -> Trials | None:
    """Return the trials of the searches in a group; None if no search has begun."""
    studies = {}
    for row in paper.rows_of(group):
        if paper.space_of(row):
            definition = paper.definition(row, chosen=None)
            study = study_of(definition.name, storage)
            if study and study.get_trials(deepcopy=False):
                studies[row.method.name] = (study, folder / definition.label)
    return read_trials(studies) if studies else None
