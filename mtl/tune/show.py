"""Show a study: its best trials as a table, and the command that trains one of them again."""

from __future__ import annotations

import shlex

from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from mtl.checks import require
from mtl.cli.commands import program
from mtl.cli.results import number
from mtl.tune.queue import monitor_of
from mtl.tune.space import words

MOST = 10  # trials of a table
STATES = {TrialState.COMPLETE: "completed", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
STATES |= {TrialState.RUNNING: "running", TrialState.WAITING: "waiting"}


def best_trials(study: Study) -> list[FrozenTrial]:
    """Return the completed trials, the best first."""
    completed = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return sorted(completed, key=lambda trial: trial.value or 0.0, reverse=study.direction == StudyDirection.MAXIMIZE)


def show_best(study: Study) -> None:
    """Print the best trials of ``study`` and the command that trains the best one again."""
    console, trials, best = Console(), study.get_trials(deepcopy=False), best_trials(study)
    counts = {text: sum(trial.state == state for trial in trials) for state, text in STATES.items()}
    counted = ", ".join(f"{count} {text}" for text, count in counts.items() if count)
    table = Table(title=f"{study.study_name}: {counted}", title_justify="left")
    table.add_column("trial", justify="right")
    table.add_column(monitor_of(study), justify="right")
    table.add_column("parameters")
    for trial in best[:MOST]:
        table.add_row(str(trial.number), number(trial.value), " ".join(words(trial.params)))
    console.print(table)
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    for trial in failed[:MOST]:
        console.print(
            f"trial {trial.number} failed: {trial.user_attrs.get('error', '')}", markup=False, highlight=False
        )
    if best:
        show_trial(study, best[0].number)


def show_trial(study: Study, wanted: int) -> None:
    """Print what became of trial ``wanted``, its folder and the command that trains it again."""
    trials = study.get_trials(deepcopy=False)
    require(wanted < len(trials), f"show={wanted}: study {study.study_name} has {len(trials)} trials, the first is 0")
    trial, console = trials[wanted], Console()
    value = f", {number(trial.value)}" if trial.state == TrialState.COMPLETE else ""
    console.print(f"trial {wanted}: {STATES[trial.state]}{value}")
    if "command" in trial.user_attrs:
        console.print(trial.user_attrs["folder"], soft_wrap=True, highlight=False, markup=False)
        again = shlex.join([*program(), *trial.user_attrs["command"]])
        console.print(again, soft_wrap=True, highlight=False, markup=False)
