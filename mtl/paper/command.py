"""The command ``mtl reproduce``: the runs of a table of a paper, and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from mtl.checks import require
from mtl.files.run_files import RESULTS
from mtl.jobs.job import say
from mtl.jobs.setting import Setting, run_folder
from mtl.jobs.work import JobList, checked_runs, work, working
from mtl.paper.definition import Paper, Part, Row, read
from mtl.paper.page import redraw_page, write
from mtl.report.runs import numbers, read_results
from mtl.report.trials import Trials
from mtl.runs.console import with_progress_bar

# Options of mtl reproduce and mtl train, or prefixes of them, that do not change the results of a run
WITHOUT_EFFECT = (
    *("hydra.", "paths.", "trust=", "threads="),
    *("judge=", "max_failures=", "only=", "page=", "retries=", "scale=", "seed=", "show=", "storage="),
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
    all_rows = [row for stage in stages for row in stage]
    searched = [row for row in all_rows if paper.space_of(row)]
    alone = "nothing is searched, so there is nothing to store; workers share the folder of the runs, on one disk"
    require(bool(searched) or not cfg.storage, f"storage={cfg.storage}: {alone}")
    if searched:  # Optuna is an extra
        from mtl.tune.command import trial_overrides
        from mtl.tune.storage import opened
    for group in with_progress_bar(list(dict.fromkeys(row.group.key for row in all_rows)), "checking options"):
        rows = [row for row in all_rows if row.group.key == group]
        searches = [trial_overrides(paper.search(row)) for row in rows if row in searched]
        firsts[group] = checked_runs([*searches, *(paper.setting(row).overrides for row in rows)])[0]
    first = next(iter(firsts.values()))
    folder = Path(first.paths.output_dir) / "paper" / name / paper.file.scale
    with working(folder, cfg.show and not cfg.storage), ExitStack() as stack:
        worker = _Worker(paper, folder, cfg, firsts, searched and stack.enter_context(opened(cfg.storage, folder)))
        if not cfg.show:
            steps = list[tuple[list[Row], bool]]()
            for stage in stages:
                steps += [([row for row in stage if row in searched], True), (stage, False)]
            left = sum(len(rows) * worker.count(is_search) for rows, is_search in steps)
            for rows, is_search in steps:
                left -= len(rows) * worker.count(is_search)
                work([worker.source(row, is_search) for row in rows], cfg.max_failures, left)
        chosen = {row.key: worker.choose(row) for row in paper.rows()}
        searched_groups = {group.key: trials for group in paper.groups if (trials := worker.trials_of(group))}
    say("writing the report")
    changed = [override for override in (*command_overrides, *options) if not override.startswith(WITHOUT_EFFECT)]
    write(paper, chosen, searched_groups, folder, Path(cfg.page) if cfg.page else None, changed)


@dataclass(frozen=True)
class _Worker:
    """The searches and runs of ``paper``, in ``folder``, as lists of jobs."""

    paper: Paper
    folder: Path
    cfg: DictConfig
    firsts: Mapping[str, DictConfig]  # the configuration of a run of each group
    storage: Any  # of the studies, if anything is searched

    def count(self, is_search: bool) -> int:
        """Return the number of runs of a row, or of its search."""
        return self.paper.scale.n_trials if is_search else self.paper.scale.seeds or 0

    def study_of(self, row: Row) -> Any:
        """Return the study of a row's search; None if it has not begun, or nothing is searched."""
        if not self.paper.space_of(row):
            return None
        from mtl.tune.search import study_of

        return study_of(self.paper.search(row).name, self.storage)

    def choose(self, row: Row) -> tuple[list[str], int]:
        """Return the overrides of the search's best trial, and its number; ([], 0) if there is none.

        Trials within the method's limit come before those beyond it.
        """
        if (study := self.study_of(row)) is None:
            return [], 0
        from mtl.tune.command import best_trials
        from mtl.tune.space import write_overrides

        def is_beyond_limit(trial: Any) -> bool:
            measured = numbers(read_results(run_folder(self.folder, self.paper.search(row).label, trial.number))[0])
            return not all(measured.get(column, math.inf) <= limit for column, limit in row.method.limit.items())

        best = sorted(best_trials(study), key=is_beyond_limit)[:1]
        return (write_overrides(best[0].params), best[0].number) if best else ([], 0)

    def trials_of(self, group: Part) -> Trials | None:
        """Return the trials of the searches in a group; None if no search has begun."""
        studies = {}
        for row in self.paper.rows_of(group):
            if (study := self.study_of(row)) and study.get_trials(deepcopy=False):
                studies[row.method.name] = study, self.folder / self.paper.search(row).label
        if not studies:
            return None
        from mtl.tune.trials import read_trials

        return read_trials(studies)

    def source(self, row: Row, is_search: bool) -> JobList:
        """Return the jobs of a row's search, or of its runs; the runs that they refer to have ended."""
        rows = {text: self.paper.rows_by_key[key] for text, key in self.paper.references(row).items()}
        references = {text: self.setting(source).label for text, source in rows.items()}
        first = self.firsts[row.group.key]
        common: Any = {"folder": self.folder, "monitor": str(first.monitor), "count": self.count(is_search)}
        common |= {"retries": self.cfg.retries, "seed": self.paper.file.seed, "references": references}
        if is_search:
            from mtl.tune.search import Search

            source: JobList = Search(setting=self.paper.search(row), storage=self.storage, **common)
        else:
            source = JobList(setting=self.setting(row), **common)
        if references:
            self._rank(source, first)
        return source

    def setting(self, row: Row) -> Setting:
        """Return the setting of a row's runs, with the overrides that its search has chosen."""
        return self.paper.setting(row, *self.choose(row))

    def _rank(self, source: JobList, first: DictConfig) -> None:
        """Write the scores of the neurons, if missing, of each dense run that the jobs split into experts."""
        overrides = {override for number in range(source.count) for override in source.overrides(number)}
        for override in (override for override in overrides if override.startswith(NEURON_SCORES)):
            file = Path(override.partition("=")[2].strip("'"))
            if (file.parent / RESULTS).exists() and not file.exists():
                from mtl.use.neurons import write_neuron_scores  # takes seconds, and few tables need it

                say(f"{file}: ranking the neurons")
                write_neuron_scores(file.parent, file, first.trust, str(first.paths.data_dir))
