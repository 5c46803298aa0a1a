"""The command ``mtl reproduce``, without composing configurations, for which the caller passes a function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import optuna
from omegaconf import DictConfig
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from mtl.checks import require
from mtl.paper.definition import Paper, Part, read
from mtl.paper.page import write
from mtl.report.runs import numbers, read_results
from mtl.report.trials import Trials
from mtl.runs.console import make_lasting
from mtl.tune.command import Composer, best_trials, checked, queues_of, say
from mtl.tune.launch import Launcher, run_folder
from mtl.tune.queue import study_of
from mtl.tune.space import words
from mtl.tune.storage import open_storage, reached
from mtl.tune.trials import read_trials
from mtl.tune.work import stoppable, work

# Options of mtl reproduce and mtl train, or prefixes of them, that do not change the results of a run
HARMLESS = (
    *("hydra.", "paths.", "trust=", "threads="),
    *("heartbeat=", "max_failures=", "only=", "page=", "retries=", "scale=", "seed=", "show=", "storage="),
)


def reproduce(
    cfg: DictConfig,
    name: str,
    options: Sequence[str],
    compose: Composer,
    program: Sequence[str],
    own: Sequence[str] = (),
) -> None:
    """Run what ``cfg``, the composed ``conf/reproduce.yaml``, asks for, and write and print the report.

    ``name``: the name of the file in ``conf/paper``. ``options``: options of mtl train for all runs. ``compose(words)``
    returns the checked configuration of a run. ``program``: the words of the command mtl train. ``own``: the other
    words of the command line, whose values are in ``cfg``; the report names the words that change the file's runs.
    """
    make_lasting()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the workers' own lines say the same
    paper = read(cfg, name, options)
    searched = [pair for pair in paper.pairs() if paper.space_of(pair[1])]
    searches = [paper.definition(*pair, chosen=None) for pair in searched]
    first = checked([*searches, *(paper.definition(*pair, chosen=[]) for pair in paper.pairs())], compose)[0]
    folder, monitor = Path(first.paths.output_dir) / "paper" / name / paper.file.scale, str(first.monitor)
    require(not cfg.show or cfg.storage or (folder / "study.db").exists(), f"{folder}: nothing has been run yet")
    storage = open_storage(cfg.storage, folder)
    with reached(cfg.storage, folder):
        if not cfg.show:
            launch = Launcher(program, folder)
            with stoppable():
                work(queues_of(searches, monitor, storage, cfg, paper.scale.n_trials), launch, cfg.max_failures, say)
                if seeds := paper.scale.seeds:
                    found = [paper.definition(*pair, *choice(paper, *pair, storage, folder)) for pair in paper.pairs()]
                    work(queues_of(found, monitor, storage, cfg, seeds), launch, cfg.max_failures, say)
        chosen = {(group.key, gate.key): choice(paper, group, gate, storage, folder) for group, gate in paper.pairs()}
        searched_groups = {
            group.key: trials for group in paper.groups if (trials := searches_of(paper, group, storage, folder))
        }
    changed = [word for word in (*own, *options) if not word.startswith(HARMLESS)]
    write(paper, chosen, searched_groups, folder, Path(cfg.page) if cfg.page else None, changed)


def choice(paper: Paper, group: Part, gate: Part, storage: BaseStorage, folder: Path) -> tuple[list[str], int]:
    """Return the words of the search's best trial, and its number; ([], 0) without a search.

    Trials within the gate's limit come before those beyond it.
    """
    if not paper.space_of(gate):
        return [], 0
    definition = paper.definition(group, gate, chosen=None)

    def beyond(trial: FrozenTrial) -> bool:
        found = numbers(read_results(run_folder(folder, definition.label, trial.number))[0])
        return not all(found.get(column, math.inf) <= most for column, most in gate.limit.items())

    study = study_of(definition.name, storage)
    best = sorted(best_trials(study) if study else [], key=beyond)[:1]
    return (words(best[0].params), best[0].number) if best else ([], 0)


def searches_of(paper: Paper, group: Part, storage: BaseStorage, folder: Path) -> Trials | None:
    """Return the trials of the searches in a group; None if no search has begun."""
    found = {}
    for gate in paper.gates:
        if paper.space_of(gate):
            definition = paper.definition(group, gate, chosen=None)
            study = study_of(definition.name, storage)
            if study and study.get_trials(deepcopy=False):
                found[gate.name] = (study, folder / definition.label)
    return read_trials(found) if found else None
