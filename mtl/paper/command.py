"""The command ``mtl reproduce``, without composing configurations, for which the caller passes a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from mtl.config.resume import Composer
from mtl.files.records import RESULTS
from mtl.paper.definition import Pair, Paper, Part, read
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


def reproduce(
    cfg: DictConfig,
    name: str,
    options: Sequence[str],
    compose: Composer,
    program: Callable[[], object],
    command_overrides: Sequence[str] = (),
) -> None:
    """Run what ``cfg``, the composed ``conf/reproduce.yaml``, asks for, and write and print the report.

    ``name``: the name of the file in ``conf/paper``. ``options``: options of mtl train for all runs.
    ``compose(overrides)`` returns the checked configuration of a run. ``program``: see ``Launcher``.
    ``command_overrides``: the other overrides of the command line, whose values are in ``cfg``; the report names the
    overrides that change the file's runs.
    """
    paper = read(cfg, name, options)
    if cfg.judge:
        return redraw_page(paper, Path(cfg.judge))
    stages, firsts = paper.stages(), {}
    groups = list(dict.fromkeys(group.key for stage in stages for group, _ in stage))
    for group in with_progress_bar(groups, "checking options"):
        pairs = [pair for stage in stages for pair in stage if pair[0].key == group]
        searches = [paper.definition(*pair, chosen=None) for pair in pairs if paper.space_of(*pair)]
        firsts[group] = checked([*searches, *(paper.definition(*pair, chosen=[]) for pair in pairs)], compose)[0]
    first = next(iter(firsts.values()))
    folder = Path(first.paths.output_dir) / "paper" / name / paper.file.scale
    with working(cfg, folder, cfg.show) as storage:
        if not cfg.show:
            worker = _Worker(paper, storage, Launcher(program, folder), cfg, firsts)
            steps = [
                (pairs, search)
                for stage in stages
                for pairs, search in (([pair for pair in stage if paper.space_of(*pair)], True), (stage, False))
                if worker.count(search)
            ]
            left = sum(len(pairs) * worker.count(search) for pairs, search in steps)
            for pairs, search in steps:
                left -= len(pairs) * worker.count(search)
                worker.work(pairs, search, left)
        chosen = {(group.key, gate.key): choice(paper, group, gate, storage, folder) for group, gate in paper.pairs()}
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

    def work(self, pairs: Sequence[Pair], search: bool, later: int) -> None:
        """Do the searches or the runs of some rows; the runs that they refer to have ended. ``later``: see ``work``."""
        count = self.count(search)
        studies: list[tuple[Definition, str]] = []
        for group, gate in pairs:
            sources = {
                text: self.planned(*self.paper.rows_by_key[key]).label
                for text, key in self.paper.sources(group, gate).items()
            }
            definition, first = replace(self.planned(group, gate, search), sources=sources), self.firsts[group.key]
            if sources:
                self._rank(definition, count, first)
            studies.append((definition, str(first.monitor)))
        run_trials(studies, count, self.cfg, self.storage, self.launch, later)

    def planned(self, group: Part, gate: Part, search: bool = False) -> Definition:
        """Return the study of a row's search, or of its runs with the overrides that the search has chosen."""
        if search:
            return self.paper.definition(group, gate, chosen=None)
        return self.paper.definition(group, gate, *choice(self.paper, group, gate, self.storage, self.launch.folder))

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


def choice(paper: Paper, group: Part, gate: Part, storage: BaseStorage, folder: Path) -> tuple[list[str], int]:
    """Return the overrides of the search's best trial, and its number; ([], 0) without a search.

    Trials within the gate's limit come before those beyond it.
    """
    if not paper.space_of(group, gate):
        return [], 0
    definition = paper.definition(group, gate, chosen=None)

    def beyond(trial: FrozenTrial) -> bool:
        measured = numbers(read_results(run_folder(folder, definition.label, trial.number))[0])
        return not all(measured.get(column, math.inf) <= most for column, most in gate.limit.items())

    study = study_of(definition.name, storage)
    best = sorted(best_trials(study) if study else [], key=beyond)[:1]
    return (write_overrides(best[0].params), best[0].number) if best else ([], 0)


def searches_of(paper: Paper, group: Part, storage: BaseStorage, folder: Path) -> Trials | None:
    """Return the trials of the searches in a group; None if no search has begun."""
    studies = {}
    for gate in paper.gates_of(group):
        if paper.space_of(group, gate):
            definition = paper.definition(group, gate, chosen=None)
            study = study_of(definition.name, storage)
            if study and study.get_trials(deepcopy=False):
                studies[gate.name] = (study, folder / definition.label)
    return read_trials(studies) if studies else None
