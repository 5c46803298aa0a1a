"""The command ``mtl tune``: its trials, and the tables of the best."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import optuna
from omegaconf import DictConfig
from optuna.samplers import RandomSampler
from optuna.study import Study, StudyDirection, create_study
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from mtl.checks import require
from mtl.files.formatting import number
from mtl.files.tables import Table
from mtl.jobs.setting import run_folder
from mtl.jobs.work import JobList, checked_runs, work, working
from mtl.report.runs import read_results
from mtl.runs.commands import run_command
from mtl.tune import definition as definitions
from mtl.tune.search import Search, monitor_of, study_of
from mtl.tune.space import distributions, short, write_overrides
from mtl.tune.storage import opened

MOST = 10  # trials in a table
STATES = {TrialState.COMPLETE: "completed", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
STATES |= {TrialState.RUNNING: "running", TrialState.WAITING: "waiting"}
optuna.logging.set_verbosity(optuna.logging.ERROR)  # the workers' own lines say the same


def tune(cfg: DictConfig, name: str, gates: Sequence[str], options: Sequence[str], show: str | None) -> None:
    """Work on the studies of ``cfg``, the composed ``conf/tune.yaml``, and print their best trials.

    ``name``: the name of the study's file. ``gates``, ``options``: its methods to search, and overrides for all runs.
    ``show``: only print the "best" trials, or the trial with this number.
    """
    require(show is None or show == "best" or show.isdecimal(), f"show={show}: must be best or the number of a trial")
    searches = definitions.read(cfg, name, gates, options)
    title = searches[0].name.partition("/")[0]
    first = checked_runs([trial_overrides(search) for search in (searches[:1] if show else searches)])[0]
    folder = Path(first.paths.output_dir) / "studies" / title
    with working(folder, show and not cfg.storage), opened(cfg.storage, folder) as storage:
        if show is None:
            common = {"folder": folder, "monitor": str(first.monitor), "retries": cfg.retries, "seed": cfg.seed}
            tried = searches if cfg.try_defaults else []
            sources: list[JobList] = [JobList(setting=search.defaults(), count=1, **common) for search in tried]
            sources += [Search(setting=search, count=cfg.n_trials, storage=storage, **common) for search in searches]
            work(sources, cfg.max_failures)
        pairs = [(study_of(search.name, storage), folder / search.name.partition("/")[2]) for search in searches]
        studies = {study: part for study, part in pairs if study}
        require(bool(studies), f"study {title}: nothing has been run yet {' '.join(gates)}".rstrip())
        if show and show != "best":
            require(len(studies) == 1, f"show={show}: each method has a trial of this number; add gate=NAME")
            return show_trial(next(iter(studies)), int(show))
        for study, part in studies.items():
            show_best(study, run_folder(part, definitions.DEFAULTS, 0))


def trial_overrides(definition: definitions.Definition) -> list[str]:
    """Return the overrides of a first trial of a study, to be checked before any trial runs."""
    trial = create_study(sampler=RandomSampler(seed=0)).ask(distributions(definition.space))
    return [*definition.overrides, *write_overrides(trial.params)]


def best_trials(study: Study) -> list[FrozenTrial]:
    """Return the completed trials, the best first."""
    completed = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return sorted(completed, key=lambda trial: trial.value or 0.0, reverse=study.direction == StudyDirection.MAXIMIZE)


def show_best(study: Study, defaults: Path) -> None:
    """Print the best trials of ``study``, the command of the best, and the value of the run in ``defaults``."""
    console, trials, best = Console(), study.get_trials(deepcopy=False), best_trials(study)
    counts = {text: sum(trial.state == state for trial in trials) for state, text in STATES.items()}
    counted = ", ".join(f"{count} {text}" for text, count in counts.items() if count)
    rows = [[str(trial.number), number(trial.value), short(trial.params)] for trial in best[:MOST]]
    table = Table(["trial", monitor_of(study), "parameters"], rows, f"{study.study_name}: {counted}")
    console.print(table)
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    for trial in failed[:MOST]:
        line = f"trial {trial.number} failed: {trial.user_attrs.get('error', '')}"
        console.print(line, markup=False, highlight=False)
    if best:
        show_trial(study, best[0].number)
    results = read_results(defaults)[0]
    if results and results.best is not None:
        signed = -1 if study.direction == StudyDirection.MAXIMIZE else 1
        is_best = all(signed * results.best <= signed * (trial.value or 0.0) for trial in best)
        console.print(f"with the defaults: {number(results.best)}{', better than each trial' * is_best}")


def show_trial(study: Study, wanted: int) -> None:
    """Print the outcome of trial ``wanted``, its folder and the command that trains it again."""
    trials = study.get_trials(deepcopy=False)
    require(wanted < len(trials), f"show={wanted}: study {study.study_name} has {len(trials)} trials, the first is 0")
    trial, console = trials[wanted], Console()
    value = f", {number(trial.value)}" if trial.state == TrialState.COMPLETE else ""
    console.print(f"trial {wanted}: {STATES[trial.state]}{value}")
    if {"command", "folder"} <= trial.user_attrs.keys():
        console.print(trial.user_attrs["folder"], soft_wrap=True, highlight=False, markup=False)
        console.print(run_command(trial.user_attrs["command"]), soft_wrap=True, highlight=False, markup=False)
